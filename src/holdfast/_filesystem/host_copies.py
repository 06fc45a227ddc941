"""The state copied to the CPU in one go, so that training may change it while it is written."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from holdfast._filesystem.loaders import accelerator_type
from holdfast._state.pieces import is_sharded, pieces_of
from holdfast.metadata import STATE_DICT_TYPE


class HostCopyStager:
    """Stages by copying to the CPU; done when ``stage`` returns. ``close`` lets go of what is kept.

    With ``cache_staged_state_dict`` the copies are kept and filled again by the next call: what the call before has
    returned must be written by then.
    """

    _synchronize_after_execute = False

    def __init__(self, cache_staged_state_dict: bool = False) -> None:
        self.cache_staged_state_dict = cache_staged_state_dict
        self.state_dict_cache: STATE_DICT_TYPE | None = None

    @property
    def should_synchronize_after_execute(self) -> bool:
        """No: there is nothing to wait for."""
        return self._synchronize_after_execute

    def stage(self, state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
        """A copy of ``state_dict`` on the CPU."""
        pinned = self.cache_staged_state_dict and accelerator_type() is not None
        staged: STATE_DICT_TYPE = _host_copy(state_dict, self.state_dict_cache, pinned=pinned)
        if self.cache_staged_state_dict:
            self.state_dict_cache = staged
        return staged

    def synchronize_staging(self) -> None:
        """Nothing: ``stage`` has waited already."""

    def close(self) -> None:
        """Let go of the copies that were kept."""
        self.state_dict_cache = None


@torch.no_grad()
def _host_copy(value: Any, kept: Any, *, pinned: bool) -> Any:
    """A copy of ``value``, in the memory of ``kept`` as far as that fits."""
    if isinstance(value, torch.Tensor):
        return _sharded_copy(value, kept) if is_sharded(value) else _tensor_copy(value, kept, pinned=pinned)
    if isinstance(value, Mapping):
        kept = kept if isinstance(kept, dict) else {}
        return {key: _host_copy(entry, kept.get(key), pinned=pinned) for key, entry in value.items()}
    if type(value) in (list, tuple):
        kept = kept if type(kept) is type(value) and len(kept) == len(value) else [None] * len(value)
        return type(value)(_host_copy(one, other, pinned=pinned) for one, other in zip(value, kept, strict=True))
    return copy.deepcopy(value)


def _tensor_copy(tensor: torch.Tensor, kept: Any, *, pinned: bool) -> torch.Tensor:
    tensor = tensor.detach()
    if isinstance(kept, torch.Tensor) and not is_sharded(kept) and _fits(kept, tensor):
        return kept.copy_(tensor)
    made = tensor.clone() if tensor.is_cpu else tensor.cpu()
    return made.pin_memory() if pinned and made.numel() and not made.is_quantized else made


def _sharded_copy(tensor: torch.Tensor, kept: Any) -> torch.Tensor:
    if isinstance(kept, torch.Tensor) and is_sharded(kept):
        old, new = pieces_of("", kept), pieces_of("", tensor)
        if (old.size, old.dtype) == (new.size, new.dtype) and [p.box for p in old.pieces] == [
            p.box for p in new.pieces
        ]:
            for mine, theirs in zip(old.pieces, new.pieces, strict=True):
                mine.tensor.copy_(theirs.tensor)
            return kept
    # Only leaves can be copied as they are, and a copy needs no gradient.
    tensor = tensor.detach() if tensor.requires_grad else tensor
    copied: torch.Tensor = copy.deepcopy(tensor) if tensor.device.type == "cpu" else tensor.to(device="cpu")
    return copied


def _fits(kept: torch.Tensor, tensor: torch.Tensor) -> bool:
    return (type(kept), kept.dtype, kept.shape) == (type(tensor), tensor.dtype, tensor.shape)
