"""torch's helpers that take the state of a model and its optimizers apart and put it back, as they are.

They belong to models (FSDP, DDP, tensor parallel, compiled), not to checkpoints: what they give goes into any storage.
"""

from __future__ import annotations

from torch.distributed.checkpoint.state_dict import (
    FQNS_T,
    DictValueType,
    ListDictValueType,
    OptimizerStateType,
    PrimitiveType,
    StateDictOptions,
    ValueType,
    _patch_model_state_dict,  # noqa: F401 - private in torch, and used by frameworks all the same
    _patch_optimizer_state_dict,  # noqa: F401
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

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
