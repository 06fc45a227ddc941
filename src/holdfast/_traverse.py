"""torch's functions that walk over a state, under torch's module name, as they are."""

from __future__ import annotations

from holdfast._torch_classes.torchs import _traverse as _torchs

__all__ = ["OBJ_PATH", "get_element", "set_element", "traverse_state_dict"]

OBJ_PATH = _torchs.OBJ_PATH
get_element = _torchs.get_element
set_element = _torchs.set_element
traverse_state_dict = _torchs.traverse_state_dict
