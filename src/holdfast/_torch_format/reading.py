"""Items read from files and delivered to the planner.

From local files only the bytes that are wanted are read, in parallel, by the engine that reads native files. Small
items are read whole, many at a time, and taken apart where they lie. Of large ones the ends of their archives are read
first, which tell where the elements lie, then just the elements that are wanted; each target is filled as its bytes
come. Layouts are kept by the caller, so that ends are read once. Items that only torch.load understands come last, one
at a time.

From other file systems, and through transforms, items are read whole. Files are read side by side, the items of one
file one after the other in file order: memory is that of one item for each of few files.
"""

from __future__ import annotations

import io
import threading
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import IO, NamedTuple, Protocol, cast

import numpy as np
import torch

from holdfast import _process as forks
from holdfast._engine import MOST_SEGMENT_BYTES, Destination, SegmentFetch, Segments, in_blocks
from holdfast._io.direct import LocalFiles
from holdfast._io.files import FileToRead
from holdfast._io.pipeline import default_workers, run_bounded
from holdfast._io.slabs import Slab
from holdfast._plan.reads import byte_spans
from holdfast._torch_codec.archive import HEAD_BYTES, TAIL_BYTES, Elements
from holdfast._torch_codec.metadata_file import StorageInfo
from holdfast._torch_format.file_systems import FileSystemBase, PathLike
from holdfast._torch_format.items import Delivery, Item, damaged, find_elements, permuted
from holdfast._values.box import Box
from holdfast._values.deadline import Progress
from holdfast._values.digest import combine_checksums
from holdfast._values.dtypes import MAX_METADATA_BYTES
from holdfast.errors import CheckpointError, CorruptError, StorageError, UnsupportedVersionError

_SMALL_BYTES = 64 << 10
"""Items of so many bytes are read whole: the few reads that parts would take cost more."""

_LOOKS_AT_ONCE = 8

_MAX_GAP = 64 << 10
"""Bytes between two wanted ranges that are read along, because another read costs more."""

_Offsets = np.ndarray | list[int]

Layouts = dict[tuple[str, int], Elements | None]
"""What is known of the archives at (relative path, offset); None: only torch.load understands it."""


def read_ranges(
    items: Sequence[Item],
    files: LocalFiles,
    delivery: Delivery,
    layouts: Layouts,
    *,
    verify: bool | None,
    progress: Progress,
) -> None:
    """Read ``items``, each from the file of its number, and deliver them.

    ``verify`` says whether chunks that are read whole must have their checksums; None: those from files that are not in
    the page cache, and small ones.
    """
    small = [item for item in items if item.place.length <= _SMALL_BYTES]
    large = [item for item in items if item.place.length > _SMALL_BYTES]
    _find_layouts(large, files, layouts, progress)
    plain = [item for item in large if item.is_value or layouts[_name(item)] is not None]
    odd = [item for item in large if not item.is_value and layouts[_name(item)] is None]
    for together in (small, plain, *([item] for item in odd)):
        if together:
            _ItemFetch(together, files, delivery, layouts, verify=verify, progress=progress).run()


def _name(item: Item) -> tuple[str, int]:
    return item.place.relative_path, item.place.offset


def _find_layouts(items: Sequence[Item], files: LocalFiles, layouts: Layouts, progress: Progress) -> None:
    """Find out where the elements lie in those archives that nobody has looked at yet."""
    unknown = [item for item in items if not item.is_value and _name(item) not in layouts]
    unknown.sort(key=lambda item: (item.file, item.place.offset))

    def look(batch: Sequence[Item]) -> None:
        for item in batch:
            with files.lend(item.file) as (file, _):
                layouts[_name(item)] = find_elements(item, Ends(file, item.place).read, item.place.length)
            progress.moved(HEAD_BYTES + TAIL_BYTES)

    is_cached = all([files.is_cached(number) for number in dict.fromkeys(item.file for item in unknown)])
    # From memory it takes less time than threads need to start.
    batches = [unknown[start : start + _LOOKS_AT_ONCE] for start in range(0, len(unknown), _LOOKS_AT_ONCE)]
    run_bounded((partial(look, batch) for batch in batches), workers=1 if is_cached else default_workers())


class Ends:
    """The bytes of one archive, a few at a time; its two ends are read once."""

    def __init__(self, file: FileToRead, place: StorageInfo) -> None:
        self._file = file
        self._offset = place.offset
        length = place.length
        is_short = length <= HEAD_BYTES + TAIL_BYTES
        ends = [(0, length)] if is_short else [(0, HEAD_BYTES), (length - TAIL_BYTES, length)]
        self._pieces = [(start, self._read(start, stop)) for start, stop in ends]

    def read(self, start: int, stop: int) -> bytes:
        for begin, piece in self._pieces:
            if begin <= start and stop <= begin + len(piece):
                return piece[start - begin : stop - begin]
        return self._read(start, stop)

    def _read(self, start: int, stop: int) -> bytes:
        data = bytearray(stop - start)
        self._file.read_into(memoryview(data), self._offset + start)
        return bytes(data)


class _WholeItem:
    """Takes all bytes of an item."""

    on_cpu = True
    tensor = torch.empty(0, device="cpu")

    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)

    def memory(self, start: int, stop: int) -> memoryview:
        return memoryview(self.data)[start:stop]

    def copy_in(self, start: int, stop: int, buffer: Slab, at: int) -> None:
        self.data[start:stop] = buffer.view[at : at + stop - start]


class _ItemFetch(SegmentFetch[Destination]):
    """Each box is one row of the plan; or a whole item: a small one, a value, or what only torch.load understands."""

    max_gap = _MAX_GAP

    def __init__(
        self,
        items: Sequence[Item],
        files: LocalFiles,
        delivery: Delivery,
        layouts: Layouts,
        *,
        verify: bool | None,
        progress: Progress,
    ) -> None:
        self._files = files
        self._delivery = delivery
        self._boxes: list[tuple[Item, int | None]] = []
        self._layouts = layouts
        self._tensors: dict[int, torch.Tensor] = {}
        self._sums: dict[int, list[tuple[int, int, int]]] = {}
        self._sum_lock = threading.Lock()
        ranges: list[_Wanted] = []
        # Of what memory holds already, checksums would take longer than all the rest.
        checks = {
            number: not files.is_cached(number) if verify is None else verify
            for number in {item.file for item in items}
        }
        for item in items:
            elements = self._elements(item)
            if elements is None:
                ranges.append(_Wanted(len(self._boxes), item.file, item.place.offset, *_blocks(0, item.place.length)))
                self._boxes.append((item, None))
                continue
            base = item.place.offset + elements.begin
            for row in item.rows:
                starts, stops, is_whole = _spans(elements, delivery.box(row))
                checked = checks[item.file] and is_whole and elements.checksum is not None
                ranges.append(_Wanted(len(self._boxes), item.file, base, starts, stops, checked))
                self._boxes.append((item, row))
        super().__init__(
            _segments(ranges),
            boxes=len(self._boxes),
            open_targets=lambda boxes: [self._open_box(box) for box in boxes],
            close_target=self._close_box,
            progress=progress,
        )

    def _elements(self, item: Item) -> Elements | None:
        """Where the elements of a large tensor lie; None for what is read whole."""
        is_whole = item.is_value or item.place.length <= _SMALL_BYTES
        return None if is_whole else self._layouts[_name(item)]

    def _open_box(self, box: int) -> Destination:
        item, row = self._boxes[box]
        elements = self._elements(item)
        if row is None or elements is None:
            return _WholeItem(item.place.length)
        (self._tensors[box],) = self._delivery.resolve([row])
        return self._delivery.target(item, row, self._tensors[box], elements)

    def _close_box(self, box: int, target: Destination) -> None:
        item, row = self._boxes[box]
        if row is not None:
            self._delivery.commit(row, self._tensors.pop(box))
            return
        if item.place.length == 0:
            raise CorruptError(f"{item.key!r} is stored in no bytes; use another checkpoint", key=item.key)
        assert isinstance(target, _WholeItem)
        self._delivery.deliver(item, target.data)

    def file(self, number: int) -> AbstractContextManager[tuple[FileToRead, bool]]:
        return self._files.lend(number)

    def expected(self, digests: np.ndarray) -> list[int]:
        """The values as they are: 0 where a checksum is to be computed."""
        values: list[int] = digests.tolist()
        return values

    def is_intact(self, box: int, start: int, view: memoryview, expected: int) -> bool:
        """Whether the record has its checksum; told when the last of its bytes have come."""
        checksum = zlib.crc32(view)
        elements = self._elements(self._boxes[box][0])
        assert elements is not None
        with self._sum_lock:
            sums = self._sums.setdefault(box, [])
            sums.append((start, checksum, view.nbytes))
            if sum(nbytes for _, _, nbytes in sums) < elements.nbytes:
                return True
            del self._sums[box]
        return combine_checksums((crc, nbytes) for _, crc, nbytes in sorted(sums)) == elements.checksum

    def damaged(self, file: int, box: int, offset: int, nbytes: int) -> CorruptError:
        item, _ = self._boxes[box]
        elements = self._elements(item)
        assert elements is not None
        return damaged(item, elements.begin, elements.nbytes)


def _blocks(start: int, stop: int) -> tuple[_Offsets, _Offsets]:
    if stop - start <= MOST_SEGMENT_BYTES:
        return [start], [stop]
    return in_blocks(np.full(1, start), np.full(1, stop), block=MOST_SEGMENT_BYTES)


def _spans(elements: Elements, box: Box) -> tuple[_Offsets, _Offsets, bool]:
    """The ranges of the elements' bytes that ``box`` takes, in blocks; and whether that is all of them."""
    is_whole = box.lengths == elements.shape
    if is_whole or not box.fits(elements.shape):  # one that does not fit is refused when its target is made
        return *_blocks(0, elements.nbytes), is_whole
    shape = permuted(elements.shape, elements.order)
    stored = Box(permuted(box.offsets, elements.order), permuted(box.lengths, elements.order))
    starts, stops = byte_spans(shape, stored, elements.dtype.itemsize, max_gap=_MAX_GAP)
    return *in_blocks(starts, stops, block=MOST_SEGMENT_BYTES), is_whole


class _Wanted(NamedTuple):
    """Ranges of the bytes of one box, counted from byte ``base`` of its file."""

    box: int
    file: int
    base: int
    starts: _Offsets
    stops: _Offsets
    checked: bool = False


def _segments(ranges: list[_Wanted]) -> Segments:
    boxes, files, bases, starts, stops, checked = zip(*ranges, strict=True)
    counts = [len(each) for each in starts]

    def repeated(column: Sequence[int]) -> np.ndarray:
        return np.repeat(np.array(column, dtype=np.int64), counts)

    start, stop = np.concatenate(starts), np.concatenate(stops)
    file, offset = repeated(files), repeated(bases) + start
    order = np.lexsort((offset, file))
    order = order[(stop > start)[order]]
    return Segments(
        box=repeated(boxes)[order],
        start=start[order],
        nbytes=(stop - start)[order],
        file=file[order],
        offset=offset[order],
        digest=(repeated(checked) - 1)[order],
    )


_FILES_AT_ONCE = 4
_PIECE_BYTES = 16 << 20
_ALWAYS_BYTES = 1 << 20


class _UndoneTransform(Protocol):
    def transform_from(self, input: IO[bytes], /) -> IO[bytes]:
        """A stream that reads the bytes as they were before."""
        ...


class TransformRegistry(Protocol):
    """What knows stream transforms by their descriptors, as torch's ExtensionRegistry does."""

    def from_descriptor_list(self, descriptors: Iterable[str]) -> Sequence[_UndoneTransform]: ...


class StreamRead:
    """One batch of reads through streams of ``fs``; ``bytes_read`` counts what came.

    ``sizes`` has the bytes of the tensor of each key: what transforms make of a few bytes is to be in proportion.
    """

    def __init__(
        self,
        fs: FileSystemBase,
        directory: PathLike,
        delivery: Delivery,
        registry: TransformRegistry | None,
        sizes: Mapping[str, int],
        progress: Progress,
    ) -> None:
        self._progress = progress
        self._fs = fs
        self._directory = directory
        self._delivery = delivery
        self._registry = registry
        self._sizes = sizes
        self._lock = forks.Lock()
        self.bytes_read = 0

    def run(self, items: Sequence[Item]) -> None:
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
                    data = bytearray(self._transformed(item, self._read(stream, item)))
                    with self._lock:  # planners expect one call at a time
                        self._delivery.deliver(item, data)
        except CheckpointError:
            raise
        except FileNotFoundError as error:
            raise CorruptError(f"{str(path)!r} is missing; use another checkpoint", path=str(path)) from error
        except OSError as error:
            raise StorageError.from_os(error, "read", str(path)) from error

    def _read(self, stream: io.IOBase, item: Item) -> bytes:
        place = item.place
        stream.seek(place.offset)
        pieces, missing = [], place.length
        while missing and (piece := stream.read(missing)):
            pieces.append(piece)
            missing -= len(piece)
            self._progress.moved(len(piece))
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

    def _transforms(self, key: str, descriptors: Sequence[str]) -> Sequence[_UndoneTransform]:
        """What the descriptors name: in the registry that was given, or among those that torch has itself."""
        if self._registry is not None:
            return self._registry.from_descriptor_list(descriptors)
        from holdfast._torch_classes.torchs import _extension

        try:
            return cast(Sequence[_UndoneTransform], _extension.ExtensionRegistry().from_descriptor_list(descriptors))
        except ValueError as error:
            raise UnsupportedVersionError(
                f"{key!r} went through the stream transforms {list(descriptors)}, and {error}; install what they "
                "need, or give FileSystemReader an _extension_registry that knows them"
            ) from error

    def _transformed(self, item: Item, data: bytes) -> bytes | bytearray:
        descriptors = item.place.transform_descriptors
        if not descriptors:
            return data
        most = 2 * self._sizes[item.key] + _ALWAYS_BYTES if item.key in self._sizes else MAX_METADATA_BYTES
        made = bytearray()
        try:
            stream: IO[bytes] = io.BytesIO(data)
            for transform in self._transforms(item.key, descriptors):
                stream = transform.transform_from(stream)
            while len(made) <= most and (piece := stream.read(_PIECE_BYTES)):
                made += piece
            if len(made) > most:
                raise CorruptError(
                    f"{item.key!r} has more than {most} bytes after its stream transforms; use another checkpoint",
                    path=item.place.relative_path,
                    key=item.key,
                )
            return made
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
