"""Tensors that are stored as several: subclasses with ``__tensor_flatten__``, and sub-byte quantised tensors.

The class itself is code and never stored. What is stored are the inner tensors, under the key and the name of the
attribute, and the context, so that loading into a target with another context is an error and never a wrong result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from holdfast._state.pieces import is_sharded
from holdfast._state.tensors import quantizer_of
from holdfast.errors import InvalidStateError

CONTEXT_KEY = "__context__"

# So many elements share a byte, row by row in a way of torch's own: only the storage has bytes to keep.
PACKED = {torch.quint4x2: 2, torch.quint2x4: 4}


@dataclass(frozen=True, slots=True)
class ComposedTensor:
    """The context of a tensor subclass, as a leaf of the state; ``tensor`` is the subclass instance."""

    tensor: torch.Tensor
    context: Any


def is_composed(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a subclass that is stored as its inner tensors."""
    if is_sharded(tensor):
        return False
    return tensor.dtype in PACKED or (
        type(tensor) not in (torch.Tensor, torch.nn.Parameter)
        and hasattr(tensor, "__tensor_flatten__")
        and not tensor.is_nested
        and type(tensor).__name__ != "FakeTensor"
    )


def inner_parts(key: str, tensor: torch.Tensor) -> tuple[dict[str, torch.Tensor], Any]:
    """The inner tensors of ``tensor`` by attribute name, and its context."""
    if tensor.dtype in PACKED:
        packed = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        *rows, columns = tensor.shape or (1,)
        if len(packed) != math.prod(rows) * -(-columns // PACKED[tensor.dtype]):
            raise InvalidStateError(f"{key!r} is a view of a packed quantised tensor; store the whole of it", key=key)
        quantizer = quantizer_of(tensor)
        return {"packed": packed}, (tensor.dtype, tensor.shape, tuple(map(_hashable, (quantizer or {}).items())))
    flatten: Any = tensor.__tensor_flatten__  # type: ignore[attr-defined]
    names, context = flatten()
    parts = {name: getattr(tensor, name) for name in names}
    for name, part in parts.items():
        if not isinstance(part, torch.Tensor):
            raise InvalidStateError(
                f"{key!r}: {type(tensor).__name__}.__tensor_flatten__ names {name!r}, which is not a tensor", key=key
            )
    return parts, context


def _hashable(entry: tuple[str, Any]) -> tuple[str, Any]:
    name, value = entry
    return name, tuple(value) if isinstance(value, list) else value
