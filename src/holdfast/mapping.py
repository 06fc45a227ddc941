"""``Mapping`` and its rules: how the tensors of files (outside) and those of a state (inside) belong together."""

from __future__ import annotations

from holdfast._mapping.mappings import Mapping
from holdfast._mapping.matching import Fault
from holdfast._mapping.rules import (
    Cast,
    Concat,
    Deinterleave,
    Drop,
    Interleave,
    Move,
    Offset,
    Split,
    Stack,
    Tie,
    Transpose,
    Unstack,
)

__all__ = [
    "Cast",
    "Concat",
    "Deinterleave",
    "Drop",
    "Fault",
    "Interleave",
    "Mapping",
    "Move",
    "Offset",
    "Split",
    "Stack",
    "Tie",
    "Transpose",
    "Unstack",
]
