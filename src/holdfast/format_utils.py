"""torch's format utilities under torch's names: ``.pt`` files to checkpoints and back, and loading one on many ranks.

``python -m holdfast.format_utils torch_to_dcp SRC DST`` (or ``dcp_to_torch``) does the first from a shell; ``holdfast
convert`` does that and more.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from holdfast._state.nested import flatten
from holdfast._state.pieces import is_sharded, pieces_of
from holdfast._state.tensors import empty_tensor
from holdfast._torch_codec.pickles import read_pt, serialize_object
from holdfast._values.box import Box
from holdfast.default_planner import DefaultLoadPlanner
from holdfast.default_planner import _EmptyStateDictLoadPlanner as _EmptyStateDictLoadPlanner
from holdfast.errors import CheckpointError, Difference, InternalError, MismatchError
from holdfast.interop import convert
from holdfast.metadata import (
    STATE_DICT_TYPE,
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from holdfast.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from holdfast.planner_helpers import can_cast, dtype_difference
from holdfast.state_dict_loader import _load_state_dict as _load_state_dict
from holdfast.storage import StorageReader, ValueBuffer, finished
from holdfast.utils import _DistWrapper

__all__ = ["BroadcastingTorchSaveReader", "DynamicMetaLoadPlanner", "dcp_to_torch_save", "torch_save_to_dcp"]

_Path = str | os.PathLike[str]
_Stored = Mapping[str, STORAGE_TYPES]


def dcp_to_torch_save(dcp_checkpoint_dir: _Path, torch_save_path: _Path, *, allow_pickle: bool = False) -> None:
    """Write a checkpoint (torch's format or the native one) as a file that torch.load reads, replacing one there."""
    convert(dcp_checkpoint_dir, torch_save_path, to="pt", allow_pickle=allow_pickle, overwrite=True)


def torch_save_to_dcp(torch_save_path: _Path, dcp_checkpoint_dir: _Path, *, allow_pickle: bool = False) -> None:
    """Write a file that torch.save made as a checkpoint in torch's format, replacing one there."""
    convert(torch_save_path, dcp_checkpoint_dir, to="torch", allow_pickle=allow_pickle, overwrite=True)


class DynamicMetaLoadPlanner(DefaultLoadPlanner):
    """Loads every leaf of the target from storage that has no metadata, such as BroadcastingTorchSaveReader.

    The target says what is wanted; whether the file has it is found out when it is read. ``allow_partial_load`` excuses
    keys that it does not have.
    """

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the target, and make the metadata of a checkpoint that would fit it."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.metadata = Metadata({key: _expected(key, leaf) for key, leaf in self.state_dict.items()})


def _expected(key: str, leaf: object) -> STORAGE_TYPES:
    """What a file has to have under ``key``: one chunk, whatever part of it this rank wants."""
    if not isinstance(leaf, torch.Tensor):
        return BytesStorageMetadata()
    if is_sharded(leaf):
        pieces = pieces_of(key, leaf)
        size, dtype = pieces.size, pieces.dtype
    else:
        size, dtype = leaf.shape, leaf.dtype
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype), size, [ChunkStorageMetadata(torch.Size([0] * len(size)), size)]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shares:
    """What the coordinator tells each rank: how many take part, and which keys any of them wants, in order."""

    ranks: int
    keys: tuple[str, ...]


class BroadcastingTorchSaveReader(StorageReader):
    """Reads a ``.pt`` file on rank ``coordinator_rank`` only; the others are sent the tensors and keep their parts.

    To be used with DynamicMetaLoadPlanner, by one process or by all ranks of the default process group. The file is
    mapped, so that one tensor at a time is in memory. A key that is missing, or of another shape or dtype than in a
    target, is a MismatchError on every rank before any target is touched.
    """

    def __init__(
        self, checkpoint_id: _Path | None = None, coordinator_rank: int = 0, *, allow_pickle: bool = False
    ) -> None:
        self.checkpoint_id = checkpoint_id
        self.coordinator_rank = coordinator_rank
        self.allow_pickle = allow_pickle

    def reset(self, checkpoint_id: _Path | None = None) -> None:
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Nothing: the planner makes the metadata from the target."""
        return Metadata({})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """ValueError unless it is known what to read."""
        if self.checkpoint_id is None:
            raise ValueError("BroadcastingTorchSaveReader needs the path of a file, as its own or load's checkpoint_id")

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        keys = dict.fromkeys(item.storage_index.fqn for item in plan.items)
        return replace(plan, storage_data=_Shares(ranks=1, keys=tuple(keys)))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans, each with the keys that any rank wants: all ranks take part in each of them."""
        if len(plans) > 1 and len(plans) != dist.get_world_size():
            raise ValueError("BroadcastingTorchSaveReader works on all ranks of the default process group, or on one")
        wanted = dict.fromkeys(key for plan in plans for key in plan.storage_data.keys)
        shares = _Shares(ranks=len(plans), keys=tuple(wanted))
        return [replace(plan, storage_data=shares) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the file where this rank is the one to do so, and fill the targets."""
        shares = plan.storage_data
        if not isinstance(shares, _Shares):
            raise InternalError("the plan did not pass through prepare_global_plan of this storage")
        together = _DistWrapper(None, shares.ranks > 1, self.coordinator_rank if shares.ranks > 1 else 0)
        leaves: STATE_DICT_TYPE = {}

        def announce() -> tuple[_Stored, STATE_DICT_TYPE]:
            state = read_pt(self.checkpoint_id or "", allow_pickle=self.allow_pickle)
            leaves.update(flatten(state, None, {})[0] if getattr(planner, "flatten_state_dict", True) else state)
            found = {key: leaves[key] for key in shares.keys if key in leaves}
            values = {key: leaf for key, leaf in found.items() if not isinstance(leaf, torch.Tensor)}
            return {key: _expected(key, leaf) for key, leaf in found.items()}, values

        stored, values = together.broadcast(f"reading {os.fspath(self.checkpoint_id or '')!r}", announce)
        together.all_gather("comparing the file with the target", lambda: _check(plan, planner, stored))
        plan.items[:] = [item for item in plan.items if item.storage_index.fqn in stored]
        items: dict[str, list[ReadItem]] = {key: [] for key in stored}
        for item in plan.items:
            items[item.storage_index.fqn].append(item)
        for key, entry in stored.items():
            if isinstance(entry, TensorStorageMetadata):
                _fill(items[key], planner, _shared(leaves.get(key), entry, together))
                continue
            for item in items[key]:
                planner.load_bytes(item, ValueBuffer(values[key], serialize_object))
        return finished(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: _Path) -> bool:
        return os.path.isfile(checkpoint_id)


def _check(plan: LoadPlan, planner: LoadPlanner, stored: _Stored) -> None:
    """MismatchError unless the file has all that ``plan`` wants; the planner is told of missing keys it excuses."""
    metadata = getattr(planner, "metadata", None)  # which DynamicMetaLoadPlanner made of the target
    wanted: _Stored = metadata.state_dict_metadata if isinstance(metadata, Metadata) else {}
    kinds = {item.storage_index.fqn: item.type for item in plan.items}
    found = (_difference(key, kind, stored.get(key), wanted.get(key)) for key, kind in kinds.items())
    may_cast = getattr(planner, "cast", False)
    faults = [each for each in found if each is not None and not (may_cast and each.kind == "dtype" and can_cast(each))]
    if isinstance(planner, DefaultLoadPlanner) and planner.allow_partial_load:
        planner.differences += [each for each in faults if each.kind == "missing"]
        faults = [each for each in faults if each.kind != "missing"]
    if faults:
        raise MismatchError.of(faults, advice="Fix the target, or load another file.")


def _difference(
    key: str, kind: LoadItemType, stored: STORAGE_TYPES | None, wanted: STORAGE_TYPES | None
) -> Difference | None:
    if stored is None:
        return Difference(key=key, kind="missing", stored="nothing", wanted="a leaf")
    if (kind is LoadItemType.TENSOR) != isinstance(stored, TensorStorageMetadata):
        kinds = ("a value", "a tensor") if kind is LoadItemType.TENSOR else ("a tensor", "a value")
        return Difference(key=key, kind="kind", stored=kinds[0], wanted=kinds[1])
    if not isinstance(stored, TensorStorageMetadata) or not isinstance(wanted, TensorStorageMetadata):
        return None
    if stored.size != wanted.size:
        return Difference(key=key, kind="shape", stored=str(list(stored.size)), wanted=str(list(wanted.size)))
    was, dtype = stored.properties.dtype, wanted.properties.dtype
    return None if was == dtype else dtype_difference(key, was, dtype)


def _fill(items: list[ReadItem], planner: LoadPlanner, tensor: torch.Tensor) -> None:
    for item in items:
        box = Box(tuple(item.storage_offsets), tuple(item.lengths))
        target = planner.resolve_tensor(item).detach()
        target.copy_(tensor[box.slices()])
        planner.commit_tensor(item, target)


def _shared(tensor: torch.Tensor | None, stored: TensorStorageMetadata, together: _DistWrapper) -> torch.Tensor:
    """The tensor, on every rank; its bits travel, because not every backend knows every dtype."""
    if not together.use_dist:
        assert tensor is not None
        return tensor
    if tensor is None:
        tensor = empty_tensor(stored.size, stored.properties.dtype)
    sent = tensor.detach().contiguous().reshape(-1).view(torch.uint8).to(_transport())
    if sent.numel():
        dist.broadcast(sent, src=together.global_coordinator_rank)
    return sent.view(stored.properties.dtype).view(stored.size)


def _transport() -> torch.device:
    """Where tensors have to be to be sent: the CPU, if the process group has a backend for it."""
    if "gloo" in str(dist.get_backend_config()) or not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the conversion that ``arguments`` ask for and return the exit code."""
    modes = {"torch_to_dcp": torch_save_to_dcp, "dcp_to_torch": dcp_to_torch_save}
    parser = argparse.ArgumentParser(prog="python -m holdfast.format_utils", description="Convert a checkpoint.")
    parser.add_argument("mode", choices=list(modes), help="the direction of the conversion")
    parser.add_argument("src", help="what to convert: a file, or the directory of a checkpoint")
    parser.add_argument("dst", help="where the result goes; replaced if it is of the same kind")
    parser.add_argument("--allow-pickle", action="store_true", help="also convert pickled values; this runs their code")
    chosen = parser.parse_args(arguments)
    try:
        modes[chosen.mode](chosen.src, chosen.dst, allow_pickle=chosen.allow_pickle)
    except (CheckpointError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"converted {chosen.src} to {chosen.dst}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
