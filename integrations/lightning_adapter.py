"""Lightning's Trainer and Fabric with ``holdfast.integrations.lightning``: what one launch of a case does.

An action is a kind, a mode and a stage, as in ``sharded/async/killed``. Stages that belong together have a directory:
``whole`` trains and notes the losses; ``killed`` trains until every rank gets SIGKILL inside the save of a step;
``resumed`` goes on from what that left, and its losses have to be those of ``whole``, bit by bit.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from client import CannotRun, assert_same, run_client, whole
from lightning.fabric import Fabric
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies import ModelParallelStrategy as PlainModelParallelStrategy
from measuring import SAVES, Cost
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast import LoadOptions
from holdfast.integrations.lightning import (
    FabricModelParallelStrategy,
    FSDPStrategy,
    HoldfastCallback,
    HoldfastIO,
    ModelParallelStrategy,
    latest,
)

STEPS, EVERY, BATCHES = 10, 3, 4
KILLED_AT = 2 * EVERY
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Batches:
    """A loader that can be resumed, with other batches on each rank."""

    def __init__(self) -> None:
        self.generator, self.position = torch.Generator().manual_seed(RANK), 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.position < BATCHES:
            self.position += 1
            yield torch.randn(4, 8, generator=self.generator)
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.position = state["position"]


def small_network() -> torch.nn.Sequential:
    """Layers of which one draws random numbers, and one has buffers that differ between ranks."""
    torch.manual_seed(7)
    norm = torch.nn.BatchNorm1d(16)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), norm, torch.nn.Dropout(0.2), torch.nn.Linear(16, 4))


def shard(network: torch.nn.Sequential, mesh: Any) -> torch.nn.Sequential:
    """``network`` under FSDP2."""
    for layer in network:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh["data_parallel"])
    fully_shard(network, mesh=mesh["data_parallel"])
    return network


class Job(LightningModule):
    """A training whose every part matters for the next loss; ``losses`` has them by step."""

    def __init__(self, is_sharded: bool) -> None:
        super().__init__()
        self.network, self.is_sharded = small_network(), is_sharded
        self.losses: dict[int, str] = {}

    def configure_model(self) -> None:
        if self.is_sharded:
            shard(self.network, self.device_mesh)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.network(batch).square().mean()
        self.losses[self.trainer.global_step + 1] = loss.item().hex()
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}


def strategy_of(kind: str) -> Any:
    """What ``kind`` of strategy the Trainer is given."""
    if kind == "sharded":
        return ModelParallelStrategy(data_parallel_size=WORLD, tensor_parallel_size=1)
    if kind == "fsdp":
        return FSDPStrategy(process_group_backend="gloo")
    if WORLD == 1:
        return SingleDeviceStrategy(torch.device("cpu"))
    # Else DDP puts gradients into other buckets after its first step, and ranks add them up in another order.
    return DDPStrategy(process_group_backend="gloo", find_unused_parameters=True)


def trainer_of(kind: str, folder: Path, io: Any, *callbacks: Callback, strategy: Any = None, **kept: Any) -> Trainer:
    """A Trainer that saves every few steps; ``kept`` says which checkpoints stay, by default the last."""
    saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=EVERY, **kept)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=strategy or strategy_of(kind),
        plugins=[] if io is None else [io],
        callbacks=[saves, *callbacks],
        max_steps=STEPS,
        use_distributed_sampler=False,
        **quiet,
    )


def trained(kind: str, trainer: Trainer, **arguments: Any) -> Job:
    """The job after ``trainer`` has trained it."""
    job = Job(kind == "sharded")
    try:
        trainer.fit(job, Batches(), **arguments)
    except RuntimeError as error:
        if kind == "fsdp" and "needs a non-CPU accelerator" in str(error):
            raise CannotRun(f"FSDPStrategy: {error}") from error
        raise
    return job


def kill_inside_the_save(directory: Path, step: int) -> None:
    """Have rank 0 kill every rank when all data of ``step`` is written, and nothing is published."""
    (directory / f"pid-{RANK}").write_text(str(os.getpid()))
    place: Any = importlib.import_module("holdfast._native.writer").DirectoryPlace
    publish = place.publish

    def killing(path: str, *arguments: Any, **more: Any) -> None:
        if f"step={step}" not in path:
            publish(path, *arguments, **more)
            return
        for rank in range(1, WORLD):
            os.kill(int((directory / f"pid-{rank}").read_text()), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    place.publish = staticmethod(killing)


def note_losses(directory: Path, losses: dict[int, str]) -> None:
    """Keep ``losses`` for the launch that compares them."""
    (directory / f"losses-{RANK}.json").write_text(json.dumps(losses))


def assert_losses(directory: Path, losses: dict[int, str], first: int) -> str:
    """That ``losses`` are those of the whole run from step ``first`` on, bit by bit."""
    expected = {int(step): loss for step, loss in json.loads((directory / f"losses-{RANK}.json").read_text()).items()}
    assert losses == {step: loss for step, loss in expected.items() if step >= first}, f"{losses} of {expected}"
    return f"resumed at step {first - 1}, {len(losses)} losses bit-equal"


def trainer_case(directory: Path, kind: str, mode: str, stage: str) -> str:
    """A stage of: train, be killed inside a save, resume."""
    folder, io = directory / stage, HoldfastIO(asynchronous={"async": True, "process": "process"}.get(mode, False))
    if stage == "whole":
        job = trained(kind, trainer_of(kind, folder, io, HoldfastCallback()))
        note_losses(directory, job.losses)
        assert len(job.losses) == STEPS
        kept = sorted(path.name for path in folder.iterdir())
        assert RANK > 0 or kept == [f"step={STEPS - STEPS % EVERY}.ckpt"], kept  # which rank 0 removes from
        return f"kept {kept[0]} of {STEPS // EVERY}"
    folder = directory / "run"
    if stage == "killed":
        kill_inside_the_save(directory, KILLED_AT)
        trained(kind, trainer_of(kind, folder, io, HoldfastCallback()))
        raise AssertionError("it was not killed")
    torn, newest = folder / f"step={KILLED_AT}.ckpt", latest(folder)
    assert any(torn.glob("data-*")), "the save was not begun"
    assert not (torn / "manifest.json").exists(), "the save was not torn"
    assert newest == str(folder / f"step={EVERY}.ckpt"), newest
    if stage == "resized":
        return resized(kind, folder, io, newest)
    job = trained(kind, trainer_of(kind, folder, io, HoldfastCallback()), ckpt_path=newest)
    return assert_losses(directory, job.losses, EVERY + 1)


class Compared(Callback):
    """Asserts, before the first step, that the weights are those of the checkpoint."""

    def __init__(self, path: str) -> None:
        self.path, self.is_done = path, False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        expected = holdfast.read(self.path)
        assert trainer.global_step == expected["global_step"] == EVERY
        assert_same(whole(dict(pl_module.state_dict())), dict(expected["state_dict"]))
        self.is_done = True


def deal_out(states: list[list[dict[str, Any]]], rank: int, ranks: int) -> list[dict[str, Any]]:
    """A state of a loader that others have left: as far as they were, with new numbers."""
    return [{"generator": torch.Generator().manual_seed(100 + rank).get_state(), "position": states[0][0]["position"]}]


def refusal(error: type[Exception], kind: str, trainer: Trainer, path: str) -> str:
    """What ``trainer`` says when it is to resume from ``path``, and refuses."""
    try:
        trained(kind, trainer, ckpt_path=path)
    except error as refused:
        return str(refused)
    raise AssertionError("it was not refused")


def resized(kind: str, folder: Path, io: HoldfastIO, newest: str) -> str:
    """Resume on another number of ranks: refused, unless it is said what becomes of the loaders."""
    refused = refusal(holdfast.MismatchError, kind, trainer_of(kind, folder, io, HoldfastCallback()), newest)
    assert "2 ranks saved, 4 resume" in refused or "4 ranks saved, 2 resume" in refused, refused
    compared = Compared(newest)
    trainer = trainer_of(kind, folder, io, HoldfastCallback(on_resize=deal_out), compared, save_top_k=-1)
    job = trained(kind, trainer, ckpt_path=newest)
    assert compared.is_done
    assert sorted(job.losses) == list(range(EVERY + 1, STEPS + 1)), job.losses
    newest = str(folder / f"step={STEPS - STEPS % EVERY}.ckpt")
    assert RANK > 0 or latest(folder) == newest, latest(folder)  # which rank 0 has waited for
    return f"resumed on {WORLD} ranks: weights and counters equal; refused unless on_resize says how"


class Gated(HoldfastIO):
    """Publishes a step only when Lightning has asked to remove the one before, which has to be there still."""

    def __init__(self, folder: Path) -> None:
        super().__init__(asynchronous=True)
        self.asked, self.seen = threading.Event(), list[str]()
        place: Any = importlib.import_module("holdfast._native.writer").DirectoryPlace
        publish = place.publish

        def gated(path: str, *arguments: Any, **more: Any) -> None:
            if latest(folder) is not None:
                assert self.asked.wait(60), "nothing was to be removed"
                self.seen.append(os.path.basename(str(latest(folder))))
            self.asked.clear()
            publish(path, *arguments, **more)

        place.publish = staticmethod(gated)

    def remove_checkpoint(self, path: Any) -> None:
        super().remove_checkpoint(path)
        self.asked.set()


def rotation(directory: Path, kind: str) -> str:
    """What Lightning removes while a save is under way goes when that is published."""
    folder, io = directory / "rotation", Gated(directory / "rotation")
    trained(kind, trainer_of(kind, folder, io, HoldfastCallback()))
    left = [path.name for path in folder.iterdir()] if RANK == 0 else []
    assert RANK > 0 or io.seen == ["step=3.ckpt", "step=6.ckpt"], io.seen
    assert RANK > 0 or left == ["step=9.ckpt"], left
    return "the checkpoint before stays until the next is published, then goes"


def failed(directory: Path, kind: str) -> str:
    """The error of a save in the background is raised, and nothing was removed for it."""
    folder, io = directory / "failed", HoldfastIO(asynchronous=True)
    place: Any = importlib.import_module("holdfast._native.writer").DirectoryPlace
    publish = place.publish

    def failing(path: str, *arguments: Any, **more: Any) -> None:
        if f"step={KILLED_AT}" in path:
            raise OSError(errno.ENOSPC, "no space is left")
        publish(path, *arguments, **more)

    place.publish = staticmethod(failing)
    message = None
    try:
        trained(kind, trainer_of(kind, folder, io, HoldfastCallback()))
    except (holdfast.CheckpointError, OSError) as error:
        message = str(error)
    assert message is not None, "nothing was raised"
    assert "no space is left" in message, message
    assert latest(folder) == str(folder / f"step={EVERY}.ckpt"), latest(folder)
    return "the error is raised, and the checkpoint before is there"


def linked(directory: Path, kind: str) -> str:
    """``save_last="link"`` makes a link to the newest checkpoint, which can be resumed from."""
    folder = directory / "linked"
    trained(kind, trainer_of(kind, folder, HoldfastIO(), HoldfastCallback(), save_last="link"))
    newest, link = folder / f"step={STEPS - STEPS % EVERY}.ckpt", folder / "last.ckpt"
    assert link.resolve() == newest.resolve(), link.resolve()
    assert latest(folder) == str(newest), latest(folder)
    job = trained(kind, trainer_of(kind, folder, HoldfastIO(), HoldfastCallback()), ckpt_path=str(link))
    assert list(job.losses) == [STEPS], job.losses
    return "the link leads to the newest, and is resumed from"


def frameworks_own(directory: Path, kind: str) -> str:
    """What Lightning itself wrote is refused, with a word on what to do, and that works."""
    folder, io = directory / "own", HoldfastIO()
    path = str(folder / f"step={EVERY}.ckpt")
    strategy = PlainModelParallelStrategy(data_parallel_size=WORLD, tensor_parallel_size=1)
    if kind == "sharded":
        trainer = trainer_of(kind, folder, None, HoldfastCallback(), save_top_k=-1, strategy=strategy)
        expected = {step: loss for step, loss in trained(kind, trainer).losses.items() if step > EVERY}
        refused = refusal(holdfast.UnsafeError, kind, trainer_of(kind, folder / "next", io, HoldfastCallback()), path)
        assert "allow_pickle=True" in refused, refused
        io = HoldfastIO(load_options=LoadOptions(allow_pickle=True))
        trainer = trainer_of(kind, folder / "next", io, HoldfastCallback())
        job = trained(kind, trainer, ckpt_path=path)
        assert job.losses == expected, f"{job.losses} of {expected}"
        return f"refused; with allow_pickle=True {len(job.losses)} losses bit-equal"
    trained(kind, trainer_of(kind, folder, None, save_top_k=-1))
    refused = refusal(holdfast.UnsafeError, kind, trainer_of(kind, folder / "next", io, HoldfastCallback()), path)
    assert f"holdfast convert {path}" in refused, refused
    if RANK == 0:
        holdfast.convert(path, f"{path}-native", to="native")
    dist.barrier()
    compared = Compared(f"{path}-native")
    trained(kind, trainer_of(kind, folder / "next", io, HoldfastCallback(), compared), ckpt_path=compared.path)
    assert compared.is_done
    return "refused; after 'holdfast convert' weights and counters equal"


def exported(directory: Path, kind: str) -> str:
    """At the end, the model is a Hugging Face folder."""
    folder, export = directory / "exported", directory / "folder"
    trainer = trainer_of(kind, folder, HoldfastIO(asynchronous=True), HoldfastCallback(export=export))
    job = trained(kind, trainer)
    dist.barrier()
    weights = whole(dict(job.state_dict()))
    if RANK == 0:  # whose buffers are exported
        found = holdfast.read(export)
        assert found.keys() == weights.keys()
        assert_same({name: found[name] for name in weights}, weights)
    return f"{len(list(export.glob('*.safetensors')))} file, {len(weights)} tensors equal"


def fabric_case(directory: Path, mode: str, stage: str) -> str:
    """The same stages with Fabric, whose loop is the user's own."""
    io = HoldfastIO(asynchronous=mode == "async")
    strategy = FabricModelParallelStrategy(shard, data_parallel_size=WORLD, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=WORLD, strategy=strategy, plugins=[io])
    fabric.launch()
    network = fabric.setup_module(small_network())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(network.parameters(), lr=0.01))
    resize = "fresh" if stage == "resized" else "raise"
    own = {"rng": holdfast.Rng(resize), "loader": holdfast.PerRank(Batches(), resize)}
    state = {"model": network, "optimizer": optimizer, "step": 0, **own}
    folder = directory / ("whole" if stage == "whole" else "run")
    newest = latest(folder)
    if newest is not None:
        assert newest.endswith(f"step={EVERY}"), newest
        rest = fabric.load(newest, state)
        assert state["step"] == EVERY, state["step"]
        assert rest == {"note": "kept"}, rest
        saved = holdfast.read(newest)
        assert_same(whole(dict(network.state_dict())), dict(saved["model"]))
    if stage == "killed":
        kill_inside_the_save(directory, KILLED_AT)
        fabric.barrier()
    losses: dict[int, str] = {}
    loader = own["loader"].value
    while state["step"] < STEPS:
        for batch in loader:
            loss = network(batch).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            state["step"] += 1
            losses[state["step"]] = loss.item().hex()
            if state["step"] % EVERY == 0:
                fabric.save(folder / f"step={state['step']}", {**state, "note": "kept"})
            if state["step"] == STEPS:
                break
    io.wait()
    if stage == "whole":
        note_losses(directory, losses)
        return f"{len(losses)} steps"
    assert stage != "killed", "it was not killed"
    if stage == "resized":
        assert sorted(losses) == list(range(EVERY + 1, STEPS + 1)), losses
        return f"resumed on {WORLD} ranks: weights and counters equal"
    return assert_losses(directory, losses, EVERY + 1)


class Wide(LightningModule):
    """84 million parameters, which with AdamW's moments are 1 GB."""

    def __init__(self, is_sharded: bool) -> None:
        super().__init__()
        self.network = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(5)))
        self.is_sharded = is_sharded

    def configure_model(self) -> None:
        if self.is_sharded:
            shard(self.network, self.device_mesh)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.network(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), fused=True)


def measure(directory: Path, side: str) -> str:
    """What saves of 1 GB cost, one after each step; ``side`` says whose and which."""
    kind = "sharded" if side.endswith("sharded") else "ddp"
    theirs = AsyncCheckpointIO(TorchCheckpointIO()) if "async" in side else TorchCheckpointIO()
    io = HoldfastIO(asynchronous="-sync" not in side) if "holdfast" in side else theirs
    plain = PlainModelParallelStrategy(data_parallel_size=WORLD, tensor_parallel_size=1)

    def finish() -> None:
        if isinstance(io, HoldfastIO):
            io.wait()
        elif io is not None and getattr(io, "_executor", None) is not None:
            io._executor.submit(int).result()  # it has one thread

    cost = Cost(finish)

    class Saving(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            with cost.save():
                trainer.save_checkpoint(directory / f"{trainer.global_step}.ckpt")

    is_plain = kind == "sharded" and "holdfast" not in side
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", devices=WORLD, strategy=plain if is_plain else strategy_of(kind),
                      plugins=[] if is_plain else [io], max_steps=SAVES, callbacks=[Saving(), HoldfastCallback()],
                      enable_checkpointing=False, **quiet)  # fmt: skip
    trainer.fit(Wide(kind == "sharded"), torch.utils.data.DataLoader(torch.randn(1024, 4096), batch_size=64))
    return cost.told(str(directory / f"{SAVES}.ckpt"))


def client(directory: str) -> str:
    """What the action on the command line says."""
    if sys.argv[2].startswith("measure"):
        return measure(Path(directory), sys.argv[2])
    kind, mode, stage = sys.argv[2].split("/")
    if kind == "fabric":
        return fabric_case(Path(directory), mode, stage)
    others = {"rotation": rotation, "failed": failed, "linked": linked, "own": frameworks_own, "exported": exported}
    if stage in others:
        return others[stage](Path(directory), kind)
    return trainer_case(Path(directory), kind, mode, stage)


if __name__ == "__main__":
    run_client(client)
