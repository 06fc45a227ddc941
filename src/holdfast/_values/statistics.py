"""The numbers of a tensor as sums that can be added up, and as users see them. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from holdfast._values.shown import short_repr

COLUMNS = ("nan", "lost", "nonzero", "sum", "sum_imag", "sum_squares", "min", "max")
"""What is reckoned of a piece: how many elements are NaN, are not finite, are finite and not zero; of finite ones sums
and range."""

_SUMS = len(COLUMNS) - 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStatistics:
    """The numbers of one tensor: of its ``elements``, those ``looked_at``.

    Sums and range are those of finite elements among them. They are None where there is no such element, or where the
    dtype is no number (``float4_e2m1fn_x2``, ``bits8``, ``int4``): then nothing was looked at. A sum that is beyond
    float64 is None too. Complex numbers have a
    complex sum, no range, and the absolute value counts elsewhere. ``magnitudes`` are a histogram of what is finite and
    not zero: an exponent, and how many negative and positive elements have an absolute value from 2**exponent up to
    twice that; without empty bins. What is too small for a normal float64 counts as 2**-1023. ``source`` says where
    the numbers are from: the "data", which was read, or the "save" that kept them, of every element; a save keeps no
    ``magnitudes``, which are None then.
    """

    __repr__ = short_repr

    key: str
    dtype: str
    shape: tuple[int, ...]
    alias_of: str | None
    elements: int
    looked_at: int
    nan: int
    inf: int
    zeros: int
    sum: float | complex | None
    sum_squares: float | None
    min: float | None
    max: float | None
    magnitudes: tuple[tuple[int, int, int], ...] | None
    source: Literal["data", "save"] = "data"

    @property
    def is_exact(self) -> bool:
        """Whether every element was looked at."""
        return self.looked_at == self.elements

    @property
    def finite(self) -> int:
        return self.looked_at - self.nan - self.inf

    @property
    def mean(self) -> float | complex | None:
        return None if self.sum is None else self.sum / self.finite

    @property
    def rms(self) -> float | None:
        return None if self.sum_squares is None else math.sqrt(self.sum_squares / self.finite)

    @property
    def std(self) -> float | None:
        """The standard deviation, of these elements and not of a population that they were drawn from."""
        if self.sum_squares is None or self.mean is None:
            return None
        return math.sqrt(max(0.0, self.sum_squares / self.finite - abs(self.mean) ** 2))

    @property
    def norm(self) -> float | None:
        """The L2 norm of the whole tensor; of a sample, what it is if the rest is like it."""
        share = self.elements / self.looked_at if self.looked_at else 0.0
        return None if self.sum_squares is None else math.sqrt(self.sum_squares * share)


def no_numbers(count: int) -> npt.NDArray[np.float64]:
    """So many rows of ``COLUMNS``, of nothing yet."""
    table = np.zeros((count, len(COLUMNS)))
    table[:, _SUMS:] = math.inf, -math.inf
    return table


def add_numbers(table: npt.NDArray[np.float64], row: npt.NDArray[np.integer], numbers: npt.NDArray[np.float64]) -> None:
    """Add each row of ``numbers`` to row ``row[i]`` of ``table``."""
    with np.errstate(over="ignore", invalid="ignore"):  # sums beyond float64 are infinite
        for column in range(_SUMS):
            np.add.at(table[:, column], row, numbers[:, column])
    np.minimum.at(table[:, -2], row, numbers[:, -2])
    np.maximum.at(table[:, -1], row, numbers[:, -1])
