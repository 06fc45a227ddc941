"""A ``Mapping`` on ranks: saved from one sharding, loaded into another, in either format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import holdfast
from holdfast import LoadOptions, Mapping, SaveOptions
from holdfast.mapping import Concat, Deinterleave, Move, Split, Stack, Tie, Transpose

if TYPE_CHECKING:
    from tools.crew import Crew

MAPPING = Mapping(
    [
        Move(("l.{i}.e.{e}.gate", "l.{i}.e.{e}.up"), "l.{i}.gate_up", (Stack(0), Concat(1))),
        Move("l.{i}.e.{e}.down", "l.{i}.down", (Stack(0), Transpose(1, 2))),
        Move("l.{i}.qkv", ("l.{i}.q", "l.{i}.k"), (Deinterleave(0, 4), Split(0))),
        Move("plain_pair", ("plain_a", "plain_b"), (Split(0),)),
        Tie("head", "embed"),
    ]
)


def numbered(shape: tuple[int, ...], start: int) -> torch.Tensor:
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def whole_state() -> dict[str, torch.Tensor]:
    shapes = {"gate_up": (6, 8, 5), "down": (6, 5, 4), "q": (16, 3), "k": (16, 3)}
    state = {
        f"l.{layer}.{key}": numbered(shape, 1000 * layer + 10 * number)
        for layer in range(2)
        for number, (key, shape) in enumerate(shapes.items())
    }
    embed = numbered((10, 3), 7)
    return state | {"embed": embed, "head": embed, "plain_a": numbered((3,), 1), "plain_b": numbered((2,), 9)}


def sharded(placements: list[Placement], mesh_shape: tuple[int, ...], *, is_blank: bool) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", mesh_shape)
    state: dict[str, torch.Tensor] = {}
    for key, tensor in whole_state().items():
        tensor = torch.zeros_like(tensor) if is_blank else tensor.clone()
        state[key] = tensor if key.startswith("plain") else distribute_tensor(tensor, mesh, placements)
    return state


def save_and_load(path: str, storage: str) -> list[object]:
    world = dist.get_world_size()
    writer: Any = {"native": holdfast.NativeWriter, "torch": holdfast.FileSystemWriter}[storage](path)
    state = sharded([Shard(0), Shard(1)], (2, world // 2), is_blank=False)
    holdfast.save(state, storage_writer=writer, options=SaveOptions(mapping=MAPPING))
    told: list[object] = []
    for placements in ([Shard(1)], [Shard(0)], [Replicate()]):
        target = sharded(placements, (world,), is_blank=True)
        report = holdfast.load(target, path, options=LoadOptions(mapping=MAPPING))
        same = [
            torch.equal(leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, whole_state()[key])
            for key, leaf in target.items()
        ]
        told.append((all(same), report.unexpected, report.differences))
    wrong = sharded([Shard(0)], (world,), is_blank=False)
    wrong["head"]._local_tensor.add_(dist.get_rank() == 1)  # type: ignore[attr-defined]
    try:
        holdfast.save(wrong, f"{path}-wrong", options=SaveOptions(mapping=MAPPING))
    except holdfast.InvalidStateError as error:
        told.append("'head' is tied to 'embed', but has other contents" in str(error))
    return told


@pytest.mark.parametrize("storage", ["native", "torch"])
def test_any_sharding_to_any_other(pool: Crew, tmp_path: Path, storage: str) -> None:
    for told in pool.run(4, save_and_load, str(tmp_path / "a"), storage):
        assert told == [(True, (), ())] * 3 + [True]
    state = whole_state()
    with holdfast.open(tmp_path / "a") as stored:
        assert {*stored} == {
            *(
                f"l.{layer}.e.{expert}.{key}"
                for layer in range(2)
                for expert in range(6)
                for key in ("gate", "up", "down")
            ),
            *("l.0.qkv", "l.1.qkv", "plain_pair", "embed"),
        }
        assert torch.equal(stored["l.1.e.3.up"][...], state["l.1.gate_up"][3, 4:])
        assert torch.equal(stored["l.1.e.3.down"][...], state["l.1.down"][3].T)
        joined = torch.cat([state["l.0.q"], state["l.0.k"]])
        assert torch.equal(stored["l.0.qkv"][...], joined.view(4, 2, -1, 3).transpose(1, 2).reshape(32, 3))
