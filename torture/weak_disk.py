"""A file system that keeps no more than POSIX makes it keep, as a model: every state that a crash may leave behind.

From a recorded trace. Durable is what an fsync has confirmed: of a file its bytes, of a directory its names. All the
rest may be there after a crash or not, each change by itself: a write may be lost, kept, kept in part (any of its
sectors) or leave zeros; a name may be lost or kept, whatever became of others; only a rename is one step, and so is an
exchange of two names. What is in a directory goes where the directory goes.
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
_EXCHANGE = 2  # RENAME_EXCHANGE of Linux
_ALL_MASKS = 10  # names whose every combination is made; of more, some
Node = int
"""A file or a directory, by its number."""

Tree = dict[Node, dict[str, Node]]
"""For each directory its names, and what has them."""

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
    """A change that is durable when ``directory`` is synced: names, in their directories, get a node or go, at once."""

    directory: Node
    edits: tuple[tuple[Node, str, Node | None], ...]


class Disk:
    """The model while a trace is played to it."""

    def __init__(self, root: str, before: Files) -> None:
        """``before`` is durable: paths relative to ``root``, parents first."""
        self._top = root
        self.files: dict[Node, File] = {}
        self._numbers = itertools.count(1)
        self.durable: Tree = {0: {}}
        self.pending: list[NameChange] = []
        self._live: Tree = {0: {}}
        self._opened: dict[str, Node] = {}
        for name, data in before.items():
            node = self._new_directory() if data is None else self._new(data)
            directory, own = self._place(os.path.join(root, name))
            self.durable[directory][own] = self._live[directory][own] = node

    def play(self, record: Record) -> None:
        """Take one call that succeeded."""
        if record.error:
            return
        path = record.path
        if record.call is Call.CREATE:
            self._create(path, is_cut=bool(record.flags & os.O_TRUNC))
        elif record.call is Call.MKDIR:
            self._name(path, self._new_directory())
        elif record.call is Call.LINK:
            self._name(record.other, self._at(path))
        elif record.call is Call.RENAME:
            self._rename(path, record.other, is_exchange=record.flags == _EXCHANGE)
        elif record.call in (Call.UNLINK, Call.RMDIR):
            self._name(path, None)
        elif record.call is Call.FSYNC:
            self._sync(path)
        elif record.call in (Call.WRITE, Call.PWRITE, Call.FTRUNCATE, Call.FALLOCATE):
            self._write(self.files[self._opened_at(path)], record)

    def _new(self, data: bytes = b"") -> Node:
        node = next(self._numbers)
        self.files[node] = File(durable=bytearray(data))
        return node

    def _new_directory(self) -> Node:
        node = next(self._numbers)
        self.durable[node], self._live[node] = {}, {}
        return node

    def _place(self, path: str) -> tuple[Node, str]:
        """The directory that ``path`` is in now, and its name there."""
        node = 0
        *above, name = os.path.relpath(path, self._top).split(os.sep)
        for each in above:
            node = self._live[node][each]
        return node, name

    def _find(self, path: str) -> Node | None:
        if path == self._top:
            return 0
        try:
            directory, name = self._place(path)
        except KeyError:
            return None
        return self._live[directory].get(name)

    def _at(self, path: str) -> Node:
        node = self._find(path)
        assert node is not None, path
        return node

    def _opened_at(self, path: str) -> Node:
        """The file that was opened at ``path``, whatever has the name now."""
        return self._opened[path] if path in self._opened else self._at(path)

    def _create(self, path: str, *, is_cut: bool) -> None:
        node = self._find(path)
        if node is None:
            node = self._new()
            self._name(path, node)
        elif is_cut:
            self.files[node].pending.append(Resize(0))
        self.files[node].position = 0
        self._opened[path] = node

    def _name(self, path: str, node: Node | None) -> None:
        directory, name = self._place(path)
        self._change(NameChange(directory, ((directory, name, node),)))

    def _rename(self, path: str, other: str, *, is_exchange: bool) -> None:
        directory, name = self._place(path)
        into, new_name = self._place(other)
        node, gone = self._at(path), self._at(other) if is_exchange else None
        self._change(NameChange(into, ((into, new_name, node), (directory, name, gone))))

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
        node = self._opened_at(path)
        if node in self._live:
            for change in self.pending:
                if change.directory == node:
                    _apply(self.durable, change)
            self.pending = [change for change in self.pending if change.directory != node]
        else:
            file = self.files[node]
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
        unfinished = [number for number, file in self.files.items() if file.pending]
        writes = [(number, at) for number in unfinished for at in range(len(self.files[number].pending))]
        masks = self._masks(randomness)
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

    def _masks(self, randomness: random.Random) -> list[list[bool]]:
        """Which names are kept: every choice, or of many the simple ones and some others. The last one keeps all."""
        count = len(self.pending)
        if count <= _ALL_MASKS:
            return [[bool(bits >> at & 1) for at in range(count)] for bits in range(1 << count)]
        firsts = [[at < end for at in range(count)] for end in range(count)]
        but_one = [[at != gone for at in range(count)] for gone in range(count)]
        alone = [[at == only for at in range(count)] for only in range(count)]
        others = [[randomness.random() < 0.5 for _ in range(count)] for _ in range(1 << _ALL_MASKS)]
        return [*firsts, *but_one, *alone, *others, [True] * count]

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
        tree = {node: dict(inside) for node, inside in self.durable.items()}
        for change, is_kept in zip(self.pending, names, strict=True):
            if is_kept:
                _apply(tree, change)
        return dict(self._below(tree, 0, "", fates))

    def _below(
        self, tree: Tree, directory: Node, path: str, fates: Mapping[int, Sequence[Fate]]
    ) -> Iterator[tuple[str, bytes | None]]:
        """What is in a directory; what is in one that is lost is lost with it."""
        for name, node in sorted(tree[directory].items()):
            own = os.path.join(path, name)
            if node in tree:
                yield own, None
                yield from self._below(tree, node, own, fates)
            else:
                yield own, bytes(contents(self.files[node], fates.get(node, ())))


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
    for directory, name, node in change.edits:
        if node is None:
            tree[directory].pop(name, None)
        else:
            tree[directory][name] = node
