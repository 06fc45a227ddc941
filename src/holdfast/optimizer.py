"""torch's loader of sharded optimizer states (FSDP1), under torch's module name."""

from __future__ import annotations

from holdfast._torch_classes.torchs import optimizer as _torchs

__all__ = ["load_sharded_optimizer_state_dict"]

load_sharded_optimizer_state_dict = _torchs.load_sharded_optimizer_state_dict
"""torch's own function: the state of an optimizer under FSDP1, from a sharded checkpoint in torch's format."""
