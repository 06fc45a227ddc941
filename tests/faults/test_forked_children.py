"""What a forked child does, or leaves undone, is nothing to its parent's saves; and it can save and load itself."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from forked_children import in_child, start_child
from output_files import new_output

import holdfast
from holdfast import AsyncCheckpointerType
from holdfast import _process as forks
from holdfast._io import locks, mapping, posix
from holdfast._io.mapping import ImageFiles
from holdfast._io.pipeline import run_ahead, run_bounded
from holdfast._process import Descriptor
from holdfast._ranks.ranks import participants
from holdfast._staging.one_at_a_time import TURNS
from holdfast._staging.process import ProcessOutput
from holdfast.staging import DefaultStager

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")

THREAD, PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Torch's own threads are not there in a child, and it does not know."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    holdfast.release()


def state_of(value: int) -> dict[str, Any]:
    return {"weight": torch.full((300_000,), float(value)), "step": value}


def check(path: Path, value: int) -> None:
    """Fails unless the checkpoint is whole, has the values, and nothing else is beside it."""
    found = holdfast.load(path)
    assert found["step"] == value
    assert torch.equal(found["weight"], state_of(value)["weight"])
    assert len(list(path.iterdir())) == 3


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch, kind: AsyncCheckpointerType) -> Iterator[threading.Event]:
    """An asynchronous save of this process stands still within the block, where the event tells that it has come to."""
    reached, go = threading.Event(), threading.Event()
    output = ImageFiles if kind is THREAD else ProcessOutput
    write, parent = output.write, os.getpid()

    def waiting(*arguments: Any) -> Any:
        written = write(*arguments) if kind is THREAD else None  # then there is something to be removed
        if os.getpid() == parent:
            reached.set()
            assert go.wait(300)
        return written or write(*arguments)

    monkeypatch.setattr(output, "write", waiting)

    try:
        yield reached
    finally:
        go.set()


NORMAL_EXIT = """
import os, sys, threading
import torch
import holdfast
from holdfast._io.mapping import ImageFiles
from holdfast._staging.process import ProcessOutput

torch.set_num_threads(1)
path, kind = sys.argv[1:]
output = ImageFiles if kind == "thread" else ProcessOutput
written, go, write = threading.Event(), threading.Event(), output.write

def write_and_wait(*arguments):
    result = write(*arguments)
    written.set()
    go.wait(300)
    return result

output.write = write_and_wait
kind = holdfast.AsyncCheckpointerType(kind)
handle = holdfast.async_save({"weight": torch.arange(3000.0)}, path, async_checkpointer_type=kind)
written.wait(300)
child = os.fork()
if child == 0:
    del handle
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
go.set()
handle.result()
print("saved")
"""


@pytest.mark.parametrize("kind", [THREAD, PROCESS])
def test_a_child_that_exits_leaves_the_files_of_its_parent_alone(tmp_path: Path, kind: AsyncCheckpointerType) -> None:
    path = tmp_path / "checkpoint"
    command = [sys.executable, "-c", NORMAL_EXIT, str(path), kind.value]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "saved\n", "")
    assert torch.equal(holdfast.load(path)["weight"], torch.arange(3000.0))


@pytest.mark.parametrize("kind", [THREAD, PROCESS])
def test_parent_and_child_save_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: AsyncCheckpointerType
) -> None:
    holdfast.async_save(state_of(1), tmp_path / "first", async_checkpointer_type=kind).result()
    with held(monkeypatch, kind) as reached:
        handle = holdfast.async_save(state_of(2), tmp_path / "parent", async_checkpointer_type=kind)
        assert reached.wait(300)

        def save() -> None:
            holdfast.async_save(state_of(3), tmp_path / "child", async_checkpointer_type=kind).result()
            holdfast.save(state_of(4), tmp_path / "again")

        assert in_child(save) == 0
    handle.result()
    for name, value in (("first", 1), ("parent", 2), ("child", 3), ("again", 4)):
        check(tmp_path / name, value)


def test_a_handle_of_the_parent_raises_at_once_in_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = holdfast.async_save(state_of(1), tmp_path / "first")
    done.result()
    called = []
    with held(monkeypatch, THREAD) as reached:
        handle = holdfast.async_save(state_of(2), tmp_path / "second")
        handle.add_done_callback(called.append)
        assert reached.wait(300)

        def ask() -> None:
            with pytest.raises(holdfast.CheckpointError, match="belongs to the parent"):
                handle.result()
            assert isinstance(handle.exception(), holdfast.CheckpointError)
            handle.wait_staged()  # which it was
            handle.fence()
            assert handle.phase == "failed"
            assert "weight" in done.result().state_dict_metadata
            assert called == []

        with handle._condition:  # as the thread that ends it would
            assert in_child(ask) == 0
    handle.result()
    assert called == [handle]


def test_no_lock_of_the_parent_is_held_in_the_child(tmp_path: Path) -> None:
    holdfast.save(state_of(1), tmp_path / "checkpoint")
    planner = holdfast.DefaultSavePlanner(enable_plan_caching=True)
    holdfast.save(state_of(2), tmp_path / "planned", planner=planner)
    stager = DefaultStager()
    stager.stage(state_of(1))
    stager.synchronize_staging()
    with holdfast.open(tmp_path / "checkpoint") as checkpoint:
        assert checkpoint["weight"][:3].tolist() == [1.0] * 3
        files = checkpoint._reader._files  # type: ignore[union-attr]
        (file,) = files._open_files()  # type: ignore[union-attr]
        all_held = threading.Event()
        go = threading.Event()

        def hold() -> None:
            with TURNS._lock, forks._pausing, files._lock, file._lock:  # type: ignore[union-attr]
                all_held.set()
                go.wait(300)

        thread = threading.Thread(target=hold)
        thread.start()
        assert all_held.wait(300)

        def work() -> None:
            assert checkpoint["weight"][-2:].tolist() == [1.0, 1.0]
            assert holdfast.load(tmp_path / "checkpoint")["step"] == 1
            holdfast.save(state_of(3), tmp_path / "own", planner=planner)
            handle = holdfast.async_save(state_of(4), tmp_path / "staged", async_stager=stager)
            assert handle.result() is not None
            with holdfast.open(tmp_path / "own") as own:
                assert own["step"] == 3

        try:
            assert in_child(work) == 0
        finally:
            go.set()
            thread.join()
    stager.close()
    check(tmp_path / "staged", 4)


def test_a_child_collects_garbage_although_its_parent_does_not() -> None:
    with forks.CollectorPause():
        assert not gc.isenabled()

        def look() -> None:
            assert gc.isenabled()
            with forks.CollectorPause():
                assert not gc.isenabled()
            assert gc.isenabled()

        assert in_child(look) == 0
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_child_does_not_keep_the_files_of_a_dead_parent_locked(tmp_path: Path) -> None:
    path, (reading, writing) = tmp_path / "data", os.pipe()

    def die() -> None:
        file = new_output(path, expected_bytes=0)
        read_end, write_end = os.pipe()
        grandchild = os.fork()
        if grandchild == 0:
            os.close(write_end)
            with open(path, "rb") as other, pytest.raises(BlockingIOError):  # the parent still lives
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(writing, b"x")
            os.close(writing)
            os.read(read_end, 1)  # until the parent is gone, and longer
            signal.alarm(300)
            signal.pause()
        os.read(reading, 1)
        os.write(writing, str(grandchild).encode())
        assert file.path == str(path)  # it is still there
        os.kill(os.getpid(), signal.SIGKILL)

    child = start_child(die)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    grandchild = int(os.read(reading, 100))
    os.close(reading)
    os.close(writing)
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_a_child_cannot_remove_what_its_parent_writes(tmp_path: Path) -> None:
    file = new_output(tmp_path / "data", expected_bytes=0)
    assert in_child(file.abandon) == 0
    file.write(memoryview(bytes(4096)), 0)
    file.finish(10)
    file.close()
    assert (tmp_path / "data").read_bytes() == bytes(10)


def test_a_file_is_made_again_when_a_child_may_have_a_copy_that_nobody_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, made = posix.create_new, []

    def create_while_another_thread_forks(path: str, opened: list[Descriptor]) -> None:
        mine: list[Descriptor] = []
        create(path, mine)
        made.append(os.fstat(mine[0]).st_ino)
        if len(made) == 1:
            made.append(start_child(lambda: signal.pause()))
        opened += mine

    monkeypatch.setattr(posix, "create_new", create_while_another_thread_forks)
    file = locks.LockedFile(tmp_path / "data")
    file.create()
    try:
        inode, child, again = made
        assert os.fstat(file.descriptor).st_ino == os.stat(tmp_path / "data").st_ino == again
        opened = [os.readlink(link) for link in Path(f"/proc/{child}/fd").iterdir()]
        assert str(tmp_path / "data") not in opened  # but the first one, which has no name any more
        assert any(link.startswith(str(tmp_path / "data")) for link in opened)
        assert inode
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        file.close()


def test_a_child_that_leaves_the_state_dict_it_was_forked_in_saves_nothing(tmp_path: Path) -> None:
    class Forking:
        ends: ClassVar[list[int]] = []

        def __init__(self, way: str) -> None:
            self.way = way

        def state_dict(self) -> dict[str, Any]:
            child = os.fork()
            if child == 0 and self.way == "exits":
                sys.exit(5)
            if child:
                self.ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            return state_of(1)

        def load_state_dict(self, state: dict[str, Any]) -> None:
            """Never called."""

    parent = os.getpid()
    for way, saves in ((way, saves) for way in ("exits", "returns") for saves in (holdfast.save, _save_later)):
        path, status = tmp_path / f"{way} {saves.__name__}", 6
        try:
            saves({"it": Forking(way)}, path)  # type: ignore[operator]
        except SystemExit:
            status = 0
        except holdfast.CheckpointError as error:
            status = 0 if "forked during a save" in str(error) else 7
        finally:
            if os.getpid() != parent:
                os._exit(status)
        assert torch.equal(holdfast.load(path)["it"]["weight"], state_of(1)["weight"])
        assert len(list(path.iterdir())) == 3
    assert Forking.ends == [0] * 4


def _save_later(state: dict[str, Any], path: Path) -> None:
    holdfast.async_save(state, path).result()


def test_jobs_that_were_under_way_are_an_error_in_the_child() -> None:
    parent, statuses = os.getpid(), []

    def forking() -> Iterator[Callable[[], None]]:
        for number in range(8):
            if number == 4:
                child = os.fork()
                if child:
                    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
                else:
                    signal.alarm(300)
            yield lambda: None

    for run in (
        lambda: run_bounded(forking(), workers=2),
        lambda: list(run_ahead(forking(), workers=2, ahead=3)),
    ):
        try:
            run()
        except holdfast.CheckpointError as error:
            if os.getpid() != parent:
                os._exit(3 if "forked" in str(error) else 4)
        finally:
            if os.getpid() != parent:
                os._exit(5)
    assert statuses == [3, 3]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone")
def test_memory_for_direct_reads_is_empty_in_a_child() -> None:
    for is_wiped in (True, False):
        memory, start = mapping.map_private(100, is_wiped=is_wiped)
        memory[start : start + 3] = b"abc"
        found = b"\0\0\0" if is_wiped else b"abc"
        assert in_child(lambda: _same(memory[start : start + 3], found)) == 0  # noqa: B023
        assert memory[start : start + 3] == b"abc"


def _same(one: bytes, other: bytes) -> None:
    assert one == other


def test_a_child_of_a_rank_is_no_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    group = object()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 1)
    monkeypatch.setattr(torch.distributed.distributed_c10d._world, "default_pg", group, raising=False)

    def use() -> None:
        with pytest.raises(holdfast.CheckpointError, match=r"forked from rank 1 .* no_dist=True"):
            participants(None, no_dist=False, call="save")
        holdfast.save(state_of(1), tmp_path / "own", no_dist=True)

    assert in_child(use) == 0


def test_whatever_one_holder_raises_the_others_are_forgotten(capfd: pytest.CaptureFixture[str]) -> None:
    class Holder:
        is_forgotten = False

        def __init__(self, error: Exception | None) -> None:
            self.error = error
            forks.forget_in_child(self)

        def forget_parent(self) -> None:
            self.is_forgotten = True
            if self.error is not None:
                raise self.error

        __hash__ = None  # type: ignore[assignment]

    holders = [Holder(OSError("no")), Holder(None), Holder(OSError("no")), Holder(None)]
    assert in_child(lambda: _all(holder.is_forgotten for holder in holders)) == 0


def _all(facts: Iterator[bool]) -> None:
    assert all(facts)


def test_a_forked_child_does_not_keep_the_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_WAIT_S", 0.0)
    reading, writing = os.pipe()
    lock = locks.DirectoryLock(tmp_path)
    assert lock.acquire()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # until the parent has looked
        os._exit(0)
    lock.release()
    again = locks.DirectoryLock(tmp_path)
    assert again.acquire()
    again.release()
    os.close(writing)
    os.waitpid(child, 0)
    os.close(reading)


def test_what_a_child_does_with_a_held_step_is_nothing_to_its_parent(tmp_path: Path) -> None:
    holdfast.save({"step": 1}, tmp_path / "step-1")
    followed: Any = holdfast.follow(tmp_path)
    held = next(followed)

    def end() -> None:
        assert holdfast.read(held.path) == {"step": 1}
        held.release()
        followed.close()
        with pytest.raises(holdfast.BusyError):
            holdfast.Steps(tmp_path).delete(1, force=True)

    assert in_child(end) == 0
    assert holdfast.read(held.path) == {"step": 1}
    assert len(os.listdir(tmp_path / ".holdfast" / "readers")) == 2
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # until the parent has looked
        os._exit(0)
    followed.close()
    assert os.listdir(tmp_path / ".holdfast" / "readers") == []
    os.close(writing)
    os.waitpid(child, 0)
    os.close(reading)
