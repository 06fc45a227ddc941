"""open: a checkpoint of any format as a lazy, read-only mapping from keys to tensors that read only what is asked of
them. verify: whether it is whole, and all that is damaged if it is not.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import EllipsisType
from typing import Any, get_args

import numpy as np
import torch

from holdfast import events
from holdfast._huggingface.folder import is_folder
from holdfast._huggingface.reader import HuggingFaceReader, verify_folder
from holdfast._io import posix
from holdfast._native.catalog import Catalog
from holdfast._native.publish import format_at
from holdfast._native.reader import CatalogReader, NativeReader
from holdfast._native.verify import Level, VerifyReport, verify_checkpoint
from holdfast._process import collector_paused
from holdfast._ranks.ranks import Ranks
from holdfast._state.tensors import empty_quantized, empty_tensor
from holdfast._torch_classes.adapt import metadata_of_rank
from holdfast._torch_classes.translate import metadata_from_torch
from holdfast._torch_format.file_systems import is_for_fsspec, is_remote
from holdfast._torch_format.reader import FileSystemReader, FsspecReader, verify_torch_checkpoint
from holdfast._values.box import Box, whole
from holdfast._values.deadline import Progress
from holdfast._values.lazy import LazyList, cached_property
from holdfast._values.shown import few, html_table, shown_bytes
from holdfast._values.statistics import TensorStatistics
from holdfast.default_planner import DefaultLoadPlanner
from holdfast.errors import CorruptError, InvalidStateError, NotFoundError, StorageError
from holdfast.events.progress import OnBytes, following_bytes
from holdfast.metadata import STATE_DICT_TYPE, Metadata, TensorStorageMetadata
from holdfast.planner import LoadPlan, ReadColumns
from holdfast.planner_helpers import ReadRows, check_tiling
from holdfast.storage import StorageReader

__all__ = ["Checkpoint", "StoredTensor", "VerifyReport", "open", "verify"]


def is_torch_format(path: str | os.PathLike[str]) -> bool:
    """Whether the checkpoint at ``path`` is in torch's own format; at a URL that only fsspec knows always.

    CorruptError where another program left one of each, and nothing tells which one is meant.
    """
    return is_for_fsspec(path) or format_at(path) == "torch"


def is_hugging_face(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` holds no checkpoint, but safetensors files of somebody's."""
    return not is_for_fsspec(path) and format_at(path) is None and is_folder(path)


def torch_reader(
    path: str | os.PathLike[str], *, verify: bool = True, cast: bool = False, allow_pickle: bool = False
) -> FileSystemReader:
    """The reader of the checkpoint at ``path``, a directory or URL, which is in torch's own format.

    ``verify`` lets its files be checked as far as that costs no time; see ``FileSystemReader``.
    """
    # What it holds in torch's format in a store was found by the client of the store, and is read through fsspec.
    reader = FsspecReader if is_remote(path) else FileSystemReader
    return reader(path, verify=None if verify else False, cast=cast, allow_pickle=allow_pickle)


def reader_for(
    path: str | os.PathLike[str], *, verify: bool = True, cast: bool = False, allow_pickle: bool = False
) -> CatalogReader | FileSystemReader:
    """The reader of the checkpoint at ``path``; where nothing is, the native one, which says so when it reads."""
    reader = torch_reader if is_torch_format(path) else HuggingFaceReader if is_hugging_face(path) else NativeReader
    return reader(path, verify=verify, cast=cast, allow_pickle=allow_pickle)


class Door:
    """What is raised inside of it where nothing is found looks as if raised here: how it was found out helps nobody."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, NotFoundError):
            raise error.with_traceback(None) from None


def metadata_for(reader: StorageReader, rank: int) -> tuple[Metadata, bool]:
    """What the checkpoint says of itself, whole; True beside it where that is only what ``rank`` said, saving apart."""
    try:
        metadata = metadata_from_torch(reader.read_metadata())
    except Exception:
        own = None if reader.is_always_whole else metadata_of_rank(reader, rank)
        if own is None:
            raise
        return own, True
    if not reader.is_always_whole:
        check_tiling(metadata)
    return metadata, False


def metadata_on_all(reader: StorageReader, ranks: Ranks, share: str) -> tuple[Metadata, bool]:
    """What the checkpoint says of itself; True beside it where ranks saved apart, and it is what this one said.

    Where storage and ranks can share what they read, it is read once for all ranks of a host.
    """
    reader.own_rank = ranks.rank
    reader.progress = progress = Progress(ranks.check)
    ranks.follow(lambda: progress.done, lambda: reader.file_at_work, lambda: progress.total)
    if share != "off" and ranks.size > 1:
        metadata = reader.read_metadata_once(ranks, between_hosts=share == "job")
        if metadata is not None:
            return metadata, False
    opened: list[tuple[Metadata, bool]] = []

    def read_metadata() -> tuple[bool, str | None]:
        metadata, is_apart = metadata_for(reader, ranks.rank)
        opened.append((metadata, is_apart))
        meta = None if is_apart else metadata.storage_meta
        return is_apart, None if meta is None else meta.save_id

    ranks.all_reduce("reading the metadata", read_metadata, _one_save)
    return opened[0]


def _one_save(saves: list[tuple[bool, str | None]]) -> None:
    """CorruptError unless all ranks have read the metadata of the same save: one of them was replaced meanwhile."""
    if len(set(saves)) > 1:
        raise CorruptError("the checkpoint was replaced by another one while it was opened")


Index = int | slice | EllipsisType


class StoredTensor:
    """A tensor on disk: ``shape``, ``dtype`` and ``nbytes`` read nothing, an index reads only that part."""

    def __init__(self, checkpoint: Checkpoint, key: str, stored: TensorStorageMetadata) -> None:
        self._checkpoint = checkpoint
        self.key = key
        self.shape = stored.size
        self.dtype = stored.properties.dtype
        self.alias_of = stored.alias_of
        self.chunks = len(stored.chunks)
        self._stored = stored

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __getitem__(self, index: Index | tuple[Index, ...]) -> torch.Tensor:
        """The part that ``index`` selects, as a new CPU tensor; ``[...]`` reads all of it."""
        box, view = _selection(index if isinstance(index, tuple) else (index,), self.shape, self.key)
        return self._checkpoint._read([(self.key, box)])[0][view]

    def read_into(self, target: torch.Tensor, box: Box) -> None:
        """Fill ``target``, a tensor of this dtype and of the box's lengths, with the elements of ``box``."""
        self._checkpoint._read_into(self.key, self._stored, box, target)

    def __repr__(self) -> str:
        return f"StoredTensor({self.key!r}, shape={list(self.shape)}, dtype={self.dtype})"


_MOST_DTYPES, _MOST_LARGEST = 8, 10  # that a notebook shows


class Checkpoint(Mapping[str, Any]):
    """A published checkpoint: a mapping from keys to ``StoredTensor``, or to the value if it is not a tensor.

    If the checkpoint is replaced or deleted, this still reads the one that was opened while its files exist, and then
    raises a StorageError (ESTALE), or NotFoundError. Close it, or use it in a ``with`` block.
    """

    def __init__(self, reader: CatalogReader | FileSystemReader) -> None:
        self._reader = reader
        self._bytes_read: int | None = None
        self.metadata: Metadata = reader.read_metadata()
        if not reader.is_always_whole:
            check_tiling(self.metadata)
        reader.set_up_storage_reader(self.metadata, True)

    @property
    def user_metadata(self) -> dict[str, Any]:
        """What the saver kept beside the state."""
        return self.metadata.user_metadata

    @cached_property
    def statistics(self) -> Mapping[str, TensorStatistics] | None:
        """The numbers of each tensor that ``SaveOptions(statistics=True)`` kept; None where the save kept none.

        No data is read for them. CorruptError where they are damaged.
        """
        catalog = catalog_of(self)
        with self._noticing_replacement():
            return None if catalog is None else catalog.statistics()

    @property
    def bytes_read(self) -> int:
        return self._reader.bytes_read if self._bytes_read is None else self._bytes_read

    def __getitem__(self, key: str) -> Any:
        stored = self.metadata.state_dict_metadata[key]
        if isinstance(stored, TensorStorageMetadata):
            return StoredTensor(self, key, stored)
        return self._read_values([key])[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.metadata.state_dict_metadata)

    def __len__(self) -> int:
        return len(self.metadata.state_dict_metadata)

    def __contains__(self, key: object) -> bool:
        return key in self.metadata.state_dict_metadata

    def _read(self, boxes: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        """A box of a tensor for each of ``boxes``, all read at once."""
        rows, target = ReadRows(), dict[str, Any]()
        for key, box in boxes:
            stored = self.metadata.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata)
            if stored.quantizer is None:
                tensor = empty_tensor(box.lengths, stored.properties.dtype)
            else:
                tensor = empty_quantized(stored.size, stored.properties.dtype, stored.quantizer)
            if tensor.is_quantized and box != whole(stored.size):
                raise InvalidStateError(
                    f"{key!r} is quantised and cannot be read in parts; read it whole, with [...]", key=key
                )
            rows.add_tensor(key, stored, box)
            target[str(len(target))] = tensor  # several may be of one key
        return list(self._fetch(target, replace(rows.columns(), keys=list(target))).values())

    def _read_values(self, keys: Iterable[str]) -> dict[str, object]:
        rows, target = ReadRows(), dict.fromkeys(keys)
        for key in target:
            rows.add_value(key)
        return self._fetch(target, rows.columns())

    def _read_into(self, key: str, stored: TensorStorageMetadata, box: Box, tensor: torch.Tensor) -> None:
        rows = ReadRows()
        rows.add_tensor(key, stored, box)
        self._fetch({key: tensor}, rows.columns())

    def _check_open(self) -> None:
        if self._bytes_read is not None:
            raise ValueError("the checkpoint is closed; open it again to read from it")

    def _fetch(self, target: STATE_DICT_TYPE, wanted: ReadColumns) -> STATE_DICT_TYPE:
        """``target``, filled with what is wanted."""
        self._check_open()
        planner = DefaultLoadPlanner(flatten_state_dict=False, allow_pickle=self._reader.allow_pickle)
        planner.set_up_planner(target, self.metadata)
        with self._noticing_replacement():
            self._reader.read_data(LoadPlan(LazyList(wanted)), planner).wait()
        return target

    @contextlib.contextmanager
    def _noticing_replacement(self) -> Iterator[None]:
        """Tells damage from files that are gone because the checkpoint was replaced or deleted."""
        try:
            yield
        except CorruptError as error:
            if not self._reader.was_replaced():
                raise
            path = os.fspath(self._reader.path)
            if format_at(path) is None and not is_folder(path):
                raise NotFoundError(f"the checkpoint at {path!r} was deleted since it was opened") from error
            raise StorageError(
                f"the checkpoint at {path!r} was replaced by another one since it was opened, and its files are gone; "
                "open it again",
                errno=errno.ESTALE,
                path=path,
            ) from error

    def close(self) -> None:
        """Close the files. What was read stays valid; nothing more can be read."""
        self._bytes_read = self.bytes_read
        self._reader.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({os.fspath(self._reader.path)!r}, {len(self)} keys)"

    def _repr_html_(self) -> str:
        """What a notebook shows: totals, types, and the largest tensors; nothing is read for it."""
        entries = self.metadata.state_dict_metadata.items()
        tensors = {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}
        sizes, by_dtype = Counter[str](), Counter[str]()
        for key, entry in tensors.items():
            dtype = entry.properties.dtype
            sizes[key] = 0 if entry.alias_of else entry.size.numel() * dtype.itemsize
            by_dtype[str(dtype).removeprefix("torch.")] += sizes[key]
        kind = "torch.distributed.checkpoint"
        if isinstance(self._reader, CatalogReader):
            kind = "Hugging Face folder" if isinstance(self._reader, HuggingFaceReader) else "native"
        dtypes = (f"{dtype} {shown_bytes(nbytes)}" for dtype, nbytes in by_dtype.most_common(_MOST_DTYPES))
        own = self.user_metadata
        facts = {
            "format": kind,
            "holds": f"{len(tensors):,} tensors, {len(self) - len(tensors):,} values, {shown_bytes(sizes.total())}",
            "types": ", ".join(dtypes),
            "user metadata": few(own, len(own), "{}"),
        }
        largest = [(key, tensors[key]) for key, _ in sizes.most_common(_MOST_LARGEST)]
        rows = [
            (key, str(found.properties.dtype).removeprefix("torch."), str([*found.size]), shown_bytes(sizes[key]))
            for key, found in largest
        ]
        return html_table(os.fspath(self._reader.path), facts, ("the largest", "dtype", "shape", "bytes"), rows)


def read_boxes(checkpoint: Checkpoint, boxes: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
    """The elements of each of ``boxes``, of tensors of these keys, as CPU tensors; all are read at once."""
    return checkpoint._read(boxes)


def read_values(checkpoint: Checkpoint, keys: Iterable[str]) -> dict[str, object]:
    """The values of these keys, which are no tensors; all are read at once."""
    return checkpoint._read_values(keys)


def catalog_of(checkpoint: Checkpoint) -> Catalog | None:
    """Manifest and index, or what stands for them in a Hugging Face folder; None in torch's format."""
    checkpoint._check_open()
    return checkpoint._reader.catalog if isinstance(checkpoint._reader, CatalogReader) else None


@collector_paused
def open(path: str | os.PathLike[str], *, verify: bool = True, allow_pickle: bool = False) -> Checkpoint:
    """Open the checkpoint at ``path``, in any format, or a Hugging Face folder; tensors are read when you index them.

    With ``verify``, a read takes whole 1 MiB blocks and checks them; without it only the bytes wanted and small gaps
    between them. In torch's format a read takes only the bytes wanted, and checks them if they are a whole chunk.

    Examples:
        >>> with holdfast.open("checkpoints/step-100") as checkpoint:
        ...     rows = checkpoint["model.weight"][2:4]
    """
    with Door():
        while True:
            reader = reader_for(path, verify=verify, allow_pickle=allow_pickle)
            try:
                return Checkpoint(reader)
            except NotFoundError:
                # A saver may have replaced it by one of the other format meanwhile.
                if type(reader_for(path)) is type(reader):
                    raise


@collector_paused
def verify(
    path: str | os.PathLike[str],
    *,
    level: Level = "digests",
    sample: float = 1.0,
    progress: bool | OnBytes = False,
) -> VerifyReport:
    """Check every byte of the checkpoint at ``path``, and report all damage; nothing is changed or decoded.

    Not everything in torch's own format, or in a Hugging Face folder, can be checked; the report says what was not.

    Args:
        path: the directory of the checkpoint, or a safetensors file.
        level: "sizes" checks that each file exists and has its size; "coverage" also reads the index, and checks that
            the chunks cover every tensor and every file; "digests" reads everything.
        sample: the part of the data that "digests" reads, chosen at random each time.
        progress: True for a bar on the terminal; a function is called with the bytes done and the bytes in all, from
            any thread.

    Raises:
        NotFoundError: there is no checkpoint.
        CorruptError: the manifest or the index is damaged, so nothing else can be checked.
        StorageError: the file system refused; the checkpoint may still be whole.

    Examples:
        >>> holdfast.verify("checkpoints/step-100").ok
        True
    """
    if is_for_fsspec(path):
        raise ValueError("verify does not read from this kind of URL; copy the checkpoint to a directory first")
    if sample < 1 and level != "digests":
        raise ValueError("only level 'digests' reads a sample; leave out the level")
    is_torchs = is_torch_format(path)
    if is_torchs and is_remote(path):
        raise ValueError(f"{os.fspath(path)!r} is in torch's format; copy it to a directory, and verify it there")
    if is_torchs and (level not in get_args(Level) or sample != 1):
        raise ValueError(f"level must be one of {get_args(Level)}, and torch's own format has no sample to choose")
    with (
        Door(),
        events.Operation("verify", posix.absolute(path)) as operation,
        following_bytes(progress, f"verifying {os.path.basename(os.fspath(path))}") as on_progress,
    ):
        if is_hugging_face(path):
            report = verify_folder(path, level=level, sample=sample, on_progress=on_progress)
        elif is_torchs:
            report = verify_torch_checkpoint(path, reads_data=level == "digests", on_progress=on_progress)
        else:
            report = verify_checkpoint(path, level=level, sample=sample, on_progress=on_progress)
        damage = f"{len(report.damaged_keys)} keys and {len(report.damaged_files)} files are damaged"
        operation.tell("verified", nbytes=report.bytes, problem="" if report.ok else damage)
        return report


def _selection(index: tuple[Index, ...], shape: torch.Size, key: str) -> tuple[Box, tuple[int | slice, ...]]:
    """The box to read for ``index``, and what to take of it (steps, and dimensions that an int drops)."""
    if any(part is Ellipsis for part in index):
        place = next(number for number, part in enumerate(index) if part is Ellipsis)
        missing = len(shape) - len(index) + 1
        index = (*index[:place], *([slice(None)] * missing), *index[place + 1 :])
    if len(index) > len(shape) or any(part is Ellipsis for part in index):
        raise IndexError(f"{key!r} has {len(shape)} dimensions, but the index has {len(index)}")
    offsets: list[int] = []
    lengths: list[int] = []
    view: list[int | slice] = []
    for size, part in zip(shape, (*index, *([slice(None)] * (len(shape) - len(index)))), strict=True):
        if isinstance(part, slice):
            start, stop, step = part.indices(size)
            if step < 1:
                raise IndexError(f"{key!r}: a step must be positive, as in torch")
            offsets.append(start)
            lengths.append(max(0, stop - start))
            view.append(slice(None, None, step))
        elif isinstance(part, (int, np.integer)) and not isinstance(part, bool):
            position = int(part) + size if part < 0 else int(part)
            if not 0 <= position < size:
                raise IndexError(f"{key!r}: index {part} is out of range for a dimension of {size}")
            offsets.append(position)
            lengths.append(1)
            view.append(0)
        else:
            raise IndexError(f"{key!r} can be indexed by ints, slices and ..., not by a {type(part).__name__}")
    return Box(tuple(offsets), tuple(lengths)), tuple(view)
