"""The planners used when none is given: the whole state out, the whole target in.

The save planner turns each leaf of the flattened state into items and marks tied weights; the load planner compares
the target with the checkpoint, key by key, before anything is read. Both work on columns.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable
from functools import cache
from typing import Any, final

import numpy as np
import torch

from holdfast._plan.coverage import check_coverage
from holdfast._state.paths import Path, flatten, set_element, unflatten
from holdfast._state.subclasses import ComposedTensor
from holdfast._state.tensors import (
    as_tensor,
    check_fillable,
    check_savable,
    empty_quantized,
    empty_tensor,
    quantizer_of,
)
from holdfast._torchformat.objects import deserialize_object, serialize_object
from holdfast._values.dtypes import DTYPES
from holdfast._values.lazy import LazyList
from holdfast.errors import Difference, InvalidStateError, MismatchError
from holdfast.metadata import (
    STATE_DICT_TYPE,
    BytesStorageMetadata,
    ChunkColumns,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from holdfast.planner import (
    LoadPlan,
    LoadPlanner,
    ReadColumns,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorHead,
    ValueBuffer,
    WriteColumns,
    WriteItem,
    WriteItemType,
    padded,
    write_columns,
)
from holdfast.planner_helpers import ReadRows

__all__ = ["DefaultLoadPlanner", "DefaultSavePlanner"]


class DefaultSavePlanner(SavePlanner):
    """Saves every leaf of the state; subclass it and override ``lookup_object`` or ``transform_object``."""

    def __init__(self, flatten_state_dict: bool = True) -> None:
        self.flatten_state_dict = flatten_state_dict
        self.mappings: dict[str, Path] = {}

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the state, flattened."""
        if self.flatten_state_dict:
            state_dict, self.mappings = flatten(state_dict)
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """One item for each leaf; InvalidStateError for a tensor that has nothing to store."""
        plan = SavePlan(
            LazyList(_columns_of_state(self.state_dict)),
            planner_data=self.mappings if self.flatten_state_dict else None,
        )
        self.plan = plan
        return plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plans as they are, and the metadata of what they write together, checked to be whole."""
        metadata = metadata_of_plans(all_plans)
        if self.flatten_state_dict:
            merged: dict[str, Path] = {}
            for plan in all_plans:
                merged.update(plan.planner_data or {})
            metadata = dataclasses.replace(metadata, planner_data=merged)
        self.global_plan = all_plans
        self.metadata = metadata
        return all_plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """``new_plan``, unchanged."""
        self.plan = new_plan
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The tensor or value of ``write_item``, transformed."""
        return self.transform_object(write_item, self.lookup_object(write_item.index))

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The leaf that ``index`` names; override it to save something else."""
        return self.state_dict[index.fqn]

    def transform_object(self, write_item: WriteItem, object: Any) -> torch.Tensor | io.BytesIO:
        """What storage gets for ``object``; override it to change values on their way out."""
        if write_item.type is WriteItemType.BYTE_IO:
            value = object.context if isinstance(object, ComposedTensor) else object
            return ValueBuffer(value, serialize_object)
        if isinstance(object, np.ndarray):
            return as_tensor(write_item.index.fqn, object)
        tensor: torch.Tensor = object.detach() if object.requires_grad else object
        return tensor


@final
class WholeSavePlanner(DefaultSavePlanner):
    """The default planner when none is given: nobody overrides its hooks, so no item has to be made for them."""

    def resolve_row(self, columns: WriteColumns, row: int) -> torch.Tensor | io.BytesIO:
        """The leaf itself."""
        leaf = self.state_dict[columns.keys[columns.rows[row][0]]]
        if isinstance(leaf, torch.Tensor):
            return leaf.detach() if leaf.requires_grad else leaf
        return super().resolve_row(columns, row)


def _columns_of_state(leaves: STATE_DICT_TYPE) -> WriteColumns:
    heads: list[TensorHead | None] = []
    shapes: list[torch.Size] = []
    firsts: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for key, leaf in leaves.items():
        head = None
        if isinstance(leaf, torch.Tensor):
            check_savable(key, leaf)
            head = _head_of(key, leaf, firsts)
        elif isinstance(leaf, np.ndarray):
            tensor = as_tensor(key, leaf)
            head = TensorHead(_properties(tensor.dtype, False), tensor.shape, None, "numpy")
        heads.append(head)
        shapes.append(head.size if head is not None else torch.Size())
    length = padded(shapes, fill=1)
    return WriteColumns(
        keys=list(leaves),
        heads=heads,
        key=np.arange(len(heads)),
        lo=np.zeros_like(length),
        length=length,
        hint=np.zeros(len(heads), dtype=np.int64),
        is_shard=np.zeros(len(heads), dtype=bool),
    )


def _head_of(key: str, tensor: torch.Tensor, firsts: dict[int, list[tuple[str, torch.Tensor]]]) -> TensorHead:
    """What ``tensor`` is; tied to the first one that has just the same memory."""
    alias_of = None
    if tensor.numel():
        neighbours = firsts.setdefault(tensor.data_ptr(), [])
        alias_of = next((other for other, first in neighbours if _is_same_memory(first, tensor)), None)
        if alias_of is None:
            neighbours.append((key, tensor))
    return TensorHead(_properties(tensor.dtype, tensor.requires_grad), tensor.shape, alias_of)


def _is_same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors that start at the same address have the same elements and always will."""
    return (
        first.device == second.device
        and first.dtype == second.dtype
        and first.shape == second.shape
        and first.stride() == second.stride()
        and first.is_conj() == second.is_conj()
        and first.is_neg() == second.is_neg()
    )


@cache
def _properties(dtype: torch.dtype, requires_grad: bool) -> TensorProperties:
    """One object for all tensors that are alike: whoever hands it out makes a copy."""
    return TensorProperties(dtype, torch.strided, requires_grad)


def metadata_of_plans(plans: list[SavePlan]) -> Metadata:
    """What ``plans`` write together; InvalidStateError unless the boxes of each tensor tile it exactly."""
    tables = [write_columns(plan.items) for plan in plans]
    for table in tables:
        _check_values_once(table)
    heads: dict[str, TensorHead | None] = {}
    for table in tables:
        for key, head in zip(table.keys, table.heads, strict=True):
            heads.setdefault(key, head)
    ids = {key: number for number, key in enumerate(heads)}
    tensor = np.concatenate([np.array([ids[key] for key in table.keys], dtype=np.int64)[table.key] for table in tables])
    width = max(table.lo.shape[1] for table in tables)
    lo = np.concatenate([_widened(table.lo, width, 0) for table in tables])
    length = np.concatenate([_widened(table.length, width, 1) for table in tables])
    order = np.argsort(tensor, kind="stable")
    tensor, lo, length = tensor[order], lo[order], length[order]
    _check_tiling(list(heads), list(heads.values()), tensor, lo, length)
    bounds = np.searchsorted(tensor, np.arange(len(heads) + 1)).tolist()
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for number, (key, head) in enumerate(heads.items()):
        if head is None:
            entries[key] = BytesStorageMetadata()
            continue
        chunks = ChunkColumns(lo, length, bounds[number], bounds[number + 1], len(head.size))
        entries[key] = TensorStorageMetadata(
            head.properties.duplicate(), head.size, LazyList(chunks), head.alias_of, head.kind
        )
    return Metadata(entries)


def _check_values_once(table: WriteColumns) -> None:
    """InvalidStateError when a plan has a value twice; for tensors, the tiling shows it."""
    counts = np.bincount(table.key, minlength=len(table.keys))
    for which in np.flatnonzero(counts > 1).tolist():
        if table.heads[which] is None:
            key = table.keys[which]
            raise InvalidStateError(f"the plan has the value of {key!r} {counts[which]} times; save it once", key=key)


def _widened(table: np.ndarray, width: int, fill: int) -> np.ndarray:
    missing = width - table.shape[1]
    return np.pad(table, ((0, 0), (0, missing)), constant_values=fill) if missing else table


def _check_tiling(
    keys: list[str], heads: list[TensorHead | None], tensor: np.ndarray, lo: np.ndarray, length: np.ndarray
) -> None:
    is_tensor = np.array([head is not None for head in heads], dtype=bool)
    rows = is_tensor[tensor]
    shapes = _widened(padded([head.size if head is not None else () for head in heads], fill=1), lo.shape[1], 1)
    faults = [
        fault for fault in check_coverage(tensor[rows], lo[rows], length[rows], shapes) if is_tensor[fault.tensor]
    ]
    if faults:
        key = keys[faults[0].tensor]
        raise InvalidStateError(
            f"the pieces of {key!r} do not make up the whole tensor: {faults[0].detail}"
            + (f" (and {len(faults) - 1} more keys)" if len(faults) > 1 else ""),
            key=key,
        )


class DefaultLoadPlanner(LoadPlanner):
    """Loads every leaf of the target in place; subclass it and override ``lookup_tensor`` or ``transform_tensor``.

    ``strict`` makes every difference between target and checkpoint an error before anything is touched; without it
    what fits is loaded and ``differences`` tells the rest. ``allow_partial_load`` excuses missing keys only. ``cast``
    allows loading one floating type into another.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        *,
        allow_partial_load: bool = False,
        strict: bool = True,
        cast: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        self.flatten_state_dict = flatten_state_dict
        self.allow_partial_load = allow_partial_load
        self.strict = strict
        self.cast = cast
        self.allow_pickle = allow_pickle
        self.mappings: dict[str, Path] = {}
        self.differences: list[Difference] = []
        self.casts: list[Difference] = []

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the target, flattened; meta tensors are materialised on the CPU, empty containers asked to be filled."""
        self.original_state_dict = state_dict
        if self.flatten_state_dict:
            state_dict, self.mappings = flatten(state_dict)
        self._materials: dict[tuple[object, ...], torch.Tensor] = {}
        self.state_dict = {
            key: leaf if type(leaf) is torch.Tensor and not leaf.is_meta else self._materialised(key, leaf)
            for key, leaf in state_dict.items()
        }
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        if self.flatten_state_dict and metadata is not None and isinstance(metadata.planner_data, dict):
            self._fill_empty_containers(metadata)

    def _fill_empty_containers(self, metadata: Metadata) -> None:
        """Ask for all that is stored below an empty container of the target, such as the state of a new optimizer."""
        empty = {self.mappings[key]: key for key, leaf in self.state_dict.items() if _is_empty_container(leaf)}
        if not empty:
            return
        below: dict[Path, dict[str, Path]] = {}
        for key, path in metadata.planner_data.items():
            for length in range(1, len(path)):
                if path[:length] in empty and key in metadata.state_dict_metadata:
                    below.setdefault(path[:length], {})[key] = path
        for prefix, paths in below.items():
            leaves = empty_state(metadata, paths)
            tails: dict[str, Path] = {key: ("", *path[len(prefix) :]) for key, path in paths.items()}
            set_element(self.original_state_dict, prefix, unflatten(leaves, tails)[""])
            del self.state_dict[empty[prefix]]
            self.state_dict.update(leaves)
            self.mappings.update(paths)

    def _materialised(self, key: str, leaf: Any) -> Any:
        if isinstance(leaf, ComposedTensor) and leaf.tensor.is_meta:
            raise InvalidStateError(
                f"{key!r} is the context of a {type(leaf.tensor).__name__} on the meta device; materialise it first",
                key=key,
            )
        if not isinstance(leaf, torch.Tensor) or not leaf.is_meta:
            return leaf
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

    def _set_in_target(self, key: str, value: Any) -> None:
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[key], value)
        else:
            self.original_state_dict[key] = value

    def create_local_plan(self) -> LoadPlan:
        """What to read for each leaf of the target; MismatchError with every difference when ``strict``."""
        if self.metadata is None:
            raise InvalidStateError("a load planner needs the metadata of the checkpoint; call set_up_planner with it")
        rows = ReadRows()
        self.differences, self.casts = [], []
        entries = self.metadata.state_dict_metadata
        for key, leaf in self.state_dict.items():
            stored = entries.get(key)
            difference = self._difference(key, leaf, stored)
            if difference is not None:
                self.differences.append(difference)
            elif isinstance(stored, TensorStorageMetadata):
                rows.add_tensor(key, stored)
            elif stored is not None:
                rows.add_value(key)
        faults = [each for each in self.differences if each.kind != "missing" or not self.allow_partial_load]
        if self.strict and faults:
            can_cast = not self.cast and any(each.kind == "dtype" for each in faults)
            raise MismatchError.of(
                faults,
                advice=f"Fix the target, or pass strict=False to load what fits{', or cast=True' if can_cast else ''}.",
            )
        return LoadPlan(LazyList(rows.columns()))

    def _difference(self, key: str, leaf: Any, stored: object) -> Difference | None:
        """How target and checkpoint disagree on ``key``; None when it can be loaded."""
        if isinstance(leaf, torch.Tensor) and isinstance(stored, TensorStorageMetadata):
            return self._tensor_difference(key, leaf, stored)
        if stored is None:
            if _is_empty_container(leaf):
                return None  # an empty container asks for nothing
            return Difference(key=key, kind="missing", stored="nothing", wanted=_kind_of(leaf))
        if isinstance(leaf, np.ndarray) and isinstance(stored, TensorStorageMetadata):
            check_fillable(key, leaf)
            return self._tensor_difference(key, torch.from_numpy(leaf), stored)
        if isinstance(leaf, (torch.Tensor, np.ndarray)) or isinstance(stored, TensorStorageMetadata):
            return Difference(key=key, kind="kind", stored=_kind_of(stored), wanted=_kind_of(leaf))
        return None

    def _tensor_difference(self, key: str, leaf: torch.Tensor, stored: TensorStorageMetadata) -> Difference | None:
        check_fillable(key, leaf)
        if leaf.shape != stored.size:
            return Difference(key=key, kind="shape", stored=str(list(stored.size)), wanted=str(list(leaf.shape)))
        was, wanted = stored.properties.dtype, leaf.dtype
        if was == wanted:
            return _quantizer_difference(key, leaf, stored) if leaf.is_quantized else None
        difference = Difference(key=key, kind="dtype", stored=_name(was), wanted=_name(wanted))
        if not self.cast or not _can_cast(was, wanted):
            return difference
        self.casts.append(difference)
        return None

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """``central_plan``, unchanged."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Set the value in the target; the context of a tensor subclass is compared instead."""
        key = read_item.dest_index.fqn
        if isinstance(value, ValueBuffer):
            loaded = value.value
        else:
            loaded = deserialize_object(value, key=key, allow_pickle=self.allow_pickle)
        leaf = self.state_dict.get(key)
        if isinstance(leaf, ComposedTensor):
            if loaded != leaf.context:
                raise MismatchError.of(
                    [Difference(key=key, kind="context", stored=repr(loaded), wanted=repr(leaf.context))],
                    advice="Make the target's tensor subclass as it was when it was saved.",
                )
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


@final
class WholeLoadPlanner(DefaultLoadPlanner):
    """The default planner when none is given: nobody overrides its hooks, so no item has to be made for them."""

    def resolve_row(self, columns: ReadColumns, row: int) -> torch.Tensor:
        """The leaf itself, where all of it is wanted."""
        which, length = columns.boxes[row]
        leaf = self.state_dict[columns.keys[which]]
        if isinstance(leaf, torch.Tensor) and leaf.shape == length:
            return leaf.detach() if leaf.requires_grad else leaf
        return super().resolve_row(columns, row)

    def commit_row(self, columns: ReadColumns, row: int, tensor: torch.Tensor) -> None:
        """Nothing: the tensor is the target's own."""


def _is_empty_container(leaf: object) -> bool:
    return isinstance(leaf, (dict, list, tuple, set, frozenset)) and not leaf


def _quantizer_difference(key: str, leaf: torch.Tensor, stored: TensorStorageMetadata) -> Difference | None:
    """A target takes over the stored scales and zero points, but its scheme cannot be changed."""
    if stored.quantizer is None:
        return None
    was, wanted = stored.quantizer["scheme"], (quantizer_of(leaf) or {}).get("scheme")
    return None if was == wanted else Difference(key=key, kind="context", stored=was, wanted=str(wanted))


def _kind_of(leaf: object) -> str:
    if isinstance(leaf, (torch.Tensor, np.ndarray, TensorStorageMetadata)):
        return "a tensor"
    return "a value" if isinstance(leaf, BytesStorageMetadata) else f"a {type(leaf).__name__}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _can_cast(was: torch.dtype, wanted: torch.dtype) -> bool:
    return all(_name(dtype) in DTYPES and DTYPES[_name(dtype)].is_floating for dtype in (was, wanted))


def empty_state(metadata: Metadata, keys: Iterable[str] | None = None) -> STATE_DICT_TYPE:
    """A flat target on the CPU for ``keys`` of the checkpoint, or all; tied keys share a tensor, values are None."""
    leaves: STATE_DICT_TYPE = {}
    chosen = list(metadata.state_dict_metadata if keys is None else keys)
    stored_here = set(chosen)
    tied: list[tuple[str, str]] = []
    for key in chosen:
        stored = metadata.state_dict_metadata[key]
        if isinstance(stored, BytesStorageMetadata):
            leaves[key] = None
        elif stored.alias_of in stored_here:
            leaves[key] = None
            tied.append((key, stored.alias_of))
        elif stored.quantizer is not None:
            leaves[key] = empty_quantized(stored.size, stored.properties.dtype, stored.quantizer)
        else:
            tensor = empty_tensor(stored.size, stored.properties.dtype)
            leaves[key] = tensor.numpy() if stored.kind == "numpy" else tensor
    for key, first in tied:
        alike = _requires_grad(metadata, key) == _requires_grad(metadata, first)
        leaves[key] = leaves[first] if alike else leaves[first].detach()
    return leaves


def _requires_grad(metadata: Metadata, key: str) -> bool:
    stored = metadata.state_dict_metadata[key]
    return isinstance(stored, TensorStorageMetadata) and stored.properties.requires_grad
