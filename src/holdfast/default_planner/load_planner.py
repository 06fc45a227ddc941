"""The load planner used when none is given: target and checkpoint compared key by key before anything is read.

Where both agree, a leaf of the target becomes read items, as columns; where they do not, that is known before a target
is touched.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from holdfast._state.nested import flatten, set_element
from holdfast._state.per_rank import ADVICE
from holdfast._state.pieces import Pieces, Place, Tied, is_labelled, is_meta, is_sharded, piece_at, pieces_of, ties_of
from holdfast._state.stateful_values import Owners
from holdfast._state.tensors import CONTEXT_KEY, ComposedTensor, check_fillable, empty_tensor, plain_address
from holdfast._torch_classes.translate import metadata_from_torch
from holdfast._torch_codec.pickles import deserialize_object
from holdfast._values.lazy import LazyList
from holdfast._values.records import Record, class_difference, class_name, classes_in, emptied, rebuilt
from holdfast.default_planner.other_keys import AnyMapping, check_mapping, see_outside, suggestion
from holdfast.default_planner.targets import fill_empty_containers, is_empty_container, take_whole_values, tied
from holdfast.errors import Difference, InvalidStateError, MismatchError
from holdfast.metadata import (
    STATE_DICT_TYPE,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    Path,
    TensorStorageMetadata,
    path_key,
)
from holdfast.planner import LoadPlan, LoadPlanner, Memory, ReadColumns, ReadItem, is_overridden
from holdfast.planner_helpers import (
    ReadRows,
    can_cast,
    cast_advice,
    context_difference,
    dtype_difference,
    kind_of,
    quantizer_difference,
)
from holdfast.storage import ValueBuffer

SameBytes = Callable[[str, str], bool | None]

# Who overrides none of these has everything put where the target has it.
_PLACES = ("resolve_tensor", "lookup_tensor", "transform_tensor")
_HOOKS = (*_PLACES, "create_local_plan", "finish_plan", "resolve_row", "commit_row", "commit_tensor")

_FIX = "Fix the target, or pass strict=False to load what fits"
NO_METADATA = "a load planner needs the metadata of the checkpoint; call set_up_planner with it"


class DefaultLoadPlanner(LoadPlanner):
    """Loads every leaf of the target in place; subclass it and override ``lookup_tensor`` or ``transform_tensor``.

    ``strict`` makes every difference between target and checkpoint an error before anything is touched; without it
    what fits is loaded and ``differences`` tells the rest. ``allow_partial_load`` excuses missing keys only. ``cast``
    allows loading one floating type into another. ``mapping`` and ``types`` are as in LoadOptions; ``names`` has the
    stored key for each of the target. ``flatten_sharded_tensors`` is there for torch's sake: shards that are themselves
    sharded are always taken apart. Empty containers are filled, with the help of ``owners``; ``made`` has their keys.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
        *,
        strict: bool = True,
        cast: bool = False,
        allow_pickle: bool = False,
        mapping: AnyMapping | None = None,
        types: Iterable[type] = (),
    ) -> None:
        check_mapping(mapping)
        self.mapping = mapping
        self.names: dict[str, str] = {}
        self.dropped, self.wrapped = set[str](), list[torch.Tensor]()
        self.state_dict: STATE_DICT_TYPE = {}
        self.flatten_state_dict = flatten_state_dict
        self.flatten_sharded_tensors = flatten_sharded_tensors
        self.allow_partial_load = allow_partial_load
        self.strict = strict
        self.cast = cast
        self.allow_pickle = allow_pickle
        self.types = tuple(types)
        self.original_state_dict: STATE_DICT_TYPE = {}
        self.mappings: dict[str, Path] = {}
        self.owners = Owners()
        self.made: list[str] = []
        self._refused: list[Difference] = []
        self.versioned: dict[str, Mapping[Any, Any]] = {}
        self.differences: list[Difference] = []
        self.casts: list[Difference] = []
        self.stored_values: Callable[[list[str]], Mapping[str, object]] | None = None
        self._materials: dict[tuple[object, ...], torch.Tensor] = {}
        self._pieces: dict[str, Pieces] = {}
        self._memory: dict[str, Memory] = {}
        self._wrappers: list[torch.Tensor] = []
        self.same_bytes: SameBytes | None = None  # where ties are settled after the load
        self.ties: list[Tied] = []
        self.left_out: set[str] = set()
        self._is_plain = False

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the target, flattened; meta tensors are materialised on the CPU, empty containers asked to be filled."""
        self.original_state_dict = state_dict
        self.differences, containers = [], dict[Path, object]()
        stored = {} if metadata is None or self.mapping is not None else metadata_from_torch(metadata).containers
        if self.flatten_state_dict:
            self.versioned = {}
            state_dict, self.mappings = flatten(state_dict, self.versioned, containers, stored)
        self._materials, self._pieces = {}, {}
        self.made, self.wrapped = [], []
        self.state_dict = {
            key: leaf if type(leaf) is torch.Tensor and not leaf.is_meta else self._materialised(key, leaf)
            for key, leaf in state_dict.items()
        }
        metadata = None if metadata is None else self.understood(metadata)
        if metadata is not None and self.mapping is not None:
            metadata = see_outside(self, metadata, self.mapping)
        self.metadata, self._refused = metadata, [*self.differences]
        self.is_coordinator = is_coordinator
        if self.flatten_state_dict and metadata is not None:
            if not self.state_dict.keys() <= metadata.state_dict_metadata.keys():
                take_whole_values(self.state_dict, self.mappings, metadata, containers)
            made, refused = fill_empty_containers(
                self.original_state_dict, self.state_dict, self.mappings, metadata, self.owners
            )
            self.made += made
            found = (class_difference(stored.get(at), emptied(like), path_key(at)) for at, like in containers.items())
            self._refused += [*refused, *filter(None, found)]

    def understood(self, metadata: Metadata) -> Metadata:
        """``metadata`` in our classes, with an empty instance for each container whose class is among ``types``."""
        metadata = metadata_from_torch(metadata)
        found = {path: like for path, like in metadata.containers.items() if self.types and isinstance(like, Record)}
        likes = {path: self.rebuilt(path_key(path), like) for path, like in found.items()}
        return replace(metadata, containers={**metadata.containers, **likes}) if likes else metadata

    def _materialised(self, key: str, leaf: object) -> object:
        if isinstance(leaf, ComposedTensor) and leaf.tensor.is_meta:
            said = f"{key!r} is the context of a {type(leaf.tensor).__name__} on the meta device; materialise it first"
            raise InvalidStateError(said, key=key)
        if not isinstance(leaf, torch.Tensor) or not is_meta(leaf):
            return leaf
        if is_sharded(leaf):
            filled = torch.empty_like(leaf, device="cpu")
            if is_labelled(leaf):
                vars(filled).update(vars(leaf))
            self._set_in_target(key, filled)
            return filled
        # What shares its imaginary memory shares the real one too.
        memory = (leaf.untyped_storage()._cdata, leaf.storage_offset(), leaf.shape, leaf.stride(), leaf.dtype)
        if memory not in self._materials:
            self._materials[memory] = empty_tensor(leaf.shape, leaf.dtype)
        filled = self._materials[memory].detach()
        if isinstance(leaf, torch.nn.Parameter):
            filled = torch.nn.Parameter(filled, requires_grad=leaf.requires_grad)
        elif leaf.requires_grad:
            filled.requires_grad_()
        self._set_in_target(key, filled)
        return filled

    def _set_in_target(self, key: str, value: object) -> None:
        set_element(self.original_state_dict, self.mappings.get(key, (key,)), value)

    def create_local_plan(self) -> LoadPlan:
        """What to read for each leaf of the target; MismatchError with every difference when ``strict``."""
        if self.metadata is None:
            raise InvalidStateError(NO_METADATA)
        rows = ReadRows()
        self._is_plain = not is_overridden(self, DefaultLoadPlanner, *_HOOKS)
        self.differences, self.casts, self._memory, self._wrappers = [*self.owners.refused, *self._refused], [], {}, []
        others: list[Place] = []
        entries = self.metadata.state_dict_metadata
        left_out = self._other_contexts(entries)
        # What is compared only once it is read comes first, before anything is touched.
        compared: STATE_DICT_TYPE = {
            key: leaf
            for key, leaf in self.state_dict.items()
            if isinstance(leaf, (ComposedTensor, np.ndarray)) and isinstance(entries.get(key), BytesStorageMetadata)
        }
        for key, leaf in {**compared, **self.state_dict}.items():
            if left_out and key.startswith(left_out):
                continue
            stored = entries.get(key)
            if (
                isinstance(leaf, torch.Tensor)
                and isinstance(stored, TensorStorageMetadata)
                and (address := plain_address(leaf))
                and leaf.is_cpu
                and leaf.dtype is stored.properties.dtype
                and leaf.shape == stored.size
            ):
                self._memory[key] = leaf, address
                rows.add_tensor(key, stored)
                continue
            difference = self._difference(key, leaf, stored)
            if difference is not None:
                self.differences.append(difference)
            elif isinstance(stored, TensorStorageMetadata):
                if key in self._pieces:
                    self._wrappers.append(leaf)
                for place in self.places(key):
                    others.append(place)
                    rows.add_tensor(key, stored, place.box)
            elif stored is not None:
                rows.add_value(key)
                if isinstance(leaf, ComposedTensor):
                    self._wrappers.append(leaf.tensor)
        columns = self._without_ties(rows.columns(), others)
        faults = [each for each in self.differences if each.kind != "missing" or not self.allow_partial_load]
        if self.strict and faults:
            missing = [each.key for each in faults if each.kind == "missing"]
            hint = suggestion(missing, self.state_dict, entries) if self.mapping is None else ""
            hint += f" {ADVICE}" if self.owners.refused else ""
            raise MismatchError.of(self.told(faults), advice=_FIX + cast_advice(faults, cast=self.cast) + hint)
        return LoadPlan(LazyList(self.as_stored(columns)))

    def as_stored(self, columns: ReadColumns) -> ReadColumns:
        """``columns`` with the keys under which things are stored."""
        return columns if not self.names else replace(columns, storage_keys=self.stored(columns.keys))

    def stored(self, keys: Iterable[str]) -> list[str]:
        """The keys in the checkpoint for ``keys`` of the target."""
        return [self.names.get(key, key) for key in keys]

    def told(self, differences: Iterable[Difference]) -> list[Difference]:
        """``differences`` with the keys that the checkpoint has."""
        return [replace(each, key=self.names.get(each.key, each.key)) for each in differences]

    def places(self, key: str) -> list[Place]:
        """The memory of the target that takes what is stored of the tensor ``key``."""
        if key in self._pieces:
            return [Place(key, piece.tensor, piece.box) for piece in self._pieces[key].pieces]
        leaf = self.state_dict[key]
        return [Place(key, torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf, None)]

    def _without_ties(self, columns: ReadColumns, others: list[Place]) -> ReadColumns:
        """``columns`` without what would be loaded over something else.

        Where all keys with one memory are known to be the same, or known to differ, the last of them is loaded.
        Otherwise the first: the others are in ``ties``, for whoever gave ``same_bytes`` to settle.
        """
        self.ties, self.left_out = [], set()
        same_bytes, self.same_bytes = self.same_bytes, None  # a planner may live longer than its storage
        if same_bytes is None or is_overridden(self, DefaultLoadPlanner, *_PLACES):
            return columns  # nobody settles ties, or a subclass has another place for what is loaded
        for tie in ties_of(self._memory, others, self.state_dict):
            *earlier, last = tie.keys
            known = [self._has_same(same_bytes, key, last) if tie.is_exact else None for key in earlier]
            if None in known:
                self.ties.append(tie)
                self.left_out.update(tie.keys[1:])
            else:
                self.left_out.update(earlier)
                self.differences += [tied(key, last) for key, same in zip(earlier, known, strict=True) if not same]
        if not self.left_out:
            return columns
        self._wrappers += [place.tensor for key in self.left_out for place in self.places(key)]
        is_left_out = np.array([key in self.left_out for key in columns.keys])
        return columns.take(np.flatnonzero(~is_left_out[columns.key]))

    def _has_same(self, same_bytes: SameBytes, key: str, other: str) -> bool | None:
        same = same_bytes(*self.stored((key, other)))
        if same is False and (key in self._pieces or {key, other} & {each.key for each in self.casts}):
            return None  # parts of them may be the same, or become it
        return same

    def _other_contexts(self, entries: Mapping[str, object]) -> tuple[str, ...]:
        """The prefixes of keys of tensor subclasses whose contexts differ, as far as known before the load."""
        wanted = {
            key: leaf.context
            for key, leaf in self.state_dict.items()
            if isinstance(leaf, ComposedTensor) and isinstance(entries.get(key), BytesStorageMetadata)
        }
        values = self.stored_values(self.stored(wanted)) if wanted and self.stored_values is not None else {}
        known = {key: values[name] for key, name in zip(wanted, self.stored(wanted), strict=True) if name in values}
        others = [
            context_difference(key, known[key], wanted[key])
            for key in wanted
            if key in known and known[key] != wanted[key]
        ]
        self.differences += others
        return tuple(difference.key.removesuffix(CONTEXT_KEY) for difference in others)

    def _difference(self, key: str, leaf: object, stored: object) -> Difference | None:
        """How target and checkpoint disagree on ``key``; None when it can be loaded."""
        if isinstance(leaf, torch.Tensor) and isinstance(stored, TensorStorageMetadata):
            return self._tensor_difference(key, leaf, stored)
        if stored is None:
            if is_empty_container(leaf):
                return None  # an empty container asks for nothing
            return Difference(key=key, kind="missing", stored="nothing", wanted=kind_of(leaf))
        if isinstance(leaf, np.ndarray) and isinstance(stored, TensorStorageMetadata):
            check_fillable(key, leaf)
            return self._tensor_difference(key, torch.from_numpy(leaf), stored)
        if isinstance(leaf, np.ndarray) and self.metadata is not None and key not in self.metadata.paths:
            return None  # a value may turn out to be an array, but not in native storage, which has paths
        if isinstance(leaf, (torch.Tensor, np.ndarray)) or isinstance(stored, TensorStorageMetadata):
            return Difference(key=key, kind="kind", stored=kind_of(stored), wanted=kind_of(leaf))
        return None

    def _tensor_difference(self, key: str, leaf: torch.Tensor, stored: TensorStorageMetadata) -> Difference | None:
        if is_sharded(leaf):
            self._pieces[key] = pieces = pieces_of(key, leaf)
            shape, wanted, is_quantized = pieces.size, pieces.dtype, False
            for piece in pieces.pieces:
                check_fillable(key, piece.tensor)
        else:
            shape, wanted, is_quantized = leaf.shape, leaf.dtype, leaf.is_quantized
            check_fillable(key, leaf)
        if shape != stored.size:
            return Difference(key=key, kind="shape", stored=str(list(stored.size)), wanted=str(list(shape)))
        was = stored.properties.dtype
        if was == wanted:
            return quantizer_difference(key, leaf, stored) if is_quantized else None
        difference = dtype_difference(key, was, wanted)
        if not self.cast or not can_cast(difference):
            return difference
        self.casts.append(difference)
        return None

    def keys_without_elements(self) -> list[str]:
        """The sharded tensors of which this rank's target holds nothing."""
        differing = {difference.key for difference in self.differences}
        return [key for key, each in self._pieces.items() if not each.pieces and key not in differing]

    def aside(self, key: str, tensor: torch.Tensor) -> DefaultLoadPlanner:
        """A planner that has what is stored of ``key`` read into ``tensor``."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, cast=self.cast)
        planner.state_dict = {key: tensor}
        return planner

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """``central_plan``, unchanged; autograd is told that the target changes, as it is of each part."""
        torch.autograd.graph.increment_version(self._wrappers + self.wrapped)
        return central_plan

    def rebuilt(self, key: str, record: Record) -> object:
        """An instance, if ``types`` has its class or the target an instance of it at ``key``; else ``record``."""
        try:
            return rebuilt(record, chain(self.types, classes_in(self.state_dict.get(key))), key=key)
        except MismatchError as error:
            if self.strict:
                raise
            self.differences += [each for each in error.differences if each not in self.differences]
            return record

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Set the value in the target, an array only where one was; the context of a subclass is compared instead."""
        key = read_item.dest_index.fqn
        if isinstance(value, ValueBuffer):
            loaded = value.value
        else:
            loaded = deserialize_object(value, key=key, allow_pickle=self.allow_pickle)
        leaf = self.state_dict.get(key)
        if isinstance(leaf, ComposedTensor):
            if loaded != leaf.context:
                raise MismatchError.of(
                    self.told([context_difference(key, loaded, leaf.context)]),
                    advice="Make the target's tensor subclass as it was when it was saved.",
                )
            return
        difference = None
        if isinstance(leaf, np.ndarray) and not isinstance(loaded, np.ndarray):
            difference = Difference(key=key, kind="kind", stored=kind_of(loaded), wanted=kind_of(leaf))
        elif isinstance(loaded, (Record, torch.Generator)) and not isinstance(leaf, Record):
            stored, wanted = _class_of(loaded), _class_of(leaf)
            if wanted is not None and (isinstance(loaded, Record) or stored != wanted):
                difference = Difference(key=key, kind="type", stored=str(stored), wanted=wanted)
        if difference is not None:
            if self.strict:
                raise MismatchError.of(self.told([difference]), advice=f"{_FIX}.")
            if all(each.key != key for each in self.differences):
                self.differences.append(difference)
            return
        self.state_dict[key] = loaded
        self._set_in_target(key, loaded)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The part of the target that ``read_item`` fills."""
        return self.transform_tensor(read_item, self.lookup_tensor(read_item.dest_index))

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The tensor of the target that ``index`` names; override it to load into something else."""
        leaf = self.state_dict[index.fqn]
        if isinstance(leaf, np.ndarray):
            return torch.from_numpy(leaf)
        if index.fqn in self._pieces:
            piece = piece_at(self._pieces[index.fqn], tuple(index.offset or ()))
            if piece is None:
                raise InvalidStateError(f"the target holds no piece of {index.fqn!r} at {index.offset}", key=index.fqn)
            return piece.tensor
        tensor: torch.Tensor = leaf.detach() if leaf.requires_grad else leaf
        return tensor

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        """The box of ``tensor`` that is filled; override it to change where data goes."""
        if tensor.shape == read_item.lengths:
            return tensor
        for dimension, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dimension, start, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing: the tensor is the target's own."""

    def resolve_row(self, columns: ReadColumns, row: int) -> torch.Tensor:
        """The leaf itself, where all of it is wanted; the item is made only where a subclass may look at it."""
        which, length = columns.boxes[row]
        key = columns.keys[which]
        leaf = self.state_dict[key] if self._is_plain else None
        if isinstance(leaf, torch.Tensor) and key not in self._pieces and leaf.shape == length:
            return leaf.detach() if leaf.requires_grad else leaf
        return super().resolve_row(columns, row)

    def commit_row(self, columns: ReadColumns, row: int, tensor: torch.Tensor) -> None:
        if not self._is_plain:
            super().commit_row(columns, row, tensor)

    def plain_memory(self) -> Mapping[str, Memory]:
        """The memory found when target and checkpoint were compared; none where a subclass may fill another place."""
        return self._memory if self._is_plain else {}


def _class_of(leaf: object) -> str | None:
    """The class of an instance as it is stored: one that is loaded in its place is of the same."""
    if isinstance(leaf, torch.Generator):
        return f"torch.Generator of {leaf.device.type}"
    return leaf.name if isinstance(leaf, Record) else next(map(class_name, {type(leaf)} & {*classes_in(leaf)}), None)
