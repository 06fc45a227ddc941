"""The planners used when none is given: the whole state out, the whole target in; and the functions that torch has
beside them, for planners that are made of those.

The save planner makes items of every leaf of the flattened state and marks ties.
"""

from __future__ import annotations

import dataclasses
import io
import warnings
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from holdfast._save_plan.plans import CheckValue, LocalLeaves, as_planned, local_leaves, plan_together, without_replicas
from holdfast._state.nested import empty_dicts, flatten, path_mapping, stored_paths, unflatten
from holdfast._state.pieces import Pieces, piece_at, piece_holding
from holdfast._state.stateful_values import unusual_versions
from holdfast._state.tensors import ComposedTensor, as_tensor
from holdfast._torch_codec.pickles import serialize_object
from holdfast._values.box import Box, whole
from holdfast._values.lazy import LazyList
from holdfast._values.records import emptied
from holdfast.default_planner.load_planner import NO_METADATA, DefaultLoadPlanner
from holdfast.default_planner.other_keys import AnyMapping, check_mapping, saved_outside
from holdfast.default_planner.targets import chosen_keys, empty_state
from holdfast.errors import InvalidStateError
from holdfast.metadata import (
    STATE_DICT_TYPE,
    ChunkStorageMetadata,
    Containers,
    Metadata,
    MetadataIndex,
    Path,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    Versions,
)
from holdfast.planner import (
    LoadPlan,
    Memory,
    SavePlan,
    SavePlanner,
    WriteColumns,
    WriteItem,
    WriteItemType,
    is_overridden,
)
from holdfast.planner_helpers import tiling_faults
from holdfast.storage import ValueBuffer

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata

__all__ = [
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "_EmptyStateDictLoadPlanner",
    "_validate_global_plan",
    "create_default_global_load_plan",
    "create_default_global_save_plan",
    "create_default_local_load_plan",
    "create_default_local_save_plan",
    "dedup_save_plans",
    "dedup_tensors",
]

_DATA_HOOKS = "resolve_data", "lookup_object", "transform_object"


class DefaultSavePlanner(SavePlanner):
    """Saves every leaf of the state; subclass it and override ``lookup_object`` or ``transform_object``.

    Args:
        flatten_state_dict: take nested dicts and lists apart; without it, the state is a dict of keys to leaves.
        flatten_sharded_tensors: for torch's sake; shards that are themselves sharded are always taken apart.
        dedup_replicated_tensors: for torch's sake; has no effect and warns.
        dedup_save_to_lowest_rank: what several ranks hold is written by the lowest of them, instead of balanced.
        enable_plan_caching: for torch's sake; has no effect. Ranks never plan the same twice, unless a subclass makes
            plans of its own (``create_local_plan``, ``create_global_plan``, ``finish_plan``).
        replica_check: how ranks compare what they should have in common.
        may_differ: keys, what keys begin with, or patterns of them, whose contents may differ between ranks, as those
            of buffers of modules may: the lowest rank's are saved, and the metadata tells.
        mapping: as in SaveOptions.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = False,
        *,
        replica_check: Literal["sample", "all", "off"] = "sample",
        may_differ: Collection[str] = (),
        mapping: AnyMapping | None = None,
    ) -> None:
        if mapping is not None:
            check_mapping(mapping)
        self.mapping = mapping
        if dedup_replicated_tensors is not None:
            warnings.warn(
                "dedup_replicated_tensors has no effect: what several ranks hold is always written once",
                FutureWarning,
                stacklevel=2,
            )
        self.flatten_state_dict = flatten_state_dict
        self.flatten_sharded_tensors = flatten_sharded_tensors
        self.dedup_save_to_lowest_rank = dedup_save_to_lowest_rank
        self.enable_plan_caching = enable_plan_caching
        if replica_check not in ("sample", "all", "off"):
            raise ValueError(f"replica_check is 'sample', 'all' or 'off', not {replica_check!r}")
        self.replica_check = replica_check
        self.may_differ = tuple(may_differ)
        self.buffers: frozenset[str] = frozenset()
        self.ranks = 1
        self.is_apart = False
        self.keeps_empty_dicts = True
        self.check_value: CheckValue | None = None
        self.mappings: dict[str, Path] = {}
        self.versioned: dict[str, Mapping[Any, Any]] = {}
        self._pieces: dict[str, Pieces] = {}
        self._memory_of: dict[str, Memory] = {}

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the state, flattened."""
        if self.flatten_state_dict:
            self.versioned = {}
            # torch's format has no place for the classes of containers, nor for empty dicts.
            found: Containers | None = {} if self.keeps_empty_dicts else None
            state_dict, self.mappings = flatten(state_dict, self.versioned, found)
            self.containers = {path: emptied(like) for path, like in (found or {}).items()}
            if not self.keeps_empty_dicts:
                for key in empty_dicts(state_dict):
                    del state_dict[key], self.mappings[key]
        if self.mapping is not None:
            state_dict, self.mappings, self.buffers = saved_outside(
                self.mapping, state_dict, self.mappings, self.buffers
            )
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """One item for each leaf; InvalidStateError for a tensor that has nothing to store."""
        return self._surveyed(self.replica_check if self.ranks > 1 else "off")[1]

    def survey(self) -> tuple[LocalLeaves, SavePlan] | None:
        """The leaves and their plan, for ranks that compare what they hold by layout, without a look at contents.

        None where a subclass makes plans of its own.
        """
        if is_overridden(self, DefaultSavePlanner, "create_local_plan", "create_global_plan", "finish_plan"):
            return None
        return self._surveyed("off")

    def _surveyed(self, replica_check: str) -> tuple[LocalLeaves, SavePlan]:
        lenient = self._lenient() if self.ranks > 1 else frozenset[str]()
        # A subclass may make something else of a value that cannot be stored.
        is_plain = not is_overridden(self, DefaultSavePlanner, "resolve_row", *_DATA_HOOKS)
        local = local_leaves(self.state_dict, lenient=lenient, check_value=self.check_value if is_plain else None)
        columns = local.columns if replica_check == "off" else local.looked_at(replica_check)
        self._pieces, self._memory_of = local.pieces, local.memory
        self.plan = SavePlan(LazyList(columns), planner_data=self.mappings if self.flatten_state_dict else None)
        return local, self.plan

    def _lenient(self) -> frozenset[str]:
        """The keys that may differ between ranks: those of buffers, and those that the user named."""
        named = [
            key
            for key in (self.state_dict if self.may_differ else ())
            if any(key.startswith(f"{each}.") or fnmatchcase(key, each) for each in self.may_differ)
        ]
        return self.buffers.intersection(self.state_dict).union(named)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Who writes what, and the metadata of what they write together, checked to be whole."""
        all_plans, metadata = plan_together(
            all_plans, to_lowest_rank=self.dedup_save_to_lowest_rank, is_whole=not self.is_apart
        )
        # A subclass may have put something else into the plans.
        metadata = self.with_paths(metadata, [self.mappings, *map(attrgetter("planner_data"), all_plans)])
        self.global_plan, self.metadata = all_plans, metadata
        return all_plans, metadata

    def with_paths(self, metadata: Metadata, planner_data: Iterable[object]) -> Metadata:
        """``metadata`` with the paths of its keys, as far as the planner's data of the ranks has them."""
        if not self.flatten_state_dict:
            return metadata
        paths: dict[str, Path] = {}
        known: set[int] = set()
        for each in planner_data:
            if id(each) not in known:
                known.add(id(each))
                paths.update(path_mapping(each) or {})
        stored = metadata.state_dict_metadata
        if len(paths) > len(stored):
            paths = {key: path for key, path in paths.items() if key in stored}
        return dataclasses.replace(metadata, planner_data=paths, paths=paths)

    def versions(self) -> Versions:
        """With which versions the modules of this rank's state are saved."""
        return unusual_versions(self.versioned) if self.versioned else {}

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """``new_plan``."""
        self.plan = new_plan
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The tensor or value of ``write_item``, transformed."""
        data = self.transform_object(write_item, self.lookup_object(write_item.index))
        if write_item.tensor_data is None or not isinstance(data, torch.Tensor):
            return data
        chunk = write_item.tensor_data.chunk
        return self._cut(write_item.index.fqn, data, Box(tuple(chunk.offsets), tuple(chunk.sizes)))

    def resolve_row(self, columns: WriteColumns, row: int) -> torch.Tensor | io.BytesIO:
        """The same for a row; the item is made only where a subclass may look at it."""
        if not is_overridden(self, DefaultSavePlanner, *_DATA_HOOKS):
            which, _, length, _, is_shard = columns.rows[row]
            leaf = self.state_dict[columns.keys[which]]
            if columns.heads[which] is None and not isinstance(leaf, ComposedTensor):
                return ValueBuffer(leaf, partial(serialize_object, key=columns.keys[which]))
            if not is_shard and isinstance(leaf, torch.Tensor) and list(leaf.shape) == length[: leaf.dim()]:
                return leaf.detach() if leaf.requires_grad else leaf
        return super().resolve_row(columns, row)

    def plain_memory(self) -> Mapping[str, Memory]:
        """What was found when the leaves were looked at; nothing where a subclass may hand out something else."""
        return {} if is_overridden(self, DefaultSavePlanner, "resolve_row", *_DATA_HOOKS) else self._memory_of

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The leaf that ``index`` names, or the piece of it that this rank holds there; override it to save another."""
        leaf = self.state_dict[index.fqn]
        pieces = self._pieces.get(index.fqn)
        if pieces is None or index.offset is None:
            return leaf
        offsets = tuple(index.offset)
        piece = piece_at(pieces, offsets) or piece_holding(pieces, Box(offsets, (1,) * len(offsets)))
        if piece is None:
            raise InvalidStateError(f"this rank does not hold {index.fqn!r} at {list(index.offset)}", key=index.fqn)
        return piece.tensor

    def _cut(self, key: str, tensor: torch.Tensor, box: Box) -> torch.Tensor:
        """The part of what this rank holds of ``key`` that is to be written, where it is not all of it."""
        if tensor.shape == box.lengths:
            return tensor
        leaf, pieces = self.state_dict.get(key), self._pieces.get(key)
        if pieces is not None:
            piece = piece_holding(pieces, box)
            held = None if piece is None else piece.box
        else:
            held = whole(leaf.shape) if isinstance(leaf, (torch.Tensor, np.ndarray)) else None
        if held is None or tensor.shape != held.lengths or not held.contains(box):
            return tensor  # someone's planner means something else: storage judges it
        return tensor[box.relative_to(held).slices()]

    def transform_object(self, write_item: WriteItem, object: Any) -> torch.Tensor | io.BytesIO:
        """What storage gets for ``object``; override it to change values on their way out."""
        if write_item.type is WriteItemType.BYTE_IO:
            value = object.context if isinstance(object, ComposedTensor) else object
            return ValueBuffer(value, partial(serialize_object, key=write_item.index.fqn))
        if isinstance(object, np.ndarray):
            return as_tensor(write_item.index.fqn, object)
        tensor: torch.Tensor = object.detach() if object.requires_grad else object
        return tensor


class _EmptyStateDictLoadPlanner(DefaultLoadPlanner):
    """Fills an empty dict with ``keys`` of the checkpoint, nested as they were saved, on the CPU; None means all.

    A key stands for itself and all below it: "model" and "model.layers.0" are good names. MismatchError for a name that
    stands for nothing, unless ``allow_partial_load``. The options are those of DefaultLoadPlanner.
    """

    def __init__(self, keys: Collection[str] | None = None, *args: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.mapping is not None:
            raise ValueError("a target that is made from the checkpoint has its keys; leave out mapping")
        self.keys = keys

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Fill ``state_dict``, which must be empty, with what is to be read."""
        if state_dict:
            raise InvalidStateError("a target that is made from the checkpoint must be empty; give an empty dict")
        if metadata is None:
            raise InvalidStateError(NO_METADATA)
        metadata = self.understood(metadata)
        chosen = chosen_keys(metadata, self.keys, allow_missing=self.allow_partial_load)
        leaves, paths = empty_state(metadata, chosen), stored_paths(metadata)
        super().set_up_planner({}, None, is_coordinator)
        self.metadata = metadata
        self.mappings = {key: paths.get(key, (key,)) for key in chosen}
        self.state_dict = leaves
        self.original_state_dict = state_dict
        is_nested = self.flatten_state_dict
        state_dict.update(unflatten(leaves, self.mappings, metadata.containers) if is_nested else leaves)


def create_default_local_save_plan(state_dict: STATE_DICT_TYPE, is_coordinator: bool) -> SavePlan:
    """An item for each leaf of the flat ``state_dict`` that this rank holds, whether or not it coordinates."""
    return SavePlan(LazyList(local_leaves(state_dict).columns))


def create_default_global_save_plan(
    all_plans: list[SavePlan], rewrite_index_hints: bool = True
) -> tuple[list[SavePlan], Metadata]:
    """``all_plans``, with hints of where each item is in the metadata, and that metadata.

    The plans must have no duplicates (see ``dedup_save_plans``) and make every tensor up exactly: InvalidStateError.
    """
    return as_planned(all_plans, rewrite_index_hints=rewrite_index_hints)


def _create_default_local_metadata(state_dict: STATE_DICT_TYPE) -> Metadata:
    """What a checkpoint of the flat ``state_dict`` would say of itself; of a DTensor, as in torch, this rank's part."""
    plan = create_default_local_save_plan(state_dict, is_coordinator=True)
    found = plan_together([plan], is_whole=False)[1].state_dict_metadata
    # These know what all ranks hold, and this one may hold nothing of them.
    sharded = {key: leaf.metadata() for key, leaf in state_dict.items() if hasattr(leaf, "local_shards")}
    return Metadata({key: _all_shards(sharded[key]) if key in sharded else found[key] for key in state_dict})


def _all_shards(described: ShardedTensorMetadata) -> TensorStorageMetadata:
    shards = described.shards_metadata
    chunks = [ChunkStorageMetadata(torch.Size(each.shard_offsets), torch.Size(each.shard_sizes)) for each in shards]
    its = described.tensor_properties
    properties = TensorProperties(its.dtype, its.layout, its.requires_grad, its.memory_format, its.pin_memory)
    return TensorStorageMetadata(properties, torch.Size(described.size), chunks)


def create_default_local_load_plan(state_dict: STATE_DICT_TYPE, metadata: Metadata, strict: bool = True) -> LoadPlan:
    """What to read for each leaf of the flat ``state_dict``; MismatchError where it differs from the checkpoint.

    Without ``strict``, keys that the checkpoint does not have are left out.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, allow_partial_load=not strict)
    planner.set_up_planner(dict(state_dict), metadata)
    return planner.create_local_plan()


def create_default_global_load_plan(all_plans: list[LoadPlan]) -> list[LoadPlan]:
    """``all_plans``: every rank reads for itself."""
    return all_plans


def dedup_save_plans(all_plans: list[SavePlan], save_to_lowest_rank: bool = False) -> list[SavePlan]:
    """The plans with every item in one of those that have it: so that all write about as much, or in the first."""
    return without_replicas(all_plans, to_lowest_rank=save_to_lowest_rank)


def dedup_tensors(all_plans: list[SavePlan]) -> list[SavePlan]:
    """The plans with every item in the first of those that have it."""
    return without_replicas(all_plans, to_lowest_rank=True)


def _validate_global_plan(global_plan: list[SavePlan], metadata: Metadata) -> list[str]:
    """What is wrong with the chunks of ``metadata``, one message for each key: outside, overlapping, or not enough."""
    return [f"key:{key} {detail}" for key, detail in tiling_faults(metadata)]
