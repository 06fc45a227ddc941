"""follow: the steps of a run, as they come, each held for as long as somebody works with it.

To hold a step is to give its files second names, in a folder of the reader: whatever becomes of the step, the folder is
a whole checkpoint. Beside the folder is a file whose lock the reader has while it lives. So whoever deletes sees what
readers hold, and a sweep, or the next reader, removes what dead ones left. Where a file system has no links, the folder
is empty and says just that the step is held: then the step itself is read, and deletions leave it alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal

from holdfast._io import locks, posix
from holdfast._native.publish import MANIFEST_NAME, files_of
from holdfast._native.sweep import READERS_NAME, release_all, sweep_directory
from holdfast._process import Ending
from holdfast._steps.listing import Step, Steps, checked_step, held_steps, is_whole, read_summary
from holdfast.errors import BusyError, StorageError

__all__ = ["HeldStep", "follow", "held_steps"]

Until = Callable[[], bool] | threading.Event


class HeldStep:
    """A step that stays readable at ``path`` until it is released, by the end of a ``with`` block or ``release``."""

    def __init__(self, found: Step, path: str, release: Callable[[], None]) -> None:
        self.step = found.step
        self.path = path
        self.attempt = found.attempt
        self.metrics = found.metrics
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Let it be deleted; a second call does nothing."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __enter__(self) -> HeldStep:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"HeldStep(step={self.step}, path={self.path!r}, metrics={self.metrics!r})"


def follow(
    root: str | os.PathLike[str],
    *,
    start: Literal["latest", "all"] | int = "latest",
    poll_s: float = 1.0,
    until: Until | None = None,
) -> Iterator[HeldStep]:
    """Yield each new step of the run in ``root``, which other processes save and delete; it need not exist yet.

    A step can be read at its ``path`` until it is released, or the next one is asked for: no deletion takes it away.

    Args:
        root: the directory of the run.
        start: "latest" begins with the newest step, and skips those that appeared while you worked with another one.
            "all" gives every step in order, a number every step from that one on.
        poll_s: how long to wait between two looks, in seconds.
        until: an event, or a function that returns whether the run is over. Steps that are there then still come.

    Raises:
        StorageError: the file system refused; a reader needs to write to ``root``.
    """
    if start not in ("latest", "all"):
        checked_step(start)
    if not poll_s > 0:
        raise ValueError(f"poll_s is more than 0, not {poll_s!r}")
    return _followed(Steps(root), start, poll_s, until)


def _followed(steps: Steps, start: str | int, poll_s: float, until: Until | None) -> Iterator[HeldStep]:
    reader = _Reader(steps.root)
    closing = Ending(reader.close)
    passed: set[tuple[int, tuple[int, int, int]]] = set()
    with closing, closing:
        while True:
            # Asked before the look: what is published after the look and before the end is not missed.
            is_over = until is not None and (until.is_set() if isinstance(until, threading.Event) else until())
            found = _next(steps, start, passed)
            if found is not None:
                held = reader.hold(found)
                if held is not None:
                    with held:
                        yield held
            elif is_over:
                return
            elif isinstance(until, threading.Event):
                until.wait(poll_s)
            else:
                time.sleep(poll_s)


def _next(steps: Steps, start: str | int, passed: set[tuple[int, tuple[int, int, int]]]) -> Step | None:
    """The step to work with next, if there is one; ``passed`` gets it, and those that it makes stale."""
    first = start if isinstance(start, int) else 0
    found = [each for each in steps.found() if each[0] >= first]
    for each in found if start != "latest" else reversed(found):
        if each not in passed:
            step = steps.look(*each)
            if step is not None and is_whole(step):
                passed.update([each] if start != "latest" else found)
                return step
        elif start == "latest":
            return None
    return None


class _Reader(locks.LockedFile):
    """One who follows the run in ``root``: the file whose lock it has, and the folder of what it holds."""

    def __init__(self, root: str) -> None:
        super().__init__(os.path.join(root, READERS_NAME, f"reader-{secrets.token_hex(8)}.lock"))
        self._root = root
        self._folder = self.path.removesuffix(".lock")

    def hold(self, found: Step) -> HeldStep | None:
        """The step, held; None where it was deleted, or saved again, meanwhile."""
        if self.descriptor < 0:
            self._begin()
        folder = os.path.join(self._folder, os.path.basename(found.path))
        posix.make_directories(folder)
        try:
            has_links = self._link(found.path, folder)
            if not has_links:
                with contextlib.suppress(BusyError), locks.locked_directory(self._root):
                    pass  # whoever deletes it, and began before the folder was there, has ended by now
            path = folder if has_links else found.path
            if read_summary(path)[0].attempt == found.attempt:
                return HeldStep(found, path, self.release)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
        self.release()
        return None

    def _begin(self) -> None:
        readers = os.path.dirname(self.path)
        posix.make_directories(readers)
        with locks.Directory.open(readers) as directory:
            for _ in sweep_directory(directory, [], delete=True):
                pass
        self.create()

    def _link(self, path: str, folder: str) -> bool:
        """Give the files of the step second names in ``folder``; False where there are none.

        The manifest comes first: a directory that has one is no leftover of a killed save.
        """
        if not posix.link(os.path.join(path, MANIFEST_NAME), os.path.join(folder, MANIFEST_NAME)):
            return False
        names = files_of(read_summary(folder)[0])
        return all(posix.link(os.path.join(path, name), os.path.join(folder, name)) for name in names)

    def release(self) -> None:
        """Let go of all that is held; also again."""
        if self.descriptor >= 0 and not self._is_inherited:
            with locks.Directory.open(os.path.dirname(self.path)) as directory:
                release_all(directory, os.path.basename(self.path))

    def close(self) -> None:
        """Be no reader any more; also again. What cannot be removed goes with the next reader."""
        with contextlib.suppress(StorageError):
            self.release()
            self.remove()
        with contextlib.suppress(StorageError):
            super().close()
