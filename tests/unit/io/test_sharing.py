"""Memory, pipes and descriptors between processes of one host."""

from __future__ import annotations

import contextlib
import gc
import os
import socket

import pytest

from holdfast._io import mapping, sharing
from holdfast._io.mapping import HUGE_PAGE
from holdfast._io.sharing import Doorstep, Inbox, Outbox, SharedMemory, leave_at, make_pipes
from holdfast._process import OpenDescriptor


def open_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_memory_is_the_same_behind_every_descriptor_of_it() -> None:
    before = open_descriptors()
    ours = SharedMemory.create(8192)
    theirs = SharedMemory.attach(OpenDescriptor(os.dup(ours.descriptor)), 8192)
    ours.slab(4096, 4100).view[:] = b"word"
    assert bytes(theirs.view[4096:4100]) == b"word"
    assert theirs.slab(4096, 8192).tensor[:4].tolist() == list(b"word")
    assert bytes(theirs.view[:4096]) == bytes(4096)
    ours.close()
    ours.close()
    theirs.close()
    assert open_descriptors() <= before


def test_memory_in_huge_pages_is_the_same_for_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 3 * HUGE_PAGE + 8192
    for is_refused in (False, True):
        if is_refused:
            monkeypatch.setattr(mapping, "_MADV_COLLAPSE", -1)  # as on a kernel that does not know it
        ours = SharedMemory.create(size)
        theirs = SharedMemory.attach(OpenDescriptor(os.dup(ours.descriptor)), size)
        assert ours.tensor.data_ptr() % HUGE_PAGE == theirs.tensor.data_ptr() % HUGE_PAGE == 0
        ours.slab(0, 4).view[:] = b"kept"
        ours.make_huge(HUGE_PAGE, size)
        ours.slab(size - 4, size).view[:] = b"last"
        theirs.slab(HUGE_PAGE, HUGE_PAGE + 4).view[:] = b"word"
        assert [bytes(theirs.view[:4]), bytes(theirs.view[-4:])] == [b"kept", b"last"]
        assert bytes(ours.view[HUGE_PAGE : HUGE_PAGE + 4]) == b"word"
        ours.close()
        theirs.close()


def test_memory_cannot_be_shrunk_under_those_who_use_it() -> None:
    memory = SharedMemory.create(8192)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.descriptor, 4096)
    memory.close()


def test_memory_of_another_size_is_refused_and_its_descriptor_closed() -> None:
    memory = SharedMemory.create(8192)
    before = open_descriptors()
    with pytest.raises(OSError, match="the announced size"):
        SharedMemory.attach(OpenDescriptor(os.dup(memory.descriptor)), 1 << 20)
    assert open_descriptors() <= before
    memory.close()


def test_a_system_without_nameless_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(OSError, match="no anonymous shared memory"):
        SharedMemory.create(4096)


def test_messages_come_whole_and_in_order() -> None:
    ((reader, writer),) = make_pipes(1)
    inbox, outbox = Inbox(reader, 4), Outbox(writer)
    assert inbox.collect() == []
    for number in range(1000):
        outbox.post(number.to_bytes(4, "little"))
    got: list[bytes] = []
    while messages := inbox.collect(0.01):
        got += messages
    assert [int.from_bytes(message, "little") for message in got] == list(range(1000))
    inbox.close()
    outbox.post(b"gone")  # to nobody: dropped
    outbox.close()


def test_pipes_are_made_all_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    make, made = os.pipe2, set[int]()

    def third_fails(flags: int) -> tuple[int, int]:
        if len(made) == 2:
            raise OSError(24, "too many")
        pipe = make(flags)
        made.add(os.fstat(pipe[0]).st_ino)
        return pipe

    monkeypatch.setattr(os, "pipe2", third_fails)
    with pytest.raises(OSError, match="too many"):
        make_pipes(3)
    targets = set[str]()  # of what is open, also by other threads
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            targets.add(os.readlink(f"/proc/self/fd/{name}"))
    assert targets.isdisjoint(f"pipe:[{inode}]" for inode in made)


def test_descriptors_are_left_and_picked_up_without_meeting() -> None:
    before = open_descriptors()
    doorstep = Doorstep()
    memory = SharedMemory.create(4096)
    memory.view[:4] = b"mine"
    leave_at(doorstep.address, b"hello", [memory.descriptor], 1.0)
    message, (descriptor,) = doorstep.pick_up(1.0)
    assert message == b"hello"
    theirs = SharedMemory.attach(descriptor, 4096)
    assert bytes(theirs.view[:4]) == b"mine"
    for part in (doorstep, memory, theirs):
        part.close()
    assert open_descriptors() <= before


def test_nothing_left_ends_the_wait() -> None:
    with contextlib.closing(Doorstep()) as doorstep, pytest.raises(TimeoutError):
        doorstep.pick_up(0.01)


def test_an_address_where_nobody_lives_is_an_error() -> None:
    doorstep = Doorstep()
    doorstep.close()
    with pytest.raises(ConnectionRefusedError):
        leave_at(doorstep.address, b"hello", [0], 1.0)


def test_other_users_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    doorstep = Doorstep()
    leave_at(doorstep.address, b"hello", [0], 1.0)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(TimeoutError):
        doorstep.pick_up(0.05)
    with pytest.raises(OSError, match="another user"):
        leave_at(doorstep.address, b"hello", [0], 1.0)
    doorstep.close()


def test_a_visitor_who_leaves_nothing_is_an_error() -> None:
    doorstep = Doorstep()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visitor:
        visitor.connect(f"\0{doorstep.address}")
    with pytest.raises(OSError, match="cut off"):
        doorstep.pick_up(1.0)
    doorstep.close()


def test_a_host_is_known_by_its_name_boot_and_network() -> None:
    identity = sharing.host_identity()
    assert identity[0] == socket.gethostname()
    assert len(identity) == 3
    assert identity == sharing.host_identity()
