"""Calls that a signal cuts short: tried again, or known to have been done, but never an error."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast._io import posix
from holdfast._io.direct import InputFile
from holdfast.errors import StorageError

ACTIONS: dict[str, Callable[[Path], object]] = {
    "link": lambda path: posix.link_new(path / "source", path / "target"),
    "rename": lambda path: posix.replace(path / "source", path / "target"),
    "unlink": lambda path: posix.remove(path / "source"),
    "mkdir": lambda path: posix.make_directories(path / "new"),
    "lstat": lambda path: posix.file_status(path / "source"),
    "stat": lambda path: posix.make_directories(path),
    "listdir": lambda path: posix.list_names(path),
    "close": lambda path: posix.sync_directory(path),
}


def interrupt(monkeypatch: pytest.MonkeyPatch, name: str, *, times: int, is_done: bool) -> list[int]:
    """Lets a call of ``os`` be interrupted that often, though what it is for may be done."""
    real, interrupted = getattr(os, name), [0]

    def call(*args: Any, **kwargs: Any) -> Any:
        if interrupted[0] == times:
            return real(*args, **kwargs)
        interrupted[0] += 1
        if is_done:
            real(*args, **kwargs)
        raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))

    monkeypatch.setattr(os, name, call)
    return interrupted


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("name", [name for name in ACTIONS if name != "close"])
def test_an_interrupted_call_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, times: int
) -> None:
    (tmp_path / "source").write_bytes(b"bytes")
    with monkeypatch.context() as patch:
        interrupted = interrupt(patch, name, times=times, is_done=False)
        ACTIONS[name](tmp_path)
        assert interrupted == [times]
    if name in ("link", "rename"):
        assert (tmp_path / "target").read_bytes() == b"bytes"
    if name in ("link", "rename", "unlink"):
        assert not (tmp_path / "source").exists()


@pytest.mark.parametrize("name", ACTIONS)
def test_a_call_that_is_done_though_it_was_interrupted_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "source").write_bytes(b"bytes")
    with monkeypatch.context() as patch:
        interrupt(patch, name, times=1, is_done=True)
        ACTIONS[name](tmp_path)
    if name in ("link", "rename"):
        assert (tmp_path / "target").read_bytes() == b"bytes"
        assert not (tmp_path / "source").exists()


def test_a_rename_of_nothing_is_an_error_all_the_same(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        posix.replace(tmp_path / "nothing", tmp_path / "target")
    assert caught.value.errno == errno.ENOENT


@pytest.mark.parametrize(("code", "done"), [(0, True), (errno.ENOENT, True), (errno.EEXIST, False)])
def test_an_interrupted_rename_that_refuses_to_replace(monkeypatch: pytest.MonkeyPatch, code: int, done: bool) -> None:
    answers = [errno.EINTR, code]

    class Function:
        argtypes: object = None
        restype: object = None

        def __call__(self, *args: object) -> int:
            return 0 if answers[0] == 0 else -1

    class Library:
        renameat2 = Function()

    monkeypatch.setattr(posix.ctypes, "CDLL", lambda *args, **kwargs: Library())
    monkeypatch.setattr(posix.ctypes, "get_errno", lambda: answers.pop(0))
    assert (posix._renameat2(b"source", b"target") == 0) is done


def test_closing_that_fails_too_does_not_hide_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"bytes")
    real_close = os.close

    def refuse(*args: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def close(descriptor: int) -> None:
        real_close(descriptor)
        refuse()

    for function in (InputFile.open, posix.open_regular):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fstat", refuse)
            patch.setattr(os, "close", close)
            caught: BaseException | None = None
            try:
                function(path)
            except StorageError as error:
                caught = error
        assert isinstance(caught, StorageError)
        assert caught.errno == errno.EIO


def test_a_second_descriptor_that_cannot_be_looked_at_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    with InputFile.open(path) as file:
        before = os.listdir("/proc/self/fd")
        real = os.path.samestat

        def refuse(*args: object) -> bool:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

        monkeypatch.setattr(os.path, "samestat", refuse)
        memory = memoryview(bytearray(8192))
        file.read_direct_into(memory, 0)
        monkeypatch.setattr(os.path, "samestat", real)
        assert os.listdir("/proc/self/fd") == before
        assert not file.direct
