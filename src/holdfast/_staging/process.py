"""The parent's side of the process that writes: started when it is first wanted, kept, started again after a death.

It is a fresh interpreter, never a fork, and it does not load the main module of the job. It imports the standard
library, this package and what that needs, from where this process has them, and nothing else: no site, no PYTHON
variables, nothing from the working directory. A forked child starts one for itself.
"""

from __future__ import annotations

import atexit
import bisect
import contextlib
import itertools
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np
import xxhash

from holdfast import _process
from holdfast._engine.images import FileImage, WrittenImage
from holdfast._io import posix
from holdfast._io.pipeline import run_ahead
from holdfast._staging.memory import Region
from holdfast._staging.writer_process import (
    Abandon,
    Answer,
    Close,
    Done,
    Failed,
    Moved,
    Order,
    Write,
    decode_answer,
    receive,
    send,
)
from holdfast._values.deadline import Progress
from holdfast.errors import CheckpointError, StorageError

_LOOK_EVERY_S = 0.25
_FAREWELL_S = 5.0
_TRIES = 10
# The package without its front: what the process needs of it knows no torch, which takes seconds and much memory.
_BOOT = """
import json, sys, types
from importlib.machinery import PathFinder
package, places, *numbers = json.loads(sys.argv[1])
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, [places[name]]) if name in places else None
sys.meta_path.insert(0, Finder)
holdfast = sys.modules["holdfast"] = types.ModuleType("holdfast")
holdfast.__path__ = [package]
from holdfast._staging.writer_process import serve
serve(*numbers)
"""
# Now, because the working directory may change, and names with it.
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PLACES = {
    module.__name__: os.path.dirname(os.path.dirname(os.path.abspath(str(module.__file__))))
    for module in (msgspec, np, xxhash)
}


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
        arguments = json.dumps([_PACKAGE, _PLACES, *numbers])
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
            f"the process that writes checkpoints died (exit code {code}); this save is lost, the next one starts "
            "another; see whether the system ran out of memory"
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
        self._process.order(Write(list(files), posix.umask()))
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
                return answer.files
            elif isinstance(answer, Failed):
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
