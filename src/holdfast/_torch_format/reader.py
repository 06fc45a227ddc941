"""torch's own on-disk format, ``.metadata`` and the files that it names: read, and checked as far as the format goes.

A check finds all the damage there is. The metadata decodes and says where every chunk is; chunks tile their tensors;
files are there and large enough; no two items overlap; each archive is one, is of the size that the metadata says, and
every record has its checksum. What has no checksum is counted and reported. Memory is bounded by the slabs. A check
never changes a file, and never decodes a value.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.futures import Future

from holdfast._io import posix
from holdfast._io.direct import ALIGNMENT, LocalFiles
from holdfast._io.files import FileToRead
from holdfast._io.slabs import SLAB_BYTES, SlabRing
from holdfast._native.verify import Damage, FileChecks, VerifyReport, problem_of
from holdfast._torch_classes.adapt import TorchLoadPlanner, final_load_plan
from holdfast._torch_classes.translate import metadata_for_both, places_from_torch
from holdfast._torch_codec.archive import find_tensor, records
from holdfast._torch_codec.metadata_file import (
    METADATA_NAME,
    decode_metadata,
    find_place,
    is_of_a_save,
    merge_metadata,
    metadata_name,
)
from holdfast._torch_format.file_systems import (
    FileSystem,
    Located,
    PathLike,
    RemoteFileSystem,
    is_local,
    local_path,
    read_whole,
)
from holdfast._torch_format.items import Delivery, Item, wanted_items
from holdfast._torch_format.reading import Ends, Layouts, StreamRead, TransformRegistry, read_ranges
from holdfast._values.digest import digest
from holdfast._values.lazy import LazyList
from holdfast.default_planner import DefaultLoadPlanner
from holdfast.errors import CorruptError, NotACheckpointError, NotFoundError, StorageError
from holdfast.events.progress import OnBytes
from holdfast.metadata import ChunkStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata
from holdfast.planner import LoadPlan, LoadPlanner, read_columns
from holdfast.planner_helpers import ReadRows, check_dtypes, check_tiling, tiling_faults
from holdfast.storage import StorageReader, finished


class FileSystemReader(Located, StorageReader):
    """Reads a checkpoint in torch's own format from the directory ``path``.

    On the local file system only the bytes that are wanted are read, in parallel; on another one (set ``fs``, as
    subclasses for object stores do) items are read whole through its streams. ``.metadata`` can become metadata
    and nothing else; ``allow_pickle`` lets it, and odd tensors, run code. ``cast`` lets a target of one floating type
    take another.

    ``verify`` is about the checksums of chunks that are read whole; parts have none. True checks them all, False none;
    None those that come from the disk, because for what the page cache holds it would take longer than all the rest.
    """

    def __init__(
        self,
        path: PathLike,
        _extension_registry: TransformRegistry | None = None,
        *,
        cast: bool = False,
        allow_pickle: bool = False,
        verify: bool | None = None,
    ) -> None:
        self.place_at(path, FileSystem())
        self.cast = cast
        self.allow_pickle = allow_pickle
        self.verify = verify
        self.load_id = str(uuid.uuid4())
        self.storage_data: dict[Any, Any] = {}
        self._registry = _extension_registry
        self._layouts: Layouts = {}
        self._seen: dict[str, int] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._sizes: dict[str, int] = {}

    @property
    def metadata_path(self) -> PathLike:
        return self.fs.concat_path(self.path, METADATA_NAME)

    @property
    def file_at_work(self) -> str:  # type: ignore[override]
        return posix.file_at_work(self.path)

    def reset(self, checkpoint_id: PathLike | None = None) -> None:
        """Forget what was read before; go on at ``checkpoint_id`` when it is given."""
        self.storage_data = {}
        if checkpoint_id:
            self.path = self.fs.init_path(checkpoint_id)
        self.load_id = str(uuid.uuid4())
        self._layouts = {}
        self.bytes_read = 0

    def close(self) -> None:
        """Nothing is open between two reads; forget the layouts."""
        self._layouts = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint says of itself; with ``rank``, what that rank wrote for itself alone.

        Where there is no common metadata, that of all ranks is put together; of what several of them have, each rank
        gets its own.
        """
        rank = kwargs.get("rank")
        self._seen = {}
        try:
            metadata = self._decode(metadata_name(rank))
        except NotFoundError:
            names = self.metadata_names()
            if rank is not None or not names:
                raise
            own = own_rank() if self.own_rank is None else self.own_rank
            metadata = merge_metadata(list(map(self._decode, names)), own=own)
            check_tiling(metadata)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        self._layouts = {}
        return metadata_for_both(metadata)

    def metadata_names(self) -> list[str]:
        """The files that describe the checkpoint: that of all ranks, or those that each wrote for itself."""
        if self._exists(METADATA_NAME):
            return [METADATA_NAME]
        return list(itertools.takewhile(self._exists, map(metadata_name, itertools.count())))

    def _exists(self, name: str) -> bool:
        return self.fs.exists(self.fs.concat_path(self.path, name))

    def _decode(self, name: str) -> Metadata:
        data = self._read_whole(name)
        self._seen[name] = digest(data)
        path = str(self.fs.concat_path(self.path, name))
        return decode_metadata(data, path=path, allow_pickle=self.allow_pickle)

    def was_replaced(self) -> bool:
        """Whether another save was published at the path, or this one deleted, since its metadata was read."""
        try:
            for name, seen in self._seen.items():
                if digest(self._read_whole(name)) != seen:
                    return True
        except NotFoundError:
            return True
        except (CorruptError, StorageError):
            pass
        return False

    def _read_whole(self, name: str) -> bytes:
        data = read_whole(self.fs, self.fs.concat_path(self.path, name))
        if data is None:
            raise self._nothing_there()
        return data

    def _nothing_there(self) -> NotFoundError:
        with contextlib.suppress(StorageError):  # it may be a file, or not be there
            if is_local(self.fs) and all(map(is_of_a_save, posix.list_names(self.path))):
                return NotFoundError(f"{str(self.path)!r} holds no finished checkpoint: no save to it was published")
        if self.fs.exists(self.path):
            return NotACheckpointError(f"{str(self.path)!r} is not a checkpoint: it has no {METADATA_NAME}")
        return NotFoundError(f"there is no checkpoint at {str(self.path)!r}: no such directory")

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not isinstance(metadata.storage_data, dict):
            raise CorruptError(f"the metadata of {str(self.path)!r} does not say where anything is stored")
        self.storage_data = places_from_torch(metadata.storage_data)
        entries = metadata.state_dict_metadata.items()
        self._dtypes = {key: entry.properties.dtype for key, entry in entries if hasattr(entry, "properties")}
        self._sizes = {
            key: entry.size.numel() * self._dtypes[key].itemsize for key, entry in entries if hasattr(entry, "size")
        }

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every item of ``plan``; ``verify`` says what is checked on the way."""
        plan, planner = final_load_plan(plan, planner, allow_pickle=self.allow_pickle)
        columns = read_columns(plan.items)
        items = wanted_items(columns, self.storage_data)
        delivery = Delivery(
            columns, planner, cast=self.cast, allow_pickle=self.allow_pickle, verify=self.verify is not False
        )
        if isinstance(planner, TorchLoadPlanner):  # which has compared nothing
            check_dtypes(planner, columns, self._dtypes, cast=self.cast)
        # A planner may refuse values, and that must be known before a tensor is touched.
        self._read(delivery, [item for item in items if item.is_value])
        delivery.deliver_values()
        self._read(delivery, [item for item in items if not item.is_value])
        return finished(None)

    def stored_values(self, keys: Collection[str], *, allow_pickle: bool) -> Mapping[str, object]:
        """All of them: reading some values is a load of its own."""
        planner, rows = DefaultLoadPlanner(flatten_state_dict=False, allow_pickle=allow_pickle), ReadRows()
        planner.set_up_planner(dict.fromkeys(keys))
        for key in keys:
            rows.add_value(key)
        self.read_data(LoadPlan(LazyList(rows.columns())), planner).wait()
        return planner.state_dict

    def _read(self, delivery: Delivery, items: list[Item]) -> None:
        by_range = [item for item in items if is_local(self.fs) and not item.place.transform_descriptors]
        by_stream = [item for item in items if not is_local(self.fs) or item.place.transform_descriptors]
        ends: dict[str, int] = {}
        for place in (item.place for item in by_range):
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        numbers = {name: number for number, name in enumerate(ends)}
        for item in by_range:
            item.file = numbers[item.place.relative_path]
        paths = [local_path(self.path, name) for name in ends]
        files = LocalFiles(paths, list(ends.values()), at_least=True)
        streams = StreamRead(self.fs, self.path, delivery, self._registry, self._sizes, self.progress)
        try:
            read_ranges(by_range, files, delivery, self._layouts, verify=self.verify, progress=self.progress)
            streams.run(by_stream)
        finally:
            files.close()
            self.bytes_read += files.bytes_read + streams.bytes_read

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_layouts": {}}


def own_rank() -> int:
    return (
        torch.distributed.get_rank() if torch.distributed.is_available() and torch.distributed.is_initialized() else 0
    )


class FsspecReader(FileSystemReader):
    """Reads a checkpoint in torch's format from the URL ``path``; ``options`` go to the file system of its scheme.

    ``cast``, ``allow_pickle`` and ``verify`` are those of ``FileSystemReader``.
    """

    kind = RemoteFileSystem

    def __init__(
        self,
        path: PathLike,
        *,
        cast: bool = False,
        allow_pickle: bool = False,
        verify: bool | None = None,
        **options: object,
    ) -> None:
        super().__init__(path, cast=cast, allow_pickle=allow_pickle, verify=verify)
        self.place_at(path, RemoteFileSystem(**options))


# --- checks ----------------------------------------------------------------------------------------------------------

_DIRECT_BYTES = 1 << 20
_WITHOUT_CHECKSUM = "were written without checksums"
_OPAQUE = "are no plain archives, so that only their places were checked"
_UNREAD = "were not read, only their places were checked"
_TRANSFORMED = "went through stream transforms, so that only their places were checked"


def verify_torch_checkpoint(
    path: str | os.PathLike[str], *, reads_data: bool = True, on_progress: OnBytes | None = None
) -> VerifyReport:
    """What a look at every item of the checkpoint at ``path`` found; ``unchecked`` says what nobody could tell.

    Without ``reads_data``, only the metadata is read, and files are there and large enough.
    """
    begin = time.perf_counter()
    while True:
        report, was_replaced = _verified(path, begin, on_progress, reads_data)
        if not was_replaced:
            return report


def _verified(
    path: str | os.PathLike[str], begin: float, on_progress: OnBytes | None, reads_data: bool
) -> tuple[VerifyReport, bool]:
    """The report, and whether a saver replaced the checkpoint meanwhile, so that damage means nothing."""
    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    names = reader.metadata_names()
    # Ranks that saved apart may have other things under the same key: each of them is somebody's.
    apart = {name: reader.read_metadata(rank=rank) for rank, name in enumerate(names) if name != METADATA_NAME}
    checks = _ItemChecks(reader.path, metadata, apart or {METADATA_NAME: metadata}, on_progress)
    checks.reads_data = reads_data
    damage = tuple(checks.run())
    report = VerifyReport(
        files=len(checks.names) + len(names),
        bytes=checks.total_bytes,
        keys=len(metadata.state_dict_metadata),
        seconds=time.perf_counter() - begin,
        damage=damage,
        unchecked=("the metadata has no checksum", *(f"{count} items {why}" for why, count in checks.unchecked())),
    )
    return report, bool(damage) and reader.was_replaced()


class _ItemChecks(FileChecks):
    reads_data = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        metadata: Metadata,
        parts: Mapping[str, Metadata],
        on_progress: OnBytes | None,
    ) -> None:
        self._metadata = metadata
        self._unchecked: list[str] = []
        self._unplaced: list[Damage] = []
        self._items = [item for name, part in parts.items() for item in self._places(name, part)]
        self.names = list(dict.fromkeys(item.place.relative_path for item, _ in self._items))
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self._items.sort(key=lambda pair: (self._numbers[pair[0].place.relative_path], pair[0].place.offset))
        paths = [local_path(path, name) for name in self.names]
        statuses = zip(self.names, map(posix.file_status, paths), strict=True)
        self._sizes = {name: None if status is None else status.st_size for name, status in statuses}
        total_bytes = sum(item.place.length for item, _ in self._items)
        super().__init__(LocalFiles(paths, [0] * len(paths), at_least=True), total_bytes, on_progress)

    def _places(self, name: str, metadata: Metadata) -> Iterator[tuple[Item, ChunkStorageMetadata | None]]:
        """Every item of ``metadata`` with its chunk; None for a value. Those without a place are damage of ``name``."""
        storage_data = metadata.storage_data if isinstance(metadata.storage_data, dict) else {}
        for key, stored in metadata.state_dict_metadata.items():
            chunks = list(stored.chunks) if isinstance(stored, TensorStorageMetadata) else [None]
            for chunk in chunks:
                place = find_place(storage_data, key, None if chunk is None else chunk.offsets)
                if place is not None:
                    yield Item(key=key, place=place, is_value=chunk is None), chunk
                else:
                    where = "" if chunk is None else f" at {list(chunk.offsets)}"
                    problem = f"does not say where{where} it is stored"
                    self._unplaced.append(Damage(file=name, key=key, span=(0, 0), problem=problem))

    def jobs(self, ring: SlabRing) -> Iterator[Callable[[], None]]:
        """Every item; what is wrong with the metadata is noted first."""
        faults = (
            Damage(file=METADATA_NAME, key=key, span=(0, 0), problem=problem)
            for key, problem in tiling_faults(self._metadata)
        )
        for damage in (*self._unplaced, *faults):
            self.note(-1, damage)
        self._check_overlaps()
        yield from (partial(self._check_item, *pair, ring) for pair in self._items)

    def unchecked(self) -> Iterable[tuple[str, int]]:
        """Why items could not be checked, and how many."""
        return Counter(self._unchecked).items()

    def _check_overlaps(self) -> None:
        """Two items in the same bytes: an honest writer may name one item twice, but never parts of it."""
        spans = sorted(
            {(self._numbers[item.place.relative_path], item.place.offset, item.place.length) for item, _ in self._items}
        )
        keys = {(item.place.relative_path, item.place.offset): item.key for item, _ in self._items}
        reached = (-1, 0)
        for number, offset, length in spans:
            if reached[0] == number and offset < reached[1]:
                name = self.names[number]
                span = (offset, offset + length)
                self._note(name, keys[name, offset], span, "it overlaps what is stored before it")
            reached = (number, max(offset + length, reached[1] if reached[0] == number else 0))

    def _check_item(self, item: Item, chunk: ChunkStorageMetadata | None, ring: SlabRing) -> None:
        place = item.place
        span = (place.offset, place.offset + place.length)
        size = self._sizes[place.relative_path]
        try:
            if size is None:
                self._note(place.relative_path, item.key, span, "the file is missing")
            elif span[1] > size:
                self._note(place.relative_path, item.key, span, f"the file ends at byte {size}")
            elif not self.reads_data or place.transform_descriptors:
                self._unchecked.append(_TRANSFORMED if self.reads_data else _UNREAD)
            else:
                self._check_archive(item, chunk, ring)
        except (CorruptError, StorageError) as error:
            self._note(place.relative_path, item.key, span, problem_of(error))
        self.progress.moved(place.length)

    def _check_archive(self, item: Item, chunk: ChunkStorageMetadata | None, ring: SlabRing) -> None:
        name, offset, length = item.place.relative_path, item.place.offset, item.place.length
        with self._files.lend(self._numbers[name]) as (file, is_cached):
            read = Ends(file, item.place).read
            found = records(read, length)
            if found is None:
                self._unchecked.append(_OPAQUE)
                return
            elements = None if chunk is None else find_tensor(read, length)
            if chunk is not None and elements is not None and elements.shape != tuple(chunk.sizes):
                problem = f"it has {list(elements.shape)} elements instead of {list(chunk.sizes)}"
                self._note(name, item.key, (offset, offset + length), problem)
            for record in found:
                start, stop = offset + record.begin, offset + record.begin + record.nbytes
                if record.checksum is None:
                    continue
                if record.nbytes < _DIRECT_BYTES:
                    checksum = zlib.crc32(read(record.begin, record.begin + record.nbytes))
                else:
                    checksum = _checksum(file, start, stop, ring, is_cached=is_cached)
                if checksum != record.checksum:
                    self._note(name, item.key, (start, stop), "not the bytes that were written")
        if any(record.checksum is None and record.nbytes for record in found):
            self._unchecked.append(_WITHOUT_CHECKSUM)

    def _note(self, file: str, key: str, span: tuple[int, int], problem: str) -> None:
        self.note(self._numbers[file], Damage(file=file, key=key, span=span, problem=problem))


def _checksum(file: FileToRead, begin: int, end: int, ring: SlabRing, *, is_cached: bool) -> int:
    """The CRC-32 of bytes [begin, end) of ``file``, read through a slab."""
    checksum = 0
    with ring.lend() as slab:
        while begin < end:
            stop = min(end, begin - begin % ALIGNMENT + SLAB_BYTES)
            base = file.read_range(slab.view, begin, stop, is_cached=is_cached)
            checksum = zlib.crc32(slab.view[begin - base : stop - base], checksum)
            begin = stop
    return checksum
