"""accelerate: what an Accelerator has prepared is saved and loaded as one checkpoint, and as the steps of a run."""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["ACCELERATE_USE_CPU"] = "true"

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedType,
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
)
from client import CannotRun, assert_same, refusal, run_client, whole
from measuring import SAVES, Cost

import holdfast
from holdfast import AsyncSave, CheckpointManager, Every, Latest, SaveOptions, Steps, StopOn
from holdfast.errors import MismatchError, NotACheckpointError
from holdfast.integrations.accelerate import load_state, save_state, state_of

STEPS = 8


class Average:
    """An object that is registered for checkpointing: the mean of the losses so far."""

    def __init__(self) -> None:
        self.total, self.count = torch.zeros(()), 0

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total.clone(), "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.count = state["total"], state["count"]


class Training:
    """A model, optimizer, schedule, stateful loader and registered object, as an Accelerator has prepared them."""

    def __init__(self, accelerator: Accelerator | None = None) -> None:
        self.accelerator = accelerator or Accelerator(
            cpu=True,
            dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True),
        )
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 16),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.2),
            torch.nn.BatchNorm1d(16),
            torch.nn.Linear(16, 4),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        rows = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
        batch = 8 // self.accelerator.num_processes
        # 5 steps are an epoch: a run goes on in the middle of one. A loader without a generator of its own would take a
        # seed from torch's when it begins, which it does once more in a run that goes on.
        own = torch.Generator().manual_seed(2)
        loader = torch.utils.data.DataLoader(list(rows), batch_size=batch, shuffle=True, generator=own)
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, optimizer, schedule, loader
        )
        self.average = Average()
        self.accelerator.register_for_checkpointing(self.average)
        self._batches = self._endless()

    def _endless(self) -> Iterator[torch.Tensor]:
        while True:
            yield from self.loader

    def step(self) -> str:
        """Train one step; the mean loss of all ranks, exactly."""
        loss = self.model(next(self._batches)).square().mean()
        self.optimizer.zero_grad()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.schedule.step()
        mean = self.accelerator.reduce(loss.detach(), "mean")
        self.average.total = self.average.total + mean
        self.average.count += 1
        return float(mean).hex()

    def parts(self) -> dict[str, Any]:
        """What training has changed, copied."""
        unwrapped = self.accelerator.unwrap_model(self.model)
        buffers = {name for name, _ in unwrapped.named_buffers()}
        weights = {name: value for name, value in unwrapped.state_dict().items() if name not in buffers}
        moments, schedule = self.optimizer.state_dict(), self.schedule.state_dict()
        return whole([dict(weights), moments, schedule, self.average.state_dict(), self.loader.iteration])


def train(
    training: Training,
    root: str,
    *,
    resume: bool = False,
    then: Callable[[int], object] = int,
    options: SaveOptions | None = None,
    stop: StopOn | None = None,
    steps: int = STEPS,
    every: int = 2,
    keep: Any = (),
) -> tuple[int | None, dict[str, str]]:
    """Train with a CheckpointManager; the step that it went on from, and the losses."""
    losses: dict[str, str] = {}
    manager = CheckpointManager(root, save=Every(steps=every), keep=keep, stop=stop, options=options or SaveOptions())
    with manager as checkpoints:
        resumed = checkpoints.resume(dict(state_of(training.accelerator))) if resume else None
        for step in range(1 if resumed is None else resumed.next_step, steps + 1):
            losses[str(step)] = training.step()
            then(step)
            checkpoints.save(step, state_of(training.accelerator))
            if checkpoints.should_stop(step):
                break
    return None if resumed is None else resumed.step, losses


def note_of(directory: str) -> Path:
    """Where the losses of the unbroken run are."""
    return Path(directory, "losses.json")


def unbroken(directory: str) -> str:
    """Train without a break, and note the losses for later launches."""
    training = Training()
    _, losses = train(training, f"{directory}/unbroken")
    if training.accelerator.is_main_process:
        note_of(directory).write_text(json.dumps(losses))
    return f"{STEPS} steps"


def killed(directory: str) -> str:
    """Have all ranks die while step 6 is written and not yet published."""
    written: list[AsyncSave] = []

    def die(handle: AsyncSave) -> None:
        if handle.phase == "writing" and handle not in written:
            written.append(handle)
        if len(written) == 3:  # called by the thread that is about to write
            os.kill(os.getpid(), signal.SIGKILL)

    train(Training(), f"{directory}/run", options=SaveOptions(progress=die))
    return "it is still alive"


def resumed(directory: str) -> str:
    """Resume what was killed; the losses are those of the unbroken run."""
    expected = json.loads(note_of(directory).read_text())
    training = Training()
    step, losses = train(training, f"{directory}/run", resume=True)
    assert step == 4, step
    assert losses == {number: loss for number, loss in expected.items() if int(number) > 4}, (losses, expected)
    assert training.average.count == STEPS
    return "resumed from step 4 in the middle of an epoch, 4 losses bit-equal"


def resized(directory: str) -> str:
    """On other ranks, loaders and generators are refused, or left as they are; the rest goes on."""
    path = f"{directory}/unbroken/step-8"
    kept, training = holdfast.read(path), Training()
    before = training.parts()
    said = refusal(MismatchError, lambda: load_state(training.accelerator, path))
    assert "on_resize" in said, said
    assert_same(training.parts(), before)
    report = load_state(training.accelerator, path, on_resize="fresh")
    weights, moments, schedule, average, _ = training.parts()
    assert_same(weights, {name: kept["models"][0][name] for name in weights})
    assert_same(moments["state"], whole(kept["optimizers"][0]["state"]))
    assert schedule["last_epoch"] == kept["schedulers"][0]["last_epoch"]
    assert average["count"] == kept["objects"][0]["count"] == STEPS
    training.step()
    outcomes = ", ".join(f"{name} {outcome}" for name, outcome in sorted(report.per_rank.items()))
    return f"a step of other ranks on {training.accelerator.num_processes}: {outcomes}"


def saved(directory: str) -> str:
    """What save_state saves, in the background or not, is what load_state brings back, into what was made anew too."""
    training = Training()
    for _ in range(3):
        training.step()
    parts = training.parts()
    assert save_state(training.accelerator, f"{directory}/one") is None
    handle = save_state(training.accelerator, f"{directory}/two", asynchronous=True)
    losses = [training.step() for _ in range(3)]
    assert handle is not None
    handle.result()
    for path in (f"{directory}/one", f"{directory}/two"):
        new = Training()
        load_state(new.accelerator, path)
        assert_same(new.parts(), parts)
        assert [new.step() for _ in range(3)] == losses, path
    assert holdfast.verify(f"{directory}/one").ok
    return "save_state and load_state, asynchronous or not: 3 losses bit-equal"


def rotated(directory: str) -> str:
    """While the next step is written, old ones go, and never the last one; the end is exported."""
    seen: list[list[int]] = []
    root, training = f"{directory}/rotated", Training()
    train(
        training,
        root,
        every=1,
        keep=[Latest(1)],
        then=lambda _: seen.append([each.step for each in Steps(root).steps()]),
    )
    training.accelerator.wait_for_everyone()  # the first rank is the one that deletes
    assert [step.step for step in Steps(root).steps()] == [STEPS]
    first = seen.index(next(filter(None, seen)))
    assert all(seen[first:]), seen
    model = training.accelerator.unwrap_model(training.model)
    buffers = [name for name, _ in model.named_buffers()]  # each rank has its own
    holdfast.hf.export(model, f"{directory}/exported", options=holdfast.hf.ExportOptions(replica_check=buffers))
    target = {name: torch.empty_like(value) for name, value in model.state_dict().items()}
    holdfast.load(target, f"{directory}/exported")
    assert_same(training.parts()[0], {name: target[name] for name in training.parts()[0]})
    return f"step {STEPS} is left, and exported"


def stopped(directory: str) -> str:
    """A signal to one rank stops all of them at one step, which is saved though it is not due."""
    training = Training()

    def signal_one(step: int) -> None:
        if step == 3 and training.accelerator.process_index == training.accelerator.num_processes - 1:
            signal.raise_signal(signal.SIGUSR1)

    root, stop = f"{directory}/stopped", StopOn(signals=("SIGUSR1",))
    _, losses = train(training, root, then=signal_one, stop=stop, steps=1000, every=1000)
    latest = Steps(root).latest()
    assert latest is not None
    assert 3 <= latest.step == max(map(int, losses)) < 1000, latest
    return "one signal, and all ranks stop at one step"


def theirs(directory: str) -> str:
    """A checkpoint of accelerate itself is refused with a word, and what the word says works."""
    training, path = Training(), f"{directory}/theirs"
    training.step()
    training.accelerator.save_state(path)
    parts = training.parts()
    new = Training()
    said = refusal(NotACheckpointError, lambda: load_state(new.accelerator, path))
    assert "accelerator.load_state" in said, said
    new.accelerator.load_state(path)
    save_state(new.accelerator, f"{directory}/ours")
    newer = Training()
    load_state(newer.accelerator, f"{directory}/ours")
    assert_same(newer.parts()[:2], parts[:2])
    return "refused, then loaded by accelerate and saved by save_state"


def refused(directory: str) -> str:
    """What cannot be kept is refused before anything is written."""
    project = ProjectConfiguration(directory, automatic_checkpoint_naming=True)
    hooked = Accelerator(cpu=True)
    hooked.register_save_state_pre_hook(lambda *_: None)
    for accelerator, word in ((Accelerator(cpu=True, project_config=project), "CheckpointManager"), (hooked, "hooks")):
        said = refusal(ValueError, functools.partial(save_state, accelerator, f"{directory}/refused"))
        assert word in said, said
    assert not os.path.exists(f"{directory}/refused")
    return "automatic_checkpoint_naming, and hooks that write files"


def sharded(directory: str) -> str:
    """Under FSDP2, every rank saves its shards, and gets them back."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    if not accelerator.is_fsdp2:
        # accelerate has FSDP for accelerators only, though nothing in it needs one: tell it that it has it here.
        PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin

    def prepared() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        try:
            return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        except (ValueError, RuntimeError, NotImplementedError) as error:
            raise CannotRun(f"Accelerator.prepare: {error}") from error

    model, optimizer = prepared()
    path = f"{directory}/sharded"
    is_saved = os.path.exists(path)
    if is_saved:  # by another number of ranks
        load_state(accelerator, path, on_resize="fresh")
        kept = holdfast.read(path)
        assert_same(whole(dict(model.state_dict())), dict(kept["models"][0]))
        assert_same(whole(optimizer.state_dict()["state"]), kept["optimizers"][0]["state"])
    accelerator.wait_for_everyone()
    accelerator.backward(model(torch.ones(4, 8)).square().mean())
    optimizer.step()
    weights, moments = whole(dict(model.state_dict())), whole(optimizer.state_dict())
    save_state(accelerator, path)
    accelerator.backward(model(torch.ones(4, 8)).square().mean())
    optimizer.step()
    load_state(accelerator, path)
    assert_same(whole(dict(model.state_dict())), weights)
    assert_same(whole(optimizer.state_dict()), moments)
    before = " after a load of what other ranks have saved" if is_saved else ""
    return f"FSDP2, as if it had an accelerator: save_state and load_state{before}"


def measure(directory: str, save: Callable[[Accelerator, str], AsyncSave | None]) -> str:
    """What saves of 1 GB cost: a third of it is the model, the rest what AdamW knows of it."""
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(20)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    handles: list[AsyncSave] = []
    cost = Cost(lambda: [handle.result() for handle in handles])
    for number in range(SAVES):
        accelerator.backward(model(torch.ones(64, 2048)).square().mean())
        optimizer.step()
        path = f"{directory}/{number}"
        with cost.save():
            handle = save(accelerator, path)
            handles += [handle] if isinstance(handle, AsyncSave) else []
    return cost.told(path)


ACTIONS = {
    "unbroken": unbroken,
    "killed": killed,
    "resumed": resumed,
    "resized": resized,
    "saved": saved,
    "rotated": rotated,
    "stopped": stopped,
    "theirs": theirs,
    "refused": refused,
    "sharded": sharded,
    "measure-framework": functools.partial(measure, save=Accelerator.save_state),
    "measure-holdfast": functools.partial(measure, save=functools.partial(save_state, asynchronous=True)),
    "measure-holdfast-sync": functools.partial(measure, save=save_state),
}


if __name__ == "__main__":
    logging.getLogger("holdfast").setLevel(logging.ERROR)
    run_client(ACTIONS[sys.argv[2]])
