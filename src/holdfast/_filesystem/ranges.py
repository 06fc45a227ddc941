"""Items of local files read by range: only the bytes that are wanted, in parallel, small items many at a time.

Two passes of the engine that reads native files. The first reads small items whole and delivers them, and the ends of
the archives of large ones, which tell where their elements lie. The second reads just the elements that are wanted of
the large ones; each target is filled as its bytes come. Layouts are kept by the caller, so that the first pass is
needed once. Items that only torch.load understands come last, one at a time.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch

from holdfast._filesystem.delivery import Delivery, Item, damaged, locate, permuted
from holdfast._filesystem.files import LocalFiles
from holdfast._io.buffers import Slab
from holdfast._io.direct import InputFile
from holdfast._native.segments import Destination, SegmentFetch, Segments, in_blocks
from holdfast._plan.ranges import byte_spans
from holdfast._state.raw import Target
from holdfast._torchformat.archive import HEAD_BYTES, TAIL_BYTES, Elements
from holdfast._values.box import Box
from holdfast._values.checksum import combine_checksums
from holdfast.errors import CorruptError

_SMALL_BYTES = 64 << 10
"""Items of so many bytes are read whole: the few reads that parts would take cost more."""

_MAX_GAP = 64 << 10
"""Bytes between two wanted ranges that are read along, because another read costs more."""

Layouts = dict[tuple[str, int], Elements | None]
"""What is known of the archives at (relative path, offset); None: only torch.load understands it."""


def read_ranges(
    items: Sequence[Item], files: LocalFiles, numbers: Sequence[int], delivery: Delivery, layouts: Layouts, verify: bool
) -> None:
    """Read ``items``, each from the file of its number, and deliver them."""
    first = [at for at, item in enumerate(items) if _is_small(item) or _needs_ends(item, layouts)]
    _FirstPass(items, files, numbers, first, delivery, layouts).run()
    rest = [at for at, item in enumerate(items) if not _is_small(item)]
    odd = [at for at in rest if not items[at].is_value and layouts[_name(items[at])] is None]
    plain = sorted(set(rest) - set(odd))
    _SecondPass(items, files, numbers, plain, delivery, layouts, verify=verify).run()
    for at in odd:
        _SecondPass(items, files, numbers, [at], delivery, layouts, verify=verify).run()


def _is_small(item: Item) -> bool:
    return item.place.length <= _SMALL_BYTES


def _needs_ends(item: Item, layouts: Layouts) -> bool:
    return not item.is_value and _name(item) not in layouts


def _name(item: Item) -> tuple[str, int]:
    return item.place.relative_path, item.place.offset


# --- the first pass: small items, and the ends of large ones --------------------------------------------------------


class _SmallItem:
    """Takes a whole item and delivers it."""

    on_cpu = True
    tensor = torch.empty(0)

    def __init__(self, item: Item, tensors: list[torch.Tensor], delivery: Delivery) -> None:
        self._item = item
        self._tensors = tensors
        self._delivery = delivery
        self._data = b""

    def memory(self, start: int, stop: int) -> memoryview | None:
        """Nothing: an item is not what goes into a target."""
        return None

    def copy_in(self, start: int, stop: int, buffer: Slab, at: int) -> None:
        """Take the item, which lies in ``buffer`` from ``at`` on."""
        if self._item.is_value:
            self._data = bytes(buffer.view[at : at + stop])
        else:
            self._delivery.fill(self._item, self._tensors, buffer, at, stop)

    def close(self) -> None:
        """Tell the planner."""
        if self._item.is_value:
            self._delivery.give_value(self._item, self._data)
        else:
            self._delivery.commit(self._item, self._tensors)


class _Ends:
    """Takes the first and the last bytes of an archive, and finds out where its elements lie."""

    on_cpu = True
    tensor = torch.empty(0)

    def __init__(self, item: Item, layouts: Layouts, read_more: Callable[[int, int], bytes]) -> None:
        self._item = item
        self._layouts = layouts
        self._read_more = read_more
        self._pieces: list[tuple[int, bytes]] = []

    def memory(self, start: int, stop: int) -> memoryview | None:
        """Nothing, as above."""
        return None

    def copy_in(self, start: int, stop: int, buffer: Slab, at: int) -> None:
        """Keep what came."""
        self._pieces.append((start, bytes(buffer.view[at : at + stop - start])))

    def close(self) -> None:
        """Take the layout down."""
        self._layouts[_name(self._item)] = locate(self._item, self._read, self._item.place.length)

    def _read(self, start: int, stop: int) -> bytes:
        for begin, piece in self._pieces:
            if begin <= start and stop <= begin + len(piece):
                return piece[start - begin : stop - begin]
        return self._read_more(start, stop)


class _ItemFetch(SegmentFetch[Destination]):
    """What both passes share: items, their files and what an error says."""

    def __init__(
        self,
        items: Sequence[Item],
        files: LocalFiles,
        numbers: Sequence[int],
        *,
        segments: Segments,
        boxes: int,
        open_targets: Callable[[list[int]], list[Destination]],
        close_target: Callable[[int, Destination], None],
    ) -> None:
        super().__init__(segments, boxes=boxes, open_targets=open_targets, close_target=close_target)
        self._items = items
        self._files = files
        self._numbers = numbers

    def file(self, number: int) -> AbstractContextManager[tuple[InputFile, bool]]:
        """File ``number``, and whether it is in the page cache."""
        return self._files.lend(number)

    def expected(self, digests: np.ndarray) -> list[int]:
        """The values as they are: 0 where a checksum is to be computed."""
        values: list[int] = digests.tolist()
        return values

    def is_intact(self, box: int, start: int, view: memoryview, expected: int) -> bool:
        """Items that are read whole are checked where they are taken apart."""
        return True

    def damaged(self, file: int, box: int, offset: int, nbytes: int) -> CorruptError:
        """The error that names the file and the bytes."""
        path = self._files.path(file)
        return CorruptError(f"{path!r} is damaged in bytes {offset} to {offset + nbytes}", path=path)


class _FirstPass(_ItemFetch):
    def __init__(
        self,
        items: Sequence[Item],
        files: LocalFiles,
        numbers: Sequence[int],
        chosen: list[int],
        delivery: Delivery,
        layouts: Layouts,
    ) -> None:
        rows = _Rows()
        for box, at in enumerate(chosen):
            place = items[at].place
            if _is_small(items[at]):
                rows.add(box, numbers[at], place.offset, [0], [place.length])
            else:
                ends = [0, place.length - TAIL_BYTES], [HEAD_BYTES, place.length]
                rows.add(box, numbers[at], place.offset, *ends)
        super().__init__(
            items,
            files,
            numbers,
            segments=rows.segments(),
            boxes=len(chosen),
            open_targets=self._open_items,
            close_target=self._close_item,
        )
        self._chosen = chosen
        self._delivery = delivery
        self._layouts = layouts

    def _open_items(self, boxes: list[int]) -> list[Destination]:
        targets: list[Destination] = []
        for box in boxes:
            at = self._chosen[box]
            item = self._items[at]
            if _is_small(item):
                tensors = [] if item.is_value else self._delivery.resolve(item.rows)
                targets.append(_SmallItem(item, tensors, self._delivery))
            else:
                targets.append(_Ends(item, self._layouts, self._reader(at)))
        return targets

    def _close_item(self, box: int, target: Destination) -> None:
        assert isinstance(target, (_SmallItem, _Ends))
        if self._items[self._chosen[box]].place.length:
            target.close()
            return
        raise CorruptError(f"{self._items[self._chosen[box]].key!r} is stored in no bytes; use another checkpoint")

    def _reader(self, at: int) -> Callable[[int, int], bytes]:
        def read(start: int, stop: int) -> bytes:
            data = bytearray(stop - start)
            with self._files.lend(self._numbers[at]) as (file, _):
                file.read_into(memoryview(data), self._items[at].place.offset + start)
            return bytes(data)

        return read


# --- the second pass: the elements of large items -------------------------------------------------------------------


class _SecondPass(_ItemFetch):
    """Each box is one row of the plan; or a whole item, for values and for what torch.load is to make sense of."""

    def __init__(
        self,
        items: Sequence[Item],
        files: LocalFiles,
        numbers: Sequence[int],
        chosen: list[int],
        delivery: Delivery,
        layouts: Layouts,
        *,
        verify: bool,
    ) -> None:
        self._boxes: list[tuple[int, int | None]] = []
        self._tensors: dict[int, torch.Tensor] = {}
        self._delivery = delivery
        self._layouts = layouts
        self._sums: dict[int, list[tuple[int, int, int]]] = {}
        self._sum_lock = threading.Lock()
        rows = _Rows()
        for at in chosen:
            item = items[at]
            elements = None if item.is_value else layouts[_name(item)]
            if elements is None:
                self._boxes.append((at, None))
                starts, stops = in_blocks(np.zeros(1, np.int64), np.full(1, item.place.length))
                rows.add(len(self._boxes) - 1, numbers[at], item.place.offset, starts, stops)
                continue
            base = item.place.offset + elements.begin
            for row in item.rows:
                self._boxes.append((at, row))
                starts, stops, is_whole = _spans(elements, delivery.box(row))
                checked = verify and is_whole and elements.checksum is not None
                rows.add(len(self._boxes) - 1, numbers[at], base, starts, stops, checked=checked)
        super().__init__(
            items,
            files,
            numbers,
            segments=rows.segments(),
            boxes=len(self._boxes),
            open_targets=self._open_boxes,
            close_target=self._close_box,
        )

    def _open_boxes(self, boxes: list[int]) -> list[Destination]:
        targets: list[Destination] = []
        for box in boxes:
            at, row = self._boxes[box]
            item = self._items[at]
            elements = self._layouts.get(_name(item))
            if row is None or elements is None:
                whole = torch.empty(item.place.length, dtype=torch.uint8)
                targets.append(Target(whole, torch.uint8, tuple(whole.shape), None))
                continue
            (self._tensors[box],) = self._delivery.resolve([row])
            targets.append(self._delivery.target(item, row, self._tensors[box], elements))
        return targets

    def _close_box(self, box: int, target: Destination) -> None:
        at, row = self._boxes[box]
        item = self._items[at]
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
        at, _ = self._boxes[box]
        elements = self._layouts[_name(self._items[at])]
        assert elements is not None
        with self._sum_lock:
            sums = self._sums.setdefault(box, [])
            sums.append((start, checksum, view.nbytes))
            if sum(nbytes for _, _, nbytes in sums) < elements.nbytes:
                return True
            del self._sums[box]
        return combine_checksums((crc, nbytes) for _, crc, nbytes in sorted(sums)) == elements.checksum

    def damaged(self, file: int, box: int, offset: int, nbytes: int) -> CorruptError:
        """The error that names the file, the key and the bytes of the record."""
        at, _ = self._boxes[box]
        elements = self._layouts[_name(self._items[at])]
        assert elements is not None
        return damaged(self._items[at], elements.begin, elements.nbytes)


def _spans(elements: Elements, box: Box) -> tuple[np.ndarray, np.ndarray, bool]:
    """The ranges of the elements' bytes that ``box`` takes, in blocks; and whether that is all of them."""
    shape = permuted(elements.shape, elements.order)
    is_whole = box.lengths == elements.shape
    if is_whole or not box.fits(elements.shape):  # one that does not fit is refused when its target is made
        starts, stops = np.zeros(1, np.int64), np.full(1, elements.nbytes)
    else:
        stored = Box(permuted(box.offsets, elements.order), permuted(box.lengths, elements.order))
        starts, stops = byte_spans(shape, stored, elements.dtype.itemsize, max_gap=_MAX_GAP)
    starts, stops = in_blocks(starts, stops)
    return starts, stops, is_whole


class _Rows:
    """Segments under construction."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, int, int, np.ndarray, np.ndarray, bool]] = []

    def add(
        self,
        box: int,
        file: int,
        base: int,
        starts: np.ndarray | list[int],
        stops: np.ndarray | list[int],
        *,
        checked: bool = False,
    ) -> None:
        """Want the ranges of ``box``, counted from byte ``base`` of its file."""
        self._parts.append((box, file, base, np.asarray(starts), np.asarray(stops), checked))

    def segments(self) -> Segments:
        """All of them in file order."""
        counts = [len(starts) for _, _, _, starts, _, _ in self._parts]

        def repeated(position: int) -> np.ndarray:
            return np.repeat(np.array([part[position] for part in self._parts], dtype=np.int64), counts)

        none = [np.zeros(0, np.int64)]
        start = np.concatenate([*none, *(starts for _, _, _, starts, _, _ in self._parts)])
        stop = np.concatenate([*none, *(stops for _, _, _, _, stops, _ in self._parts)])
        box, file, offset = repeated(0), repeated(1), repeated(2) + start
        keep = stop > start
        order = np.lexsort((offset, file))
        order = order[keep[order]]
        return Segments(
            box=box[order],
            start=start[order],
            nbytes=(stop - start)[order],
            file=file[order],
            offset=offset[order],
            digest=(repeated(5) - 1)[order],
        )
