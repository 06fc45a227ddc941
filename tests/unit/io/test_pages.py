"""Pages of mapped files given back: only those of the file, and never their contents."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch

from holdfast._io import mapping as pages
from holdfast._io.mapping import MappedFile

SIZE = 64 * mmap.PAGESIZE

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="only Linux tells of mappings")


def resident(address: int) -> int:
    """How many KiB of the mapping at ``address`` are in memory."""
    with open("/proc/self/smaps") as mappings:
        here = False
        for line in mappings:
            if "-" in line.split()[0]:
                start, _, stop = line.split()[0].partition("-")
                here = int(start, 16) <= address < int(stop, 16)
            elif here and line.startswith("Rss:"):
                return int(line.split()[1])
    return 0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file with spaces").write_bytes(b"x" * SIZE)
    return tmp_path / "file with spaces"


def mapped(path: Path) -> torch.Tensor:
    return torch.from_file(str(path), shared=False, size=SIZE, dtype=torch.uint8)


def test_pages_of_the_file_go_and_come_back_the_same(path: Path) -> None:
    tensor = mapped(path)
    file = MappedFile(path)
    assert int(tensor.sum()) == SIZE * ord("x")
    before = resident(tensor.data_ptr())
    file.give_back(tensor.data_ptr(), SIZE)
    assert resident(tensor.data_ptr()) <= before - SIZE // 1024
    assert int(tensor.sum()) == SIZE * ord("x")


def test_other_memory_stays_as_it_is(path: Path) -> None:
    tensor = mapped(path)
    other = torch.full((SIZE,), 7, dtype=torch.uint8)
    MappedFile(path).give_back(other.data_ptr(), SIZE)
    MappedFile(path.with_name("nothing")).give_back(tensor.data_ptr(), SIZE)
    assert int(other.sum()) == SIZE * 7
    assert int(tensor[0]) == ord("x")


def test_less_than_a_page_is_nothing(path: Path) -> None:
    tensor = mapped(path)
    MappedFile(path).give_back(tensor.data_ptr() + 1, mmap.PAGESIZE)
    MappedFile(path).give_back(tensor.data_ptr(), 0)
    assert int(tensor[0]) == ord("x")


def test_where_the_system_does_not_tell_nothing_is_given_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_MAPPINGS", "/nothing/here")
    tensor = mapped(path)
    tensor.sum()
    before = resident(tensor.data_ptr())
    MappedFile(path).give_back(tensor.data_ptr(), SIZE)
    assert resident(tensor.data_ptr()) == before
