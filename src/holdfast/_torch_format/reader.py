"""The reader of torch's own on-disk format: ``.metadata`` and the files that it names."""

from __future__ import annotations

import contextlib
import errno
import itertools
import uuid
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.futures import Future

from holdfast._io import posix
from holdfast._io.direct import LocalFiles
from holdfast._native.publish import MANIFEST_NAME
from holdfast._torch_classes.adapt import TorchLoadPlanner, final_load_plan
from holdfast._torch_classes.translate import metadata_for_both
from holdfast._torch_codec.metadata_file import (
    METADATA_NAME,
    decode_metadata,
    is_of_a_save,
    merge_metadata,
    metadata_name,
)
from holdfast._torch_format.file_systems import (
    FileSystem,
    FileSystemBase,
    PathLike,
    RemoteFileSystem,
    is_local,
    local_path,
)
from holdfast._torch_format.items import Delivery, Item, wanted_items
from holdfast._torch_format.reading import Layouts, StreamRead, TransformRegistry, read_ranges
from holdfast._values.digest import digest
from holdfast._values.dtypes import MAX_METADATA_BYTES
from holdfast._values.lazy import LazyList
from holdfast.default_planner import DefaultLoadPlanner
from holdfast.errors import CorruptError, NotACheckpointError, NotFoundError, StorageError
from holdfast.metadata import Metadata, StorageMeta
from holdfast.planner import LoadPlan, LoadPlanner, read_columns
from holdfast.planner_helpers import ReadRows, check_dtypes, check_tiling
from holdfast.storage import StorageReader


class FileSystemReader(StorageReader):
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
        self.fs: FileSystemBase = FileSystem()
        self.path: PathLike = self.fs.init_path(path)
        self.cast = cast
        self.allow_pickle = allow_pickle
        self.verify = verify
        self.load_id = str(uuid.uuid4())
        self.storage_data: dict[Any, Any] = {}
        self._registry = _extension_registry
        self._layouts: Layouts = {}
        self._seen: dict[str, int] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._bytes_read = 0
        self._reading: tuple[LocalFiles | StreamRead, ...] = ()

    @property
    def checkpoint_id(self) -> PathLike:
        return self.path

    @property
    def metadata_path(self) -> PathLike:
        return self.fs.concat_path(self.path, METADATA_NAME)

    @property
    def bytes_read(self) -> int:  # type: ignore[override]
        """Bytes of data files that were read since the last reset."""
        return self._bytes_read + sum(running.bytes_read for running in self._reading)

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
        self._bytes_read = 0

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
        path = self.fs.concat_path(self.path, name)
        data = self._read_whole(path)
        self._seen[name] = digest(data)
        return decode_metadata(data, path=str(path), allow_pickle=self.allow_pickle)

    def was_replaced(self) -> bool:
        """Whether another save, in either format, has been published at the path since its metadata was read."""
        try:
            for name, seen in self._seen.items():
                if digest(self._read_whole(self.fs.concat_path(self.path, name))) != seen:
                    return True
        except NotFoundError:
            return self._exists(MANIFEST_NAME)
        except (CorruptError, StorageError):
            pass
        return False

    def _read_whole(self, path: PathLike) -> bytes:
        try:
            if is_local(self.fs):
                return posix.read_whole(path, limit=MAX_METADATA_BYTES)
            with self.fs.create_stream(path, "rb") as stream:
                data: bytes = stream.read(MAX_METADATA_BYTES + 1)
        except StorageError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise
            raise self._nothing_there() from error
        except FileNotFoundError as error:
            raise self._nothing_there() from error
        if len(data) > MAX_METADATA_BYTES:
            raise CorruptError(f"{str(path)!r} is larger than {MAX_METADATA_BYTES} bytes; use another checkpoint")
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
        self.storage_data = metadata.storage_data
        entries = metadata.state_dict_metadata.items()
        self._dtypes = {key: entry.properties.dtype for key, entry in entries if hasattr(entry, "properties")}

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

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
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def stored_values(self, keys: Collection[str], *, allow_pickle: bool) -> Mapping[str, object]:
        """All of them: reading some values is a load of its own."""
        planner, rows = DefaultLoadPlanner(flatten_state_dict=False, allow_pickle=allow_pickle), ReadRows()
        planner.set_up_planner(dict.fromkeys(keys))
        for key in keys:
            rows.add_value(key)
        self.read_data(LoadPlan(LazyList(rows.columns())), planner).wait()
        return planner.state_dict

    def _read(self, delivery: Delivery, items: list[Item]) -> None:
        by_range: list[Item] = []
        by_stream: list[Item] = []
        ends: dict[str, int] = {}
        for item in items:
            place = item.place
            if not is_local(self.fs) or place.transform_descriptors:
                by_stream.append(item)
                continue
            by_range.append(item)
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
        numbers = {name: number for number, name in enumerate(ends)}
        for item in by_range:
            item.file = numbers[item.place.relative_path]
        paths = [local_path(self.path, name) for name in ends]
        files = LocalFiles(paths, list(ends.values()), at_least=True)
        streams = StreamRead(self.fs, self.path, delivery, self._registry)
        self._reading = files, streams
        try:
            read_ranges(by_range, files, delivery, self._layouts, verify=self.verify)
            streams.run(by_stream)
        finally:
            files.close()
            self._bytes_read, self._reading = self.bytes_read, ()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        return FileSystem.validate_checkpoint_id(checkpoint_id)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reading": (), "_layouts": {}}


def own_rank() -> int:
    return (
        torch.distributed.get_rank() if torch.distributed.is_available() and torch.distributed.is_initialized() else 0
    )


class FsspecReader(FileSystemReader):
    """Reads a checkpoint in torch's format from the URL ``path``; ``options`` go to the file system of its scheme.

    ``cast``, ``allow_pickle`` and ``verify`` are those of ``FileSystemReader``.
    """

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
        self.fs = RemoteFileSystem(**options)
        self.path = self.fs.init_path(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: PathLike) -> bool:
        return RemoteFileSystem.validate_checkpoint_id(checkpoint_id)
