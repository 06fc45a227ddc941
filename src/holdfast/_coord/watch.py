"""Who of the ranks is lost: gone, stuck, gone too early, or never there.

Pure bookkeeping over signs of life and an injected clock. It decides nothing for others and sends nothing. Silence is
no death: whoever holds the interpreter's lock for long is silent too. It counts as work without progress.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from holdfast._values.deadline import Clock, Patience, Pulse, Sign
from holdfast.errors import RankLostError

_PAUSE_S = 1.0


class Watch:
    """What one rank knows of the others in one operation.

    Ranks are numbered as in the group; errors name them as ``names`` does, which is how the whole job numbers them.
    """

    def __init__(self, *, names: Sequence[int], patience: Patience, clock: Clock) -> None:
        self._names = names
        self._patience = patience
        self._clock = clock
        self._pulses: dict[int, Pulse] = {}
        self._left: set[int] = set()
        self._looked_at = clock()

    def look(self) -> float:
        """For how many seconds we ourselves were stopped; that is no delay of the others. To be called often."""
        now = self._clock()
        pause_s, self._looked_at = now - self._looked_at, now
        if pause_s < _PAUSE_S:
            return 0.0
        for pulse in self._pulses.values():
            pulse.excuse(pause_s)
        return pause_s

    def given_up(self, rank: int, pause_s: float, phase: str) -> dict[int, RankLostError]:
        """``rank``, which is ourselves, if the others have given us up while we were stopped."""
        if pause_s < _PAUSE_S or pause_s < self._patience.progress_s - 2 * self._patience.beat_s:
            return {}
        said = f"was stopped for {pause_s:.0f} s in {phase!r}, so the others have given it up; try again"
        return {rank: self._lost(rank, phase, said)}

    def see(self, rank: int, sign: Sign) -> None:
        """Take a beat of ``rank``."""
        pulse = self._pulses.get(rank)
        if pulse is None:
            self._pulses[rank] = Pulse(sign, self._clock)
        else:
            pulse.see(sign)

    def leave(self, rank: int) -> None:
        """Take it that ``rank`` is through with the operation."""
        self._left.add(rank)

    def present(self, rank: int) -> bool:
        """Whether ``rank`` has come and not left."""
        return rank in self._pulses and rank not in self._left

    @property
    def left(self) -> frozenset[int]:
        """The ranks that are through with the operation."""
        return frozenset(self._left)

    def gone(self, ranks: Collection[int], phase: str) -> dict[int, RankLostError]:
        """Those of ``ranks``, whose connections have ended, that were not through; we are in ``phase``."""
        lost: dict[int, RankLostError] = {}
        for rank in ranks:
            if rank not in self._left:
                pulse = self._pulses.get(rank)
                reached, place = (pulse.sign.phase, _place(pulse.sign)) if pulse is not None else (phase, repr(phase))
                lost[rank] = self._lost(
                    rank, reached, f"is gone: its process or its host died, or the network broke, in {place}"
                )
        return lost

    def overdue(
        self, awaited: Collection[int], *, phase: str, since: float, excuse_waiting: bool
    ) -> dict[int, RankLostError]:
        """The ranks that we have awaited in ``phase`` since then and that will not come.

        ``excuse_waiting`` is for those who watch the coordinator: while it says that it waits for a rank it is not to
        blame.
        """
        lost: dict[int, RankLostError] = {}
        waited_s, limit_s = self._clock() - since, self._patience.progress_s
        for rank in awaited:
            pulse = self._pulses.get(rank)
            if rank in self._left:
                lost[rank] = self._lost(rank, phase, f"left before {phase!r}; make the same calls on every rank")
            elif pulse is None:
                if waited_s >= limit_s:
                    said = f"did not come to {phase!r} within {limit_s:g} s; look at that rank"
                    lost[rank] = self._lost(rank, phase, said)
            else:
                is_excused = excuse_waiting and not pulse.sign.working
                # Work that took longer than that while nobody waited for it was fine.
                if min(pulse.silent_s if is_excused else pulse.stalled_s, waited_s) >= limit_s:
                    lost[rank] = self._stall(rank, pulse)
        return lost

    def _stall(self, rank: int, pulse: Pulse) -> RankLostError:
        limit_s = self._patience.progress_s
        said = (
            f"made no progress for {limit_s:g} s in {_place(pulse.sign)}; "
            "look at what it hangs on, or allow more with deadline_s"
        )
        return self._lost(rank, pulse.sign.phase, said)

    def _lost(self, rank: int, phase: str, said: str) -> RankLostError:
        name = self._names[rank]
        return RankLostError(f"rank {name} {said}", rank=name, phase=phase)


def _place(sign: Sign) -> str:
    known = [f"{sign.progress:,} bytes done"] if sign.progress else []
    known += [f"at {sign.file!r}"] if sign.file else []
    return f"{sign.phase!r} ({', '.join(known)})" if known else repr(sign.phase)
