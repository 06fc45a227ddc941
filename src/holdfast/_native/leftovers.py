"""What saves that ended early leave behind: how their files are named, and what a sweep says of them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from holdfast._values.shown import short_repr

_ATTEMPT = r"(?P<attempt>[0-9a-zA-Z_-]{1,64})"
_NUMBER = r"(?:0|[1-9][0-9]{0,9})"
_NAMES = {
    "data": re.compile(rf"data-{_ATTEMPT}-{_NUMBER}-{_NUMBER}\.safetensors"),
    "index": re.compile(rf"index-{_ATTEMPT}\.safetensors"),
    "manifest": re.compile(rf"manifest-{_ATTEMPT}\.tmp"),
    "reader": re.compile(rf"reader-{_ATTEMPT}\.lock"),
}
READERS_NAME = os.path.join(".holdfast", "readers")
"""Where, below the root of a run, readers hold steps: ``reader-<id>.lock``, locked, and a folder ``reader-<id>``."""

METRICS_NAME, PINNED_NAME = "metrics.json", "pinned"
"""Files that may be added to a published step: metrics that came later; a file that protects it from deletion."""

Verdict = Literal["dead", "living", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """What an unpublished ``attempt`` has in ``directory``: ``files`` of ``bytes`` in all, and whether it is dead.

    ``verdict`` is "dead", "living" (a save goes on) or "unknown", and ``reason`` says why. ``removed`` are the files
    that are gone now.
    """

    __repr__ = short_repr

    directory: str
    attempt: str
    files: tuple[str, ...]
    bytes: int
    verdict: Verdict
    reason: str
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepReport:
    """What a sweep found in ``directories`` directories; ``problems`` are what it could not look at or remove."""

    __repr__ = short_repr

    root: str
    directories: int
    leftovers: tuple[Leftover, ...]
    problems: tuple[str, ...]

    @property
    def dead(self) -> tuple[Leftover, ...]:
        return tuple(leftover for leftover in self.leftovers if leftover.verdict == "dead")

    @property
    def removed_files(self) -> int:
        return sum(len(leftover.removed) for leftover in self.leftovers)


def attempts_in(names: Iterable[str]) -> dict[str, list[str]]:
    """The names of files like ours, by attempt."""
    attempts: dict[str, list[str]] = {}
    for name in names:
        for pattern in _NAMES.values():
            match = pattern.fullmatch(name)
            if match is not None:
                attempts.setdefault(match["attempt"], []).append(name)
    return attempts
