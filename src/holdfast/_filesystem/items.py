"""The items of one rank's plan on their way into files: who goes into which, what each holds, where it went.

A value is its torch.save bytes, a tensor itself; what torch has no plain archive for (quantised tensors) is turned into
torch.save bytes as well.
"""

from __future__ import annotations

import heapq
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from holdfast._state.tensors import DTYPE_NAMES, check_savable
from holdfast._torchformat.objects import serialize_object
from holdfast._torchformat.places import StorageInfo
from holdfast.errors import InvalidStateError
from holdfast.metadata import MetadataIndex
from holdfast.planner import SavePlan, SavePlanner, WriteItem, WriteItemType, write_columns
from holdfast.storage import WriteResult

Content = torch.Tensor | bytes | memoryview
T = TypeVar("T")


@dataclass(frozen=True)
class ChangedInfo(StorageInfo):
    """The place of a tensor that the planner has changed on its way out: what is there has this dtype and size."""

    dtype: torch.dtype = field(kw_only=True)
    size: torch.Size = field(kw_only=True)


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
        """The item of ``row``."""
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

    def stored(self, content: Content) -> Content:
        """``content``, as torch.save bytes where it is a tensor of more than plain memory."""
        if isinstance(content, torch.Tensor) and content.is_quantized:
            tensor = content.detach().cpu()
            # torch.save keeps the whole storage of a view.
            return serialize_object(tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone())
        return content

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
