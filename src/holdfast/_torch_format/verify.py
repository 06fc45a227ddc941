"""Every item of a checkpoint in torch's format, as far as the format lets one tell, and all the damage there is.

The metadata decodes and says where every chunk is; chunks tile their tensors; files are there and large enough; no two
items overlap; each archive is one, is of the size that the metadata says, and every record has its checksum. What has
no checksum is counted and reported. Memory is bounded by the slabs. Never changes a file, never decodes a value.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from holdfast._io import posix
from holdfast._io.direct import ALIGNMENT, InputFile, LocalFiles
from holdfast._io.pipeline import default_workers, run_bounded
from holdfast._io.slabs import SLAB_BYTES, SlabRing
from holdfast._native.verify import Damage, VerifyReport, problem_of
from holdfast._torch_codec.archive import find_tensor, records
from holdfast._torch_codec.metadata_file import METADATA_NAME, find_place
from holdfast._torch_format.file_systems import local_path
from holdfast._torch_format.items import Item
from holdfast._torch_format.reader import FileSystemReader
from holdfast._torch_format.reading import Ends
from holdfast.errors import CorruptError, StorageError
from holdfast.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from holdfast.planner_helpers import tiling_faults

_Progress = Callable[[int, int], None]
_DIRECT_BYTES = 1 << 20
_WITHOUT_CHECKSUM = "were written without checksums"
_OPAQUE = "are no plain archives, so that only their places were checked"
_TRANSFORMED = "went through stream transforms, so that only their places were checked"


def verify_torch_checkpoint(path: str | os.PathLike[str], *, on_progress: _Progress | None = None) -> VerifyReport:
    """What a look at every item of the checkpoint at ``path`` found; ``unchecked`` says what nobody could tell.

    Raises:
        NotFoundError: there is no checkpoint.
        CorruptError, UnsafeError: the metadata does not decode, so that nothing else can be said.
        StorageError: the file system refused; this tells nothing about the bytes.
    """
    begin = time.perf_counter()
    while True:
        report, was_replaced = _verified(path, begin, on_progress)
        if not was_replaced:
            return report


def _verified(path: str | os.PathLike[str], begin: float, on_progress: _Progress | None) -> tuple[VerifyReport, bool]:
    """The report, and whether a saver replaced the checkpoint meanwhile, so that damage means nothing."""
    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    names = reader.metadata_names()
    # Ranks that saved apart may have other things under the same key: each of them is somebody's.
    apart = {name: reader.read_metadata(rank=rank) for rank, name in enumerate(names) if name != METADATA_NAME}
    verification = _ItemChecks(reader.path, metadata, apart or {METADATA_NAME: metadata}, on_progress)
    damage = verification.run()
    report = VerifyReport(
        files=len(verification.names) + len(names),
        bytes=verification.total_bytes,
        keys=len(metadata.state_dict_metadata),
        seconds=time.perf_counter() - begin,
        damage=damage,
        unchecked=tuple(verification.unchecked()),
    )
    return report, bool(damage) and reader.was_replaced()


class _ItemChecks:
    def __init__(
        self,
        path: str | os.PathLike[str],
        metadata: Metadata,
        parts: Mapping[str, Metadata],
        on_progress: _Progress | None,
    ) -> None:
        self._metadata = metadata
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._damage: list[tuple[int, int, Damage]] = []
        self._unchecked: Counter[str] = Counter()
        self._done = 0
        self._items = [item for name, part in parts.items() for item in self._places(name, part)]
        self.names = list(dict.fromkeys(item.place.relative_path for item, _ in self._items))
        self._numbers = {name: number for number, name in enumerate(self.names)}
        paths = [local_path(path, name) for name in self.names]
        self._files = LocalFiles(paths, [0] * len(paths), at_least=True)
        statuses = zip(self.names, map(posix.file_status, paths), strict=True)
        self._sizes = {name: None if status is None else status.st_size for name, status in statuses}
        self.total_bytes = sum(item.place.length for item, _ in self._items)

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
                    self._note_metadata(name, key, f"does not say where{where} it is stored")

    def run(self) -> tuple[Damage, ...]:
        """All damage, in file order; that of the metadata first."""
        for key, problem in tiling_faults(self._metadata):
            self._note_metadata(METADATA_NAME, key, problem)
        self._check_overlaps()
        workers = default_workers()
        ring = SlabRing(workers)
        self._items.sort(key=lambda pair: (self._numbers[pair[0].place.relative_path], pair[0].place.offset))
        try:
            run_bounded((partial(self._check_item, *pair, ring) for pair in self._items), workers=workers)
        finally:
            ring.close()
            self._files.close()
        return tuple(damage for _, _, damage in sorted(self._damage, key=lambda found: found[:2]))

    def unchecked(self) -> Iterator[str]:
        yield "the metadata has no checksum"
        yield from (f"{counted} items {why}" for why, counted in self._unchecked.items())

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
            elif place.transform_descriptors:
                self._count(_TRANSFORMED)
            else:
                self._check_archive(item, chunk, ring)
        except (CorruptError, StorageError) as error:
            self._note(place.relative_path, item.key, span, problem_of(error))
        with self._lock:
            self._done += place.length
            if self._on_progress is not None:
                self._on_progress(self._done, self.total_bytes)

    def _check_archive(self, item: Item, chunk: ChunkStorageMetadata | None, ring: SlabRing) -> None:
        name, offset, length = item.place.relative_path, item.place.offset, item.place.length
        with self._files.lend(self._numbers[name]) as (file, is_cached):
            read = Ends(file, item.place).read
            found = records(read, length)
            if found is None:
                self._count(_OPAQUE)
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
            self._count(_WITHOUT_CHECKSUM)

    def _note(self, file: str, key: str, span: tuple[int, int], problem: str) -> None:
        with self._lock:
            damage = Damage(file=file, key=key, span=span, problem=problem)
            self._damage.append((self._numbers[file], span[0], damage))

    def _note_metadata(self, name: str, key: str, problem: str) -> None:
        damage = Damage(file=name, key=key, span=(0, 0), problem=problem)
        with self._lock:
            self._damage.append((-1, len(self._damage), damage))

    def _count(self, why: str) -> None:
        with self._lock:
            self._unchecked[why] += 1


def _checksum(file: InputFile, begin: int, end: int, ring: SlabRing, *, is_cached: bool) -> int:
    """The CRC-32 of bytes [begin, end) of ``file``, read through a slab."""
    checksum = 0
    with ring.lend() as slab:
        while begin < end:
            base = begin if is_cached else begin - begin % ALIGNMENT
            stop = min(end, base + SLAB_BYTES)
            if is_cached:
                file.read_into(slab.view[: stop - base], base)
            else:
                file.read_direct_into(slab.view[: stop - base + -(stop - base) % ALIGNMENT], base)
            checksum = zlib.crc32(slab.view[begin - base : stop - base], checksum)
            begin = stop
    return checksum
