"""torch's ``.metadata`` decoded: a pickle that can become torch's metadata classes, in our own form, and nothing else.

Fields that older versions of torch did not write get their defaults. Everything is bounded and checked: what comes out
has places within files of the checkpoint, boxes of sane size and paths that can be walked. Never imports
torch.distributed.checkpoint.
"""

from __future__ import annotations

import os
import posixpath
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast._torch_codec.pickles import Globals, unpickle
from holdfast._values.dtypes import MAX_DIMENSIONS, MAX_FILE_BYTES, MAX_KEY_BYTES
from holdfast._values.lazy import LazyList
from holdfast.errors import CorruptError, NotACheckpointError, UnsafeError
from holdfast.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkColumns,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    is_path,
)
from holdfast.planner import padded

METADATA_NAME = ".metadata"
DATA_SUFFIX = ".distcp"
"""How the names of data files in torch's format end."""
NOTE_PREFIX = "replaces-"
"""How the names of notes begin, which savers leave while one format replaces another."""

_MARKER_START = b"Fa native checkpoint of Holdfast is here"
MARKER = _MARKER_START + (
    b", which torch cannot read by itself: use holdfast.load, or call holdfast.interop.use_in_torch()\n."
)
"""The ``.metadata`` of a native checkpoint, for programs that look for this name.

It is a pickle of one float that is none. So whoever unpickles it is told these words (Python tells the first 200
characters), and nothing is named, imported or called.
"""


def is_marker(data: bytes) -> bool:
    """Whether ``data``, which a ``.metadata`` begins with, only marks a native checkpoint."""
    return data.startswith(_MARKER_START)


def metadata_name(rank: int | None) -> str:
    """The name of the metadata of all ranks, or of what one rank wrote for itself alone."""
    return METADATA_NAME if rank is None else f"__{rank}{METADATA_NAME}"


@dataclass(frozen=True)
class StorageInfo:
    """The bytes of one item; ``transform_descriptors`` name the stream transforms that they went through."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...] | None = None


@dataclass(frozen=True)
class StoragePrefix:
    """How the names of one rank's files begin; ``not_there`` are directories that there were not before."""

    prefix: str
    not_there: tuple[str, ...] = ()


def find_place(
    storage_data: Mapping[MetadataIndex, object], key: str, offset: Sequence[int] | None
) -> StorageInfo | None:
    """Where the chunk of ``key`` at ``offset`` is, or its value; the first chunk may be listed without an offset."""
    place = storage_data.get(MetadataIndex(key, offset))
    if place is None and offset is not None and not any(offset):
        place = storage_data.get(MetadataIndex(key))
    return place if isinstance(place, StorageInfo) else None


def is_of_a_save(name: str) -> bool:
    """Whether saves make files of that ``name`` before they publish; where only such are, no save was finished."""
    is_unfinished = name.endswith(".tmp") and (METADATA_NAME in name or name.startswith(NOTE_PREFIX))
    return is_unfinished or name.endswith(DATA_SUFFIX)


_METADATA = "torch.distributed.checkpoint.metadata"
_PLAIN_CLASSES = {
    _METADATA: "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata MetadataIndex StorageMeta",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
}
# Up to torch 2.2 the properties of a tensor were those of ShardedTensor.
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_PATH_CLASSES = {f"{flavour}{kind}Path" for flavour in ("", "Pure") for kind in ("", "Posix", "Windows")}
_MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)
_LONGEST_PATH = 4096
# A list may have entries that were not saved, so positions may run ahead of keys; but not without end.
_MOST_LIST_ENTRIES = 1 << 20


def decode_metadata(data: bytes, *, path: str | os.PathLike[str], allow_pickle: bool = False) -> Metadata:
    """What a ``.metadata`` file says; ``path`` is its name, for errors.

    Raises:
        UnsafeError: it names something that is no metadata class, so that decoding would run code; ``allow_pickle``
            lets it.
        CorruptError: it is not what torch writes, or says what no honest writer says.
        NotACheckpointError: it marks a native checkpoint.
    """
    name = os.fspath(path)
    if is_marker(data):
        raise NotACheckpointError(f"{name!r} only marks a native checkpoint; load that without a FileSystemReader")
    try:
        found = unpickle(data, _stand_ins(), what=repr(name), allow_any=allow_pickle)
        return _metadata(found, most=len(data))
    except _Implausible as error:
        raise CorruptError(f"{name!r} is damaged: {error}; use another checkpoint", path=name) from None
    except UnsafeError:
        raise
    except CorruptError as error:
        error.path = name
        raise
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise CorruptError(
            f"{name!r} is damaged: {type(error).__name__}: {error}; use another checkpoint", path=name
        ) from error


class _Implausible(Exception):
    """What no honest writer says; the message tells it."""


def _stand_ins() -> Globals:
    """The classes that a stream may build. They are made for one call, because a stream may set their attributes."""
    known: dict[tuple[str, str], object] = {
        ("collections", "OrderedDict"): lambda: OrderedDict(),  # empty: filling dicts is the unpickler's business
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): type("_Layout", (_Layout,), {}),
    }
    for module, names in _PLAIN_CLASSES.items():
        known.update({(module, name): type(name, (), {}) for name in names.split()})
    for module in (_METADATA, _SHARDED):
        known[module, "TensorProperties"] = type("TensorProperties", (_Properties,), {})
        for name in ("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING"):
            known[module, name] = type(name, (_MemoryFormat,), {})
    for module in ("pathlib", "pathlib._local"):
        known.update({(module, name): type(name, (_JoinedPath,), {}) for name in _PATH_CLASSES})

    def find(module: str, name: str) -> object:
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        return known[module, name]

    return find


class _Layout:
    def __new__(cls, name: str) -> torch.layout:  # type: ignore[misc]
        if not name.startswith("torch.") or not isinstance(layout := vars(torch).get(name[6:]), torch.layout):
            raise _Implausible(f"it names the unknown layout {name!r}")
        return layout


class _MemoryFormat:
    def __new__(cls, number: int) -> torch.memory_format:  # type: ignore[misc]
        return _MEMORY_FORMATS[number]


class _JoinedPath:
    def __new__(cls, *parts: str) -> str:  # type: ignore[misc]
        return posixpath.join(*parts)


class _Properties:
    state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


def _is(value: object, name: str) -> bool:
    """Whether ``value`` was made by the class of that name, or, where anything is allowed, by one derived from it."""
    return any(cls.__name__ == name for cls in type(value).__mro__)


def _metadata(found: object, *, most: int) -> Metadata:
    """Stand-ins as our own classes; there can be no more than ``most`` of anything."""
    if not _is(found, "Metadata"):
        raise _Implausible(f"it holds a {type(found).__name__} instead of Metadata")
    fields = vars(found)
    entries = fields["state_dict_metadata"]
    if not isinstance(entries, dict):
        raise _Implausible("state_dict_metadata is not a dict")
    # Chunks become rows of tables that all tensors share.
    boxes: list[tuple[torch.Size, torch.Size]] = []
    rows = {_key(key): _collect(key, stored, boxes, most=most) for key, stored in entries.items()}
    lo, length = padded([box[0] for box in boxes], fill=0), padded([box[1] for box in boxes], fill=1)
    for column in (lo, length):
        if column.size and (column.min() < 0 or column.max() > MAX_FILE_BYTES):
            raise _Implausible("it has chunks of negative or impossible sizes or offsets")
    decoded: dict[str, STORAGE_TYPES] = {}
    for key, span in rows.items():
        if span is None:
            decoded[key] = BytesStorageMetadata()
            continue
        stored = entries[key]
        chunks = LazyList(ChunkColumns(lo, length, *span, len(stored.size)))
        decoded[key] = TensorStorageMetadata(_properties(stored.properties, key), stored.size, chunks)
    version = fields.get("version")
    planner_data = fields.get("planner_data")
    if isinstance(planner_data, dict):
        _check_paths(planner_data, decoded)
    return Metadata(
        decoded,
        planner_data=planner_data,
        storage_data=_storage_data(fields.get("storage_data")),
        storage_meta=_storage_meta(fields.get("storage_meta")),
        version=version if isinstance(version, str) else None,
    )


def _collect(key: str, stored: Any, boxes: list[tuple[torch.Size, torch.Size]], *, most: int) -> tuple[int, int] | None:
    """Which of ``boxes``, where they are added, are the chunks of a tensor; None for a value."""
    if _is(stored, "BytesStorageMetadata"):
        return None
    if not _is(stored, "TensorStorageMetadata"):
        raise _Implausible(f"{key!r} is a {type(stored).__name__}")
    dimensions = len(_size(stored.size, key))
    first = len(boxes)
    if not isinstance(stored.chunks, list) or first + len(stored.chunks) > most:
        raise _Implausible(f"{key!r} has chunks that cannot be listed")
    for chunk in stored.chunks:
        offsets, sizes = chunk.offsets, chunk.sizes
        # Python's own torch.Size holds nothing but integers of 64 bits.
        if type(offsets) is not torch.Size or type(sizes) is not torch.Size:
            raise _Implausible(f"a chunk of {key!r} has no torch.Size")
        if len(offsets) != dimensions or len(sizes) != dimensions:
            raise _Implausible(f"a chunk of {key!r} has another number of dimensions than the tensor")
        boxes.append((offsets, sizes))
    return first, len(boxes)


def _size(size: object, key: str) -> torch.Size:
    if type(size) is not torch.Size or len(size) > MAX_DIMENSIONS:
        raise _Implausible(f"{key!r} has no size, or too many dimensions")
    volume = 16
    for length in size:
        if length < 0 or (volume := volume * max(1, length)) > MAX_FILE_BYTES:
            raise _Implausible(f"{key!r} has the size {list(size)}, which no tensor has")
    return size


def _properties(found: object, key: str) -> TensorProperties:
    """The properties; of a state of another form than today's, all that is needed: the dtype."""
    state: Any = found.state if isinstance(found, _Properties) else vars(found)
    if isinstance(state, Mapping):
        state = tuple(state.get(name) for name in ("dtype", "layout", "requires_grad", "memory_format", "pin_memory"))
    dtype, layout, requires_grad, memory_format, pin_memory = (*state, None, None, None, None)[:5]
    if not isinstance(dtype, torch.dtype):
        raise _Implausible(f"{key!r} has no dtype")
    return TensorProperties(
        dtype,
        layout if isinstance(layout, torch.layout) else torch.strided,
        requires_grad is True,
        memory_format if isinstance(memory_format, torch.memory_format) else torch.contiguous_format,
        pin_memory is True,
    )


def _storage_meta(found: object) -> StorageMeta | None:
    if found is None:
        return None
    fields = vars(found)
    texts = [fields.get(name) for name in ("checkpoint_id", "save_id", "load_id")]
    checkpoint_id, save_id, load_id = (text if isinstance(text, (str, os.PathLike)) else None for text in texts)
    modules = fields.get("modules")
    return StorageMeta(
        checkpoint_id=None if checkpoint_id is None else os.fspath(checkpoint_id),
        save_id=save_id if isinstance(save_id, str) else None,
        load_id=load_id if isinstance(load_id, str) else None,
        modules=[str(module) for module in modules] if isinstance(modules, list) else [],
    )


def _storage_data(found: object) -> object:
    """Where everything is; what another storage than torch's file system put there passes through."""
    if not isinstance(found, dict):
        return found
    places: dict[object, object] = {}
    checked: set[str] = set()
    for index, place in found.items():
        if _is(index, "MetadataIndex") and _is(place, "_StorageInfo"):
            places[_index(index)] = _place(place, checked)
        elif _is(place, "_StoragePrefix"):
            places[index] = StoragePrefix(place.prefix)
        else:
            places[index] = place
    return places


def _index(found: object) -> MetadataIndex:
    fields = vars(found)
    offset, index = fields.get("offset"), fields.get("index")
    if offset is not None and type(offset) is not torch.Size:
        raise _Implausible("the name of a chunk has no torch.Size as its offset")
    return MetadataIndex(_key(fields["fqn"]), offset, index if type(index) is int else None)


def _place(found: object, checked: set[str]) -> StorageInfo:
    fields = vars(found)
    path, offset, length = fields["relative_path"], fields["offset"], fields["length"]
    if path not in checked:
        checked.add(_relative(path))
    if type(offset) is not int or type(length) is not int or min(offset, length) < 0:
        raise _Implausible(f"an item of {path!r} has a negative offset or length")
    if offset + length > MAX_FILE_BYTES:
        raise _Implausible(f"an item of {path!r} ends beyond any file")
    descriptors = fields.get("transform_descriptors")
    if descriptors is not None and not all(isinstance(each, str) for each in descriptors):
        raise _Implausible(f"an item of {path!r} names its transforms by something else than text")
    return StorageInfo(path, offset, length, tuple(descriptors) if descriptors else None)


def _relative(path: object) -> str:
    """``path``, when it names a file within the checkpoint."""
    if not isinstance(path, str) or not 0 < len(path) <= _LONGEST_PATH or not path.isprintable():
        raise _Implausible(f"it names the file {str(path)[:100]!r}")
    parts = path.replace("\\", "/").split("/")
    if any(part in ("", ".", "..") for part in parts) or ":" in parts[0]:
        raise _Implausible(f"it names the file {path[:100]!r}, which is not within the checkpoint")
    return path


def _key(key: object) -> str:
    if not isinstance(key, str) or len(key) > MAX_KEY_BYTES:
        raise _Implausible(f"{str(key)[:100]!r} is no key")
    return key


def _check_paths(planner_data: Mapping[str, Any], entries: Mapping[str, STORAGE_TYPES]) -> None:
    """Refuse paths of keys that could not be walked; what else a planner kept is its own business."""
    lists: dict[tuple[object, ...], int] = {}
    for key in entries:
        path = planner_data.get(key)
        if path is None:
            continue
        if not is_path(path):
            raise _Implausible(f"the path of {key!r} is not one of names and positions")
        for depth, element in enumerate(path):
            if isinstance(element, int):
                lists[path[:depth]] = max(lists.get(path[:depth], 0), element + 1)
    if sum(lists.values()) > max(_MOST_LIST_ENTRIES, 64 * len(entries)):
        raise _Implausible("its paths are positions in lists that are longer than any")


def data_files_of(data: bytes, path: str) -> set[str]:
    """The files in its own directory that a ``.metadata`` file with the contents ``data`` names."""
    names = {place.relative_path for place in (decode_metadata(data, path=path).storage_data or {}).values()}
    return {name for name in names if name.endswith(DATA_SUFFIX) and os.path.basename(name) == name}


def merge_metadata(parts: Sequence[Metadata], *, own: int = 0) -> Metadata:
    """What several ranks wrote down each for itself, as one: every distinct chunk and value once.

    Of what several have it is that of the rank ``own``, or else of the first. Whether the chunks of a tensor make it up
    is for the caller to check.
    """
    merged = Metadata(
        {}, planner_data={}, storage_data={}, storage_meta=parts[0].storage_meta, version=parts[0].version
    )
    chunks: dict[str, dict[torch.Size, ChunkStorageMetadata]] = {}
    for part in [*parts[own : own + 1], *parts]:
        if isinstance(part.planner_data, dict):
            merged.planner_data = {**part.planner_data, **merged.planner_data}
        if isinstance(part.storage_data, dict):
            merged.storage_data = {**part.storage_data, **merged.storage_data}
        for key, stored in part.state_dict_metadata.items():
            known = merged.state_dict_metadata.setdefault(key, stored)
            if isinstance(stored, TensorStorageMetadata) and isinstance(known, TensorStorageMetadata):
                if stored.size != known.size or stored.properties.dtype != known.properties.dtype:
                    raise CorruptError(f"the ranks disagree on the size or dtype of {key!r}", key=key)
                for chunk in stored.chunks:
                    chunks.setdefault(key, {}).setdefault(chunk.offsets, chunk)
            elif type(stored) is not type(known):
                raise CorruptError(f"{key!r} is a tensor on one rank and a value on another", key=key)
    for key, found in chunks.items():
        tensor = merged.state_dict_metadata[key]
        assert isinstance(tensor, TensorStorageMetadata)
        tensor.chunks = [found[offsets] for offsets in sorted(found)]
    return merged
