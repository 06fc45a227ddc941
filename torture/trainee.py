"""A small training run that torchrun starts on each rank, and that somebody stops; ``parts/stops.py`` does.

    torchrun ... -m torture.trainee '{"library": "holdfast", "root": ..., "notes": ..., ...}'

Its losses depend on all that a checkpoint has to bring back: weights, momentum, the random generator of each rank, and
which batches were used. It writes each of them into a file, bit by bit, and notes where it is.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from holdfast import CheckpointManager, Every, Latest, Rng, StopOn, ignore_stop_signals

STOP_FILE = "STOP"
_WIDTH = 24
_SAVE_EVERY = 20
_LONGEST_EVALUATION_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run is told: where its checkpoints and notes go, how many steps there are, and how it goes about them."""

    library: str
    root: str
    notes: str
    steps: int
    pause_s: float = 0.0
    evaluates: bool = False
    loader_workers: int = 0
    asynchronous: bool | Literal["process"] = True


class Batches(Dataset[torch.Tensor]):
    """A batch for each step and rank."""

    def __init__(self, rank: int, steps: int) -> None:
        self._rank = rank
        self._steps = steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + self._rank)
        return torch.randn(8, _WIDTH, generator=generator)


def _note(notes: str, name: str, text: object = "") -> None:
    draft = Path(notes, f".{name}")
    draft.write_text(str(text))
    draft.rename(Path(notes, name))


def _begin_loading(notes: str, rank: int, worker: int) -> None:
    """What a loader worker does first. Before that, it dies of the signals that its rank gets."""
    ignore_stop_signals()
    _note(notes, f"loading-{worker}-{rank}")


class Training:
    """The model, and one step of it at a time, on all ranks."""

    def __init__(self, run: Run) -> None:
        self.rank = dist.get_rank()
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.Tanh(), torch.nn.Linear(_WIDTH, 1))
        # By hand: torch's own optimizers import a compiler, which takes longer than the whole run.
        self.momentum = {name: torch.zeros_like(weight) for name, weight in self.model.named_parameters()}
        torch.manual_seed(100 + self.rank)
        self._run = run
        self._losses = open(Path(run.notes, f"losses-{self.rank}"), "a")  # noqa: SIM115

    def batches(self, first: int, worker_init_fn: Callable[[int], None] | None) -> Iterator[tuple[int, torch.Tensor]]:
        """The steps from ``first`` on, with their batches."""
        loader = DataLoader(
            Batches(self.rank, self._run.steps),
            batch_size=None,
            sampler=range(first, self._run.steps),
            num_workers=self._run.loader_workers,
            generator=torch.Generator(),  # not the global one, which is part of the state
            worker_init_fn=worker_init_fn,
        )
        return zip(range(first, self._run.steps), loader, strict=True)

    def step(self, step: int, batch: torch.Tensor) -> None:
        """Train on a batch, and write the loss down."""
        noise = torch.rand(len(batch), 1)
        loss = ((self.model(batch) - noise) ** 2).mean()
        self.model.zero_grad()
        loss.backward()
        for name, weight in self.model.named_parameters():
            assert weight.grad is not None
            dist.all_reduce(weight.grad)
            self.momentum[name].mul_(0.9).add_(weight.grad)
            weight.data.add_(self.momentum[name], alpha=-0.01)
        self._losses.write(f"{step} {loss.item().hex()}\n")
        self._losses.flush()
        time.sleep(self._run.pause_s)

    def note(self, name: str, text: object = "") -> None:
        """Let whoever watches know that this rank has come so far."""
        _note(self._run.notes, f"{name}-{self.rank}", text)

    def evaluate(self, is_over: Callable[[], bool]) -> None:
        """Take long, without a word to the other ranks, unless somebody says that it is over."""
        self.note("evaluating")
        end = time.monotonic() + _LONGEST_EVALUATION_S
        while not is_over() and time.monotonic() < end:
            time.sleep(0.02)


def with_holdfast(run: Run, training: Training) -> int | None:
    """The step at which the run was stopped; None where it came to its end."""
    state = {"model": training.model, "momentum": training.momentum, "rng": Rng()}
    with CheckpointManager(
        run.root,
        save=Every(steps=_SAVE_EVERY),
        keep=[Latest(2)],
        stop=StopOn(file=Path(run.notes, STOP_FILE)),
        asynchronous=run.asynchronous,
    ) as checkpoints:
        training.note("ready", os.getpid())
        first = checkpoints.resume(state).next_step
        for step, batch in training.batches(first, partial(_begin_loading, run.notes, training.rank)):
            training.step(step, batch)
            checkpoints.save(step, state)
            if run.evaluates and step == first + 1:
                training.evaluate(checkpoints.stop_requested)
            if checkpoints.should_stop(step):
                return step
    return None


def by_hand(run: Run, training: Training) -> int | None:
    """The same over torch.distributed.checkpoint, as many write it: a flag on each rank."""
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    is_asked = False

    def handle(number: int, frame: object) -> None:
        nonlocal is_asked
        is_asked = True

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGUSR1, handle)
    state: dict[str, Any] = {"model": training.model.state_dict(), "momentum": training.momentum}
    saved = [int(path.parent.name.partition("-")[2]) for path in Path(run.root).glob("step-*/.metadata")]
    first = 0
    if saved:
        dcp_load(state, checkpoint_id=f"{run.root}/step-{max(saved)}")
        first = max(saved) + 1
    training.note("ready", os.getpid())
    for step, batch in training.batches(first, None):
        training.step(step, batch)
        if run.evaluates and step == first + 1:
            training.evaluate(lambda: is_asked)  # noqa: B023 - it is meant to change
        is_asked = is_asked or Path(run.notes, STOP_FILE).exists()
        if is_asked or step % _SAVE_EVERY == 0:
            dcp_save(state, checkpoint_id=f"{run.root}/step-{step}")
        if is_asked:
            return step
    return None


def without_checkpoints(run: Run, training: Training) -> None:
    for step, batch in training.batches(0, None):
        training.step(step, batch)


def main() -> None:
    """What one rank does; if it fails, it notes why, because what torchrun says in the end does not."""
    run = Run(**json.loads(sys.argv[1]))
    try:
        dist.init_process_group("gloo")
        training = Training(run)
        stopped = {"holdfast": with_holdfast, "torch": by_hand, "": without_checkpoints}[run.library](run, training)
        training.note("over", stopped)
        dist.barrier()  # ranks end in good order, or gloo may abort one
        dist.destroy_process_group()
    except BaseException:
        _note(run.notes, f"died-{os.environ['RANK']}", traceback.format_exc())
        raise


if __name__ == "__main__":
    main()
