"""Small checkpoints with something of everything, and which key each byte of their data files belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import holdfast
from holdfast._native.catalog import read_catalog


def small_state(seed: int = 0) -> dict[str, Any]:
    """A few kilobytes: shapes, dtypes, tied weights, an array, values inside and outside of the manifest."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(7, 5, generator=generator)
    return {
        "model": {"embed": weight, "head": weight, "bias": torch.randn(3, generator=generator).to(torch.bfloat16)},
        "layers": [torch.randint(0, 99, (2, 3), generator=generator), (torch.tensor(True), "text")],
        "optimizer": {"state": {0: {"exp_avg": torch.randn(40, 30, generator=generator)}}, "betas": (0.9, 0.999)},
        "array": np.arange(5, dtype=np.int16),
        "complex": torch.ones(2, dtype=torch.complex64),
        "empty": torch.zeros(0, 4),
        "note": "täst " * 20_000,
        "step": 12 + seed,
        "best": float("inf"),
    }


def large_state(seed: int = 0) -> dict[str, Any]:
    """Some megabytes: several blocks, a transposed tensor, bytes that begin anywhere in a page."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "blocks": torch.randint(0, 256, (2_500_001,), dtype=torch.uint8, generator=generator),
        "turned": torch.randn(300, 411, generator=generator).T,
        "blob": bytes(range(256)) * 400,
        "step": seed,
    }


def get_ready_to_fork() -> None:
    """Have torch compute in the calling thread alone: children that are forked have no others."""
    torch.set_num_threads(1)


@contextmanager
def one_file_each() -> Iterator[None]:
    """For the length of the block, every chunk goes to a data file of its own."""
    with mock.patch("holdfast._native.packer.DataFile.takes", lambda file, chunk: not file.entries):
        yield


def save(state: dict[str, Any], path: Path, *, attempt: str = "sample") -> Path:
    """``path``, where ``state`` is saved now; the same bytes each time."""
    writer = holdfast.NativeWriter(path, attempt=attempt, overwrite=False, user_metadata={"run": 7})
    holdfast.save(state, storage_writer=writer)
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Bytes ``begin`` to ``end`` of the file ``name`` hold part of ``key``."""

    name: str
    key: str
    begin: int
    end: int


def chunks_of(path: Path) -> list[Chunk]:
    """Every chunk of the checkpoint that has bytes."""
    catalog = read_catalog(path)
    index, manifest = catalog.index, catalog.manifest
    return [
        Chunk(name=manifest.files[file].name, key=manifest.tensors[tensor].key, begin=offset, end=offset + nbytes)
        for file, tensor, offset, nbytes in zip(
            index.file.tolist(), index.tensor.tolist(), index.offset.tolist(), index.bytes.tolist(), strict=True
        )
        if nbytes
    ]


def refusal(call: Callable[[], object]) -> Exception | None:
    """What ``call`` raised; None when it returned."""
    try:
        call()
    except Exception as error:
        return error
    return None


def not_named(error: Exception | None, file: Path, *, key: str | None = None, at: int | None = None) -> str | None:
    """What is wrong with an error that should tell of damage in ``file``; None when nothing is."""
    if error is None:
        return "not detected"
    if not isinstance(error, holdfast.CorruptError):
        return f"a {type(error).__name__}: {error}"
    if error.path != str(file):
        return f"names {error.path}: {error.message}"
    if "\n" in error.message or file.name not in error.message:
        return f"does not say it in one line that names the file: {error.message!r}"
    if key is not None and (error.key != key or repr(key) not in error.message):
        return f"names the key {error.key!r} instead of {key!r}"
    if at is not None and (error.span is None or not error.span[0] <= at < error.span[1]):
        return f"names bytes {error.span}, and byte {at} is damaged"
    return None
