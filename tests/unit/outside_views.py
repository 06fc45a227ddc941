"""What the tests see of the library from outside, and what they have the system say to it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import holdfast

FSSPEC = "torch.distributed.checkpoint.fsspec_filesystem", "torch.distributed.checkpoint._fsspec_filesystem"
torch_fsspec: Any = importlib.import_module(FSSPEC[importlib.util.find_spec(FSSPEC[0]) is None])
"""torch's storage at URLs: the second is its name before 2.15."""


def held_bytes() -> int:
    """The host memory that is kept for snapshots."""
    return holdfast.prewarm({"a": torch.ones(1)}, max_host_bytes=0)


def writer_processes() -> list[int]:
    """The process ids of those children of this process that write checkpoints for it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # others come and go
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"holdfast._staging" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found


@contextlib.contextmanager
def page_cache(*, is_full: bool) -> Iterator[None]:
    """Have the system say that the page cache has every file, or that it has none."""
    read = os.preadv

    def asked(descriptor: int, buffers: list[Any], offset: int, flags: int = 0) -> int:
        if not flags & os.RWF_NOWAIT:
            return read(descriptor, buffers, offset, flags)
        if not is_full:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return sum(memoryview(buffer).nbytes for buffer in buffers)

    with mock.patch.object(os, "preadv", asked):
        yield


@contextlib.contextmanager
def locked_directory(path: Path) -> Iterator[None]:
    """Somebody else holds the lock of the directory ``path``."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
