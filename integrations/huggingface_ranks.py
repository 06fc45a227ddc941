"""What the ranks do: shard a model, export it, load a folder into it. Each function runs on all ranks of a crew."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_models import MODELS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast
from holdfast import hf

# It tells every rank that comparing a tensor split twice by one dimension takes two steps.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def export_model(name: str, path: Path, assets: Path, dtype: torch.dtype | None = None) -> str:
    """Export the model ``name``, sharded over all ranks, in several files; a note on how."""
    model = _sharded(name)
    mapping = hf.Mapping.from_transformers(model)
    state = model.state_dict()
    assert any(isinstance(tensor, DTensor) for tensor in state.values())
    options = hf.ExportOptions(shard_bytes=60_000)
    hf.export(state, path, mapping=mapping, dtype=dtype, assets=assets, options=options)
    if dist.get_rank() == 0:
        assert holdfast.verify(path).ok
    return _note(state)


def export_in_background(name: str, path: Path, assets: Path) -> str:
    """The same with ``async_export``; the state is changed as soon as it may be."""
    model = _sharded(name)
    mapping = hf.Mapping.from_transformers(model)
    state = model.state_dict()
    handle = hf.async_export(state, path, mapping=mapping, assets=assets)
    handle.wait_staged()
    for tensor in state.values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
    handle.result()
    return _note(state)


def load_model(name: str, path: Path) -> str:
    """Load the folder ``path`` into the model ``name``, which was made without memory, and compare all of it."""
    model = MODELS[name].make_empty()
    MODELS[name].shard(model, dist.get_world_size())
    model.to_empty(device="cpu")
    model.tie_weights()
    state = model.state_dict()
    mapping = hf.Mapping.from_transformers(model)
    report = holdfast.load(state, path, options=holdfast.LoadOptions(mapping=mapping))
    assert not report.unexpected, report.unexpected
    wanted = MODELS[name].make().state_dict()
    assert list(model.state_dict()) == list(wanted)
    assert_equal(whole(model.state_dict()), wanted)
    return _note(state)


def export_odd_tensors(path: Path) -> str:
    """Export tensors that other writers get wrong, sharded and replicated."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {}
    for key, tensor in odd_tensors().items():
        # gloo cannot send float8: every rank takes its part by itself.
        length = tensor.shape[0] if tensor.ndim else 0
        if length < dist.get_world_size() or length % dist.get_world_size():
            state[key] = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
        else:
            part = tensor.chunk(dist.get_world_size())[dist.get_rank()].clone()
            state[key] = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
    state["uneven"] = distribute_tensor(torch.arange(7 * 3).reshape(7, 3), mesh, [Shard(0)])
    hf.export(state, path)
    return f"{len(state)} tensors"


def odd_tensors() -> dict[str, torch.Tensor]:
    """0-d, empty, and of every dtype that safetensors has a name for."""
    numbers = torch.arange(8 * 6).reshape(8, 6)
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    signed = (torch.int64, torch.int32, torch.int16, torch.int8)
    unsigned = (torch.uint64, torch.uint32, torch.uint16, torch.uint8)
    return {
        "zero-d": torch.tensor(1.5),
        "zero-d.int": torch.tensor(7),
        "empty": torch.empty(0, 4),
        "bool": numbers % 3 == 0,
        **{str(dtype).removeprefix("torch."): numbers.to(dtype) for dtype in (*floats, *signed, *unsigned)},
    }


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """``state`` with plain tensors in place of sharded ones."""
    return {key: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for key, tensor in state.items()}


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Fail, naming the keys, unless both have the same keys, dtypes, shapes and bytes."""
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())[:10]
    different = [
        f"{key}: {found[key].dtype} {tuple(found[key].shape)} for {tensor.dtype} {tuple(tensor.shape)}"
        for key, tensor in wanted.items()
        if found[key].dtype is not tensor.dtype or found[key].shape != tensor.shape or not _same(found[key], tensor)
    ]
    assert not different, f"{len(different)} tensors differ: {different[:10]}"


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    left, right = (tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in (left, right))
    return torch.equal(left, right)


def _sharded(name: str) -> Any:
    gc.collect()
    model = MODELS[name].make()
    MODELS[name].shard(model, dist.get_world_size())
    return model


def _note(state: dict[str, Any]) -> str:
    kinds = {tuple(map(str, tensor.placements)) for tensor in state.values() if isinstance(tensor, DTensor)}
    return f"{len(state)} tensors, {' '.join(sorted('x'.join(kind) for kind in kinds))}"
