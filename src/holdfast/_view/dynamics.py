"""How the numbers of tensors move over the steps of a run, from statistics that their saves kept.

Of each step that was asked for, sums stay in memory, as columns; of long runs of large models only some steps are
taken, evenly spread, and the answer says how many are left out.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast._checkpoint import reader_for
from holdfast._native.reader import CatalogReader
from holdfast._values.statistics import TensorStatistics
from holdfast._view.tables import Branch, Levels
from holdfast.errors import CheckpointError

_MOST_SERIES = 50
_MOST_NUMBERS = 3_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepNumbers:
    """The tensors of a step, and of each the sum of squares, how many elements are finite, and how many are not."""

    levels: Levels
    rows: np.ndarray

    def of(self, branch: Branch) -> tuple[float, int, int]:
        """The same of all that is below ``branch``."""
        total = self.rows[branch.first : branch.stop].sum(axis=0)
        total = total if branch.leaf is None else total + self.rows[branch.leaf]
        return float(total[0]), int(total[1]), int(total[2])


def _numbers(found: Mapping[str, TensorStatistics]) -> StepNumbers:
    keys = sorted(key for key, each in found.items() if each.alias_of is None)
    told = [found[key] for key in keys]
    rows = [(each.sum_squares or 0.0, each.finite, each.nan + each.inf) for each in told]
    elements = np.array([each.elements for each in told], dtype=np.int64)
    levels = Levels(keys=keys, bytes=elements, rows=np.arange(len(keys)))
    return StepNumbers(levels=levels, rows=np.array(rows, dtype=np.float64).reshape(-1, 3))


class Dynamics:
    """Numbers of the steps of runs, remembered by path and attempt."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], StepNumbers | None] = {}

    def series(self, under: str, steps: Sequence[tuple[int, str, str]]) -> dict[str, object]:
        """What is right below ``under``, over ``steps``: the number, path and attempt of each."""
        with self._lock:
            taken, left_out = self._taken(steps)
            self._known = {place[1:]: self._read(*place[1:]) for place in taken}
            found = [(step, self._known[path, attempt]) for step, path, attempt in taken]
        told = [(step, numbers) for step, numbers in found if numbers is not None]
        rows: dict[tuple[str, bool], list[tuple[StepNumbers, Branch] | None]] = {}
        for at, (_, numbers) in enumerate(told):
            for branch in numbers.levels.below(under):
                row = rows.setdefault((branch.name, branch.stop > branch.first), [None] * len(told))
                row[at] = numbers, branch
        largest = sorted(rows.items(), key=lambda item: -max(each[1].bytes for each in item[1] if each))
        return {
            "under": under,
            "steps": [step for step, _ in told],
            "missing": [step for step, numbers in found if numbers is None],
            "left_out": left_out,
            "series": [_series(under, *name, row) for name, row in largest[:_MOST_SERIES]],
            "rest": max(0, len(rows) - _MOST_SERIES),
        }

    def _taken(self, steps: Sequence[tuple[int, str, str]]) -> tuple[list[tuple[int, str, str]], int]:
        """Those of ``steps`` that fit, the last one among them, and how many are left out."""
        newest = self._read(*steps[-1][1:]) if steps else None
        most = max(2, _MOST_NUMBERS // max(1, 0 if newest is None else len(newest.levels.keys)))
        if len(steps) <= most:
            return list(steps), 0
        places = sorted({round(number * (len(steps) - 1) / (most - 1)) for number in range(most)})
        return [steps[place] for place in places], len(steps) - len(places)

    def _read(self, path: str, attempt: str) -> StepNumbers | None:
        if (path, attempt) in self._known:
            return self._known[path, attempt]
        try:
            reader = reader_for(path)
            found = reader.catalog.statistics() if isinstance(reader, CatalogReader) else None
        except CheckpointError:  # deleted or damaged meanwhile, as the page of the run says
            return None
        numbers = self._known[path, attempt] = None if found is None else _numbers(found)
        return numbers


def _series(
    under: str, name: str, is_module: bool, row: Sequence[tuple[StepNumbers, Branch] | None]
) -> dict[str, object]:
    sums = [None if each is None else each[0].of(each[1]) for each in row]
    return {
        "name": name,
        "under": f"{under}{name}." if is_module else None,
        "tensors": max(each[1].tensors for each in row if each),
        "norm": [None if each is None else each[0] ** 0.5 for each in sums],
        "rms": [None if each is None or not each[1] else (each[0] / each[1]) ** 0.5 for each in sums],
        "update_ratio": None,
        "non_finite": [None if each is None else each[2] for each in sums],
    }
