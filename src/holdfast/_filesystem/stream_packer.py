"""Items into the streams of any file system, through the transforms that the user gave: one thread for each file.

Offsets count what reached the stream, so that nobody has to ask it for its position.
"""

from __future__ import annotations

import contextlib
import io
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from holdfast._filesystem.base import FileSystemBase, PathLike
from holdfast._filesystem.items import Content, PlannedItems
from holdfast._filesystem.loaders import tensor_loader
from holdfast._io import posix
from holdfast._io.buffers import SLAB_BYTES, SlabRing
from holdfast._io.pipeline import run_bounded
from holdfast._state.raw import source_of
from holdfast._torchformat.archive_writing import tensor_archive
from holdfast.errors import StorageError
from holdfast.planner import WriteItem
from holdfast.storage import WriteResult


class StreamTransform(Protocol):
    """What changes bytes on their way to a file, such as compression: torch's ``StreamTransformExtension``."""

    def transform_to(self, output: Any, /) -> Any:
        """A stream that writes the changed bytes to ``output``, and closes it when it is closed."""
        ...

    def get_descriptor(self) -> str:
        """What readers need to undo it."""
        ...


class _StorageWriterTransforms:
    """The transforms of a writer; ``extensions`` are applied in their order."""

    def __init__(self, extensions: Sequence[StreamTransform] | None = None) -> None:
        self.extensions = tuple(extensions or ())

    def transform_save_stream(self, write_item: WriteItem, raw_stream: Any) -> tuple[Any, list[str]]:
        """A stream for one item that ends up in ``raw_stream``, which stays open; and how to read it, last first."""
        stream: Any = _Open(raw_stream)
        # Each writes into the one made before: so the last to be applied is the first to be made.
        for extension in reversed(self.extensions):
            stream = extension.transform_to(stream)
        return stream, [extension.get_descriptor() for extension in reversed(self.extensions)]


class _Open(io.RawIOBase):
    """A stream that others may close without closing the one below; ``count`` is told of the bytes that passed."""

    def __init__(self, below: Any, count: Callable[[int], None] | None = None) -> None:
        self._below = below
        self._count = count

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, data: Any, /) -> int:
        """Write all of ``data``."""
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
        """Pass on what may wait below."""
        if not self.closed and not self._below.closed:
            self._below.flush()


class StreamPacker:
    """Writes items to files in ``directory`` of the file system ``fs``."""

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
    ) -> None:
        self._fs = fs
        self._directory = directory
        self._items = items
        self._transforms = transforms
        self._thread_count = thread_count
        self._copy_ahead = copy_ahead
        self._sync = sync
        self._lock = threading.Lock()
        self.names: list[str] = []
        self.bytes_written = 0

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
        """Remove the files."""
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
                    with self._lock:
                        self.bytes_written += nbytes

                counted = _Open(stream, count)
                for row, content in self._contents(rows):
                    start = position
                    descriptors = self._write_item(row, self._items.stored(content), counted, ring)
                    span = start, position - start
                    results.append(self._items.result(row, content, name, span, transforms=descriptors))
                if self._sync:
                    posix.sync_stream(stream, str(path))
        except OSError as error:
            raise StorageError.from_os(error, "write", str(path)) from error
        finally:
            ring.close()

    def _write_item(self, row: int, content: Content, stream: _Open, ring: SlabRing) -> list[str]:
        """Write one item, transformed, and return how to read it."""
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


def _write_content(stream: Any, content: Content, ring: SlabRing) -> None:
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
