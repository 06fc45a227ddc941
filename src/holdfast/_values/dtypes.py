"""The table of element types, and limits: how large anything in a checkpoint may claim to be.

The table is part of the format: an entry's item size and safetensors name never change. Never imports torch, so that
a checkpoint can be described without it.

Readers check them before they allocate, so that a damaged or hostile file costs an error and not the memory. Writers
check them too, so that nothing is written that cannot be read back. Raising one is compatible, lowering is not.
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
    _other("bcomplex32", 4),  # torch has it since 2.14
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


MAX_MANIFEST_BYTES = 1 << 30
"""The manifest is parsed whole; a gigabyte is far beyond the keys and values of any model."""

MAX_INDEX_BYTES = 8 << 30
"""The index is read whole; 8 GiB describe some hundred million chunks or a petabyte of block digests."""

MAX_METADATA_BYTES = 2 << 30
"""torch's ``.metadata`` is decoded whole; 2 GiB describe some ten million chunks."""

MAX_DIMENSIONS = 64
"""Torch and numpy allow no tensor of more than 64 dimensions."""

MAX_KEY_BYTES = 1 << 16
"""A key is a path of attribute names; 64 KiB of UTF-8 is no honest key."""

MAX_VALUE_DEPTH = 64
"""Values are decoded by recursion, which must end well before the interpreter's own limit."""

MAX_PATH_DEPTH = 256
"""The nesting of a state is walked by recursion, which must end well before the interpreter's own limit."""

MAX_REPEATED_ENTRIES = 1 << 20
"""A container that is in several places of a state is stored in each; below a million entries nobody minds."""

MAX_REPETITION = 16
"""Beyond that, how many entries are stored for each one in memory."""

MAX_HEADER_BYTES = 100_000_000
"""The cap that safetensors itself puts on a header: its library must open every file."""

HEADER_ALIGNMENT = 4096
"""Data starts at a multiple of this in each file, which suits every page size and every O_DIRECT alignment in use."""

LENGTH_BYTES = 8
"""The length that comes before the JSON of a header takes this many bytes."""

MAX_FILES = 1 << 20
"""Each file costs a handle and an entry of the manifest; a million suffices for every rank of any job."""

MAX_TENSORS = 1 << 26
"""Each tensor costs an entry of the manifest and objects in memory."""

MAX_FILE_BYTES = 1 << 62
"""Offsets plus sizes stay within a signed 64-bit integer."""

MAX_VALUE_INLINE_BYTES = 64 << 10
"""Larger bytes and strings would bloat the manifest, so they are stored like tensors."""
