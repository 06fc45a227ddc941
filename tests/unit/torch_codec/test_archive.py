"""Archives of torch.save: where the elements lie is told right, or not at all."""

from __future__ import annotations

import io
import random
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from holdfast._torch_codec.archive import Elements, find_tensor, records
from holdfast.errors import CorruptError


def archive_of(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def found_in(data: bytes) -> Elements | None:
    return find_tensor(lambda start, stop: data[start:stop], len(data))


def rebuilt(data: bytes, elements: Elements) -> torch.Tensor:
    """The tensor that the layout describes."""
    raw = bytearray(data[elements.begin : elements.begin + elements.nbytes])
    flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    memory = flat.view(elements.dtype).view([elements.shape[dimension] for dimension in elements.order])
    inverse = [elements.order.index(dimension) for dimension in range(len(elements.order))]
    return memory.permute(inverse)


def check(tensor: torch.Tensor) -> Elements:
    data = archive_of(tensor)
    elements = found_in(data)
    assert elements is not None
    found = rebuilt(data, elements)
    assert found.shape == tensor.shape
    assert found.dtype == tensor.dtype
    assert bytes_of(found) == bytes_of(tensor.detach())
    return elements


def bytes_of(tensor: torch.Tensor) -> list[int]:
    values: list[int] = tensor.contiguous().flatten().view(torch.uint8).tolist()
    return values


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
        *(torch.bool, torch.complex64, torch.complex128),
    ],
    ids=str,
)
def test_every_dtype(dtype: torch.dtype) -> None:
    raw = torch.tensor(list(random.Random(0).randbytes(6 * dtype.itemsize)), dtype=torch.uint8)
    tensor = (raw % 2).view(dtype) if dtype is torch.bool else raw.view(dtype)
    assert check(tensor.view(2, 3)).checksum == zlib.crc32(bytes(tensor.view(torch.uint8).tolist()))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5),
        torch.empty(0),
        torch.empty(3, 0, 2),
        torch.arange(24).view(2, 3, 4),
        torch.arange(6).view(2, 3).t(),
        torch.arange(24).view(2, 3, 4).permute(2, 0, 1),
        torch.arange(24).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        torch.arange(4).view(4, 1).t(),
        torch.nn.Parameter(torch.arange(4.0)),
        torch.nn.Parameter(torch.arange(4.0), requires_grad=False),
        torch.arange(4.0).requires_grad_(),
    ],
    ids=lambda tensor: f"{list(tensor.shape)}/{tensor.stride()}",
)
def test_every_dense_layout(tensor: torch.Tensor) -> None:
    check(tensor)


def test_part_of_a_storage_has_no_checksum_of_its_own() -> None:
    elements = check(torch.arange(100)[10:20])
    assert elements.nbytes == 80
    assert elements.checksum is None
    assert check(torch.arange(20).view(4, 5)[1:3]).checksum is None


def test_writers_without_checksums() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        assert check(torch.arange(7)).checksum is None
    finally:
        torch.serialization.set_crc32_options(True)


@pytest.mark.parametrize(
    "value",
    [
        3,
        (torch.ones(2), 1),
        {"a": torch.ones(2)},
        torch.tensor([1 + 2j]).conj(),
        torch.ones(3).expand(2, 3),
        torch.arange(12).view(3, 4)[:, :2],
        torch.eye(2).to_sparse(),
        torch.float32,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_dense_tensor_is_for_torch(value: Any) -> None:
    assert found_in(archive_of(value)) is None


def test_other_files_are_for_torch() -> None:
    old = io.BytesIO()
    torch.save(torch.ones(2), old, _use_new_zipfile_serialization=False)
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(archive_of(torch.ones(2)))) as source,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    for data in (old.getvalue(), b"", b"PK", b"x" * 100, packed.getvalue()):
        assert found_in(data) is None


def test_big_endian_elements_are_for_torch() -> None:
    data = archive_of(torch.ones(2))
    place = data.index(b"little")
    swapped = data[:place] + b"bigbig" + data[place + 6 :]
    swapped = swapped.replace(struct.pack("<L", zlib.crc32(b"little")), struct.pack("<L", zlib.crc32(b"bigbig")))
    assert found_in(swapped) is None


def with_long_fields(data: bytes) -> bytes:
    """The same archive as one of more than 4 GiB would be written: all numbers in 64-bit fields."""
    start, count = struct.unpack_from("<LH", data, len(data) - 6)[0], struct.unpack_from("<H", data, len(data) - 12)[0]
    directory, at = b"", start
    for _ in range(count):
        fixed = bytearray(data[at : at + 46])
        packed, size, name, extra, comment = struct.unpack_from("<LLHHH", fixed, 20)
        header = struct.unpack_from("<L", fixed, 42)[0]
        struct.pack_into("<LLHHH", fixed, 20, 0xFFFFFFFF, 0xFFFFFFFF, name, 28 + 8, 0)
        struct.pack_into("<L", fixed, 42, 0xFFFFFFFF)
        long_extra = struct.pack("<HHQQQ", 1, 24, size, packed, header)
        other = struct.pack("<HHL", 0x4B42, 4, 0)  # another writer's field comes first
        directory += bytes(fixed) + data[at + 46 : at + 46 + name] + other + long_extra
        at += 46 + name + extra + comment
    end = start + len(directory)
    tail = struct.pack("<4sQHHLLQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(directory), start)
    tail += struct.pack("<4sLQL", b"PK\x06\x07", 0, end, 1)
    tail += struct.pack("<4sHHHHLLH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return data[:start] + directory + tail


def test_archives_of_more_than_4_gib() -> None:
    tensor = torch.arange(1000)
    data = archive_of(tensor)
    assert found_in(with_long_fields(data)) == found_in(data)
    found = records(lambda start, stop: with_long_fields(data)[start:stop], len(with_long_fields(data)))
    assert found is not None
    assert len(found) == len(zipfile.ZipFile(io.BytesIO(data)).namelist())


def test_every_record_is_where_it_is_said_to_be() -> None:
    data = archive_of({"a": torch.arange(5), "b": torch.arange(300)})
    found = records(lambda start, stop: data[start:stop], len(data))
    assert found is not None
    for record in found:
        assert record.checksum == zlib.crc32(data[record.begin : record.begin + record.nbytes])
    assert {40, 2400} <= {record.nbytes for record in found}


# Damage.


def outcomes(data: bytes, change: Callable[[bytearray, int], None], places: Iterator[int]) -> tuple[int, int, int]:
    """How often: the same layout, none, an error. Anything else fails."""
    honest = found_in(data)
    same = none = errors = 0
    for place in places:
        damaged = bytearray(data)
        change(damaged, place)
        try:
            found = found_in(bytes(damaged))
        except CorruptError:
            errors += 1
            continue
        if found is None:
            none += 1
        else:
            assert honest is not None
            assert 0 <= found.begin <= found.begin + found.nbytes <= len(damaged)
            same += found == honest
    return same, none, errors


def flip(data: bytearray, place: int) -> None:
    data[place // 8] ^= 1 << place % 8


def cut(data: bytearray, place: int) -> None:
    del data[place:]


def test_flipped_bits_and_cuts_never_lead_outside() -> None:
    data = archive_of(torch.arange(40.0).view(5, 8))
    same, none, errors = outcomes(data, flip, iter(range(len(data) * 8)))
    assert errors > 1000
    assert same + none + errors > len(data) * 7
    same, none, errors = outcomes(data, cut, iter(range(len(data))))
    assert same == 0
    assert none + errors == len(data)


@pytest.mark.parametrize("field", [b"data.pkl", b"data/0"])
def test_a_header_that_says_something_else_is_damage(field: bytes) -> None:
    data = bytearray(archive_of(torch.arange(4)))
    place = data.index(field)
    data[place] ^= 0x20
    with pytest.raises(CorruptError, match="header of its record"):
        found_in(bytes(data))


def test_a_storage_of_another_size_is_damage() -> None:
    long, short = archive_of(torch.arange(30)), archive_of(torch.arange(31))
    assert len(long) == len(short)
    pickle_at = long.index(b"\x80\x02")
    end = long.index(b".", long.index(b"OrderedDict")) + 1
    mixed = long[:pickle_at] + short[pickle_at:end] + long[end:]
    sums = [struct.pack("<L", zlib.crc32(data[pickle_at:end])) for data in (long, short)]
    with pytest.raises(CorruptError, match="bytes of storage"):
        found_in(mixed.replace(sums[0], sums[1]))


def test_a_wrong_pickle_is_damage_and_runs_nothing() -> None:
    data = archive_of(torch.arange(4))
    swapped = data.replace(b"torch._utils\n_rebuild_tensor_v2", b"posix\nsystem".ljust(31, b"x"))
    assert len(swapped) == len(data)
    with pytest.raises(CorruptError, match="checksum"):
        found_in(swapped)
    torch.serialization.set_crc32_options(False)
    try:
        unchecked = archive_of(torch.arange(4))
    finally:
        torch.serialization.set_crc32_options(True)
    assert found_in(unchecked.replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_vX")) is None
