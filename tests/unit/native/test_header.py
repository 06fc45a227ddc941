from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors import SafetensorError, deserialize, safe_open

from holdfast._native.index import (
    HEADER_ALIGNMENT,
    HeaderEntry,
    chunk_name,
    decode_header,
    encode_header,
    header_entry_bytes,
    stored_as,
)
from holdfast._values.box import Box
from holdfast._values.dtypes import DTYPES, MAX_FILE_BYTES, MAX_HEADER_BYTES
from holdfast.errors import CorruptError, InternalError, InvalidStateError

KEYS = [
    "weight",
    "",
    "a.b.0",
    "x@[",
    "x@[0:1]",
    "x@[0:1]@[0:2]",
    "@[]",
    "__metadata__",
    'q"\\\n\x00',
    "ü\U0001f40e",
    "]",
]
BOXES = [Box((), ()), Box((0,), (4,)), Box((1,), (2,)), Box((2,), (0,)), Box((0, 3), (4, 5)), Box((0, 0), (4, 8))]


def entry(
    name: str = "a", dtype: str = "U8", shape: tuple[int, ...] = (4,), begin: int = 0, end: int = 4
) -> HeaderEntry:
    return HeaderEntry(name=name, dtype=dtype, shape=shape, begin=begin, end=end)


def framed(body: bytes | object) -> bytes:
    """The bytes of a header with this JSON, framed as a writer would."""
    text = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
    total = -(-(8 + len(text)) // HEADER_ALIGNMENT) * HEADER_ALIGNMENT
    return (total - 8).to_bytes(8, "little") + text.ljust(total - 8)


def body(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4), **more: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def test_no_two_chunks_share_a_name() -> None:
    # "x" and "x@[0:1]" are both keys, and the name of a piece of the one looks like the other.
    boxes = [Box((low,), (high - low,)) for low in range(5) for high in range(low, 5)]
    names = [chunk_name(key, box, (4,)) for key in [*KEYS, "x", "weight@[0:4]"] for box in boxes]
    assert len(set(names)) == len(names)
    assert "x@[0:1]" in names


def test_whole_tensors_have_their_key_as_name_unless_that_could_mislead() -> None:
    assert chunk_name("w", Box((0, 0), (2, 3)), (2, 3)) == "w"
    assert chunk_name("w", Box((0, 1), (2, 2)), (2, 3)) == "w@[0:2,1:3]"
    assert chunk_name("w", Box((), ()), ()) == "w"
    assert chunk_name("__metadata__", Box((), ()), ()) == "__metadata__@[]"
    assert chunk_name("a@[b", Box((0,), (3,)), (3,)) == "a@[b@[0:3]"


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)
def test_every_dtype_is_stored_with_its_bytes(dtype: object) -> None:
    assert isinstance(dtype, type(DTYPES["bool"]))
    name, shape = stored_as(dtype, (3, 5))
    itemsize = {"U8": 1}.get(name, dtype.itemsize)
    assert int(np.prod(shape)) * itemsize == 15 * dtype.itemsize
    assert stored_as(dtype, ())[1] in ((), (dtype.itemsize,))


def test_complex_numbers_are_stored_as_bytes_with_one_more_dimension() -> None:
    assert stored_as(DTYPES["complex128"], [2, 3]) == ("U8", (2, 3, 16))
    assert stored_as(DTYPES["int4"], (2, 3)) == ("U8", (2, 3))
    assert stored_as(DTYPES["bfloat16"], (2, 3)) == ("BF16", (2, 3))


def test_headers_survive_and_fill_pages() -> None:
    for count in (0, 1, 40, 500):
        entries = [entry(f't{i}\n"', "F32", (2, 3), 24 * i, 24 * i + 24) for i in range(count)]
        data = encode_header(entries)
        assert len(data) % HEADER_ALIGNMENT == 0
        assert int.from_bytes(data[:8], "little") == len(data) - 8
        assert decode_header(data) == entries
        assert len(data) - len(data.rstrip(b" ")) < HEADER_ALIGNMENT


def test_a_header_that_exactly_fills_its_pages_gets_no_more() -> None:
    short = len(encode_header([entry("")]).rstrip(b" "))
    exact = encode_header([entry("x" * (HEADER_ALIGNMENT - short))])
    assert len(exact) == HEADER_ALIGNMENT
    assert exact.endswith(b"}")
    assert len(encode_header([entry("x" * (HEADER_ALIGNMENT - short + 1))])) == 2 * HEADER_ALIGNMENT


@pytest.mark.parametrize(("reserve", "total"), [(0, 4096), (1, 4096), (4096, 4096), (4097, 8192), (100_000, 102_400)])
def test_reserved_room_is_kept(reserve: int, total: int) -> None:
    data = encode_header([entry()], reserve=reserve)
    assert len(data) == total
    assert decode_header(data) == [entry()]


@pytest.mark.parametrize("name", KEYS)
def test_the_bound_of_an_entry_holds_and_is_close(name: str) -> None:
    for shape in [(), (4,), (2**31, 1, 0)]:
        one = HeaderEntry(name=name, dtype="F8_E4M3", shape=(*shape, 16), begin=MAX_FILE_BYTES - 1, end=MAX_FILE_BYTES)
        exact = len(encode_header([one, one]).rstrip(b" ")) - len(encode_header([one]).rstrip(b" "))
        assert exact <= header_entry_bytes(name, shape) <= exact + 24


def test_keys_that_are_not_unicode_are_refused() -> None:
    with pytest.raises(InvalidStateError) as caught:
        encode_header([entry("\ud800")])
    assert caught.value.key == "\ud800"
    with pytest.raises(InvalidStateError):
        header_entry_bytes("\ud800", ())


def test_headers_beyond_the_limit_of_safetensors_are_refused() -> None:
    with pytest.raises(InternalError):
        encode_header([], reserve=MAX_HEADER_BYTES + 10_000)


def test_the_safetensors_library_opens_headers_with_data(tmp_path: Path) -> None:
    tensors = {
        "w": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "b@[1:3]": torch.tensor([1, 2], dtype=torch.int64),
        "__metadata__@[]": torch.tensor(True),
        "": torch.tensor([1.5], dtype=torch.bfloat16),
        'odd "\\\n\x00ü': torch.zeros((0, 7), dtype=torch.uint8),
    }
    entries, data = [], b""
    for name, tensor in tensors.items():
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")]
        entries.append(entry(name, *stored_as(dtype, tensor.shape), len(data), len(data) + len(raw)))
        data += raw
    path = tmp_path / "x.safetensors"
    path.write_bytes(encode_header(entries, reserve=9000, metadata={"format": "pt"}) + data)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert sorted(file.keys()) == sorted(tensors)
        for name, tensor in tensors.items():
            loaded = file.get_tensor(name)
            assert loaded.dtype == tensor.dtype
            assert torch.equal(loaded, tensor)


def test_an_empty_file_is_valid_safetensors() -> None:
    assert deserialize(encode_header([])) == []


HOSTILE: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "shorter than its length": lambda: encode_header([entry()])[:7],
    "truncated": lambda: encode_header([entry()])[:-1],
    "trailing byte": lambda: encode_header([entry()]) + b" ",
    "length of 2**64-1": lambda: b"\xff" * 8 + encode_header([])[8:],
    "length 0": lambda: bytes(8) + encode_header([])[8:],
    "zero bytes": lambda: bytes(4096),
    "not padded to a page": lambda: (2).to_bytes(8, "little") + b"{}",
    "padded with zeros": lambda: encode_header([]).replace(b" ", b"\x00"),
    "not JSON": lambda: framed(b"{"),
    "a list": lambda: framed([]),
    "null": lambda: framed(None),
    "nested deep": lambda: framed(b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
    "leading space": lambda: framed(b" {}"),
    "spaces inside": lambda: framed(json.dumps({"a": body()}).encode()),
    "duplicate name": lambda: framed(b'{"a":%b,"a":%b}' % ((msgspec.json.encode(body()),) * 2)),
    "duplicate field": lambda: framed(
        b'{"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
    ),
    "unknown field": lambda: framed({"a": body(more=1)}),
    "missing field": lambda: framed({"a": {"dtype": "U8", "shape": [4]}}),
    "fields in another order": lambda: framed({"a": {"shape": [4], "dtype": "U8", "data_offsets": [0, 4]}}),
    "unasked metadata": lambda: framed({"__metadata__": {"a": "b"}, "a": body()}),
    "empty metadata": lambda: framed({"__metadata__": {}, "a": body()}),
    "escaped name": lambda: framed(b'{"\\u0061":%b}' % msgspec.json.encode(body())),
    "surrogate in a name": lambda: framed(b'{"\\ud800":%b}' % msgspec.json.encode(body())),
    "invalid UTF-8": lambda: framed(b'{"\xff":%b}' % msgspec.json.encode(body())),
    "unknown dtype": lambda: framed({"a": body("U7")}),
    "dtype of the wrong type": lambda: framed({"a": body(8)}),
    "negative size": lambda: framed({"a": body(shape=[-4])}),
    "two negative sizes": lambda: framed({"a": body(shape=[-2, -2])}),
    "fractional size": lambda: framed({"a": body(shape=[4.0])}),
    "size beyond 2**62": lambda: framed({"a": body(shape=[0, 2**62 + 1], offsets=[0, 0])}),
    "size of 4000 digits": lambda: framed({"a": body(shape=[0, 10**4000], offsets=[0, 0])}),
    "too many dimensions": lambda: framed({"a": body(shape=[1] * 66, offsets=[0, 1])}),
    "product beyond the range": lambda: framed({"a": body(shape=[2**61, 2**61])}),
    "size unlike the shape": lambda: framed({"a": body(shape=[5])}),
    "size unlike the dtype": lambda: framed({"a": body("U16")}),
    "negative begin": lambda: framed({"a": body(offsets=[-4, 0])}),
    "end before begin": lambda: framed({"a": body(shape=[0], offsets=[0, -1])}),
    "begins late": lambda: framed({"a": body(offsets=[1, 5])}),
    "three offsets": lambda: framed({"a": body(offsets=[0, 4, 8])}),
    "hole": lambda: framed({"a": body(), "b": body(offsets=[5, 9])}),
    "overlap": lambda: framed({"a": body(), "b": body(offsets=[3, 7])}),
    "the same range twice": lambda: framed({"a": body(), "b": body()}),
    "out of order": lambda: framed({"a": body(offsets=[4, 8]), "b": body()}),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_damaged_or_hostile_headers_are_refused(case: str) -> None:
    with pytest.raises(CorruptError) as caught:
        decode_header(HOSTILE[case](), path="data-a-0-0.safetensors")
    assert caught.value.path == "data-a-0-0.safetensors"
    assert "data-a-0-0.safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_cases_differ_from_a_good_header_by_what_they_say() -> None:
    assert decode_header(framed({"a": body(), "b": body("U16", [2], [4, 8])})) == [
        entry(),
        entry("b", "U16", (2,), 4, 8),
    ]


def test_notes_must_be_the_expected_ones() -> None:
    data = encode_header([entry()], metadata={"a": "b"})
    assert decode_header(data, metadata={"a": "b"}) == [entry()]
    for wrong in (None, {}, {"a": "c"}):
        with pytest.raises(CorruptError):
            decode_header(data, metadata=wrong)


def test_every_bit_flip_and_truncation_is_refused_or_another_good_header() -> None:
    data = encode_header([entry("a"), entry("b", "U16", (1, 2), 4, 8)])
    used = len(data.rstrip(b" "))
    refused = 0
    for bit in [*range(8 * used), *range(8 * used, 8 * len(data), 517)]:
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            entries = decode_header(bytes(flipped))
        except CorruptError:
            refused += 1
        else:
            # A name, or a dtype of the same size, can change; digests are for that.
            assert encode_header(entries) == flipped
            assert [(found.begin, found.end) for found in entries] == [(0, 4), (4, 8)]
    assert refused > 7 * used
    for length in range(0, len(data), 13):
        with pytest.raises(CorruptError):
            decode_header(data[:length])


def test_what_we_refuse_for_its_layout_the_library_refuses_too() -> None:
    for case in ("hole", "overlap", "begins late", "size unlike the shape", "unknown dtype"):
        with pytest.raises(SafetensorError):
            deserialize(HOSTILE[case]() + bytes(9))


def test_a_header_beyond_the_limit_is_corrupt_whatever_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode_header([HeaderEntry("key", "F32", (1,), 0, 4)], reserve=8192)
    assert [entry.name for entry in decode_header(data)] == ["key"]
    monkeypatch.setattr("holdfast._native.index.MAX_HEADER_BYTES", 4096)
    with pytest.raises(CorruptError, match="its length is wrong"):
        decode_header(data)
