"""Every error this library raises, grouped by what the caller would do about it.

    CheckpointError                 the base (torch's name CheckpointException is the same class)
    ├── NotFoundError               nothing is published there        -> start fresh, or look at the path
    │   └── NotACheckpointError     something else is there           -> look at the path
    ├── AlreadyPublishedError       a checkpoint is there already     -> another name, or overwrite=True
    ├── InvalidStateError           the state cannot be saved         -> fix the program
    ├── MismatchError               target and checkpoint differ      -> fix the target, or relax strictness
    ├── CorruptError                bytes are not what was written    -> another checkpoint
    ├── UnsafeError                 loading would have to run code    -> do not trust it, or allow_pickle=True
    ├── UnsupportedVersionError     written by a newer holdfast       -> upgrade
    ├── BusyError                   somebody else needs it now        -> wait, skip this one, or use force
    ├── StorageError                the file system said no           -> retry, free space, fix permissions
    │   └── UncertainError          nobody knows if it is published   -> look whether it is there
    ├── RankLostError               a rank died, hangs or is silent   -> look at that rank
    ├── RankDisagreementError       the ranks asked different things  -> look at the ranks it names
    ├── CrashLoopError              a run ends at the same step again -> find out why, or step back
    └── InternalError               a bug in this library             -> report it

The message is one line: what failed, then what to do. Every error survives pickling, because errors travel between
ranks and out of worker processes.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "AlreadyPublishedError",
    "BusyError",
    "CheckpointError",
    "CheckpointException",
    "CorruptError",
    "CrashLoopError",
    "Difference",
    "InternalError",
    "InvalidStateError",
    "MismatchError",
    "NotACheckpointError",
    "NotFoundError",
    "RankDisagreementError",
    "RankLostError",
    "StorageError",
    "UncertainError",
    "UnsafeError",
    "UnsupportedVersionError",
]


WRAPPED_EXCEPTION = tuple[BaseException, traceback.StackSummary]
"""An error and the stack that it was raised from, as torch passes them around."""


class CheckpointError(Exception):
    """The base of all errors here; ``failures`` maps each failed rank to its error and the stack of that."""

    def __init__(self, message: str, failures: Mapping[int, WRAPPED_EXCEPTION] | None = None) -> None:
        super().__init__(message)
        self.failures: dict[int, WRAPPED_EXCEPTION] = dict(failures or {})

    @property
    def message(self) -> str:
        return str(self.args[0])

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.__dict__)


def _rebuild(cls: type[CheckpointError], message: str, attributes: dict[str, object]) -> CheckpointError:
    error = cls.__new__(cls, message)
    Exception.__init__(error, message)
    error.__dict__.update(attributes)
    return error


CheckpointException = CheckpointError
"""torch's name for the base of all errors: the same class as ``CheckpointError``."""


def first_line(message: object) -> str:
    """The first line of a foreign ``message`` that is not empty: our own have one line."""
    return next((line.strip() for line in str(message).splitlines() if line.strip()), "")


class NotFoundError(CheckpointError):
    """No checkpoint is published at the path; resuming jobs take it as "start fresh"."""


class NotACheckpointError(NotFoundError):
    """The path holds something that is not a checkpoint."""


class AlreadyPublishedError(CheckpointError):
    """A checkpoint is published under the name and ``overwrite=False`` forbids replacing it."""

    @classmethod
    def at(cls, path: str) -> AlreadyPublishedError:
        """The error of a save that must not replace what is there."""
        return cls(f"{path!r} holds a checkpoint already; choose another name, or pass overwrite=True")


class BusyError(CheckpointError):
    """Somebody else needs it now: a save that is under way, a reader, or whoever pinned it."""


class InvalidStateError(CheckpointError):
    """The state (or the target) has something no checkpoint can hold; ``key`` says where.

    ``keys`` has all keys that were refused together, ``key`` is the first of them.
    """

    def __init__(self, message: str, *, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key
        self.keys: tuple[str, ...] = () if key is None else (key,)

    @classmethod
    def of(cls, errors: Sequence[InvalidStateError]) -> InvalidStateError:
        """One error for all of ``errors``; its message has the first few."""
        if len(errors) == 1:
            return errors[0]
        shown = "; ".join(f"({number}) {error.message}" for number, error in enumerate(errors[:_SHOWN_REFUSALS], 1))
        more = f"; and {len(errors) - _SHOWN_REFUSALS} more" if len(errors) > _SHOWN_REFUSALS else ""
        made = cls(f"{len(errors)} keys of the state cannot be saved: {shown}{more}", key=errors[0].key)
        made.keys = tuple(key for error in errors for key in error.keys)
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One way in which a target and a checkpoint disagree about ``key``.

    ``kind`` is one of ``missing``, ``shape``, ``dtype``, ``kind`` (tensor against value), ``type``, ``fields`` and
    ``member`` (of an instance of a class), ``context`` (of a tensor subclass), ``place`` (there is an empty container,
    into which what is stored cannot go: ``wanted`` says why), ``tied`` (it has the memory of another key, and other
    data), ``ranks`` (it was saved by other ranks than load it) and ``mapping`` (it does not fit; ``wanted`` says why).
    """

    key: str
    kind: str
    stored: str
    wanted: str

    def __str__(self) -> str:
        if self.kind == "missing":
            return f"{self.key!r} is not in the checkpoint"
        if self.kind == "mapping":
            return f"{self.key!r} {self.wanted}"
        if self.kind == "place":
            return f"{self.key!r} of the checkpoint cannot be put into the target: {self.wanted}"
        kind = "" if self.kind in ("tied", "ranks") else f"{self.kind} "
        return f"{self.key!r} has {kind}{self.stored} in the checkpoint but {self.wanted} in the target"


_SHOWN_DIFFERENCES = 8
_SHOWN_REFUSALS = 5


class MismatchError(CheckpointError):
    """Target and checkpoint differ; ``differences`` has every one of them, the message the first few."""

    def __init__(self, message: str, *, differences: Iterable[Difference] = ()) -> None:
        super().__init__(message)
        self.differences = tuple(differences)

    @classmethod
    def of(cls, differences: Iterable[Difference], *, advice: str) -> MismatchError:
        """The error that lists ``differences``, then says what to do."""
        found = tuple(differences)
        shown = "; ".join(str(difference) for difference in found[:_SHOWN_DIFFERENCES])
        more = f"; and {len(found) - _SHOWN_DIFFERENCES} more" if len(found) > _SHOWN_DIFFERENCES else ""
        return cls(f"the target does not fit the checkpoint: {shown}{more}. {advice}", differences=found)


class CorruptError(CheckpointError):
    """Bytes on disk are not what was written, or are what no honest writer makes.

    ``path`` names the file, ``key`` the tensor or value, ``span`` the byte range in the file, where they are known.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | os.PathLike[str] | None = None,
        key: str | None = None,
        span: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.path = None if path is None else os.fspath(path)
        self.key = key
        self.span = span

    @classmethod
    def of_part(cls, path: str, key: str | None, span: tuple[int, int], problem: str = "") -> CorruptError:
        """The error of bytes ``span`` of ``path`` that are not those of ``key`` that were written."""
        said = f"{path!r} is damaged in bytes {span[0]} to {span[1]}, which hold part of {key!r}"
        return cls(f"{said}{problem and ': '}{problem}; use another checkpoint", path=path, key=key, span=span)


class UnsafeError(CheckpointError):
    """Reading the value would run code from the checkpoint (a pickle), and the caller did not allow it."""

    def __init__(self, message: str, *, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class UnsupportedVersionError(CheckpointError):
    """The checkpoint needs a newer version of this library, or a feature this one does not know."""


class StorageError(CheckpointError):
    """The file system refused an operation; ``errno`` and ``path`` are those of the refusal."""

    def __init__(self, message: str, *, errno: int | None = None, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__(message)
        self.errno = errno
        self.path = None if path is None else os.fspath(path)

    @classmethod
    def from_os(cls, error: OSError, action: str, path: str | os.PathLike[str]) -> StorageError:
        """The error that tells that ``action`` on ``path`` failed with ``error``, keeping its errno."""
        reason = error.strerror or str(error)
        return cls(f"cannot {action} {os.fspath(path)!r}: {reason}", errno=error.errno, path=path)


class UncertainError(StorageError):
    """An object store gave no answer that tells whether a checkpoint was published or deleted; nothing was removed."""


class RankLostError(CheckpointError):
    """A rank died, was stopped, hangs or never came; ``rank`` says which one, ``phase`` where it was last seen."""

    def __init__(self, message: str, *, rank: int | None = None, phase: str | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.phase = phase


class RankDisagreementError(CheckpointError):
    """Ranks called with different arguments or in a different order; ``said`` maps each rank to what it said."""

    def __init__(self, message: str, *, said: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.said: dict[int, str] = dict(said or {})


class CrashLoopError(CheckpointError):
    """The run was resumed from ``step`` so many ``times``, and published nothing since: going on so is in vain."""

    def __init__(self, message: str, *, step: int | None = None, times: int = 0) -> None:
        super().__init__(message)
        self.step = step
        self.times = times


class InternalError(CheckpointError):
    """Something that this library promises did not hold; please report it."""
