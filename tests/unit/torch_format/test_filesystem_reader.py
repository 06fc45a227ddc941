"""FileSystemReader: checkpoints of torch's dcp.save come back equal, by range, and damage is named."""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from outside_views import page_cache
from torch.distributed.checkpoint import filesystem as torch_filesystem
from torch.distributed.checkpoint._extension import StreamTransformExtension

import holdfast
from holdfast import MismatchError
from holdfast.errors import (
    CorruptError,
    NotFoundError,
    StorageError,
    UnsafeError,
    UnsupportedVersionError,
)
from holdfast.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter

LARGE = 300_000  # elements: more than a small item
READ_BYTES = 8 << 20  # what is read at once, with the rest of the first and of the last page


def save(state: dict[str, Any], path: Path, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, storage_writer=torch_filesystem.FileSystemWriter(path, **options))
    return path


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(math.prod(shape)).to(dtype).view(shape)


def nested() -> dict[str, Any]:
    return {
        "model": {"w": numbered(40, 30), "b": numbered(3, dtype=torch.bfloat16), "big": numbered(LARGE // 10, 10)},
        "list": [numbered(2), {"lr": 0.5}, 3],
        "step": 7,
        "text": "ä",
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "transposed": numbered(3, 5).t(),
        "big_transposed": numbered(400, 500).t(),
        "big_channels_last": numbered(2, 3, 100, 101).to(memory_format=torch.channels_last),
        "conjugated": torch.tensor([1 + 2j, 3]).conj(),
        "big_conjugated": torch.full((LARGE,), 1 + 2j, dtype=torch.complex64).conj(),
        "tuple": (torch.ones(2), "x"),
        "big_value": "x" * 100_000,
        "bytes": torch.ones(5, dtype=torch.float8_e4m3fn),
    }


def emptied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {key: emptied(each) for key, each in value.items()}
    return [emptied(each) for each in value] if isinstance(value, list) else None


def same(found: Any, expected: Any, place: str = "state") -> None:
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, place
        assert found.shape == expected.shape, place
        assert torch.equal(found.to(torch.complex128), expected.detach().to(torch.complex128)), place
    elif isinstance(expected, dict):
        assert list(found) == list(expected), place
        for key in expected:
            same(found[key], expected[key], f"{place}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), place
        for number, each in enumerate(expected):
            same(found[number], each, f"{place}[{number}]")
    else:
        assert found == expected, place


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(nested(), tmp_path_factory.mktemp("torch") / "checkpoint")


def drop_from_cache(path: Path) -> None:
    for file in path.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# Equal values.


@pytest.mark.parametrize("verify", [None, True, False])
@pytest.mark.parametrize("is_cold", [False, True])
def test_everything_comes_back(written: Path, verify: bool | None, is_cold: bool) -> None:
    state = nested()
    target = emptied(state)
    if is_cold:
        drop_from_cache(written)
    report = holdfast.load(target, storage_reader=FileSystemReader(written, verify=verify))
    same(target, state)
    assert report.differences == ()
    assert report.bytes_read > 0


@pytest.mark.parametrize("is_cached", [True, False])
def test_tensors_larger_than_a_read_come_in_pieces(tmp_path: Path, is_cached: bool) -> None:
    largest = (READ_BYTES - 2 * 4096) // 4
    state = {"a": numbered(3), "w": numbered(5_000_001), "x": numbered(largest), "z": numbered(7)}
    save(state, tmp_path)
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    with page_cache(is_full=is_cached):
        holdfast.load(target, tmp_path)
    assert all(torch.equal(target[key], tensor) for key, tensor in state.items())


def test_nothing_but_what_is_wanted_is_read(tmp_path: Path) -> None:
    rows = numbered(1000, 1000)
    path = save({"w": rows, "other": numbered(2, LARGE)}, tmp_path / "checkpoint")
    with holdfast.open(path) as checkpoint:
        stored = checkpoint["w"]
        assert stored.shape == (1000, 1000)
        assert checkpoint.bytes_read == 0
        assert torch.equal(stored[300:310], rows[300:310])
        ends = 2 * 1024
        assert checkpoint.bytes_read <= 10 * 4000 + ends + 2 * 4096
        before = checkpoint.bytes_read
        assert torch.equal(stored[5, 2:4], rows[5, 2:4])
        assert checkpoint.bytes_read - before <= 2 * 4096, "the layout is known by now"
        assert torch.equal(stored[:, 7], rows[:, 7])
        assert torch.equal(stored[...], rows)


def test_a_load_reads_about_what_it_needs(tmp_path: Path) -> None:
    path = save({"w": numbered(LARGE), "other": numbered(8, LARGE), "s": torch.ones(2)}, tmp_path / "checkpoint")
    target = {"w": torch.zeros(LARGE), "s": torch.zeros(2)}
    report = holdfast.load(target, storage_reader=FileSystemReader(path))
    assert report.bytes_read <= 4 * LARGE + 16 * 1024
    assert report.unexpected == ("other",)


def test_many_files_and_many_small_tensors(tmp_path: Path) -> None:
    state = {f"layer.{number}": numbered(number + 1) for number in range(200)} | {"big": numbered(LARGE)}
    for name, options in {"items": {"single_file_per_rank": False}, "threads": {"thread_count": 3}}.items():
        path = save(state, tmp_path / name, **options)
        target = emptied(state)
        holdfast.load(target, storage_reader=FileSystemReader(path))
        same(target, state)


def test_small_tensors_are_read_many_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    read = os.preadv

    def counted(descriptor: int, buffers: list[Any], offset: int, flags: int = 0) -> int:
        if not flags:  # else it asks what the page cache has
            reads.append(offset)
        return read(descriptor, buffers, offset, flags)

    state = {f"layer.{number}": numbered(10) for number in range(500)}
    path = save(state, tmp_path / "checkpoint")
    target = emptied(state)
    monkeypatch.setattr(os, "preadv", counted)
    holdfast.load(target, storage_reader=FileSystemReader(path))
    same(target, state)
    assert 1 <= len(reads) <= 4


def test_targets_that_are_strided_or_cast(tmp_path: Path) -> None:
    state = {"w": numbered(LARGE // 10, 10), "s": numbered(4, 3)}
    path = save(state, tmp_path / "checkpoint")
    target = {"w": torch.zeros(10, LARGE // 10).t(), "s": torch.zeros(3, 4).t()}
    holdfast.load(target, storage_reader=FileSystemReader(path))
    same(target, state)
    other = {"w": torch.zeros(LARGE // 10, 10, dtype=torch.float64), "s": torch.zeros(4, 3)}
    with pytest.raises(MismatchError, match="cast=True"):
        holdfast.load(other, storage_reader=FileSystemReader(path))
    holdfast.load(other, storage_reader=FileSystemReader(path, cast=True), options=holdfast.LoadOptions(cast=True))
    assert torch.equal(other["w"], state["w"].double())


def test_a_dtype_that_only_the_file_knows_is_not_cast_silently(tmp_path: Path) -> None:
    class Half(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            data = super().resolve_data(write_item)
            return data.half() if isinstance(data, torch.Tensor) else data

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save({"w": numbered(4), "big": numbered(LARGE) % 2}, checkpoint_id=tmp_path / "c", planner=Half())
    target = {"w": torch.zeros(4), "big": torch.zeros(LARGE)}
    with pytest.raises(MismatchError, match="float16"):
        holdfast.load(target, storage_reader=FileSystemReader(tmp_path / "c"))
    holdfast.load(target, storage_reader=FileSystemReader(tmp_path / "c", cast=True))
    assert torch.equal(target["w"], numbered(4))
    assert torch.equal(target["big"], numbered(LARGE) % 2)


def test_torchs_own_names(written: Path, tmp_path: Path) -> None:
    reader = FileSystemReader(written)
    assert reader.checkpoint_id == written
    assert reader.metadata_path == written / ".metadata"
    metadata = reader.read_metadata()
    assert metadata.storage_meta is not None
    assert metadata.storage_meta.load_id == reader.load_id
    assert metadata.storage_meta.save_id
    before = reader.load_id
    reader.reset()
    assert reader.checkpoint_id == written
    assert reader.load_id != before
    reader.reset(str(tmp_path))
    assert reader.checkpoint_id == tmp_path
    assert FileSystemReader.validate_checkpoint_id(tmp_path)
    assert not FileSystemReader.validate_checkpoint_id("s3://bucket/x")
    with pytest.raises(CorruptError, match="does not say where"):
        reader.set_up_storage_reader(holdfast.Metadata({}), True)
    assert pickle.loads(pickle.dumps(reader)).checkpoint_id == tmp_path


# Objects.


class Thing:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing)

    __hash__ = None  # type: ignore[assignment]


def test_objects_need_trust_when_they_are_more_than_plain_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Thing, "__module__", "things")
    monkeypatch.setitem(__import__("sys").modules, "things", type("Module", (), {"Thing": Thing, "__name__": "things"}))
    path = save({"thing": Thing(), "w": torch.ones(2)}, tmp_path / "checkpoint")
    target: dict[str, Any] = {"thing": None, "w": torch.zeros(2)}
    with pytest.raises(UnsafeError, match="thing"):
        holdfast.load(target, storage_reader=FileSystemReader(path))
    holdfast.load(
        target,
        storage_reader=FileSystemReader(path, allow_pickle=True),
        options=holdfast.LoadOptions(allow_pickle=True),
    )
    assert target["thing"] == Thing()


# Each rank for itself.


def test_ranks_without_common_metadata(tmp_path: Path) -> None:
    plain = save({"big": numbered(LARGE), "small": numbered(5), "step": 1}, tmp_path / "checkpoint")
    (plain / ".metadata").rename(plain / "__0.metadata")
    with holdfast.open(plain) as checkpoint:  # the format is known all the same
        assert checkpoint["step"] == 1
    assert set(FileSystemReader(plain).read_metadata(rank=0).state_dict_metadata) == {"big", "small", "step"}
    with pytest.raises(NotFoundError):
        FileSystemReader(plain).read_metadata(rank=1)
    target = {"big": torch.zeros(LARGE), "step": None}
    holdfast.load(target, storage_reader=FileSystemReader(plain))
    assert torch.equal(target["big"], numbered(LARGE))


# Other file systems and transforms.


class MemoryFileSystem(FileSystemBase):
    """Files in a dict; opening one that is not there is any OSError's business."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        if str(path) not in self.files:
            raise FileNotFoundError(2, "no such object", str(path))
        yield Dribbling(self.files[str(path)])

    def concat_path(self, path: Any, suffix: str) -> str:
        return f"{path}/{suffix}"

    def rename(self, path: Any, new_path: Any) -> None:
        raise NotImplementedError

    def init_path(self, path: Any) -> str:
        return str(path)

    def mkdir(self, path: Any) -> None:
        raise NotImplementedError

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def exists(self, path: Any) -> bool:
        return any(name == str(path) or name.startswith(f"{path}/") for name in self.files)

    def rm_file(self, path: Any) -> None:
        raise NotImplementedError


class Dribbling(io.BytesIO):
    """A stream that gives less than it is asked for, as streams may."""

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(size if size is None or size < 0 else min(size, 100_000))


def reader_over(files: dict[str, bytes]) -> FileSystemReader:
    reader = FileSystemReader("bucket")
    reader.fs = MemoryFileSystem(files)
    reader.path = reader.fs.init_path("bucket")
    return reader


def test_any_file_system_will_do(tmp_path: Path) -> None:
    state = {key: value for key, value in nested().items() if "conj" not in key}
    path = save(state, tmp_path / "checkpoint", thread_count=2)
    files = {f"bucket/{file.name}": file.read_bytes() for file in path.iterdir()}
    metadata = files["bucket/.metadata"]
    assert len(metadata) < 100_000
    target = emptied(state)
    report = holdfast.load(target, storage_reader=reader_over(files))
    same(target, state)
    assert report.bytes_read > 1_000_000
    cut = {name: data[:-10] if name.endswith("distcp") else data for name, data in files.items()}
    with pytest.raises(CorruptError, match="truncated"):
        holdfast.load(emptied(state), storage_reader=reader_over(cut))
    with pytest.raises(CorruptError, match="missing"):
        holdfast.load(emptied(state), storage_reader=reader_over({"bucket/.metadata": metadata}))
    with pytest.raises(NotFoundError):
        holdfast.load(emptied(state), storage_reader=reader_over({}))


class Squeezed(StreamTransformExtension):
    """zlib, in the form that torch's extensions have."""

    @staticmethod
    def from_descriptor(version: str) -> Squeezed:
        return Squeezed()

    @staticmethod
    def registry_name() -> str:
        return "stream.zlib"

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: Any) -> Any:
        return Squeezing(output)

    def transform_from(self, input: Any) -> Any:
        return io.BytesIO(zlib.decompress(input.read()))


class Squeezing(io.BytesIO):
    def __init__(self, output: Any) -> None:
        super().__init__()
        self._output = output

    def close(self) -> None:
        if not self.closed:
            self._output.write(zlib.compress(self.getvalue()))
        super().close()


class Registry:
    def from_descriptor_list(self, descriptors: Any) -> list[Any]:
        found = {"stream.zlib/1": Squeezed()}
        return [found[descriptor] for descriptor in descriptors]


def test_stream_transforms(tmp_path: Path) -> None:
    state = {"w": numbered(LARGE), "s": numbered(3), "step": 3}
    path = save(state, tmp_path / "checkpoint", _extensions=[Squeezed()])
    target = emptied(state)
    with pytest.raises(UnsupportedVersionError, match=r"stream\.zlib/1.*_extension_registry"):
        holdfast.load(target, storage_reader=FileSystemReader(path))
    holdfast.load(target, storage_reader=FileSystemReader(path, Registry()))
    same(target, state)
    (place,) = [
        place for index, place in FileSystemReader(path).read_metadata().storage_data.items() if index.fqn == "w"
    ]
    with (path / place.relative_path).open("r+b") as stream:
        stream.seek(place.offset + place.length // 2)
        stream.write(bytes(8))
    with pytest.raises(CorruptError, match="could not be undone"):
        holdfast.load(target, storage_reader=FileSystemReader(path, Registry()))


def test_a_stream_that_fails_is_a_storage_error(tmp_path: Path) -> None:
    plain = save({"w": torch.ones(2)}, tmp_path / "checkpoint")

    class Failing(MemoryFileSystem):
        @contextlib.contextmanager
        def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
            if not str(path).endswith(".metadata"):
                raise PermissionError(13, "no", str(path))
            yield io.BytesIO(self.files[str(path)])

    reader = reader_over({})
    reader.fs = Failing({"bucket/.metadata": (plain / ".metadata").read_bytes()})
    with pytest.raises(StorageError, match="cannot read"):
        holdfast.load({"w": torch.zeros(2)}, storage_reader=reader)


def test_what_our_own_writer_wrote_comes_back_too(tmp_path: Path) -> None:
    state = {key: value for key, value in nested().items() if "conj" not in key and key != "tuple"}
    holdfast.save(state, storage_writer=FileSystemWriter(tmp_path / "checkpoint"))
    target = emptied(state)
    holdfast.load(target, storage_reader=FileSystemReader(tmp_path / "checkpoint", verify=True))
    same(target, state)
    with holdfast.open(tmp_path / "checkpoint") as checkpoint:
        assert torch.equal(checkpoint["model.big"][5:9], state["model"]["big"][5:9])
