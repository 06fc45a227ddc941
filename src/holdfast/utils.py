"""What others import from torch.distributed.checkpoint.utils, under its names.

The wrapper over collectives is for code that takes steps of its own over a process group; ``save`` and ``load`` do not
use it. Each of its steps that takes functions ends the same way on all ranks: with its result, or with an error that
has every rank's failure. What a rank gives to a step travels as bytes, so that nothing a value or an exception does
when it is pickled can leave others waiting.
"""

from __future__ import annotations

import cProfile
import functools
import inspect
import io
import os
import pstats
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist

from holdfast._ranks.ranks import Failure, combine, describe, pack, unpack
from holdfast._state.pieces import is_sharded, piece_at, pieces_of
from holdfast._torch_codec.pickles import decode_message, encode_message
from holdfast.api import _is_wrapped_exception
from holdfast.errors import WRAPPED_EXCEPTION, CheckpointException, RankDisagreementError
from holdfast.metadata import STATE_DICT_TYPE, MetadataIndex

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["CheckpointException", "find_state_dict_object", "find_tensor_shard"]

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


def _get_failure_dict(results: list[Any]) -> dict[int, WRAPPED_EXCEPTION]:
    """The failures among ``results``, by the rank that gave each."""
    return {rank: result for rank, result in enumerate(results) if _is_wrapped_exception(result)}


class _Told(NamedTuple):
    """What one rank tells others: an encoded value, or packed failures."""

    value: bytes = b""
    failures: bytes = b""


class _DistWrapper:
    """Object collectives over ``group``, with ``coordinator_rank`` (a rank of the group) in the middle.

    Without ``use_dist`` this process is all there is, and nothing is pickled. Failures are keyed by rank in the group.
    An interrupt (any BaseException that is no Exception) leaves its own rank as it is; the others are told of it.
    """

    def __init__(self, group: ProcessGroup | None, use_dist: bool, coordinator_rank: int) -> None:
        self.group = group
        self.use_dist = use_dist
        self.coordinator_rank = coordinator_rank
        self.rank = dist.get_rank(group) if use_dist else 0
        self.is_coordinator = not use_dist or self.rank == coordinator_rank
        self.global_coordinator_rank = coordinator_rank if use_dist else 0
        if use_dist and group is not None:
            self.global_coordinator_rank = dist.get_global_rank(group, coordinator_rank)
        self._own: BaseException | None = None

    def get_rank(self) -> int:
        return self.rank

    def get_world_size(self) -> int:
        return dist.get_world_size(self.group) if self.use_dist else 1

    def broadcast_object(self, object: T | None) -> T:
        """The coordinator's ``object``, on every rank."""
        boxed = [object]
        if self.use_dist:
            dist.broadcast_object_list(boxed, src=self.global_coordinator_rank, group=self.group)
        return cast(T, boxed[0])

    def gather_object(self, object: T) -> list[T] | None:
        """Every rank's ``object``, by rank, on the coordinator; None on the others."""
        if not self.use_dist:
            return [object]
        gathered = cast(list[T], [None] * self.get_world_size()) if self.is_coordinator else None
        dist.gather_object(object, gathered, dst=self.global_coordinator_rank, group=self.group)
        return gathered

    def all_gather_object(self, object: T) -> list[T]:
        """Every rank's ``object``, by rank, on every rank."""
        if not self.use_dist:
            return [object]
        gathered = cast(list[T], [None] * self.get_world_size())
        dist.all_gather_object(gathered, object, group=self.group)
        return gathered

    def scatter_object(self, object_list: list[T] | None) -> T:
        """This rank's element of the coordinator's ``object_list``, which has one for each rank."""
        if not self.use_dist:
            if object_list is None:
                raise ValueError("scatter_object needs a list on the coordinator, which this process is")
            return object_list[0]
        received = cast(list[T], [None])
        given = object_list if self.is_coordinator else None
        dist.scatter_object_list(received, given, src=self.global_coordinator_rank, group=self.group)
        return received[0]

    def barrier(self) -> None:
        if self.use_dist:
            dist.barrier(group=self.group)

    def reduce_scatter(self, step: str, map_fun: Callable[[], T], reduce_fun: Callable[[list[T]], list[R]]) -> R:
        """This rank's element of what ``reduce_fun`` makes, on the coordinator, of all that ``map_fun`` gave."""
        if not self.use_dist:
            return self._alone(step, lambda: reduce_fun([map_fun()])[0])

        def one_each(parts: list[T]) -> list[_Told]:
            wholes = reduce_fun(parts)
            if len(wholes) != self.get_world_size():
                raise ValueError(f"{step} made {len(wholes)} results for {self.get_world_size()} ranks")
            return [_Told(encode_message(whole)) for whole in wholes]

        told = self._merged(step, self.gather_object(self._tell(step, map_fun)), one_each)
        return cast(R, self._heard(step, self.scatter_object(told)))

    def all_reduce(self, step: str, map_fun: Callable[[], T], reduce_fun: Callable[[list[T]], R]) -> R:
        """What ``reduce_fun`` makes, on the coordinator, of all that ``map_fun`` gave: the same on every rank."""
        if not self.use_dist:
            return self._alone(step, lambda: reduce_fun([map_fun()]))

        def one_for_all(parts: list[T]) -> list[_Told]:
            return [_Told(encode_message(reduce_fun(parts)))]

        told = self._merged(step, self.gather_object(self._tell(step, map_fun)), one_for_all)
        return cast(R, self._heard(step, self.broadcast_object(told[0] if told else None)))

    def all_gather(self, step: str, map_fun: Callable[[], T]) -> list[T]:
        """What ``map_fun`` gave on each rank, by rank, on every rank."""
        if not self.use_dist:
            return self._alone(step, lambda: [map_fun()])
        told = self.all_gather_object(self._tell(step, map_fun))
        self._raise_failures(_failures_in(told))
        return [cast(T, self._heard(step, one)) for one in told]

    def broadcast(self, step: str, map_fun: Callable[[], T]) -> T:
        """What ``map_fun`` gives on the coordinator, on every rank; the others do not call it."""
        if not self.use_dist:
            return self._alone(step, map_fun)
        return cast(
            T, self._heard(step, self.broadcast_object(self._tell(step, map_fun) if self.is_coordinator else None))
        )

    def _alone(self, step: str, action: Callable[[], T]) -> T:
        try:
            return action()
        except Exception as error:
            failure = describe(error, rank=0, phase=step)
            raise combine({0: failure}, {0: error}) from error

    def _tell(self, step: str, action: Callable[[], object]) -> _Told:
        """What this rank tells of ``action``; its own error is kept to be raised here as it was."""
        self._own = None
        try:
            return _Told(encode_message(action()))
        except BaseException as error:
            return self._failed(step, error)

    def _failed(self, step: str, error: BaseException) -> _Told:
        self._own = error
        failure = describe(error, rank=self.rank, phase=step)
        return _Told(failures=pack({self.rank: failure}))

    def _merged(
        self, step: str, told: list[_Told] | None, merge: Callable[[list[T]], list[_Told]]
    ) -> list[_Told] | None:
        """What the coordinator answers, an element for each rank or just one; None on other ranks."""
        if told is None:
            return None
        failures = _failures_in(told)
        if failures:
            answer = _Told(failures=pack(failures))
        else:
            try:
                return merge([decode_message(one.value) for one in told])
            except BaseException as error:
                answer = self._failed(step, error)
        return [answer] * self.get_world_size()

    def _heard(self, step: str, told: _Told | None) -> object:
        assert told is not None
        self._raise_failures(unpack(told.failures) if told.failures else {})
        try:
            return decode_message(told.value)
        except Exception as error:
            failure = describe(error, rank=self.rank, phase=step)
            raise combine({self.rank: failure}, {self.rank: error}) from error

    def _raise_failures(self, failures: dict[int, Failure]) -> None:
        own, self._own = self._own, None
        if own is not None and not isinstance(own, Exception):
            raise own
        if failures:
            raise combine(failures, {} if own is None else {self.rank: own})


def _failures_in(told: list[_Told]) -> dict[int, Failure]:
    return {rank: failure for one in told if one.failures for rank, failure in unpack(one.failures).items()}


def _all_gather_keys(local_dict: dict[str, Any], group: ProcessGroup | None = None) -> set[str]:
    """The keys that any rank of ``group`` has."""
    return set().union(*_keys_by_rank(local_dict, group))


class _KeysDisagreeError(RankDisagreementError, AssertionError):
    """Also what torch raises there."""


def _assert_same_keys(state_dict: dict[str, Any], process_group: ProcessGroup | None = None) -> None:
    """RankDisagreementError, on every rank of the group, unless all of them have the same keys."""
    by_rank = _keys_by_rank(state_dict, process_group)
    everything = set().union(*by_rank)
    missing = {rank: sorted(everything - keys) for rank, keys in enumerate(by_rank) if keys != everything}
    if missing:
        rank, keys = next(iter(missing.items()))
        raise _KeysDisagreeError(
            f"rank {rank} has no {', '.join(map(repr, keys[:8]))}, which other ranks have; "
            "give every rank the same keys",
            said={rank: f"lacks {keys}" for rank, keys in missing.items()},
        )


def _keys_by_rank(local_dict: dict[str, Any], group: ProcessGroup | None) -> list[set[str]]:
    use_dist = dist.is_available() and dist.is_initialized()
    return [set(keys) for keys in _DistWrapper(group, use_dist, 0).all_gather_object(list(local_dict))]


def find_tensor_shard(tensor: torch.Tensor, index: MetadataIndex) -> torch.Tensor:
    """The local memory of ``tensor`` that starts at ``index.offset``; all of a plain tensor, whose offset is zero."""
    if is_sharded(tensor):
        if index.offset is None:
            raise ValueError(f"{index.fqn!r} is sharded: an index without an offset does not say which piece is meant")
        piece = piece_at(pieces_of(index.fqn, tensor), tuple(index.offset))
        if piece is None:
            raise ValueError(f"this rank holds no piece of {index.fqn!r} at {list(index.offset)}")
        return piece.tensor
    if index.offset is not None and tuple(index.offset) != (0,) * tensor.dim():
        raise ValueError(f"{index.fqn!r} is a plain tensor and has nothing that starts at {list(index.offset)}")
    return tensor


def find_state_dict_object(state_dict: STATE_DICT_TYPE, index: MetadataIndex) -> Any:
    """The object of the flat ``state_dict`` that ``index`` names, or the piece of it that lies at its offset."""
    if index.fqn not in state_dict:
        raise ValueError(f"the state has no {index.fqn!r}")
    found = state_dict[index.fqn]
    if isinstance(found, torch.Tensor):
        return find_tensor_shard(found, index)
    if index.offset is not None:
        raise ValueError(f"{index.fqn!r} is a {type(found).__name__} and has nothing that starts at {index.offset}")
    return found


def _element_wise_add(a: Sequence[int], b: Sequence[int]) -> list[int]:
    """The sums, position by position, as far as both reach."""
    return [one + other for one, other in zip(a, b, strict=False)]


def _element_wise_sub(a: Sequence[int], b: Sequence[int]) -> list[int]:
    """The differences, position by position, as far as both reach."""
    return [one - other for one, other in zip(a, b, strict=False)]


def _normalize_device_info(device_type: str, device_id: int) -> str:
    """``cuda:1``; just ``cpu`` for the CPU."""
    return "cpu" if device_type == "cpu" else f"{device_type}:{device_id}"


class _ReaderView(io.RawIOBase):
    """Bytes ``offset`` to ``offset + len`` of a seekable ``base_stream`` as a stream of their own.

    It has a position of its own, so that several views share a stream (one read at a time), and closing it leaves the
    stream open.
    """

    def __init__(self, base_stream: io.IOBase, offset: int, len: int) -> None:
        super().__init__()
        if offset < 0 or len < 0:
            raise ValueError(f"a view of {len} bytes from {offset} on is no part of a stream")
        self.base_stream = base_stream
        self.offset = offset
        self.len = len
        self._position = 0

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("the view is closed")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        self._check_open()
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to ``offset`` from the view's start, the position or the view's end, and return the new position."""
        self._check_open()
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.len}.get(whence)
        if start is None or start + offset < 0:
            raise ValueError(f"cannot seek to {offset} (whence {whence}) in a view of {self.len} bytes")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Fill ``buffer`` from the position on, with no byte from behind the view's end."""
        self._check_open()
        view = memoryview(buffer).cast("B")[: max(0, self.len - self._position)]
        if not view.nbytes:
            return 0
        self.base_stream.seek(self.offset + self._position)
        count = cast(io.RawIOBase, self.base_stream).readinto(view) or 0
        self._position += count
        return count


def _create_file_view(file: io.IOBase, offset: int, length: int) -> io.IOBase:
    """Bytes ``offset`` to ``offset + length`` of ``file`` as a stream of their own."""
    return _ReaderView(file, offset, length)


ENABLE_PROFILE = False
"""Whether ``_profile`` does anything."""


@contextmanager
def _profile() -> Iterator[None]:
    """Prints, on rank 0 and where ENABLE_PROFILE is set, the ten functions that took most time in the block."""
    is_first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
    if not (ENABLE_PROFILE and is_first):
        yield
        return
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        yield
    finally:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("time").print_stats(10)


def _api_bc_check(func: Callable[P, R]) -> Callable[..., R]:
    """``func``, which takes its storage by keyword, made to take torch's old form ``func(state, storage)`` too."""
    names = inspect.signature(func).parameters
    storage = next((name for name in ("storage_writer", "storage_reader") if name in names), None)
    if storage is None:
        raise TypeError(f"{func.__name__} takes neither storage_writer nor storage_reader")

    @functools.wraps(func)
    def either(*args: Any, **kwargs: Any) -> R:
        if len(args) != 2:
            return func(*args, **kwargs)
        if storage in kwargs:
            raise TypeError(f"{func.__name__} was given {storage} twice, by position and by name")
        warnings.warn(
            f"pass the storage to {func.__name__} by name, as {storage}=...; its second argument is now another one",
            stacklevel=2,
        )
        return func(args[0], **{storage: args[1]}, **kwargs)

    return either
