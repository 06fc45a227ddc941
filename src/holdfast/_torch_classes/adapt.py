"""Planners and storages of torch.distributed.checkpoint, and old-style ones, behind the protocol of this library.

What is torch's is told by the names of its classes, so torch's package is never imported for it. An object that is
ours, or of both worlds, passes as it is. This is the one place that looks at signatures: those of overrides that were
written before the protocol had keywords.
"""

from __future__ import annotations

import inspect
import io
import os
import warnings
from collections.abc import Callable, MutableSequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import torch
from torch.futures import Future

from holdfast._io import posix
from holdfast._torch_classes import translate
from holdfast._torch_codec.pickles import deserialize_object
from holdfast.errors import CorruptError, NotFoundError, UnsafeError
from holdfast.metadata import STATE_DICT_TYPE, Metadata, StorageMeta
from holdfast.planner import (
    LoadPlan,
    LoadPlanner,
    ReadColumns,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteColumns,
    WriteItem,
)
from holdfast.storage import SavedValueBuffer, StorageReader, StorageWriter, ValueBuffer, WriteResult

if TYPE_CHECKING:
    from holdfast._torch_classes import torchs

_TORCH = "torch.distributed.checkpoint"
_ZIP = b"PK\x03\x04"
_Path = str | os.PathLike[str]
StorageT = TypeVar("StorageT", StorageReader, StorageWriter)


def is_torchs(thing: object) -> TypeGuard[Any]:
    """Whether ``thing`` speaks torch's classes: derived from one of them, and from none of ours before that."""
    for cls in type(thing).__mro__:
        if cls.__module__.partition(".")[0] == "holdfast":
            return False
        if cls.__module__ == _TORCH or cls.__module__.startswith(f"{_TORCH}."):
            return True
    return False


def as_save_planner(planner: SavePlanner) -> SavePlanner:
    """``planner``, ours or torch's, in the protocol of this library."""
    return TorchSavePlanner(planner) if is_torchs(planner) else planner


def as_load_planner(planner: LoadPlanner, *, allow_pickle: bool) -> LoadPlanner:
    """The same for a load planner; pickles reach one of torch's only if they are allowed."""
    return TorchLoadPlanner(planner, allow_pickle=allow_pickle) if is_torchs(planner) else planner


def as_writer(writer: StorageWriter) -> StorageWriter:
    return TorchWriter(writer) if is_torchs(writer) else writer


def as_reader(reader: StorageReader) -> StorageReader:
    """``reader`` in the protocol of this library; one that stands for two shows the one that it has chosen."""
    reader = getattr(reader, "behind", reader)
    return TorchReader(reader) if is_torchs(reader) else reader


def id_and_storage(
    checkpoint_id: _Path | StorageT | None, storage: StorageT | None, *, function: str
) -> tuple[_Path | None, StorageT | None]:
    """The id and the storage; torch's old form gives the storage in the place of the id, which earns a warning."""
    if isinstance(checkpoint_id, bytes):
        posix.text_path(checkpoint_id)
    if checkpoint_id is None or isinstance(checkpoint_id, (str, os.PathLike)):
        return checkpoint_id, storage
    if not hasattr(checkpoint_id, "reset"):
        raise ValueError(f"the path comes second: {function}(state, path), not a {type(checkpoint_id).__name__}")
    if storage is not None:
        raise ValueError(f"{function} got two storages; give one")
    warnings.warn(
        f"{function}(state, storage) is the old form; pass the storage by its keyword, or a checkpoint id",
        stacklevel=4,
    )
    return None, checkpoint_id


def final_save_plan(plan: SavePlan, planner: SavePlanner) -> tuple[SavePlan, SavePlanner]:
    """What a storage of ours is to write, whoever drives it: torch gives it a plan and a planner of its own."""
    if not is_torchs(planner):
        return plan, planner
    ours = TorchSavePlanner(planner)
    return ours.take_final(plan), ours


def final_load_plan(plan: LoadPlan, planner: LoadPlanner, *, allow_pickle: bool) -> tuple[LoadPlan, LoadPlanner]:
    """What a storage of ours is to read, whoever drives it: torch gives it a plan and a planner of its own."""
    if not is_torchs(planner):
        return plan, planner
    ours = TorchLoadPlanner(planner, allow_pickle=allow_pickle)
    return ours.take_final(plan), ours


# Signatures.


def _takes(function: Callable[..., object], *names: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # nothing to look at: then it is no override of the old kind
        return True
    takes_any = inspect.Parameter.VAR_KEYWORD in map(attrgetter("kind"), parameters.values())
    return takes_any or parameters.keys() >= {*names}


def _warn_of_old_style(thing: object, method: str, missing: str) -> None:
    warnings.warn(
        f"{type(thing).__name__}.{method} takes no {missing}; it is called the old way. "
        "Add the parameter to its definition.",
        stacklevel=4,
    )


def set_up_save_planner(
    planner: SavePlanner, state: STATE_DICT_TYPE, storage_meta: StorageMeta | None, *, is_coordinator: bool
) -> None:
    if _takes(planner.set_up_planner, "storage_meta"):
        planner.set_up_planner(state, storage_meta=storage_meta, is_coordinator=is_coordinator)
        return
    _warn_of_old_style(planner, "set_up_planner", "storage_meta")
    planner.set_up_planner(state, is_coordinator)  # type: ignore[arg-type]


def set_up_writer(writer: StorageWriter, *, is_coordinator: bool, rank: int, use_collectives: bool) -> None:
    """Call ``set_up_storage_writer`` with what it takes; ValueError where it cannot be told to keep ranks apart."""
    if _takes(writer.set_up_storage_writer, "rank", "use_collectives"):
        writer.set_up_storage_writer(is_coordinator, rank=rank, use_collectives=use_collectives)
        return
    if not use_collectives:
        raise ValueError(f"{type(writer).__name__} does not support use_collectives=False; leave it at True")
    _warn_of_old_style(writer, "set_up_storage_writer", "keywords")
    writer.set_up_storage_writer(is_coordinator)


def set_up_reader(
    reader: StorageReader, metadata: Metadata, *, is_coordinator: bool, rank: int, use_collectives: bool
) -> None:
    if _takes(reader.set_up_storage_reader, "rank", "use_collectives"):
        reader.set_up_storage_reader(metadata, is_coordinator, rank=rank, use_collectives=use_collectives)
        return
    _warn_of_old_style(reader, "set_up_storage_reader", "keywords")
    reader.set_up_storage_reader(metadata, is_coordinator)


def metadata_of_rank(reader: StorageReader, rank: int) -> Metadata | None:
    """What ``rank`` alone has saved, where it saved without the others; None where there is no such thing."""
    if not _takes(reader.read_metadata, "rank"):
        return None
    try:
        return translate.metadata_from_torch(reader.read_metadata(rank=rank))
    except Exception:  # whatever a storage raises for what is not there
        return None


# Planners of torch. Each sees torch's objects, its own ones wherever it made them.


class TorchSavePlanner(SavePlanner):
    """A save planner of torch."""

    def __init__(self, theirs: torchs.planner.SavePlanner) -> None:
        self.theirs = theirs
        self._items: list[torchs.planner.WriteItem] = []

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        meta: Any = translate.storage_meta_to_torch(storage_meta)
        set_up_save_planner(cast(Any, self.theirs), state_dict, meta, is_coordinator=is_coordinator)

    def create_local_plan(self) -> SavePlan:
        return translate.save_plan_from_torch(self.theirs.create_local_plan())

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = self.theirs.create_global_plan([translate.save_plan_to_torch(plan) for plan in all_plans])
        return [translate.save_plan_from_torch(plan) for plan in plans], translate.metadata_from_torch(metadata)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return self.take_final(self.theirs.finish_plan(translate.save_plan_to_torch(new_plan)))

    def take_final(self, plan: SavePlan | torchs.planner.SavePlan) -> SavePlan:
        """``plan``, the final one, as ours; its items are those that ``resolve_row`` counts."""
        self._items = list(cast("torchs.planner.SavePlan", plan).items)
        return translate.save_plan_from_torch(plan)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self._resolved(translate.write_item_to_torch(write_item))

    def resolve_row(self, columns: WriteColumns, row: int) -> torch.Tensor | io.BytesIO:
        if len(columns) != len(self._items):
            return self.resolve_data(columns.item(row))
        return self._resolved(self._items[row])

    def _resolved(self, item: torchs.planner.WriteItem) -> torch.Tensor | io.BytesIO:
        data = self.theirs.resolve_data(item)
        if isinstance(data, torch.Tensor):
            return data.detach()
        # What else a planner of torch gives is for the storage to refuse.
        return _told_apart(data, item.index.fqn) if isinstance(cast(object, data), io.BytesIO) else data


class PickledValue:
    """Stands for a value that is there only as a pickle, which to load would run code."""


def _told_apart(buffer: io.BytesIO, key: str) -> io.BytesIO:
    """``buffer``; with the value that it holds, where torch.save made it, so that storage can keep it typed."""
    if isinstance(buffer, ValueBuffer) or not (data := buffer.getvalue()).startswith(_ZIP):
        return buffer
    try:
        value = deserialize_object(io.BytesIO(data), key=key, allow_pickle=False)
    except UnsafeError:
        return ValueBuffer(PickledValue(), lambda _: data)
    except CorruptError:
        return buffer
    return SavedValueBuffer(value, lambda _: data)


class TorchLoadPlanner(LoadPlanner):
    """A load planner of torch.

    torch's planners unpickle whatever they are given, so what would run code is refused here unless it is allowed.
    """

    def __init__(self, theirs: torchs.planner.LoadPlanner, *, allow_pickle: bool) -> None:
        self.theirs = theirs
        self._allow_pickle = allow_pickle
        self._items: list[torchs.planner.ReadItem] = []
        self._values: dict[tuple[str, str], torchs.planner.ReadItem] = {}

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        theirs = None if metadata is None else translate.metadata_for_planner(metadata)
        self.theirs.set_up_planner(state_dict, theirs, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        return translate.load_plan_from_torch(self.theirs.create_local_plan())

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        plans = self.theirs.create_global_plan([translate.load_plan_to_torch(plan) for plan in global_plan])
        return [translate.load_plan_from_torch(plan) for plan in plans]

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return self.take_final(self.theirs.finish_plan(translate.load_plan_to_torch(central_plan)))

    def take_final(self, plan: LoadPlan | torchs.planner.LoadPlan) -> LoadPlan:
        """``plan``, the final one, as ours; its items are those that rows count."""
        self._items = list(cast("torchs.planner.LoadPlan", plan).items)
        self._values = {(item.dest_index.fqn, item.storage_index.fqn): item for item in self._items}
        return translate.load_plan_from_torch(plan)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.storage_index.fqn
        if not self._allow_pickle and not isinstance(value, ValueBuffer):
            _check_safe(value, key)
        made = self._values.get((read_item.dest_index.fqn, key))
        self.theirs.load_bytes(translate.read_item_to_torch(read_item) if made is None else made, value)

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        return self.theirs.resolve_bytes(translate.read_item_to_torch(read_item))

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.theirs.resolve_tensor(translate.read_item_to_torch(read_item)).detach()

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.theirs.commit_tensor(translate.read_item_to_torch(read_item), tensor)

    def resolve_row(self, columns: ReadColumns, row: int) -> torch.Tensor:
        return self.theirs.resolve_tensor(self._item(columns, row)).detach()

    def commit_row(self, columns: ReadColumns, row: int, tensor: torch.Tensor) -> None:
        self.theirs.commit_tensor(self._item(columns, row), tensor)

    def _item(self, columns: ReadColumns, row: int) -> torchs.planner.ReadItem:
        if len(columns) != len(self._items):
            return translate.read_item_to_torch(columns.item(row))
        return self._items[row]


def _check_safe(value: io.BytesIO, key: str) -> None:
    try:
        deserialize_object(io.BytesIO(value.getvalue()), key=key, allow_pickle=False)
    except CorruptError as error:
        raise UnsafeError(
            f"{key!r} is bytes of an unknown kind, which torch's planners would unpickle; "
            "pass allow_pickle=True if you trust the checkpoint",
            key=key,
        ) from error


# Storages of torch. Each sees torch's objects, and a planner that speaks of them.


class TorchWriter(StorageWriter):
    """A storage writer of torch."""

    def __init__(self, theirs: torchs.storage.StorageWriter) -> None:
        self.theirs = theirs

    def reset(self, checkpoint_id: _Path | None = None) -> None:
        self.theirs.reset(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        return translate.storage_meta_from_torch(self.theirs.storage_meta())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        set_up_writer(cast(Any, self.theirs), is_coordinator=is_coordinator, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return translate.save_plan_from_torch(self.theirs.prepare_local_plan(translate.save_plan_to_torch(plan)))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        made = self.theirs.prepare_global_plan([translate.save_plan_to_torch(plan) for plan in plans])
        return [translate.save_plan_from_torch(plan) for plan in made]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[MutableSequence[WriteResult]]:
        """Write; the results are torch's own, and only ``finish`` looks at them."""
        speaking: Any = planner.theirs if isinstance(planner, TorchSavePlanner) else _SavePlannerForTorch(planner)
        done: Any = self.theirs.write_data(translate.save_plan_to_torch(plan), speaking)
        return cast("Future[MutableSequence[WriteResult]]", done)

    def finish(self, metadata: Metadata, results: list[MutableSequence[WriteResult]]) -> None:
        """Publish; what the storage notes in the metadata is noted in ours."""
        theirs = translate.metadata_to_torch(metadata)
        self.theirs.finish(metadata=theirs, results=cast(Any, results))
        metadata.storage_data, metadata.version = theirs.storage_data, getattr(theirs, "version", None)
        metadata.storage_meta = translate.storage_meta_from_torch(getattr(theirs, "storage_meta", None))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _Path) -> bool:
        """Not known for a class: only the storage behind an instance can tell."""
        return False


class TorchReader(StorageReader):
    """A storage reader of torch."""

    def __init__(self, theirs: torchs.storage.StorageReader) -> None:
        self.theirs = theirs

    def reset(self, checkpoint_id: _Path | None = None) -> None:
        self.theirs.reset(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint says of itself; NotFoundError where a file that says it is missing."""
        if not _takes(self.theirs.read_metadata, *kwargs):
            raise NotFoundError(f"{type(self.theirs).__name__} reads no metadata of a single rank")
        try:
            return translate.metadata_from_torch(self.theirs.read_metadata(*args, **kwargs))
        except FileNotFoundError as error:
            raise NotFoundError(
                f"there is no checkpoint that {type(self.theirs).__name__} can read: {error}"
            ) from error

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        theirs: Any = translate.metadata_to_torch(metadata)
        set_up_reader(cast(Any, self.theirs), theirs, is_coordinator=is_coordinator, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return translate.load_plan_from_torch(self.theirs.prepare_local_plan(translate.load_plan_to_torch(plan)))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        made = self.theirs.prepare_global_plan([translate.load_plan_to_torch(plan) for plan in plans])
        return [translate.load_plan_from_torch(plan) for plan in made]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        speaking: Any = planner.theirs if isinstance(planner, TorchLoadPlanner) else _LoadPlannerForTorch(planner)
        return self.theirs.read_data(translate.load_plan_to_torch(plan), speaking)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _Path) -> bool:
        """Not known for a class: only the storage behind an instance can tell."""
        return False


class _SavePlannerForTorch:
    """What a storage of torch asks of a planner, answered by one of ours."""

    def __init__(self, planner: SavePlanner) -> None:
        self._planner = planner

    def resolve_data(self, write_item: torchs.planner.WriteItem) -> torch.Tensor | io.BytesIO:
        return self._planner.resolve_data(translate.write_item_from_torch(write_item))


class _LoadPlannerForTorch:
    """What a storage of torch asks of a planner, answered by one of ours."""

    def __init__(self, planner: LoadPlanner) -> None:
        self._planner = planner

    def load_bytes(self, read_item: torchs.planner.ReadItem, value: io.BytesIO) -> None:
        self._planner.load_bytes(translate.read_item_from_torch(read_item), value)

    def resolve_bytes(self, read_item: torchs.planner.ReadItem) -> io.BytesIO:
        return self._planner.resolve_bytes(translate.read_item_from_torch(read_item))

    def resolve_tensor(self, read_item: torchs.planner.ReadItem) -> torch.Tensor:
        return self._planner.resolve_tensor(translate.read_item_from_torch(read_item))

    def commit_tensor(self, read_item: torchs.planner.ReadItem, tensor: torch.Tensor) -> None:
        self._planner.commit_tensor(translate.read_item_from_torch(read_item), tensor)
