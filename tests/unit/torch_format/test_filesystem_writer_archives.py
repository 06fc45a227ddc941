"""The archives of FileSystemWriter are those of torch.save, of any size, in bounded memory."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata as TorchMetadata

import holdfast
from holdfast.filesystem import FileSystemWriter

DATA_ALIGNMENT = 64
SIZES = [1, 100, (16 << 20) - 1000, 5, (33 << 20) + 7, 4096, 16 << 20, *range(50)]


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def read_metadata(path: str) -> TorchMetadata:
    return pickle.loads((Path(path) / ".metadata").read_bytes())


def archives(path: str) -> dict[str, bytes]:
    """The bytes of every tensor item by key, cut out as ``.metadata`` says."""
    places = {index.fqn: info for index, info in read_metadata(path).storage_data.items() if index.offset is not None}
    files = {info.relative_path: (Path(path) / info.relative_path).read_bytes() for info in places.values()}
    return {key: files[info.relative_path][info.offset : info.offset + info.length] for key, info in places.items()}


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1), (7,), (5, 4, 3)])
def test_records_are_those_of_torch_save(path: str, shape: tuple[int, ...]) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.bool, torch.uint16, torch.float8_e4m3fn)
    state = {str(dtype): torch.zeros(shape, dtype=dtype) for dtype in dtypes}
    holdfast.save(state, storage_writer=FileSystemWriter(path))
    found_archives = archives(path)
    for key, tensor in state.items():
        theirs, ours = io.BytesIO(), io.BytesIO(found_archives[key])
        torch.save(tensor, theirs)
        with zipfile.ZipFile(theirs) as expected, zipfile.ZipFile(ours) as found:
            assert found.testzip() is None
            # An id that torch makes of the names and sums of the records, and that nothing needs, is left out.
            for name in {*expected.namelist()} - {"archive/.data/serialization_id"}:
                assert found.read(name) == expected.read(name), name
            entry = found.getinfo("archive/data/0")
        name_bytes, extra_bytes = struct.unpack_from("<HH", found_archives[key], entry.header_offset + 26)
        assert (entry.header_offset + 30 + name_bytes + extra_bytes) % DATA_ALIGNMENT == 0
        assert entry.file_size == tensor.nbytes


def test_large_and_small_items_pass_testzip_and_torch_load(path: str) -> None:
    # Some span several slabs of 16 MiB, some begin or end within one.
    state = {f"t{number}": torch.randint(0, 255, (size,), dtype=torch.uint8) for number, size in enumerate(SIZES)}
    holdfast.save(state, storage_writer=FileSystemWriter(path))
    for key, data in archives(path).items():
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.testzip() is None, key
        for weights_only in (True, False):
            assert torch.equal(torch.load(io.BytesIO(data), weights_only=weights_only), state[key]), key
    offsets = sorted(info.offset for info in read_metadata(path).storage_data.values())
    assert all(offset % DATA_ALIGNMENT == 0 for offset in offsets)


def memory(name: str) -> int:
    """A line of this process's status, in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(name + ":"))


def test_memory_does_not_grow_with_a_strided_tensor(path: str) -> None:
    state = {"x": torch.ones(6000, 8000).t()}  # 192 MB that nobody may make contiguous
    holdfast.save({"x": numbered(3)}, storage_writer=FileSystemWriter(path))
    with open("/proc/self/clear_refs", "w") as control:
        control.write("5")  # the peak counts from here
    before = memory("VmRSS")
    holdfast.save(state, storage_writer=FileSystemWriter(path))
    assert memory("VmHWM") - before < 180 << 20
