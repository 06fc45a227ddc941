"""How long the saves of a run took, from events that ``holdfast.events.jsonl`` wrote into files in its directory.

Anybody may write such files: what is not a line of ours is passed over, and only the end of a long file is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from holdfast._io import files, posix
from holdfast.errors import CheckpointError

_MOST_FILES = 2048
_MOST_BYTES = 1 << 20


class _Report(msgspec.Struct, frozen=True):
    total_s: float
    blocked_s: float


class _Line(msgspec.Struct, frozen=True):
    """What counts of a line."""

    name: str
    attempt: str
    rank: int
    host: str
    seconds: float
    sync_s: float
    report: _Report | None


_decode = msgspec.json.Decoder(_Line).decode


@dataclass(slots=True, kw_only=True)
class SaveTimes:
    """One save: how long it took, and blocked the caller; of each rank the host, and the seconds to write and sync."""

    seconds: float | None = None
    blocked_s: float | None = None
    ranks: dict[int, tuple[str, float, float]] = field(default_factory=dict)


class Timings:
    """The saves of the run in the directory ``root``, by attempt; a file is read again when it has changed."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._read: dict[str, tuple[tuple[int, int], list[_Line]]] = {}
        self.saves: dict[str, SaveTimes] = {}

    def look(self) -> None:
        """Take what has been written since the last look."""
        before = dict(self._read)
        try:
            names = [name for name in posix.list_names(self._root) if name.endswith(".jsonl")]
        except CheckpointError:  # no directory, or not yet
            return
        for name in sorted(names)[:_MOST_FILES]:
            path = os.path.join(self._root, name)
            status = posix.file_status(path)
            identity = (0, 0) if status is None else (status.st_size, status.st_mtime_ns)
            if name not in before or before[name][0] != identity:
                self._read[name] = identity, _lines(path)
        if self._read != before:
            self.saves = _saves(line for _, lines in self._read.values() for line in lines)


def _lines(path: str) -> list[_Line]:
    try:
        with files.opened(path) as file:
            start = max(0, file.size - _MOST_BYTES)
            data = bytearray(file.size - start)
            file.read_into(memoryview(data), start)
    except CheckpointError:
        return []
    found: list[_Line] = []
    for text in bytes(data).splitlines():
        try:
            line = _decode(text)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            continue
        found += [line] if line.attempt and line.name in ("written", "published") else []
    return found


def _saves(lines: Iterable[_Line]) -> dict[str, SaveTimes]:
    saves: dict[str, SaveTimes] = {}
    for line in lines:
        save = saves.setdefault(line.attempt, SaveTimes())
        if line.name == "written":
            save.ranks[line.rank] = line.host, line.seconds, line.sync_s
        elif line.report is not None:
            save.seconds, save.blocked_s = line.report.total_s, line.report.blocked_s
    return saves
