"""What a process holds of a value, against torch's own sharding: one process plays every rank in turn."""

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
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from holdfast._state.pieces import Piece, Pieces, piece_at, pieces_of
from holdfast._values.box import Box, whole
from holdfast.errors import InvalidStateError


@contextmanager
def rank_of(rank: int, world: int) -> Iterator[None]:
    """A process group in which nobody else exists: sharding is local, and collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def numbered(shape: Sequence[int]) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.int64).view(tuple(shape))


def split_at_once(whole_tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Split by each mesh dimension from left to right."""
    return distribute_tensor(whole_tensor, mesh, placements, src_data_rank=None)


def split_in_order(whole_tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Split in the order that strided shards stand for, as FSDP2 does."""
    replicated = DTensor.from_local(whole_tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(mesh, placements)


def assert_held_as_placed(
    mesh_shape: Sequence[int], placements: Sequence[Placement], shape: Sequence[int], split: Any
) -> None:
    """Every rank's pieces are views of the right values, and each element is held once per replica."""
    world = math.prod(mesh_shape)
    truth = numbered(shape)
    holders = torch.zeros_like(truth)
    for rank in range(world):
        with rank_of(rank, world):
            value = split(truth.clone(), init_device_mesh("cpu", tuple(mesh_shape)), placements)
            held = pieces_of("weight", value)
            storage = value._local_tensor.untyped_storage().data_ptr()
        assert held.is_sharded
        assert held.size == truth.shape
        assert held.dtype == truth.dtype
        for piece in held.pieces:
            assert tuple(piece.tensor.shape) == piece.box.lengths
            assert piece.tensor.untyped_storage().data_ptr() == storage
            assert piece.box.volume
            assert torch.equal(piece.tensor, truth[piece.box.slices()])
            holders[piece.box.slices()] += 1
    split_dims = [isinstance(placement, (Shard, _StridedShard)) for placement in placements]
    replicas = math.prod(size for size, is_split in zip(mesh_shape, split_dims, strict=True) if not is_split)
    assert torch.equal(holders, torch.full_like(truth, replicas))


def pieces_on(rank: int, mesh_shape: Sequence[int], placements: Sequence[Placement], size: int, split: Any) -> Pieces:
    with rank_of(rank, math.prod(mesh_shape)):
        return pieces_of("rows", split(numbered((size,)), init_device_mesh("cpu", tuple(mesh_shape)), placements))


def boxes_of(held: Pieces) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(piece.box.offsets, piece.box.lengths) for piece in held.pieces]


# Plain tensors


@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4), (2, 3)])
def test_plain_tensor_is_one_whole_piece(shape: tuple[int, ...]) -> None:
    value = torch.zeros(shape, dtype=torch.bfloat16)
    held = pieces_of("plain", value)
    assert (held.size, held.dtype, held.requires_grad, held.is_sharded) == (value.shape, value.dtype, False, False)
    assert [piece.box for piece in held.pieces] == [whole(shape)]
    assert held.pieces[0].tensor.data_ptr() == value.data_ptr()


def test_parameter_is_detached_over_the_same_memory() -> None:
    value = torch.nn.Parameter(torch.zeros(2, 3))
    held = pieces_of("plain", value)
    assert held.requires_grad
    assert not held.pieces[0].tensor.requires_grad
    held.pieces[0].tensor.fill_(7)
    assert torch.equal(value, torch.full((2, 3), 7.0))


def test_subclass_is_one_whole_piece() -> None:
    class Named(torch.Tensor):
        pass

    held = pieces_of("plain", torch.arange(4).as_subclass(Named))
    assert boxes_of(held) == [((0,), (4,))]
    assert not held.is_sharded


# DTensors


@st.composite
def meshes(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda sizes: math.prod(sizes) <= 12)))


@st.composite
def ordered_layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Placement], tuple[int, ...]]:
    """A mesh, placements (a random order of sharding told by strided shards), and an uneven shape."""
    mesh = draw(meshes())
    shape = tuple(
        draw(st.lists(st.integers(1, 30), min_size=1, max_size=3).filter(lambda sizes: math.prod(sizes) < 2000))
    )
    of_mesh_dim = [draw(st.none() | st.integers(0, len(shape) - 1)) for _ in mesh]
    order = draw(st.permutations(range(len(mesh))))
    placements: list[Placement] = []
    for mesh_dim, dim in enumerate(of_mesh_dim):
        if dim is None:
            placements.append(Replicate())
            continue
        before = order[: order.index(mesh_dim)]
        factor = math.prod(mesh[other] for other in before if other > mesh_dim and of_mesh_dim[other] == dim)
        placements.append(Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor))
    return mesh, placements, shape


@st.composite
def strided_layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Placement], tuple[int, ...]]:
    """A mesh, placements with strided shards that stand for no order, and an uneven shape."""
    mesh = draw(meshes())
    shape = tuple(
        draw(st.lists(st.integers(1, 30), min_size=1, max_size=3).filter(lambda sizes: math.prod(sizes) < 2000))
    )
    dims = st.integers(0, len(shape) - 1)
    # 5 and 7 are products of no mesh sizes here: such factors come from views, not from an order.
    strided = st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), dims, st.sampled_from([5, 7]))
    placements: list[Placement] = [draw(st.builds(Replicate) | st.builds(Shard, dims) | strided) for _ in mesh]
    return mesh, placements, shape


@settings(max_examples=60)
@given(layout=ordered_layouts())
def test_pieces_of_all_ranks_hold_each_element_once_per_replica(layout: Any) -> None:
    mesh, placements, shape = layout
    assert_held_as_placed(mesh, placements, shape, split_in_order)


@settings(max_examples=60)
@given(layout=strided_layouts())
def test_pieces_of_strided_shards_without_an_order(layout: Any) -> None:
    mesh, placements, shape = layout
    assert_held_as_placed(mesh, placements, shape, split_at_once)


@pytest.mark.parametrize("split", [split_at_once, split_in_order])
@pytest.mark.parametrize("mesh", [(3, 2), (2, 3), (2, 2)])
@pytest.mark.parametrize("size", [1, 5, 12, 13, 17])
def test_both_ways_to_split_an_uneven_strided_dimension(split: Any, mesh: tuple[int, int], size: int) -> None:
    assert_held_as_placed(mesh, [_StridedShard(0, split_factor=mesh[1]), Shard(0)], (size, 2), split)


def test_rows_that_do_not_lie_side_by_side_are_two_boxes() -> None:
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    assert boxes_of(pieces_on(4, (3, 2), placements, 13, split_at_once)) == [((6,), (1,)), ((11,), (1,))]
    assert boxes_of(pieces_on(5, (3, 2), placements, 13, split_at_once)) == [((12,), (1,))]


def test_rows_split_in_order_are_one_box() -> None:
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    assert boxes_of(pieces_on(4, (3, 2), placements, 13, split_in_order)) == [((6,), (1,))]
    assert boxes_of(pieces_on(5, (3, 2), placements, 13, split_in_order)) == [((11,), (2,))]


def test_length_that_fits_both_ways_is_read_as_split_in_order() -> None:
    placements = [_StridedShard(0, split_factor=4), Shard(0)]
    lengths = []
    for rank in range(12):
        at_once, in_order = (
            pieces_on(rank, (3, 4), placements, 27, split) for split in (split_at_once, split_in_order)
        )
        lengths.append((sum(piece.box.volume for piece in at_once.pieces), in_order.pieces[0].box.lengths[0]))
        assert torch.equal(in_order.pieces[0].tensor, torch.arange(27)[in_order.pieces[0].box.slices()])
    assert any(one != other for one, other in lengths), "no rank can tell the two apart"


def test_strided_shards_of_two_dimensions_are_the_product_of_their_runs() -> None:
    placements = [_StridedShard(0, split_factor=5), _StridedShard(1, split_factor=5)]
    assert_held_as_placed((2, 2), placements, (20, 10), split_at_once)
    with rank_of(0, 4):
        held = pieces_of("grid", split_at_once(numbered((20, 10)), init_device_mesh("cpu", (2, 2)), placements))
    assert len(held.pieces) == 25
    assert held.pieces[1].box == Box((0, 2), (2, 1))


def test_runs_that_meet_are_one_box() -> None:
    assert boxes_of(pieces_on(0, (1,), [_StridedShard(0, split_factor=5)], 12, split_at_once)) == [((0,), (12,))]


def test_order_of_sharding_in_the_spec_is_followed() -> None:
    held_rows = []
    for rank in range(4):
        with rank_of(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2))
            rows = torch.arange(7)
            coordinate = mesh.get_coordinate()
            assert coordinate is not None
            local = rows.chunk(2)[coordinate[1]].chunk(2)[coordinate[0]]
            order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
            meta = TensorMeta(rows.shape, rows.stride(), rows.dtype)
            spec = DTensorSpec(mesh, (Shard(0), Shard(0)), tensor_meta=meta, shard_order=order)
            held = pieces_of("rows", DTensor(local, spec, requires_grad=False))
        (piece,) = held.pieces
        assert piece.box.offsets[0] == piece.tensor[0]
        held_rows += piece.tensor.tolist()
    assert sorted(held_rows) == list(range(7))


def test_rank_with_an_empty_shard_holds_nothing() -> None:
    held = pieces_on(3, (4,), [Shard(0)], 3, split_at_once)
    assert held.pieces == ()
    assert held.size == (3,)


def test_tensor_without_elements_is_one_piece_on_every_rank() -> None:
    for rank in range(2):
        with rank_of(rank, 2):
            held = pieces_of("none", split_at_once(torch.empty(4, 0), init_device_mesh("cpu", (2,)), [Shard(0)]))
        assert boxes_of(held) == [((0, 0), (4, 0))]
        assert held.pieces[0].tensor.shape == (4, 0)


@pytest.mark.parametrize("rank", range(4))
def test_rank_outside_the_mesh_holds_nothing(rank: int) -> None:
    with rank_of(rank, 4):
        mesh = DeviceMesh("cpu", torch.tensor([1, 3]))
        held = pieces_of("rows", split_at_once(numbered((5,)), mesh, [Shard(0)]))
    assert boxes_of(held) == {1: [((0,), (3,))], 3: [((3,), (2,))]}.get(rank, [])
    assert held.size == (5,)


def test_rank_outside_the_mesh_holds_nothing_of_an_empty_tensor() -> None:
    with rank_of(0, 2):
        value = split_at_once(torch.empty(0), DeviceMesh("cpu", torch.tensor([1])), [Replicate()])
        assert pieces_of("none", value).pieces == ()


@pytest.mark.parametrize("rank", [0, 1])
def test_partial_placement_is_refused_by_name_on_every_rank(rank: int) -> None:
    with rank_of(rank, 2):
        mesh = DeviceMesh("cpu", torch.tensor([0]))
        value = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
        with pytest.raises(InvalidStateError, match=r"'grad\.sum' has the placement .*reduce it first") as caught:
            pieces_of("grad.sum", value)
    assert caught.value.key == "grad.sum"


def test_local_length_that_no_split_gives_is_refused() -> None:
    with rank_of(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        local = torch.ones(1, 4)
        value = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((6, 4)), stride=(4, 1))
        with pytest.raises(InvalidStateError, match=r"'odd' holds 1 indices of dimension 0 where .* give it 3 of 6"):
            pieces_of("odd", value)


def test_collective_that_still_fills_the_local_tensor_is_waited_for() -> None:
    with rank_of(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        local = torch.arange(3)
        value = DTensor.from_local(AsyncCollectiveTensor(local), mesh, [Shard(0)], run_check=False)
        assert isinstance(value._local_tensor, AsyncCollectiveTensor)
        (piece,) = pieces_of("rows", value).pieces
    assert type(piece.tensor) is torch.Tensor
    assert piece.tensor.data_ptr() == local.data_ptr()


def test_distributed_parameter_is_detached_over_the_same_memory() -> None:
    with rank_of(1, 2):
        sharded = split_at_once(torch.zeros(4, 3), init_device_mesh("cpu", (2,)), [Shard(1)])
        value: Any = torch.nn.Parameter(sharded)
        held = pieces_of("weight", value)
        assert held.requires_grad
        held.pieces[0].tensor.fill_(7)
        assert torch.equal(value._local_tensor, torch.full((4, 1), 7.0))
    assert not held.pieces[0].tensor.requires_grad
    assert boxes_of(held) == [((0, 2), (4, 1))]


# ShardedTensors


def shard_metadata(offsets: Sequence[int], sizes: Sequence[int], rank: int) -> ShardMetadata:
    return ShardMetadata(shard_offsets=list(offsets), shard_sizes=list(sizes), placement=f"rank:{rank}/cpu")


def sharded(size: Sequence[int], mine: list[LocalShard], others: Sequence[ShardMetadata]) -> ShardedTensor:
    everyone = [*(shard.metadata for shard in mine), *others]
    properties = TensorProperties(dtype=torch.int64)
    metadata = ShardedTensorMetadata(everyone, torch.Size(size), properties)
    return ShardedTensor._init_from_local_shards_and_global_metadata(mine, metadata)


def test_several_local_shards_are_as_many_pieces() -> None:
    truth = numbered((6, 4))
    with rank_of(0, 2):
        mine = [LocalShard(truth[start : start + 2].clone(), shard_metadata((start, 0), (2, 4), 0)) for start in (0, 4)]
        held = pieces_of("table", sharded((6, 4), mine, [shard_metadata((2, 0), (2, 4), 1)]))
    assert boxes_of(held) == [((0, 0), (2, 4)), ((4, 0), (2, 4))]
    assert (held.size, held.dtype, held.is_sharded) == ((6, 4), torch.int64, True)
    for piece, shard in zip(held.pieces, mine, strict=True):
        assert torch.equal(piece.tensor, truth[piece.box.slices()])
        assert piece.tensor.data_ptr() == shard.tensor.data_ptr()


@pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")  # torch's own constructors warn
def test_nested_shards_count_from_the_outer_offsets() -> None:
    truth = numbered((6, 4))
    with rank_of(0, 2):
        inner_shard = LocalShard(truth[3:6, 2:4].clone(), shard_metadata((0, 2), (3, 2), 0))
        inner = sharded((3, 4), [inner_shard], [shard_metadata((0, 0), (3, 2), 1)])
        outer_shard = LocalShard(inner, shard_metadata((3, 0), (3, 4), 0))
        held = pieces_of("table", sharded((6, 4), [outer_shard], [shard_metadata((0, 0), (3, 4), 1)]))
    assert boxes_of(held) == [((3, 2), (3, 2))]
    assert torch.equal(held.pieces[0].tensor, truth[3:6, 2:4])


# Tensors that hand out their shards


def test_wrapper_of_local_shards_hands_out_its_memory() -> None:
    truth = numbered((3, 5)).to(torch.bfloat16)
    shards = [truth[:, :2].clone(), truth[:, 2:].clone()]
    held = pieces_of("table", LocalShardsWrapper(shards, [(0, 0), (0, 2)]))
    assert boxes_of(held) == [((0, 0), (3, 2)), ((0, 2), (3, 3))]
    assert (held.size, held.dtype, held.is_sharded) == ((3, 5), torch.bfloat16, True)
    for piece, shard in zip(held.pieces, shards, strict=True):
        assert piece.tensor.data_ptr() == shard.data_ptr()
        assert torch.equal(piece.tensor, truth[piece.box.slices()])


def test_wrapper_keeps_its_gradient_flag() -> None:
    value = LocalShardsWrapper([torch.ones(2, 2, requires_grad=True)], [(0, 0)])
    held = pieces_of("table", value)
    assert held.requires_grad
    assert not held.pieces[0].tensor.requires_grad
    assert value.local_shards()[0].requires_grad


def test_wrapper_without_shards_holds_nothing_of_a_distributed_tensor() -> None:
    with rank_of(1, 2):
        meta = TensorMeta(torch.Size((4, 2)), (2, 1), torch.float32)
        spec = DTensorSpec(init_device_mesh("cpu", (2,)), (Shard(0),), tensor_meta=meta)
        held = pieces_of("table", DTensor(LocalShardsWrapper([], []), spec, requires_grad=False))
    assert held.pieces == ()
    assert held.size == (4, 2)


def test_wrapper_in_a_distributed_tensor_has_the_global_size() -> None:
    with rank_of(1, 2):
        shards = [torch.ones(2, 3), torch.ones(2, 1)]
        meta = TensorMeta(torch.Size((4, 8)), (8, 1), torch.float32)
        spec = DTensorSpec(init_device_mesh("cpu", (2,)), (Shard(0),), tensor_meta=meta)
        value = DTensor(LocalShardsWrapper(shards, [(2, 0), (2, 4)]), spec, requires_grad=False)
        held = pieces_of("table", value)
    assert held.size == (4, 8)
    assert boxes_of(held) == [((2, 0), (2, 3)), ((2, 4), (2, 1))]


def test_wrapper_that_knows_no_global_size_is_refused() -> None:
    with pytest.raises(InvalidStateError, match=r"'table' holds .* of size \(2, 2\); wrap local shards in a DTensor"):
        pieces_of("table", LocalShardsWrapper([torch.ones(2, 2)], [(2, 0)]))


def test_shards_of_two_dtypes_are_refused() -> None:
    value = LocalShardsWrapper([torch.ones(2, 2), torch.ones(2, 1, dtype=torch.int64)], [(0, 0), (0, 2)])
    with pytest.raises(InvalidStateError, match=r"'table' has shards of dtype torch\.int64 and torch\.float32"):
        pieces_of("table", value)


def test_memory_that_is_not_the_chunk_is_refused() -> None:
    class Careless(LocalShardsWrapper):
        def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
            return torch.ones(1)

    with pytest.raises(InvalidStateError, match=r"'table' hands out shape \(1,\)"):
        pieces_of("table", Careless([torch.ones(2, 2)], [(0, 0)]))


# Lookup


@pytest.mark.parametrize("count", [0, 1, 3, 4, 100])
def test_piece_is_found_by_its_offsets(count: int) -> None:
    rows = torch.arange(2 * count + 1)
    pieces = tuple(Piece(Box((2 * row,), (1,)), rows[2 * row : 2 * row + 1]) for row in range(count))
    held = Pieces(rows.shape, rows.dtype, False, pieces, True)
    for row in range(count):
        assert piece_at(held, (2 * row,)) is pieces[row]
        assert piece_at(held, (2 * row + 1,)) is None
    assert piece_at(held, (-1,)) is None
