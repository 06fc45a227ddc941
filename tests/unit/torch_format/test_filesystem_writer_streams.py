"""FileSystemWriter over other file systems, and through stream transforms."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from outside_views import torch_fsspec
from torch.distributed.checkpoint import _extension
from torch.distributed.checkpoint import filesystem as theirs
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.api import CheckpointException as TorchException

import holdfast
from holdfast.default_planner import DefaultSavePlanner
from holdfast.errors import CheckpointError, CorruptError, StorageError, UnsupportedVersionError
from holdfast.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")

STATE = {"a": torch.arange(5000.0).view(50, 100), "t": torch.arange(12.0).view(3, 4).t(), "n": {"k": "v"}, "i": 3}


def torch_reads(reader: Any) -> None:
    target = {"a": torch.zeros(50, 100), "t": torch.zeros(4, 3), "n": {"k": ""}, "i": 0}
    dcp.load(target, storage_reader=reader)
    assert torch.equal(target["a"], STATE["a"])
    assert torch.equal(target["t"], STATE["t"])
    assert (target["n"], target["i"]) == ({"k": "v"}, 3)


class Stream(io.BytesIO):
    """A stream without a file number, whose contents are kept when it is closed."""

    def __init__(self, files: dict[str, bytes], name: str) -> None:
        super().__init__()
        self._keep = lambda: files.__setitem__(name, self.getvalue())

    def close(self) -> None:
        if not self.closed:
            self._keep()
        super().close()


class Memory(FileSystemBase):
    """What a file system must offer, and no more: no listing, a rename that does not replace."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.made: list[str] = []

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        if mode == "rb":
            yield io.BytesIO(self.files[path])
            return
        with Stream(self.files, path) as stream:
            yield stream

    def concat_path(self, path: Any, suffix: str) -> str:
        return f"{path}/{suffix}"

    def rename(self, path: Any, new_path: Any) -> None:
        if new_path in self.files:
            raise FileExistsError(new_path)
        self.files[new_path] = self.files.pop(path)

    def init_path(self, path: Any) -> str:
        return f"memory:{path}"

    def mkdir(self, path: Any) -> None:
        self.made.append(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def exists(self, path: Any) -> bool:
        return path in self.files

    def rm_file(self, path: Any) -> None:
        del self.files[path]


def in_memory(memory: Memory, **options: Any) -> FileSystemWriter:
    writer = FileSystemWriter("x", **options)
    writer.fs = memory
    writer.path = memory.init_path("x")
    return writer


def memory_reader(memory: Memory) -> theirs.FileSystemReader:
    reader = theirs.FileSystemReader("x")
    reader.fs, reader.path = memory, "memory:x"
    return reader


@pytest.fixture
def whole_syncs(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    calls: list[None] = []
    monkeypatch.setattr(os, "sync", lambda: calls.append(None))
    return calls


@pytest.mark.parametrize("options", [{}, {"thread_count": 2}, {"single_file_per_rank": False, "thread_count": 2}])
def test_any_file_system_will_do(whole_syncs: list[None], options: dict[str, Any]) -> None:
    memory = Memory()
    holdfast.save(STATE, storage_writer=in_memory(memory, **options))
    assert memory.made == ["memory:x"]
    count = 4 if "single_file_per_rank" in options else options.get("thread_count", 1)
    assert sorted(memory.files) == ["memory:x/.metadata", *(f"memory:x/__0_{n}.distcp" for n in range(count))]
    assert len(whole_syncs) == count + 1  # streams without a file number: data files and metadata
    torch_reads(memory_reader(memory))


def test_streams_are_not_synced_when_told_so(whole_syncs: list[None]) -> None:
    holdfast.save(STATE, storage_writer=in_memory(Memory(), sync_files=False))
    assert whole_syncs == []


@pytest.mark.usefixtures("whole_syncs")
def test_a_file_system_that_cannot_replace_is_helped() -> None:
    memory = Memory()
    holdfast.save({"a": torch.zeros(2)}, storage_writer=in_memory(memory))
    holdfast.save(STATE, storage_writer=in_memory(memory))
    assert len(memory.files) == 2
    assert "memory:x/__0_0.distcp" not in memory.files
    torch_reads(memory_reader(memory))


@pytest.mark.usefixtures("whole_syncs")
def test_a_failed_save_leaves_nothing_on_any_file_system() -> None:
    class Fails(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if write_item.index.fqn == "t":
                raise RuntimeError("no t today")
            return super().resolve_data(write_item)

    memory = Memory()
    with pytest.raises(CheckpointError, match="no t today"):
        holdfast.save(STATE, storage_writer=in_memory(memory, thread_count=2), planner=Fails())
    assert memory.files == {}


def test_torchs_own_file_system_serves(path: str) -> None:
    writer = FileSystemWriter(path)
    writer.fs = theirs.FileSystem()  # type: ignore[assignment]
    holdfast.save(STATE, storage_writer=writer)
    holdfast.save(STATE, storage_writer=writer)
    torch_reads(theirs.FileSystemReader(path))


@pytest.mark.usefixtures("whole_syncs")
def test_fsspec_serves() -> None:
    fs = torch_fsspec.FsspecWriter("memory://x").fs
    url = "memory://holdfast-streams/x"
    writer = FileSystemWriter("x")
    writer.fs, writer.path = fs, fs.init_path(url)  # type: ignore[assignment]
    try:
        holdfast.save(STATE, storage_writer=writer)
        holdfast.save(STATE, storage_writer=writer)
        reader = theirs.FileSystemReader("x")
        reader.fs, reader.path = fs, fs.init_path(url)
        torch_reads(reader)
        assert len(fsspec.filesystem("memory").ls("/holdfast-streams/x")) == 2
    finally:
        fsspec.filesystem("memory").rm("/holdfast-streams", recursive=True)


class Gzip(StreamTransformExtension):
    @staticmethod
    def from_descriptor(version: str) -> Gzip:
        return Gzip()

    @staticmethod
    def registry_name() -> str:
        return "stream.gzip"

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: Any) -> Any:
        class Writer(io.RawIOBase):
            inner = gzip.GzipFile(fileobj=output, mode="wb")

            def writable(self) -> bool:
                return True

            def write(self, data: Any) -> int:
                return self.inner.write(data)

            def close(self) -> None:
                if not self.closed:
                    self.inner.close()
                    output.close()
                super().close()

        return Writer()

    def transform_from(self, input: Any) -> Any:
        return gzip.GzipFile(fileobj=input, mode="rb")


class Flip(StreamTransformExtension):
    @staticmethod
    def from_descriptor(version: str) -> Flip:
        return Flip()

    @staticmethod
    def registry_name() -> str:
        return "stream.flip"

    def get_descriptor(self) -> str:
        return "stream.flip/1"

    def transform_to(self, output: Any) -> Any:
        class Writer(io.RawIOBase):
            def writable(self) -> bool:
                return True

            def write(self, data: Any) -> int:
                return output.write(bytes(255 - byte for byte in bytes(data)))

            def close(self) -> None:
                if not self.closed:
                    output.close()
                super().close()

        return Writer()

    def transform_from(self, input: Any) -> Any:
        return io.BytesIO(bytes(255 - byte for byte in input.read()))


@pytest.mark.parametrize("thread_count", [1, 2])
def test_transforms_are_applied_and_told(path: str, thread_count: int) -> None:
    writer = FileSystemWriter(path, _extensions=[Flip(), Gzip()], thread_count=thread_count)
    metadata = holdfast.save(STATE, storage_writer=writer)
    for info in metadata.storage_data.values():
        # What was applied last is undone first.
        assert info.transform_descriptors == ("stream.gzip/1", "stream.flip/1")
        data = (Path(path) / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        assert bytes(255 - byte for byte in gzip.decompress(data)).startswith(b"PK")
    torch_reads(theirs.FileSystemReader(path, _extension_registry=registry()))


def registry() -> ExtensionRegistry:
    known = ExtensionRegistry()
    known.register(Gzip)
    known.register(Flip)
    return known


def test_torch_cannot_read_what_it_wrote_through_two_transforms(path: str) -> None:
    # It applies them in one order and tells another.
    dcp.save(STATE, storage_writer=theirs.FileSystemWriter(path, _extensions=[Flip(), Gzip()]))
    with pytest.raises(TorchException, match="Not a gzipped file"):
        torch_reads(theirs.FileSystemReader(path, _extension_registry=registry()))


def test_plain_items_have_no_descriptors(path: str) -> None:
    metadata = holdfast.save(STATE, storage_writer=FileSystemWriter(path, _extensions=[]))
    assert {info.transform_descriptors for info in metadata.storage_data.values()} == {None}


def test_raw_streams_that_take_less_are_written_to_the_end(path: str) -> None:
    class Reluctant(theirs.FileSystem):
        @contextlib.contextmanager
        def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
            with open(path, mode, buffering=0) as stream:
                if mode == "wb":
                    real = stream.write

                    class Less:
                        closed = False
                        flush, fileno = stream.flush, stream.fileno

                        def write(self, data: Any) -> int:
                            return real(memoryview(data)[:1000])

                    yield Less()
                else:
                    yield stream

    writer = FileSystemWriter(path)
    writer.fs = Reluctant()  # type: ignore[assignment]
    holdfast.save({"a": STATE["a"]}, storage_writer=writer)
    target = {"a": torch.zeros(50, 100)}
    dcp.load(target, checkpoint_id=path)
    assert torch.equal(target["a"], STATE["a"])


def test_what_a_stream_says_is_an_error_of_storage(path: str) -> None:
    class Broken(Memory):
        @contextlib.contextmanager
        def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
            raise PermissionError(13, "not yours")
            yield io.BytesIO()

    with pytest.raises(StorageError, match=r"cannot write 'memory:x/__0_0\.distcp': not yours") as caught:
        holdfast.save(STATE, storage_writer=in_memory(Broken()))
    assert caught.value.errno == 13


def test_threads_write_files_side_by_side() -> None:
    both = threading.Barrier(2, timeout=300)

    class Meeting(Memory):
        @contextlib.contextmanager
        def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
            if path.endswith(".distcp"):
                both.wait()
            with super().create_stream(path, mode) as stream:
                yield stream

    holdfast.save(STATE, storage_writer=in_memory(Meeting(), thread_count=2, sync_files=False))


@pytest.mark.parametrize("writes", ["ours", "torch"])
def test_a_plain_reader_knows_the_transform_that_torch_has(
    path: str, writes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if writes == "ours":
        holdfast.save(STATE, storage_writer=FileSystemWriter(path, _extensions=[_extension.ZStandard()]))
    else:
        dcp.save(STATE, storage_writer=theirs.FileSystemWriter(path, _extensions=[_extension.ZStandard()]))
    target = {"a": torch.zeros(50, 100), "t": torch.zeros(4, 3), "n": {"k": ""}, "i": 0}
    holdfast.load(target, storage_reader=FileSystemReader(path))
    assert torch.equal(target["a"], STATE["a"])
    assert (target["n"], target["i"]) == ({"k": "v"}, 3)
    assert torch.equal(holdfast.load(path)["t"], STATE["t"])
    torch_reads(theirs.FileSystemReader(path))
    monkeypatch.setattr(_extension, "zstandard", None)
    with pytest.raises(UnsupportedVersionError, match=r"went through .*stream.zstd/1.*zstandard.*; install what"):
        holdfast.load(target, storage_reader=FileSystemReader(path))


def test_a_few_bytes_that_become_too_many_are_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    holdfast.save({"a": torch.ones(4)}, storage_writer=FileSystemWriter(path, _extensions=[_extension.ZStandard()]))

    class Endless(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            return len(buffer)

    monkeypatch.setattr(_extension.ZStandard, "transform_from", lambda self, input: Endless())
    with pytest.raises(CorruptError, match="'a' has more than 1048608 bytes after its stream transforms"):
        holdfast.load({"a": torch.ones(4)}, storage_reader=FileSystemReader(path))
