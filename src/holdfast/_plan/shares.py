"""How many bytes each holder of a box takes, and what every member of a mesh holds of a tensor.

The ranks of a host share its disk and its network, so bytes are evened out over hosts first, then over the ranks of
each. A rank whose host is not known is taken to be alone on one.

What a mesh holds is found in columns, one row per box, for all members at once; only splits that leave a member several
runs of indices take a Python loop over the members. Digests of such rows are as cheap for all members as for one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast._values.box import Split, runs_of

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
    """How many bytes every rank writes, and its host; ``loads`` to begin with."""

    def __init__(self, loads: _Floats, hosts: _Int64s | None = None) -> None:
        self.ranks = loads.copy()
        self._host_of = np.arange(len(loads)) if hosts is None else hosts
        self._hosts = sums(self._host_of, loads, len(loads))

    def holders(self, ranks: _Int64s) -> Holders:
        """The ranks, ascending, with their hosts."""
        host = self._host_of[ranks]
        by_host = np.argsort(host, kind="stable")
        starts = np.flatnonzero(np.diff(host[by_host], prepend=-1))
        return Holders(ranks=ranks, by_host=by_host, hosts=host[by_host[starts]], starts=starts)

    def add(self, holders: Holders, shares: _Floats) -> None:
        self.ranks[holders.ranks] += shares
        self._hosts[holders.hosts] += np.add.reduceat(shares[holders.by_host], holders.starts)

    def shares_of(self, amount: float, holders: Holders) -> _Floats:
        """What each holder gets of ``amount`` if hosts with little, and on them ranks with little, get the most."""
        of_hosts = _raised(np.array([amount]), self._hosts[holders.hosts], np.zeros(1, dtype=np.int64))
        shares = np.empty(len(holders.ranks))
        if len(of_hosts) == len(shares):
            shares[holders.by_host] = of_hosts
        else:
            shares[holders.by_host] = _raised(of_hosts, self.ranks[holders.ranks[holders.by_host]], holders.starts)
        return shares


def fair_shares(levels: Levels, holders: Sequence[Holders], amounts: Sequence[float]) -> list[_Floats]:
    """For each set the bytes that each of its holders takes, so that the fullest have as little as can be.

    ``levels`` has them afterwards. Each set in turn gives its bytes to those of its holders that have the least.
    Repeated, that comes ever closer to the fairest shares (it minimises the sum of squared loads, set by set).
    """
    shares = [np.zeros(len(each.ranks)) for each in holders]
    negligible = 0.001 * (levels.ranks.sum() + sum(amounts)) / len(levels.ranks)
    sweeps = min(_SWEEPS, max(1, _SHARES_AT_MOST // len(holders)))
    for _ in range(sweeps):
        change = 0.0
        for number, (each, amount) in enumerate(zip(holders, amounts, strict=True)):
            levels.add(each, -shares[number])
            share = levels.shares_of(amount, each)
            change = max(change, float(np.abs(share - shares[number]).max()))
            levels.add(each, share)
            shares[number] = share
        if change <= negligible:
            break
    return shares


def _raised(amounts: _Floats, loads: _Floats, starts: _Int64s) -> _Floats:
    """What each load gets if ``amounts[i]`` brings the lowest from ``starts[i]`` to the next start to one level."""
    group = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(loads))))
    ascending = loads[np.lexsort((loads, group))]
    below = np.cumsum(ascending)
    below -= (below - ascending)[starts][group]
    levels = (below + amounts[group]) / (np.arange(1, len(loads) + 1) - starts[group])
    # To raise one load more lowers the level as long as that load is below it: the lowest level is the one reached.
    reached: _Floats = np.maximum(np.minimum.reduceat(levels, starts)[group] - loads, 0)
    return reached


def sums(number: _Int64s, weights: npt.NDArray[np.generic], count: int) -> _Floats:
    """For each number below ``count`` the sum of its weights, exact up to 2^53."""
    return np.bincount(number, weights=weights, minlength=count).astype(np.float64, copy=False)


_UInt64s = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemberBoxes:
    """The boxes of all members: ``member`` is [n], ascending, ``lo`` and ``length`` are [n, D], in local order."""

    member: _Int64s
    lo: _Int64s
    length: _Int64s


def boxes_on_mesh(size: Sequence[int], mesh: Sequence[int], splits: Sequence[Sequence[Split]]) -> MemberBoxes:
    """What each member of a mesh of that shape, counted row by row, holds of a tensor of ``size``.

    A member without elements has no box, except that a tensor which has none at all is one empty box on all of them.
    """
    members = int(np.prod(mesh, dtype=np.int64))
    dimensions = len(size)
    lo = np.zeros((members, dimensions), dtype=np.int64)
    length = np.empty((members, dimensions), dtype=np.int64)
    length[:] = size
    everyone = np.arange(members)
    if 0 in size:
        return MemberBoxes(member=everyone, lo=lo, length=length)
    if any(split.blocks > 1 for of_dim in splits for split in of_dim):
        return _in_runs(size, mesh, splits)
    place = np.unravel_index(everyone, tuple(mesh)) if len(mesh) else ()
    for dimension, of_dim in enumerate(splits):
        for split in of_dim:
            whole = length[:, dimension]
            step = -(-whole // split.parts)
            start = np.minimum(step * place[split.mesh_dim], whole)
            lo[:, dimension] += start
            length[:, dimension] = np.minimum(step, whole - start)
    held = np.flatnonzero((length > 0).all(axis=1))
    return MemberBoxes(member=held, lo=lo[held], length=length[held])


def _in_runs(size: Sequence[int], mesh: Sequence[int], splits: Sequence[Sequence[Split]]) -> MemberBoxes:
    """The same where a member may hold several runs of a dimension, and the boxes that they make together."""
    known: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    members: list[int] = []
    boxes: list[tuple[tuple[int, int], ...]] = []
    for member, place in enumerate(itertools.product(*map(range, mesh))):
        runs = []
        for dimension, of_dim in enumerate(splits):
            where = (dimension, *(place[split.mesh_dim] for split in of_dim))
            if where not in known:
                known[where] = runs_of(size[dimension], zip(of_dim, where[1:], strict=True))
            runs.append(known[where])
        held = list(itertools.product(*runs))
        boxes += held
        members += [member] * len(held)
    table = np.array(boxes, dtype=np.int64).reshape(len(boxes), len(size), 2)
    return MemberBoxes(
        member=np.array(members, dtype=np.int64),
        lo=np.ascontiguousarray(table[:, :, 0]),
        length=np.ascontiguousarray(table[:, :, 1]),
    )


def scrambled(words: _UInt64s) -> _UInt64s:
    """A word for each word, as good as random (the mixing steps of splitmix64)."""
    words = (words + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words ^= words >> np.uint64(shift)
        words *= np.uint64(factor)
    words ^= words >> np.uint64(31)
    return words


def box_words(lo: _Int64s, length: _Int64s) -> _UInt64s:
    """A word for each box; padding with 0 and 1 does not change it."""
    words: _UInt64s = np.full(len(lo), 1, dtype=np.uint64)
    for dimension in range(lo.shape[1]):
        begin, size = lo[:, dimension].astype(np.uint64), length[:, dimension].astype(np.uint64)
        is_padding = (begin == 0) & (size == 1)
        mixed = scrambled(scrambled(begin + np.uint64(dimension << 56)) ^ size)
        words += np.where(is_padding, np.uint64(0), mixed)
    return words


def rows_digest(factors: _UInt64s, key: _Int64s, lo: _Int64s, length: _Int64s) -> int:
    """A digest of a table of rows, whatever their order; ``factors`` has an odd number for each key.

    It is a sum over the rows, so that many tables which share keys and boxes are digested together.
    """
    return int((factors[key] * box_words(lo, length)).sum(dtype=np.uint64))
