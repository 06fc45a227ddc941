"""The steps that all ranks of a save or load take together, one process that takes them alone, and who takes part.

A phase runs ``local`` on every rank and ``merge`` on the coordinator. Whatever fails, on whichever rank, is raised on
every rank as a CheckpointError: one of this library's own as it is, anything else wrapped, with the original as its
cause. Interrupts pass through.

Then: what ranks must agree on, failures on their way to other ranks, and which ranks are lost. Any exception can be
told. One that cannot be pickled, or not be unpickled where it arrives, arrives as the name of its type, its message and
its traceback; nothing here raises because of what somebody else's exception does.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import torch.distributed
from torch.distributed import ProcessGroup

from holdfast import errors
from holdfast._torch_codec.pickles import decode_message, encode_message
from holdfast._values.deadline import Clock, Patience, Pulse, Sign
from holdfast.errors import WRAPPED_EXCEPTION, CheckpointError, RankDisagreementError, RankLostError, first_line
from holdfast.events.progress import Shown

DEADLINE_S = 120.0
"""Seconds without progress after which a rank that others wait for is given up."""

Part = TypeVar("Part")
Whole = TypeVar("Whole")


class Ranks:
    """All ranks of one save or load, as one of them sees them; entered once, around all phases.

    These are one process that is all the ranks there are, or acts as if it were: then under the number that it has.
    Several are ``ChannelRanks``.

    Attributes:
        is_coordinator: whether this is the one that merges.
        job_ranks: the number of each in the whole job, as errors name them.
        deadline_s: seconds without progress after which a rank that others wait for is given up.
        kept: what this rank keeps for later operations of the same ranks under the same coordinator.
        signs: what this rank tells the others of itself.
        waited_s: seconds in which this rank waited for others.
    """

    def __init__(self, *, rank: int = 0, is_coordinator: bool = True) -> None:
        self.rank = rank
        self.size = 1
        self.is_coordinator = is_coordinator
        self.job_ranks: tuple[int, ...] = (rank,)
        self.deadline_s = math.inf
        self.kept: dict[object, Any] = {}
        self.signs = OwnSigns()
        self.waited_s = 0.0

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.signs = OwnSigns()  # the storage, of which it asks, is not to keep this, nor this the storage

    def reduce_scatter(
        self, phase: str, local: Callable[[], Part], merge: Callable[[list[Part]], list[Whole]]
    ) -> Whole:
        """This rank's element of what ``merge`` makes of all parts."""
        return self.all_reduce(phase, local, merge)[0]

    def all_reduce(self, phase: str, local: Callable[[], Part], merge: Callable[[list[Part]], Whole]) -> Whole:
        """What ``merge`` makes of all parts, the same on every rank."""
        self.signs.phase = phase
        try:
            return merge([local()])
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(_foreign(phase, type(error).__name__, error), {0: wrapped(error)}) from error

    def locally(self, phase: str, local: Callable[[], Part]) -> Part:
        """What ``local`` returns, without a word to the others unless it fails; that is raised on every rank."""
        part: Part = self.all_reduce(phase, local, itemgetter(0))
        return part

    def again(self) -> None:
        """Go on after a failure that every rank has raised, as if it had not been; all ranks do so, or none."""

    def check(self) -> None:
        """Raise what another rank has failed with, if one has; cheap enough for every round of a loop, any thread."""

    def look_until(self, look: Callable[[], bool]) -> None:
        """Call ``look``, which waits a little for other ranks, until it returns True: for waits within work of its own.

        Meanwhile this rank is not the one that is stuck; the coordinator, if it is this one, judges who is.
        """
        while not look():
            self.signs.moved += 1

    def follow(self, count: Callable[[], int], file: Callable[[], str], total: Callable[[], int] = int) -> None:
        """Ask now and then, in another thread, how many bytes are done, at which file, and how many there are in all.

        That is shown to the others, and to people.
        """
        self.signs.count, self.signs.file, self.signs.total = count, file, total

    def overview(self) -> Shown:
        """How far all ranks are, as far as this one hears of them: the coordinator hears of all."""
        return Shown(self.signs.phase, self.signs.count(), self.signs.total())


def participants(
    process_group: ProcessGroup | None,
    *,
    no_dist: bool,
    call: str,
    place: object = None,
    coordinator_rank: int = 0,
    deadline_s: float = DEADLINE_S,
) -> Ranks:
    """The ranks of one operation, which meet where ``call`` and ``place``, the path if that is one, are the same.

    ``deadline_s`` may be infinite; ValueError unless it is positive.
    """
    if deadline_s != DEADLINE_S:
        check_deadline(deadline_s)
    if no_dist or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return Ranks()
    if torch.distributed.get_world_size(process_group) == 1:
        return Ranks()
    from holdfast._ranks.rendezvous import several  # which is made of what is here

    path = None
    with contextlib.suppress(Exception):  # of a path of the caller's own making; the operation itself will say so
        path = os.fspath(place) if isinstance(place, (str, bytes, os.PathLike)) else None
    patience = Patience.within(deadline_s)
    return several(process_group, coordinator=coordinator_rank, key=f"{call} {path!r}", patience=patience)


def check_deadline(deadline_s: float) -> None:
    """ValueError unless ``deadline_s`` is a positive number, which may be infinite."""
    if not isinstance(deadline_s, (int, float)) or not deadline_s > 0:
        raise ValueError(f"deadline_s is a positive number of seconds, or math.inf for no deadline, not {deadline_s!r}")


ON_EVERY_RANK = "call it on every rank, or pass no_dist=True"
"""What to do where a rank may never have called."""

MEETING = "meeting the other ranks"
"""The phase of a rank that has not begun another one."""

_LONGEST = 200  # characters of what one camp said
_MOST_CAMPS = 4


def agreed(name: str, said: Mapping[int, str]) -> None:
    """Raise RankDisagreementError unless all ranks said the same of ``name``."""
    if len(set(said.values())) > 1:
        raise disagreement(name, said)


def disagreement(name: str, said: Mapping[int, str]) -> RankDisagreementError:
    """The error of ranks that said different things of ``name``; its failures are the minority."""
    camps = Counter(said.values()).most_common()
    by_camp = {what: [rank for rank in sorted(said) if said[rank] == what] for what, _ in camps}
    shown = [
        f"{_ranks(ranks, 'says', 'say')} {_shortened(what)}" for what, ranks in list(by_camp.items())[:_MOST_CAMPS]
    ]
    more = f" and {len(camps) - _MOST_CAMPS} other answers" if len(camps) > _MOST_CAMPS else ""
    error = RankDisagreementError(
        f"the ranks disagree on the {name}: {', '.join(shown)}{more}; use the same one on every rank", said=said
    )
    error.failures = {
        rank: (RankDisagreementError(f"rank {rank} said {_shortened(what)}"), traceback.StackSummary())
        for rank, what in sorted(said.items())
        if what != camps[0][0]
    }
    return error


def _ranks(ranks: Sequence[int], one: str, several: str) -> str:
    """``rank 3 says``, ``ranks 0-2 and 5 say``, where these are the verbs: runs are shortened."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    texts = ["-".join(map(str, run)) for run in runs]
    listed = texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
    return f"rank {listed} {one}" if len(ranks) == 1 else f"ranks {listed} {several}"


def _shortened(what: str) -> str:
    return what if len(what) <= _LONGEST else f"{what[:_LONGEST]}..."


_MOST_FRAMES = 200  # the last are what tells
_NAMES_ITS_RANKS = (RankLostError, RankDisagreementError)


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's failure: ``family`` is the nearest class of ours, ``encoded`` the exception itself where it can be."""

    rank: int
    phase: str
    type_name: str
    family: str | None
    message: str
    stack: list[tuple[str, int, str, str]]
    encoded: bytes | None


_decoder = msgspec.msgpack.Decoder(list[Failure])


def pack(failures: Mapping[int, Failure]) -> bytes:
    """Failures as the payload of a message; ``unpack`` has them by rank again."""
    return msgspec.msgpack.encode([failures[rank] for rank in sorted(failures)])


def unpack(payload: bytes) -> dict[int, Failure]:
    """The failures that were packed, by rank."""
    return {failure.rank: failure for failure in _decoder.decode(payload)}


def describe(error: BaseException, *, rank: int, phase: str) -> Failure:
    """What ``rank`` tells the others of ``error``."""
    try:
        encoded = encode_message(error)
    except Exception:  # whatever the exception's own pickling does
        encoded = None
    return Failure(
        rank=rank,
        phase=phase,
        type_name=type(error).__name__,
        family=next((cls.__name__ for cls in type(error).__mro__ if cls.__module__ == errors.__name__), None),
        message=_printed(lambda: str(error), "an error that cannot be printed"),
        stack=stack_of(error),
        encoded=encoded,
    )


def stack_of(error: BaseException) -> list[tuple[str, int, str, str]]:
    """File, line number, function and line of each frame, the last one where ``error`` was raised.

    Plain, because newer Pythons keep the code object in a frame, and code cannot be pickled.
    """
    frames = traceback.extract_tb(error.__traceback__)[-_MOST_FRAMES:]
    return [(each.filename, each.lineno or 0, each.name, (each.line or "")[:_LONGEST]) for each in frames]


def wrapped(error: BaseException) -> WRAPPED_EXCEPTION:
    """``error`` with the stack that it was raised from, in a form that can be pickled."""
    return error, traceback.StackSummary.from_list(stack_of(error))


def combine(failures: Mapping[int, Failure], own: Mapping[int, BaseException]) -> CheckpointError:
    """The error that every rank raises: of the class of the lowest failed rank's error, naming that rank.

    ``own`` has the original of this rank's own failure, if it has failed; it becomes the cause.
    """
    originals = {rank: own[rank] if rank in own else _rebuild(failure) for rank, failure in sorted(failures.items())}
    root = failures[min(failures)]
    error = _raisable(root, originals[root.rank])
    if not (isinstance(error, RankDisagreementError) and error.failures):
        stacks = {rank: traceback.StackSummary.from_list(failure.stack) for rank, failure in failures.items()}
        error.failures = {rank: (original, stacks[rank]) for rank, original in originals.items()}
    error.__cause__ = next((cause for rank, cause in own.items() if rank in failures), None)
    return error


def _foreign(phase: str, type_name: str, message: object) -> str:
    """What an error that is not ours says, in one line."""
    told = _printed(lambda: first_line(message), "an error that cannot be printed")
    return f"{phase} failed: {type_name}{told and ': '}{told}"


def _raisable(root: Failure, original: BaseException) -> CheckpointError:
    """A new error for the root cause; the original stays as it is, for it goes into ``failures``."""
    if not isinstance(original, CheckpointError) or root.family is None:
        return CheckpointError(f"rank {root.rank}: {_foreign(root.phase, root.type_name, root.message)}")
    message = root.message if isinstance(original, _NAMES_ITS_RANKS) else f"rank {root.rank}: {root.message}"
    try:
        error = copy.copy(original)
        error.args = (message, *original.args[1:])
        if str(error) == message:
            return error
    except Exception:  # a class of the user's own with a constructor that copy cannot call
        pass
    return _family(root.family)(message)


def _rebuild(failure: Failure) -> BaseException:
    if failure.encoded is not None:
        try:
            error = decode_message(failure.encoded)
        except Exception:  # a class that this rank does not have, or whose constructor needs more
            error = None
        if isinstance(error, BaseException):
            return error
    if failure.family is not None:
        return _family(failure.family)(failure.message)
    return CheckpointError(f"{failure.type_name}: {failure.message}")


def _family(name: str) -> type[CheckpointError]:
    found = getattr(errors, name, None)
    return found if isinstance(found, type) and issubclass(found, CheckpointError) else CheckpointError


def _printed(text: Callable[[], str], otherwise: str) -> str:
    try:
        return text()
    except Exception:  # a __str__ or __repr__ that fails
        return otherwise


@dataclass(slots=True)
class OwnSigns:
    """What this rank tells the others of itself with each beat; any thread may change it, a reader takes what is there.

    ``moved`` counts pieces of messages that were sent; ``count``, ``total`` and ``file`` ask how far the work is, and
    where.
    """

    phase: str = MEETING
    moved: int = 0
    count: Callable[[], int] = int
    file: Callable[[], str] = str
    total: Callable[[], int] = int
    beats: int = 0


_PAUSE_S = 1.0  # between two looks at the clock: this process was stopped, or another thread held the interpreter


class Watch:
    """What one rank knows of the others in one operation, by their signs of life: which are gone, stuck, or never came.

    Ranks are numbered as in the group; errors name them by ``job_ranks``. Silence is no death: whoever holds the
    interpreter's lock for long is silent too. It counts as work without progress. Nothing is decided here for others.
    """

    def __init__(self, *, job_ranks: Sequence[int], patience: Patience, clock: Clock = time.monotonic) -> None:
        self._job_ranks = job_ranks
        self._patience = patience
        self._clock = clock
        self._pulses: dict[int, Pulse] = {}
        self._looked_at = clock()
        self._has_noticed = False
        self.left: set[int] = set()
        """The ranks that are through with the operation."""

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
        said = f"was stopped for {pause_s:.0f} s in {phase!r}, so the other ranks have given it up; try again"
        return {rank: self._lost(rank, phase, said)}

    def see(self, rank: int, sign: Sign) -> None:
        if rank in self._pulses:
            self._pulses[rank].see(sign)
        else:
            self._pulses[rank] = Pulse(sign, self._clock)

    def signs(self) -> dict[int, Sign]:
        """The last sign of each rank that has come, by its number in the job."""
        return {self._job_ranks[rank]: pulse.sign for rank, pulse in tuple(self._pulses.items())}

    def present(self, rank: int) -> bool:
        """Whether ``rank`` has come and not left."""
        return rank in self._pulses and rank not in self.left

    def gone(self, ranks: Collection[int], phase: str) -> dict[int, RankLostError]:
        """Those of ``ranks``, whose connections have ended, that were not through; we are in ``phase``."""
        lost: dict[int, RankLostError] = {}
        for rank in set(ranks) - self.left:
            pulse = self._pulses.get(rank)
            reached, place = (pulse.sign.phase, _place(pulse.sign)) if pulse is not None else (phase, repr(phase))
            said = f"is gone: its process or its host died, or the network broke, in {place}"
            lost[rank] = self._lost(rank, reached, said)
        return lost

    def notice(self, awaited: Collection[int], *, since: float) -> str:
        """Once, after some time: which of the ranks that we have awaited since then never came; otherwise nothing."""
        waited_s = self._clock() - since
        absent = [self._job_ranks[rank] for rank in awaited if rank not in self._pulses]
        if self._has_noticed or not absent or waited_s < self._patience.notice_s:
            return ""
        self._has_noticed = True
        return f"{_ranks(absent, 'has', 'have')} not come after {waited_s:.0f} s; {ON_EVERY_RANK}"

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
            if rank in self.left:
                lost[rank] = self._lost(rank, phase, f"left before {phase!r}; make the same calls on every rank")
            elif waited_s < limit_s:  # work that took longer than that while nobody waited for it was fine
                continue
            elif pulse is None:
                said = f"did not come to {phase!r} within {limit_s:g} s; {ON_EVERY_RANK}"
                lost[rank] = self._lost(rank, phase, said)
            elif (pulse.silent_s if excuse_waiting and not pulse.sign.working else pulse.stalled_s) >= limit_s:
                said = f"made no progress for {limit_s:g} s in {_place(pulse.sign)}; "
                said += "find out where it hangs, or raise deadline_s"
                lost[rank] = self._lost(rank, pulse.sign.phase, said)
        return lost

    def _lost(self, rank: int, phase: str, said: str) -> RankLostError:
        job_rank = self._job_ranks[rank]
        return RankLostError(f"rank {job_rank} {said}", rank=job_rank, phase=phase)


def _place(sign: Sign) -> str:
    known = [f"{sign.progress:,} bytes done"] if sign.progress else []
    known += [f"at {sign.file!r}"] if sign.file else []
    return f"{sign.phase!r} ({', '.join(known)})" if known else repr(sign.phase)
