"""Tensors in every arrangement in memory: out of the state as values, and into targets in place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from outside_views import page_cache

import holdfast

Same = Callable[..., None]
Bits = Callable[[torch.Tensor], bytes]

MIB = 1 << 20


def arrangements() -> dict[str, torch.Tensor]:
    base = torch.arange(240.0).view(4, 5, 12)
    numbers = torch.complex(base, base.flip(0))
    return {
        "whole": base,
        "transposed": base.transpose(0, 2),
        "permuted": base.permute(1, 2, 0),
        "sliced": base[1:3, 2:, 3:11],
        "strided": base[::3, ::2, ::5],
        "one column": base[:, :, 7],
        "scalar": base[2, 3, 4],
        "expanded": base[:, :1, :1].expand(4, 6, 3),
        "expanded scalar": torch.tensor(2.5).expand(3, 2),
        "diagonal": base[0, :, :5].diagonal(),
        "unfolded": base[0].unfold(1, 5, 2),
        "flipped": base.flip(1),
        "offset": torch.arange(17, dtype=torch.int8)[3:],
        "channels last": torch.arange(120.0).view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "conjugate": numbers.conj(),
        "conjugate transposed": numbers.mH,
        "negative": numbers.conj().imag,
        "negative row by row": torch._neg_view(base),
        "real part": numbers.real,
        "no rows": base[4:],
        "no columns": base[:, :, 12:].transpose(0, 1),
        "nothing": torch.zeros(0),
    }


@pytest.mark.parametrize("name", sorted(arrangements()))
def test_every_arrangement_is_saved_as_its_values(name: str, path: str, same: Same) -> None:
    tensor = arrangements()[name]
    holdfast.save({"x": tensor}, path)
    loaded = holdfast.load(path)["x"]
    same(loaded, tensor)
    assert loaded.is_contiguous()


def test_all_arrangements_together_in_one_file(path: str, same: Same) -> None:
    holdfast.save(arrangements(), path)
    same(holdfast.load(path), arrangements())


def blank_like(tensor: torch.Tensor) -> torch.Tensor:
    """A target of the same shape whose memory is arranged in another way."""
    room = torch.full([2 * size + 1 for size in reversed(tensor.shape)], -1, dtype=tensor.dtype)
    return room[tuple(slice(1, None, 2) for _ in tensor.shape)].permute(tuple(reversed(range(tensor.ndim))))


@pytest.mark.parametrize("is_cached", [True, False])
def test_targets_of_any_arrangement_are_filled_in_place(is_cached: bool, path: str, bits: Bits) -> None:
    saved = arrangements()
    holdfast.save(saved, path)
    target = {key: blank_like(tensor) for key, tensor in saved.items()}
    rooms = {key: tensor._base for key, tensor in target.items()}
    originals = dict(target)
    with page_cache(is_full=is_cached):
        holdfast.load(target, path)
    for key, tensor in saved.items():
        assert target[key] is originals[key]
        assert bits(target[key]) == bits(tensor), key
        room = rooms[key]
        if room is not None and tensor.dtype.is_floating_point:
            # What lies between the elements of the target is not the load's to touch.
            target[key].fill_(-1)
            assert bool((room == -1).all()), key


def test_lazily_conjugated_and_negated_targets_get_the_values(path: str) -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    holdfast.save({"conjugate": numbers, "negative": torch.tensor([5.0, -6.0])}, path)
    target = {
        "conjugate": torch.zeros(2, dtype=torch.complex64).conj(),
        "negative": torch.zeros(2, dtype=torch.complex64).conj().imag,
    }
    assert target["conjugate"].is_conj()
    assert target["negative"].is_neg()
    holdfast.load(target, path)
    assert torch.equal(target["conjugate"].resolve_conj(), numbers)
    assert target["negative"].tolist() == [5.0, -6.0]


def test_an_expanded_target_is_refused(path: str) -> None:
    holdfast.save({"x": torch.ones(3, 4), "w": torch.ones(2)}, path)
    target = {"w": torch.zeros(2), "x": torch.zeros(3, 1).expand(3, 4)}
    with pytest.raises(holdfast.InvalidStateError, match="'x' in the target has elements that share memory") as caught:
        holdfast.load(target, path)
    assert caught.value.key == "x"
    assert torch.equal(target["w"], torch.zeros(2))


def test_an_expanded_target_of_size_one_or_none_is_fine(path: str) -> None:
    holdfast.save({"one": torch.ones(1, 2), "none": torch.ones(0, 3)}, path)
    target = {"one": torch.zeros(2).expand(1, 2), "none": torch.zeros(0, 1).expand(0, 3)}
    holdfast.load(target, path)
    assert target["one"].tolist() == [[1.0, 1.0]]


def large_tensors() -> dict[str, torch.Tensor]:
    """Odd sizes above one slab, so that jobs, blocks and pages end at different places."""
    generator = torch.Generator().manual_seed(3)
    raw = torch.randint(-(2**31), 2**31, (5 * MIB + 1234,), generator=generator, dtype=torch.int32)
    plane = raw[: 2311 * 2003].view(2311, 2003)
    return {
        "odd": raw.view(torch.uint8)[1 : 17 * MIB + 334],
        "floats": raw.view(torch.float32)[3:],
        "transposed": plane.t(),
        "columns": plane[:, 1:1900:2],
        "bytes": torch.arange(77, dtype=torch.uint8),
    }


@pytest.mark.parametrize("is_cached", [True, False])
def test_large_tensors_go_through_several_slabs(is_cached: bool, path: str, bits: Bits) -> None:
    saved = large_tensors()
    holdfast.save(saved, path)
    with page_cache(is_full=is_cached):
        loaded = holdfast.load(path)
    target = {key: torch.zeros_like(tensor) for key, tensor in saved.items()}
    target["odd"] = torch.zeros(2 * saved["odd"].numel(), dtype=torch.uint8)[::2]
    target["columns"] = torch.zeros(950, 2311, dtype=torch.int32).t()
    with page_cache(is_full=is_cached):
        report = holdfast.load(target, path)
    assert report.bytes_read >= sum(tensor.nbytes for tensor in saved.values())
    for key, tensor in saved.items():
        assert bits(loaded[key]) == bits(tensor), key
        assert bits(target[key]) == bits(tensor), key


def test_many_small_tensors_of_odd_sizes(path: str, same: Same) -> None:
    state = {f"layer.{number}": torch.arange(number % 97, dtype=torch.uint8) + number % 100 for number in range(1500)}
    holdfast.save(state, path)
    same(holdfast.load(path), state)
    assert len(list(Path(path).glob("data-*"))) == 1


def test_small_tensors_share_reads_with_large_neighbours(path: str, bits: Bits) -> None:
    saved = {}
    for number in range(40):
        saved[f"small {number}"] = torch.full((number + 1,), number, dtype=torch.int16)
        saved[f"large {number}"] = torch.full((70_001 + number,), number, dtype=torch.float64)
    holdfast.save(saved, path)
    target = {key: torch.zeros_like(tensor) for key, tensor in saved.items()}
    holdfast.load(target, path)
    for key, tensor in saved.items():
        assert bits(target[key]) == bits(tensor), key


def test_requires_grad_and_parameters(path: str) -> None:
    leaf = torch.arange(3.0, requires_grad=True)
    parameter = torch.nn.Parameter(torch.ones(2))
    holdfast.save({"leaf": leaf, "result": leaf * 2, "parameter": parameter, "frozen": torch.ones(1)}, path)
    loaded = holdfast.load(path)
    assert {key: tensor.requires_grad for key, tensor in loaded.items()} == {
        "leaf": True,
        "result": True,
        "parameter": True,
        "frozen": False,
    }
    assert all(tensor.is_leaf for tensor in loaded.values())
    target = {
        "leaf": torch.zeros(3, requires_grad=True),
        "result": torch.zeros(3),
        "parameter": torch.nn.Parameter(torch.zeros(2)),
        "frozen": torch.zeros(1, requires_grad=True),
    }
    originals = dict(target)
    holdfast.load(target, path)
    for key, original in originals.items():
        assert target[key] is original
    assert target["leaf"].tolist() == [0.0, 1.0, 2.0]
    assert target["leaf"].requires_grad
    assert not target["result"].requires_grad
    assert type(target["parameter"]) is torch.nn.Parameter
    assert target["frozen"].requires_grad
    target["leaf"].sum().backward()
    assert target["leaf"].grad is not None


def test_meta_targets_are_replaced_by_real_tensors(path: str) -> None:
    holdfast.save({"a": {"m": torch.arange(3.0), "pair": (torch.ones(2), 1)}, "p": torch.ones(2)}, path)
    target = {
        "a": {"m": torch.zeros(3, device="meta"), "pair": (torch.zeros(2, device="meta"), 0)},
        "p": torch.nn.Parameter(torch.zeros(2, device="meta")),
    }
    inner = target["a"]
    holdfast.load(target, path)
    assert target["a"] is inner
    assert target["a"]["m"].tolist() == [0.0, 1.0, 2.0]
    assert isinstance(target["a"]["pair"], tuple)
    assert target["a"]["pair"][0].tolist() == [1.0, 1.0]
    assert target["a"]["pair"][1] == 1
    assert isinstance(target["p"], torch.nn.Parameter)
    assert target["p"].tolist() == [1.0, 1.0]


def test_a_failed_load_leaves_meta_targets_as_they_were(path: str) -> None:
    holdfast.save({"x": torch.ones(3)}, path)
    target = {"x": torch.zeros(3, device="meta"), "y": torch.zeros(3, device="meta")}
    with pytest.raises(holdfast.MismatchError):
        holdfast.load(target, path)
    assert target["x"].is_meta
    assert target["y"].is_meta


# Plain tensors that say which parts of a global one lie in them, as torch has it since 2.14 (CheckpointableTensor).

LABELLED_ROWS = {0: 3, 1: 4, 2: 0, 3: 1}  # where the rows of the global tensor lie in the local one, which has six


def labelled(local: torch.Tensor, **changes: Any) -> Any:
    labels = {"global_shape": (4, 3), "global_offsets": ((2, 0), (0, 0)), "local_offsets": ((0, 0), (3, 0))}
    for name, value in {**labels, "local_sizes": ((2, 3), (2, 3)), **changes}.items():
        setattr(local, name, value)
    return local


@pytest.mark.parametrize("kind", ["plain", "parameter", "meta"])
@pytest.mark.parametrize("storage", [holdfast.NativeWriter, holdfast.FileSystemWriter])
def test_parts_of_a_global_tensor_in_a_plain_one(path: str, kind: str, storage: Any) -> None:
    local = torch.arange(18.0).view(6, 3)
    holdfast.save({"w": labelled(local)}, storage_writer=storage(path))
    assert torch.equal(holdfast.read(path)["w"], local[list(LABELLED_ROWS.values())])
    made = torch.full((6, 3), -1.0, device="meta" if kind == "meta" else "cpu")
    target = {"w": labelled(torch.nn.Parameter(made) if kind == "parameter" else made)}
    assert holdfast.load(target, path).loaded == ("w",)
    for row, place in LABELLED_ROWS.items():
        assert torch.equal(target["w"][place], local[LABELLED_ROWS[row]])
    if kind != "meta":
        assert target["w"][[2, 5]].eq(-1).all(), "what belongs to nobody stays"


@pytest.mark.skipif(not hasattr(dcp, "CheckpointableTensor"), reason="this torch has no CheckpointableTensor")
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_torch_means_the_same_by_the_parts(tmp_path: Path) -> None:
    local = torch.arange(18.0).view(6, 3)
    holdfast.save({"w": labelled(local)}, storage_writer=holdfast.FileSystemWriter(tmp_path / "ours"))
    dcp.save({"w": labelled(local.clone())}, checkpoint_id=tmp_path / "torchs")
    loaded, by_torch = ({"w": labelled(torch.full((6, 3), -1.0))} for _ in range(2))
    holdfast.load(loaded, tmp_path / "torchs")
    dcp.load(by_torch, checkpoint_id=tmp_path / "ours")
    assert torch.equal(loaded["w"], by_torch["w"])


def test_parts_that_cannot_be_are_refused(path: str) -> None:
    refused = {
        "one": labelled(torch.ones(6, 3), local_sizes=((2, 3),)),
        "large": labelled(torch.ones(4, 3)),
        "outside": labelled(torch.ones(6, 3), global_shape=(3, 3)),
    }
    with pytest.raises(holdfast.InvalidStateError, match="one of each for each part") as raised:
        holdfast.save(refused, path)
    assert raised.value.keys == tuple(refused)
