"""A file system that keeps no more than POSIX makes it keep, as a model: every state that a crash may leave behind.

From a recorded trace. Durable is what an fsync has confirmed: of a file its bytes, of a directory its names. All the
rest may be there after a crash or not, each change by itself: a write may be lost, kept, kept in part (any of its
sectors) or leave zeros; a name may be lost or kept, whatever became of others; only a rename is one step.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torture.shim import Call, Record

SECTOR = 512
Tree = dict[str, "int | None"]
"""Paths and what they name: the number of a file, or None for a directory."""

Files = Mapping[str, "bytes | None"]
"""Paths and their bytes, or None for a directory."""


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes that are on their way to a file."""

    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Resize:
    """A new size of a file; ``grow`` for room that is reserved, which never makes it smaller."""

    size: int
    grow: bool = False


@dataclass(slots=True)
class File:
    """What is durable of a file, and what is not yet."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[Write | Resize] = field(default_factory=list)
    position: int = 0


@dataclass(frozen=True, slots=True)
class NameChange:
    """A change of one directory: a name that comes (with its file, or None for a directory), one that goes, or both."""

    directory: str
    added: str | None = None
    file: int | None = None
    removed: str | None = None


class Disk:
    """The model while a trace is played to it."""

    def __init__(self, root: str, before: Files) -> None:
        """``before`` is durable: paths relative to ``root``, parents first."""
        self._root = root
        self.files: list[File] = []
        self.durable: Tree = {root: None}
        self.pending: list[NameChange] = []
        self._live: Tree = {root: None}
        self._opened: dict[str, int] = {}
        for name, data in before.items():
            path = os.path.join(root, name)
            self.durable[path] = self._live[path] = None if data is None else self._new(data)

    def play(self, record: Record) -> None:
        """Take one call that succeeded."""
        if record.error:
            return
        path = record.path
        if record.call is Call.CREATE:
            if path not in self._live:
                self._opened[path] = self._new()
                self._change(NameChange(os.path.dirname(path), added=path, file=self._opened[path]))
        elif record.call is Call.MKDIR:
            self._change(NameChange(os.path.dirname(path), added=path))
        elif record.call is Call.LINK:
            self._change(NameChange(os.path.dirname(record.other), added=record.other, file=self._live[path]))
        elif record.call is Call.RENAME:
            file = self._live[path]
            self._change(NameChange(os.path.dirname(record.other), added=record.other, file=file, removed=path))
        elif record.call in (Call.UNLINK, Call.RMDIR):
            self._change(NameChange(os.path.dirname(path), removed=path))
        elif record.call is Call.FSYNC:
            self._sync(path)
        elif record.call in (Call.WRITE, Call.PWRITE, Call.FTRUNCATE, Call.FALLOCATE):
            self._write(self.files[self._opened[path]], record)

    def _new(self, data: bytes = b"") -> int:
        self.files.append(File(durable=bytearray(data)))
        return len(self.files) - 1

    def _change(self, change: NameChange) -> None:
        self.pending.append(change)
        _apply(self._live, change)

    def _write(self, file: File, record: Record) -> None:
        if record.call is Call.FTRUNCATE:
            file.pending.append(Resize(record.length))
        elif record.call is Call.FALLOCATE:
            file.pending.append(Resize(record.offset + record.length, grow=True))
        else:
            offset = file.position if record.offset < 0 else record.offset
            file.pending.append(Write(offset, record.data))
            if record.offset < 0:
                file.position += len(record.data)

    def _sync(self, path: str) -> None:
        if path in self._live and self._live[path] is None:
            for change in self.pending:
                if change.directory == path:
                    _apply(self.durable, change)
            self.pending = [change for change in self.pending if change.directory != path]
        else:
            file = self.files[self._opened[path]]
            file.durable = bytearray(contents(file, [_KEPT] * len(file.pending)))
            file.pending = []

    def states(self, randomness: random.Random, limit: int) -> Iterator[Files]:
        """States that a crash may leave now, by paths relative to the root: all of the simple ones, then random ones.

        Simple: every choice of names with every write lost, kept or zeroed as a whole, or one of them torn.
        At most ``limit`` are made.
        """
        for names, fates in itertools.islice(self._choices(randomness), limit):
            yield self._state(names, fates)

    def _choices(self, randomness: random.Random) -> Iterator[tuple[Sequence[bool], Mapping[int, Sequence[Fate]]]]:
        unfinished = [number for number, file in enumerate(self.files) if file.pending]
        writes = [(number, at) for number in unfinished for at in range(len(self.files[number].pending))]
        masks = [[bool(bits >> at & 1) for at in range(len(self.pending))] for bits in range(1 << len(self.pending))]
        all_kept = {number: [_KEPT] * len(self.files[number].pending) for number in unfinished}
        for names in masks:
            for fate in (_KEPT, _LOST, _ZEROED) if writes else (_KEPT,):
                yield names, {number: [fate] * len(fates) for number, fates in all_kept.items()}
        for number, at in writes:
            for fate in self._simple_fates(number, at):
                fates = {other: list(known) for other, known in all_kept.items()}
                fates[number][at] = fate
                for names in masks:
                    yield names, fates
        while writes:
            fates = {number: [self._random_fate(number, at, randomness) for at in range(len(known))]
                     for number, known in all_kept.items()}  # fmt: skip
            # What happens to a file shows only where it has a name.
            yield masks[-1] if randomness.random() < 0.8 else randomness.choice(masks), fates

    def _simple_fates(self, number: int, at: int) -> list[Fate]:
        change = self.files[number].pending[at]
        if isinstance(change, Resize):
            return [_LOST]
        sectors = -(-len(change.data) // SECTOR)
        prefixes = [frozenset(range(end)) for end in range(1, sectors)]
        holes = [frozenset(range(sectors)) - {hole} for hole in range(sectors)]
        return [_LOST, _ZEROED, *(Fate(kept=kept) for kept in dict.fromkeys([*prefixes, *holes]))]

    def _random_fate(self, number: int, at: int, randomness: random.Random) -> Fate:
        change = self.files[number].pending[at]
        fate = randomness.choice((_KEPT, _LOST, _ZEROED, None, None))
        if isinstance(change, Resize):
            return randomness.choice((_KEPT, _LOST))
        if fate is not None:
            return fate
        sectors = range(-(-len(change.data) // SECTOR))
        kept = frozenset(sector for sector in sectors if randomness.random() < 0.5)
        return Fate(kept=kept, zero=randomness.random() < 0.5)

    def _state(self, names: Sequence[bool], fates: Mapping[int, Sequence[Fate]]) -> Files:
        tree = dict(self.durable)
        for change, is_kept in zip(self.pending, names, strict=True):
            if is_kept:
                _apply(tree, change)
        state: dict[str, bytes | None] = {}
        for path in sorted(tree):
            # What is in a directory that is lost is lost with it.
            if path != self._root and (os.path.dirname(path) == self._root or _parent(path, self._root) in state):
                file = tree[path]
                name = os.path.relpath(path, self._root)
                state[name] = None if file is None else bytes(contents(self.files[file], fates.get(file, ())))
        return state


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of a write: the sectors that arrive (None: all); the others keep what was there, or turn to zero."""

    kept: frozenset[int] | None = None
    zero: bool = False


_KEPT = Fate()
_LOST = Fate(kept=frozenset())
_ZEROED = Fate(kept=frozenset(), zero=True)


def contents(file: File, fates: Sequence[Fate]) -> bytearray:
    """The bytes of ``file`` after a crash that does this to its pending changes."""
    data = bytearray(file.durable)
    for change, fate in zip(file.pending, fates, strict=True):
        if isinstance(change, Resize):
            if fate == _LOST or (change.grow and change.size <= len(data)):
                continue
            del data[change.size :]
            data.extend(bytes(change.size - len(data)))
            continue
        for sector in range(-(-len(change.data) // SECTOR)):
            arrives = fate.kept is None or sector in fate.kept
            if not arrives and not fate.zero:
                continue
            piece = change.data[sector * SECTOR : (sector + 1) * SECTOR]
            begin = change.offset + sector * SECTOR
            data.extend(bytes(max(0, begin + len(piece) - len(data))))
            data[begin : begin + len(piece)] = piece if arrives else bytes(len(piece))
    return data


def materialise(state: Files, folder: Path, known: dict[str, bytes | None]) -> None:
    """Make ``folder`` hold exactly ``state``; ``known`` is what it holds already, and is brought up to date."""
    for name in sorted(set(known) - set(state), reverse=True):
        path = folder / name
        if known.pop(name) is None:
            path.rmdir()
        else:
            path.unlink()
    for name in sorted(state):
        data = state[name]
        if name in known and known[name] == data:
            continue
        path = folder / name
        if data is None:
            path.mkdir()
        else:
            path.write_bytes(data)
        known[name] = data


def _apply(tree: Tree, change: NameChange) -> None:
    if change.removed is not None:
        tree.pop(change.removed, None)
    if change.added is not None:
        tree[change.added] = change.file


def _parent(path: str, root: str) -> str:
    return os.path.relpath(os.path.dirname(path), root)
