"""Interrupts, at every point of what holds something; make torture does it everywhere."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import holdfast

sys.path.append(str(Path(__file__).resolve().parents[2]))

from torture.interrupting import Interruption, points_of

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="older interpreters look for signals elsewhere")

STATE = {"weight": torch.arange(5000.0), "step": 7}
PROCESS = holdfast.AsyncCheckpointerType.PROCESS


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    holdfast.release()
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    yield
    holdfast.release()
    for thread in set(threading.enumerate()) - threads:
        thread.join(300)  # one that was interrupted while it was started
    assert gc.isenabled()
    assert torch.is_grad_enabled()
    assert set(threading.enumerate()) <= threads
    assert open_descriptors() <= descriptors


def open_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def interrupt_everywhere(operation: Callable[[], object], *files: str) -> int:
    """Interrupt ``operation`` at all points in ``files``; how many there are. It must end within its time."""
    operation()
    points = [point for point in points_of(operation) if point.file.startswith(files)]
    for point in points:
        with within_time(), contextlib.suppress(KeyboardInterrupt), Interruption(point):
            operation()
    return len(points)


class within_time:
    """Ends the tests, and tells where all threads are, when the block takes too long: a hang cannot be caught."""

    def __enter__(self) -> None:
        faulthandler.dump_traceback_later(60, exit=True)

    def __exit__(self, *error: object) -> None:
        faulthandler.cancel_dump_traceback_later()


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


@pytest.mark.parametrize("way", ["save", "async_save"])
def test_a_save_leaves_no_file_and_no_lock(tmp_path: Path, way: str) -> None:
    def save() -> None:
        if way == "save":
            holdfast.save(STATE, tmp_path)
        else:
            holdfast.async_save(STATE, tmp_path).result()

    files = ("_io/", "_native/publish.py", "_native/writer.py", "_native/publish.py", "_native/packer.py", "_saver.py")
    assert interrupt_everywhere(save, *files, "_async_saver.py", "_background.py", "_staging/", "_process.py") > 100
    holdfast.release()  # which waits for a save that goes on behind its caller
    assert len(names(tmp_path)) == 3
    assert not holdfast.sweep(tmp_path).leftovers
    save()
    assert holdfast.load(tmp_path)["step"] == 7


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # listings say when they are dropped
def test_reporting_leaves_no_file(tmp_path: Path) -> None:
    holdfast.save(STATE, tmp_path / "step-1")
    steps = holdfast.Steps(tmp_path)
    assert interrupt_everywhere(lambda: steps.report(1, {"loss": 1.0}), "_io/posix.py", "_steps/", "_process.py") > 20
    assert names(tmp_path / "step-1") == sorted([*names(tmp_path / "step-1")[:2], "manifest.json", "metrics.json"])


def test_prewarming_leaves_no_turn(tmp_path: Path) -> None:
    assert interrupt_everywhere(lambda: holdfast.prewarm(STATE), "_async_saver.py", "_staging/", "_values/") > 20
    holdfast.save(STATE, tmp_path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # sockets say when they are dropped
def test_a_writer_process_is_not_left_running(tmp_path: Path) -> None:
    def save() -> None:
        holdfast.async_save(STATE, tmp_path, async_checkpointer_type=PROCESS).result()
        holdfast.release()

    assert interrupt_everywhere(save, "_staging/process.py", "_staging/one_at_a_time.py", "_background.py") > 20
    holdfast.release()
    save()


@pytest.mark.parametrize("operation", ["load", "load(path)", "open"])
def test_loads_leave_no_descriptor(tmp_path: Path, operation: str) -> None:
    holdfast.save(STATE, tmp_path)

    def load() -> None:
        if operation == "load":
            holdfast.load({"weight": torch.zeros(5000), "step": 0}, tmp_path)
        elif operation == "load(path)":
            holdfast.load(tmp_path)
        else:
            with holdfast.open(tmp_path) as checkpoint:
                checkpoint["weight"][...]

    assert interrupt_everywhere(load, "_io/", "_loader.py", "_checkpoint.py", "_native/reader.py") > 80


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("operation", ["load", "async_save"])
def test_an_interrupt_while_threads_are_started(tmp_path: Path, operation: str, when: str) -> None:
    state = {"weight": torch.arange(1e7), "step": 7}  # so much that it is not read by one thread alone, cached or not
    holdfast.save(state, tmp_path)
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if when == "after":
            start(thread)
        raise KeyboardInterrupt

    call = {"load": lambda: holdfast.load(tmp_path), "async_save": lambda: holdfast.async_save(state, tmp_path)}
    with (
        within_time(),
        mock.patch.object(threading.Thread, "start", interrupted),
        pytest.raises(KeyboardInterrupt),
    ):
        call[operation]()
    assert holdfast.load(tmp_path)["step"] == 7


def test_a_checkpoint_that_is_dropped_is_closed(tmp_path: Path) -> None:
    holdfast.save(STATE, tmp_path)
    before = open_descriptors()
    gc.disable()
    try:
        for _ in range(3):
            checkpoint = holdfast.open(tmp_path)
            assert checkpoint["weight"][3] == 3.0
            assert len(os.listdir("/proc/self/fd")) > before
            del checkpoint
            assert len(os.listdir("/proc/self/fd")) <= before
    finally:
        gc.enable()


def test_a_save_whose_caller_was_interrupted_before_all_was_copied_is_given_up(tmp_path: Path) -> None:
    holdfast.save({"weight": torch.zeros(5000), "step": 1}, tmp_path)
    reserve, goes_on = os.posix_fallocate, threading.Event()

    def interrupt_and_wait(*details: Any) -> None:
        """The data file is there, and nothing in it; the caller waits until all is copied into it."""
        os.kill(os.getpid(), signal.SIGINT)
        assert goes_on.wait(300)
        reserve(*details)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the shell has said
    try:
        with within_time(), mock.patch.object(os, "posix_fallocate", interrupt_and_wait):
            with pytest.raises(KeyboardInterrupt):
                holdfast.async_save(STATE, tmp_path, options=holdfast.SaveOptions(max_host_bytes=1))
            goes_on.set()
            holdfast.release()
    finally:
        signal.signal(signal.SIGINT, before)
    assert holdfast.load(tmp_path)["step"] == 1
    assert len(names(tmp_path)) == 3
    holdfast.save(STATE, tmp_path)  # there is no error left to tell: the caller knows


@pytest.mark.parametrize("is_native", [True, False])
def test_an_interrupt_right_after_publishing_leaves_nothing_of_the_one_replaced(
    tmp_path: Path, is_native: bool
) -> None:
    def save(step: int) -> None:
        writer = holdfast.NativeWriter(tmp_path) if is_native else holdfast.FileSystemWriter(tmp_path)
        holdfast.save({**STATE, "step": step}, storage_writer=writer)

    save(1)
    save(2)
    count = len(names(tmp_path))
    rename = os.rename

    def renamed(*args: Any, **kwargs: Any) -> None:
        rename(*args, **kwargs)
        raise KeyboardInterrupt

    with mock.patch("os.rename", renamed), pytest.raises(KeyboardInterrupt):
        save(3)
    assert holdfast.load(tmp_path)["step"] == 3
    assert len(names(tmp_path)) == count
