"""Balance: which rank writes which box, when several ranks hold the same one.

Rows with the same tensor and the same box are replicas; each distinct box is written once, by one of the ranks that
hold it or in parts by several, so that all ranks write about as many bytes. Boxes that the same ranks hold are planned
together, because a job has few such sets of holders however many boxes it has:

1. how many bytes each holder should take of each set: what brings the ranks to the same number of bytes
   (``fair_shares``);
2. the large boxes of a set are laid end to end and cut where one holder's share ends and the next one's begins, so
   that only a box on such a border is split (``_cut``);
3. small boxes go whole, the largest first, to the holder with the most left to take (``_place``).

The result depends on what the rows say, not on their order. Boxes that overlap without being equal are no replicas
here: the check of coverage finds those. Never looks at data.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast._values.digest import scrambled

_Int64s = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]

SPLIT_BYTES = 16 << 20
"""Replicated boxes above this may be split between the ranks that hold them."""

_SWEEPS = 32
"""At most so many rounds look for fair shares; sets of holders that are disjoint or nested need one."""

_SHARES_AT_MOST = 20_000
"""Rounds after the first are made only while there are no more shares to compute than this."""

_TOLERANCE = 1 / 20
"""What one box, or one step of a cut, may be of a rank's bytes: two of them are the 10 % that ranks may differ by."""

_PLACED_ONE_BY_ONE = 100_000
"""More small boxes than this are not all placed one by one."""

_CORRECTIONS = 16
"""So many boxes per holder are placed one by one even then: they even out what the others left uneven."""

_DEALT_SHARE = 1 / 100
"""The smallest of the small boxes, together this part of their bytes, are dealt out by number: bytes are no guide."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shared:
    """Distinct boxes that several ranks hold: ``nbytes`` and ``itemsize`` are [n], ``length`` is [n, D]."""

    nbytes: _Int64s
    length: _Int64s
    itemsize: _Int64s


class Parts(NamedTuple):
    """Parts of boxes: of box ``box``, for the holder at ``holder``, from ``begin`` to ``stop`` along ``dimension``.

    All are [m]. A dimension of -1 stands for the whole box.
    """

    box: _Int64s
    holder: _Int64s
    dimension: _Int64s
    begin: _Int64s
    stop: _Int64s

    def take(self, rows: _Int64s | slice) -> Parts:
        return Parts(*[column[rows] for column in self])


class HolderSet(NamedTuple):
    """Boxes that the same ranks hold: ``ranks`` is [h], ascending, ``boxes`` are numbers of distinct boxes."""

    ranks: _Int64s
    boxes: _Int64s


def holder_sets(holders: Sequence[_Int64s], number: _Int64s) -> list[HolderSet]:
    """Boxes by their sets of holders, the sets with the fewest holders first; ``number`` has each box's set."""
    by_set = np.argsort(number, kind="stable")
    bounds = np.searchsorted(number[by_set], np.arange(len(holders) + 1)).tolist()
    found: list[tuple[int, int, HolderSet]] = []
    for which, ranks in enumerate(holders):
        boxes = by_set[bounds[which] : bounds[which + 1]]
        if len(boxes):
            found.append((len(ranks), int(boxes[0]), HolderSet(ranks, boxes)))
    return [one for _, _, one in sorted(found, key=itemgetter(0, 1))]


def _raised(amount: float, loads: _Floats) -> _Floats:
    """What each of ``loads`` gets if ``amount`` brings the lowest of them to one level."""
    levels = (np.cumsum(np.sort(loads)) + amount) / np.arange(1, len(loads) + 1)
    # To raise one load more lowers the level as long as that load is below it: the lowest level is the one reached.
    reached: _Floats = np.maximum(levels.min() - loads, 0)
    return reached


def fair_shares(loads: _Floats, sets: Sequence[HolderSet], amounts: Sequence[float]) -> list[_Floats]:
    """For each set the bytes that each of its holders takes, so that the fullest have as little as can be.

    ``loads``, the bytes of every rank, has them afterwards. Each set in turn gives its bytes to those of its holders
    that have the least. Repeated, that comes ever closer to the fairest shares (it minimises the sum of squared loads,
    set by set).
    """
    shares = [np.zeros(len(one.ranks)) for one in sets]
    negligible = 0.001 * (loads.sum() + sum(amounts)) / len(loads)
    for _ in range(min(_SWEEPS, max(1, _SHARES_AT_MOST // len(sets)))):
        change = 0.0
        for number, (one, amount) in enumerate(zip(sets, amounts, strict=True)):
            loads[one.ranks] -= shares[number]
            share = _raised(amount, loads[one.ranks])
            change = max(change, float(np.abs(share - shares[number]).max()))
            loads[one.ranks] += share
            shares[number] = share
        if change <= negligible:
            break
    return shares


def choose_writers(
    boxes: Shared,
    holders: Sequence[_Int64s],
    number: _Int64s,
    loads: _Floats,
    *,
    split_bytes: int = SPLIT_BYTES,
) -> Parts:
    """The parts of all ``boxes``, by box, each for one of the box's holders.

    ``number`` has for each box which of ``holders`` hold it; ``loads`` are the bytes that each rank writes anyway.

    Boxes above ``split_bytes`` may be split between their holders, those from a sixteenth of it on only where ranks
    might otherwise differ by more than 10 %. Parts are not smaller than a sixteenth (where ranks write little, a
    quarter of that), and a box never has more of them than holders.
    """
    sets = holder_sets(holders, number)
    loads = loads.astype(np.float64)
    amounts = [float(boxes.nbytes[one.boxes].sum()) for one in sets]
    shares = fair_shares(loads, sets, amounts)
    place_all = len(boxes.nbytes) <= _PLACED_ONE_BY_ONE
    found: list[Parts] = []
    for one, amount, share in zip(sets, amounts, shares, strict=True):
        size, lengths = boxes.nbytes[one.boxes], boxes.length[one.boxes]
        reached = loads[one.ranks]
        # The fewer bytes a rank writes, the finer boxes are cut.
        tolerated = int(reached.min(where=share > 0, initial=reached.max()) * _TOLERANCE)
        # Earlier sets took other bytes than their shares, because boxes are not cut anywhere: this set evens that out.
        loads[one.ranks] -= share
        left = _raised(amount, loads[one.ranks])
        divisible = (lengths.prod(axis=1) * boxes.itemsize[one.boxes] == size) & (lengths > 1).any(axis=1)
        cut = (size > max(split_bytes // 16, min(tolerated, split_bytes))) & divisible
        taken = np.zeros(len(left))
        if cut.any():
            target = left * (size[cut].sum() / amount)
            least = max(split_bytes // 64, min(tolerated, split_bytes // 16), 1)
            cuts, taken = _cut(one.boxes[cut], size[cut], lengths[cut], target, least, max(least, tolerated))
            found.append(cuts)
        holder = _place(size[~cut], left - taken, place_all=place_all)
        nothing = np.zeros(len(holder), dtype=np.int64)
        found.append(Parts(one.boxes[~cut], holder, nothing - 1, nothing, nothing))
        loads[one.ranks] += taken + np.bincount(holder, weights=size[~cut], minlength=len(left))
    parts = Parts(*map(np.concatenate, zip(*found, strict=True)))
    return parts.take(np.argsort(parts.box, kind="stable"))


def same_runs(values: _Int64s, starts: _Int64s, counts: _Int64s) -> tuple[_Int64s, _Int64s]:
    """A number for each run of ``values``, equal for equal ones only; and the first run of each number."""
    within = np.arange(len(values)) - np.repeat(starts, counts)
    salt = 0
    while True:
        count = int(values.max()) + 1
        words = scrambled(np.arange(salt * count, (salt + 1) * count, dtype=np.uint64))
        _, first, number = np.unique(np.add.reduceat(words[values], starts), return_index=True, return_inverse=True)
        model = first[number]
        # Sums of scrambled words tell runs apart but for an accident, which another salt does not repeat.
        if np.array_equal(counts[model], counts) and np.array_equal(
            values[np.repeat(starts[model], counts) + within], values
        ):
            return number, first
        salt += 1


def _cut(
    boxes: _Int64s, sizes: _Int64s, lengths: _Int64s, target: _Floats, least: int, most_step: int
) -> tuple[Parts, _Floats]:
    """The parts of boxes of ``sizes`` bytes that bring each holder near its target, and the bytes of each holder.

    Parts have ``least`` bytes or more. A box is cut along the first dimension in which a step has at most ``most_step``
    bytes, mostly the outermost, so that the bytes of a part lie together.
    """
    steps_of = sizes[:, None] // lengths
    fine = (lengths > 1) & (steps_of <= most_step)
    dimension = np.where(fine.any(axis=1), fine.argmax(axis=1), lengths.argmax(axis=1))
    steps = np.take_along_axis(steps_of, dimension[:, None], axis=1)[:, 0]
    ends = np.cumsum(sizes)
    starts = ends - sizes
    borders = _borders(np.cumsum(target)[:-1].tolist(), starts.tolist(), sizes.tolist(), steps.tolist(), least)
    # Sorted by hand: np.unique without indexes first imports numpy.ma, which takes longer than the plan of most jobs.
    edges = np.sort(np.concatenate([starts, borders, ends[-1:]]))
    edges = edges[np.append(np.diff(edges) > 0, True)]
    begin, stop = edges[:-1], edges[1:]
    box = np.searchsorted(starts, begin, side="right") - 1
    holder = np.searchsorted(borders, begin, side="right")
    parts = Parts(
        box=boxes[box],
        holder=holder,
        dimension=dimension[box],
        begin=(begin - starts[box]) // steps[box],
        stop=(stop - starts[box]) // steps[box],
    )
    return parts, np.bincount(holder, stop - begin, len(target)).astype(np.float64)


def _borders(
    wanted: Sequence[float], starts: Sequence[int], sizes: Sequence[int], steps: Sequence[int], least: int
) -> _Int64s:
    """Where to cut, near ``wanted``: at ends of boxes, or at whole steps that leave parts of ``least`` bytes or more.

    The boxes lie end to end, from 0 on.
    """
    borders = []
    before = 0
    for place in wanted:
        box = max(bisect_right(starts, max(place, before)) - 1, 0)
        start, size, step = starts[box], sizes[box], steps[box]
        floor = max(before - start, 0)
        offset = min(max(place - start, floor), size)
        candidates = [floor, size]
        lowest, highest = -(-(floor + least) // step), (size - least) // step
        if lowest <= highest:
            candidates.append(min(max(round(offset / step), lowest), highest) * step)
        before = start + min(candidates, key=lambda candidate: abs(candidate - offset))
        borders.append(before)
    return np.array(borders, dtype=np.int64)


def _place(sizes: _Int64s, left: _Floats, *, place_all: bool) -> _Int64s:
    """For each box of ``sizes`` bytes the holder that takes it whole; ``left`` is what the holders have still to take.

    Without ``place_all`` most boxes are laid end to end and go to the holder in whose share their middle lies.
    """
    holders = len(left)
    descending = np.argsort(-sizes, kind="stable")
    from_smallest = np.cumsum(sizes[descending[::-1]])
    dealt = int(np.searchsorted(from_smallest, _DEALT_SHARE * sizes.sum(), side="right"))
    placed, dealt_out = np.split(descending, [len(sizes) - dealt])
    holder = np.empty(len(sizes), dtype=np.int64)
    holder[dealt_out] = np.arange(dealt) % holders
    left = left - np.bincount(holder[dealt_out], weights=sizes[dealt_out], minlength=holders)
    singly = len(placed) if place_all else min(len(placed), _CORRECTIONS * holders)
    if singly < len(placed):
        chosen = np.zeros(len(placed), dtype=bool)
        chosen[np.arange(singly) * len(placed) // singly] = True
        line = np.sort(placed[~chosen])
        placed = placed[chosen]
        ends = np.cumsum(sizes[line])
        room = np.cumsum(np.maximum(left, 0))
        middle = (ends - sizes[line] / 2) * (room[-1] / ends[-1])
        holder[line] = np.minimum(np.searchsorted(room, middle, side="right"), holders - 1)
        left = left - np.bincount(holder[line], weights=sizes[line], minlength=holders)
    # One after the other to the holder with the most left to take.
    heap = [(-each, place) for place, each in enumerate(left.tolist())]
    heapq.heapify(heap)
    takers = []
    for size in sizes[placed].tolist():
        excess, place = heap[0]
        heapq.heapreplace(heap, (excess + size, place))
        takers.append(place)
    holder[placed] = takers
    return holder
