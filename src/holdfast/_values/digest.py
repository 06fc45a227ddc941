"""Digests: xxh3-64 of bytes, one per block, and the digest of digests.

Blocks count from the start of a chunk, so that a part of a chunk can be verified without the rest. xxh3 finds
accidents, not attackers. Never reads a file.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import xxhash

BLOCK_BYTES = 1 << 20
"""How many bytes one block digest covers; the last block of a chunk may be shorter."""


def digest(buffer: bytes | bytearray | memoryview) -> int:
    """The xxh3-64 of the bytes of ``buffer``, which must be contiguous."""
    return xxhash.xxh3_64_intdigest(buffer)


def name_words(names: Iterable[str]) -> npt.NDArray[np.uint64]:
    """An odd number for each name, the same in every process."""
    words = [xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass")) | 1 for name in names]
    return np.array(words, dtype=np.uint64)


def combine(digests: npt.NDArray[np.uint64]) -> int:
    """The digest of a sequence of digests: xxh3-64 over the eight little-endian bytes of each, in order."""
    return digest(np.ascontiguousarray(digests, dtype="<u8").tobytes())


def block_counts(nbytes: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """How many blocks each of ``nbytes`` takes."""
    sizes = np.asarray(nbytes, dtype=np.int64)
    return np.asarray(sizes // BLOCK_BYTES + (sizes % BLOCK_BYTES != 0), dtype=np.int64)


def to_hex(value: int) -> str:
    """The digest as 16 lower-case hexadecimal digits."""
    if not 0 <= value < 1 << 64:
        raise ValueError(f"{value} is not a 64-bit digest")
    return f"{value:016x}"
