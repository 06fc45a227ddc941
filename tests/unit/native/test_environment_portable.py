"""Systems that lack what Linux has (macOS, say): the package is imported and works without it, in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import holdfast

PRELUDE = """
import ctypes, fcntl, mmap, os, sys

LINUX = {
    os: ("O_DIRECT", "posix_fallocate", "posix_fadvise", "POSIX_FADV_DONTNEED", "POSIX_FADV_RANDOM",
         "POSIX_FADV_NORMAL", "POSIX_FADV_SEQUENTIAL", "POSIX_FADV_WILLNEED", "RWF_NOWAIT", "preadv", "pwritev",
         "sched_getaffinity", "memfd_create"),
    mmap: ("MADV_HUGEPAGE", "MAP_POPULATE", "MADV_POPULATE_WRITE"),
}
hidden = [name for module, names in LINUX.items() for name in names if hasattr(module, name)]
for module, names in LINUX.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)

find = ctypes.CDLL.__getattr__

def find_but_renameat2(library, name):
    if name == "renameat2":
        raise AttributeError(name)
    return find(library, name)

ctypes.CDLL.__getattr__ = find_but_renameat2
"""

ROUND_TRIP = """
import torch
import holdfast

path = sys.argv[1]
state = {
    "large": torch.arange(6_000_000), "strided": torch.rand(900, 700).T, "empty": torch.empty(0),
    "values": [1, "two", (3.0, None)], "text": "t" * 100_000,
}
for overwrite in (False, True):
    holdfast.save(state, path, overwrite=overwrite)
    loaded = holdfast.load(path)
    assert torch.equal(loaded["large"], state["large"])
    assert torch.equal(loaded["strided"], state["strided"])
    assert loaded["values"] == state["values"]
    assert loaded["text"] == state["text"]
target = {"strided": torch.zeros(700, 900)}
holdfast.load(target, path)
assert torch.equal(target["strided"], state["strided"])
with holdfast.open(path) as checkpoint:
    assert checkpoint["large"][10:13].tolist() == [10, 11, 12]
assert len(os.listdir(path)) == 3
try:
    holdfast.save(state, path, overwrite=False)
except holdfast.AlreadyPublishedError:
    print("hidden", len(hidden), "direct", hasattr(os, "O_DIRECT"))
"""


def test_nothing_of_linux_is_needed(tmp_path: Path) -> None:
    source = str(Path(holdfast.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PRELUDE + ROUND_TRIP, str(tmp_path / "checkpoint")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert words[2:] == ["direct", "False"]
    if sys.platform == "linux":
        assert int(words[1]) >= 10
