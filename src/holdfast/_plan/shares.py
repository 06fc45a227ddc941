"""Fair shares: how many bytes each of the holders of boxes takes, as if bytes were water.

The ranks of a host share its disk and its network, so water finds its level over hosts first, then over the ranks of
each. Whose host is not known is taken to be alone on one. Never looks at boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_Int64s = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]

UNKNOWN_HOST = 0
"""What a rank says of its host when it cannot tell."""

_SWEEPS = 32
"""At most so many rounds look for fair shares; sets of holders that are disjoint or nested need one."""

_SHARES_AT_MOST = 20_000
"""Rounds after the first are made only while there are no more shares to compute than this."""


def host_numbers(said: Sequence[int]) -> _Int64s | None:
    """The number of each rank's host, by lowest rank, where ``said`` are the names of hosts.

    None where hosts make no difference: all ranks are on one, or each is on its own.
    """
    names: dict[object, int] = {}
    numbers = [
        names.setdefault((rank,) if name == UNKNOWN_HOST else name, len(names)) for rank, name in enumerate(said)
    ]
    return np.array(numbers, dtype=np.int64) if 1 < len(names) < len(numbers) else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Holders:
    """Ranks that hold boxes together, ascending.

    ``by_host`` has their places host by host: those on ``hosts[i]`` from ``starts[i]`` up to the next start.
    """

    ranks: _Int64s
    by_host: _Int64s
    hosts: _Int64s
    starts: _Int64s


class Levels:
    """The bytes of every rank, and of its host; ``loads`` to begin with."""

    def __init__(self, loads: _Floats, hosts: _Int64s | None = None) -> None:
        self.ranks = loads.copy()
        self._host_of = np.arange(len(loads)) if hosts is None else hosts
        self._hosts = sums(self._host_of, loads, len(loads))

    def holders(self, ranks: _Int64s) -> Holders:
        """The ranks as a group that water can be poured over."""
        host = self._host_of[ranks]
        by_host = np.argsort(host, kind="stable")
        starts = np.flatnonzero(np.diff(host[by_host], prepend=-1))
        return Holders(ranks=ranks, by_host=by_host, hosts=host[by_host[starts]], starts=starts)

    def add(self, holders: Holders, shares: _Floats) -> None:
        """Give each holder its share more."""
        self.ranks[holders.ranks] += shares
        self._hosts[holders.hosts] += np.add.reduceat(shares[holders.by_host], holders.starts)

    def poured(self, amount: float, holders: Holders) -> _Floats:
        """What each holder gets of ``amount`` when the lowest hosts, and on them the lowest ranks, are raised."""
        of_hosts = _poured(amount, self._hosts[holders.hosts])
        shares = np.empty(len(holders.ranks))
        if len(of_hosts) == len(shares):
            shares[holders.by_host] = of_hosts
        else:
            loads = self.ranks[holders.ranks[holders.by_host]]
            shares[holders.by_host] = _poured_within(of_hosts, loads, holders.starts)
        return shares


def fair_shares(levels: Levels, holders: Sequence[Holders], amounts: Sequence[float]) -> list[_Floats]:
    """For each set the bytes that each of its holders takes, so that the fullest have as little as can be.

    ``levels`` has them afterwards. Each set in turn fills up those of its holders that have the least, as water would.
    Repeated, that comes ever closer to the fairest shares (it minimises the sum of squared loads, set by set).
    """
    shares = [np.zeros(len(each.ranks)) for each in holders]
    negligible = 0.001 * (levels.ranks.sum() + sum(amounts)) / len(levels.ranks)
    sweeps = min(_SWEEPS, max(1, _SHARES_AT_MOST // len(holders)))
    for _ in range(sweeps):
        change = 0.0
        for number, (each, amount) in enumerate(zip(holders, amounts, strict=True)):
            levels.add(each, -shares[number])
            share = levels.poured(amount, each)
            change = max(change, float(np.abs(share - shares[number]).max()))
            levels.add(each, share)
            shares[number] = share
        if change <= negligible:
            break
    return shares


def _poured(amount: float, loads: _Floats) -> _Floats:
    """What each load gets of ``amount`` when the lowest are raised to one level."""
    ascending = np.sort(loads)
    levels = (np.cumsum(ascending) + amount) / np.arange(1, len(loads) + 1)
    # To raise one load more lowers the level as long as that load is below it: the lowest level is the one reached.
    reached: _Floats = np.maximum(levels.min() - loads, 0)
    return reached


def _poured_within(amounts: _Floats, loads: _Floats, starts: _Int64s) -> _Floats:
    """The same for many at once: ``amounts[i]`` is for the loads from ``starts[i]`` up to the next start."""
    group = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(loads))))
    ascending = loads[np.lexsort((loads, group))]
    below = np.cumsum(ascending)
    below -= (below - ascending)[starts][group]
    levels = (below + amounts[group]) / (np.arange(1, len(loads) + 1) - starts[group])
    reached: _Floats = np.maximum(np.minimum.reduceat(levels, starts)[group] - loads, 0)
    return reached


def sums(number: _Int64s, weights: npt.NDArray[np.generic], count: int) -> _Floats:
    """For each number below ``count`` the sum of its weights, exact up to 2^53."""
    return np.bincount(number, weights=weights, minlength=count).astype(np.float64, copy=False)
