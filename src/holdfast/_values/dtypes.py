"""The table of element types: every dtype that torch has, by its name without ``torch.``.

The table is part of the format: an entry's item size and safetensors name never change. Never imports torch, so that
a checkpoint can be described without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtype:
    """One element type.

    ``safetensors`` is its name in a safetensors header, or None where readers from version 0.4 on do not all know it:
    then it is stored as U8, with one more trailing dimension of ``itemsize`` when that is more than 1.
    ``is_floating`` holds for the real floating types that can be cast to each other.
    """

    name: str
    itemsize: int
    safetensors: str | None
    is_floating: bool


def _floating(name: str, itemsize: int, safetensors: str | None = None) -> Dtype:
    return Dtype(name=name, itemsize=itemsize, safetensors=safetensors, is_floating=True)


def _other(name: str, itemsize: int, safetensors: str | None = None) -> Dtype:
    return Dtype(name=name, itemsize=itemsize, safetensors=safetensors, is_floating=False)


_TABLE = (
    _floating("float64", 8, "F64"),
    _floating("float32", 4, "F32"),
    _floating("float16", 2, "F16"),
    _floating("bfloat16", 2, "BF16"),
    _floating("float8_e4m3fn", 1, "F8_E4M3"),
    _floating("float8_e5m2", 1, "F8_E5M2"),
    # safetensors has names for these (and for complex64 and float4), but only its later versions read them.
    _floating("float8_e4m3fnuz", 1),
    _floating("float8_e5m2fnuz", 1),
    _floating("float8_e8m0fnu", 1),
    # Two numbers in one byte: torch has no conversion to or from it, so it counts as raw bytes.
    _other("float4_e2m1fn_x2", 1),
    _other("bool", 1, "BOOL"),
    _other("uint8", 1, "U8"),
    _other("uint16", 2, "U16"),
    _other("uint32", 4, "U32"),
    _other("uint64", 8, "U64"),
    _other("int8", 1, "I8"),
    _other("int16", 2, "I16"),
    _other("int32", 4, "I32"),
    _other("int64", 8, "I64"),
    _other("complex32", 4),
    _other("complex64", 8),
    _other("complex128", 16),
    _other("bits1x8", 1),
    _other("bits2x4", 1),
    _other("bits4x2", 1),
    _other("bits8", 1),
    _other("bits16", 2),
    _other("qint8", 1),
    _other("qint32", 4),
    _other("quint8", 1),
    _other("quint2x4", 1),
    _other("quint4x2", 1),
    *(_other(f"int{bits}", 1) for bits in range(1, 8)),
    *(_other(f"uint{bits}", 1) for bits in range(1, 8)),
)

DTYPES: Mapping[str, Dtype] = MappingProxyType({dtype.name: dtype for dtype in _TABLE})
