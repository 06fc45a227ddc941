"""The index and the headers of data files: what is encoded decodes, and nothing else does."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.numpy import load_file

from holdfast._native.index import (
    HEADER_ALIGNMENT,
    INDEX_METADATA,
    ChunkIndex,
    HeaderEntry,
    check_index,
    chunk_name,
    decode_header,
    decode_index,
    encode_header,
    encode_index,
    file_digest,
    header_entry_bytes,
    stored_as,
)
from holdfast._native.manifest import FileEntry, TensorEntry
from holdfast._values.box import Box
from holdfast._values.digest import BLOCK_BYTES, block_counts, digest, to_hex
from holdfast._values.dtypes import DTYPES, MAX_FILE_BYTES, MAX_HEADER_BYTES
from holdfast.errors import CorruptError, InternalError, InvalidStateError

# --- the index --------------------------------------------------------------------------------------------------------


COLUMNS = ("tensor", "file", "offset", "bytes", "lo", "length", "digests")
HEADER = 4096

# Two files; "w" split over both, "b" with a rank below the table's, a scalar, an empty tensor, an alias.
TENSORS = (
    TensorEntry(key="w", dtype="float32", shape=(4, 6)),
    TensorEntry(key="tied", dtype="float32", shape=(4, 6), alias_of="w"),
    TensorEntry(key="b", dtype="uint8", shape=(5,)),
    TensorEntry(key="step", dtype="int64", shape=()),
    TensorEntry(key="none", dtype="float64", shape=(0, 3)),
)
FILES = (
    FileEntry(name="data-a-0-0.safetensors", bytes=HEADER + 48 + 5, header=HEADER, digest="0" * 16),
    FileEntry(name="data-a-1-0.safetensors", bytes=HEADER + 48 + 8, header=HEADER, digest="0" * 16),
)
# tensor, file, offset, bytes, lo, length
ROWS: list[tuple[int, int, int, int, tuple[int, int], tuple[int, int]]] = [
    (0, 0, HEADER, 48, (0, 0), (2, 6)),
    (0, 1, HEADER, 48, (2, 0), (2, 6)),
    (2, 0, HEADER + 48, 5, (0, 0), (5, 1)),
    (3, 1, HEADER + 48, 8, (0, 0), (1, 1)),
    (4, 1, HEADER + 48, 0, (0, 0), (0, 3)),
]


def table(rows: list[tuple[int, int, int, int, tuple[int, int], tuple[int, int]]]) -> ChunkIndex:
    columns = [np.array([row[i] for row in rows], dtype=np.int64) for i in range(4)]
    boxes = [np.array([row[i] for row in rows], dtype=np.int64).reshape(len(rows), 2) for i in (4, 5)]
    blocks = int(block_counts(columns[3]).sum()) if (columns[3] >= 0).all() else 0
    digests = np.arange(1, blocks + 1, dtype=np.uint64) << np.uint64(60)
    tensor, file, offset, nbytes = columns
    return ChunkIndex(
        tensor=tensor, file=file, offset=offset, bytes=nbytes, lo=boxes[0], length=boxes[1], digests=digests
    )


def same(left: ChunkIndex, right: ChunkIndex) -> bool:
    return all(
        getattr(left, name).dtype == getattr(right, name).dtype
        and np.array_equal(getattr(left, name), getattr(right, name))
        for name in COLUMNS
    )


def check(index: ChunkIndex, files: tuple[FileEntry, ...] = FILES, tensors: tuple[TensorEntry, ...] = TENSORS) -> None:
    check_index(index, files=files, tensors=tensors, path="index-a.safetensors")


def test_the_example_is_good_and_survives() -> None:
    index = table(ROWS)
    check(index)
    decoded = decode_index(encode_index(index), path="i")
    assert same(decoded, index)
    check(decoded)
    assert len(decoded) == 5


@pytest.mark.parametrize("dimensions", [0, 1, 3, 64])
@pytest.mark.parametrize("largest", [0, 1, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**62])
def test_tables_survive_at_every_width(dimensions: int, largest: int) -> None:
    for rows in (0, 1, 3):
        sizes = np.array([1, BLOCK_BYTES + 1, 0], dtype=np.int64)[:rows]
        index = ChunkIndex(
            tensor=np.full(rows, min(largest, 255), dtype=np.int64),
            file=np.full(rows, min(largest, 65535), dtype=np.int64),
            offset=np.full(rows, largest, dtype=np.int64),
            bytes=sizes,
            lo=np.full((rows, dimensions), largest, dtype=np.int64),
            length=np.full((rows, dimensions), largest // 2, dtype=np.int64),
            digests=np.full(int(block_counts(sizes).sum()), 2**64 - 1, dtype=np.uint64),
        )
        data = encode_index(index)
        decoded = decode_index(data, path="i")
        assert same(decoded, index)
        assert encode_index(decoded) == data
        assert same(decode_index(memoryview(bytearray(data)), path="i"), index)


def test_columns_are_narrow_aligned_and_wide_ones_are_shared_not_copied() -> None:
    index = table(ROWS)
    data = encode_index(index)
    header = json.loads(data[8:HEADER_ALIGNMENT])
    assert header.pop("__metadata__") == INDEX_METADATA
    widths = {"U8": 1, "U16": 2, "U32": 4, "U64": 8}
    assert {name: column["dtype"] for name, column in header.items()} == {
        "digests": "U64",
        "offset": "U16",
        "tensor": "U8",
        "file": "U8",
        "bytes": "U8",
        "lo": "U8",
        "length": "U8",
    }
    assert all(column["data_offsets"][0] % widths[column["dtype"]] == 0 for column in header.values())
    decoded = decode_index(data, path="i")
    assert np.shares_memory(decoded.digests, np.frombuffer(data, dtype=np.uint8))


def test_the_safetensors_library_reads_the_columns(tmp_path: Path) -> None:
    index = table(ROWS)
    (tmp_path / "index.safetensors").write_bytes(encode_index(index))
    columns = load_file(tmp_path / "index.safetensors")
    assert sorted(columns) == sorted(COLUMNS)
    for name in COLUMNS:
        assert np.array_equal(columns[name], getattr(index, name))


def test_first_block_delimits_the_digests_of_each_chunk() -> None:
    rows = [(i, 0, 0, nbytes, (0, 0), (1, 1)) for i, nbytes in enumerate([1, 0, BLOCK_BYTES, BLOCK_BYTES + 1])]
    index = table(rows)
    assert index.first_block().tolist() == [0, 1, 1, 2, 4]
    assert index.first_block().dtype == np.int64
    assert table([]).first_block().tolist() == [0]


def test_the_digest_of_a_file_covers_header_and_blocks_in_order() -> None:
    blocks = np.array([1, 2**64 - 1], dtype=np.uint64)
    expected = digest(b"header" + (1).to_bytes(8, "little") + b"\xff" * 8)
    assert file_digest(b"header", blocks) == to_hex(expected)
    assert file_digest(b"header", blocks[::-1]) != file_digest(b"header", blocks)


def test_negative_numbers_are_not_written() -> None:
    index = table(ROWS)
    with pytest.raises(InternalError):
        encode_index(dataclasses.replace(index, lo=index.lo - 1))


# --- damaged files --------------------------------------------------------------------------------------------------


def raw_index(**changes: tuple[str, tuple[int, ...], list[int]]) -> bytes:
    """An index file of one row in one dimension with some columns as given: safetensors dtype, shape, numbers."""
    columns: dict[str, tuple[str, tuple[int, ...], list[int]]] = {
        "digests": ("U64", (1,), [2**63]),
        "offset": ("U16", (1,), [4096]),
        "bytes": ("U8", (1,), [5]),
        "tensor": ("U8", (1,), [0]),
        "file": ("U8", (1,), [0]),
        "lo": ("U8", (1, 1), [0]),
        "length": ("U8", (1, 1), [5]),
    }
    columns.update(changes)
    widths = {"U8": 1, "U16": 2, "U32": 4, "U64": 8, "I64": 8, "F64": 8}
    entries, data = [], b""
    for name, (dtype, shape, numbers) in sorted(columns.items(), key=lambda item: -widths[item[1][0]]):
        raw = b"".join(number.to_bytes(widths[dtype], "little") for number in numbers)
        entries.append(HeaderEntry(name=name, dtype=dtype, shape=shape, begin=len(data), end=len(data) + len(raw)))
        data += raw
    return encode_header(entries, metadata=INDEX_METADATA) + data


def without_metadata() -> bytes:
    data = raw_index()
    entries = json.loads(data[8:HEADER_ALIGNMENT])
    listed = [
        HeaderEntry(
            name=name,
            dtype=column["dtype"],
            shape=tuple(column["shape"]),
            begin=column["data_offsets"][0],
            end=column["data_offsets"][1],
        )
        for name, column in entries.items()
        if name != "__metadata__"
    ]
    return encode_header(listed) + data[HEADER_ALIGNMENT:]


DAMAGED: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "only a header": lambda: raw_index()[:HEADER_ALIGNMENT],
    "a byte short": lambda: raw_index()[:-1],
    "a byte long": lambda: raw_index() + b"\x00",
    "zero bytes": lambda: bytes(5000),
    "no metadata": without_metadata,
    "a larger header": lambda: encode_header([], reserve=8192, metadata=INDEX_METADATA),
    "no columns": lambda: encode_header([], metadata=INDEX_METADATA),
    "another column": lambda: raw_index(extra=("U8", (1,), [1])),
    "signed column": lambda: raw_index(offset=("I64", (1,), [4096])),
    "floating column": lambda: raw_index(offset=("F64", (1,), [4096])),
    "column wider than needed": lambda: raw_index(tensor=("U16", (1,), [0])),
    "offset over 2**62": lambda: raw_index(offset=("U64", (1,), [2**62 + 1])),
    "offset of 2**64-1": lambda: raw_index(offset=("U64", (1,), [2**64 - 1])),
    "bytes over 2**62": lambda: raw_index(bytes=("U64", (1,), [2**63])),
    "lo over 2**62": lambda: raw_index(lo=("U64", (1, 1), [2**63 - 1])),
    "fewer rows in a column": lambda: raw_index(file=("U8", (0,), [])),
    "more rows in a column": lambda: raw_index(tensor=("U8", (2,), [0, 1])),
    "more boxes than rows": lambda: raw_index(lo=("U8", (2, 1), [0, 1]), length=("U8", (2, 1), [1, 1])),
    "lo and length of different ranks": lambda: raw_index(length=("U8", (1, 2), [5, 1])),
    "lo of one dimension": lambda: raw_index(lo=("U8", (1,), [0])),
    "tensor of two dimensions": lambda: raw_index(tensor=("U8", (1, 1), [0])),
    "tensor of no dimension": lambda: raw_index(tensor=("U8", (), [0])),
    "digests of two dimensions": lambda: raw_index(digests=("U64", (1, 1), [2**63])),
    "65 dimensions": lambda: raw_index(lo=("U8", (1, 65), [0] * 65), length=("U8", (1, 65), [1] * 65)),
    "no digests": lambda: raw_index(digests=("U8", (0,), [])),
    "too many digests": lambda: raw_index(digests=("U64", (2,), [2**63, 2**63])),
    "too few digests for huge chunks": lambda: raw_index(bytes=("U64", (1,), [2**62])),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_or_hostile_files_are_refused(case: str) -> None:
    with pytest.raises(CorruptError) as caught:
        decode_index(DAMAGED[case](), path="index-a.safetensors")
    assert caught.value.path == "index-a.safetensors"
    assert "index-a.safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_cases_differ_from_a_good_file_by_what_they_say() -> None:
    assert decode_index(raw_index(), path="i").bytes.tolist() == [5]


def test_columns_in_another_order_are_refused() -> None:
    data = raw_index()
    header = json.loads(data[8:HEADER_ALIGNMENT])
    # "file" and "tensor" both hold one zero byte, so that only their order in the header changes.
    swapped = {"tensor": "file", "file": "tensor"}
    entries = [
        HeaderEntry(
            name=swapped.get(name, name),
            dtype=column["dtype"],
            shape=tuple(column["shape"]),
            begin=column["data_offsets"][0],
            end=column["data_offsets"][1],
        )
        for name, column in header.items()
        if name != "__metadata__"
    ]
    with pytest.raises(CorruptError, match="order"):
        decode_index(encode_header(entries, metadata=INDEX_METADATA) + data[HEADER_ALIGNMENT:], path="i")


def test_digest_counts_that_overflow_are_refused() -> None:
    # 2**22 chunks of 2**42 blocks each make 2**64 blocks, which is none in 64 bits.
    rows = 1 << 22
    zeros, ones = np.zeros(rows, dtype=np.int64), np.ones((rows, 1), dtype=np.int64)
    index = ChunkIndex(
        tensor=zeros,
        file=zeros,
        offset=zeros,
        bytes=np.full(rows, 2**62, dtype=np.int64),
        lo=ones,
        length=ones,
        digests=np.zeros(0, dtype=np.uint64),
    )
    with pytest.raises(CorruptError, match="one per block"):
        decode_index(encode_index(index), path="i")


def test_every_bit_flip_of_the_header_and_every_truncation_is_refused_or_another_table() -> None:
    data = encode_index(table(ROWS))
    used = len(data[:HEADER_ALIGNMENT].rstrip(b" "))
    for bit in range(8 * used):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptError):
            decode_index(bytes(flipped), path="i")
    for length in [*range(0, HEADER_ALIGNMENT, 97), *range(HEADER_ALIGNMENT, len(data))]:
        with pytest.raises(CorruptError):
            decode_index(data[:length], path="i")


def test_every_bit_flip_of_the_columns_is_refused_or_only_a_digest() -> None:
    # Without the empty chunk, which may be at several places of its file.
    good = table(ROWS[:4])
    data = encode_index(good)
    harmless = 0
    for bit in range(8 * HEADER_ALIGNMENT, 8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            index = decode_index(bytes(flipped), path="i")
            check(index)
        except CorruptError:
            continue
        harmless += 1
        assert same(dataclasses.replace(index, digests=good.digests), good)
    # Those of which the column stays 64 bits wide, that is all.
    assert harmless == 64 * 4


# --- tables that make no sense --------------------------------------------------------------------------------------


def changed(row: int, **fields: int | tuple[int, int]) -> ChunkIndex:
    names = ("tensor", "file", "offset", "bytes", "lo", "length")
    rows = [dict(zip(names, each, strict=True)) for each in ROWS]
    rows[row].update(fields)
    return table([tuple(each[name] for name in names) for each in rows])  # type: ignore[misc]


SENSELESS: dict[str, tuple[Callable[[], ChunkIndex], str | None]] = {
    "tensor number too large": (lambda: changed(4, tensor=5), None),
    "tensor number negative": (lambda: changed(0, tensor=-1), None),
    "file number too large": (lambda: changed(1, file=2), None),
    "file number negative": (lambda: changed(1, file=-1), None),
    "rows by tensor out of order": (lambda: table([*ROWS[:2], ROWS[3], ROWS[2], ROWS[4]]), "b"),
    "rows by box out of order": (lambda: table([ROWS[1], ROWS[0], *ROWS[2:]]), "w"),
    "rows of an alias": (lambda: changed(1, tensor=1), "tied"),
    "box missing": (lambda: table([ROWS[0], *ROWS[2:]]), "w"),
    "all of a tensor missing": (lambda: table([*ROWS[:2], *ROWS[3:]]), "b"),
    "no rows at all": (lambda: table([]), "w"),
    "box too small": (lambda: changed(1, length=(1, 6), bytes=24), "w"),
    "box out of bounds": (lambda: changed(1, length=(3, 6), bytes=72), "w"),
    "box at 2**62": (lambda: changed(1, lo=(2**62, 0)), "w"),
    "box of 2**62 by 2**62": (lambda: changed(1, length=(2**62, 2**62)), "w"),
    "boxes overlap": (lambda: changed(1, lo=(1, 0)), "w"),
    "the same box twice": (lambda: changed(1, lo=(0, 0)), "w"),
    "padding with a length of 2": (lambda: changed(2, length=(5, 2), bytes=10), "b"),
    "padding with a length of 0": (lambda: changed(3, length=(0, 1), bytes=0), "step"),
    "padding with an offset": (lambda: changed(3, lo=(1, 0)), "step"),
    "bytes too few": (lambda: changed(0, bytes=47), "w"),
    "bytes too many": (lambda: changed(2, bytes=6), "b"),
    "bytes of an empty box": (lambda: changed(4, bytes=8), "none"),
    "begins in the header": (lambda: changed(0, offset=HEADER - 1), "w"),
    "begins at 0": (lambda: changed(0, offset=0), "w"),
    "hole before a chunk": (lambda: changed(2, offset=HEADER + 49), "b"),
    "chunks overlap in the file": (lambda: changed(2, offset=HEADER + 47), "b"),
    "two chunks at one place": (lambda: changed(2, offset=HEADER), None),
    "beyond the end of the file": (lambda: changed(2, offset=2**62), "b"),
    "empty chunk within another": (lambda: changed(4, offset=HEADER + 7), None),
    "empty chunk beyond the end": (lambda: changed(4, offset=HEADER + 60), "none"),
    "empty chunk before the data": (lambda: changed(4, offset=HEADER - 8), "none"),
    "in the wrong file": (lambda: changed(2, file=1), None),
}


@pytest.mark.parametrize("case", SENSELESS)
def test_senseless_tables_are_refused_and_the_key_named(case: str) -> None:
    make, key = SENSELESS[case]
    with pytest.raises(CorruptError) as caught:
        check(make())
    assert caught.value.path == "index-a.safetensors"
    assert "\n" not in str(caught.value)
    if key is not None:
        assert caught.value.key == key
        assert repr(key) in str(caught.value)


def test_files_must_be_filled_to_their_end() -> None:
    for sizes in [(HEADER + 54, HEADER + 56), (HEADER + 53, HEADER + 57), (HEADER + 52, HEADER + 56)]:
        files = tuple(
            FileEntry(name=file.name, bytes=size, header=file.header, digest=file.digest)
            for file, size in zip(FILES, sizes, strict=True)
        )
        with pytest.raises(CorruptError):
            check(table(ROWS), files=files)


def test_files_without_chunks_hold_only_a_header() -> None:
    empty = FileEntry(name="data-a-2-0.safetensors", bytes=HEADER, header=HEADER, digest="0" * 16)
    check(table(ROWS), files=(*FILES, empty))
    padded = FileEntry(name="data-a-2-0.safetensors", bytes=HEADER + 1, header=HEADER, digest="0" * 16)
    with pytest.raises(CorruptError, match="data-a-2-0"):
        check(table(ROWS), files=(*FILES, padded))


def test_a_table_of_too_few_dimensions_is_refused() -> None:
    index = table(ROWS)
    with pytest.raises(CorruptError) as caught:
        check(dataclasses.replace(index, lo=index.lo[:, :1], length=index.length[:, :1]))
    assert caught.value.key == "w"


def test_nothing_at_all_is_a_good_table() -> None:
    index = table([])
    check(dataclasses.replace(index, lo=index.lo[:, :0], length=index.length[:, :0]), files=(), tensors=())


def test_scalars_need_no_dimensions() -> None:
    tensors = (TensorEntry(key="a", dtype="int64", shape=()), TensorEntry(key="b", dtype="int64", shape=()))
    file = FileEntry(name="data-a-0-0.safetensors", bytes=HEADER + 16, header=HEADER, digest="0" * 16)
    rows = [(i, 0, HEADER + 8 * i, 8, (0, 0), (0, 0)) for i in range(2)]
    index = table(rows)
    index = dataclasses.replace(index, lo=index.lo[:, :0], length=index.length[:, :0])
    check(decode_index(encode_index(index), path="i"), files=(file,), tensors=tensors)
    one = table(rows[:1])
    one = dataclasses.replace(one, lo=one.lo[:, :0], length=one.length[:, :0])
    with pytest.raises(CorruptError):
        check(one, files=(file,), tensors=tensors)


def test_a_run_of_bytes_is_one_chunk() -> None:
    """Readers take it as a whole: two chunks would be taken for those of two values."""
    tensors = (TensorEntry(key="blob", dtype="uint8", shape=(5,), kind="bytes"),)
    files = (FileEntry(name="data-a-0-0.safetensors", bytes=HEADER + 5, header=HEADER, digest="0" * 16),)
    check(table([(0, 0, HEADER, 5, (0, 0), (5, 1))]), files, tensors)
    halves = table([(0, 0, HEADER, 2, (0, 0), (2, 1)), (0, 0, HEADER + 2, 3, (2, 0), (3, 1))])
    with pytest.raises(CorruptError, match="must have one chunk, and has 2") as caught:
        check(halves, files, tensors)
    assert caught.value.key == "blob"
    empty = (TensorEntry(key="blob", dtype="uint8", shape=(0,), kind="bytes"),)
    nothing = (FileEntry(name="data-a-0-0.safetensors", bytes=HEADER, header=HEADER, digest="0" * 16),)
    with pytest.raises(CorruptError, match="one chunk, and has 0"):
        check(table([]), nothing, empty)


# --- headers ----------------------------------------------------------------------------------------------------------


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
