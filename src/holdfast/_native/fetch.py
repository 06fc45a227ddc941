"""Boxes of stored chunks into their targets: which bytes of which files that takes, read alone or together with other
ranks.

Wanted boxes become segments: the 1 MiB blocks they touch, which are verified, or exactly their bytes when verification
is off.

Each rank says which blocks it wants and computes from all wishes who reads what. What nobody else wants is read as
ever. A common read goes right into a slot of the memory that the ranks share, is verified there by the one who read it,
and all who want some of it take it from there.

Between hosts it is the same once more: what enough of them want is read by one of them, and the carriers of the others
put it into their slots, verified again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from holdfast._engine import SegmentFetch, SegmentJob, Segments
from holdfast._io.direct import ALIGNMENT
from holdfast._io.files import FilesToRead, FileToRead
from holdfast._io.pipeline import cores_each, default_workers, run_bounded
from holdfast._io.slabs import SLAB_BYTES, pinned, uses_cuda
from holdfast._native.catalog import Catalog
from holdfast._plan.reads import (
    Blocks,
    CommonReads,
    byte_spans,
    choose_readers,
    choose_readers_beside,
    common_numbers,
    cut_at_blocks,
    locate,
    own_loads,
    read_numbers,
    share_between_hosts,
    touched_blocks,
)
from holdfast._ranks.carrier import Freight, OtherHosts
from holdfast._ranks.exchange import Exchange
from holdfast._state.tensor_bytes import Target
from holdfast._values.box import Box
from holdfast._values.deadline import Progress
from holdfast._values.digest import BLOCK_BYTES, block_counts, digest
from holdfast._values.dtypes import DTYPES
from holdfast.errors import CorruptError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wanted:
    """Boxes to be read: box ``lo``, ``length`` (both [n, D], padded with 0 and 1) of the chunk in index row ``row``.

    ``address`` as for a ``SegmentFetch``.
    """

    row: np.ndarray
    lo: np.ndarray
    length: np.ndarray
    address: np.ndarray | None = None


class Fetch(SegmentFetch[Target]):
    """One batch of reads from native files; every block that is read is verified, unless ``verify`` is off."""

    def __init__(
        self,
        catalog: Catalog,
        files: FilesToRead,
        wanted: Wanted,
        *,
        open_targets: Callable[[list[int]], list[Target]],
        close_target: Callable[[int, Target], None],
        verify: bool,
        progress: Progress,
    ) -> None:
        super().__init__(
            _segments(catalog, wanted, verify=verify),
            boxes=len(wanted.row),
            address=wanted.address,
            open_targets=open_targets,
            close_target=close_target,
            progress=progress,
        )
        self._catalog = catalog
        self._files = files
        self.max_gap, self.readers, self.delivers_at_once = files.max_gap, files.readers, files.is_remote
        self._wanted = wanted

    def file(self, number: int) -> AbstractContextManager[tuple[FileToRead, bool]]:
        return self._files.lend(number)

    def expected(self, digests: np.ndarray) -> list[int]:
        """The digests themselves, or -1 where nothing is verified."""
        if len(digests) and digests[0] < 0:
            return [-1] * len(digests)
        expected: list[int] = self._catalog.index.digests[digests].tolist()
        return expected

    def is_intact(self, box: int, start: int, view: memoryview, expected: int) -> bool:
        return digest(view) == expected

    def damaged(self, file: int, box: int, offset: int, nbytes: int) -> CorruptError:
        return self._damaged_chunk(int(self._wanted.row[box]), offset, nbytes)

    def _damaged_chunk(self, row: int, offset: int, nbytes: int) -> CorruptError:
        path = self._catalog.file_path(int(self._catalog.index.file[row]))
        key = self._catalog.manifest.tensors[int(self._catalog.index.tensor[row])].key
        return CorruptError.of_part(path, key, (offset, offset + nbytes))


def _segments(catalog: Catalog, wanted: Wanted, *, verify: bool) -> Segments:
    index = catalog.index
    is_whole = ((wanted.lo == 0) & (wanted.length == index.length[wanted.row])).all(axis=1)
    boxes = np.flatnonzero(is_whole)
    counts = block_counts(index.bytes[wanted.row[boxes]])
    ends = np.cumsum(counts)
    block = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
    parts = [(np.repeat(boxes, counts), block * BLOCK_BYTES, np.full(len(block), BLOCK_BYTES))]
    for number in np.flatnonzero(~is_whole).tolist():
        starts, stops = _spans(catalog, wanted, number, verify=verify)
        parts.append((np.full(len(starts), number), starts, stops - starts))
    box, start, nbytes = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    row = wanted.row[box]
    nbytes = np.minimum(nbytes, index.bytes[row] - start)
    digests = catalog.first_block[row] + start // BLOCK_BYTES if verify else np.full(len(box), -1)
    file, offset = index.file[row], index.offset[row] + start
    order = np.lexsort((offset, file))
    return Segments(
        box=box[order],
        start=start[order],
        nbytes=nbytes[order],
        file=file[order],
        offset=offset[order],
        digest=digests[order],
    )


def _spans(catalog: Catalog, wanted: Wanted, number: int, *, verify: bool) -> tuple[np.ndarray, np.ndarray]:
    """The byte ranges of a chunk that part of it needs: whole blocks to verify them, else its bytes and small gaps."""
    row = int(wanted.row[number])
    entry = catalog.manifest.tensors[int(catalog.index.tensor[row])]
    dimensions = len(entry.shape)
    shape = tuple(catalog.index.length[row, :dimensions].tolist())
    lo, length = (tuple(column[number, :dimensions].tolist()) for column in (wanted.lo, wanted.length))
    starts, stops = byte_spans(
        shape,
        Box(lo, length),
        DTYPES[entry.dtype].itemsize,
        max_gap=BLOCK_BYTES - 1 if verify else _GAP_BYTES,
    )
    if verify:
        blocks = touched_blocks(starts, stops, BLOCK_BYTES)
        return blocks * BLOCK_BYTES, (blocks + 1) * BLOCK_BYTES
    return cut_at_blocks(starts, stops, BLOCK_BYTES)


# So many bytes are read sooner than two reads are made of one.
_GAP_BYTES = 64 << 10

# What a rank reads and passes on at a time: three huge pages, five blocks or six. Less costs more in messages than it
# gains in the caches.
_SLOT_BYTES = 6 << 20

# What is in the page cache costs few ranks less to copy each from there than to pass on.
_FEW_RANKS = 4

# Pinned slabs are large, and the slots are pinned too.
_MOST_CUDA_WORKERS = 6


def slot_bytes() -> int:
    """How many bytes of shared memory a common read is to take: for a GPU the number of copies matters more."""
    return SLAB_BYTES if uses_cuda() else _SLOT_BYTES


class SharedFetch(Fetch):
    """A batch of reads of which the ranks of a host do common ones once; every one of them runs one, all together."""

    def __init__(self, *args: Any, exchange: Exchange, **options: Any) -> None:
        super().__init__(*args, **options)
        self._exchange, self.sharers = exchange, exchange.size
        self._verify: bool = options["verify"]
        self._hands_out = False
        self._of_job: tuple[CommonReads, np.ndarray] | None = None

    def _transfer(self) -> None:
        block = self._blocks_of_segments()
        reads = self._agree(block)
        if len(reads) == 0:
            super()._transfer()
            return
        alone, slices = self._part(block, reads)
        workers = self.readers
        # What is in memory takes hardly a core to read, so that those of others copy too.
        is_read_fast = bool(len(self.segments.file)) and self._is_cached()
        self._hands_out = uses_cuda() or cores_each(self.sharers * (1 if is_read_fast else 2)) > 1
        if self._hands_out:
            workers += cores_each(2 * self.sharers)
        with ExitStack() as stack:
            if uses_cuda():
                workers = min(default_workers(self._exchange.size), _MOST_CUDA_WORKERS)
                stack.enter_context(pinned(self._exchange.slots))
            common = _Common(reads, slices)
            self._exchange.begin(reads, files=[file.name for file in self._catalog.manifest.files])
            hosts = self._exchange.hosts
            carrier = None if hosts is None else hosts.carrier
            if carrier is not None:
                stack.callback(carrier.close)  # before the slots are given back
                carrier.start(reads, self._freight(common))
            # With room for all slots, so that the feeding thread is never kept from taking what is there.
            run_bounded(self._jobs(common), workers=workers, ahead=self._exchange.slots_each, at_once=True)
            self._transfer_first(alone)
            if carrier is not None:
                carrier.wait(self._exchange.mail.check)

    def _blocks_of_segments(self) -> np.ndarray:
        row = self._wanted.row[self.segments.box]
        block: np.ndarray = self._catalog.index.first_block()[row] + self.segments.start // BLOCK_BYTES
        return block

    def _agree(self, block: np.ndarray) -> CommonReads:
        """The common reads of this host, the same on each of its ranks."""
        index, exchange = self._catalog.index, self._exchange
        mine = np.zeros(len(index.digests), dtype=bool)
        mine[block[self._is_to_share(block)]] = True
        wanted = exchange.gather_wishes(mine)
        places = partial(
            locate,
            first_block=index.first_block(),
            file=index.file,
            offset=index.offset,
            nbytes=index.bytes,
            block_bytes=BLOCK_BYTES,
        )
        loads = partial(own_loads, first_block=index.first_block(), nbytes=index.bytes, block_bytes=BLOCK_BYTES)
        most, most_readers = exchange.slot_bytes, exchange.most_readers
        if exchange.hosts is None:
            blocks = places(common_numbers(wanted))
            takers = wanted[:, blocks.number]
            return choose_readers(
                blocks, takers, loads(wanted), most=most, alignment=ALIGNMENT, most_readers=most_readers
            )
        host, by_host = exchange.hosts.host, self._gather_hosts(exchange.hosts, wanted)
        job = share_between_hosts(by_host, places, most=exchange.hosts.slot_bytes, alignment=ALIGNMENT)
        is_own = read_numbers(job, host, wanted.shape[1]) < 0
        reads, numbers = choose_readers_beside(
            job, host, wanted, loads(wanted & is_own), places, most=most, alignment=ALIGNMENT, most_readers=most_readers
        )
        self._of_job = job, numbers
        return reads

    def _gather_hosts(self, hosts: OtherHosts, wanted: np.ndarray) -> np.ndarray:
        """Which blocks each host wants and has not in its page cache, given what each rank of this one ``wanted``."""
        count = wanted.shape[1]
        if hosts.carrier is not None:
            own = np.packbits(wanted.any(axis=0) & self._is_cold(wanted)).tobytes()
            self._exchange.tell_hosts(hosts.carrier.gather_wishes(own), count)
        return self._exchange.gather_hosts(count)

    def _is_cold(self, wanted: np.ndarray) -> np.ndarray:
        """Which blocks are not in this host's page cache; those of few ranks have said only such."""
        cold = np.ones(wanted.shape[1], dtype=bool)
        if self._exchange.size > _FEW_RANKS:
            index = self._catalog.index
            file = np.repeat(index.file, np.diff(index.first_block()))
            for number in sorted(set(file[wanted.any(axis=0)].tolist())):
                if self._files.is_cached(number):
                    cold[file == number] = False
        return cold

    def _freight(self, common: _Common) -> Freight:
        assert self._of_job is not None
        job, number = self._of_job

        def place(read: int) -> tuple[int, int]:
            _, start, stop = common.extent(read)
            return start % ALIGNMENT, start % ALIGNMENT + stop - start

        def check(read: int, view: memoryview, rank: int) -> None:
            if self._verify:
                self._verify_blocks(common.reads.blocks, common.span(read), view, common.extent(read)[1], sender=rank)

        return Freight(job=job, number=number, place=place, check=check)

    def _is_to_share(self, block: np.ndarray) -> np.ndarray:
        """Which segments, each in one ``block``, this rank would rather have from others, if they want them too."""
        files = self.segments.file
        is_to_share = np.ones(len(files), dtype=bool)
        if self._exchange.size <= _FEW_RANKS and len(files):
            # In file order, so that each is looked at once.
            first = np.flatnonzero(np.concatenate([[True], files[1:] != files[:-1]]))
            is_cold = [not self._files.is_cached(number) for number in files[first].tolist()]
            is_to_share = np.repeat(np.array(is_cold, dtype=bool), np.diff(np.append(first, len(files))))
        if not self._verify and len(files):
            # Nothing has it read the rest of a block. Others may well want just that, as at the end of a rank's rows.
            begin = self.segments.start - self.segments.start % BLOCK_BYTES
            size = np.minimum(BLOCK_BYTES, self._catalog.index.bytes[self._wanted.row[self.segments.box]] - begin)
            is_to_share &= 2 * np.bincount(block, weights=self.segments.nbytes)[block] > size
        return is_to_share

    def _part(self, block: np.ndarray, reads: CommonReads) -> tuple[int, list[slice]]:
        """Put the segments that are read alone first; how many they are, and which segments each common read brings."""
        place = np.full(len(self._catalog.index.digests), -1, dtype=np.int64)
        place[reads.blocks.number] = np.arange(len(reads.blocks.number))
        place = place[block]
        is_common = (place >= 0) & self._is_to_share(block)
        order = np.argsort(is_common, kind="stable")
        count = len(order) - int(is_common.sum())
        self.segments = _reordered(self.segments, order, count)
        bounds = count + np.searchsorted(place[order[count:]], reads.bounds)
        slices = [slice(first, stop) for first, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]
        return count, slices

    def _jobs(self, common: _Common) -> Iterator[Callable[[], None]]:
        """What there is for other threads to do, as it becomes possible: first what the disk can do meanwhile.

        This thread verifies and copies; for a GPU, which copies by itself, and where there are cores for it, that is
        left to others too.
        """
        exchange = self._exchange
        while True:
            exchange.collect()
            if exchange.has_failed:
                return
            if (to_fill := exchange.next_to_fill()) is not None:
                yield self._watched(partial(self._fill, *to_fill, common))
            elif (work := self._next_work(common)) is not None:
                if self._hands_out:
                    yield self._watched(work)
                else:
                    work()
            elif exchange.is_done:
                return
            else:
                exchange.wait()

    def _next_work(self, common: _Common) -> Callable[[], None] | None:
        """What there is to do with a slot: pass on what this rank has read, or take what another one has."""
        if (own := self._exchange.next_read()) is not None:
            return partial(self._pass_on, *own, self._opened(own[0], common), common)
        if (filled := self._exchange.next_filled()) is not None:
            return partial(self._take, *filled, self._opened(filled[0], common), common)
        return None

    def _opened(self, read: int, common: _Common) -> SegmentJob[Target] | None:
        """What this rank wants of a read, its targets open."""
        span = common.slices[read]
        if span.start == span.stop:
            return None
        job = SegmentJob(self, span)
        job.open_unless_plain()
        return job

    def _pass_on(self, read: int, slot: int, job: SegmentJob[Target] | None, common: _Common) -> None:
        """Verify what this rank has read, let others have it, and take it while it is hot."""
        if self._verify:
            start = common.extent(read)[1]
            view = self._exchange.slot(slot).view
            self._verify_blocks(common.reads.blocks, common.span(read), view, start - start % ALIGNMENT)
        self._exchange.tell_filled(read, slot)
        self._take(read, slot, job, common)

    def _take(self, read: int, slot: int, job: SegmentJob[Target] | None, common: _Common) -> None:
        if job is not None:
            start = common.extent(read)[1]
            job.deliver(self._exchange.slot(slot), start - start % ALIGNMENT)
            self._exchange.tell_taken(read, slot)

    def _fill(self, read: int, slot: int, common: _Common) -> None:
        self.read(*common.extent(read), self._exchange.slot(slot))
        self._exchange.tell_read(read, slot)

    def _watched(self, job: Callable[[], None]) -> Callable[[], None]:
        """``job``; where it fails, the feeding thread stops waiting for what it would have brought."""

        def run() -> None:
            try:
                job()
            except BaseException:
                self._exchange.tell_failed()
                raise

        return run

    def _verify_blocks(
        self, blocks: Blocks, span: slice, view: memoryview, base: int, *, sender: int | None = None
    ) -> None:
        columns = (blocks.chunk, blocks.offset, blocks.nbytes)
        expected = self._catalog.index.digests[blocks.number[span]].tolist()
        for row, offset, nbytes, wanted in zip(*(column[span].tolist() for column in columns), expected, strict=True):
            if not self.is_intact(0, 0, view[offset - base : offset - base + nbytes], wanted):
                damage = self._damaged_chunk(row, offset, nbytes)
                raise damage if sender is None else _damaged_on_the_way(damage, sender)


class _Common:
    """The common reads, and which of this rank's segments each brings."""

    def __init__(self, reads: CommonReads, slices: list[slice]) -> None:
        self.reads = reads
        self.slices = slices
        blocks, first, last = reads.blocks, reads.bounds[:-1], reads.bounds[1:] - 1
        columns = blocks.file[last], blocks.offset[first], blocks.offset[last] + blocks.nbytes[last]
        self._extents = list(zip(*(column.tolist() for column in columns), strict=True))

    def span(self, read: int) -> slice:
        return slice(int(self.reads.bounds[read]), int(self.reads.bounds[read + 1]))

    def extent(self, read: int) -> tuple[int, int, int]:
        """File number, first byte and end of a read."""
        extent: tuple[int, int, int] = self._extents[read]
        return extent


def _damaged_on_the_way(damage: CorruptError, sender: int) -> CorruptError:
    start, stop = damage.span or (0, 0)
    return CorruptError(
        f"bytes {start} to {stop} of {damage.path!r}, which hold part of {damage.key!r}, were intact on the host of "
        f"rank {sender} and arrived damaged; check the network and the memory of both hosts, and load again",
        path=damage.path,
        key=damage.key,
        span=damage.span,
    )


def _reordered(segments: Segments, order: np.ndarray, count: int) -> Segments:
    """The segments in another order; those from ``count`` on are verified by whoever reads them."""
    digest = segments.digest[order]
    digest[count:] = -1
    return Segments(
        box=segments.box[order],
        start=segments.start[order],
        nbytes=segments.nbytes[order],
        file=segments.file[order],
        offset=segments.offset[order],
        digest=digest,
    )
