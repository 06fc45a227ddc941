"""CRC-32 of pieces put together: what zip archives carry, of bytes that are read in pieces and in any order.

The checksum of two pieces one after the other is that of the first, moved over as many zero bytes as the second has,
xor that of the second. Moving is linear over the 32 bits, hence a table of what becomes of each bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

_POLYNOMIAL = 0xEDB8_8320
_Table = tuple[int, ...]


def combine_checksums(pieces: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of pieces one after the other, each given by its own CRC-32 and its number of bytes."""
    total = 0
    for checksum, nbytes in pieces:
        total = _moved(total, nbytes) ^ checksum
    return total


def _moved(checksum: int, nbytes: int) -> int:
    """The part that ``checksum`` has in the one of as many bytes and ``nbytes`` more."""
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
