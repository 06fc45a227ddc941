"""One try at saving, as a writer has it: what it is told of it, and the files that it holds for it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast._native.publish import may_be_published
from holdfast._values.forks import forget_in_child


@dataclass(slots=True, kw_only=True)
class WriterNumber:
    """What the coordinator tells each rank through ``SavePlan.storage_data``: ``failed`` names attempts to be removed.

    A planner that keeps its plans brings an old one back: ``is_spent`` is how it is known.
    """

    attempt: str
    writer: int
    failed: tuple[str, ...] = ()
    is_spent: bool = False


class Files(Protocol):
    """The data files of a save under way, whoever writes them."""

    @property
    def bytes_written(self) -> int:
        """Bytes that the system took."""
        ...

    def close(self) -> None:
        """Close the files, which ends the sign that their writer lives."""
        ...

    def abandon(self) -> None:
        """Close and remove the files."""
        ...


class Held:
    """The files of one attempt, open and locked, which tells others that their writer lives.

    They are nothing to a forked child, whatever becomes of the child's copies of writer and finalizer.
    """

    def __init__(self, files: Files, path: str, attempt: str) -> None:
        self.files = files
        self.attempt = attempt
        self._path = path
        self._is_closed = False
        self._when_forgotten: weakref.finalize[..., Any] | None = None
        self._is_inherited = False
        forget_in_child(self)

    def forget_parent(self) -> None:
        """Leave the files alone."""
        self._is_inherited = True

    def end_with(self, writer: object, *, removing: bool) -> None:
        """Let go when ``writer`` is gone, which tells of a failure where nobody else does.

        ``removing`` is for the coordinator, who knows that it did not publish; others cannot know.
        """
        self._when_forgotten = weakref.finalize(writer, self.remove if removing else self.close)

    def close(self) -> None:
        """Let go of the files."""
        if self._when_forgotten is not None:
            self._when_forgotten.detach()
        self._is_closed = True
        if not self._is_inherited:
            self.files.close()

    def remove(self) -> None:
        """Remove the files, unless they are let go already or part of what is published."""
        if not self._is_closed and not self._is_inherited and not may_be_published(self._path, self.attempt):
            self.files.abandon()
        self.close()
