""".pt files: written in pieces and loaded by torch as its own, read without loading the tensors."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast._state.tensor_bytes import Buffer, LazyTensor, source_of
from holdfast._state.tensors import TORCH_DTYPES
from holdfast._torch_codec import archive_writing
from holdfast._torch_codec.archive_writing import DATA_ALIGNMENT, tensor_archive, write_pt
from holdfast._torch_codec.pickles import read_pt
from holdfast.errors import (
    AlreadyPublishedError,
    CheckpointError,
    CorruptError,
    InvalidStateError,
    NotACheckpointError,
    NotFoundError,
    StorageError,
    UnsafeError,
)


def lazy(tensor: torch.Tensor) -> LazyTensor:
    return LazyTensor(source_of(tensor.detach()), tensor.shape, tensor.dtype, tensor.requires_grad)


PLAIN_DTYPES = [
    dtype for dtype in TORCH_DTYPES.values() if not str(dtype).startswith(("torch.q", "torch.bits")) and dtype.itemsize
]


# Writing.


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_every_dtype_as_it_was(tmp_path: Path, bits: Callable[..., bytes], mmap: bool) -> None:
    state = {
        str(dtype): torch.arange(12 * dtype.itemsize, dtype=torch.uint8).view(dtype).view(3, 4)
        if dtype is not torch.bool
        else torch.tensor([[True, False]])
        for dtype in PLAIN_DTYPES
    }
    write_pt({key: lazy(tensor) for key, tensor in state.items()}, tmp_path / "a.pt")
    loaded = torch.load(tmp_path / "a.pt", weights_only=True, mmap=mmap)
    assert list(loaded) == list(state)
    for key, tensor in state.items():
        assert (loaded[key].dtype, loaded[key].shape) == (tensor.dtype, tensor.shape)
        assert bits(loaded[key]) == bits(tensor), key


def test_shapes_gradients_and_nesting_survive(tmp_path: Path, same: Callable[..., None]) -> None:
    weight = torch.arange(6.0).view(2, 3).requires_grad_()
    plain = {"step": 3, 1: (1, [2.5, None]), "text": "ä", "raw": b"x", "size": torch.Size([2])}
    write_pt({"w": lazy(weight), "n": [{"e": lazy(torch.empty(0, 3))}, lazy(torch.tensor(7))], **plain}, tmp_path / "a")
    same(
        torch.load(tmp_path / "a", weights_only=True),
        {"w": weight, "n": [{"e": torch.empty(0, 3)}, torch.tensor(7)], **plain},
    )


def test_tied_tensors_share_memory_again(tmp_path: Path) -> None:
    first = lazy(torch.ones(4))
    write_pt({"a": first, "b": first, "c": first.detach(), "d": lazy(torch.ones(4))}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert sum("/data/" in name for name in archive.namelist()) == 2
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert loaded["a"] is loaded["b"]
    assert loaded["c"].data_ptr() == loaded["a"].data_ptr() != loaded["d"].data_ptr()


def test_storages_are_aligned_and_checksums_right(tmp_path: Path) -> None:
    write_pt({str(size): lazy(torch.ones(size, dtype=torch.int8)) for size in (1, 2, 63, 64, 65)}, tmp_path / "a.pt")
    loaded = torch.load(tmp_path / "a.pt", weights_only=True, mmap=True)
    assert {tensor.data_ptr() % DATA_ALIGNMENT for tensor in loaded.values()} == {0}
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert archive.testzip() is None


def test_records_of_more_than_a_zip_can_count_have_long_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_writing, "_ZIP64_BYTES", 0)
    write_pt({"a": lazy(torch.arange(5)), "b": lazy(torch.ones(3))}, tmp_path / "a.pt")
    loaded = torch.load(tmp_path / "a.pt", weights_only=True, mmap=True)
    assert loaded["a"].tolist() == [0, 1, 2, 3, 4]
    assert loaded["b"].data_ptr() % DATA_ALIGNMENT == 0


def test_large_tensors_pass_in_pieces(tmp_path: Path) -> None:
    asked: list[tuple[int, int]] = []

    class Recorded:
        nbytes = 40 << 20

        def copy_out(self, start: int, stop: int, buffer: Buffer, at: int) -> None:
            asked.append((start, stop))
            buffer.tensor[at : at + stop - start].fill_(len(asked))

    write_pt({"a": LazyTensor(Recorded(), (40 << 20,), torch.uint8)}, tmp_path / "a.pt")
    assert asked == [(0, 16 << 20), (16 << 20, 32 << 20), (32 << 20, 40 << 20)]
    loaded = torch.load(tmp_path / "a.pt", weights_only=True, mmap=True)["a"]
    assert [loaded[index].item() for index in (0, (16 << 20) - 1, 16 << 20, -1)] == [1, 1, 2, 3]


class Plain:
    pass


class Custom:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.view = tensor[1:]
        self.small = torch.ones(2, dtype=torch.float8_e5m2)


def test_real_tensors_in_objects_are_written_too(tmp_path: Path) -> None:
    write_pt({"object": Custom(torch.arange(4.0))}, tmp_path / "a.pt")
    found = torch.load(tmp_path / "a.pt", weights_only=False)["object"]
    assert found.tensor.tolist() == [0, 1, 2, 3]
    found.tensor[1] = 9
    assert found.view.tolist() == [9, 2, 3]
    assert found.small.dtype is torch.float8_e5m2


def test_an_existing_file_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_text("precious")
    with pytest.raises(AlreadyPublishedError, match=r"a\.pt"):
        write_pt({"a": 1}, path)
    assert path.read_text() == "precious"
    write_pt({"a": 1}, path, overwrite=True)
    assert torch.load(path, weights_only=True) == {"a": 1}
    assert os.listdir(tmp_path) == ["a.pt"]


class Failing:
    nbytes = 40 << 20

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def copy_out(self, start: int, stop: int, buffer: Buffer, at: int) -> None:
        if start:
            raise self.error


@pytest.mark.parametrize("error", [CorruptError("damaged"), KeyboardInterrupt()])
@pytest.mark.parametrize("overwrite", [False, True])
def test_nothing_is_left_after_a_failure(tmp_path: Path, error: BaseException, overwrite: bool) -> None:
    if overwrite:
        (tmp_path / "a.pt").write_text("precious")
    with pytest.raises(type(error)):
        write_pt({"a": LazyTensor(Failing(error), (40 << 20,), torch.uint8)}, tmp_path / "a.pt", overwrite=overwrite)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == ({"a.pt": "precious"} if overwrite else {})


def test_a_full_disk_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    original = archive_writing.posix.open_stream
    monkeypatch.setattr(archive_writing.posix, "open_stream", lambda path, mode: original("/dev/full", "wb"))
    with pytest.raises(StorageError, match="No space") as caught:
        write_pt({"a": lazy(torch.ones(1000))}, tmp_path / "a.pt")
    assert caught.value.path == str(tmp_path / "a.pt")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_pickled_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidStateError, match="cannot be pickled"):
        write_pt({"f": lambda: 1}, tmp_path / "a.pt")
    assert not list(tmp_path.iterdir())


def test_archives_beyond_4_gib_are_zip64(tmp_path: Path) -> None:
    count = (1 << 32) + 24
    archive = tensor_archive(torch.uint8, (count,))
    file = tmp_path / "sparse.pt"
    with open(file, "wb") as stream:
        stream.write(archive.head)
        stream.seek(count, os.SEEK_CUR)  # a hole: zeros that take no room
        stream.write(archive.tail(0))
    assert file.stat().st_size == archive.nbytes
    with zipfile.ZipFile(file) as zipped:
        entry = zipped.getinfo("archive/data/0")
        assert entry.file_size == entry.compress_size == count
        with zipped.open("archive/version") as record:
            assert record.read() == b"3\n"
    loaded = torch.load(file, mmap=True)
    assert loaded.shape == (count,)
    assert loaded[-1] == 0


# Reading.


def test_archives_and_files_from_before_torch_1_6_are_read(tmp_path: Path) -> None:
    state = {"a": torch.arange(5), "b": [1]}
    torch.save(state, tmp_path / "new.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for found in (read_pt(tmp_path / "new.pt"), read_pt(tmp_path / "old.pt")):
        assert found["a"].tolist() == [0, 1, 2, 3, 4]
        assert found["b"] == [1]


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a": torch.zeros(1000)}, path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=r"damaged archive: Bad CRC-32 for file 'a/data/0'") as caught:
        read_pt(path)
    assert caught.value.path == str(path)
    assert read_pt(path, verify=False)["a"].count_nonzero() == 1


def test_a_file_without_checksums_can_be_read(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(100)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert read_pt(tmp_path / "a.pt")["a"][99] == 99


def test_objects_need_permission(tmp_path: Path) -> None:
    for name, is_new in (("new.pt", True), ("old.pt", False)):
        torch.save({"a": Plain(), "b": torch.ones(3)}, tmp_path / name, _use_new_zipfile_serialization=is_new)
        with pytest.raises(UnsafeError, match="allow_pickle=True"):
            read_pt(tmp_path / name)
        assert isinstance(read_pt(tmp_path / name, allow_pickle=True)["a"], Plain)


def compressed() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"x" * 1000)
    return buffer.getvalue()


def other_archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("readme", "hello")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", NotACheckpointError),
        (b"hello, this is text", NotACheckpointError),
        (compressed(), CorruptError),
        (other_archive(), NotACheckpointError),
    ],
)
@pytest.mark.parametrize("allow_pickle", [False, True])
def test_other_files_are_refused(tmp_path: Path, content: bytes, kind: type[Exception], allow_pickle: bool) -> None:
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(kind, match=r"a\.pt"):
        read_pt(tmp_path / "a.pt", allow_pickle=allow_pickle)


def test_a_truncated_archive_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1000)}, tmp_path / "a.pt")
    os.truncate(tmp_path / "a.pt", 3000)
    with pytest.raises(CorruptError, match=r"a\.pt' is a damaged archive"):
        read_pt(tmp_path / "a.pt")


def test_whichever_byte_is_damaged_the_error_is_of_this_library_and_names_the_file(tmp_path: Path) -> None:
    """The directory of the archive, at its end, is where other readers raise what they like."""
    path = tmp_path / "a.pt"
    torch.save({"a": torch.ones(10)}, path)
    data = path.read_bytes()
    told: list[CheckpointError] = []
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :])
        try:
            read_pt(path)
        except (CorruptError, UnsafeError) as error:
            told.append(error)
    assert sum(isinstance(error, CorruptError) for error in told) > 500
    assert sum(isinstance(error, UnsafeError) for error in told) <= 2
    assert all("a.pt" in error.message and "; " in error.message for error in told)


@pytest.mark.parametrize("content", [torch.ones(3), [torch.ones(3)]])
def test_a_file_without_a_state_is_refused_by_name(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(InvalidStateError, match=rf"a\.pt' holds a {type(content).__name__}, but a state is a dict"):
        read_pt(tmp_path / "a.pt")


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nothing-here"):
        read_pt(tmp_path / "nothing-here")


# Lazy tensors.


def test_a_lazy_tensor_has_a_shape_and_no_elements() -> None:
    tensor = lazy(torch.ones(2, 3, requires_grad=True))
    assert (tensor.shape, tensor.dtype, tensor.requires_grad) == ((2, 3), torch.float32, True)
    assert not tensor.detach().requires_grad
    assert tensor.detach().source is tensor.source
    assert repr(tensor) == "LazyTensor(shape=[2, 3], dtype=torch.float32)"
    uses: list[Callable[[], Any]] = [lambda: tensor + 1, lambda: tensor[0], tensor.clone, lambda: tensor.sum().item()]
    for use in uses:
        with pytest.raises(InvalidStateError, match="only in a file"):
            use()
