"""CRC-32 of pieces: what is put together equals what zlib says of the whole."""

from __future__ import annotations

import itertools
import random
import zlib

import pytest

from holdfast._values.digest import combine_checksums


@pytest.mark.parametrize("cuts", [[], [0], [1], [500, 500], [1, 2, 3, 999], [0, 1000], [64, 128, 256, 512]])
def test_pieces_make_up_the_whole(cuts: list[int]) -> None:
    data = random.Random(1).randbytes(1000)
    bounds = [0, *cuts, len(data)]
    pieces = [data[low:high] for low, high in itertools.pairwise(bounds)]
    assert combine_checksums((zlib.crc32(piece), len(piece)) for piece in pieces) == zlib.crc32(data)


def test_zeros_and_large_pieces() -> None:
    data = bytes(1 << 22) + b"x" + bytes((1 << 20) + 3)
    pieces = [data[: 1 << 22], data[1 << 22 :]]
    assert combine_checksums((zlib.crc32(piece), len(piece)) for piece in pieces) == zlib.crc32(data)


def test_nothing_is_nothing() -> None:
    assert combine_checksums([]) == zlib.crc32(b"") == 0
