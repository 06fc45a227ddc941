"""Hostile checkpoints in torch's own format, by name: pickles in every place, and metadata that no honest writer makes.

The pickles would make a file, the canary, if anything in them ran.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from torture import hostile_keys
from torture.hostile_bytes import archives, streams, torch_saved, values
from torture.hostile_keys import archive
from torture.hostile_native import sparse

CANARY = Path("canary")
"""The file that code from a checkpoint would make; set by who looks at them."""

Make = Callable[[Path], object]
SIZE = torch.Size


class Runs:
    """An object whose pickle runs ``function(*arguments)`` when it is loaded."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


def payloads() -> dict[str, Any]:
    """Objects whose pickles would make the canary, or reach for what could."""
    command = f"touch {CANARY}"
    return {
        "os.system": Runs(os.system, command),
        "subprocess": Runs(subprocess.check_call, command.split()),
        "eval": Runs(eval, f"open({str(CANARY)!r}, 'w')"),
        "exec": Runs(exec, f"open({str(CANARY)!r}, 'w')"),
        "getattr": Runs(getattr, Path, "touch"),
        "open": Runs(open, str(CANARY), "w"),
        "pathlib": Runs(Path.touch, CANARY),
        "torch.load": Runs(torch.load, str(CANARY)),
        "torch.hub": Runs(torch.hub.load, "x", "y"),
        "import": Runs(__import__, "antigravity"),
        "bytearray of 2**40": Runs(bytearray, 1 << 40),
    }


def saved(path: Path) -> None:
    """An honest checkpoint of torch's."""
    state = {"weight": torch.arange(24.0).reshape(4, 6), "bias": torch.ones(3), "step": 5, "note": {"a": [1, 2]}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_save(state, checkpoint_id=path)


def cases(folder: Path) -> dict[str, Make]:
    """Every case; each function puts its checkpoint at a path."""
    template = folder / "torch-honest"
    saved(template)

    def with_metadata(change: Callable[[Metadata], Any]) -> Make:
        """The template with its metadata changed; what ``change`` returns, if anything, is pickled instead."""

        def make(path: Path) -> None:
            shutil.copytree(template, path)
            metadata = pickle.loads((template / ".metadata").read_bytes())
            changed = change(metadata)
            (path / ".metadata").write_bytes(pickle.dumps(metadata if changed is None else changed))

        return make

    def with_bytes(data: Callable[[bytes], bytes]) -> Make:
        def make(path: Path) -> None:
            shutil.copytree(template, path)
            (path / ".metadata").write_bytes(data((template / ".metadata").read_bytes()))

        return make

    def with_item(key: str, data: Callable[[bytes], bytes]) -> Make:
        """The template with other bytes for an item, which its metadata knows."""

        def make(path: Path) -> None:
            shutil.copytree(template, path)
            metadata = pickle.loads((template / ".metadata").read_bytes())
            index = next(each for each in metadata.storage_data if each.fqn == key)
            place = metadata.storage_data[index]
            whole = (path / place.relative_path).read_bytes()
            item = data(whole[place.offset : place.offset + place.length])
            (path / "item").write_bytes(item)
            metadata.storage_data[index] = _StorageInfo("item", 0, len(item))
            (path / ".metadata").write_bytes(pickle.dumps(metadata))

        return make

    found: dict[str, Make] = {"honest": with_metadata(lambda metadata: None)}
    found.update(_pickles(with_metadata, with_bytes, with_item))
    found.update({f"metadata: {name}": with_metadata(change) for name, change in _metadata().items()})
    found.update({f"metadata: {name}": with_bytes(change) for name, change in streams().items()})
    found.update({f"item: {name}": with_item("weight", change) for name, change in archives().items()})
    found.update({f"value: {name}": with_item("step", change) for name, change in values().items()})
    found.update(_planted(template))
    return found


def slow_cases(folder: Path) -> dict[str, Make]:
    """Keys that take long to tell apart, in the metadata, and in what is kept as a value."""
    template = folder / "torch-honest"
    module = b"torch.distributed.checkpoint.metadata"
    found: dict[str, Make] = {}

    def metadata(data: bytes, path: Path) -> None:
        shutil.copytree(template, path)
        # As the data that a planner has put there, which may be anything.
        state = b"}X\x0c\x00\x00\x00planner_data" + data[2:-1] + b"s"
        (path / ".metadata").write_bytes(b"\x80\x02c" + module + b"\nMetadata\n)\x81" + state + b"b.")

    def item(data: bytes, path: Path) -> None:
        shutil.copytree(template, path)
        whole = pickle.loads((template / ".metadata").read_bytes())
        index = next(each for each in whole.storage_data if each.fqn == "step")
        (path / "item").write_bytes(archive(data))
        whole.storage_data[index] = _StorageInfo("item", 0, len(archive(data)))
        (path / ".metadata").write_bytes(pickle.dumps(whole))

    for title, data in hostile_keys.pickles().items():
        found[f"metadata: {title}"] = partial(metadata, data)
        found[f"value: {title}"] = partial(item, data)
    return found


def _pickles(with_metadata: Any, with_bytes: Any, with_item: Any) -> dict[str, Make]:
    """Pickles that run code, wherever a pickle is."""
    found: dict[str, Make] = {}
    places: dict[str, Callable[[Any, Any], Any]] = {
        "the whole": lambda m, bad: bad,
        "the entries": lambda m, bad: setattr(m, "state_dict_metadata", bad),
        "an entry": lambda m, bad: m.state_dict_metadata.update(weight=bad),
        "a size": lambda m, bad: setattr(m.state_dict_metadata["weight"], "size", bad),
        "a dtype": lambda m, bad: setattr(m.state_dict_metadata["weight"].properties, "dtype", bad),
        "a chunk": lambda m, bad: m.state_dict_metadata["weight"].chunks.append(bad),
        "an offset": lambda m, bad: setattr(m.state_dict_metadata["weight"].chunks[0], "offsets", bad),
        "a place": lambda m, bad: m.storage_data.update({next(iter(m.storage_data)): bad}),
        "the paths": lambda m, bad: setattr(m, "planner_data", bad),
        "a path": lambda m, bad: m.planner_data.update(weight=bad),
        "the storage's own": lambda m, bad: setattr(m, "storage_meta", bad),
    }
    for number, (title, bad) in enumerate(payloads().items()):
        for place, (name, change) in enumerate(places.items()):
            # Every payload at the top, every place with some payload or other.
            if place == 0 or (place + number) % 4 == 0:
                found[f"{title} in place of {name}"] = with_metadata(lambda m, c=change, b=bad: c(m, b))
        archive = torch_saved(bad)
        found[f"{title} in a tensor"] = with_item("weight", lambda item, data=archive: data)
        found[f"{title} in a value"] = with_item("step", lambda item, data=archive: data)
        found[f"{title} in a plain pickle as a value"] = with_item("step", lambda item, b=bad: pickle.dumps(b))
    command = f"touch {CANARY}".encode()
    found["the old opcode INST"] = with_bytes(lambda data: b"(S'" + command + b"'\nios\nsystem\n.")
    found["the old opcode OBJ"] = with_bytes(lambda data: b"(cos\nsystem\nS'" + command + b"'\no.")
    found["a name with dots"] = with_bytes(lambda data: b"\x80\x04\x8c\x05torch\x8c\x08hub.load\x93.")
    found["a name of torch's that runs"] = with_bytes(lambda data: b"\x80\x04\x8c\x05torch\x8c\x04load\x93)R.")
    found["an extension"] = with_bytes(lambda data: b"\x80\x02\x82\x01.")
    found["a persistent id"] = with_bytes(lambda data: b"\x80\x02X\x01\x00\x00\x00aQ.")
    found["a class as an attribute"] = with_bytes(_set_class)
    return found


def _set_class(data: bytes) -> bytes:
    """A stand-in that is told to be of another class."""
    module = b"torch.distributed.checkpoint.metadata"
    build = b"\x80\x02c" + module + b"\nMetadata\n)\x81}X\x09\x00\x00\x00__class__cos\n_Environ\nsb."
    return build


def _entry(m: Any) -> Any:
    return m.state_dict_metadata["weight"]


def _place(m: Any, **changes: Any) -> None:
    index = next(each for each in m.storage_data if each.fqn == "weight")
    fields = {**vars(m.storage_data[index]), **changes}
    m.storage_data[index] = _StorageInfo(**fields)


def _chunks(*boxes: tuple[Any, Any]) -> Callable[[Metadata], None]:
    def change(m: Metadata) -> None:
        chunks = [ChunkStorageMetadata(SIZE(offsets), SIZE(sizes)) for offsets, sizes in boxes]
        _entry(m).chunks = chunks
        place = next(place for index, place in m.storage_data.items() if index.fqn == "weight")
        m.storage_data = {index: each for index, each in m.storage_data.items() if index.fqn != "weight"}
        for number, chunk in enumerate(chunks):
            m.storage_data[MetadataIndex("weight", chunk.offsets, number)] = place

    return change


def _doubled(levels: int) -> Any:
    """A tuple that refers to the one before twice: small as a pickle, 2**levels leaves to whoever walks it."""
    found: Any = ()
    for _ in range(levels):
        found = (found, found)
    return found


def _metadata() -> dict[str, Callable[[Any], Any]]:
    names = {
        "..": "..",
        "of the parent": "../x",
        "absolute": "/etc/passwd",
        "that climbs": "a/../../x",
        "of NUL": "a\x00b",
        "empty": "",
        "of a dot": "./x",
        "with backslashes": "..\\x",
        "of a drive": "C:/x",
        "of 1 MB": "x" * (1 << 20),
        "that is bytes": b"/etc/passwd",
        "that is a number": 7,
        "with a newline": "x\ny",
        "that is missing": "nothing.distcp",
        "of the metadata": ".metadata",
    }
    found: dict[str, Callable[[Any], Any]] = {
        f"file name {title}": partial(_place, relative_path=name) for title, name in names.items()
    }
    for title, number in {
        "negative": -1,
        "2**60": 2**60,
        "2**62": 2**62,
        "2**64": 2**64,
        "fractional": 1.5,
        "text": "1",
        "none": None,
        "true": True,
    }.items():
        found[f"offset {title}"] = partial(_place, offset=number)
        if title != "true":
            found[f"length {title}"] = partial(_place, length=number)
    found.update(
        {
            "length 0": lambda m: _place(m, length=0),
            "length one less": lambda m: _place(m, length=_length(m) - 1),
            "offset one more": lambda m: _place(m, offset=_offset(m) + 1),
            "transforms of another type": lambda m: _place(m, transform_descriptors=[1]),
            "transforms unknown": lambda m: _place(m, transform_descriptors=["os.system"]),
            "place missing": lambda m: m.storage_data.clear(),
            "places of another type": lambda m: setattr(m, "storage_data", [1]),
            "entries of another type": lambda m: setattr(m, "state_dict_metadata", [1]),
            "entry of another type": lambda m: m.state_dict_metadata.update(weight=5),
            "tensor that is a value": lambda m: m.state_dict_metadata.update(step=_entry(m)),
            "value that is a tensor": lambda m: m.state_dict_metadata.update(weight=BytesStorageMetadata()),
            "chunks that overlap": _chunks(([0, 0], [3, 6]), ([2, 0], [2, 6])),
            "chunks with a gap": _chunks(([0, 0], [1, 6]), ([3, 0], [1, 6])),
            "chunks beyond the shape": _chunks(([0, 0], [5, 6])),
            "chunks of no elements": _chunks(([0, 0], [0, 6])),
            "chunk twice": _chunks(([0, 0], [4, 6]), ([0, 0], [4, 6])),
            "no chunks": _chunks(),
            "chunk with a negative offset": _chunks(([-1, 0], [5, 6])),
            "chunk with a negative size": _chunks(([0, 0], [-4, -6])),
            "chunk of 2**62 rows": _chunks(([0, 0], [2**62, 6])),
            "chunk of other dimensions": _chunks(([0], [4])),
            "chunk without a Size": lambda m: setattr(_entry(m).chunks[0], "offsets", [0, 0]),
            "chunks that are no list": lambda m: setattr(_entry(m), "chunks", 5),
            "size of 2**60": lambda m: setattr(_entry(m), "size", SIZE([2**60])),
            "size that overflows": lambda m: setattr(_entry(m), "size", SIZE([2**31, 2**31])),
            "size negative": lambda m: setattr(_entry(m), "size", SIZE([-4, -6])),
            "size of 65 dimensions": lambda m: setattr(_entry(m), "size", SIZE([1] * 65)),
            "size of other dimensions": lambda m: setattr(_entry(m), "size", SIZE([24])),
            "size that is a list": lambda m: setattr(_entry(m), "size", [4, 6]),
            "claim of 2**58 elements": _claim(2**58),
            "claim of 2**36 elements": _claim(2**36),
            "dtype of another size": lambda m: setattr(_entry(m).properties, "dtype", torch.float64),
            "dtype none": lambda m: setattr(_entry(m), "properties", TensorProperties(dtype=cast("torch.dtype", None))),
            "key that is a number": lambda m: m.state_dict_metadata.update({5: _entry(m)}),
            "key of 1 MB": lambda m: m.state_dict_metadata.update({"k" * (1 << 20): _entry(m)}),
            "key without a place": lambda m: m.state_dict_metadata.update(more=_entry(m)),
            "path of a number": lambda m: m.planner_data.update(weight=5),
            "path with position 2**40": lambda m: m.planner_data.update(weight=("a", 2**40)),
            "path with a negative position": lambda m: m.planner_data.update(weight=("a", -1)),
            "path of 100,000 elements": lambda m: m.planner_data.update(weight=("a",) * 100_000),
            "path of an object": lambda m: m.planner_data.update(weight=(1.5,)),
            "path that doubles 40 times": lambda m: m.planner_data.update(weight=_doubled(40)),
            "place that doubles 40 times": lambda m: m.storage_data.update(
                {index: _doubled(40) for index in list(m.storage_data)}
            ),
            "not metadata but a dict": lambda m: {"weight": 1},
            "not metadata but a tensor's": lambda m: _entry(m),
            "not metadata but None": lambda m: (None,),
        }
    )
    return found


def _length(m: Any) -> Any:
    return next(place.length for index, place in m.storage_data.items() if index.fqn == "weight")


def _offset(m: Any) -> Any:
    return next(place.offset for index, place in m.storage_data.items() if index.fqn == "weight")


def _claim(elements: int) -> Callable[[Metadata], None]:
    def change(m: Metadata) -> None:
        _chunks(([0], [elements]))(m)
        _entry(m).size = SIZE([elements])
        _place(m, length=min(elements * 4, 2**61))

    return change


def _planted(template: Path) -> dict[str, Make]:
    """Links, pipes and devices in place of files, and in place of the directories that lead to them."""

    def instead(name: str, make: Callable[[Path], object]) -> Make:
        def plant(path: Path) -> None:
            shutil.copytree(template, path)
            file = path / name
            shutil.copyfile(file, path.parent / "outside")
            file.unlink()
            make(file)

        return plant

    def through_a_link(path: Path) -> None:
        shutil.copytree(template, path)
        outside = path.parent / "elsewhere"
        outside.mkdir(exist_ok=True)
        metadata = pickle.loads((template / ".metadata").read_bytes())
        for index, place in metadata.storage_data.items():
            shutil.copyfile(path / place.relative_path, outside / place.relative_path)
            metadata.storage_data[index] = _StorageInfo(f"sub/{place.relative_path}", place.offset, place.length)
        (path / "sub").symlink_to(outside)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))

    kinds: dict[str, Callable[[Path], object]] = {
        "a link to a file outside": lambda file: file.symlink_to(file.parent.parent / "outside"),
        "a link to /etc/passwd": lambda file: file.symlink_to("/etc/passwd"),
        "a link to nothing": lambda file: file.symlink_to("nothing"),
        "a directory": lambda file: file.mkdir(),
        "a pipe": lambda file: os.mkfifo(file),
        "an endless device": lambda file: os.mknod(file, 0o020666, os.makedev(1, 5)),
        "a sparse file of 2**40 bytes": sparse,
    }
    found = {
        f"{what} in place of {name}": instead(name, make)
        for what, make in kinds.items()
        for name in (".metadata", "__0_0.distcp")
    }
    found["a link in place of a directory of data files"] = through_a_link
    return found
