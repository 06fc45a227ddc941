"""Who writes which bytes of a folder: told to every rank by the coordinator, and made an index at the end. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast._huggingface.layout import FolderLayout, flat_start, stripes_of
from holdfast._huggingface.packing import Fragment, Pages
from holdfast._huggingface.stripes import STRIPE_BYTES, Stripe
from holdfast._native.index import ChunkIndex, file_digest
from holdfast._native.manifest import FileEntry
from holdfast._values.box import Box
from holdfast._values.digest import block_counts
from holdfast.errors import InternalError
from holdfast.planner import WriteColumns, padded


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FolderPart:
    """What the coordinator tells a rank: the files, where the rows of its plan go, and the stripes it takes part in.

    A row with offset -1 is in stripes. ``dtypes`` has the keys that get another dtype, ``meets`` says whether any rank
    has stripes together with others.
    """

    attempt: str
    rank: int
    files: tuple[tuple[str, int], ...]
    file: np.ndarray
    offset: np.ndarray
    dtypes: Mapping[str, str]
    stripes: tuple[Stripe, ...]
    meets: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FolderReport:
    """What a rank has written: the digests of its rows, then of its stripes; pages, and bytes that are no whole one."""

    digests: np.ndarray
    pages: list[Pages]
    fragments: list[Fragment]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkTable:
    """All chunks that are written, rank by rank: the number of each one's tensor, its box, its place."""

    layout: FolderLayout
    tensor: np.ndarray
    lo: np.ndarray
    length: np.ndarray
    file: np.ndarray
    offset: np.ndarray
    of_rank: np.ndarray


def shared_out(
    layout: FolderLayout,
    tables: Sequence[WriteColumns],
    attempt: str,
    dtypes: dict[str, str],
    hosts: Sequence[int] | None = None,
) -> tuple[list[FolderPart], ChunkTable]:
    """What each rank is told, and all chunks; ``hosts`` has a number of each rank's host, if that is known."""
    numbers = {tensor.key: number for number, tensor in enumerate(layout.tensors)}
    places: list[tuple[np.ndarray, np.ndarray]] = []
    boxes: dict[int, list[tuple[int, Box]]] = {}  # of tensors that are not in runs
    known: dict[tuple[object, ...], int | None] = {}
    for rank, table in enumerate(tables):
        file, offset = np.full(len(table), -1, np.int64), np.full(len(table), -1, np.int64)
        for row, (which, lo, length, _, _) in enumerate(table.rows):
            number = numbers[table.keys[which]]
            tensor = layout.tensors[number]
            wide = len(tensor.shape)
            box = Box(tuple(lo[:wide]), tuple(length[:wide]))
            like = box.offsets, box.lengths, tensor.shape
            if like not in known:
                known[like] = flat_start(box, tensor.shape)
            start = known[like]
            boxes.setdefault(number, []).append((rank, box))
            if start is not None:
                file[row], offset[row] = layout.file[number], layout.offset[number] + start * tensor.itemsize
            else:
                known[number,] = None
        places.append((file, offset))
    scattered = {number: held for number, held in boxes.items() if (number,) in known}
    for (_, offset), table in zip(places, tables, strict=True):
        if scattered:
            of_row = np.array([numbers[key] in scattered for key in table.keys], dtype=bool)[table.key]
            offset[of_row] = -1
    stripes = _striped(layout, scattered, hosts or [0] * len(tables))
    meets = any(len(stripe.parts) > 1 for stripe in stripes)
    parts = [
        FolderPart(
            attempt=attempt,
            rank=rank,
            files=tuple((each.name, each.nbytes) for each in layout.files),
            file=file,
            offset=offset,
            dtypes=dtypes,
            stripes=tuple(stripe for stripe in stripes if rank in stripe.parts),
            meets=meets,
        )
        for rank, (file, offset) in enumerate(places)
    ]
    return parts, _table(layout, tables, parts, stripes, numbers)


def _striped(
    layout: FolderLayout, scattered: Mapping[int, Sequence[tuple[int, Box]]], hosts: Sequence[int]
) -> list[Stripe]:
    """The stripes of all tensors that are not in runs.

    Each is written by the rank, of those that have part of it, for which it is least together with what that rank has
    to write already, and what would have to come from other hosts.
    """
    stripes: list[Stripe] = []
    turns, nbytes = [0] * len(hosts), [0] * len(hosts)
    for number, held in scattered.items():
        tensor = layout.tensors[number]
        for box in stripes_of(tensor, [each for _, each in held], most=STRIPE_BYTES):
            of_rank, of_host = Counter[int](), Counter[int]()
            for rank, each in held:
                if (common := each.intersect(box)) is not None:
                    of_rank[rank] += common.volume * tensor.itemsize
                    of_host[hosts[rank]] += common.volume * tensor.itemsize
            parts, size = tuple(sorted(of_rank)), box.volume * tensor.itemsize
            costs = {rank: nbytes[rank] + 2 * size - of_host[hosts[rank]] for rank in parts}
            writer = min(parts, key=costs.__getitem__)
            start = flat_start(box, tensor.shape)
            assert start is not None
            offset = layout.offset[number] + start * tensor.itemsize
            stripes.append(Stripe(tensor.key, box, layout.file[number], offset, writer, turns[writer], parts))
            turns[writer] += len(parts) > 1
            nbytes[writer] = costs[writer]
    return stripes


def _table(
    layout: FolderLayout,
    tables: Sequence[WriteColumns],
    parts: Sequence[FolderPart],
    stripes: Sequence[Stripe],
    numbers: Mapping[str, int],
) -> ChunkTable:
    """All chunks: for each rank its rows that are in runs, in the order of their places, then its stripes."""
    rows: list[tuple[int, tuple[int, ...], tuple[int, ...], int, int]] = []
    counts = []
    for rank, (table, part) in enumerate(zip(tables, parts, strict=True)):
        before = len(rows)
        for row in run_order(part):
            which, lo, length, _, _ = table.rows[row]
            number = numbers[table.keys[which]]
            wide = len(layout.tensors[number].shape)
            place = int(part.file[row]), int(part.offset[row])
            rows.append((number, tuple(lo[:wide]), tuple(length[:wide]), *place))
        for stripe in stripes:
            if stripe.writer == rank:
                box = stripe.box
                rows.append((numbers[stripe.key], box.offsets, box.lengths, stripe.file, stripe.offset))
        counts.append(len(rows) - before)
    tensor, lows, lengths, file, offset = zip(*rows, strict=True) if rows else [()] * 5
    return ChunkTable(
        layout=layout,
        tensor=np.array(tensor, dtype=np.int64),
        lo=padded(lows, fill=0),
        length=padded(lengths, fill=1),
        file=np.array(file, dtype=np.int64),
        offset=np.array(offset, dtype=np.int64),
        of_rank=np.array(counts, dtype=np.int64),
    )


def run_order(part: FolderPart) -> list[int]:
    """The rows that are in runs, by file and place."""
    order: list[int] = np.lexsort((part.offset, part.file)).tolist()
    return [row for row in order if part.offset[row] >= 0]


def indexed(table: ChunkTable, reports: Sequence[FolderReport]) -> tuple[ChunkIndex, tuple[FileEntry, ...]]:
    """The index of all chunks, and the files with the digests of all that is in them."""
    layout = table.layout
    itemsizes = np.array([tensor.itemsize for tensor in layout.tensors], dtype=np.int64)
    nbytes = table.length.prod(axis=1, dtype=np.int64) * itemsizes[table.tensor]
    blocks = block_counts(nbytes)
    ends = np.cumsum(table.of_rank)
    for rank, (report, stop) in enumerate(zip(reports, ends.tolist(), strict=True)):
        mine = slice(stop - int(table.of_rank[rank]), stop)
        if len(report.digests) != int(blocks[mine].sum()):
            raise InternalError(f"what rank {rank} wrote is not whole; please report it")
    digests = np.concatenate([report.digests for report in reports])
    by_key = {tensor.key: number for number, tensor in enumerate(sorted(layout.tensors))}
    number = np.array([by_key[tensor.key] for tensor in layout.tensors], dtype=np.int64)[table.tensor]
    order = np.lexsort((*table.lo.T[::-1], number))
    index = ChunkIndex(
        tensor=number[order],
        file=table.file[order],
        offset=table.offset[order],
        bytes=nbytes[order],
        lo=table.lo[order],
        length=table.length[order],
        digests=_taken(digests, blocks, order),
    )
    in_files = np.lexsort((table.offset, table.file))
    of_files, counts = _taken(digests, blocks, in_files), np.zeros(len(layout.files), dtype=np.int64)
    np.add.at(counts, table.file, blocks)
    stops = np.cumsum(counts).tolist()
    files = tuple(
        FileEntry(
            name=file.name,
            bytes=file.nbytes,
            header=len(file.header),
            digest=file_digest(file.header, of_files[stop - count : stop]),
        )
        for file, stop, count in zip(layout.files, stops, counts.tolist(), strict=True)
    )
    return index, files


def check_tiled(layout: FolderLayout, reports: Sequence[FolderReport]) -> None:
    """InternalError unless headers, pages and fragments are the files: every byte of each, and none of them twice."""
    ranges = {file.name: [(0, len(file.header))] for file in layout.files}
    for report in reports:
        pieces = ((name, offset, offset + len(data)) for name, offset, data in report.fragments if data)
        for name, offset, end in (*report.pages, *pieces):
            ranges[name].append((offset, end))
    for file in layout.files:
        found = np.array(sorted(ranges[file.name]), dtype=np.int64)
        ends, begins = found[:, 1], np.append(found[1:, 0], file.nbytes)
        if (ends != begins).any():
            end, begin = min(zip(ends[ends != begins].tolist(), begins[ends != begins].tolist(), strict=True))
            how = (
                f"nobody wrote bytes {end} to {begin}" if end < begin else f"bytes {begin} to {end} were written twice"
            )
            raise InternalError(f"the file {file.name!r} is not whole: {how}; please report it")


def _taken(digests: np.ndarray, blocks: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The digests of chunks with so many ``blocks``, chunk by chunk in another ``order``."""
    starts, counts = (np.cumsum(blocks) - blocks)[order], blocks[order]
    places = np.repeat(starts - np.cumsum(counts) + counts, counts) + np.arange(int(counts.sum()))
    return digests[places]
