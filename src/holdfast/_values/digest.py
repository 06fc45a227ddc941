"""Digests: xxh3-64 of bytes, one per block, and the digest of digests; CRC-32 of pieces that are put together.

Blocks count from the start of a chunk, so that a part of a chunk can be verified without the rest. xxh3 finds
accidents, not attackers. Never reads a file.

The checksum of two pieces one after the other is that of the first, moved over as many zero bytes as the second has,
xor that of the second. Moving is linear over the 32 bits, hence a table of what becomes of each bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import xxhash

_Int64s = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

BLOCK_BYTES = 1 << 20
"""How many bytes one block digest covers; the last block of a chunk may be shorter."""


digest = xxhash.xxh3_64_intdigest
"""The xxh3-64 of the bytes of a buffer, which must be contiguous."""


def name_words(names: Iterable[str]) -> _Words:
    """An odd number for each name, the same in every process."""
    words = [xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass")) | 1 for name in names]
    return np.array(words, dtype=np.uint64)


def scrambled(words: _Words) -> _Words:
    """A word for each word, as good as random (the mixing steps of splitmix64)."""
    words = (words + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words ^= words >> np.uint64(shift)
        words *= np.uint64(factor)
    words ^= words >> np.uint64(31)
    return words


def box_words(lo: _Int64s, length: _Int64s) -> _Words:
    """A word for each box; padding with 0 and 1 does not change it."""
    words: _Words = np.full(len(lo), 1, dtype=np.uint64)
    for dimension in range(lo.shape[1]):
        begin, size = lo[:, dimension].astype(np.uint64), length[:, dimension].astype(np.uint64)
        is_padding = (begin == 0) & (size == 1)
        mixed = scrambled(scrambled(begin + np.uint64(dimension << 56)) ^ size)
        words += np.where(is_padding, np.uint64(0), mixed)
    return words


def row_words(names: Iterable[str], key: _Int64s, lo: _Int64s, length: _Int64s) -> _Words:
    """A word for the key and the box of each row, the same on every rank; ``key`` has numbers of ``names``."""
    return name_words(names)[key] ^ scrambled(box_words(lo, length))


def rows_digest(factors: _Words, key: _Int64s, lo: _Int64s, length: _Int64s) -> int:
    """A digest of a table of rows, whatever their order; ``factors`` has an odd number for each key.

    It is a sum over the rows, so that many tables which share keys and boxes are digested together.
    """
    return int((factors[key] * box_words(lo, length)).sum(dtype=np.uint64))


def combine(digests: _Words) -> int:
    """The digest of a sequence of digests: xxh3-64 over the eight little-endian bytes of each, in order."""
    return digest(np.ascontiguousarray(digests, dtype="<u8").tobytes())


def block_counts(nbytes: npt.NDArray[np.integer]) -> _Int64s:
    sizes = np.asarray(nbytes, dtype=np.int64)
    return np.asarray(sizes // BLOCK_BYTES + (sizes % BLOCK_BYTES != 0), dtype=np.int64)


def to_hex(value: int) -> str:
    if not 0 <= value < 1 << 64:
        raise ValueError(f"{value} is not a 64-bit digest")
    return f"{value:016x}"


_POLYNOMIAL = 0xEDB8_8320
_Table = tuple[int, ...]


def combine_checksums(pieces: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of pieces one after the other, each given by its own CRC-32 and its number of bytes."""
    total = 0
    for checksum, nbytes in pieces:
        total = _moved(total, nbytes) ^ checksum
    return total


def _moved(checksum: int, nbytes: int) -> int:
    """``checksum``, moved over ``nbytes`` zero bytes."""
    power = 0
    while nbytes and checksum:
        if nbytes & 1:
            checksum = _applied(_table(power), checksum)
        nbytes >>= 1
        power += 1
    return checksum


def _applied(table: _Table, value: int) -> int:
    result = 0
    for column in table:
        if not value:
            break
        if value & 1:
            result ^= column
        value >>= 1
    return result


@lru_cache(maxsize=64)
def _table(power: int) -> _Table:
    """What becomes of each bit when it is moved over 2 ** ``power`` zero bytes."""
    if power:
        half = _table(power - 1)
        return tuple(_applied(half, column) for column in half)
    columns = []
    for bit in range(32):
        value = 1 << bit
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        columns.append(value)
    return tuple(columns)
