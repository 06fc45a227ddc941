"""torch's functions that flatten a state and put it together again, under torch's module name, as they are."""

from __future__ import annotations

from holdfast._torch_classes.torchs import _nested_dict as _torchs

__all__ = ["FLATTEN_MAPPING", "flatten_state_dict", "unflatten_state_dict"]

FLATTEN_MAPPING = _torchs.FLATTEN_MAPPING
flatten_state_dict = _torchs.flatten_state_dict
unflatten_state_dict = _torchs.unflatten_state_dict
