"""torch's .metadata: what torch wrote comes out equal, older forms too, and nothing else comes out at all."""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import random
import resource
import subprocess
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

import holdfast
from holdfast import FileSystemReader, MetadataIndex
from holdfast.errors import CheckpointError, CorruptError, UnsafeError
from holdfast.filesystem import _StorageInfo as StorageInfo
from holdfast.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

WATCHED = ("os.system", "subprocess.Popen", "exec", "import", "open", "os.exec", "pty.spawn", "ctypes.dlopen")
_events: list[str] = []
_is_watching = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    is_the_file = event == "open" and str(arguments[0]).endswith(".metadata")
    if _is_watching and event in WATCHED and not is_the_file:
        _events.append(f"{event} {arguments[:1]}")


sys.addaudithook(_audit)


@contextmanager
def nothing_runs() -> Iterator[None]:
    """No event that could mean code of the stream ran."""
    global _is_watching
    _events.clear()
    _is_watching = True
    try:
        yield
    finally:
        _is_watching = False
    assert _events == []


def tensor(*chunks: tuple[list[int], list[int]], size: list[int], properties: Any = None) -> Any:
    made = properties or torch_metadata.TensorProperties(torch.bfloat16)
    return torch_metadata.TensorStorageMetadata(
        made,
        torch.Size(size),
        [torch_metadata.ChunkStorageMetadata(torch.Size(low), torch.Size(length)) for low, length in chunks],
    )


def torch_index(key: str, offset: list[int] | None = None) -> Any:
    return torch_metadata.MetadataIndex(key, offset)


def whole() -> Any:
    """Metadata of today's torch, with one of everything."""
    return torch_metadata.Metadata(
        {
            "a.w": tensor(([0, 0], [2, 4]), ([2, 0], [1, 4]), size=[3, 4]),
            "scalar": tensor(([], []), size=[]),
            "step": torch_metadata.BytesStorageMetadata(),
        },
        planner_data={"a.w": ("a", "w"), "scalar": ("scalar",), "step": ("step",)},
        storage_data={
            torch_index("a.w", [0, 0]): _StorageInfo("__0_0.distcp", 10, 100),
            torch_index("a.w", [2, 0]): _StorageInfo("__1_0.distcp", 0, 100, ["zstd/1"]),
            torch_index("scalar", []): _StorageInfo("__0_0.distcp", 110, 5),
            torch_index("step"): _StorageInfo("__0_0.distcp", 0, 10),
        },
        storage_meta=torch_metadata.StorageMeta(pathlib.Path("/runs/7"), "save", modules=["m"]),
        version="1.0.0",
    )


def read(*files: bytes, allow_pickle: bool = False, watched: bool = False) -> Metadata:
    """What a reader makes of a checkpoint with that metadata: one for all ranks, or one of each rank."""
    names = [".metadata"] if len(files) == 1 else [f"__{rank}.metadata" for rank in range(len(files))]
    with tempfile.TemporaryDirectory() as folder:
        for name, data in zip(names, files, strict=True):
            pathlib.Path(folder, name).write_bytes(data)
        reader = FileSystemReader(folder, allow_pickle=allow_pickle)
        if not watched:
            return reader.read_metadata()
        with nothing_runs():
            return reader.read_metadata()


@pytest.fixture(autouse=True, scope="module")
def _all_is_imported() -> None:
    """What the first read imports is none of a stream's doing."""
    read(pickle.dumps(whole()))


def decoded(value: Any, *, protocol: int = 4) -> Metadata:
    return read(pickle.dumps(value, protocol=protocol), watched=True)


def refuse(data: bytes, error: type[CheckpointError], words: str) -> CheckpointError:
    with pytest.raises(error, match=words) as caught:
        read(data, watched=True)
    assert "\n" not in caught.value.message
    return caught.value


# What torch writes.


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_everything_comes_out(protocol: int) -> None:
    found = decoded(whole(), protocol=protocol)
    stored = found.state_dict_metadata["a.w"]
    assert isinstance(stored, TensorStorageMetadata)
    assert type(stored).__module__.startswith("holdfast.")
    assert stored.size == torch.Size([3, 4])
    assert [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks] == [
        ((0, 0), (2, 4)),
        ((2, 0), (1, 4)),
    ]
    assert stored.properties.dtype is torch.bfloat16
    assert stored.properties.memory_format is torch.contiguous_format
    assert found.state_dict_metadata["step"] == BytesStorageMetadata()
    assert found.planner_data == {"a.w": ("a", "w"), "scalar": ("scalar",), "step": ("step",)}
    assert found.storage_data == {
        MetadataIndex("a.w", [0, 0]): StorageInfo("__0_0.distcp", 10, 100),
        MetadataIndex("a.w", [2, 0]): StorageInfo("__1_0.distcp", 0, 100, ("zstd/1",)),
        MetadataIndex("scalar", []): StorageInfo("__0_0.distcp", 110, 5),
        MetadataIndex("step"): StorageInfo("__0_0.distcp", 0, 10),
    }
    assert found.storage_meta is not None
    assert (found.storage_meta.checkpoint_id, found.storage_meta.save_id) == ("/runs/7", "save")
    assert found.storage_meta.modules == ["m"]
    assert found.version == "1.0.0"


@pytest.mark.parametrize("protocol", [2, 4])
def test_many_keys_and_chunks(protocol: int) -> None:
    """More memo entries than one byte counts."""
    names = [f"layer.{number}.{'x' * (number % 300)}" for number in range(700)]
    made = torch_metadata.Metadata(
        {name: tensor(*(([row], [1]) for row in range(5)), size=[5]) for name in names},
        OrderedDict((name, (name,)) for name in names),
        {torch_index(name, [row]): _StorageInfo(f"__{row}_0.distcp", 0, 9) for name in names for row in range(5)},
    )
    found = decoded(made, protocol=protocol)
    assert list(found.state_dict_metadata) == names
    assert len(found.storage_data) == 3500
    assert found.planner_data == {name: (name,) for name in names}


@pytest.mark.parametrize("format_", [torch.contiguous_format, torch.channels_last, torch.preserve_format])
def test_memory_formats_and_dtypes(format_: torch.memory_format) -> None:
    properties = torch_metadata.TensorProperties(torch.float8_e4m3fn, torch.sparse_coo, True, format_, True)
    made = torch_metadata.Metadata({"w": tensor(([0], [2]), size=[2], properties=properties)})
    stored = decoded(made).state_dict_metadata["w"]
    assert isinstance(stored, TensorStorageMetadata)
    assert vars(stored.properties) == vars(properties)


# What older versions wrote.


def without(value: Any, *names: str) -> Any:
    for name in names:
        value.__dict__.pop(name, None)
    return value


def old_properties() -> Any:
    return OldProperties(dtype=torch.float16, requires_grad=True)


def test_metadata_of_2_2_and_before() -> None:
    made = whole()
    for index, place in made.storage_data.items():
        without(index, "index")
        without(place, "transform_descriptors")
    made.state_dict_metadata["a.w"].properties = old_properties()
    found = decoded(without(made, "storage_meta", "version"), protocol=2)
    assert found.storage_meta is not None
    assert found.storage_meta.checkpoint_id is None
    assert found.version is None
    stored = found.state_dict_metadata["a.w"]
    assert isinstance(stored, TensorStorageMetadata)
    assert stored.properties.dtype is torch.float16
    assert stored.properties.requires_grad
    assert found.storage_data[MetadataIndex("a.w", [2, 0])] == StorageInfo("__1_0.distcp", 0, 100)


def test_storage_meta_without_later_fields() -> None:
    made = whole()
    without(made.storage_meta, "load_id", "modules", "save_id")
    meta = decoded(made).storage_meta
    assert meta is not None
    assert (meta.checkpoint_id, meta.save_id, meta.modules) == ("/runs/7", None, [])


def test_an_index_that_wrote_its_missing_offset_down() -> None:
    made = whole()
    index = torch_index("step")
    index.__dict__["offset"] = None
    made.storage_data = {index: _StorageInfo("__0_0.distcp", 0, 10)}
    assert MetadataIndex("step") in decoded(made).storage_data


@pytest.mark.parametrize("planner_data", [None, [1, 2], {"note": {"epoch": 3}}, "text"])
def test_what_planners_kept_passes_through(planner_data: Any) -> None:
    made = whole()
    made.planner_data = planner_data
    assert decoded(made).planner_data == planner_data


# Streams that would run code.


class Runs:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (os.system, ("touch /tmp/never",), "system"),
        (eval, ("1",), "eval"),
        (getattr, (torch.Size, "numel"), "getattr"),
        (io.open, ("/tmp/never", "w"), "open"),
        (torch.load, ("x",), "load"),
        (torch.save, ("x", "/tmp/never"), "save"),
        (pathlib.Path.unlink, (pathlib.Path("/tmp/never"),), "(unlink|getattr)"),
    ],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_no_function_is_ever_called(function: Any, arguments: Any, name: str, protocol: int) -> None:
    made = whole()
    made.planner_data = Runs(function, *arguments)
    refuse(pickle.dumps(made, protocol=protocol), UnsafeError, rf"\.{name}'.*allow_pickle=True")


def test_whoever_trusts_it_may_let_it_run() -> None:
    made = whole()
    made.planner_data = Runs(len, "four")
    assert read(pickle.dumps(made), allow_pickle=True).planner_data == 4


def test_a_subclass_of_metadata_needs_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    derived = type("Derived", (torch_metadata.Metadata,), {"__module__": __name__})
    monkeypatch.setattr(sys.modules[__name__], "Derived", derived, raising=False)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    made = derived({"step": torch_metadata.BytesStorageMetadata()})
    data = pickle.dumps(made)
    refuse(data, UnsafeError, "Derived")
    found = read(data, allow_pickle=True)
    assert list(found.state_dict_metadata) == ["step"]


GLOBAL_METADATA = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a pickle"),
        (b"\x80\x04.", "damaged"),
        (b"\x80\x04N.", "NoneType instead of Metadata"),
        (b"\x80\x04N.N.", "not a pickle"),
        (b"\x80\x04Nr\xff\xff\xff\x7f.", "not a pickle"),  # would allocate gigabytes for the memo
        (b"\x80\x04\x8d" + (1 << 62).to_bytes(8, "little") + b"x.", "not a pickle"),
        (b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".", "not a pickle"),  # BYTEARRAY8 allocates at once
        (b"\x80\x04\x82\x01.", "not a pickle"),  # an extension of the registry
        (b"\x80\x04P123\n.", "not a pickle"),
        (b"\x80\x04NQ.", "outside of itself"),
        (b"(S'x'\ni__main__\nX\n.", "not a pickle"),
        (b"\x80\x02" + GLOBAL_METADATA + b")\x81.", "state_dict_metadata"),
        (b"\x80\x02" + GLOBAL_METADATA + b")\x81}X\x13\x00\x00\x00state_dict_metadataNsb.", "not a dict"),
        (b"\x80\x02ctorch\nSize\n(K\x01Ntt R.", "not a pickle"),
        (b"\x80\x02ctorch\nSize\n(K\x01NttR.", "damaged"),
    ],
)
def test_streams_that_no_writer_makes(data: bytes, words: str) -> None:
    refuse(data, CorruptError, words)


def test_a_stream_cannot_change_classes() -> None:
    """BUILD on a class with slot state sets attributes of the class: only of stand-ins that die with the call."""
    attack = b"\x80\x02" + GLOBAL_METADATA + b"(N}X\x05\x00\x00\x00pwnedX\x01\x00\x00\x00xstb."
    refuse(attack, CorruptError, "type instead of Metadata")
    assert not hasattr(Metadata, "pwned")
    assert not hasattr(torch_metadata.Metadata, "pwned")
    refuse(attack.replace(GLOBAL_METADATA, b"ctorch\nSize\n"), CorruptError, "damaged")
    assert not hasattr(torch.Size, "pwned")
    refuse(attack.replace(GLOBAL_METADATA, b"ctorch\nfloat32\n"), CorruptError, "damaged")


# Numbers and names that no writer means.


def place(path: Any = "__0_0.distcp", offset: Any = 0, length: Any = 1) -> Callable[[Any], None]:
    def change(made: Any) -> None:
        made.storage_data[torch_index("step")] = _StorageInfo(path, offset, length)

    return change


def entry(value: Any) -> Callable[[Any], None]:
    def change(made: Any) -> None:
        made.state_dict_metadata["a.w"] = value

    return change


def path_of(path: Any) -> Callable[[Any], None]:
    def change(made: Any) -> None:
        made.planner_data["a.w"] = path

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (place("/etc/passwd"), "not within the checkpoint"),
        (place("../other/__0_0.distcp"), "not within the checkpoint"),
        (place("a/../../x"), "not within the checkpoint"),
        (place("..\\x"), "not within the checkpoint"),
        (place("c:\\x"), "not within the checkpoint"),
        (place("x\x00y"), "names the file"),
        (place(""), "names the file"),
        (place(7), "names the file"),
        (place("x" * 5000), "names the file"),
        (place(offset=-1), "negative"),
        (place(length=-1), "negative"),
        (place(offset=1 << 62, length=1), "beyond any file"),
        (place(offset=1.5), "negative"),
        (entry(7), "is a int"),
        (entry(tensor(([0], [3]), size=[3, 4])), "dimensions"),
        (entry(tensor(([0], [-3]), size=[3])), "negative"),
        (entry(tensor(([-1], [3]), size=[3])), "negative"),
        (entry(tensor(([0], [3]), size=[-3])), "no tensor has"),
        (entry(tensor(([0], [3]), size=[1 << 40, 1 << 40])), "no tensor has"),
        (entry(tensor(([0] * 65, [1] * 65), size=[1] * 65)), "too many dimensions"),
        (entry(tensor(([0], [3]), size=[3], properties=torch_metadata.TensorProperties(None))), "no dtype"),  # type: ignore[arg-type]
        (path_of(("a", 1 << 40)), "longer than any"),
        (path_of(("a", -1)), "names and positions"),
        (path_of(("a", 1.5)), "names and positions"),
        (path_of(()), "names and positions"),
        (path_of("a.w"), "names and positions"),
        (path_of(("a",) * 300), "names and positions"),
    ],
)
def test_numbers_and_names_are_bounded(change: Callable[[Any], None], words: str) -> None:
    made = whole()
    change(made)
    error = refuse(pickle.dumps(made), CorruptError, words)
    assert isinstance(error, CorruptError)
    assert str(error.path).endswith("/.metadata")


def test_one_list_of_chunks_under_many_keys_is_no_bomb() -> None:
    chunks = tensor(*(([row], [1]) for row in range(100)), size=[100]).chunks
    made = torch_metadata.Metadata({})
    for number in range(1000):
        made.state_dict_metadata[f"{number}"] = stored = tensor(size=[100])
        stored.chunks = chunks
    refuse(pickle.dumps(made), CorruptError, "cannot be listed")


def test_damaged_bytes_end_in_an_error_or_in_metadata() -> None:
    """Any bit may flip: what comes is an error of ours, or metadata, and never much memory."""
    data = pickle.dumps(whole())
    draw = random.Random(3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for _ in range(1500):
        damaged = bytearray(data)
        damaged[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        try:
            read(bytes(damaged))
        except (CorruptError, UnsafeError):
            refused += 1
    for length in range(len(data)):
        with pytest.raises(CorruptError):
            read(data[:length])
    assert 500 < refused < 1500
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


# Each rank for itself.


def part(rows: range, value: str, size: int = 4) -> Any:
    """What the rank wrote that has these rows of "w", and a value."""
    made = torch_metadata.Metadata(
        {"w": tensor(([rows.start], [len(rows)]), size=[size]), "same": tensor(([0], [2]), size=[2])},
        {"w": ("w",), "same": ("same",), value: (value,)},
        {
            torch_index("w", [rows.start]): _StorageInfo(f"{value}.distcp", 0, 1),
            torch_index("same", [0]): _StorageInfo(f"{value}.distcp", 1, 1),
        },
    )
    made.state_dict_metadata[value] = torch_metadata.BytesStorageMetadata()
    return made


def together(*parts: Any) -> Metadata:
    return read(*map(pickle.dumps, parts))


def test_ranks_are_put_together() -> None:
    found = together(part(range(2), "zero"), part(range(2, 4), "one"))
    assert list(found.state_dict_metadata) == ["w", "same", "zero", "one"]
    for key, offsets in {"w": [(0,), (2,)], "same": [(0,)]}.items():
        stored = found.state_dict_metadata[key]
        assert isinstance(stored, TensorStorageMetadata)
        assert [tuple(chunk.offsets) for chunk in stored.chunks] == offsets
    assert found.storage_data[MetadataIndex("same", [0])].relative_path == "zero.distcp"
    assert found.planner_data["one"] == ("one",)


def test_ranks_that_disagree_are_refused() -> None:
    first, second = part(range(2), "zero"), part(range(2, 4), "one")
    with pytest.raises(CorruptError, match="disagree"):
        together(first, part(range(2, 4), "one", size=5))
    second.state_dict_metadata["w"] = torch_metadata.BytesStorageMetadata()
    with pytest.raises(CorruptError, match="a tensor on one rank"):
        together(first, second)


SAVE_WITH_OLD_PROPERTIES = """
import sys, unittest.mock
import torch, holdfast, holdfast.metadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
with unittest.mock.patch("holdfast.metadata.TensorProperties", TensorProperties):  # nothing else is imported yet
    holdfast.save({"a": torch.arange(16.0)}, storage_writer=holdfast.FileSystemWriter(sys.argv[1]))
"""


def test_a_program_that_puts_another_class_in_the_place_of_properties(tmp_path: pathlib.Path) -> None:
    subprocess.run([sys.executable, "-c", SAVE_WITH_OLD_PROPERTIES, str(tmp_path)], check=True, timeout=300)
    assert b"sharded_tensor.metadata" in (tmp_path / ".metadata").read_bytes()
    assert torch.equal(holdfast.load(tmp_path)["a"], torch.arange(16.0))
