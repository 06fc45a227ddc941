"""Items into and out of the streams of any file system, through the transforms that the user gave.

Slabs make these unnecessary for local files; streams of other file systems take whole tensors through them.

Offsets count what reached the stream, so that nobody has to ask it for its position.

Files are read side by side, the items of one file one after the other in file order. Memory is that of one item for
each of few files.
"""

from __future__ import annotations

import abc
import contextlib
import io
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from holdfast import _process as forks
from holdfast._io import posix
from holdfast._io.pipeline import run_bounded
from holdfast._io.slabs import SLAB_BYTES, SlabRing
from holdfast._state.tensor_bytes import source_of
from holdfast._torch_codec.archive_writing import tensor_archive
from holdfast._torch_format.file_systems import FileSystemBase, PathLike
from holdfast._torch_format.items import Content, Delivery, Item, PlannedItems, buffer_of
from holdfast._values.deadline import Progress
from holdfast.errors import CheckpointError, CorruptError, StorageError, UnsupportedVersionError
from holdfast.planner import WriteItem
from holdfast.storage import WriteResult

Resolve = Callable[[Any], torch.Tensor]


class _TensorLoader(abc.ABC):
    """Gives the tensors of what was added, on the CPU, each with the object that it is for."""

    @abc.abstractmethod
    def add(self, size: int, obj: Any) -> None:
        """Take ``obj``, whose tensor has ``size`` bytes."""

    @abc.abstractmethod
    def start_loading(self) -> None:
        """Begin, where that can be done ahead; nothing may be added any more."""

    @abc.abstractmethod
    def values(self) -> Iterator[tuple[torch.Tensor, Any]]:
        """Each tensor and its object."""


class _SerialCpuLoader(_TensorLoader):
    """One tensor after the other, each when it is asked for."""

    def __init__(self, resolve_fun: Resolve) -> None:
        self.resolve_fun = resolve_fun
        self.items: list[tuple[int, Any]] = []

    def add(self, size: int, obj: Any) -> None:
        """Take ``obj``."""
        self.items.append((size, obj))

    def start_loading(self) -> None:
        """Nothing: there is no ahead."""

    def values(self) -> Iterator[tuple[torch.Tensor, Any]]:
        """Each tensor and its object, in the order in which they were added."""
        for _, obj in self.items:
            yield self.resolve_fun(obj).detach().cpu(), obj


class _OverlappingCpuLoader(_TensorLoader):
    """Copies from the accelerator run ahead of the caller, small ones first, on ``stream`` (the current one if None).

    At least ``inflight_threshhold`` bytes are under way while there are as many left, and at most one tensor more.
    """

    def __init__(
        self, resolve_fun: Resolve, stream: torch.Stream | None = None, inflight_threshhold: int = 1_000_000
    ) -> None:
        self.resolve_fun = resolve_fun
        self.inflight_threshhold = inflight_threshhold
        self.items: list[tuple[int, Any]] = []
        self.in_flight_data = 0
        self.started = False
        device_type = accelerator_type() if stream is None else stream.device.type
        if device_type is None:
            raise RuntimeError("there is no accelerator to copy ahead from; use the serial loader")
        self.device_type = device_type
        self.device_module = torch.get_device_module(self.device_type)
        current = self.device_module.current_stream()
        self.stream = current if stream is None else stream
        if self.stream != current:
            self.stream.wait_stream(current)
        self._under_way: deque[tuple[torch.Tensor, Any]] = deque()
        self._next = 0

    def add(self, size: int, obj: Any) -> None:
        """Take ``obj``; RuntimeError once loading has begun, because the order is fixed then."""
        if self.started:
            raise RuntimeError("nothing can be added to a loader that has begun to load")
        self.items.append((size, obj))

    def start_loading(self) -> None:
        """Start the first copies; a second call does nothing."""
        if not self.started:
            self.started = True
            self.items.sort(key=lambda item: item[0])
            self._refill()

    def values(self) -> Iterator[tuple[torch.Tensor, Any]]:
        """Each tensor and its object, small ones first."""
        self.start_loading()
        while self._under_way:
            self.stream.synchronize()
            # All that were under way have arrived; for each that goes out, the next are started.
            for _ in range(len(self._under_way)):
                tensor, obj = self._under_way.popleft()
                self.in_flight_data -= tensor.nbytes
                self._refill()
                yield tensor, obj

    def _refill(self) -> None:
        with self.device_module.stream(self.stream):
            while self._next < len(self.items) and self.in_flight_data < self.inflight_threshhold:
                _, obj = self.items[self._next]
                self._next += 1
                tensor = self.resolve_fun(obj).detach()
                on_device = tensor.device.type == self.device_type
                tensor = tensor.to("cpu", non_blocking=True) if on_device else tensor.cpu()
                self._under_way.append((tensor, obj))
                self.in_flight_data += tensor.nbytes


def accelerator_type() -> str | None:
    """The kind of accelerator that this process can use ("cuda", or another backend's name); None without one."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    return None if device is None else device.type


def tensor_loader(resolve_fun: Resolve, *, thread_count: int, copy_ahead: int) -> _TensorLoader:
    """The overlapping loader where one thread writes, there is an accelerator and something may be copied ahead."""
    if thread_count == 1 and copy_ahead > 0 and accelerator_type() is not None:
        return _OverlappingCpuLoader(resolve_fun, inflight_threshhold=copy_ahead)
    return _SerialCpuLoader(resolve_fun)


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
                    self._progress.moved(nbytes)

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


_FILES_AT_ONCE = 4


class TransformRegistry(Protocol):
    """What knows stream transforms by their descriptors, as torch's ExtensionRegistry does."""

    def from_descriptor_list(self, descriptors: Iterable[str]) -> Sequence[Any]:
        """The transforms, each with ``transform_from(stream)``, in the order to be applied."""
        ...


class StreamRead:
    """One batch of reads through streams of ``fs``; ``bytes_read`` counts what came."""

    def __init__(
        self, fs: FileSystemBase, directory: PathLike, delivery: Delivery, registry: TransformRegistry | None
    ) -> None:
        self._fs = fs
        self._directory = directory
        self._delivery = delivery
        self._registry = registry
        self._lock = forks.Lock()
        self.bytes_read = 0

    def run(self, items: Sequence[Item]) -> None:
        """Read and deliver ``items``."""
        by_file: dict[str, list[Item]] = {}
        for item in sorted(items, key=lambda each: (each.place.relative_path, each.place.offset)):
            by_file.setdefault(item.place.relative_path, []).append(item)
        jobs = (partial(self._read_file, name, items) for name, items in by_file.items())
        run_bounded(jobs, workers=_FILES_AT_ONCE, ahead=0)

    def _read_file(self, name: str, items: list[Item]) -> None:
        path = self._fs.concat_path(self._directory, name)
        try:
            with self._fs.create_stream(path, "rb") as stream:
                for item in items:
                    self._deliver(item, self._transformed(item, self._read(stream, item)))
        except CheckpointError:
            raise
        except FileNotFoundError as error:
            raise CorruptError(f"{str(path)!r} is missing; use another checkpoint", path=str(path)) from error
        except OSError as error:
            raise StorageError.from_os(error, "read", str(path)) from error

    def _read(self, stream: Any, item: Item) -> bytes:
        place = item.place
        stream.seek(place.offset)
        pieces, missing = [], place.length
        while missing and (piece := stream.read(missing)):
            pieces.append(piece)
            missing -= len(piece)
        with self._lock:
            self.bytes_read += place.length - missing
        if missing:
            raise CorruptError(
                f"{place.relative_path!r} is truncated: it ends before byte {place.offset + place.length}; "
                "use another checkpoint",
                path=place.relative_path,
                key=item.key,
            )
        return b"".join(pieces)

    def _transformed(self, item: Item, data: bytes) -> bytes:
        descriptors = item.place.transform_descriptors
        if not descriptors:
            return data
        if self._registry is None:
            raise UnsupportedVersionError(
                f"{item.key!r} went through the stream transforms {list(descriptors)}; give FileSystemReader an "
                "_extension_registry that knows them"
            )
        try:
            stream: Any = io.BytesIO(data)
            for transform in self._registry.from_descriptor_list(descriptors):
                stream = transform.transform_from(stream)
            result: bytes = stream.read()
        except CheckpointError:
            raise
        except Exception as error:
            # Extensions are anyone's code, and say in their own ways that they do not know a name or cannot decode.
            raise CorruptError(
                f"the stream transforms {list(descriptors)} of {item.key!r} could not be undone: "
                f"{type(error).__name__}: {error}",
                path=item.place.relative_path,
                key=item.key,
            ) from error
        return result

    def _deliver(self, item: Item, data: bytes) -> None:
        # Planners expect one call at a time.
        with self._lock:
            if item.is_value:
                self._delivery.give_value(item, data)
                return
            tensors = self._delivery.resolve(item.rows)
            self._delivery.fill(item, tensors, buffer_of(data), 0, len(data))
            self._delivery.commit(item, tensors)
