"""Failures that travel: what a rank tells of its error, and the one error that every rank makes of all that was told.

Invariant: any exception can be told. One that cannot be pickled, or not be unpickled where it arrives, arrives as the
name of its type, its message and its traceback; nothing here raises because of what somebody else's exception does.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from holdfast import errors
from holdfast.errors import CheckpointError, RankDisagreementError, RankLostError

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
