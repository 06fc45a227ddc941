"""Who of the ranks is lost: dead, stopped, stuck, gone too early, or never there.

Pure bookkeeping over signs of life and an injected clock. It decides nothing for others and sends nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from holdfast._values.deadline import Clock, Patience, Pulse, Sign
from holdfast.errors import RankLostError


class Watch:
    """What one rank knows of the others in one operation.

    Ranks are numbered as in the group; errors name them as ``names`` does, which is how the whole job numbers them.
    ``carrier`` is the rank whose process carries all messages: when our own beats do not come back, it is gone.
    """

    def __init__(self, *, names: Sequence[int], carrier: int, patience: Patience, clock: Clock) -> None:
        self._names = names
        self._carrier = carrier
        self._patience = patience
        self._clock = clock
        self._pulses: dict[int, Pulse] = {}
        self._left: set[int] = set()
        self._echoed_at = self._looked_at = clock()

    def look(self) -> float:
        """For how many seconds we ourselves were stopped; that is no silence of the others. To be called often."""
        now = self._clock()
        pause_s, self._looked_at = now - self._looked_at, now
        if pause_s < self._patience.silence_s / 2:
            return 0.0
        self._echoed_at += pause_s
        for pulse in self._pulses.values():
            pulse.excuse(pause_s)
        return pause_s

    def given_up(self, rank: int, pause_s: float, phase: str) -> dict[int, RankLostError]:
        """``rank``, which is ourselves, if the others have given us up while we were stopped."""
        silence_s, beat_s = self._patience.silence_s, self._patience.beat_s
        if pause_s < max(silence_s / 2, silence_s - 2 * beat_s):
            return {}
        name = self._names[rank]
        said = f"rank {name} was stopped for {pause_s:.0f} s in {phase!r}, so the others have given it up; try again"
        return {rank: RankLostError(said, rank=name, phase=phase)}

    @property
    def is_stale(self) -> bool:
        """Whether nobody has looked for longer than a beat."""
        return self._clock() - self._looked_at > self._patience.beat_s

    def see(self, rank: int, sign: Sign) -> None:
        """Take a beat of ``rank``."""
        pulse = self._pulses.get(rank)
        if pulse is None:
            self._pulses[rank] = Pulse(sign, self._clock)
        else:
            pulse.see(sign)

    def echo(self) -> None:
        """Take our own beat, back from the carrier."""
        self._echoed_at = self._clock()

    def leave(self, rank: int) -> None:
        """Take it that ``rank`` is through with the operation."""
        self._left.add(rank)

    @property
    def is_cut_off(self) -> bool:
        """Whether even our own beats do not come back just now: then the silence of others means nothing."""
        return self._clock() - self._echoed_at > max(3 * self._patience.beat_s, self._patience.silence_s / 4)

    def present(self, rank: int) -> bool:
        """Whether ``rank`` has come and not left."""
        return rank in self._pulses and rank not in self._left

    @property
    def left(self) -> frozenset[int]:
        """The ranks that are through with the operation."""
        return frozenset(self._left)

    def unreachable(self, phase: str) -> dict[int, RankLostError]:
        """The carrier, if nothing has come back from it for too long; we are in ``phase``."""
        if self._clock() - self._echoed_at < self._patience.silence_s:
            return {}
        return {self._carrier: self._silence(self._carrier, phase)}

    def silent(self, phase: str) -> dict[int, RankLostError]:
        """The ranks that came and have given no sign of life for too long; we are in ``phase``."""
        return {
            rank: self._silence(rank, phase)
            for rank, pulse in self._pulses.items()
            if rank not in self._left and pulse.silent_s >= self._patience.silence_s
        }

    def overdue(
        self, awaited: Collection[int], *, phase: str, since: float, excuse_waiting: bool
    ) -> dict[int, RankLostError]:
        """The ranks that we have awaited in ``phase`` since then and that will not come.

        ``excuse_waiting`` is for those who watch the coordinator: while it waits for a rank it is not to blame.
        """
        lost: dict[int, RankLostError] = {}
        waited_s = self._clock() - since
        for rank in awaited:
            pulse = self._pulses.get(rank)
            if rank in self._left:
                lost[rank] = self._lost(rank, phase, f"left before {phase!r}; make the same calls on every rank")
            elif pulse is None:
                if waited_s >= self._patience.progress_s:
                    limit = f"{self._patience.progress_s:g} s"
                    lost[rank] = self._lost(rank, phase, f"did not come to {phase!r} within {limit}; look at that rank")
            elif excuse_waiting and not pulse.sign.working:
                continue
            # Work that took longer than that while nobody waited for it was fine.
            elif min(pulse.stalled_s, waited_s) >= self._patience.progress_s:
                lost[rank] = self._stall(rank, pulse)
        return lost

    def broken(self, phase: str) -> dict[int, RankLostError]:
        """The carrier, after the connection to it broke."""
        said = f"is gone: the connection to it broke in {phase!r}; look at that rank"
        return {self._carrier: self._lost(self._carrier, phase, said)}

    def _silence(self, rank: int, phase: str) -> RankLostError:
        pulse = self._pulses.get(rank)
        place = repr(phase)
        # The last signs of the carrier stop with it on their way, and not for all ranks at the same one.
        if pulse is not None and rank != self._carrier:
            phase, place = pulse.sign.phase, _place(pulse.sign)
        said = (
            f"gave no sign of life for {self._patience.silence_s:g} s in {place}; see whether it was killed or stopped"
        )
        return self._lost(rank, phase, said)

    def _stall(self, rank: int, pulse: Pulse) -> RankLostError:
        said = (
            f"made no progress for {self._patience.progress_s:g} s in {_place(pulse.sign)}; "
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
