"""What a Hugging Face folder, or a single safetensors file, holds: bytes that one rank reads, and a catalog of them.

An index decides which files count; without one it is ``model.safetensors``, else all files, if no two have the same
key. Whatever comes out of ``decode_folder`` has been checked: headers against each other, the index and the sizes of
the files, and holdfast.json, where there is one, against all of them. Never follows a link, never leaves the folder,
and never reads data.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec
import numpy as np

from holdfast._huggingface.headers import Tensor, count_strings, decode_any_header
from holdfast._huggingface.notes import NOTES_NAME, FolderNotes, decode_notes
from holdfast._io import files, posix
from holdfast._io.direct import missing
from holdfast._io.urls import is_store_url
from holdfast._native.catalog import Catalog, CatalogBytes, kind_of_file
from holdfast._native.index import ChunkIndex, check_index, decode_index, file_digest
from holdfast._native.manifest import FileEntry, IndexEntry, Manifest, TensorEntry, WriterEntry
from holdfast._values.digest import BLOCK_BYTES, block_counts, digest, to_hex
from holdfast._values.dtypes import (
    DTYPES,
    LENGTH_BYTES,
    MAX_FILE_BYTES,
    MAX_FILES,
    MAX_HEADER_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_TENSORS,
)
from holdfast.errors import CorruptError, NotFoundError, StorageError
from holdfast.planner import padded

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
INDEX_NAME = f"model{INDEX_SUFFIX}"
WHOLE_NAME = f"model{SUFFIX}"

_OF_A_SAVE = re.compile(r"(?:data-[0-9a-zA-Z_-]{1,64}(?:-(?:0|[1-9][0-9]*)){2}|index-[0-9a-zA-Z_-]{1,64})\.safetensors")
# Neither separator, so that none leads out of the folder, whatever the system; nor the colon of a drive.
_SAFE_NAME = re.compile(r"[^/\\:\x00-\x1f\x7f]{1,255}")
# How the cache of the hub leads from the names of a revision to its files, which have the names of their contents.
_HUB_LINK = re.compile(r"\.\./\.\./blobs/[0-9a-f]{40,64}")
_NO_LINK = "use a folder that has the files themselves (cp -rL makes one)"
_SMALL_BYTES = 16 << 20


class _ReadFile(msgspec.Struct, frozen=True, array_like=True):
    """A file: its whole size, its header, with the length that comes before it, and where a link of the hub leads."""

    name: str
    size: int
    header: bytes
    link: str


class _Found(msgspec.Struct, frozen=True, array_like=True):
    """All that is read of a folder, but for holdfast.json; without an index its name is ''."""

    is_directory: bool
    has_notes: bool
    index_name: str
    index: bytes
    files: tuple[_ReadFile, ...]
    identity: tuple[int, ...]


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(_Found).decode
_decode_index_json = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_weight_map = msgspec.json.Decoder(dict[str, str]).decode


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a folder of safetensors files, one such file, or an index of some; by names and first bytes.

    What a killed save has left is none.
    """
    name = posix.text_path(path)
    if is_store_url(name) or os.path.isdir(name):
        with contextlib.suppress(StorageError):  # others say so when they read
            return any(_counts(each) or each.endswith(INDEX_SUFFIX) for each in files.list_names(name))
    if is_store_url(name):
        return name.endswith((SUFFIX, INDEX_SUFFIX)) and files.size_of(name) is not None
    if not os.path.isfile(name):
        return False
    kind = kind_of_file(name)
    return kind == SUFFIX or (kind is None and name.endswith((SUFFIX, INDEX_SUFFIX)))


def _counts(name: str) -> bool:
    return name.endswith(SUFFIX) and _OF_A_SAVE.fullmatch(name) is None


# --- reading ---------------------------------------------------------------------------------------------------------


Identity = tuple[int, ...]
"""What another folder in the same place does not have, nor this one if names in it changed."""


def read_folder(path: str | os.PathLike[str]) -> CatalogBytes:
    """What has to be read of ``path`` to know all that is in it: an index, headers, holdfast.json.

    All of one folder: an export may put another one in its place meanwhile.
    """
    path = posix.absolute(path)
    while True:
        before = files.identity_of(path)
        try:
            found = _read_folder(path, before)
        except (CorruptError, NotFoundError):
            if files.identity_of(path) == before:
                raise
        else:
            if files.identity_of(path) == before:
                return found


def identity_in(data: CatalogBytes) -> Identity:
    """The identity of the folder that was read."""
    return _unpack(data.manifest).identity


def _read_folder(path: str, identity: Identity) -> CatalogBytes:
    is_directory = files.is_directory(path)
    directory = path if is_directory else os.path.dirname(path)
    index_name = _index_of(path, is_directory=is_directory)
    index = b"" if not index_name else _read_small(directory, index_name, limit=MAX_HEADER_BYTES)
    if index_name:
        names = sorted(set(_weight_map(index, os.path.join(directory, index_name)).values()))
    elif is_directory:
        names = _names_without_index(directory)
    else:
        names = [os.path.basename(path)]
    if len(names) > MAX_FILES:
        raise _corrupt(path, f"it has {len(names)} files")
    read: list[_ReadFile] = []
    room = MAX_MANIFEST_BYTES
    for name in names:
        read.append(_read_header(directory, name, room))
        room -= len(read[-1].header)
    has_notes = is_directory and files.exists(os.path.join(directory, NOTES_NAME))
    # Far more than the digests of all blocks and a few chunks for each tensor take.
    limit = _SMALL_BYTES + (sum(file.size for file in read) >> 6) + 16 * (MAX_MANIFEST_BYTES - room)
    notes = _read_small(directory, NOTES_NAME, limit=limit) if has_notes else b""
    found = _pack(_Found(is_directory, has_notes, index_name, index, tuple(read), identity))
    # A tensor takes more than a byte of a header; what cuts it into more chunks has more digests.
    blocks = sum(file.size // BLOCK_BYTES for file in read) + len(found) + len(notes)
    return CatalogBytes(manifest=found, index=notes, most_blocks=blocks)


def _index_of(path: str, *, is_directory: bool) -> str:
    """The name of the index that counts; '' without one."""
    if not is_directory:
        if not files.exists(path):
            raise NotFoundError(f"there is no file or folder {path!r}")
        return os.path.basename(path) if path.endswith(INDEX_SUFFIX) else ""
    names = files.list_names(path)
    if INDEX_NAME in names:
        return INDEX_NAME
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if len(indexes) > 1 or (indexes and WHOLE_NAME in names):
        choices = [*indexes, *([WHOLE_NAME] if WHOLE_NAME in names else [])]
        raise _corrupt(path, f"nothing tells which of {_listed(choices)} counts", advice="pass the path of that file")
    return indexes[0] if indexes else ""


def _names_without_index(directory: str) -> list[str]:
    names = files.list_names(directory)
    found = [WHOLE_NAME] if WHOLE_NAME in names else [name for name in names if _counts(name)]
    if not found:
        raise NotFoundError(f"{directory!r} has no safetensors files any more")
    return found


def _read_small(directory: str, name: str, *, limit: int) -> bytes:
    return files.read_whole(os.path.join(directory, _link(directory, name) or name), limit=limit)


def _link(directory: str, name: str) -> str:
    """Where the link ``name`` leads in the cache of the hub, '' for no link; CorruptError for others, and no file."""
    path = os.path.join(directory, name)
    if is_store_url(path):
        return ""
    status = posix.file_status(path)
    if status is None:
        raise missing(path)
    if not stat.S_ISLNK(status.st_mode):
        return ""
    with posix.reporting("read", path):
        target = os.readlink(path)
    if _HUB_LINK.fullmatch(target) is None or os.path.basename(os.path.dirname(directory)) != "snapshots":
        raise _corrupt(path, "it is a link, which may lead anywhere", advice=_NO_LINK)
    return target


def _read_header(directory: str, name: str, room: int) -> _ReadFile:
    """The header of a file, of which there are at most ``room`` bytes left for all that come."""
    link = _link(directory, name)
    path = os.path.join(directory, link or name)
    with files.opened(path) as file:
        start = bytearray(min(LENGTH_BYTES, file.size))
        file.read_into(memoryview(start), 0)
        length = int.from_bytes(start, "little")
        if len(start) < LENGTH_BYTES or length > min(MAX_HEADER_BYTES, file.size - LENGTH_BYTES):
            raise _corrupt(path, f"its header would have {length} bytes, and it has {file.size} in all")
        if length > room:
            raise _corrupt(path, f"the headers of all files have more than {MAX_MANIFEST_BYTES} bytes")
        header = bytearray(LENGTH_BYTES + length)
        file.read_into(memoryview(header), 0)
        return _ReadFile(name, file.size, bytes(header), link)


def _weight_map(data: bytes, path: str) -> dict[str, str]:
    """Which file has each key, as an index says, its names checked."""
    try:
        members = _decode_index_json(data)
        weights = _decode_weight_map(members["weight_map"])
    except KeyError as error:
        raise _corrupt(path, "it has no weight_map") from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _corrupt(path, f"it is not the expected JSON ({error})") from error
    # What comes twice in JSON would be counted once.
    is_double = count_strings(data) != len(members) + sum(map(count_strings, map(bytes, members.values())))
    if is_double or count_strings(bytes(members["weight_map"])) != 2 * len(weights):
        raise _corrupt(path, "it has a name twice")
    for key, name in weights.items():
        if _SAFE_NAME.fullmatch(name) is None or name in (".", ".."):
            problem = f"it has {key[:200]!r} in {name[:200]!r}, which could lead out of the folder"
            raise _corrupt(path, problem, key, advice="do not trust it")
        if not name.endswith(SUFFIX):
            raise _corrupt(path, f"{key[:200]!r} is in {name!r}, which is no safetensors file", key)
    return weights


# --- decoding --------------------------------------------------------------------------------------------------------


class _Row(NamedTuple):
    """A chunk as the header of file number ``file`` has it; ``offset`` counts from the start of the file."""

    file: int
    offset: int
    tensor: Tensor


def decode_folder(path: str | os.PathLike[str], data: CatalogBytes) -> Catalog:
    """The catalog of ``path``, of which this was read; CorruptError for what does not fit together."""
    found = _unpack(data.manifest)
    directory = posix.absolute(path)
    directory = directory if found.is_directory else os.path.dirname(directory)
    paths = [os.path.join(directory, file.name) for file in found.files]
    index_path = os.path.join(directory, found.index_name) if found.index_name else ""
    by_key: dict[str, list[_Row]] = {}
    count = 0
    for number, (file, path) in enumerate(zip(found.files, paths, strict=True)):
        tensors = decode_any_header(file.header, file_bytes=file.size, path=path)
        count += len(tensors)
        if count > MAX_TENSORS:
            raise _corrupt(path, f"there are more than {MAX_TENSORS} tensors", tensors[0].key)
        for tensor in tensors:
            by_key.setdefault(tensor.key, []).append(_Row(number, len(file.header) + tensor.begin, tensor))
    if found.index_name:
        _check_weight_map(_weight_map(found.index, index_path), by_key, found.files, index_path)
    keys = sorted(by_key)
    entries = tuple(_entry(key, by_key[key], paths) for key in keys)
    index = _chunk_index([by_key[key] for key in keys])
    files = tuple(
        FileEntry(name=each.name, bytes=each.size, header=len(each.header), digest="") for each in found.files
    )
    check_index(index, files=files, tensors=entries, path=repr(directory))
    writer = WriterEntry(holdfast="", torch="", python="", world_size=1)
    if found.has_notes:
        notes_path = os.path.join(directory, NOTES_NAME)
        notes = decode_notes(data.index, path=repr(notes_path))
        index = _noted_index(notes, found.files, index, entries, notes_path)
        files, writer = notes.files, notes.writer
    attempt = to_hex(digest(data.manifest)) + to_hex(digest(data.index))
    manifest = Manifest(
        attempt=attempt,
        writer=writer,
        files=files,
        index=IndexEntry(name=found.index_name, bytes=len(found.index) + len(data.index), digest=""),
        tensors=entries,
        values=(),
    )
    links = {file.name: file.link for file in found.files if file.link}
    return Catalog(directory=directory, manifest=manifest, index=index, has_digests=found.has_notes, links=links)


def _check_weight_map(
    weights: Mapping[str, str], by_key: Mapping[str, Sequence[_Row]], files: Sequence[_ReadFile], path: str
) -> None:
    """CorruptError unless each key is in the file that the index names, and no file has another."""
    names = {(key, files[row.file].name) for key, rows in by_key.items() for row in rows}
    for key, name in weights.items():
        if (key, name) not in names:
            raise _corrupt(path, f"it has {key[:200]!r} in {name!r}, which does not have it", key)
    for key, name in sorted(names - set(weights.items())):
        raise _corrupt(path, f"it does not say that {name!r} has {key[:200]!r}", key)


def _entry(key: str, rows: list[_Row], paths: Sequence[str]) -> TensorEntry:
    """The tensor that ``rows`` hold, all of it or each a part."""
    first = rows[0]
    if len(rows) == 1 and not first.tensor.is_part:
        return TensorEntry(key=key, dtype=first.tensor.dtype, shape=first.tensor.shape)
    if not all(row.tensor.is_part for row in rows):
        names = _listed(os.path.basename(paths[row.file]) for row in rows)
        problem = f"{key[:200]!r} is in each of {names}"
        advice = "pass the path of the one that you want, or move the others away"
        raise _corrupt(os.path.dirname(paths[first.file]), problem, key, advice=advice)
    for row in rows:
        if row.tensor.dtype != first.tensor.dtype or len(row.tensor.shape) != len(first.tensor.shape):
            problem = f"{key[:200]!r} has another dtype or number of dimensions than in {paths[first.file]!r}"
            raise _corrupt(paths[row.file], problem, key)
    ends = ([low + size for low, size in zip(row.tensor.lo, row.tensor.shape, strict=True)] for row in rows)
    shape = tuple(map(max, zip(*ends, strict=True)))
    if math.prod(size or 1 for size in shape) * DTYPES[first.tensor.dtype].itemsize >= MAX_FILE_BYTES:
        raise _corrupt(paths[first.file], f"{key[:200]!r} is too large", key)
    return TensorEntry(key=key, dtype=first.tensor.dtype, shape=shape)


def _chunk_index(tensors: list[list[_Row]]) -> ChunkIndex:
    """All chunks, in the order of an index; the digests are zeros, however many, in the memory of one."""
    for rows in tensors:
        rows.sort(key=lambda row: (row.tensor.lo, row.file))
    rows = list(chain.from_iterable(tensors))
    columns = [(row.file, row.offset, row.tensor.end - row.tensor.begin) for row in rows]
    file, offset, nbytes = np.array(columns, dtype=np.int64).reshape(-1, 3).T
    return ChunkIndex(
        tensor=np.repeat(np.arange(len(tensors)), [len(each) for each in tensors]),
        file=file,
        offset=offset,
        bytes=nbytes,
        lo=padded([row.tensor.lo for row in rows], fill=0),
        length=padded([row.tensor.shape for row in rows], fill=1),
        digests=np.broadcast_to(np.uint64(0), int(block_counts(nbytes).sum())),
    )


def _noted_index(
    notes: FolderNotes, files: Sequence[_ReadFile], headers: ChunkIndex, tensors: Sequence[TensorEntry], path: str
) -> ChunkIndex:
    """The chunks of holdfast.json, with their digests; CorruptError where they are not those of the ``headers``."""
    if [(file.name, file.bytes) for file in notes.files] != [(file.name, file.size) for file in files]:
        odd = {(file.name, file.bytes) for file in notes.files} ^ {(file.name, file.size) for file in files}
        raise _does_not_fit(path, f"{min(odd)[0]!r} is not there, is more than was written, or has another size")
    index = decode_index(notes.chunks, path=repr(path))
    try:
        check_index(index, files=notes.files, tensors=tensors, path=repr(path))
    except CorruptError as error:
        raise _does_not_fit(
            path, error.message.partition(": ")[2].removesuffix("; use another checkpoint"), error.key
        ) from error
    if len(headers) != len(tensors):
        raise _does_not_fit(path, "a tensor is in several parts")
    wrong = _misplaced(index, headers, tensors)
    if wrong.any():
        key = tensors[int(index.tensor[wrong.argmax()])].key
        raise _does_not_fit(path, f"{key[:200]!r} lies elsewhere in its file", key)
    order = np.lexsort((index.bytes, index.offset, index.file))
    bounds = np.searchsorted(index.file[order], np.arange(len(files) + 1)).tolist()
    first = index.first_block()
    for number, (file, noted) in enumerate(zip(files, notes.files, strict=True)):
        rows = order[bounds[number] : bounds[number + 1]]
        counts = first[rows + 1] - first[rows]
        blocks = np.repeat(first[rows] - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        if len(file.header) != noted.header or file_digest(file.header, index.digests[blocks]) != noted.digest:
            raise _does_not_fit(path, f"the header of {file.name!r} is not the one that was written")
    return index


def _misplaced(index: ChunkIndex, headers: ChunkIndex, tensors: Sequence[TensorEntry]) -> np.ndarray:
    """Which chunks are not those bytes of a file that the header has for their part of a tensor.

    Each tensor is in one piece in its file; a chunk may be any run of it.
    """
    width = index.lo.shape[1]
    shape = padded([(*entry.shape, *(1,) * (width - len(entry.shape))) for entry in tensors], fill=1)[index.tensor]
    itemsize = np.array([DTYPES[entry.dtype].itemsize for entry in tensors], dtype=np.int64)[index.tensor]
    stride = _products_after(shape)
    place = headers.offset[index.tensor] + (index.lo * stride).sum(axis=1) * itemsize
    rest_is_full = _products_after((index.length == shape).astype(np.int64)) == 1
    is_run = ((index.length <= 1) | rest_is_full).all(axis=1)
    misplaced: np.ndarray = (index.offset != place) | ~is_run
    misplaced &= index.bytes > 0
    misplaced |= index.file != headers.file[index.tensor]
    return misplaced


def _products_after(table: np.ndarray) -> np.ndarray:
    """For each place in a row the product of what comes after it."""
    after = np.concatenate([table[:, 1:], np.ones((len(table), 1), np.int64)], axis=1)[:, : table.shape[1]]
    products: np.ndarray = np.cumprod(after[:, ::-1], axis=1)[:, ::-1]
    return products


def _listed(names: Iterable[str]) -> str:
    """Some names, and how many more there are."""
    shown = sorted(set(names))
    more = f" and {len(shown) - 4} more" if len(shown) > 4 else ""
    return ", ".join(repr(name[:200]) for name in shown[:4]) + more


def _does_not_fit(path: str, problem: str, key: str | None = None) -> CorruptError:
    return CorruptError(
        f"{path!r} does not fit the files beside it: {problem}; they are damaged, or another program has written them "
        "anew: use another copy, or remove holdfast.json to load without checks",
        path=path,
        key=key,
    )


def _corrupt(path: str, problem: str, key: str | None = None, *, advice: str = "use another copy") -> CorruptError:
    return CorruptError(f"{path!r} cannot be read: {problem}; {advice}", path=path, key=key)
