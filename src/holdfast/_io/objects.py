"""The data files of a checkpoint in an object store: read in ranges, written as uploads in parts.

Reads and uploads are those of ``stores``. What was uploaded is looked at again before anything may depend on it, as the
store is told to. For the sake of the process that writes, nothing here knows torch.
"""

from __future__ import annotations

import errno
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue

import numpy as np

from holdfast._io import posix
from holdfast._io.direct import ALIGNMENT, check_size, missing
from holdfast._io.mapping import FileImage, WrittenImage
from holdfast._io.pipeline import is_given_up
from holdfast._io.stores import store_of
from holdfast._process import Once, start_thread
from holdfast._values.deadline import Progress
from holdfast._values.digest import digest
from holdfast.errors import CheckpointError, InternalError, StorageError

_PIECE_BYTES = 8 << 20
_SAMPLED_BLOCKS = 8
_SLICE_S = 0.2

Block = tuple[int, int, int]
"""Where a block begins and ends in its object, and its digest."""


class InputObject:
    """An object that is read in ranges. Each reply must be of one of ``size`` bytes, or more with ``at_least``."""

    def __init__(self, path: str, size: int, *, at_least: bool = False) -> None:
        self.path = path
        self.size = size
        self.bytes_read = 0
        self._at_least = at_least
        self._store = store_of(path)
        self._lock = threading.Lock()

    def take(self, start: int, end: int) -> memoryview:
        """Bytes [start, end); a CorruptError if the object is missing or has another size."""
        try:
            data, found = self._store.get(self.path, (start, end))
        except StorageError as error:
            if error.errno in (errno.ENOENT, errno.EINVAL):
                self.check()
            raise
        check_size(self.path, found.bytes, self.size, at_least=self._at_least)
        with self._lock:
            self.bytes_read += data.nbytes
        return data

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill ``view`` with the bytes at ``offset``."""
        wanted = view.cast("B")
        if wanted.nbytes:
            wanted[:] = self.take(offset, offset + wanted.nbytes)

    def read_range(self, view: memoryview, start: int, end: int, *, is_cached: bool) -> int:
        """As for a file: the bytes lie as far behind the start of ``view`` as behind the start of their page."""
        base = start - start % ALIGNMENT
        self.read_into(view[start - base : end - base], start)
        return base

    def check(self) -> None:
        """CorruptError unless the object is there in its size."""
        found = self._store.head(self.path)
        if found is None:
            raise missing(self.path)
        check_size(self.path, found.bytes, self.size, at_least=self._at_least)


class ObjectFiles:
    """Objects by number, as ``LocalFiles`` are files by number."""

    max_gap = 1 << 20  # so many bytes are read sooner than two requests are made of one
    piece_bytes = 8 << 20
    is_remote = True

    def __init__(self, paths: Sequence[str], sizes: Sequence[int], *, at_least: bool = False) -> None:
        self._paths = paths
        self._sizes = sizes
        self._at_least = at_least
        self._objects: dict[int, InputObject] = {}

    @property
    def readers(self) -> int:
        """How many threads read at once: as many as there may be requests."""
        return store_of(self._paths[0]).requests if self._paths else 1

    @contextmanager
    def lend(self, number: int) -> Iterator[tuple[InputObject, bool]]:
        """Object ``number``, which is never in a cache."""
        yield self._object(number), False

    def _object(self, number: int) -> InputObject:
        made = InputObject(self._paths[number], self._sizes[number], at_least=self._at_least)
        return self._objects.setdefault(number, made)

    def check(self, number: int) -> None:
        """CorruptError unless object ``number`` is there in its size."""
        self._object(number).check()

    def is_cached(self, number: int) -> bool:
        return False

    def path(self, number: int) -> str:
        return self._paths[number]

    @property
    def bytes_read(self) -> int:
        return sum(each.bytes_read for each in tuple(self._objects.values()))

    def close(self) -> None:
        """Nothing is open."""


class Upload:
    """An object on its way: its ``size`` bytes are given as buffers, each of which is let go when it was sent.

    Nothing is visible before ``finish`` returns. What is given up leaves nothing but parts, which the store keeps as it
    is told to: the client asks it to drop them.
    """

    def __init__(self, url: str, size: int) -> None:
        self.url = url
        self.size = size
        self._given: SimpleQueue[memoryview | None] = SimpleQueue()
        self._over = Once()
        self._failure: list[BaseException] = []
        self._is_given_up = False

    def begin(self) -> None:
        start_thread(threading.Thread(target=self._run, name="holdfast-upload", daemon=True))

    def give(self, view: memoryview) -> None:
        """Have these bytes sent next; the caller does not change them any more."""
        self._check()
        self._given.put(view)

    def finish(self, check: Callable[[], None]) -> None:
        """Return when the object is complete; ``check`` is called while that takes."""
        self._given.put(None)
        with posix.reporting("write", self.url):
            while not self._over.wait(_SLICE_S):
                check()
                if is_given_up():
                    raise CheckpointError("the upload was given up, because another part of the work had failed")
            self._check()

    def abandon(self) -> None:
        """Send nothing more, and drop what was sent; returns at once."""
        self._is_given_up = True
        self._given.put(None)

    def _check(self) -> None:
        if self._failure:
            raise self._failure[0]

    def _run(self) -> None:
        try:
            self._send()
        except BaseException as error:
            self._failure.append(error)
        finally:
            try:
                while True:
                    self._given.get_nowait()  # whoever waits for room is to have it
            except Empty:
                self._over.set()

    def _send(self) -> None:
        store = store_of(self.url)
        try:
            store.put_parts(self.url, self.size, self._buffers())
        except StorageError:
            # Only the last reply may have been lost. No other save has an object of this name.
            if self._is_given_up or (found := store.head(self.url)) is None or found.bytes != self.size:
                raise

    def _buffers(self) -> Iterator[memoryview]:
        sent = 0
        while (view := self._given.get()) is not None:
            if self._is_given_up:
                break
            sent += view.nbytes
            yield view
            del view
        if self._is_given_up:
            raise CheckpointError(f"the upload of {self.url!r} was given up")
        if sent != self.size:
            raise InternalError(f"{self.url!r} was to have {self.size} bytes and got {sent}; please report it")


def confirm(url: str, size: int, blocks: Callable[[], Sequence[Block]]) -> None:
    """Look at an object that was uploaded, as closely as its store wants; StorageError if it is not what was sent."""
    store = store_of(url)
    if store.check == "off":
        return
    found = store.head(url)
    if found is None or found.bytes != size:
        kept = "nothing" if found is None else f"{found.bytes} bytes"
        raise _not_kept(url, f"the store took {size} bytes of {url!r} and has kept {kept}")
    if store.check == "size":
        return
    chosen = list(blocks())
    if store.check == "sample":
        chosen = [chosen[secrets.randbelow(len(chosen))] for _ in range(min(_SAMPLED_BLOCKS, len(chosen)))]
    for start, stop, written in chosen:
        if stop > start and digest(store.get(url, (start, stop))[0]) != written:
            raise _not_kept(url, f"the store has not kept bytes {start} to {stop} of {url!r}")


def _not_kept(url: str, problem: str) -> StorageError:
    return StorageError(f"{problem}; do not trust it", errno=errno.EIO, path=url)


class ObjectImages:
    """Uploads file images, as ``ImageFiles`` writes them. ``progress`` is told of each piece."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._upload: Upload | None = None

    def write(self, files: Sequence[FileImage], memory: memoryview) -> list[WrittenImage]:
        """What was uploaded."""
        written = [self._write(file, memory) for file in files]
        self._upload = None
        return written

    def _write(self, file: FileImage, memory: memoryview) -> WrittenImage:
        url, end = file.path.decode(), file.begin + file.size
        self._upload = upload = Upload(url, file.size)
        upload.begin()
        digests: list[int] = []
        for start in range(file.begin, end, _PIECE_BYTES):
            stop = min(start + _PIECE_BYTES, end)
            while len(digests) < len(file.starts) and file.starts[len(digests)] < stop:
                number = len(digests)
                known = file.known[number]
                digests.append(digest(memory[file.starts[number] : file.stops[number]]) if known is None else known)
            self._progress.check()
            upload.give(memory[start:stop])
            self._progress.moved(stop - start)
        upload.finish(self._progress.check)
        header = bytes(memory[file.begin : file.begin + file.header])
        places = [(file.begin, file.begin + file.header, digest(header))]
        places += zip(file.starts, file.stops, digests, strict=True)
        confirm(url, file.size, lambda: [(start - file.begin, stop - file.begin, each) for start, stop, each in places])
        return WrittenImage(digests=digests, digest=digest(header + np.array(digests, dtype="<u8").tobytes()))

    def close(self) -> None:
        """Nothing is held."""

    def abandon(self) -> None:
        """Stop; complete objects are the coordinator's to remove, who alone knows if they are published."""
        if self._upload is not None:
            self._upload.abandon()
