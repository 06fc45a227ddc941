"""Saving to an object store: chunks become objects, and one conditional put of the manifest is the commit.

Names and bytes are those of a directory. The steps of a commit, all of them the coordinator's:

1. Before anything is written, the manifest that is there is read, with what tells its version from others.
2. When all data objects are there and were looked at, the index is put. Its name is of this attempt alone.
3. The manifest is put on condition that there is still none, or still that version; see ``store_commit.py``. So of
   several saves that began with the same, one succeeds.
4. Only then the objects of what was replaced are removed.

A save that failed is cleaned up by the coordinator alone, who knows that it did not publish.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import chain, groupby

import numpy as np

from holdfast._io.objects import ObjectImages, Upload, confirm
from holdfast._io.pipeline import run_ahead
from holdfast._io.slabs import SLAB_BYTES, Slab, SlabRing, lent_view
from holdfast._io.stores import MOST_UPLOAD_BYTES, store_of
from holdfast._native.file_layout import Image
from holdfast._native.manifest import Manifest, decode_manifest, encode_manifest
from holdfast._native.packer import BlockJob, DataFile, Lane, Placed, Slabs, fill_blocks
from holdfast._native.place import ImageOutput, MakesPacker
from holdfast._native.publish import files_of, is_marked, other_format_stays
from holdfast._native.report import WrittenFile
from holdfast._native.store_commit import Head, commit, prove, read_head
from holdfast._state.tensor_bytes import Source
from holdfast._values.deadline import Progress
from holdfast._values.digest import BLOCK_BYTES, digest
from holdfast.errors import AlreadyPublishedError, CheckpointError, StorageError, UncertainError

logger = logging.getLogger("holdfast")

_FILLERS = max(2, min(4, os.cpu_count() or 2))
"""So many threads fill slabs."""


class StorePlace:
    """A folder of an object store."""

    packer: MakesPacker
    images: Callable[[Progress], ImageOutput] = ObjectImages

    def __init__(self) -> None:
        self.packer = ObjectPacker
        self._before: Head | None = None
        self._may_be_published = False

    def begin(self, path: str, *, overwrite: bool) -> None:
        """Look at what is there; AlreadyPublishedError for what must stay, StorageError if it is not safe."""
        self._may_be_published = False
        self._before = read_head(path)
        if self._before is not None and not overwrite and self._before.is_live:
            raise AlreadyPublishedError.at(path)
        if not is_marked(path):  # a directory that was copied up may have the marker of a native checkpoint
            raise other_format_stays(path, "native")
        prove(path)

    def missing_directories(self, path: str) -> Sequence[str]:
        return ()

    def make(self, path: str) -> None:
        """A store has no directories."""

    def sync(self, path: str) -> None:
        """What a store has taken is durable."""

    def rename(self, path: str, name: str, new_name: str) -> None:
        store_of(path).rename(f"{path}/{name}", f"{path}/{new_name}")

    def publish(
        self, path: str, manifest: Manifest, tables: Mapping[str, bytes], *, overwrite: bool, marks: bool
    ) -> None:
        """Make the checkpoint visible; see above. A store has no marker for other programs."""
        encoded = encode_manifest(manifest)
        for name, table in tables.items():
            _put(f"{path}/{name}", table)
        # What a put of ours may still replace when it arrives late. None of it comes back after another save.
        seen = [self._before]

        def may_replace(now: Head) -> bool:
            if not now.is_live:
                seen.append(now)  # the old one was deleted meanwhile
            return now in seen

        self._may_be_published = True
        try:
            now = commit(path, encoded, self._before, may_replace)
        except StorageError as error:
            self._may_be_published = isinstance(error, UncertainError)
            raise
        if now.data != encoded:
            self._may_be_published = False
            raise AlreadyPublishedError(
                f"another save to {path!r} was published since this one began, and stays; save again to replace it"
            )
        self._remove_replaced(path)

    def _remove_replaced(self, path: str) -> None:
        try:
            if self._before is not None and self._before.is_live:
                before = decode_manifest(self._before.data, path=path)
                old = files_of(before, before.metadata)
                store_of(path).delete([f"{path}/{name}" for name in sorted(old)])
        except CheckpointError as error:  # what stays is invisible, and a sweep shows it
            logger.warning("%r was replaced, and the objects of before stay: %s", path, error)

    def remove(self, path: str, attempt: str, names: Iterable[str]) -> None:
        """All of it is done by ``clear``."""

    def is_in_memory(self, path: str) -> bool:
        return False

    def clear(self, path: str, attempt: str | None, directories: Sequence[str]) -> None:
        """Remove the objects of ``attempt``, unless it may be published. None is for ranks that leave it to others."""
        if attempt is None or self._may_be_published:
            return
        try:
            ours = (f"data-{attempt}-", f"index-{attempt}.")
            store_of(path).delete([f"{path}/{name}" for name in store_of(path).sizes(path) if name.startswith(ours)])
        except CheckpointError as error:  # what stays is invisible, and a sweep shows it
            logger.warning("a save to %r failed, and its objects stay: %s", path, error)


def _put(url: str, data: bytes) -> None:
    """Put a whole object, and see that it came whole."""
    tag = store_of(url).put(url, data)
    # Many stores tag small objects by what they got. Then no request is needed for that.
    if store_of(url).check in ("sample", "all") or tag != hashlib.md5(data, usedforsecurity=False).hexdigest():
        confirm(url, len(data), lambda: [(0, len(data), digest(data))])


class ObjectPacker:
    """Uploads chunks, in the order they come, as the same files that ``Packer`` writes.

    A few threads fill slabs with whole blocks and hash them there; the calling one hands them to the upload, in order.
    Each slab is filled again when its bytes were sent. All chunks are asked for before the first byte moves, because
    the header comes first.
    """

    def __init__(
        self, *, slabs: Slabs, on_filled: Callable[[], None] | None = None, pinned: bool, progress: Progress
    ) -> None:
        self._pinned = pinned
        most_bytes = min(slabs.number * slabs.nbytes, MOST_UPLOAD_BYTES)
        self._slabs = max(2, most_bytes // SLAB_BYTES)
        self._on_filled = on_filled
        self._progress = progress
        self._upload: Upload | None = None
        self.placed: list[Placed] = []
        self.digests: list[int] = []

    def write(self, lanes: Sequence[Lane], open_file: Callable[[int, int], DataFile]) -> list[WrittenFile]:
        """Upload every chunk; on an error the rest is left to ``abandon``."""
        image = Image(open_file, chain.from_iterable(lane.chunks for lane in lanes))
        self.placed = image.placed
        sources = zip(image.placed, [copy.source for copy in image.copies], strict=True)
        by_file = {
            number: [source for _, source in group] for number, group in groupby(sources, lambda each: each[0][0])
        }
        # Those that are filled are not sent yet: without them there must be enough for a part.
        slabs = max(self._slabs, _slabs_of_part(image.data_files)) + _FILLERS
        ring = SlabRing(slabs, pinned=self._pinned)
        written = []
        try:
            for number, file in enumerate(image.data_files):
                upload, digests = self._send(file, by_file[number], ring)
                if number == len(image.data_files) - 1 and self._on_filled is not None:
                    self._on_filled()
                written.append(self._complete(file, upload, digests, by_file[number]))
        finally:
            ring.close()
        return written

    def _send(self, file: DataFile, sources: list[Source], ring: SlabRing) -> tuple[Upload, list[int]]:
        self._upload = upload = Upload(file.output.path, file.end)
        upload.begin()
        header, digests = file.header(), list[int]()
        for start in range(0, len(header), SLAB_BYTES):
            upload.give(memoryview(header)[start : start + SLAB_BYTES])
        fills = (partial(self._filled, job, ring.acquire(), ring, digests) for job in _jobs(file, sources, digests))
        with closing(run_ahead(fills, workers=_FILLERS, ahead=_FILLERS)) as filled:
            for job, slab in filled:
                self._give(upload, job, slab, ring)
        return upload, digests

    def _filled(self, job: BlockJob, slab: Slab, ring: SlabRing, digests: list[int]) -> tuple[BlockJob, Slab]:
        try:
            self._progress.check()
            fill_blocks(digests, job, slab)
        except BaseException:
            ring.release(slab)
            raise
        return job, slab

    def _give(self, upload: Upload, job: BlockJob, slab: Slab, ring: SlabRing) -> None:
        if store_of(upload.url).keeps_buffers:
            upload.give(memoryview(bytes(slab.view[: job.end])))
            ring.release(slab)
        else:
            upload.give(lent_view(slab, job.end, ring))
        self._progress.moved(job.end)

    def _complete(self, file: DataFile, upload: Upload, digests: list[int], sources: list[Source]) -> WrittenFile:
        upload.finish(self._progress.check)
        self._upload = None
        self.digests += digests
        header = file.header()
        confirm(upload.url, file.end, partial(_places, header, sources, digests))
        covered = digest(header + np.array(digests, dtype="<u8").tobytes())
        return WrittenFile(name=file.name, bytes=file.end, header=file.header_bytes, digest=covered)

    def close(self) -> None:
        """Nothing is held."""

    def abandon(self) -> None:
        """Stop; complete objects are the coordinator's to remove."""
        if self._upload is not None:
            self._upload.abandon()


def _jobs(file: DataFile, sources: list[Source], digests: list[int]) -> Iterator[BlockJob]:
    """The blocks of ``sources`` by the slab, each with the number of its digest, for which there is room then."""
    job = BlockJob(file.output, 0, 0)
    for source in sources:
        for start in range(0, source.nbytes, BLOCK_BYTES):
            stop = min(start + BLOCK_BYTES, source.nbytes)
            if job.end + stop - start > SLAB_BYTES:
                yield job
                job = BlockJob(file.output, 0, 0)
            job.blocks.append((source, start, stop, job.end, len(digests)))
            job.end += stop - start
            digests.append(0)
    if job.blocks:
        yield job


def _slabs_of_part(files: Sequence[DataFile]) -> int:
    """So many slabs a part of any of the ``files`` fills, and none comes back before. Each may lack a block."""
    parts = [min(file.end, store_of(file.output.path).part_of(file.end)) for file in files]
    return max(parts, default=0) // (SLAB_BYTES - BLOCK_BYTES) + 2


def _places(header: bytes, sources: list[Source], digests: list[int]) -> list[tuple[int, int, int]]:
    """Where the header and each block lie in their file, and their digests."""
    spans, begin = [], len(header)
    for source in sources:
        for start in range(0, source.nbytes, BLOCK_BYTES):
            spans.append((begin + start, begin + min(start + BLOCK_BYTES, source.nbytes)))
        begin += source.nbytes
    blocks = [(start, stop, each) for (start, stop), each in zip(spans, digests, strict=True)]
    return [(0, len(header), digest(header)), *blocks]
