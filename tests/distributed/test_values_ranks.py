"""What ranks may have different, tied targets on several ranks, and what only some ranks have: versions, containers."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import os
from argparse import Namespace
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.staging import DefaultStager

if TYPE_CHECKING:
    from tools.crew import Crew

WORLD = 3
LARGE = 6 << 20


class Model(nn.Module):
    """Two layers of statistics, and a buffer that is large enough to be written in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.register_buffer("seen", torch.zeros(LARGE))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(batch)
        return output


def trained() -> DistributedDataParallel:
    """Each rank has statistics of its own, and the weights are the same."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    torch.manual_seed(dist.get_rank())
    model(torch.randn(8, 4)).sum().backward()
    model.module.seen.fill_(float(dist.get_rank()))
    return model


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def saved(way: str, state: dict[str, Any], path: str) -> Any:
    if way == "native":
        return holdfast.save(state, path)
    if way == "torch":
        return holdfast.save(state, storage_writer=holdfast.FileSystemWriter(path))
    if way == "planner":
        return holdfast.save(state, path, planner=holdfast.DefaultSavePlanner(enable_plan_caching=True))
    if way == "stager":
        with contextlib.closing(DefaultStager()) as stager:
            return holdfast.async_save(state, path, async_stager=stager).result()
    return holdfast.async_save(state, path).result()


def save_statistics(directory: str, way: str) -> dict[str, Any]:
    model, lines = trained(), _Lines()
    logger = logging.getLogger("holdfast")
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    try:
        told = [saved(way, {"model": model, "step": 1}, os.path.join(directory, "one")).differing for _ in range(3)]
    finally:
        logger.removeHandler(lines)
        logger.setLevel(logging.NOTSET)
        holdfast.release()
    buffers = {f"model.{name}": buffer.clone() for name, buffer in model.named_buffers()}
    return {"told": told, "lines": lines.lines, "buffers": buffers}


@pytest.mark.parametrize("way", ["native", "torch", "planner", "async", "stager"])
def test_statistics_of_ranks_may_differ_and_the_lowest_are_saved(pool: Crew, tmp_path: Path, way: str) -> None:
    results = pool.run(WORLD, save_statistics, str(tmp_path), way)
    first = results[0]["buffers"]
    differing = {key: 0 for key in first if any(not torch.equal(first[key], each["buffers"][key]) for each in results)}
    assert set(differing) >= {f"model.module.layers.{at}.running_{name}" for at in (1, 3) for name in ("mean", "var")}
    for result in results:
        assert result["told"] == [differing] * 3
    assert len(results[0]["lines"]) == 3
    assert "5 keys differ between ranks" in results[0]["lines"][0]
    assert results[1]["lines"] == []
    loaded = holdfast.load(tmp_path / "one")["model"]
    for key, buffer in first.items():
        assert torch.equal(loaded[key.removeprefix("model.")], buffer), key


def save_other_weights(directory: str) -> dict[str, str]:
    model, path = trained(), os.path.join(directory, "one")
    plain = {"model": {"bn": {"mean": torch.full((2,), float(dist.get_rank()))}}, "loss": 0.5 + dist.get_rank()}
    told = {}

    def tell(name: str, state: dict[str, Any], **options: Any) -> None:
        try:
            told[name] = repr(holdfast.save(state, path, options=holdfast.SaveOptions(**options)).differing)
        except holdfast.RankDisagreementError as error:
            told[name] = str(error)

    tell("plain", plain)
    tell("one", plain, replica_check=["model"])
    tell("both", plain, replica_check=["*.mean", "loss"])
    told["loaded"] = repr(holdfast.load(path)["loss"])
    tell("state_dict", {"model": model.state_dict()})
    with torch.no_grad():
        model.module.layers[0].weight.add_(dist.get_rank())
    tell("weight", {"model": model})
    return told


def test_parameters_and_plain_dicts_may_not_unless_they_are_named(pool: Crew, tmp_path: Path) -> None:
    for told in pool.run(WORLD, save_other_weights, str(tmp_path)):
        assert "replica_check=['model.bn.mean']) to save that of rank 0" in told["plain"]
        assert "'loss' has other contents" in told["one"]
        assert told["both"] == "{'model.bn.mean': 0, 'loss': 0}"
        assert told["loaded"] == "0.5"
        assert "replica_check=['model.module." in told["state_dict"]
        assert "'model.module.layers.0.weight' has other contents on rank 1, 2 than on rank 0" in told["weight"]


class Second(nn.Module):
    """A module of version 2."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.told: int | None = None

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        self.told = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def save_stages(directory: str) -> list[int | None]:
    """Each rank has one stage of a model; the class of the last rank's is newer when it is loaded."""
    rank = dist.get_rank()
    stage = nn.ModuleDict({f"stage{rank}": Second()})
    Second._version = 2 if rank == 1 else 1
    holdfast.save({"model": stage}, directory)
    Second._version = 3
    holdfast.load({"model": stage}, directory)
    found = holdfast.load(directory)["model"]._metadata
    Second._version = 2
    return [stage[f"stage{rank}"].told, *(found[f"stage{number}"]["version"] for number in range(WORLD))]


def test_versions_of_modules_that_one_rank_has(pool: Crew, tmp_path: Path) -> None:
    results = pool.run(WORLD, save_stages, str(tmp_path))
    assert results == [[1, 1, 2, 1], [2, 1, 2, 1], [1, 1, 2, 1]]


def load_tied(directory: str, form: str) -> dict[str, Any]:
    """Two keys with one local memory on every rank, and one memory for two keys on the last rank alone."""
    rank, size = dist.get_rank(), 300_000
    mesh = init_device_mesh("cpu", (WORLD,))
    path = os.path.join(directory, form)
    state = {"a": torch.arange(float(size)), "b": torch.arange(float(size)), "c": torch.ones(size)}
    if form == "native":
        holdfast.save(state, path)
    else:
        holdfast.save(state, storage_writer=holdfast.FileSystemWriter(path))
    told: dict[str, Any] = {}

    def tell(name: str, target: dict[str, Any], memory: torch.Tensor, **options: Any) -> None:
        memory.zero_()
        try:
            report = holdfast.load(target, path, **options)
            told[name] = [(each.key, each.kind) for each in report.differences], memory.clone()
        except holdfast.MismatchError as error:
            told[name] = str(error), memory.clone()

    shards = distribute_tensor(torch.zeros(size), mesh, [Shard(0)])
    local = shards.to_local()
    again = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shards.shape, stride=shards.stride())
    tell("sharded, same", {"a": shards, "b": again}, local)
    tell("sharded", {"a": shards, "c": again}, local)
    tell("sharded, not strict", {"a": shards, "c": again}, local, strict=False)
    whole = torch.zeros(size)
    other = whole if rank == WORLD - 1 else torch.zeros(size)
    tell("one rank, same", {"a": whole, "b": other}, whole)
    tell("one rank", {"a": whole, "c": other}, whole)
    tell("one rank, not strict", {"a": whole, "c": other}, whole, strict=False)
    return told


@pytest.mark.parametrize("form", ["native", "torch"])
def test_tied_targets_on_ranks(pool: Crew, tmp_path: Path, form: str) -> None:
    size = 300_000
    values, ones = torch.arange(float(size)), torch.ones(size)
    for rank, told in enumerate(pool.run(WORLD, load_tied, str(tmp_path), form)):
        mine = slice(rank * size // WORLD, (rank + 1) * size // WORLD)
        assert told["sharded, same"][0] == told["one rank, same"][0] == []
        assert torch.equal(told["sharded, same"][1], values[mine])
        assert torch.equal(told["one rank, same"][1], values)
        assert "'a' has other data than 'c'" in told["sharded"][0]
        assert "'a' has other data than 'c'" in told["one rank"][0]
        assert told["sharded, not strict"][0] == [("a", "tied")]
        assert torch.equal(told["sharded, not strict"][1], ones[mine])
        is_tied = rank == WORLD - 1
        assert told["one rank, not strict"][0] == ([("a", "tied")] if is_tied else [])
        assert torch.equal(told["one rank, not strict"][1], ones if is_tied else values)


def keep_classes(path: str) -> list[str]:
    """Containers that all ranks have, that one rank has, and of which ranks say different things; generators."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (WORLD,))
    weight = distribute_tensor(torch.arange(12.0).view(6, 2), mesh, [Shard(0)])
    generator = torch.Generator().manual_seed(3)
    state: dict[str, Any] = {
        "all": OrderedDict(w=weight, last=deque([torch.ones(1)], maxlen=2)),
        f"own {rank}": Namespace(w=torch.full((2,), float(rank))),
        "some": OrderedDict({f"k{rank}": rank}) if rank == 1 else Counter({f"k{rank}": rank}),
        "generator": generator,
    }
    holdfast.save(state, path)
    found = holdfast.read(path)
    names = [type(found[name]).__name__ for name in ("all", "own 2", "some", "generator")]
    target = {"all": OrderedDict(w=distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)])), "generator": generator}
    holdfast.load(target, path)
    assert torch.equal(target["all"]["w"].full_tensor(), torch.arange(12.0).view(6, 2))  # type: ignore[index]
    said = []
    for name, value in {"when": datetime.date(2026, 1, 1 + rank), "g": torch.Generator().manual_seed(rank)}.items():
        with contextlib.suppress(holdfast.RankDisagreementError):
            holdfast.save({name: value}, path)
            said.append(f"{name} was saved")
    return [*names, type(found["all"]["last"]).__name__, *found["some"], *said]


def test_classes_of_containers_on_ranks(pool: Crew, tmp_path: Path) -> None:
    for told in pool.run(WORLD, keep_classes, str(tmp_path / "c")):
        assert told == ["OrderedDict", "Namespace", "Counter", "Generator", "deque", "k0", "k1", "k2"]


def hide_shards(path: str) -> list[str]:
    """Sharded tensors in what torch's format has as one value: only one rank's part would be stored."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    told = []
    for value in (Namespace(w=[weight]), deque([weight])):
        with pytest.raises(holdfast.InvalidStateError) as caught:
            holdfast.save({"plain": weight, "x": value}, storage_writer=holdfast.FileSystemWriter(path))
        told.append(str(caught.value))
    return told


def test_a_sharded_tensor_in_a_pickled_value_is_refused(pool: Crew, tmp_path: Path) -> None:
    for told in pool.run(WORLD, hide_shards, str(tmp_path / "c")):
        for said, kind in zip(told, ("Namespace", "deque"), strict=True):
            assert f"the value of 'x', a {kind}, cannot be pickled: it has a sharded tensor in it" in said
    assert list(tmp_path.iterdir()) == []


@dataclasses.dataclass(frozen=True)
class Part:
    step: int
    weight: Any
    own: Any = None


class Moments(NamedTuple):
    first: Any
    second: Any


def keep_instances(path: str) -> dict[str, Any]:
    """Instances with sharded tensors, saved at once and in the background, and loaded in another layout."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(24.0).view(6, 4)

    def part(scale: float, placement: Any, step: int) -> Part:
        sharded = distribute_tensor(whole * scale, mesh, [placement])
        return Part(step, Moments(sharded, torch.full((2,), scale)), {"own": {f"r{rank}": torch.full((1,), scale)}})

    told: dict[str, Any] = {}
    for name in ("save", "async_save", "stager"):
        state, target = {"part": part(1.0, Shard(0), 3)}, {"part": part(0.0, Shard(1), 0)}
        if name == "save":
            holdfast.save(state, f"{path}-{name}")
        else:
            stager = DefaultStager() if name == "stager" else None
            holdfast.async_save(state, f"{path}-{name}", async_stager=stager).result(timeout=300)
        held = target["part"]
        holdfast.load(target, f"{path}-{name}")
        assert target["part"] is held
        assert torch.equal(held.weight.first.full_tensor(), whole)
        told[name] = [held.step, held.weight.second, held.own["own"][f"r{rank}"]]
        assert torch.equal(holdfast.read(f"{path}-{name}", types=[Part, Moments])["part"].weight.first, whole)
    other = dataclasses.make_dataclass("Part", ["step", "weight", f"own{rank}"])
    for name, state in {
        "fields": {"part": other(3, distribute_tensor(whole, mesh, [Shard(0)]), torch.ones(1))},
        "refused": {"meta": torch.ones(1, device="meta"), "odd": object()} if rank == 1 else {"fine": 1},
    }.items():
        with pytest.raises(holdfast.InvalidStateError) as caught:
            holdfast.save(state, f"{path}-{name}")
        told[name] = str(caught.value)
    return told


def test_instances_on_ranks(pool: Crew, tmp_path: Path) -> None:
    for told in pool.run(WORLD, keep_instances, str(tmp_path / "c")):
        for name in ("save", "async_save", "stager"):
            step, second, own = told[name]
            assert step == 3
            assert torch.equal(second, torch.ones(2))
            assert torch.equal(own, torch.ones(1))
        assert "'part.own1' is in a dataclass" in told["fields"]
        assert "'meta'" in told["refused"]
        assert "'odd'" in told["refused"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c-async_save", "c-save", "c-stager"]
