"""The process that writes, both sides of it, and what they say to each other.

The parent starts the process when it is first wanted, keeps it, and starts another after a death. It is a fresh
interpreter, never a fork, and it does not load the main module of the job. It imports the standard library, this
package and what that needs, from where the parent has them, and nothing else: no site, no PYTHON variables, nothing
from the working directory. It loads no torch and runs nobody's code, so nothing that this module imports may do so.

Messages have their length in front and go over a socket. Only numbers, names and digests travel; the bytes lie in
memory that both have.

The process ends when its parent does, and then removes the files that it was writing. Those that it has reported as
written it leaves: they may be part of a published checkpoint.
"""

from __future__ import annotations

import atexit
import bisect
import contextlib
import importlib.util
import itertools
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import xxhash

from holdfast import _process
from holdfast._io import posix
from holdfast._io.mapping import FileImage, ImageFiles, WrittenImage, attach
from holdfast._io.objects import ObjectImages
from holdfast._io.pipeline import run_ahead
from holdfast._io.stores import Store, StoreSettings, store_of
from holdfast._io.urls import is_store_url
from holdfast._values.deadline import Progress
from holdfast.errors import CheckpointError, StorageError

if TYPE_CHECKING:
    from holdfast._staging.memory import Region

_LENGTH_BYTES = 8
_TELL_EVERY_S = 0.2


class Write(msgspec.Struct, frozen=True, tag=True):
    """Write these files, with this umask where it is known, and keep them open; ``store`` is the one of URLs."""

    files: list[FileImage]
    umask: int | None = None
    store: StoreSettings | None = None


class Close(msgspec.Struct, frozen=True, tag=True):
    """Close the files that were written."""


class Abandon(msgspec.Struct, frozen=True, tag=True):
    """Stop writing, if you are; close and remove the files."""


class Moved(msgspec.Struct, frozen=True, tag=True):
    """So many bytes are written by now."""

    nbytes: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """The files are written and durable, which took ``sync_s``; or, without any, closed or gone."""

    files: list[WrittenImage]
    sync_s: float = 0.0


class NotWritten(msgspec.Struct, frozen=True, tag=True):
    """Writing failed; ``number`` is the system's for the reason, where it has one."""

    message: str
    number: int | None = None
    path: bytes | None = None


Order = Write | Close | Abandon
Answer = Moved | Done | NotWritten

_encode = msgspec.msgpack.Encoder().encode
decode_order: Callable[[bytes], Order] = msgspec.msgpack.Decoder(Order).decode
decode_answer: Callable[[bytes], Answer] = msgspec.msgpack.Decoder(Answer).decode


def send(connection: socket.socket, message: Order | Answer) -> None:
    data = _encode(message)
    connection.sendall(len(data).to_bytes(_LENGTH_BYTES, "little") + data)


def receive(connection: socket.socket) -> bytes:
    """The bytes of one message; EOFError when the other side is gone. The socket blocks."""
    return _exactly(connection, int.from_bytes(_exactly(connection, _LENGTH_BYTES), "little"))


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        try:
            piece = connection.recv(min(count - len(data), 1 << 20))
        except ConnectionError as error:
            raise EOFError("the connection broke") from error
        if not piece:
            raise EOFError("the other side has closed the connection")
        data += piece
    return bytes(data)


_LOOK_EVERY_S = 0.25
_FAREWELL_S = 5.0
_TRIES = 10
# The package without its front: what the process needs of it knows no torch, which takes seconds and much memory.
_BOOT = """
import json, signal, sys, types
for number in (signal.SIGTERM, signal.SIGUSR1):  # what asks the training to stop may reach all of a job
    signal.signal(number, signal.SIG_IGN)
from importlib.machinery import PathFinder
package, places, *numbers = json.loads(sys.argv[1])
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, [places[name]]) if name in places else None
sys.meta_path.insert(0, Finder)
holdfast = sys.modules["holdfast"] = types.ModuleType("holdfast")
holdfast.__path__ = [package]
from holdfast._staging.process import serve
serve(*numbers)
"""
# Now, because the working directory may change, and names with it.
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PLACES = {
    module.__name__: os.path.dirname(os.path.dirname(os.path.abspath(str(module.__file__))))
    for module in (msgspec, np, xxhash)
}


def _place_of_client() -> dict[str, str]:
    """Where the client of object stores is, if it is installed; it is not loaded for that."""
    found = importlib.util.find_spec("obstore")
    return {} if found is None or found.origin is None else {"obstore": os.path.dirname(os.path.dirname(found.origin))}


class WriterProcess:
    """A process that writes file images from a shared region."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._serves: Region | None = None
        atexit.register(self.close)
        _process.forget_in_child(self)

    def forget_parent(self) -> None:
        """Have none: the copy of the connection would keep it from knowing that the parent has died."""
        atexit.unregister(self.close)
        if self._process is not None:
            self._process.returncode = 0  # nobody here has to wait for it
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = self._serves = None

    @property
    def number(self) -> int | None:
        """The process id; None when it does not run."""
        return None if self._process is None else self._process.pid

    def prepare(self, region: Region) -> None:
        """Have the process run, with ``region`` as its memory."""
        if self._process is not None and self._process.poll() is None and self._serves is region:
            return
        for _ in range(_TRIES):
            self.close()
            forks_before = _process.begun()
            self._start(region)
            if _process.begun() == forks_before:
                return  # else a child may have copies of sockets that it does not know of

    def _start(self, region: Region) -> None:
        self._connection, theirs = socket.socketpair()
        try:
            # By a thread, because Popen loses the process that it has made when an interrupt comes into it.
            with contextlib.closing(run_ahead([partial(self._launch, theirs, region)], workers=1, ahead=1)) as launched:
                next(launched)
        except OSError as error:
            self.close()
            raise StorageError(
                f"cannot start the process that writes checkpoints: {error}", errno=error.errno
            ) from error
        except BaseException:
            self.close()  # it may run already, and ends when the connection does
            raise
        finally:
            theirs.close()
        self._serves = region

    def _launch(self, theirs: socket.socket, region: Region) -> None:
        numbers = [theirs.fileno(), region.descriptor, region.nbytes]
        arguments = json.dumps([_PACKAGE, {**_PLACES, **_place_of_client()}, *numbers])
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BOOT, arguments],
            pass_fds=(theirs.fileno(), region.descriptor),
            stdin=subprocess.DEVNULL,
            cwd="/",
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # an interrupt from the terminal is for the training
        )

    def order(self, order: Order) -> None:
        """Send an order; CheckpointError when the process is dead."""
        try:
            assert self._connection is not None
            send(self._connection, order)
        except OSError as error:
            raise self._died() from error

    def answer(self) -> Answer | None:
        """The next answer, if one comes soon; CheckpointError when the process is dead."""
        assert self._connection is not None
        if not select.select([self._connection], [], [], _LOOK_EVERY_S)[0]:
            return None
        try:
            return decode_answer(receive(self._connection))
        except (EOFError, OSError) as error:
            raise self._died() from error

    def _died(self) -> CheckpointError:
        process = self._process
        self.close()
        code = None if process is None else process.returncode
        return CheckpointError(
            f"the process that writes checkpoints died (exit code {code}); this save is lost, the next one starts a "
            "new process; check whether the system ran out of memory"
        )

    def close(self) -> None:
        """End the process: it goes when its connection does."""
        self._serves = None  # first: whatever interrupts this, it is not used again
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            try:
                self._process.wait(_FAREWELL_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = self._connection = None


class ProcessOutput:
    """The files of one save, which the process writes and keeps open until it is told otherwise.

    ``progress`` is told of it a few times a second.
    """

    def __init__(self, process: WriterProcess, progress: Progress) -> None:
        self._process = process
        self._progress = progress
        self._paths: list[str] = []
        self._number: int | None = None

    def write(self, files: Sequence[FileImage], memory: memoryview) -> list[WrittenImage]:
        self._paths = [os.fsdecode(file.path) for file in files]
        if not files:
            return []
        self._number = self._process.number
        url = self._paths[0]
        settings = store_of(url).settings if is_store_url(url) else None
        self._process.order(Write(list(files), posix.umask(), settings))
        written = 0
        ends = list(itertools.accumulate(file.size for file in files))
        while True:
            # It writes them one after the other: this is the one that it must have come to.
            number = min(bisect.bisect_right(ends, written), len(files) - 1)
            with posix.reporting("write", self._paths[number]):
                self._progress.check()
                answer = self._process.answer()
            if isinstance(answer, Moved):
                self._progress.moved(answer.nbytes - written)
                written = answer.nbytes
            elif isinstance(answer, Done):
                self._progress.moved(ends[-1] - written)
                self._progress.sync_s += answer.sync_s
                return answer.files
            elif isinstance(answer, NotWritten):
                if answer.number is None:
                    raise CheckpointError(answer.message)
                path = None if answer.path is None else os.fsdecode(answer.path)
                raise StorageError(answer.message, errno=answer.number, path=path)

    def close(self) -> None:
        # They are synced: whatever closing them tells, nothing is lost any more.
        with contextlib.suppress(CheckpointError):
            self._tell(Close())

    def abandon(self) -> None:
        """Have the files closed and removed; where the process is dead, remove them."""
        try:
            self._tell(Abandon())
        except CheckpointError:
            for path in self._paths:
                if not is_store_url(path):  # there the coordinator does it
                    with contextlib.suppress(StorageError):
                        posix.remove(path)

    def _tell(self, order: Close | Abandon) -> None:
        if self._number is None or self._process.number != self._number:
            raise CheckpointError("the process that wrote these files is gone")
        self._process.order(order)
        # An answer to the write may still be on its way.
        while not (isinstance(answer := self._process.answer(), Done) and not answer.files):
            pass
        self._number = None


class _Stopped(Exception):
    """The parent wants no more of this."""


class _Server:
    """Does what the parent orders, one thing after the other."""

    def __init__(self, connection: socket.socket, memory: memoryview) -> None:
        self._connection = connection
        self._memory = memory
        self._files: ImageFiles | ObjectImages | None = None
        self._is_reported = False
        self._progress = Progress()
        self._told_at = 0.0

    def run(self) -> None:
        try:
            while True:
                order = decode_order(receive(self._connection))
                if isinstance(order, Write):
                    self._write(order)
                else:
                    self._end(is_abandoned=isinstance(order, Abandon))
                    send(self._connection, Done([]))
        except (EOFError, ConnectionError):
            self._end(is_abandoned=not self._is_reported)

    def _write(self, order: Write) -> None:
        self._end(is_abandoned=False)
        if order.umask is not None:
            os.umask(order.umask)
        self._progress = Progress(self._check)
        if order.store is not None:
            Store(**msgspec.structs.asdict(order.store))
        output = ImageFiles if order.store is None else ObjectImages
        self._files, self._is_reported = output(self._progress), False
        try:
            written = self._files.write(order.files, self._memory)
        except _Stopped:
            return  # the order that stopped it is read next
        except StorageError as error:
            path = None if error.path is None else os.fsencode(error.path)
            send(self._connection, NotWritten(_sendable(error.message), error.errno, path))
        except Exception as error:
            said = f"the process that writes failed: {type(error).__name__}: {error}"
            send(self._connection, NotWritten(_sendable(said)))
        else:
            self._is_reported = True
            send(self._connection, Done(written, self._progress.sync_s))

    def _check(self) -> None:
        """Tell the parent how far it is, now and then; raise if the parent has something else to say, or is gone."""
        if select.select([self._connection], [], [], 0)[0]:
            raise _Stopped
        now = time.monotonic()
        if now - self._told_at >= _TELL_EVERY_S:
            self._told_at = now
            send(self._connection, Moved(self._progress.done))

    def _end(self, *, is_abandoned: bool) -> None:
        files, self._files = self._files, None
        if files is not None:
            (files.abandon if is_abandoned else files.close)()


def _sendable(text: str) -> str:
    """``text``, with what is no Unicode (in names of files) escaped."""
    return text.encode(errors="backslashreplace").decode()


def serve(connection_number: int, memory_number: int, size: int) -> None:
    """Serve the parent that holds the other end of the socket."""
    memory, start = attach(memory_number, size)
    with socket.socket(fileno=connection_number) as connection:
        _Server(connection, memoryview(memory)[start : start + size]).run()
