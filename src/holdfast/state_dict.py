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
DictValueType = _torchs.DictValueType
ListDictValueType = _torchs.ListDictValueType
OptimizerStateType = _torchs.OptimizerStateType
PrimitiveType = _torchs.PrimitiveType
StateDictOptions = _torchs.StateDictOptions
ValueType = _torchs.ValueType
get_model_state_dict = _torchs.get_model_state_dict
get_optimizer_state_dict = _torchs.get_optimizer_state_dict
get_state_dict = _torchs.get_state_dict
set_model_state_dict = _torchs.set_model_state_dict
set_optimizer_state_dict = _torchs.set_optimizer_state_dict
set_state_dict = _torchs.set_state_dict
# Private in torch, and used by frameworks all the same.
_init_optim_state = _torchs._init_optim_state
_patch_model_state_dict = _torchs._patch_model_state_dict
_patch_optimizer_state_dict = _torchs._patch_optimizer_state_dict
