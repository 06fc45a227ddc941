"""Items into files: archives laid end to end, each with the CRC-32 of its data.

Local files are written past the page cache by several threads. Where every archive begins is known before its data is
looked at. A job copies its bytes into a slab, sums the data there, and writes whole pages; what follows the data of an
archive needs the sums of all its pieces, and waits for the jobs that have them.

Files of other file systems, and those with transforms, are written as streams. Offsets count what reached the stream,
so that nobody has to ask it for its position.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any, Protocol, cast

import numpy as np
import torch

from holdfast._io import posix
from holdfast._io.direct import OutputFile
from holdfast._io.pipeline import default_workers, run_bounded
from holdfast._io.slabs import SLAB_BYTES, PageJob, Slab, SlabRing, filled_slab, following, uses_cuda, write_pages
from holdfast._state.tensor_bytes import Buffer, MemorySource, Source, source_of
from holdfast._torch_codec.archive_writing import DATA_ALIGNMENT, TensorArchive, tensor_archive
from holdfast._torch_codec.metadata_file import DATA_SUFFIX
from holdfast._torch_format.file_systems import FileSystemBase, PathLike
from holdfast._torch_format.items import Content, PlannedItems, as_stored, tensor_loader
from holdfast._values.deadline import Progress
from holdfast._values.digest import combine_checksums
from holdfast.errors import InternalError, StorageError
from holdfast.planner import WriteItem
from holdfast.storage import WriteResult

_AHEAD = 2
# Each job that was taken may hold a slab while it waits for one before it: none must ever lack one. 11 are 176 MiB.
_MOST_WORKERS = 8
# Jobs of more pieces than this consist of small items: filling them is mostly work for Python.
_FEW_PIECES = 192
# What an archive has besides its data, about; just to reserve room.
_ARCHIVE_FRAME_BYTES = 1400


@dataclass(slots=True)
class _ArchiveJob(PageJob):
    """A piece: a source, a range of its bytes, their place in the slab.

    ``needs_others``: it has the end of an archive whose data is also in jobs before it.
    """

    pieces: list[tuple[Source, int, int, int]] = field(default_factory=list)
    owner: _File | None = None
    needs_others: bool = False


class _File:
    """A file while it is being written; finished and closed by whoever writes the last of it."""

    def __init__(self, output: OutputFile, name: str, *, sync: bool) -> None:
        self.output = output
        self.name = name
        self.end = 0
        self._sync = sync
        self._lock = threading.Lock()
        self._expected = 1

    def expect_job(self) -> None:
        with self._lock:
            self._expected += 1

    def job_done(self) -> None:
        """Take note that a job has written its part; after the last the file is complete, synced and closed."""
        with self._lock:
            self._expected -= 1
            is_complete = self._expected == 0
        if is_complete:
            self.output.finish(self.end, sync=self._sync)
            self.output.close()


class _Data:
    """The bytes of a tensor; sums what passes through."""

    __slots__ = ("_source", "_sums", "archive", "jobs", "nbytes")

    def __init__(self, archive: TensorArchive, source: Source) -> None:
        self.archive = archive
        self.nbytes = archive.data_bytes
        self.jobs: list[_ArchiveJob] = []
        self._source = source
        self._sums: dict[int, tuple[int, int]] = {}

    def copy_out(self, start: int, stop: int, buffer: Buffer, at: int) -> None:
        self._source.copy_out(start, stop, buffer, at)
        self._sums[start] = zlib.crc32(_view(buffer)[at : at + stop - start]), stop - start

    def checksum(self) -> int:
        return combine_checksums(self._sums[start] for start in sorted(self._sums))


class _Tail:
    """The end of an archive; ``jobs`` are the other jobs that hold data of the archive."""

    __slots__ = ("data", "jobs", "nbytes")

    def __init__(self, data: _Data, jobs: list[_ArchiveJob]) -> None:
        self.data = data
        self.jobs = jobs
        self.nbytes = data.archive.nbytes - len(data.archive.head) - data.nbytes

    def copy_out(self, start: int, stop: int, buffer: Buffer, at: int) -> None:
        for job in self.jobs:
            # Filled or failed: then its error is the one to tell, and the file is never finished.
            job.is_filled.wait()
        _view(buffer)[at : at + stop - start] = self.data.archive.tail(self.data.checksum())[start:stop]


def _view(buffer: Buffer) -> memoryview:
    if not isinstance(buffer, Slab):
        raise InternalError("local files are written through slabs only; please report it")
    return buffer.view


def _bytes_source(data: bytes | memoryview) -> MemorySource:
    owner = np.frombuffer(data, dtype=np.uint8)
    return MemorySource(owner, owner.ctypes.data, owner.nbytes)


class FilePacker:
    """Writes items to new files in ``directory``; ``sync`` makes each durable before ``write`` returns."""

    def __init__(self, directory: PathLike, items: PlannedItems, *, sync: bool, progress: Progress) -> None:
        self._directory = directory
        self._items = items
        self._sync = sync
        self._progress = progress
        self._files: list[_File] = []
        self._results: list[WriteResult] = []

    @property
    def names(self) -> list[str]:
        return [file.name for file in tuple(self._files)]

    def write(self, files: list[tuple[str, list[int]]]) -> list[WriteResult]:
        """Write the named ``files``, each with its rows; on an error they are left to ``abandon``."""
        workers = min(_MOST_WORKERS, default_workers())
        ring = SlabRing(workers + _AHEAD + 1, pinned=uses_cuda())
        try:
            run_bounded((self._runner(job, ring) for job in self._jobs(files)), workers=workers, ahead=_AHEAD)
        finally:
            ring.close()
        # The longest, because several threads sync at once.
        self._progress.sync_s += max((file.output.sync_s for file in self._files), default=0.0)
        return self._results

    def abandon(self) -> None:
        for file in self._files:
            # What cannot be removed is invisible; the error that led here is the one to tell.
            with contextlib.suppress(StorageError):
                file.output.abandon()

    def _jobs(self, files: list[tuple[str, list[int]]]) -> Iterator[_ArchiveJob]:
        for name, rows in files:
            file = self._create(name, rows)
            job = _ArchiveJob(file.output, 0, 0, owner=file)
            for row in rows:
                for source in self._sources(row, file):
                    start = 0
                    while start < source.nbytes:
                        if job.end - job.base == SLAB_BYTES:
                            file.expect_job()
                            yield job
                            job = following(job)
                            job.owner = file
                        stop = min(source.nbytes, start + SLAB_BYTES - (job.end - job.base))
                        _add(job, source, start, stop)
                        start = stop
            job.is_last = True
            yield job

    def _create(self, name: str, rows: list[int]) -> _File:
        expected = sum(self._items.nbytes[row] + _ARCHIVE_FRAME_BYTES for row in rows)
        file = self._enter(name)
        try:
            file.output.make(expected)
        except StorageError as error:
            if error.errno != errno.EEXIST:
                raise
            # Another saver was faster; the metadata tells which name it is.
            self._files.remove(file)
            file = self._enter(f"{name.removesuffix(DATA_SUFFIX)}_{secrets.token_hex(8)}{DATA_SUFFIX}")
            file.output.make(expected)
        return file

    def _enter(self, name: str) -> _File:
        """A file that is known from here on, and still to be made: whatever comes, it is abandoned."""
        file = _File(OutputFile(os.path.join(self._directory, name)), name, sync=self._sync)
        self._files.append(file)
        return file

    def _sources(self, row: int, file: _File) -> Iterator[Source]:
        """What ``row`` consists of in the file, from its end on."""
        content = self._items.content(row)
        stored = as_stored(content)
        gap = -file.end % DATA_ALIGNMENT
        start = file.end + gap
        if isinstance(stored, torch.Tensor):
            archive = tensor_archive(stored.dtype, tuple(stored.shape))
            file.end = start + archive.nbytes
            data = _Data(archive, source_of(stored))
            sources: list[Source] = [_bytes_source(bytes(gap) + archive.head), data, _Tail(data, [])]
        else:
            file.end = start + len(stored)
            sources = [_bytes_source(bytes(gap)), _bytes_source(stored)]
        self._results.append(self._items.result(row, content, file.name, (start, file.end - start)))
        yield from sources

    def _runner(self, job: _ArchiveJob, ring: SlabRing) -> Callable[[], None]:
        """What a thread does for ``job``: all of it, or just the writing where filling is mostly work for Python."""
        if len(job.pieces) > _FEW_PIECES and not job.needs_others:
            return partial(self._write, job, filled_slab(job, ring, _fill), ring)
        return lambda: self._write(job, filled_slab(job, ring, _fill), ring)

    def _write(self, job: _ArchiveJob, slab: Slab, ring: SlabRing) -> None:
        write_pages(job, slab, ring, self._progress)
        assert job.owner is not None
        job.owner.job_done()


def _add(job: _ArchiveJob, source: Source, start: int, stop: int) -> None:
    if isinstance(source, _Data):
        source.jobs.append(job)
    elif isinstance(source, _Tail):
        source = _Tail(source.data, [other for other in source.data.jobs if other is not job])
        job.needs_others = job.needs_others or bool(source.jobs)
    job.pieces.append((source, start, stop, job.end - job.base))
    job.end += stop - start


def _fill(job: _ArchiveJob, slab: Slab) -> None:
    for source, start, stop, at in job.pieces:
        source.copy_out(start, stop, slab, at)
    # Sources know their jobs: without this they would keep each other, and the tensors, until the garbage is collected.
    job.pieces.clear()


class StreamTransform(Protocol):
    """What changes bytes on their way to a file, such as compression: torch's ``StreamTransformExtension``."""

    def transform_to(self, output: IO[bytes], /) -> IO[bytes]:
        """A stream that writes the changed bytes to ``output``, and closes it when it is closed."""
        ...

    def get_descriptor(self) -> str:
        """What readers need to undo it."""
        ...


class _StorageWriterTransforms:
    """The transforms of a writer; ``extensions`` are applied in their order."""

    def __init__(self, extensions: Sequence[StreamTransform] | None = None) -> None:
        self.extensions = tuple(extensions or ())

    def transform_save_stream(self, write_item: WriteItem, raw_stream: io.IOBase) -> tuple[IO[bytes], list[str]]:
        """A stream for one item that ends up in ``raw_stream``, which stays open; and how to read it, last first."""
        stream = cast(IO[bytes], _Open(raw_stream))
        # Each writes into the one made before: so the last to be applied is the first to be made.
        for extension in reversed(self.extensions):
            stream = extension.transform_to(stream)
        return stream, [extension.get_descriptor() for extension in reversed(self.extensions)]


class _Open(io.RawIOBase):
    """A stream that others may close without closing the one below; ``count`` is told of the bytes that passed."""

    def __init__(self, below: io.IOBase, count: Callable[[int], None] | None = None) -> None:
        self._below = below
        self._count = count

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        rest = memoryview(data).cast("B")
        nbytes = rest.nbytes
        while rest.nbytes:
            # Buffered streams take everything, raw ones may not; some do not tell.
            taken = self._below.write(rest)
            rest = rest[rest.nbytes if taken is None else taken :]
        if self._count is not None:
            self._count(nbytes)
        return nbytes

    def flush(self) -> None:
        if not self.closed and not self._below.closed:
            self._below.flush()


class StreamPacker:
    def __init__(
        self,
        fs: FileSystemBase,
        directory: PathLike,
        items: PlannedItems,
        *,
        transforms: _StorageWriterTransforms,
        thread_count: int,
        copy_ahead: int,
        sync: bool,
        progress: Progress,
    ) -> None:
        self._fs = fs
        self._progress = progress
        self._directory = directory
        self._items = items
        self._transforms = transforms
        self._thread_count = thread_count
        self._copy_ahead = copy_ahead
        self._sync = sync
        self._lock = threading.Lock()
        self.names: list[str] = []

    def write(self, files: list[tuple[str, list[int]]]) -> list[WriteResult]:
        """Write the named ``files``, each with its rows; on an error they are left to ``abandon``."""
        results: list[list[WriteResult]] = [[] for _ in files]
        run_bounded(
            (
                partial(self._write_file, name, rows, result)
                for (name, rows), result in zip(files, results, strict=True)
            ),
            workers=self._thread_count,
            ahead=0,
        )
        return [result for file in results for result in file]

    def abandon(self) -> None:
        for name in self.names:
            # Whatever the file system says: what cannot be removed is invisible, the error that led here is to be told.
            with contextlib.suppress(Exception):
                self._fs.rm_file(self._fs.concat_path(self._directory, name))

    def _write_file(self, name: str, rows: list[int], results: list[WriteResult]) -> None:
        path = self._fs.concat_path(self._directory, name)
        with self._lock:
            self.names.append(name)
        ring = SlabRing(1)
        try:
            with self._fs.create_stream(path, "wb") as stream:
                position = 0

                def count(nbytes: int) -> None:
                    nonlocal position
                    position += nbytes
                    self._progress.moved(nbytes)

                counted = _Open(stream, count)
                for row, content in self._contents(rows):
                    start = position
                    descriptors = self._write_item(row, as_stored(content), counted, ring)
                    span = start, position - start
                    results.append(self._items.result(row, content, name, span, transforms=descriptors))
                if self._sync:
                    posix.sync_stream(stream, str(path))
        except OSError as error:
            raise StorageError.from_os(error, "write", str(path)) from error
        finally:
            ring.close()

    def _write_item(self, row: int, content: Content, stream: _Open, ring: SlabRing) -> list[str]:
        if not self._transforms.extensions:
            _write_content(stream, content, ring)
            return []
        transformed, descriptors = self._transforms.transform_save_stream(self._items.item(row), stream)
        _write_content(transformed, content, ring)
        transformed.close()
        return descriptors

    def _contents(self, rows: list[int]) -> Iterator[tuple[int, Content]]:
        """The values, then the tensors, which may be copied from a device ahead of time."""
        loader = tensor_loader(self._tensor, thread_count=self._thread_count, copy_ahead=self._copy_ahead)
        for row in rows:
            if not self._items.is_value[row]:
                loader.add(self._items.nbytes[row], row)
        loader.start_loading()
        for row in rows:
            if self._items.is_value[row]:
                yield row, self._items.content(row)
        for tensor, row in loader.values():
            yield row, tensor

    def _tensor(self, row: int) -> torch.Tensor:
        content = self._items.content(row)
        assert isinstance(content, torch.Tensor)
        return content


def _write_content(stream: io.RawIOBase | IO[bytes], content: Content, ring: SlabRing) -> None:
    if not isinstance(content, torch.Tensor):
        stream.write(content)
        return
    archive = tensor_archive(content.dtype, tuple(content.shape))
    source = source_of(content)
    stream.write(archive.head)
    checksum = 0
    with ring.lend() as slab:
        for start in range(0, archive.data_bytes, SLAB_BYTES):
            stop = min(start + SLAB_BYTES, archive.data_bytes)
            source.copy_out(start, stop, slab, 0)
            piece = slab.view[: stop - start]
            checksum = zlib.crc32(piece, checksum)
            stream.write(piece)
    stream.write(archive.tail(checksum))
