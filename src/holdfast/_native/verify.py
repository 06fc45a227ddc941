"""Every byte of a published checkpoint against its digests, and all the damage there is, not just the first.

Manifest and index are checked by reading them. Then each data file: it is there, has its size, its header is the one
that was written and says what the index says, every block has its digest. Levels below stop earlier, and say so. Memory
is bounded by the slabs and the table of one file at a time. Never changes a file, never decodes a value.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from holdfast._io import files, posix
from holdfast._io.direct import ALIGNMENT
from holdfast._io.files import FilesToRead
from holdfast._io.pipeline import default_workers, run_bounded
from holdfast._io.slabs import SlabRing
from holdfast._native.catalog import Catalog, read_catalog, read_published, was_replaced
from holdfast._native.index import HeaderEntry, chunk_name, decode_header, file_digest, stored_as
from holdfast._native.manifest import FileEntry, Manifest, Summary
from holdfast._native.publish import MANIFEST_NAME, files_of
from holdfast._native.statistics import statistics_entry
from holdfast._plan.reads import Blocks, coalesce, locate
from holdfast._values.box import Box
from holdfast._values.deadline import Progress
from holdfast._values.digest import BLOCK_BYTES, digest
from holdfast._values.dtypes import DTYPES
from holdfast._values.shown import short_repr
from holdfast.errors import CorruptError, StorageError
from holdfast.events.progress import OnBytes

_Int64s = npt.NDArray[np.int64]
"""Called with the bytes that are done and all that there are."""

Level = Literal["sizes", "coverage", "digests"]
"""How closely a checkpoint is looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Bytes ``span[0]`` to ``span[1]`` of the data file named ``file`` are not those of ``key`` that were written.

    Without a key it is the header, which other readers of safetensors need. Where the whole file is missing or has
    another size, every key in it is damaged.
    """

    file: str
    key: str | None
    span: tuple[int, int]
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What was checked: all ``files`` of the checkpoint, their ``bytes``, and the ``keys`` they hold; what is damaged.

    ``damage`` is in file order; keys that are tied to a damaged one are damaged too. ``unchecked`` says, line by line,
    what the format has nothing to check by.
    """

    __repr__ = short_repr

    files: int
    bytes: int
    keys: int
    seconds: float
    damage: tuple[Damage, ...]
    unchecked: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every byte is the one that was written."""
        return not self.damage

    @property
    def damaged_keys(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(damage.key for damage in self.damage if damage.key is not None))

    @property
    def damaged_files(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(damage.file for damage in self.damage))


def verify_checkpoint(
    path: str | os.PathLike[str],
    *,
    level: Level = "digests",
    sample: float = 1.0,
    on_progress: OnBytes | None = None,
) -> VerifyReport:
    """What a look at every byte of the checkpoint at ``path`` found; ``holdfast.verify`` tells what the options mean.

    ``on_progress`` is called once at a time. Where a saver replaces the checkpoint meanwhile, the new one is looked at
    from the start. The headers of files are read whatever the ``sample``.
    """
    check_level(level, sample)
    begin = time.perf_counter()
    directory = posix.absolute(path)
    damage: tuple[Damage, ...] = ()
    while True:
        manifest = read_published(directory) if level == "sizes" else None
        if manifest is not None and has_its_files(directory, manifest) and _has_its_statistics(directory, manifest):
            read, unchecked = (
                _manifest_bytes(directory),
                ["whether its chunks make up its tensors", *unread(level, sample)],
            )
            break
        catalog = read_catalog(directory)
        manifest = catalog.manifest
        damage, read = data_damage(
            catalog,
            already_read=manifest.index.bytes
            + _manifest_bytes(directory)
            + (0 if catalog.statistics_entry is None else catalog.statistics_entry.bytes),
            sample=sample if level == "digests" else 0.0,
            on_progress=on_progress,
        )
        damage += _statistics_damage(catalog)
        if damage and was_replaced(directory, manifest.attempt):
            continue
        unchecked = unread(level, sample)
        break
    return VerifyReport(
        files=len(files_of(manifest, manifest.metadata)) + 1,
        bytes=read,
        keys=len(manifest.tensors) + len(manifest.values),
        seconds=time.perf_counter() - begin,
        damage=damage,
        unchecked=tuple(unchecked),
    )


def _has_its_statistics(directory: str, manifest: Manifest) -> bool:
    entry = statistics_entry(manifest, manifest.metadata)
    with contextlib.suppress(CorruptError):
        return entry is None or files.size_of(os.path.join(directory, entry.name)) == entry.bytes
    return False


def _statistics_damage(catalog: Catalog) -> tuple[Damage, ...]:
    try:
        catalog.statistics()
    except (CorruptError, StorageError) as error:
        entry = catalog.statistics_entry
        assert entry is not None
        return (Damage(file=entry.name, key=None, span=(0, entry.bytes), problem=problem_of(error)),)
    return ()


def check_level(level: Level, sample: float) -> None:
    if level not in get_args(Level) or not 0 < sample <= 1:
        raise ValueError(f"level must be one of {get_args(Level)}, and sample more than 0 and at most 1")


def unread(level: Level, sample: float) -> list[str]:
    """What a look at the data of this ``level`` leaves out."""
    data = "the digests of the data"
    if level == "digests" and sample < 1:
        return [f"{data}, except for a sample of {100 * sample:g} % of its blocks"]
    return [data] if level != "digests" else []


def data_damage(
    catalog: Catalog, *, already_read: int, sample: float, on_progress: OnBytes | None, checks_headers: bool = True
) -> tuple[tuple[Damage, ...], int]:
    """All damage of the data files, of which a ``sample`` is read; and how many bytes were, with those before."""
    checks = _DataChecks(
        catalog, already_read=already_read, sample=sample, on_progress=on_progress, checks_headers=checks_headers
    )
    return _with_aliases(catalog, _joined(checks.run())), checks.total_bytes


def _manifest_bytes(directory: str) -> int:
    return files.size_of(os.path.join(directory, MANIFEST_NAME)) or 0


def has_its_files(directory: str, manifest: Summary) -> bool:
    """Whether every file that the manifest names is there in its size."""
    for name, size in (
        (manifest.index.name, manifest.index.bytes),
        *((file.name, file.bytes) for file in manifest.files),
    ):
        try:
            if files.size_of(os.path.join(directory, name)) != size:
                return False
        except CorruptError:
            return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _DataFile:
    """A data file: ``rows`` are its chunks, ``digests`` those of all its blocks, ``blocks`` the ones to be read."""

    number: int
    rows: _Int64s
    blocks: Blocks
    digests: npt.NDArray[np.uint64]


class FileChecks(abc.ABC):
    """One pass over ``files``, in threads: the damage that is found, and how much of ``total_bytes`` is done."""

    def __init__(self, files: FilesToRead, total_bytes: int, on_progress: OnBytes | None) -> None:
        self._files = files
        self._damage: list[tuple[int, int, Damage]] = []
        self._on_progress = on_progress
        self.total_bytes = total_bytes
        self.progress = Progress(self._tell)

    def _tell(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self.progress.done, self.total_bytes)

    @abc.abstractmethod
    def jobs(self, ring: SlabRing) -> Iterator[Callable[[], None]]:
        """What there is to check, with slabs of ``ring``."""

    def run(self) -> list[Damage]:
        """All damage, in file order."""
        workers = max(default_workers(), self._files.readers)
        ring = SlabRing(workers, nbytes=self._files.piece_bytes)
        try:
            run_bounded(self.jobs(ring), workers=workers)
        finally:
            ring.close()
            self._files.close()
        return [damage for _, _, damage in sorted(self._damage, key=lambda found: found[:2])]

    def note(self, number: int, damage: Damage) -> None:
        """Take note of ``damage`` in file ``number``; any thread."""
        self._damage.append((number, damage.span[0], damage))


class _DataChecks(FileChecks):
    def __init__(
        self,
        catalog: Catalog,
        *,
        already_read: int,
        sample: float,
        on_progress: OnBytes | None,
        checks_headers: bool,
    ) -> None:
        # Of a sample an estimate, until each file's share of it is known.
        total_bytes = already_read + sum(_expected(entry, sample) for entry in catalog.manifest.files)
        super().__init__(catalog.data_files(), total_bytes, on_progress)
        self.progress.moved(already_read)
        self._lock = threading.Lock()
        self._catalog = catalog
        self._sample = sample
        self._checks_headers = checks_headers
        # A generator of its own: the program's random numbers are left alone.
        self._chosen = np.random.default_rng()
        index = catalog.index
        self._first_block = index.first_block()
        self._order = np.lexsort((index.bytes, index.offset, index.file))
        self._bounds = np.searchsorted(index.file[self._order], np.arange(len(catalog.manifest.files) + 1)).tolist()

    def jobs(self, ring: SlabRing) -> Iterator[Callable[[], None]]:
        for number, entry in enumerate(self._catalog.manifest.files):
            rows = self._order[self._bounds[number] : self._bounds[number + 1]]
            try:
                self._files.check(number)
            except CorruptError as error:
                self._lose_file(number, rows, problem_of(error))
                self.progress.moved(_expected(entry, self._sample))
                continue
            if not self._sample:
                continue
            every = self._blocks(rows, 1.0)
            blocks = every if self._sample == 1 else self._blocks(rows, self._sample)
            if self._sample < 1:
                with self._lock:
                    self.total_bytes += entry.header + int(blocks.nbytes.sum()) - _expected(entry, self._sample)
            groups = coalesce(
                np.zeros_like(blocks.offset),
                blocks.offset,
                blocks.nbytes,
                most=self._files.piece_bytes,
                alignment=ALIGNMENT,
            ).tolist()
            opened = _DataFile(
                number=number, rows=rows, blocks=blocks, digests=self._catalog.index.digests[every.number]
            )
            if self._checks_headers:
                yield partial(self._check_header, opened)
            else:
                self.progress.moved(entry.header)
            for first, stop in itertools.pairwise(groups):
                yield partial(self._check_group, opened, first, stop, ring)

    def _blocks(self, rows: _Int64s, sample: float) -> Blocks:
        """The blocks of the chunks ``rows``, or a sample of them, in file order."""
        counts = np.diff(self._first_block)[rows]
        number = np.repeat(self._first_block[rows] - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        if sample < 1:
            number = number[self._chosen.random(len(number)) < sample]
        index = self._catalog.index
        return locate(
            number,
            first_block=self._first_block,
            file=index.file,
            offset=index.offset,
            nbytes=index.bytes,
            block_bytes=BLOCK_BYTES,
        )

    def _check_header(self, opened: _DataFile) -> None:
        entry = self._catalog.manifest.files[opened.number]
        problem: str | None = None
        try:
            data = bytearray(entry.header)
            with self._files.lend(opened.number) as (file, _):
                file.read_into(memoryview(data), 0)
            header = bytes(data)
            if file_digest(header, opened.digests) != entry.digest:
                problem = "the header is not the one that was written"
            elif not self._agrees(opened, decode_header(header, path=file.path)):
                problem = "the header does not say what the index says"
        except (CorruptError, StorageError) as error:
            problem = problem_of(error)
        if problem is not None:
            self._note(opened.number, None, (0, entry.header), problem)
        self.progress.moved(entry.header)

    def _agrees(self, opened: _DataFile, entries: list[HeaderEntry]) -> bool:
        """Whether the header has exactly the chunks of the index; those of no bytes may come in any order."""
        index, tensors = self._catalog.index, self._catalog.manifest.tensors
        header_bytes = self._catalog.manifest.files[opened.number].header
        expected: dict[str, HeaderEntry] = {}
        rows = opened.rows
        columns = (index.tensor[rows], index.offset[rows], index.bytes[rows], index.lo[rows], index.length[rows])
        for tensor, offset, nbytes, lo, length in zip(*(column.tolist() for column in columns), strict=True):
            entry = tensors[tensor]
            dtype, dimensions = DTYPES[entry.dtype], len(entry.shape)
            box = Box(tuple(lo[:dimensions]), tuple(length[:dimensions]))
            name = chunk_name(entry.key, box, entry.shape)
            begin = offset - header_bytes
            expected[name] = HeaderEntry(name, *stored_as(dtype, box.lengths), begin, begin + nbytes)
        return expected == {entry.name: entry for entry in entries}

    def _check_group(self, opened: _DataFile, first: int, stop: int, ring: SlabRing) -> None:
        with ring.lend() as slab:
            self._check_blocks(opened, first, stop, slab.view)
        self.progress.moved(int(opened.blocks.nbytes[first:stop].sum()))

    def _check_blocks(self, opened: _DataFile, first: int, stop: int, memory: memoryview) -> None:
        blocks = opened.blocks
        offsets, sizes = blocks.offset[first:stop].tolist(), blocks.nbytes[first:stop].tolist()
        spans = [(offset, offset + nbytes) for offset, nbytes in zip(offsets, sizes, strict=True)]
        try:
            with self._files.lend(opened.number) as (file, is_cached):
                base = file.read_range(memory, spans[0][0], spans[-1][1], is_cached=is_cached)
        except (CorruptError, StorageError) as error:
            problem = problem_of(error)
            if len(spans) == 1:
                self._note(opened.number, int(blocks.chunk[first]), spans[0], problem)
                return
            # Block by block, so that one that cannot be read does not stand for its neighbours.
            for number in range(first, stop):
                self._check_blocks(opened, number, number + 1, memory)
            return
        digests = self._catalog.index.digests[blocks.number[first:stop]].tolist()
        for number, (low, high), written in zip(range(first, stop), spans, digests, strict=True):
            if digest(memory[low - base : high - base]) != written:
                self._note(opened.number, int(blocks.chunk[number]), (low, high), "not the bytes that were written")

    def _lose_file(self, number: int, rows: _Int64s, problem: str) -> None:
        """Note that everything in file ``number`` is damaged."""
        index = self._catalog.index
        if not len(rows):
            self._note(number, None, (0, self._catalog.manifest.files[number].bytes), problem)
        for row in rows.tolist():
            offset = int(index.offset[row])
            self._note(number, row, (offset, offset + int(index.bytes[row])), problem)

    def _note(self, number: int, row: int | None, span: tuple[int, int], problem: str) -> None:
        manifest = self._catalog.manifest
        key = None if row is None else manifest.tensors[int(self._catalog.index.tensor[row])].key
        self.note(number, Damage(file=manifest.files[number].name, key=key, span=span, problem=problem))


def _expected(entry: FileEntry, sample: float) -> int:
    """How many bytes of a file are read, about."""
    return entry.header + int(sample * (entry.bytes - entry.header)) if sample else 0


def problem_of(error: CorruptError | StorageError) -> str:
    """The problem in a few words; raises ``error`` if it is a refusal that says nothing about the bytes."""
    if isinstance(error, StorageError):
        if error.errno != errno.EIO:
            raise error
        return "the disk fails to read it"
    problem = error.message.removesuffix("; use another checkpoint")
    return problem.removeprefix(f"{error.path!r} ")


def _joined(damage: Iterable[Damage]) -> list[Damage]:
    """``damage`` with spans of one key that touch each other made one."""
    joined: list[Damage] = []
    for one in damage:
        last = joined[-1] if joined else None
        if last is not None and last.span[1] == one.span[0] and replace(last, span=one.span) == one:
            joined[-1] = replace(last, span=(last.span[0], one.span[1]))
        else:
            joined.append(one)
    return joined


def _with_aliases(catalog: Catalog, damage: list[Damage]) -> tuple[Damage, ...]:
    """``damage``, each followed by the same for the keys that are tied to its key."""
    tied: dict[str, list[str]] = {}
    for entry in catalog.manifest.tensors if damage else ():
        if entry.alias_of is not None:
            tied.setdefault(entry.alias_of, []).append(entry.key)
    return tuple(
        found
        for one in damage
        for found in (one, *(replace(one, key=key) for key in tied.get(one.key or "", ()) if one.key is not None))
    )
