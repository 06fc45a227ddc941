"""How much memory a save or load takes beyond the state: bounded, whatever the size and the strides."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast

LIMIT = 256 << 20
FEW_LIMIT = 16 << 20
STATE_BYTES = 1 << 29
NEEDED_DISK_BYTES = 3 * STATE_BYTES
NEEDED_MEMORY_BYTES = 4 * STATE_BYTES

# Each step prints how far the resident memory rose above where it was when the step began.
SCRIPT = """
import json, os, shutil, sys
import torch
import holdfast

directory, size = sys.argv[1], int(sys.argv[2])
side = int((size // 4) ** 0.5)

def memory(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(name + ":"))

def growth(action):
    with open("/proc/self/clear_refs", "w") as control:
        control.write("5")
    before = memory("VmRSS")
    result = action()
    return memory("VmHWM") - before, result

def at(name):
    return os.path.join(directory, name)

# What a first use allocates for good, threads and tables, is no matter of size.
holdfast.save({"a": torch.ones(10)}, at("first"))
holdfast.load(at("first"))

found = {}
square = torch.arange(side * side, dtype=torch.float32).view(side, side)
found["save"], _ = growth(lambda: holdfast.save({"a": square}, at("square")))
found["save transposed"], _ = growth(lambda: holdfast.save({"a": square.T}, at("transposed")))
shutil.rmtree(at("transposed"))
checksum = square.sum(dtype=torch.float64).item()
holdfast.release()
FEW = holdfast.SaveOptions(max_host_bytes=4 << 20, stage="overlap", prove=True)
found["save through few buffers"], _ = growth(lambda: holdfast.save({"a": square}, at("few"), options=FEW))
holdfast.release()
live = growth(lambda: holdfast.async_save({"a": square}, at("few"), options=FEW).result())
found["async_save of what is in memory"], _ = live
shutil.rmtree(at("few"))
square.zero_()
found["load into transposed"], _ = growth(lambda: holdfast.load({"a": square.T}, at("square")))
assert square.sum(dtype=torch.float64).item() == checksum
assert square[1, 0].item() == 1.0
square.zero_()
found["load"], report = growth(lambda: holdfast.load({"a": square}, at("square")))
assert square.sum(dtype=torch.float64).item() == checksum
found["load verified bytes"] = report.bytes_read
half = square[: side // 2].to(torch.bfloat16)
del square
narrow = torch.zeros(side, side, dtype=torch.bfloat16)
CAST = holdfast.LoadOptions(cast=True)
found["load with a cast"], _ = growth(lambda: holdfast.load({"a": narrow}, at("square"), options=CAST))
assert torch.equal(narrow[: side // 2], half)
print(json.dumps(found))
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="holdfast-memory-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def available_memory() -> int:
    with open("/proc/meminfo") as info:
        return next(int(line.split()[1]) << 10 for line in info if line.startswith("MemAvailable:"))


def test_memory_beyond_the_state_is_bounded(directory: Path) -> None:
    if not os.path.exists("/proc/self/clear_refs"):
        pytest.skip("no way to measure the peak of resident memory here")
    if shutil.disk_usage(directory).free < NEEDED_DISK_BYTES or available_memory() < NEEDED_MEMORY_BYTES:
        pytest.skip("not enough disk or memory here for a state of 512 MiB")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(directory), str(STATE_BYTES)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(holdfast.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found.pop("load verified bytes") >= STATE_BYTES * 0.99  # the square is a little smaller
    few = {step: found.pop(step) for step in ("save through few buffers", "async_save of what is in memory")}
    assert max(few.values()) < FEW_LIMIT, few
    assert len(found) == 5
    over = {step: f"{growth >> 20} MiB" for step, growth in found.items() if growth > LIMIT}
    assert not over, f"of {found}"
