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
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import IO, NamedTuple, Protocol

import numpy as np
import torch

from holdfast import _process as forks
from holdfast._engine.read import MOST_SEGMENT_BYTES, Destination, SegmentFetch, Segments, in_blocks
from holdfast._io.direct import InputFile, LocalFiles
from holdfast._io.pipeline import default_workers, run_bounded
from holdfast._io.slabs import Slab
from holdfast._plan.reads import byte_spans
from holdfast._state.tensor_bytes import Target
from holdfast._torch_codec.archive import HEAD_BYTES, TAIL_BYTES, Elements
from holdfast._torch_codec.metadata_file import StorageInfo
from holdfast._torch_format.file_systems import FileSystemBase, PathLike
from holdfast._torch_format.items import Delivery, Item, buffer_of, damaged, locate, permuted
from holdfast._values.box import Box
from holdfast._values.digest import combine_checksums
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
    items: Sequence[Item], files: LocalFiles, delivery: Delivery, layouts: Layouts, *, verify: bool | None
) -> None:
    """Read ``items``, each from the file of its number, and deliver them.

    ``verify`` says whether chunks that are read whole must have their checksums; None: those from files that are not in
    the page cache, and small ones.
    """
    small = [item for item in items if item.place.length <= _SMALL_BYTES]
    if small:
        _SmallItems(small, files, delivery).run()
    large = [item for item in items if item.place.length > _SMALL_BYTES]
    _find_layouts(large, files, layouts)
    plain = [item for item in large if item.is_value or layouts[_name(item)] is not None]
    odd = [item for item in large if not item.is_value and layouts[_name(item)] is None]
    for together in (plain, *([item] for item in odd)):
        if together:
            _LargeItems(together, files, delivery, layouts, verify=verify).run()


def _name(item: Item) -> tuple[str, int]:
    return item.place.relative_path, item.place.offset


# --- small items ----------------------------------------------------------------------------------------------------


class _SmallItem:
    on_cpu = True
    tensor = torch.empty(0, device="cpu")

    def __init__(self, item: Item, tensors: list[torch.Tensor], delivery: Delivery) -> None:
        self._item = item
        self._tensors = tensors
        self._delivery = delivery
        self._data = b""

    def memory(self, start: int, stop: int) -> memoryview | None:
        return None  # an item is not what goes into a target

    def copy_in(self, start: int, stop: int, buffer: Slab, at: int) -> None:
        if self._item.is_value:
            self._data = bytes(buffer.view[at : at + stop])
        else:
            self._delivery.fill(self._item, self._tensors, buffer, at, stop)

    def close(self) -> None:
        if self._item.place.length == 0:
            key = self._item.key
            raise CorruptError(f"{key!r} is stored in no bytes; use another checkpoint", key=key)
        if self._item.is_value:
            self._delivery.give_value(self._item, self._data)
        else:
            self._delivery.commit(self._item, self._tensors)


class _ItemFetch(SegmentFetch[Destination]):
    """What reads of small and of large items share: their files and what an error says."""

    max_gap = _MAX_GAP

    def __init__(
        self,
        files: LocalFiles,
        *,
        segments: Segments,
        boxes: int,
        open_targets: Callable[[list[int]], list[Destination]],
        close_target: Callable[[int, Destination], None],
    ) -> None:
        super().__init__(segments, boxes=boxes, open_targets=open_targets, close_target=close_target)
        self._files = files

    def file(self, number: int) -> AbstractContextManager[tuple[InputFile, bool]]:
        return self._files.lend(number)

    def expected(self, digests: np.ndarray) -> list[int]:
        """The values as they are: 0 where a checksum is to be computed."""
        values: list[int] = digests.tolist()
        return values

    def is_intact(self, box: int, start: int, view: memoryview, expected: int) -> bool:
        """Items that are read whole are checked where they are taken apart."""
        return True

    def damaged(self, file: int, box: int, offset: int, nbytes: int) -> CorruptError:
        path = self._files.path(file)
        return CorruptError(f"{path!r} is damaged in bytes {offset} to {offset + nbytes}", path=path)


class _SmallItems(_ItemFetch):
    """Each box is an item."""

    def __init__(self, items: Sequence[Item], files: LocalFiles, delivery: Delivery) -> None:
        self._items = items
        self._delivery = delivery
        super().__init__(
            files,
            segments=_segments(
                [_Wanted(box, item.file, item.place.offset, [0], [item.place.length]) for box, item in enumerate(items)]
            ),
            boxes=len(items),
            open_targets=self._open_items,
            close_target=self._close_item,
        )

    def _open_items(self, boxes: list[int]) -> list[Destination]:
        return [
            _SmallItem(item, [] if item.is_value else self._delivery.resolve(item.rows), self._delivery)
            for item in (self._items[box] for box in boxes)
        ]

    def _close_item(self, box: int, target: Destination) -> None:
        assert isinstance(target, _SmallItem)
        target.close()


# --- large items ----------------------------------------------------------------------------------------------------


def _find_layouts(items: Sequence[Item], files: LocalFiles, layouts: Layouts) -> None:
    """Find out where the elements of the archives lie that nobody has looked at."""
    unknown = [item for item in items if not item.is_value and _name(item) not in layouts]
    unknown.sort(key=lambda item: (item.file, item.place.offset))

    def look(batch: Sequence[Item]) -> None:
        for item in batch:
            with files.lend(item.file) as (file, _):
                layouts[_name(item)] = locate(item, Ends(file, item.place).read, item.place.length)

    is_cached = all([files.is_cached(number) for number in dict.fromkeys(item.file for item in unknown)])
    # From memory it takes less time than threads need to start.
    batches = [unknown[start : start + _LOOKS_AT_ONCE] for start in range(0, len(unknown), _LOOKS_AT_ONCE)]
    run_bounded((partial(look, batch) for batch in batches), workers=1 if is_cached else default_workers())


class Ends:
    """The bytes of one archive, a few at a time; its two ends are read once."""

    def __init__(self, file: InputFile, place: StorageInfo) -> None:
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


class _LargeItems(_ItemFetch):
    """Each box is one row of the plan; or a whole item, for values and for what torch.load is to make sense of."""

    def __init__(
        self,
        items: Sequence[Item],
        files: LocalFiles,
        delivery: Delivery,
        layouts: Layouts,
        *,
        verify: bool | None,
    ) -> None:
        self._boxes: list[tuple[Item, int | None]] = []
        self._tensors: dict[int, torch.Tensor] = {}
        self._delivery = delivery
        self._layouts = layouts
        self._sums: dict[int, list[tuple[int, int, int]]] = {}
        self._sum_lock = threading.Lock()
        ranges: list[_Wanted] = []
        # Of what memory holds already, checksums would take longer than all the rest.
        checks = {
            number: not files.is_cached(number) if verify is None else verify
            for number in {item.file for item in items}
        }
        for item in items:
            elements = None if item.is_value else layouts[_name(item)]
            if elements is None:
                self._boxes.append((item, None))
                blocks = in_blocks(np.zeros(1, np.int64), np.full(1, item.place.length), block=MOST_SEGMENT_BYTES)
                ranges.append(_Wanted(len(self._boxes) - 1, item.file, item.place.offset, *blocks))
                continue
            base = item.place.offset + elements.begin
            for row in item.rows:
                self._boxes.append((item, row))
                starts, stops, is_whole = _spans(elements, delivery.box(row))
                checked = checks[item.file] and is_whole and elements.checksum is not None
                ranges.append(_Wanted(len(self._boxes) - 1, item.file, base, starts, stops, checked))
        super().__init__(
            files,
            segments=_segments(ranges),
            boxes=len(self._boxes),
            open_targets=self._open_boxes,
            close_target=self._close_box,
        )

    def _open_boxes(self, boxes: list[int]) -> list[Destination]:
        targets: list[Destination] = []
        for box in boxes:
            item, row = self._boxes[box]
            elements = self._layouts.get(_name(item))
            if row is None or elements is None:
                whole = torch.empty(item.place.length, dtype=torch.uint8, device="cpu")
                targets.append(Target(whole, torch.uint8, tuple(whole.shape), None))
                continue
            (self._tensors[box],) = self._delivery.resolve([row])
            targets.append(self._delivery.target(item, row, self._tensors[box], elements))
        return targets

    def _close_box(self, box: int, target: Destination) -> None:
        item, row = self._boxes[box]
        if row is not None:
            self._delivery.commit_row(row, self._tensors.pop(box))
            return
        data = target.tensor.numpy().tobytes()
        if item.is_value:
            self._delivery.give_value(item, data)
        else:
            tensors = self._delivery.resolve(item.rows)
            self._delivery.fill_loaded(item, tensors, data)
            self._delivery.commit(item, tensors)

    def is_intact(self, box: int, start: int, view: memoryview, expected: int) -> bool:
        """Whether the record has its checksum; told when the last of its bytes have come."""
        checksum = zlib.crc32(view)
        elements = self._layouts[_name(self._boxes[box][0])]
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
        elements = self._layouts[_name(item)]
        assert elements is not None
        return damaged(item, elements.begin, elements.nbytes)


def _spans(elements: Elements, box: Box) -> tuple[_Offsets, _Offsets, bool]:
    """The ranges of the elements' bytes that ``box`` takes, in blocks; and whether that is all of them."""
    shape = permuted(elements.shape, elements.order)
    is_whole = box.lengths == elements.shape
    if is_whole or not box.fits(elements.shape):  # one that does not fit is refused when its target is made
        if elements.nbytes <= MOST_SEGMENT_BYTES:
            return [0], [elements.nbytes], is_whole
        starts, stops = np.zeros(1, np.int64), np.full(1, elements.nbytes)
    else:
        stored = Box(permuted(box.offsets, elements.order), permuted(box.lengths, elements.order))
        starts, stops = byte_spans(shape, stored, elements.dtype.itemsize, max_gap=_MAX_GAP)
    starts, stops = in_blocks(starts, stops, block=MOST_SEGMENT_BYTES)
    return starts, stops, is_whole


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


# --- through streams --------------------------------------------------------------------------------------------------


_FILES_AT_ONCE = 4


class _UndoneTransform(Protocol):
    def transform_from(self, input: IO[bytes], /) -> IO[bytes]:
        """A stream that reads the bytes as they were before."""
        ...


class TransformRegistry(Protocol):
    """What knows stream transforms by their descriptors, as torch's ExtensionRegistry does."""

    def from_descriptor_list(self, descriptors: Iterable[str]) -> Sequence[_UndoneTransform]: ...


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

    def _read(self, stream: io.IOBase, item: Item) -> bytes:
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
            stream: IO[bytes] = io.BytesIO(data)
            for transform in self._registry.from_descriptor_list(descriptors):
                stream = transform.transform_from(stream)
            return stream.read()
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

    def _deliver(self, item: Item, data: bytes) -> None:
        # Planners expect one call at a time.
        with self._lock:
            if item.is_value:
                self._delivery.give_value(item, data)
                return
            tensors = self._delivery.resolve(item.rows)
            self._delivery.fill(item, tensors, buffer_of(data), 0, len(data))
            self._delivery.commit(item, tensors)
