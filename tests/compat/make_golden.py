"""Writes the golden checkpoints of this version: python tests/compat/make_golden.py

They are made once, when a version is released, and committed: from then on every later version must load them, so that
they are never written again. The states are rebuilt in code by ``states``, which only ever grows.
"""

from __future__ import annotations

import dataclasses
import io
import math
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

import holdfast

DATA = Path(__file__).parent / "data"
VERSION = "v1-0.1.0"
ATTEMPT = "golden"


def states() -> dict[str, dict[Any, Any]]:
    """The state of each golden checkpoint, by name."""
    return {"rich": rich_state(), "values": value_state(), "pieces": pieces_state(), "quantised": quantised_state()}


def bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of ``dtype`` whose bytes count up from 0."""
    count = math.prod(shape) * dtype.itemsize
    raw = torch.arange(count, dtype=torch.int64) % (2 if dtype is torch.bool else 251)
    return raw.to(torch.uint8).view(dtype).view(shape)


def rich_state() -> dict[Any, Any]:
    """Every plain dtype, arrangements in memory, tied weights, arrays, and all kinds of nesting."""
    kinds = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
    kinds += " float4_e2m1fn_x2 bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 complex32 complex64 complex128"
    kinds += " bits1x8 bits2x4 bits4x2 bits8 bits16 uint1 uint4 uint7 int1 int4 int7"
    weight = bits(torch.float32, 6, 10)
    return {
        "dtypes": {kind: bits(getattr(torch, kind), 3, 5) for kind in kinds.split()},
        "model": {
            "embedding": weight,
            "head": weight,
            "transposed": weight.t(),
            "strided": weight[::2, 1::3],
            "scalar": torch.tensor(2.5),
            "empty": torch.zeros(0, 3),
            "trained": torch.arange(3.0, requires_grad=True),
            "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        },
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}, 1: {"step": torch.tensor(4.0), "ids": [0, 1]}}},
        "list": [torch.ones(2), {"x": 1, "y": torch.zeros(1)}, (torch.ones(1), "text", (torch.ones(1),))],
        "arrays": {"f8": np.linspace(0, 1, 5), "0-d": np.array(7), "big-endian": np.arange(3, dtype=">u2")},
        "a.b": {"c": torch.ones(1)},
        "重み": torch.full((2,), 5, dtype=torch.int8),
    }


def value_state() -> dict[Any, Any]:
    """Values of every type, without a tensor among them."""
    return {
        "plain": [None, True, False, 0, -1, 2**53, 2**200, 0.1, -0.0, math.inf, -math.inf, "text \x00 ☃", b"\x00\xff"],
        "nan": math.nan,
        "complex": complex(1.5, -math.inf),
        "containers": ([1, (2,), {3: 4, "five": {6}}], (), frozenset({(7, 8)})),
        "torch": (torch.float8_e4m3fn, torch.device("cuda", 1), torch.Size([2, 0, 3])),
        "numpy": [np.float16(0.5), np.uint64(2**64 - 1), np.bool_(True), np.complex64(1 + 2j), np.str_("x")],
        "keys": {None: 1, 2: 2, 2.5: 3, (1, "a"): 4, b"x": 5},
        "empty": {"dict": {}, "list": [], "tuple": (), "set": set()},
    }


def pieces_state() -> dict[Any, Any]:
    """Tensors that ``PiecesPlanner`` stores in pieces."""
    return {"matrix": bits(torch.float32, 12, 7), "vector": bits(torch.int16, 9), "step": 5}


def quantised_state() -> dict[Any, Any]:
    """Quantised tensors, which torch may no longer make one day."""
    values = torch.linspace(-3, 3, 12).view(3, 4)
    scales = torch.tensor([0.125, 0.25, 0.5])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "tensor": torch.quantize_per_tensor(values, 0.125, 3, torch.qint8),
            "channels": torch.quantize_per_channel(values, scales, torch.tensor([1, 0, 3]), 0, torch.quint8),
            "floats": torch.quantize_per_channel(values, scales, torch.tensor([0.5, 1, 2]), 0, torch.quint8),
        }


class PiecesPlanner(holdfast.DefaultSavePlanner):
    """Stores the first half of the rows of each tensor and the rest as pieces of their own."""

    def create_local_plan(self) -> holdfast.SavePlan:
        """The items of the default planner, those of tensors split in two."""
        plan = super().create_local_plan()
        items: list[holdfast.WriteItem] = []
        for item in plan.items:
            data = item.tensor_data
            if data is None:
                items.append(item)
                continue
            middle = data.size[0] // 2
            for start, stop in ((0, middle), (middle, data.size[0])):
                offsets = torch.Size([start, *[0] * (len(data.size) - 1)])
                chunk = holdfast.ChunkStorageMetadata(offsets, torch.Size([stop - start, *data.size[1:]]))
                index = holdfast.MetadataIndex(item.index.fqn, offsets)
                piece = dataclasses.replace(data, chunk=chunk)
                items.append(holdfast.WriteItem(index, holdfast.WriteItemType.SHARD, tensor_data=piece))
        return dataclasses.replace(plan, items=items)

    def transform_object(self, write_item: holdfast.WriteItem, object: Any) -> torch.Tensor | io.BytesIO:
        """The rows that the item is about."""
        data = super().transform_object(write_item, object)
        if write_item.tensor_data is None or not isinstance(data, torch.Tensor):
            return data
        chunk = write_item.tensor_data.chunk
        return data.narrow(0, chunk.offsets[0], chunk.sizes[0])


def write(directory: Path) -> None:
    """Save every state below ``directory``, under names that do not depend on when or where."""
    for name, state in states().items():
        notes = {"made by": "make_golden.py", "name": name}
        writer = holdfast.NativeWriter(directory / name, attempt=ATTEMPT, user_metadata=notes)
        holdfast.save(state, storage_writer=writer, planner=PiecesPlanner() if name == "pieces" else None)


def main() -> int:
    """Write the golden checkpoints of this version, unless they are there."""
    directory = DATA / VERSION
    if directory.exists() and "--replace" not in sys.argv[1:]:
        print(f"{directory} is there already; --replace only before it has been released")
        return 1
    shutil.rmtree(directory, ignore_errors=True)
    write(directory)
    total = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    print(f"{directory}: {total} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
