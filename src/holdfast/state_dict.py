"""torch's helpers that take the state of a model and its optimizers apart and put it back, as they are.

They belong to models (FSDP, DDP, tensor parallel, compiled), not to checkpoints: what they give goes into any storage.
"""

from __future__ import annotations

from holdfast._torch_classes.torchs import state_dict as _torchs

__all__ = [
    "FQNS_T",
    "DictValueType",
    "ListDictValueType",
    "OptimizerStateType",
    "PrimitiveType",
    "StateDictOptions",
    "ValueType",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

FQNS_T = _torchs.FQNS_T
"""torch's type of a set of names of parameters."""
DictValueType = _torchs.DictValueType
"""torch's type of a dict in a state."""
ListDictValueType = _torchs.ListDictValueType
"""torch's type of a list of dicts in a state."""
OptimizerStateType = _torchs.OptimizerStateType
"""torch's type of the state of optimizers."""
PrimitiveType = _torchs.PrimitiveType
"""torch's type of a leaf of a state."""
StateDictOptions = _torchs.StateDictOptions
"""torch's own options of these functions: whether a state is full or sharded, and on the CPU."""
ValueType = _torchs.ValueType
"""torch's type of anything in a state."""
get_model_state_dict = _torchs.get_model_state_dict
"""torch's own function: the state of a model, with the names that it has without wrappers."""
get_optimizer_state_dict = _torchs.get_optimizer_state_dict
"""torch's own function: the state of optimizers, with names of parameters instead of numbers."""
get_state_dict = _torchs.get_state_dict
"""torch's own function: the states of a model and of its optimizers."""
set_model_state_dict = _torchs.set_model_state_dict
"""torch's own function: gives such a state to a model, and returns the keys that did not fit."""
set_optimizer_state_dict = _torchs.set_optimizer_state_dict
"""torch's own function: gives such a state to optimizers."""
set_state_dict = _torchs.set_state_dict
"""torch's own function: gives such states to a model and its optimizers."""
# Private in torch, and used by frameworks all the same.
_init_optim_state = _torchs._init_optim_state
_patch_model_state_dict = _torchs._patch_model_state_dict
_patch_optimizer_state_dict = _torchs._patch_optimizer_state_dict
