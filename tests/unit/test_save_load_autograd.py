"""Loading in place is a change in place: autograd knows of it, as after torch's own copies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import holdfast

LARGE = 1_500_000


def save(state: dict[str, Any], path: str, *, native: bool) -> None:
    if native:
        holdfast.save(state, path)
    else:
        holdfast.save(state, storage_writer=holdfast.FileSystemWriter(path))


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("size", [5, LARGE])
def test_backward_through_a_tensor_that_was_loaded_into_is_refused(path: str, size: int, native: bool) -> None:
    save({"weight": torch.full((size,), 3.0)}, path, native=native)
    weight = torch.nn.Parameter(torch.ones(size))
    loss = (weight * weight).sum()
    holdfast.load({"weight": weight}, path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    (weight * weight).sum().backward()
    assert torch.equal(weight.grad, torch.full((size,), 6.0))


def targets() -> dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
    """What is loaded into, and what must have changed with it."""

    def view() -> tuple[torch.Tensor, torch.Tensor]:
        base = torch.zeros(20)
        return base[5:15], base

    def column() -> tuple[torch.Tensor, torch.Tensor]:
        base = torch.zeros(10, 3)
        return base[:, 1], base

    def twice(make: Callable[[], torch.Tensor]) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        def both() -> tuple[torch.Tensor, torch.Tensor]:
            tensor = make()
            return tensor, tensor

        return both

    def of_parameter() -> tuple[torch.Tensor, torch.Tensor]:
        parameter = torch.nn.Parameter(torch.zeros(10))
        return parameter.detach(), parameter

    return {
        "plain": twice(lambda: torch.zeros(10)),
        "parameter": twice(lambda: torch.nn.Parameter(torch.zeros(10))),
        "of a parameter": of_parameter,
        "view": view,
        "column": column,
        "cast": twice(lambda: torch.zeros(10, dtype=torch.bfloat16)),
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("kind", targets())
def test_the_version_moves_where_that_of_torch_moves(path: str, kind: str, native: bool) -> None:
    save({"weight": torch.arange(10.0)}, path, native=native)
    leaf, owner = targets()[kind]()
    before = owner._version
    holdfast.load({"weight": leaf}, path, options=holdfast.LoadOptions(cast=True))
    assert owner._version > before
    if kind != "cast" and not native:
        before = owner._version
        torch_dcp.load({"weight": leaf}, checkpoint_id=path)
        assert owner._version > before


def test_what_is_not_loaded_keeps_its_version(path: str) -> None:
    holdfast.save({"a": torch.ones(3), "b": torch.ones(4)}, path)
    target = {"a": torch.zeros(3), "b": torch.zeros(3), "c": torch.zeros(3)}
    holdfast.load(target, path, strict=False)
    assert target["a"]._version > 0
    assert target["b"]._version == target["c"]._version == 0


def test_a_load_that_fails_half_way_counts_too(path: str) -> None:
    holdfast.save({"a": torch.ones(LARGE), "b": torch.ones(LARGE)}, path)
    (data,) = Path(path).glob("data-*")
    content = bytearray(data.read_bytes())
    content[-100] ^= 1
    data.write_bytes(content)
    target = {"a": torch.zeros(LARGE), "b": torch.zeros(LARGE)}
    with pytest.raises(holdfast.CorruptError):
        holdfast.load(target, path)
    assert all(tensor._version > 0 for tensor in target.values() if tensor.any())


def test_inference_tensors_have_no_version_and_are_loaded(path: str) -> None:
    holdfast.save({"a": torch.ones(3), "b": torch.ones(3, 2)}, path)
    with torch.inference_mode():
        target = {"a": torch.zeros(3), "b": torch.zeros(2, 3).T}
    holdfast.load(target, path)
    assert all(tensor.is_inference() and bool(tensor.all()) for tensor in target.values())


def test_tensors_that_wrap_others_count_with_them(path: str) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    holdfast.save({"a": TwoTensor(torch.ones(3), torch.ones(3))}, path)
    target = TwoTensor(torch.zeros(3), torch.zeros(3))
    holdfast.load({"a": target}, path)
    assert target._version > 0
    assert target.a._version > 0
    assert bool(target.a.all())


def test_sharded_tensors_count_with_their_local_ones(path: str, tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        holdfast.save({"a": torch.arange(6.0)}, path, no_dist=True)
        target = distribute_tensor(torch.zeros(6), mesh, [Shard(0)]).requires_grad_()
        loss = (target * target).sum()
        holdfast.load({"a": target}, path, no_dist=True)
        assert target.to_local().detach()._version > 0
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    finally:
        torch.distributed.destroy_process_group()
