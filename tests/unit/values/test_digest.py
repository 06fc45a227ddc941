"""Digests of blocks and checksums of pieces, put together."""

from __future__ import annotations

import itertools
import random
import zlib

import numpy as np
import pytest

from holdfast._values.digest import BLOCK_BYTES, block_counts, combine, combine_checksums, digest, to_hex

# --- xxh3-64, block by block ------------------------------------------------------------------------------------------


def test_digest_is_xxh3() -> None:
    # From the specification's reference vectors: XXH3_64bits of nothing, with seed 0.
    assert digest(b"") == 0x2D06800538D394C2


def test_digest_takes_any_contiguous_buffer() -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    expected = digest(array.tobytes())
    assert digest(array) == digest(bytearray(array.tobytes())) == digest(memoryview(array.tobytes())) == expected
    assert digest(array[:0]) == digest(b"")


def test_digest_refuses_a_buffer_with_holes() -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    for strided in (array[:, ::2], array.T):
        with pytest.raises((ValueError, BufferError)):
            digest(strided)


def test_digest_sees_every_byte() -> None:
    data = bytearray(300)
    seen = {digest(data)}
    for position in range(len(data)):
        data[position] = 1
        seen.add(digest(data))
        data[position] = 0
    assert len(seen) == 301


def test_combine_is_the_digest_of_the_little_endian_bytes() -> None:
    values = np.array([1, 2**64 - 1], dtype=np.uint64)
    little_endian = b"\x01" + bytes(7) + b"\xff" * 8
    assert combine(values) == digest(little_endian)
    assert combine(values.astype(">u8")) == digest(little_endian)
    assert combine(values[::-1]) != combine(values)
    assert combine(np.empty(0, dtype=np.uint64)) == digest(b"")


@pytest.mark.parametrize(
    ("nbytes", "blocks"),
    [(0, 0), (1, 1), (BLOCK_BYTES - 1, 1), (BLOCK_BYTES, 1), (BLOCK_BYTES + 1, 2), (2**62, 2**42)],
)
def test_blocks(nbytes: int, blocks: int) -> None:
    counts = block_counts(np.array([nbytes]))
    assert counts.tolist() == [blocks]
    assert counts.dtype == np.int64


def test_block_counts_do_not_overflow() -> None:
    assert block_counts(np.array([2**63 - 1])).tolist() == [2**43]
    assert block_counts(np.array([255], dtype=np.uint8)).tolist() == [1]


@pytest.mark.parametrize("value", [0, 1, 0xABCDEF, 2**64 - 1])
def test_hex_is_16_lower_case_digits(value: int) -> None:
    text = to_hex(value)
    assert len(text) == 16
    assert text == text.lower()
    assert int(text, 16) == value


@pytest.mark.parametrize("value", [-1, 2**64])
def test_to_hex_refuses_what_is_no_digest(value: int) -> None:
    with pytest.raises(ValueError, match="64-bit"):
        to_hex(value)


# --- CRC-32: what is put together equals what zlib says of the whole --------------------------------------------------


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
