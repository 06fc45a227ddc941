"""load: a checkpoint into a state, in place; or, without a state, everything that is in it."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from holdfast._checkpoint import reader_for
from holdfast._native.opening import open_together
from holdfast._native.reader import NativeReader
from holdfast._native.values import decode_value
from holdfast._process import collector_paused
from holdfast._ranks.ranks import Ranks, SoloRanks, agreed
from holdfast._ranks.rendezvous import DEADLINE_S, participants
from holdfast._state.nested import add_versions, restorable_paths, tell_versions, unflatten
from holdfast._state.pieces import pieces_of
from holdfast._state.stateful_values import Owners, expose, hand_back
from holdfast._state.tensors import grad_mode
from holdfast._torch_classes.adapt import as_load_planner, as_reader, id_and_storage, metadata_of_rank, set_up_reader
from holdfast._torch_format.reader import FileSystemReader
from holdfast._values.lazy import LazyList
from holdfast.default_planner import DefaultLoadPlanner, WholeLoadPlanner, chosen_keys, require_gradients
from holdfast.default_planner.empty_targets import empty_state
from holdfast.default_planner.tied_targets import settle_ties
from holdfast.errors import CheckpointError, CorruptError, Difference, InvalidStateError, MismatchError, NotFoundError
from holdfast.metadata import Metadata
from holdfast.planner import LoadPlan, LoadPlanner, read_columns
from holdfast.planner_helpers import ReadRows, check_tiling
from holdfast.storage import StorageReader

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["LoadReport", "load"]

Sharing = Literal["host", "job", "off"]
"""Whether what several ranks want is read once, and by whom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load did: keys read, what did not fit, what nobody asked for, bytes and seconds.

    ``made`` has the loaded keys that the target had only an empty container for.
    """

    loaded: tuple[str, ...]
    unexpected: tuple[str, ...]
    differences: tuple[Difference, ...]
    casts: tuple[Difference, ...]
    bytes_read: int
    seconds: float
    made: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[str, ...]:
        """The keys of the target that the checkpoint does not have."""
        return tuple(difference.key for difference in self.differences if difference.kind == "missing")


@overload
def load(
    state_dict: MutableMapping[Any, Any],
    checkpoint_id: str | os.PathLike[str] | StorageReader | None = None,
    *,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    strict: bool = True,
    cast: bool = False,
    verify: bool = True,
    allow_pickle: bool = False,
    deadline_s: float = DEADLINE_S,
    share: Sharing = "host",
) -> LoadReport: ...
@overload
def load(
    state_dict: str | os.PathLike[str],
    *,
    keys: Iterable[str] | None = None,
    verify: bool = True,
    allow_pickle: bool = False,
) -> dict[Any, Any]: ...
@collector_paused
def load(
    state_dict: MutableMapping[Any, Any] | str | os.PathLike[str],
    checkpoint_id: str | os.PathLike[str] | StorageReader | None = None,
    *,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    keys: Iterable[str] | None = None,
    strict: bool = True,
    cast: bool = False,
    verify: bool = True,
    allow_pickle: bool = False,
    deadline_s: float = DEADLINE_S,
    share: Sharing = "host",
) -> LoadReport | dict[Any, Any]:
    """Load ``checkpoint_id`` into ``state_dict``, in place; ``load(path)`` alone returns everything, on the CPU.

    In a job of several ranks all of them call it, each with its own target; how many ranks wrote the checkpoint, and on
    which mesh, does not matter. ``load(path)`` is the business of one process.

    Args:
        state_dict: the target, of the same shape as what was saved. Tensors, on any device, are filled; other values
            are set in it; Stateful objects get load_state_dict. Meta tensors are replaced by CPU ones. An empty
            container gets all that is stored below it, on the CPU; an optimizer without state, as its parameters are.
        checkpoint_id: the directory of the checkpoint, or the URL of one in torch's format, which needs fsspec.
            A storage here is torch's old form.
        storage_reader: where to read from instead of ``checkpoint_id``; ours or torch's.
        planner: what to read instead of everything in the target; ours or torch's.
        process_group: the ranks that take part, instead of all.
        no_dist: this process loads alone, whatever others do.
        keys: for ``load(path)``: just these keys, and all that is below them ("model" stands for "model.weight" too).
        strict: any difference in keys, kinds, shapes or dtypes is one MismatchError, raised before anything is
            touched; False loads what fits. Keys that only the checkpoint has are never an error.
        cast: let a tensor of one floating type be loaded into one of another.
        verify: check every byte that is read against its digest.
        allow_pickle: unpickle values that were saved with allow_pickle; it runs code from the checkpoint.
        deadline_s: seconds without progress after which a rank that others wait for is given up.
        share: "host" reads what several ranks of one host want once and passes it on in their memory; "job" also reads
            what four or more hosts want once, and sends it from host to host; with "off" every rank reads all it wants
            itself.

    Returns:
        A LoadReport; or, for ``load(path)``, the state, nested as it was saved.

    Raises:
        NotFoundError: no checkpoint is published there.
        MismatchError: see ``strict``.
        CorruptError: something is not what was written; the contents of the target are then undefined.
    """
    if isinstance(state_dict, (str, bytes, os.PathLike)):
        if checkpoint_id is not None or storage_reader is not None or planner is not None:
            raise ValueError("load(path) takes no other place to read from; load(state, path) loads into a state")
        find = partial(reader_at, state_dict, verify=verify, allow_pickle=allow_pickle)
        return load_without_target(find, keys, SoloRanks(), allow_pickle=allow_pickle)
    ranks = participants(process_group, no_dist=no_dist, call="load", place=checkpoint_id, deadline_s=deadline_s)
    with ranks:
        checkpoint_id, storage_reader = id_and_storage(checkpoint_id, storage_reader, function="load")
        if keys is not None:
            raise ValueError("a target says itself which keys it wants; keys are for load(path)")
        if not isinstance(state_dict, MutableMapping):
            raise InvalidStateError(f"a target is a dict of names to values, not a {type(state_dict).__name__}")
        if storage_reader is None:
            find = partial(reader_at, checkpoint_id, verify=verify, cast=cast, allow_pickle=allow_pickle)
        elif not verify:
            raise ValueError("verify is an option of the storage; give it to it")
        elif checkpoint_id is not None:
            storage_reader.reset(checkpoint_id)
        if share not in ("host", "job", "off"):
            raise ValueError(f"share is 'host', 'job' or 'off', not {share!r}")
        if planner is None:
            planner = WholeLoadPlanner(strict=strict, cast=cast, allow_pickle=allow_pickle)
        elif not strict:
            raise ValueError("strict is an option of the planner; give it to it")
        given = storage_reader
        find_reader = find if given is None else lambda: given
        return load_with(state_dict, find_reader, planner, ranks, allow_pickle=allow_pickle, share=share)


def reader_at(
    checkpoint_id: str | os.PathLike[str] | None, *, verify: bool = True, cast: bool = False, allow_pickle: bool = False
) -> StorageReader:
    """The storage that is meant by an id alone."""
    if checkpoint_id is None:
        raise ValueError("load needs a checkpoint_id or a storage_reader")
    return reader_for(checkpoint_id, verify=verify, cast=cast, allow_pickle=allow_pickle)


def load_with(
    state: MutableMapping[Any, Any],
    find_reader: Callable[[], StorageReader],
    planner: LoadPlanner,
    ranks: Ranks,
    *,
    allow_pickle: bool = False,
    share: Sharing = "host",
) -> LoadReport:
    """Load into ``state``, in place, with a storage and a planner, ours or torch's, among ranks that were entered.

    ``find_reader`` gives the storage for what is there when it is called, again after it was replaced.
    """
    started = time.monotonic()
    planner = as_load_planner(planner, allow_pickle=allow_pickle)
    owners = Owners()
    if isinstance(planner, DefaultLoadPlanner):
        planner.owners = owners

    def make_target(reader: StorageReader, metadata: Metadata) -> dict[Any, Any]:
        if not state and isinstance(reader, NativeReader):
            reader.check_files()  # room for all, and what is not there may be more than there is
        return expose(state, owners)

    loading = _load(make_target, find_reader, planner, ranks, share=share)
    reports: list[LoadReport] = []

    def finish() -> None:
        report = _report(loading, planner, time.monotonic() - started)
        loading.tell_versions(report)
        hand_back(state, loading.target)
        reports.append(report)

    ranks.all_reduce("handing back the state", finish, lambda done: None)
    return reports[0]


def load_without_target(
    find_reader: Callable[[], StorageReader],
    keys: Iterable[str] | None,
    ranks: Ranks,
    *,
    allow_pickle: bool = False,
) -> dict[Any, Any]:
    """All that the checkpoint has, or what is at and below ``keys``, nested as it was saved, on the CPU."""
    planner = WholeLoadPlanner(flatten_state_dict=False, allow_pickle=allow_pickle)
    chosen = None if keys is None else {keys} if isinstance(keys, str) else set(keys)
    leaves = _load(partial(_leaves, chosen), find_reader, planner, ranks).target
    metadata = planner.metadata
    assert metadata is not None
    require_gradients(metadata, leaves)
    return add_versions(unflatten(leaves, restorable_paths(metadata)), metadata.versions)


def _leaves(keys: set[str] | None, reader: StorageReader, metadata: Metadata) -> dict[Any, Any]:
    """A flat target for ``keys`` and what is below them; MismatchError for one that stands for nothing."""
    if isinstance(reader, NativeReader):
        reader.check_files()  # room for what is not there may be more than there is
    return empty_state(metadata, None if keys is None else chosen_keys(metadata, keys))


_MakeTarget = Callable[[StorageReader, Metadata], dict[Any, Any]]


def _load(
    make_target: _MakeTarget,
    find_reader: Callable[[], StorageReader],
    planner: LoadPlanner,
    ranks: Ranks,
    *,
    share: Sharing = "host",
) -> _Loading:
    """The load, once all of the target is read.

    When the checkpoint is replaced by another one while it is read, all ranks start again together.
    """
    reader: StorageReader | None = None
    try:
        while True:
            try:
                with ExitStack() as stack:
                    reader = _found(find_reader, ranks)
                    loading = _Loading(reader, planner, ranks)
                    loading.open(stack, share=share)
                    loading.make_plan(make_target)
                    loading.read()
                    loading.bytes_read = reader.bytes_read
                    return loading
            except (CorruptError, NotFoundError) as error:
                ranks.again()
                was_replaced = partial(_was_replaced, reader, find_reader)
                if ranks.all_reduce("looking for another checkpoint", was_replaced, any):
                    _close(reader)
                    continue
                if isinstance(error, CorruptError):
                    error.args = (f"{error.message}. The contents of the target are undefined now.",)
                raise
    finally:
        _close(reader)


def _found(find_reader: Callable[[], StorageReader], ranks: Ranks) -> StorageReader:
    """The storage for what is there; where there is nothing, that is raised on every rank."""
    try:
        return as_reader(find_reader())
    except CheckpointError as error:
        refused = error

        def refuse() -> StorageReader:
            raise refused

        return ranks.locally("looking for the checkpoint", refuse)


def _close(reader: StorageReader | None) -> None:
    if isinstance(reader, NativeReader):
        reader.close()


def _was_replaced(reader: StorageReader | None, find_reader: Callable[[], StorageReader]) -> bool:
    """Whether another checkpoint is there than the one that ``reader`` read."""
    if isinstance(reader, (NativeReader, FileSystemReader)):
        return type(as_reader(find_reader())) is not type(reader) or reader.was_replaced()
    return False


class _Loading:
    """One try at a load, in the steps that all ranks take together; what goes wrong in one is raised on every rank."""

    def __init__(self, reader: StorageReader, planner: LoadPlanner, ranks: Ranks) -> None:
        self._reader = reader
        self._planner = planner
        self._ranks = ranks
        self._metadata: Metadata | None = None
        self._is_apart = False
        self.target: dict[Any, Any] = {}
        self.bytes_read = 0
        self.plan = LoadPlan([])

    @property
    def metadata(self) -> Metadata:
        """What the checkpoint says of itself, once it is open."""
        assert self._metadata is not None
        return self._metadata

    def open(self, stack: ExitStack, *, share: Sharing) -> None:
        """Read the metadata, once for all ranks of a host where they can share what they read; ``stack`` closes it."""
        reader, ranks = self._reader, self._ranks
        reader.watch(ranks.check)
        stack.callback(reader.watch, lambda: None)
        ranks.follow(lambda: reader.bytes_read, lambda: reader.file_at_work)
        if share == "off" or ranks.size == 1 or type(reader) is not NativeReader:
            ranks.all_reduce("reading the metadata", self._read_metadata, _one_attempt)
            return
        self._metadata, exchange = open_together(reader, ranks, between_hosts=share == "job")
        if exchange is not None:
            stack.callback(exchange.close)
            stack.callback(reader.use_exchange, None)
            reader.use_exchange(exchange)
            # While a rank waits for what another one reads, it is not the one that is stuck.
            ranks.follow(lambda: reader.bytes_read + exchange.progress, lambda: reader.file_at_work)

    def make_plan(self, make_target: _MakeTarget) -> None:
        """Decide what this rank reads; plans travel only where somebody may want to see them all."""
        plan_locally = partial(self._plan_locally, make_target)
        # These two leave all plans as they are, and so does a rank that has only metadata of its own.
        is_plain = type(self._reader) is NativeReader and type(self._planner) is WholeLoadPlanner
        is_alone = is_plain or self._is_apart

        def plan_alone() -> None:
            (self.plan,) = self._plan_globally([plan_locally()])
            if self._is_apart:
                _check_filled(self._planner, self.plan)

        # One step for both, or ranks that do not plan alike would never meet.
        plan = self._ranks.reduce_scatter("planning the load", plan_alone if is_alone else plan_locally, self._merged)
        if plan is not None:
            self.plan = plan

    def read(self) -> None:
        """Read all that this rank wants."""
        self._ranks.all_reduce("reading the checkpoint", self._read, lambda done: None)

    def tell_versions(self, report: LoadReport) -> None:
        """Let modules' state_dicts in the target say with which versions that was saved which is in them now."""
        planner, versions = self._planner, self.metadata.versions
        if isinstance(planner, DefaultLoadPlanner):
            tell_versions(planner.versioned, versions, {difference.key for difference in report.differences})
            if planner.made:
                self.target = add_versions(self.target, versions)

    def _read_metadata(self) -> tuple[bool, str | None]:
        self._metadata, self._is_apart = _metadata(self._reader, self._ranks.rank)
        meta = None if self._is_apart else self._metadata.storage_meta
        return self._is_apart, None if meta is None else meta.save_id

    def _plan_locally(self, make_target: _MakeTarget) -> LoadPlan:
        reader, planner, ranks = self._reader, self._planner, self._ranks
        self.target = make_target(reader, self.metadata)
        leads, together = ranks.is_coordinator, not self._is_apart
        if isinstance(planner, DefaultLoadPlanner):
            planner.same_bytes = reader.same_bytes
        planner.set_up_planner(self.target, self.metadata, leads)
        set_up_reader(reader, self.metadata, is_coordinator=leads, rank=ranks.rank, use_collectives=together)
        if isinstance(planner, DefaultLoadPlanner):
            planner.stored_values = partial(_stored_values, reader, self.metadata, planner.allow_pickle)
        return reader.prepare_local_plan(planner.create_local_plan())

    def _merged(self, plans: list[LoadPlan | None]) -> list[LoadPlan | None]:
        """What all plans together become; None of a rank says that it has planned for itself."""
        there = [plan for plan in plans if plan is not None]
        if there and len(there) < len(plans):
            ways = ("the default one" if plan is None else "another one" for plan in plans)
            agreed("planner", dict(zip(self._ranks.job_ranks, ways, strict=True)))
        return list(self._plan_globally(there)) if there else plans

    def _plan_globally(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return self._reader.prepare_global_plan(self._planner.create_global_plan(plans))

    def _read(self) -> None:
        self.plan = self._planner.finish_plan(self.plan)
        as_before = grad_mode()
        with as_before, as_before, torch.no_grad():
            self._reader.read_data(self.plan, self._planner).wait()
            if isinstance(self._planner, DefaultLoadPlanner) and self._planner.ties:
                if isinstance(self._reader, NativeReader):
                    self._reader.use_exchange(None)  # the other ranks may have nothing to settle
                settle_ties(self._planner, self._reader, self.plan)


def _metadata(reader: StorageReader, rank: int) -> tuple[Metadata, bool]:
    """What the checkpoint says of itself; True beside it where ranks saved apart and this is what ``rank`` says."""
    if isinstance(reader, NativeReader):
        return reader.read_metadata(), False  # whose index has been checked to tile every tensor
    if isinstance(reader, FileSystemReader):
        reader.own_rank = rank
    try:
        metadata = reader.read_metadata()
    except Exception:
        own = metadata_of_rank(reader, rank)
        if own is None:
            raise
        return own, True
    check_tiling(metadata)
    return metadata, False


def _stored_values(reader: StorageReader, metadata: Metadata, allow_pickle: bool, keys: list[str]) -> Mapping[str, Any]:
    """What the checkpoint has for ``keys``, as far as one rank can tell alone before anything is loaded."""
    if isinstance(reader, NativeReader):
        values = reader.catalog.values
        return {key: decode_value(values[key], key=key) for key in keys if key in values}
    if not isinstance(reader, FileSystemReader):
        return {}
    planner, rows = DefaultLoadPlanner(flatten_state_dict=False, allow_pickle=allow_pickle), ReadRows()
    planner.set_up_planner(dict.fromkeys(keys), metadata)
    for key in keys:
        rows.add_value(key)
    reader.read_data(LoadPlan(LazyList(rows.columns())), planner).wait()
    return planner.state_dict


def _check_filled(planner: LoadPlanner, plan: LoadPlan) -> None:
    """MismatchError where a rank's own metadata, which describes parts of tensors, has not all of a target."""
    if not isinstance(planner, DefaultLoadPlanner):
        return
    columns = read_columns(plan.items)
    filled: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for row, (which, length) in enumerate(columns.boxes):
        dimensions = columns.dimensions[which]
        piece = tuple(columns.target_lo[row, : max(0, dimensions)].tolist())
        filled[columns.keys[which], piece] += torch.Size(length).numel()
    wanted = {
        key: leaf for key in dict.fromkeys(columns.keys) if isinstance(leaf := planner.state_dict[key], torch.Tensor)
    }
    faults = [
        Difference(key=key, kind="missing", stored="another rank's part", wanted=f"{list(piece.box.lengths)}")
        for key, leaf in wanted.items()
        if key not in planner.left_out
        for piece in pieces_of(key, leaf).pieces
        if filled[key, piece.box.offsets] < piece.box.volume
    ]
    if faults:
        raise MismatchError.of(
            faults, advice="What ranks saved apart only as many ranks with the same layout can load."
        )


def _one_attempt(attempts: list[tuple[bool, str | None]]) -> None:
    """CorruptError unless all ranks have read the metadata of the same save: one of them was replaced meanwhile."""
    if len(set(attempts)) > 1:
        raise CorruptError("the checkpoint was replaced by another one while it was opened")


def _report(loading: _Loading, planner: LoadPlanner, seconds: float) -> LoadReport:
    columns = read_columns(loading.plan.items)
    empty: list[str] = []
    asked = set(columns.storage_keys)
    if isinstance(planner, DefaultLoadPlanner):
        # A rank that holds no element of a tensor has nothing to read, and has it all.
        empty = planner.keys_without_elements()
        asked.update(planner.state_dict)
    return LoadReport(
        loaded=tuple(dict.fromkeys((*columns.keys, *empty))),
        unexpected=tuple(key for key in loading.metadata.state_dict_metadata if key not in asked),
        differences=tuple(planner.differences) if isinstance(planner, DefaultLoadPlanner) else (),
        casts=tuple(planner.casts) if isinstance(planner, DefaultLoadPlanner) else (),
        bytes_read=loading.bytes_read,
        seconds=seconds,
        made=tuple(planner.made) if isinstance(planner, DefaultLoadPlanner) else (),
    )
