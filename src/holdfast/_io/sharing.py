"""What processes of one host share: memory without a name, pipes, and a way to hand both over.

Invariant: nothing here has a name in a file system, so that nothing is left behind however a process ends; what is
handed over goes to a process of the same user alone. Where the system offers none of it, an OSError says so. Nothing is
ever waited for without a limit.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import secrets
import select
import socket
import struct
from collections.abc import Iterable, Sequence
from itertools import chain

import torch

from holdfast._io import mapping
from holdfast._io.slabs import Slab
from holdfast._process import CLOSED, Descriptor, OpenDescriptor, forget_in_child

MOST_HANDED_OVER = 250  # descriptors that the kernel lets pass in one message

_CREDENTIALS = struct.Struct("3i")
_NUMBER = struct.Struct("i")
_PIECE = 1 << 16


class SharedMemory:
    """``size`` bytes that every process with the ``descriptor`` sees; zero at first, and real when first touched."""

    def __init__(self, descriptor: Descriptor, size: int) -> None:
        self.descriptor = descriptor
        self.size = size
        self._memory, self._start = mapping.attach(descriptor, size)
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=self._start)
        self.view = memoryview(self._memory)[self._start : self._start + size]
        forget_in_child(self)

    @classmethod
    def create(cls, size: int) -> SharedMemory:
        return cls.attach(mapping.new_shared(size), size)

    @classmethod
    def attach(cls, descriptor: Descriptor, size: int) -> SharedMemory:
        """The memory behind a descriptor that was handed over, which is this object's from now on."""
        try:
            if os.fstat(descriptor).st_size != size:
                raise OSError(errno.EINVAL, "the shared memory does not have the announced size")
            return cls(descriptor, size)
        except BaseException:
            descriptor.close()
            raise

    def slab(self, start: int, stop: int) -> Slab:
        return Slab(self.view[start:stop], self.tensor[start:stop])

    def make_huge(self, start: int, stop: int) -> None:
        """Have bytes [start, stop), which nobody has used yet, in huge pages, where the kernel makes them."""
        mapping.collapse(self._memory, self._start + start, self._start + stop)

    def close(self) -> None:
        """Give the descriptor back; the memory goes with the last buffer over it, at once where there is none."""
        descriptor, self.descriptor = self.descriptor, CLOSED
        if descriptor is not CLOSED:
            descriptor.close()
            del self.tensor, self.view, self._memory

    forget_parent = close


class Inbox:
    """The end of a pipe from which messages of ``size`` bytes each come, in the order in which they were posted."""

    def __init__(self, descriptor: Descriptor, size: int) -> None:
        self._descriptor = descriptor
        self._size = size
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        os.set_blocking(descriptor, False)
        forget_in_child(self)

    def fileno(self) -> int:
        return self._descriptor

    def collect(self, timeout_s: float = 0.0) -> list[bytes]:
        """The messages that are there; the first one is waited for up to ``timeout_s``."""
        if not self._poll.poll(timeout_s * 1000):
            return []
        data = os.read(self._descriptor, _PIECE - _PIECE % self._size)
        return [data[at : at + self._size] for at in range(0, len(data), self._size)]

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, CLOSED
        descriptor.close()

    forget_parent = close  # a copy would hide that the parent has gone


class Outbox:
    """The end of a pipe that takes messages, from any thread; one to someone who has left is dropped."""

    def __init__(self, descriptor: Descriptor) -> None:
        self._descriptor = descriptor
        forget_in_child(self)

    def post(self, message: bytes) -> None:
        """Send ``message``, which is small enough to stay in one piece."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._descriptor, message)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, CLOSED
        descriptor.close()

    forget_parent = close


def make_pipes(count: int) -> list[tuple[Descriptor, Descriptor]]:
    """The descriptors of ``count`` pipes, (to read, to write); all of them or, with an OSError, none."""
    ends: list[Descriptor] = []
    try:
        ends.extend(map(OpenDescriptor, chain.from_iterable(map(os.pipe2, [os.O_CLOEXEC] * count))))
    except BaseException:
        close_all(ends)
        raise
    return list(zip(ends[::2], ends[1::2], strict=True))


def close_all(descriptors: Iterable[Descriptor]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            descriptor.close()


class Doorstep:
    """A place with an ``address`` where another process of this host and user leaves descriptors for this one."""

    def __init__(self) -> None:
        # Where it can have no such address, bind says so.
        self.address = f"holdfast-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(f"\0{self.address}")
            self._socket.listen(1)
        except BaseException:
            self._socket.close()
            raise
        forget_in_child(self)

    def pick_up(self, timeout_s: float) -> tuple[bytes, list[Descriptor]]:
        """What was left here, whoever else may have knocked; OSError when there is nothing within ``timeout_s``."""
        self._socket.settimeout(timeout_s)
        while True:
            visitor, _ = self._socket.accept()
            with visitor:
                credentials = visitor.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                if _CREDENTIALS.unpack(credentials)[1] != os.getuid():
                    continue
                visitor.settimeout(timeout_s)
                descriptors: list[Descriptor] = []
                try:
                    message, flags = _receive(visitor, descriptors)
                    if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC) or not message:
                        raise OSError(errno.EMFILE, "the message is cut off")
                except BaseException:
                    close_all(descriptors)
                    raise
                return message, descriptors

    def close(self) -> None:
        self._socket.close()

    forget_parent = close


def _receive(visitor: socket.socket, descriptors: list[Descriptor]) -> tuple[bytes, int]:
    """A message and its flags; what was handed over with it goes to ``descriptors``, also after an interrupt."""
    received: list[tuple[bytes, list[tuple[int, int, bytes]], int, object]] = []
    try:
        received.extend(map(visitor.recvmsg, (_PIECE,), (socket.CMSG_LEN(MOST_HANDED_OVER * _NUMBER.size),)))
        ((message, _, flags, _),) = received
        return message, flags
    finally:
        for _, control, _, _ in received:
            for level, kind, data in control:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    whole = data[: len(data) - len(data) % _NUMBER.size]
                    descriptors.extend(map(OpenDescriptor, chain.from_iterable(_NUMBER.iter_unpack(whole))))


def leave_at(address: str, message: bytes, descriptors: Sequence[int], timeout_s: float) -> None:
    """Leave copies of ``descriptors`` at a doorstep; done when this returns, whether or not they are picked up."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visitor:
        visitor.settimeout(timeout_s)
        visitor.connect(f"\0{address}")
        credentials = visitor.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] != os.getuid():
            raise OSError(errno.EPERM, "a process of another user is there")
        sent = visitor.sendmsg(
            [message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors).tobytes())]
        )
        if sent != len(message):
            raise OSError(errno.EMSGSIZE, "the message was cut off")


def host_identity() -> tuple[str, ...]:
    """What two processes have in common exactly when they can reach each other's doorsteps."""
    identity = [socket.gethostname()]
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        identity.append(file.read().strip())
    with contextlib.suppress(OSError):
        network = os.stat("/proc/self/ns/net")  # addresses of doorsteps are the network namespace's
        identity.append(f"{network.st_dev}:{network.st_ino}")
    return tuple(identity)
