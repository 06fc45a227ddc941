"""Directories to try files in: one on the disk, one in memory where there is such a place."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY_DIRECTORY = "/dev/shm"


@pytest.fixture(params=["disk", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
        return
    if not os.access(MEMORY_DIRECTORY, os.W_OK):
        pytest.skip(f"no {MEMORY_DIRECTORY} here")
    path = Path(tempfile.mkdtemp(dir=MEMORY_DIRECTORY, prefix="holdfast-test-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)
