"""The steps that all ranks of a save or load take together, what they must agree on, and failures that reach every
rank.

A phase runs ``local`` on every rank and ``merge`` on the coordinator. Whatever fails, on whichever rank, is raised on
every rank as a CheckpointError: one of this library's own as it is, anything else wrapped, with the original as its
cause. Interrupts pass through.

Invariant: any exception can be told. One that cannot be pickled, or not be unpickled where it arrives, arrives as the
name of its type, its message and its traceback; nothing here raises because of what somebody else's exception does.
"""

from __future__ import annotations

import copy
import math
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol, TypeVar

import msgspec

from holdfast import errors
from holdfast.errors import CheckpointError, RankDisagreementError, RankLostError

Part = TypeVar("Part")
Whole = TypeVar("Whole")


class Ranks(Protocol):
    """All ranks of one save or load, as one of them sees them; entered once, around all phases."""

    @property
    def rank(self) -> int:
        """The number of this one."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    @property
    def is_coordinator(self) -> bool:
        """Whether this is the one that merges."""
        ...

    @property
    def names(self) -> tuple[int, ...]:
        """The number of each in the whole job, as errors name them."""
        ...

    @property
    def deadline_s(self) -> float:
        """Seconds without progress after which a rank that others wait for is given up."""
        ...

    @property
    def kept(self) -> dict[object, Any]:
        """What this rank keeps for later operations of the same ranks under the same coordinator."""
        ...

    def __enter__(self) -> Ranks: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def scatter(self, phase: str, local: Callable[[], Part], merge: Callable[[list[Part]], list[Whole]]) -> Whole:
        """This rank's element of what ``merge`` makes of all parts."""
        ...

    def share(self, phase: str, local: Callable[[], Part], merge: Callable[[list[Part]], Whole]) -> Whole:
        """What ``merge`` makes of all parts, the same on every rank."""
        ...

    def alone(self, phase: str, local: Callable[[], Part]) -> Part:
        """What ``local`` returns, without a word to the others unless it fails; that is raised on every rank."""
        ...

    def again(self) -> None:
        """Go on after a failure that every rank has raised, as if it had not been; all ranks do so, or none."""
        ...

    def check(self) -> None:
        """Raise what another rank has failed with, if one has; cheap enough for every round of a loop, any thread."""
        ...

    def follow(self, count: Callable[[], int], file: Callable[[], str]) -> None:
        """Ask now and then, in another thread, how far the work is, and at which file, and show that to the others."""
        ...


class SoloRanks:
    """One process that is all the ranks there are, or acts as if it were: then under the number that it has."""

    size = 1
    deadline_s = math.inf

    def __init__(self, *, rank: int = 0, is_coordinator: bool = True) -> None:
        self.rank = rank
        self.names = (rank,)
        self.is_coordinator = is_coordinator
        self.kept: dict[object, Any] = {}

    def __enter__(self) -> SoloRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def scatter(self, phase: str, local: Callable[[], Part], merge: Callable[[list[Part]], list[Whole]]) -> Whole:
        """The one element of what ``merge`` makes of the one part."""
        with _naming(phase):
            (whole,) = merge([local()])
            return whole

    def share(self, phase: str, local: Callable[[], Part], merge: Callable[[list[Part]], Whole]) -> Whole:
        """What ``merge`` makes of the one part."""
        with _naming(phase):
            return merge([local()])

    def alone(self, phase: str, local: Callable[[], Part]) -> Part:
        """What ``local`` returns."""
        with _naming(phase):
            return local()

    def again(self) -> None:
        """Nothing to do: what failed is over."""

    def check(self) -> None:
        """Nothing to do: there is nobody else who could have failed."""

    def follow(self, count: Callable[[], int], file: Callable[[], str]) -> None:
        """Nothing to do: nobody waits."""


@contextmanager
def _naming(phase: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        message = str(error).partition("\n")[0]
        raise CheckpointError(f"{phase} failed: {type(error).__name__}: {message}", {0: error}) from error


_LONGEST = 200  # characters of what one camp said
_MOST_CAMPS = 4


def agreed(name: str, said: Mapping[int, str]) -> None:
    """Nothing when all ranks said the same of ``name``; else RankDisagreementError, whose failures are the minority."""
    camps = Counter(said.values()).most_common()
    if len(camps) <= 1:
        return
    by_camp = {what: [rank for rank in sorted(said) if said[rank] == what] for what, _ in camps}
    shown = [f"{_ranks(ranks)} {_shortened(what)}" for what, ranks in list(by_camp.items())[:_MOST_CAMPS]]
    more = f" and {len(camps) - _MOST_CAMPS} other answers" if len(camps) > _MOST_CAMPS else ""
    majority = camps[0][0]
    error = RankDisagreementError(
        f"the ranks disagree on the {name}: {', '.join(shown)}{more}; call with the same on every rank", said=said
    )
    error.failures = {
        rank: RankDisagreementError(f"rank {rank} said {_shortened(what)}")
        for rank, what in sorted(said.items())
        if what != majority
    }
    raise error


def different_calls(keys: Mapping[int, str]) -> RankDisagreementError:
    """The error of ranks that are at different calls; a key is a function and a path."""
    is_path = len({key.partition(" ")[0] for key in keys.values()}) == 1
    said = {rank: keys[rank].partition(" ")[2] if is_path else keys[rank] for rank in sorted(keys)}
    try:
        agreed("checkpoint path" if is_path else "call", said)
    except RankDisagreementError as error:
        return error
    raise ValueError(f"the same call: {keys}")


def _ranks(ranks: Sequence[int]) -> str:
    """``rank 3 says``, ``ranks 0-2 and 5 say``: runs are shortened."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    texts = ["-".join(map(str, run)) for run in runs]
    listed = texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
    return f"rank {listed} says" if len(ranks) == 1 else f"ranks {listed} say"


def _shortened(what: str) -> str:
    return what if len(what) <= _LONGEST else f"{what[:_LONGEST]}..."


Encode = Callable[[object], bytes]
Decode = Callable[[bytes], Any]

_LONGEST_TRACEBACK = 64 << 10  # characters; the end is what tells
_NAMES_ITS_RANKS = (RankLostError, RankDisagreementError)


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's failure: ``family`` is the nearest class of ours, ``encoded`` the exception itself where it can be."""

    rank: int
    phase: str
    type_name: str
    family: str | None
    message: str
    traceback_text: str
    encoded: bytes | None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Failure])


def pack(failures: Mapping[int, Failure]) -> bytes:
    """The failures as the payload of a message."""
    return _encoder.encode([failures[rank] for rank in sorted(failures)])


def unpack(payload: bytes) -> dict[int, Failure]:
    """The failures in the payload of a message, by rank."""
    return {failure.rank: failure for failure in _decoder.decode(payload)}


def describe(error: BaseException, *, rank: int, phase: str, encode: Encode) -> Failure:
    """What ``rank`` tells the others of ``error``."""
    try:
        encoded = encode(error)
    except Exception:  # whatever the exception's own pickling does
        encoded = None
    return Failure(
        rank=rank,
        phase=phase,
        type_name=type(error).__name__,
        family=_family_of(error),
        message=_text_of(error),
        traceback_text=_traceback_of(error),
        encoded=encoded,
    )


def combine(
    failures: Mapping[int, Failure], *, decode: Decode, own: Mapping[int, BaseException] | None = None
) -> CheckpointError:
    """The error that every rank raises: of the class of the lowest failed rank's error, naming that rank.

    ``own`` has the original of this rank's own failure; it becomes the cause.
    """
    own = own or {}
    originals = {
        rank: own[rank] if rank in own else _rebuild(failure, decode) for rank, failure in sorted(failures.items())
    }
    root = failures[min(failures)]
    error = _raisable(root, originals[root.rank])
    if not (isinstance(error, RankDisagreementError) and error.failures):
        error.failures = originals
    error.tracebacks = {rank: failure.traceback_text for rank, failure in failures.items() if failure.traceback_text}
    error.__cause__ = next((cause for rank, cause in own.items() if rank in failures), None)
    return error


def _raisable(root: Failure, original: BaseException) -> CheckpointError:
    """A new error for the root cause; the original stays as it is, for it goes into ``failures``."""
    if not isinstance(original, CheckpointError) or root.family is None:
        told = root.message.partition("\n")[0]
        return CheckpointError(f"rank {root.rank}: {root.phase} failed: {root.type_name}: {told}")
    message = root.message if isinstance(original, _NAMES_ITS_RANKS) else f"rank {root.rank}: {root.message}"
    try:
        error = copy.copy(original)
        error.args = (message, *original.args[1:])
        if str(error) == message:
            return error
    except Exception:  # a class of the user's own with a constructor that copy cannot call
        pass
    return _family(root.family)(message)


def _rebuild(failure: Failure, decode: Decode) -> BaseException:
    if failure.encoded is not None:
        try:
            error = decode(failure.encoded)
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


def _family_of(error: BaseException) -> str | None:
    ours = (cls.__name__ for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
    return next(ours, None)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a __str__ that fails
        return "an error that cannot be printed"


def _traceback_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))[-_LONGEST_TRACEBACK:]
    except Exception:  # a __str__ or __repr__ that fails
        return ""
