"""Items of torch's format on their way from the planner to files, and from files to the planner.

An item is what torch's format stores as one: the archive of a chunk, or a pickled value. Tensors that torch has no
plain archive for (quantised ones) are turned into torch.save bytes as well. Planners are called by one thread at a
time.
"""

from __future__ import annotations

import abc
import heapq
import io
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import torch

from holdfast._io.slabs import Slab
from holdfast._state.tensor_bytes import Target
from holdfast._state.tensors import DTYPE_NAMES, check_savable, quantizer_of
from holdfast._torch_codec.archive import Elements, Read, find_tensor
from holdfast._torch_codec.metadata_file import StorageInfo, find_place
from holdfast._torch_codec.pickles import deserialize_object, serialize_object
from holdfast._values.box import Box
from holdfast.errors import CorruptError, InvalidStateError
from holdfast.metadata import MetadataIndex
from holdfast.planner import LoadPlanner, ReadColumns, SavePlan, SavePlanner, WriteItem, WriteItemType, write_columns
from holdfast.planner_helpers import check_resolved
from holdfast.storage import WriteResult

Content = torch.Tensor | bytes | memoryview
T = TypeVar("T")


@dataclass(frozen=True)
class ChangedInfo(StorageInfo):
    """The place of a tensor that the planner has changed on its way out: what is there has this dtype and size."""

    dtype: torch.dtype = field(kw_only=True)
    size: torch.Size = field(kw_only=True)


def as_stored(content: Content) -> Content:
    """``content``, as torch.save bytes where it is a tensor of more than plain memory."""
    if isinstance(content, torch.Tensor) and content.is_quantized:
        tensor = content.detach().cpu()
        # torch.save keeps the whole storage of a view.
        return serialize_object(tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone())
    return content


class PlannedItems:
    """The rows of ``plan``, and the planner that knows what is in them."""

    def __init__(self, plan: SavePlan, planner: SavePlanner) -> None:
        self._columns = columns = write_columns(plan.items)
        self._planner = planner
        itemsize = np.array([0 if head is None else head.properties.dtype.itemsize for head in columns.heads])
        volume = columns.length.prod(axis=1, dtype=np.int64)
        self.nbytes: list[int] = (volume * itemsize[columns.key]).tolist() if len(columns) else []
        self.is_value: list[bool] = [columns.heads[key] is None for key in columns.key.tolist()]

    def files(self, *, single_file: bool, thread_count: int) -> list[list[int]]:
        """The rows of each file: one for each thread that has any, or for each item; values come first in a file."""
        rows = range(len(self.nbytes))
        if not single_file:
            return [[row] for row in rows]
        values = [row for row in rows if self.is_value[row]]
        tensors = [row for row in rows if not self.is_value[row]]
        buckets = split_by_size(thread_count, values, tensors, [self.nbytes[row] for row in tensors])
        # A file without items is named nowhere: nobody could ever tell that it belongs to the checkpoint.
        return [bucket for bucket in buckets if bucket]

    def item(self, row: int) -> WriteItem:
        return self._columns.item(row)

    def content(self, row: int) -> Content:
        """What the planner gives for ``row`` now; InvalidStateError when that cannot be stored there."""
        which = self._columns.key[row]
        key = self._columns.keys[which]
        data = self._planner.resolve_row(self._columns, row)
        if self._columns.heads[which] is None:
            if not isinstance(data, io.BytesIO):
                raise InvalidStateError(f"the planner gave a {type(data).__name__} for the value of {key!r}", key=key)
            return data.getbuffer()
        if not isinstance(data, torch.Tensor):
            raise InvalidStateError(f"the planner gave a {type(data).__name__} for the tensor {key!r}", key=key)
        if data.dtype not in DTYPE_NAMES or data.layout is not torch.strided or data.is_meta:
            check_savable(key, data)
        return data

    def result(
        self, row: int, content: Content, name: str, span: tuple[int, int], *, transforms: Sequence[str] = ()
    ) -> WriteResult:
        """That ``content`` is in ``span`` (offset, length) of the file ``name``."""
        which, lo, length, hint, _ = self._columns.rows[row]
        key, head = self._columns.keys[which], self._columns.heads[which]
        place = name, *span, tuple(transforms) or None
        if head is None or not isinstance(content, torch.Tensor):
            return WriteResult(MetadataIndex(key), span[1], StorageInfo(*place))
        dimensions = len(head.size)
        shape, offset = torch.Size(length[:dimensions]), torch.Size(lo[:dimensions])
        info = StorageInfo(*place)
        if content.shape != shape or content.dtype != head.properties.dtype:
            if content.shape != shape and shape != head.size:
                raise InvalidStateError(
                    f"the planner gave a piece of shape {list(content.shape)} for a box of {list(shape)} of {key!r}; "
                    "only whole tensors may change their shape while being saved",
                    key=key,
                )
            size = content.shape if content.shape != shape else head.size
            offset = offset if content.shape == shape else torch.Size([0] * content.dim())
            info = ChangedInfo(*place, dtype=content.dtype, size=size)
        return WriteResult(MetadataIndex(key, offset, None if hint < 0 else hint), span[1], info)


def split_by_size(bins: int, firsts: list[T], items: list[T], sizes: Sequence[int]) -> list[list[T]]:
    """``bins`` lists of about the same size: ``firsts`` in turn, then each item, the largest first, to the smallest."""
    buckets: list[list[T]] = [firsts[number::bins] for number in range(bins)]
    if bins == 1:
        return [firsts + items]
    loads = [(0, number) for number in range(bins)]
    for position in sorted(range(len(items)), key=lambda position: -sizes[position]):
        load, number = loads[0]
        buckets[number].append(items[position])
        heapq.heapreplace(loads, (load + sizes[position], number))
    return buckets


def _item_size(item: WriteItem) -> int:
    """Bytes of the whole tensor that ``item`` is (a piece) of."""
    size = item.tensor_storage_size()
    if size is None:
        raise InvalidStateError(f"{item.index.fqn!r} is a value and has no tensor size", key=item.index.fqn)
    return size


def _split_by_size_and_type(bins: int, items: list[WriteItem]) -> list[list[WriteItem]]:
    """``items`` in ``bins`` lists of about the same size, values first; as they are where it is one list."""
    if bins == 1:
        return [items]
    values = [item for item in items if item.type is WriteItemType.BYTE_IO]
    tensors = [item for item in items if item.type is not WriteItemType.BYTE_IO]
    return split_by_size(bins, values, tensors, [_item_size(item) for item in tensors])


class _TensorLoader(abc.ABC, Generic[T]):
    """Gives the tensors of what was added, on the CPU, each with the object that it is for."""

    @abc.abstractmethod
    def add(self, size: int, obj: T) -> None:
        """Take ``obj``, whose tensor has ``size`` bytes."""

    @abc.abstractmethod
    def start_loading(self) -> None:
        """Begin, where that can be done ahead; nothing may be added any more."""

    @abc.abstractmethod
    def values(self) -> Iterator[tuple[torch.Tensor, T]]:
        """Each tensor and its object."""


class _SerialCpuLoader(_TensorLoader[T]):
    """One tensor after the other, each when it is asked for."""

    def __init__(self, resolve_fun: Callable[[T], torch.Tensor]) -> None:
        self.resolve_fun = resolve_fun
        self.items: list[tuple[int, T]] = []

    def add(self, size: int, obj: T) -> None:
        self.items.append((size, obj))

    def start_loading(self) -> None: ...

    def values(self) -> Iterator[tuple[torch.Tensor, T]]:
        for _, obj in self.items:
            yield self.resolve_fun(obj).detach().cpu(), obj


class _OverlappingCpuLoader(_TensorLoader[T]):
    """Copies from the accelerator run ahead of the caller, small ones first, on ``stream`` (the current one if None).

    At least ``inflight_threshhold`` bytes are under way while there are as many left, and at most one tensor more.
    """

    def __init__(
        self,
        resolve_fun: Callable[[T], torch.Tensor],
        stream: torch.Stream | None = None,
        inflight_threshhold: int = 1_000_000,
    ) -> None:
        self.resolve_fun = resolve_fun
        self.inflight_threshhold = inflight_threshhold
        self.items: list[tuple[int, T]] = []
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
        self._under_way: deque[tuple[torch.Tensor, T]] = deque()
        self._next = 0

    def add(self, size: int, obj: T) -> None:
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

    def values(self) -> Iterator[tuple[torch.Tensor, T]]:
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


def tensor_loader(resolve_fun: Callable[[T], torch.Tensor], *, thread_count: int, copy_ahead: int) -> _TensorLoader[T]:
    """The overlapping loader where one thread writes, there is an accelerator and something may be copied ahead."""
    if thread_count == 1 and copy_ahead > 0 and accelerator_type() is not None:
        return _OverlappingCpuLoader(resolve_fun, inflight_threshhold=copy_ahead)
    return _SerialCpuLoader(resolve_fun)


@dataclass(slots=True, kw_only=True, eq=False)
class Item:
    """A stored item and the rows of the plan that want it, or parts of it; ``file`` is the number of its file."""

    key: str
    place: StorageInfo
    is_value: bool
    file: int = -1
    rows: list[int] = field(default_factory=list)


def wanted_items(columns: ReadColumns, storage_data: Mapping[MetadataIndex, object]) -> list[Item]:
    """The items that hold what ``columns`` want, each once."""
    items: dict[tuple[str, int, int, bool], Item] = {}
    places = zip(columns.key.tolist(), columns.chunk_lo.tolist(), strict=True)
    for row, (which, chunk_lo) in enumerate(places):
        key, dimensions = columns.storage_keys[which], columns.dimensions[which]
        offset = None if dimensions < 0 else chunk_lo[:dimensions]
        place = find_place(storage_data, key, offset)
        if place is None:
            raise CorruptError(
                f"the checkpoint does not say where {key!r}{'' if offset is None else f' at {offset}'} is stored; "
                "use another checkpoint",
                key=key,
            )
        name = place.relative_path, place.offset, place.length, dimensions < 0
        if name not in items:
            items[name] = Item(key=key, place=place, is_value=dimensions < 0)
        items[name].rows.append(row)
    return list(items.values())


class Delivery:
    """Hands what is read for the rows of one plan to its planner."""

    def __init__(
        self, columns: ReadColumns, planner: LoadPlanner, *, cast: bool, allow_pickle: bool, verify: bool
    ) -> None:
        self._columns = columns
        self._planner = planner
        self._cast = cast
        self._allow_pickle = allow_pickle
        self._verify = verify
        self._devices: set[torch.device] = set()
        self._values: dict[int, bytes] = {}

    def resolve(self, rows: Iterable[int]) -> list[torch.Tensor]:
        """What the planner wants filled for each row."""
        tensors = [self._planner.resolve_row(self._columns, row) for row in rows]
        for device in {tensor.device for tensor in tensors if tensor.is_cuda} - self._devices:
            self._devices.add(device)
            # What the caller's stream still does to its tensors comes before what other threads copy into them.
            torch.cuda.current_stream(device).synchronize()
        return tensors

    def box(self, row: int) -> Box:
        lengths = self._columns.boxes[row][1]
        return Box(tuple(self._columns.storage_lo[row, : len(lengths)].tolist()), lengths)

    def target(self, item: Item, row: int, tensor: torch.Tensor, elements: Elements) -> Target:
        """Where the elements that ``row`` wants go: ``tensor``, its dimensions in the order of the stored memory."""
        box = self.box(row)
        if not box.fits(elements.shape):
            raise CorruptError(
                f"{item.place.relative_path!r} has {list(elements.shape)} elements of {item.key!r} at "
                f"byte {item.place.offset}, fewer than its metadata says; use another checkpoint",
                path=item.place.relative_path,
                key=item.key,
            )
        check_resolved(self._columns, row, tensor, elements.dtype, cast=self._cast)
        shape, order = elements.shape, elements.order
        if order != tuple(range(len(order))):
            shape, tensor = permuted(shape, order), tensor.permute(order)
            box = Box(permuted(box.offsets, order), permuted(box.lengths, order))
        return Target(tensor, elements.dtype, shape, None if box.lengths == shape else box)

    def deliver(self, item: Item, data: bytearray) -> None:
        """Take the whole item: keep the bytes of a value, fill and commit what wants a tensor, or parts of it."""
        if item.is_value:
            self._values.update(dict.fromkeys(item.rows, bytes(data)))
            return
        tensors = self.resolve(item.rows)
        elements = find_elements(item, lambda start, stop: bytes(data[start:stop]), len(data))
        if elements is None:
            self._fill_loaded(item, tensors, data)
        else:
            self._fill(item, tensors, data, elements)
        for row, tensor in zip(item.rows, tensors, strict=True):
            self.commit(row, tensor)

    def _fill(self, item: Item, tensors: list[torch.Tensor], data: bytearray, elements: Elements) -> None:
        buffer = Slab(memoryview(data), torch.frombuffer(data, dtype=torch.uint8))
        begin = elements.begin
        record = buffer.view[begin : begin + elements.nbytes]
        if self._verify and elements.checksum is not None and zlib.crc32(record) != elements.checksum:
            raise damaged(item, begin, elements.nbytes)
        for row, tensor in zip(item.rows, tensors, strict=True):
            self.target(item, row, tensor, elements).copy_in(0, elements.nbytes, buffer, begin)
            if tensor.is_cuda:
                # The buffer goes right afterwards.
                torch.cuda.current_stream(tensor.device).synchronize()

    def _fill_loaded(self, item: Item, tensors: list[torch.Tensor], data: bytearray) -> None:
        """Through torch.load: for what is no dense tensor in an archive of the usual form."""
        loaded = deserialize_object(io.BytesIO(data), key=item.key, allow_pickle=self._allow_pickle)
        if not isinstance(loaded, torch.Tensor):
            raise CorruptError(f"the item of {item.key!r} is a {type(loaded).__name__}, not a tensor", key=item.key)
        for row, tensor in zip(item.rows, tensors, strict=True):
            check_resolved(self._columns, row, tensor, loaded.dtype, cast=self._cast)
            box = self.box(row)
            if loaded.layout is torch.strided and not box.fits(loaded.shape):
                raise CorruptError(f"the item of {item.key!r} has another size than its metadata says", key=item.key)
            wanted = loaded if box.lengths == loaded.shape else loaded[box.slices()]
            if tensor.is_quantized and quantizer_of(tensor) is None:
                tensor.data = wanted.to(tensor.device)  # room that was made without knowing the scales
            else:
                tensor.copy_(wanted)

    def commit(self, row: int, tensor: torch.Tensor) -> None:
        self._planner.commit_row(self._columns, row, tensor)

    def deliver_values(self) -> None:
        """Give the planner the values in the order of its plan, which has first those that it may refuse."""
        for row in sorted(self._values):
            self._planner.load_bytes(self._columns.item(row), io.BytesIO(self._values.pop(row)))


def find_elements(item: Item, read: Read, length: int) -> Elements | None:
    """Where the elements of ``item`` lie in its archive; None when only torch.load can tell. Errors name the item."""
    try:
        return find_tensor(read, length)
    except CorruptError as error:
        place = item.place
        raise CorruptError(
            f"{place.relative_path!r} is damaged: what it holds of {item.key!r}, in bytes {place.offset} to "
            f"{place.offset + place.length}, {error.message}; use another checkpoint",
            path=place.relative_path,
            key=item.key,
            span=(place.offset, place.offset + place.length),
        ) from error


def damaged(item: Item, begin: int, nbytes: int) -> CorruptError:
    """The error of a record whose checksum is wrong; it begins at byte ``begin`` of the item."""
    start = item.place.offset + begin
    return CorruptError.of_part(item.place.relative_path, item.key, (start, start + nbytes))


def permuted(values: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(values[dimension] for dimension in order)
