"""What a part of the torture is given and what it tells.

A part is a module in ``torture/parts`` with a ``NAME`` and a function ``run(options: Options) -> PartResult``; the
runner finds it there. It injects its faults, judges each outcome, and returns the counts; it never asserts.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from torture import parts
from torture.crew import Case, Crew

Progress = Callable[[int, int], None]
"""Told how many faults have been injected, and how many there will be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to run a part.

    ``seed`` decides everything that is random; ``quick`` asks for a sample that takes seconds, whose counts nobody
    compares with what is required. ``folder`` is an empty directory for the part alone, in memory where there is room
    for it, removed afterwards; ``disk`` is another one, on a disk. ``crew`` runs cases in processes that can be
    disturbed. Of a run in ``slices``, this is the one with ``number``, from 1 on.
    """

    seed: int
    quick: bool
    folder: Path
    disk: Path
    progress: Progress = lambda done, total: None
    crew: Crew = field(default_factory=Crew)
    number: int = 1
    slices: int = 1

    @property
    def compares(self) -> bool:
        """Whether torch is tried too: in a full run, and there in the first slice."""
        return not self.quick and self.number == 1

    def share_of(self, cases: Sequence[Case]) -> list[Case]:
        """Those of ``cases`` that are in this slice. A part that asks has ``IN_SLICES = True``."""
        # In an order of their own: the crew tells outcomes as they come.
        cases = sorted(cases, key=lambda case: [str(value) for name, value in case.items() if name != "folder"])
        of_torch = [case for case in cases if case.get("library") == "torch"]
        others = [case for case in cases if case.get("library") != "torch"]
        return others[self.number - 1 :: self.slices] + (of_torch if self.compares else [])


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult:
    """What came of a part.

    Args:
        fault: what was injected, as the table names it.
        must_hold: what was checked each time.
        injected: how many faults struck.
        required: how many have to, in a full run.
        violations: one line for each outcome that breaks a promise.
        notes: one line for each thing worth telling.
        counts: more numbers, by name.
        torch: what torch's own checkpoints do in the same place, in a few words; None where that was not tried.
        skipped: why nothing was injected; None where it was.
    """

    fault: str
    must_hold: str
    injected: int
    required: int
    violations: Sequence[str]
    notes: Sequence[str] = ()
    counts: dict[str, int] = field(default_factory=dict)
    torch: str | None = None
    skipped: str | None = None


def all_parts() -> dict[str, ModuleType]:
    """The parts there are, by name, in the order of their modules' names."""
    names = sorted(module.name for module in pkgutil.iter_modules(parts.__path__) if not module.name.startswith("_"))
    modules = [importlib.import_module(f"{parts.__name__}.{name}") for name in names]
    found = {module.NAME: module for module in modules}
    if len(found) != len(modules):
        raise ValueError(f"two parts have the same name: {sorted(module.NAME for module in modules)}")
    return found
