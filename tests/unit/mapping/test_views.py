"""Outside tensors as views of what is inside, in every sharding: one process plays every rank in turn."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast import InvalidStateError, Mapping
from holdfast._mapping.views import OutsideTensor, outside_leaves
from holdfast._state.pieces import pieces_of
from holdfast.mapping import Concat, Deinterleave, Interleave, Move, Split, Stack, Tie, Transpose, Unstack

EXPERTS = Mapping(
    [
        Move(("e.{e}.gate", "e.{e}.up"), "gate_up", (Stack(0), Concat(1))),
        Move("e.{e}.down", "down", (Stack(0), Transpose(1, 2))),
    ]
)
ROPE = Mapping(
    [Move(("q", "k"), "qk", (Interleave(0, groups=4), Concat(0, (2, 1)))), Move("v", "w", (Deinterleave(0, 2),))]
)
FUSED = Mapping([Move("qkv", ("q", "k", "v"), (Split(0),)), Move("all", "one.{e}", (Unstack(1),))])


@contextmanager
def rank_of(rank: int, world: int) -> Iterator[None]:
    """A process group in which nobody else exists: sharding is local, and collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def numbered(shape: Sequence[int], start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + math.prod(shape)).view(tuple(shape))


def rope_to_halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    return tensor.view(heads, -1, 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)


def rope_to_pairs(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    return tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)


def example(name: str) -> tuple[Mapping, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A mapping, a state, and what torch makes of it outside."""
    if name == "experts":
        state = {"gate_up": numbered((4, 6, 5)), "down": numbered((4, 5, 3), 1000)}
        outside = {
            f"e.{number}.{key}": tensor
            for number in range(4)
            for key, tensor in (
                ("gate", state["gate_up"][number, :3]),
                ("up", state["gate_up"][number, 3:]),
                ("down", state["down"][number].T),
            )
        }
        return EXPERTS, state, outside
    if name == "rope":
        state = {"qk": numbered((24, 3)), "w": numbered((8, 2), 1000)}
        outside = {
            "q": rope_to_halves(state["qk"][:16], 4),
            "k": rope_to_halves(state["qk"][16:], 4),
            "v": rope_to_pairs(state["w"], 2),
        }
        return ROPE, state, outside
    state = {"q": numbered((6, 4)), "k": numbered((2, 4), 100), "v": numbered((2, 4), 200)}
    state |= {f"one.{number}": numbered((5, 2), 300 + 20 * number) for number in range(3)}
    outside = {
        "qkv": torch.cat([state["q"], state["k"], state["v"]]),
        "all": torch.stack([state[f"one.{number}"] for number in range(3)], 1),
    }
    return FUSED, state, outside


SHARDINGS: list[tuple[tuple[int, ...], list[Placement]]] = [
    ((2,), [Shard(0)]),
    ((3,), [Shard(0)]),
    ((3,), [Shard(1)]),
    ((7,), [Shard(1)]),
    ((2,), [Replicate()]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((2, 3), [Shard(1), Shard(1)]),
]


def assert_same_on_ranks(name: str, mesh: tuple[int, ...], placements: list[Placement]) -> None:
    """All ranks together hold each outside tensor as often as the inside, with the right values, as its own memory."""
    mapping, state, outside = example(name)
    holders = {key: torch.zeros_like(tensor) for key, tensor in outside.items()}
    for rank in range(math.prod(mesh)):
        with rank_of(rank, math.prod(mesh)):
            devices = init_device_mesh("cpu", mesh)
            sharded = {}
            for key, tensor in state.items():
                whole = DTensor.from_local(tensor.clone(), devices, [Replicate()] * len(mesh), run_check=False)
                sharded[key] = whole.redistribute(devices, placements)
            leaves = outside_leaves(mapping, sharded, {key: tensor.shape for key, tensor in outside.items()})
            assert leaves.keys() == outside.keys()
            for key, leaf in leaves.items():
                assert isinstance(leaf, torch.Tensor)
                assert leaf.shape == outside[key].shape
                for piece in pieces_of(key, leaf).pieces:
                    assert torch.equal(piece.tensor, outside[key][piece.box.slices()])
                    holders[key][piece.box.slices()] += 1
                    piece.tensor.zero_()
            # Every element inside is in one piece: what is written outside is written inside.
            assert not any(tensor._local_tensor.any() for tensor in sharded.values())
    replicas = math.prod(size for size, each in zip(mesh, placements, strict=True) if each.is_replicate())
    for count in holders.values():
        assert torch.equal(count, torch.full_like(count, replicas))


@pytest.mark.parametrize("name", ["experts", "rope", "fused"])
@pytest.mark.parametrize(("mesh", "placements"), SHARDINGS)
def test_every_sharding(name: str, mesh: tuple[int, ...], placements: list[Placement]) -> None:
    assert_same_on_ranks(name, mesh, placements)


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_random_shardings(data: st.DataObject) -> None:
    mesh = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    choices: list[Placement] = [Shard(0), Shard(1), Replicate()]
    placements = [data.draw(st.sampled_from(choices)) for _ in mesh]
    assert_same_on_ranks(data.draw(st.sampled_from(["experts", "rope", "fused"])), mesh, placements)


@pytest.mark.parametrize("name", ["experts", "rope", "fused"])
def test_parts_with_labels(name: str) -> None:
    """What torch 2.14 calls a CheckpointableTensor: two parts of a global tensor in one."""
    mapping, state, outside = example(name)
    labelled: dict[str, Any] = {}
    for key, tensor in state.items():
        part = torch.cat([tensor[:1], tensor[-1:]]).clone()
        inner = list(tensor.shape[1:])
        part.global_shape = torch.Size(tensor.shape)  # type: ignore[attr-defined]
        part.global_offsets = [(0, *(0 for _ in inner)), (len(tensor) - 1, *(0 for _ in inner))]  # type: ignore[attr-defined]
        part.local_offsets = [(0, *(0 for _ in inner)), (1, *(0 for _ in inner))]  # type: ignore[attr-defined]
        part.local_sizes = [(1, *inner), (1, *inner)]  # type: ignore[attr-defined]
        labelled[key] = part
    held = 0
    for key, leaf in outside_leaves(mapping, labelled).items():
        assert isinstance(leaf, torch.Tensor)
        for piece in pieces_of(key, leaf).pieces:
            assert torch.equal(piece.tensor, outside[key][piece.box.slices()])
            held += piece.tensor.numel()
    assert held == sum(tensor.numel() for tensor in labelled.values())


def test_plain_tensors_stay_plain() -> None:
    state = {"qkv": torch.nn.Parameter(torch.ones(6, 2)), "same": torch.ones(3), "epoch": 5}
    mapping = Mapping([Move(("q", "k", "v"), "qkv", (Concat(0),)), Move("other", "same")])
    leaves = outside_leaves(mapping, state)
    assert {type(leaf) for leaf in leaves.values()} == {torch.Tensor, int}
    assert leaves["other"] is state["same"]
    for number, key in enumerate("qkv"):
        leaf = leaves[key]
        assert isinstance(leaf, torch.Tensor)
        assert leaf.requires_grad
        assert leaf.is_contiguous()
        assert leaf.data_ptr() == state["qkv"].data_ptr() + number * 16  # type: ignore[attr-defined]
    joined = outside_leaves(Mapping([Move("ab", ("a", "b"), (Split(0),))]), {"a": torch.ones(1), "b": torch.ones(2)})
    assert isinstance(joined["ab"], OutsideTensor)
    assert "size=[3]" in repr(joined["ab"])
    with pytest.raises(NotImplementedError, match="made of views"):
        joined["ab"] + 1  # type: ignore[operator]


def test_empty_tensors() -> None:
    mapping = Mapping([Move(("a", "b"), "ab", (Concat(1),)), Move("cd", ("c", "d"), (Split(0),))])
    state = {"ab": torch.ones(0, 4), "c": torch.ones(0, 2), "d": torch.ones(0, 2)}
    leaves = outside_leaves(mapping, state)
    assert [tuple(leaves[key].shape) for key in ("a", "b", "cd")] == [(0, 2), (0, 2), (0, 2)]  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_faults_name_every_key() -> None:
    mapping = Mapping([Move("ab", ("a", "b"), (Split(0),)), Move("q", "p", (Transpose(),)), Tie("twin", "first")])
    quantised = torch.quantize_per_tensor(torch.ones(2, 2), 1.0, 0, torch.qint8)
    state = {
        "a": torch.ones(1),
        "b": torch.ones(1, dtype=torch.int8),
        "p": quantised,
        "twin": torch.ones(2),
        "first": torch.zeros(2),
    }
    with pytest.raises(InvalidStateError) as caught:
        outside_leaves(mapping, state, {"ab": (2,), "more": (1,)})
    assert {"a", "p", "twin", "more"} <= {*caught.value.keys}
    for said in ("different dtypes", "quantised", "other contents", "'first'"):
        assert said in str(caught.value)


def test_ties_are_compared_bit_for_bit() -> None:
    mapping = Mapping([Tie("twin", "first")])
    odd = torch.tensor([float("nan"), -0.0])
    assert outside_leaves(mapping, {"first": odd, "twin": odd.clone()}).keys() == {"first"}
    assert outside_leaves(mapping, {"first": odd, "twin": odd}).keys() == {"first"}
    with pytest.raises(InvalidStateError, match="'twin' is tied to 'first', but has other contents"):
        outside_leaves(mapping, {"first": odd, "twin": torch.tensor([float("nan"), 0.0])})
    large = torch.arange(5 << 20)
    twin = large.clone()
    twin[-1] = 0
    with pytest.raises(InvalidStateError, match="other contents"):
        outside_leaves(mapping, {"first": large, "twin": twin})
    with rank_of(0, 2):
        devices = init_device_mesh("cpu", (2,))
        first, second = (
            distribute_tensor(torch.ones(4, 4), devices, [Shard(dim)], src_data_rank=None) for dim in (0, 1)
        )
        with pytest.raises(InvalidStateError, match="shard both alike"):
            outside_leaves(mapping, {"first": first, "twin": second})
