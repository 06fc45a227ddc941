"""Memory that runs out: at each buffer that is allocated, and at any allocation at all."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import holdfast
from holdfast import hf
from torture import exports
from torture.crew import Child
from torture.part import Options, PartResult
from torture.samples import get_ready_to_fork
from torture.saves import EXPORT_MODES, found_version, save, state_of

NAME = "memory"
SHAPES = ("small", "blob", "slabs", "values")
_EXPORT, _CONVERTED = "export", "export, other types"
ACTIONS = ("save", "load", "load into", "open", _EXPORT, _CONVERTED)


class _Allocator:
    """Counts what is allocated for buffers and targets; the ``number``-th is refused, as the system would.

    What maps a file, to ask about its pages, allocates nothing.
    """

    def __init__(self, number: int | None) -> None:
        self.number = number
        self.calls = 0

    def wrap(self, real: Callable[..., Any], refusal: Exception) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += "offset" not in kwargs
            if self.calls == self.number and "offset" not in kwargs:
                raise refusal
            return real(*args, **kwargs)

        return call


@contextmanager
def _allocating(number: int | None) -> Iterator[_Allocator]:
    allocator = _Allocator(number)
    refused = RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
    with (
        mock.patch.object(mmap, "mmap", allocator.wrap(mmap.mmap, OSError(errno.ENOMEM, "Cannot allocate memory"))),
        mock.patch.object(torch, "empty", allocator.wrap(torch.empty, refused)),
        mock.patch.object(torch, "_empty_affine_quantized", allocator.wrap(torch._empty_affine_quantized, refused)),
    ):
        yield allocator


_SMALL_FILES = hf.ExportOptions(shard_bytes=exports.SHARD_BYTES)


def _first(path: Path, action: str, shape: str) -> list[str]:
    """Have version 1 there; what is beside it, and in it."""
    save(path, EXPORT_MODES[0] if action in (_EXPORT, _CONVERTED) else "fresh", shape, version=1)
    return _names(path)


def _names(path: Path) -> list[str]:
    """Without the ids of attempts."""
    own = ("data-", "index-")
    names = [next((start for start in own if name.startswith(start)), name) for name in os.listdir(path)]
    return sorted(names) + exports.leftovers(path)


def act(action: str, path: Path, shape: str) -> None:
    """What is done while memory runs out."""
    if action == "save":
        save(path, "replacing", shape, version=2)
    elif action == _EXPORT:
        save(path, EXPORT_MODES[1], shape, version=2)
    elif action == _CONVERTED:
        tensors = exports.tensors_of(state_of(2, shape))
        if "model" in tensors:
            tensors["model"]["weight"] = tensors["model"]["weight"].to(torch.float64)
        hf.export(tensors, path, dtype=torch.float32, assets=exports.assets(2), overwrite=True, options=_SMALL_FILES)
    elif action == "load":
        holdfast.load(path)
    elif action == "load into":
        holdfast.load(state_of(0, shape), path)
    else:
        with holdfast.open(path) as checkpoint:
            for key in checkpoint:
                found = checkpoint[key]
                if isinstance(found, holdfast.StoredTensor):
                    found[...]


def injected(folder: Path, action: str, shape: str, number: int | None) -> dict[str, Any]:
    """What came of refusing one allocation: how many there were, and what is wrong."""
    path = folder / "injected" / "checkpoint"
    before = _first(path, action, shape)
    holdfast.release()  # buffers that are kept would not be asked for
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    problems: list[str] = []
    error: Exception | None = None
    with _allocating(number) as allocator:
        try:
            act(action, path, shape)
        except Exception as raised:
            error = raised
    struck = number is not None and allocator.calls >= number
    if struck and not (isinstance(error, holdfast.StorageError) and error.errno == errno.ENOMEM):
        problems.append(f"{type(error).__name__}: {error}")
    if number is None and error is not None:
        problems.append(f"without a fault: {error!r}")
    del error
    if threading.active_count() != threads or len(os.listdir("/proc/self/fd")) != files:
        problems.append("a thread or a descriptor is left")
    problems += _after(path, shape, {1} if struck else {1, 2})
    if _names(path) != before:
        problems.append(f"left: {_names(path)}")
    shutil.rmtree(path)
    return {"calls": allocator.calls, "struck": struck, "problems": problems}


def limited(folder: Path, action: str, shape: str, margin: int) -> dict[str, Any]:
    """What came of doing it with ``margin`` bytes of address space to be had."""
    path = folder / "limited" / "checkpoint"
    _first(path, action, shape)
    holdfast.release()

    def child() -> str:
        with open("/proc/self/statm") as file:
            limit = int(file.read().split()[0]) * resource.getpagesize() + margin
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            act(action, path, shape)
        except (holdfast.CheckpointError, MemoryError) as error:
            return f"{type(error).__name__}"
        except Exception as error:
            return f"foreign {type(error).__name__}: {error}"
        return "success"

    end = Child(child).end(timeout_s=30.0)
    problems: list[str] = []
    if end.told is None:
        problems.append(f"{'hung' if end.hung else f'died: signal {end.signal}, status {end.status}'}")
    elif end.told.startswith("foreign"):
        problems.append(end.told)
    problems += _after(path, shape, {1, 2} if end.told == "success" else {1})
    shutil.rmtree(path)
    return {"told": end.told or "died", "problems": problems}


def _after(path: Path, shape: str, allowed: set[int | None]) -> list[str]:
    try:
        version = found_version(path, shape)
    except Exception as error:
        return [f"afterwards: {type(error).__name__}: {error}"]
    return [] if version in allowed else [f"version {version} is there, of {allowed}"]


def run(options: Options) -> PartResult:
    """Refuse each allocation in turn; then run out of address space, a little later each time."""
    get_ready_to_fork()
    shapes = SHAPES[:1] if options.quick else SHAPES
    violations: list[str] = []
    outcomes: Counter[str] = Counter()
    struck = 0
    for action in ACTIONS:
        for shape in shapes:
            calls = injected(options.folder, action, shape, None)["calls"]
            for number in range(1, calls + 1):
                told = injected(options.folder, action, shape, number)
                struck += told["struck"]
                violations += [f"{action}, {shape}, allocation {number}: {each}" for each in told["problems"]]
                options.progress(struck, struck)
    margins = [1 << 21, 1 << 25] if options.quick else [step << 20 for step in (1, 2, 4, 8, *range(16, 320, 16), 512)]
    for action in ACTIONS:
        for shape in shapes:
            for margin in margins:
                told = limited(options.folder, action, shape, margin)
                outcomes[f"address space: {told['told']}"] += 1
                violations += [f"{action}, {shape}, {margin >> 20} MiB: {each}" for each in told["problems"]]
    return PartResult(
        fault="out of memory at each buffer allocation, and at any allocation as address space runs out",
        must_hold="a clean error, nothing published, no thread, descriptor or file left",
        injected=struck + sum(outcomes.values()),
        required=30,
        violations=violations,
        counts={"buffer allocations refused": struck, **outcomes},
    )
