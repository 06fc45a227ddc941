"""The storage protocol: how items reach a medium and come back, under torch's names and call order.

A writer sees, on every rank: reset (when an id is given), set_up_storage_writer, prepare_local_plan, [coordinator:
prepare_global_plan], write_data, [coordinator: finish]; then ``conclude``, or ``abandon`` when the save failed.
A reader sees: reset, read_metadata, set_up_storage_reader, prepare_local_plan, [coordinator: prepare_global_plan],
read_data, close.
"""

from __future__ import annotations

import abc
import functools
import io
import os
from collections.abc import Callable, Collection, Mapping, MutableSequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from torch.futures import Future

from holdfast._values.deadline import Progress
from holdfast._values.lazy import Columns
from holdfast.metadata import Metadata, MetadataIndex, StorageMeta
from holdfast.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteColumns

if TYPE_CHECKING:
    from holdfast._ranks.ranks import Ranks

Result = TypeVar("Result")

__all__ = ["StorageReader", "StorageWriter", "WriteResult"]


@dataclass(frozen=True, slots=True)
class WriteResult:
    """Where one item went: its name, its size, and what the storage needs to find it."""

    index: MetadataIndex
    size_in_bytes: int
    storage_data: Any


@runtime_checkable
class PlannedReport(Protocol):
    """Results as columns that leave out what the plan says, for a coordinator that knows it as ``planning``."""

    @property
    def planning(self) -> bytes: ...

    def with_plan(self, plan: Callable[[], WriteColumns]) -> Columns[WriteResult]:
        """The same with the plan, which is made when somebody looks."""
        ...


class StorageWriter(abc.ABC):
    """Writes the items of a plan to a medium and publishes the whole."""

    progress = Progress()
    """What to tell, between the pieces of long work, of bytes that were given to the medium: how ranks see that a slow
    one still works. It raises when another rank has failed. Each save sets one."""

    file_at_work: str = ""
    """The file that is being written, where the storage knows: what others are told of a rank that hangs."""

    user_metadata: Mapping[str, object] = MappingProxyType({})
    """What is kept beside the state, where the storage has a place for that."""

    keeps_empty_dicts: bool = False
    """Whether dicts that have nothing in them are kept, as leaves of their own."""

    @abc.abstractmethod
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start a new save, to ``checkpoint_id`` when it is given."""

    @abc.abstractmethod
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Get ready; ``rank`` and ``use_collectives`` come as keywords."""

    @abc.abstractmethod
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The local plan, with what the storage wants to add to it."""

    @abc.abstractmethod
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """All plans, with what the storage wants to tell each rank in ``storage_data``."""

    def meet(self, plan: SavePlan, ranks: Ranks) -> None:  # noqa: B027 - most storages need nothing of other ranks
        """Arrange with the other ranks, all of which are called, what this rank needs of them to write ``plan``."""

    @abc.abstractmethod
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[MutableSequence[WriteResult]]:
        """Write every item of ``plan``; the data comes from ``planner.resolve_data``, as late as possible."""

    @abc.abstractmethod
    def finish(self, metadata: Metadata, results: list[MutableSequence[WriteResult]]) -> None:
        """Publish: after this returns the checkpoint is there and durable, before it nothing is visible."""

    @classmethod
    @abc.abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this storage can keep a checkpoint under such an id."""

    def storage_meta(self) -> StorageMeta | None:
        """What planners may want to know of the storage."""
        return None

    def check_value(self, key: str, value: object) -> None:  # noqa: B027 - most storages take every value
        """InvalidStateError for a value that cannot be stored."""

    def conclude(self) -> None:  # noqa: B027 - most storages hold nothing
        """Let go of what a save that succeeded still holds; called on every rank."""

    def abandon(self) -> None:  # noqa: B027 - most storages have nothing to forget
        """Forget a save that failed and remove what it left; never raises for what is gone already."""


def finished(result: Result) -> Future[Result]:
    """A future that is done."""
    future: Future[Result] = Future()
    future.set_result(result)
    return future


class StorageReader(abc.ABC):
    """Reads the items of a plan from a medium.

    What is not abstract tells more of a storage than torch's protocol asks for; the defaults fit any storage.
    """

    progress = Progress()
    """What to tell, between the pieces of long work, of bytes that were read; as for writers. Each load sets one."""

    bytes_read: int = 0
    """Bytes taken from the medium since the last reset, where the storage counts them."""

    file_at_work: str = ""
    """The file that is being read, where the storage knows."""

    own_rank: int | None = None
    """The rank that loads, for storage that keeps something for each rank; the loader sets it."""

    is_always_whole: bool = False
    """Whether the chunks in its metadata are known to make up every tensor, and no rank has metadata of its own."""

    @property
    def unchecked(self) -> tuple[str, ...]:
        """What of the open checkpoint there is nothing to check by: for the report."""
        return ()

    @abc.abstractmethod
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start a new load, from ``checkpoint_id`` when it is given."""

    @abc.abstractmethod
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint says of itself."""

    def read_metadata_once(self, ranks: Ranks, *, between_hosts: bool) -> Metadata | None:
        """The metadata, where the ranks of a host, or of all hosts, read in common until ``close``; None elsewhere."""
        return None

    @abc.abstractmethod
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Get ready to read the checkpoint that ``metadata`` describes."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The local plan, with what the storage wants to add to it."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """All plans, with what the storage wants to tell each rank in ``storage_data``."""
        return plans

    @abc.abstractmethod
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every item of ``plan`` into what ``planner`` gives for it."""

    def check_files(self) -> None:  # noqa: B027 - most storages cannot tell
        """CorruptError unless all files are there in their sizes: for who wants them all, before memory is taken."""

    def stored_values(self, keys: Collection[str], *, allow_pickle: bool) -> Mapping[str, object]:
        """The values of ``keys``, as far as a rank can tell alone before anything is loaded."""
        return {}

    def same_bytes(self, key: str, other: str) -> bool | None:
        """Whether two stored tensors are the same, byte for byte; None where it would have to read them to know."""
        return None

    def was_replaced(self) -> bool:
        """Whether another checkpoint is there than the one whose metadata was read, or none."""
        return False

    def close(self) -> None:  # noqa: B027 - most storages hold nothing between two calls
        """Let go of all that is held for a load, which is over; another one may follow."""

    @classmethod
    @abc.abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this storage can hold a checkpoint under such an id."""


def _of_the_value(name: str) -> Any:
    """The method ``name`` of BytesIO, on the serialized value."""
    method = getattr(io.BytesIO, name)

    @functools.wraps(method)
    def on_value(self: ValueBuffer, *arguments: Any) -> Any:
        self._fill()
        return method(self, *arguments)

    return on_value


class ValueBuffer(io.BytesIO):
    """A BytesIO that carries a value, and makes its bytes only when somebody reads them.

    The default planners hand values to storage in this form: native storage takes ``value``, any other storage reads
    the bytes, which are those ``torch.save`` would write.
    """

    def __init__(self, value: object, serialize: Callable[[object], bytes]) -> None:
        super().__init__()
        self.value = value
        self._serialize: Callable[[object], bytes] | None = serialize

    def _fill(self) -> None:
        if self._serialize is not None:
            serialize, self._serialize = self._serialize, None
            super().write(serialize(self.value))
            super().seek(0)

    read = _of_the_value("read")
    read1 = _of_the_value("read1")
    readinto = _of_the_value("readinto")
    readline = _of_the_value("readline")
    readlines = _of_the_value("readlines")
    seek = _of_the_value("seek")
    getvalue = _of_the_value("getvalue")
    getbuffer = _of_the_value("getbuffer")
    __next__ = _of_the_value("__next__")


class SavedValueBuffer(ValueBuffer):
    """A value together with the ``torch.save`` bytes that somebody else made of it; loading those runs no code."""
