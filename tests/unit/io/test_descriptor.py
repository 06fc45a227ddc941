from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast._process import CLOSED, Descriptor, opened


def is_open(number: int) -> bool:
    return os.path.exists(f"/proc/self/fd/{number}")


def open_one(path: Path) -> Descriptor:
    path.write_bytes(b"abc")
    return opened(map(os.open, (path,), (os.O_RDONLY,)))


def test_it_is_closed_with_the_last_reference(tmp_path: Path) -> None:
    descriptor = open_one(tmp_path / "file")
    number = int(descriptor)
    assert os.read(descriptor, 3) == b"abc"
    del descriptor
    assert not is_open(number)


def test_it_is_closed_once(tmp_path: Path) -> None:
    descriptor = open_one(tmp_path / "file")
    descriptor.close()
    again = open_one(tmp_path / "file")
    assert again == descriptor  # the system gives the number to the next one
    descriptor.close()
    del descriptor
    assert is_open(again)


def test_closed_is_not_open() -> None:
    CLOSED.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(CLOSED)


def test_what_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        opened(map(os.open, (tmp_path / "none",), (os.O_RDONLY,)))
