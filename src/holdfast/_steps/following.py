"""follow: the steps of a run as they come, each held while its reader works with it.

To hold a step, a reader links its files into a folder of its own. Whatever happens to the step, that folder is a whole
checkpoint. Beside the folder is a file that the reader keeps locked while it lives. So whoever deletes sees which steps
are held, and a sweep, or the next reader, removes what dead readers left. Where a file system has no links, the folder
is empty and only says that the step is held. Then the reader reads the step itself, and deletions leave it alone. In an
object store it is the same, without links and locks; ``store_runs.py`` tells how.
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
from holdfast._io.urls import is_store_url
from holdfast._native.leftovers import READERS_NAME
from holdfast._native.publish import MANIFEST_NAME, files_of, read_summary
from holdfast._native.sweep import release_all, sweep_directory
from holdfast._process import Ending
from holdfast._steps.listing import Step, Steps, checked_step
from holdfast._steps.runs import Found
from holdfast._steps.store_runs import ReaderInStore
from holdfast.errors import BusyError, StorageError

__all__ = ["HeldStep", "follow"]

Until = Callable[[], bool] | threading.Event


class HeldStep(contextlib.AbstractContextManager["HeldStep"]):
    """A step that stays readable at ``path`` until ``release``, which the end of a ``with`` block calls too."""

    def __init__(self, found: Step, path: str, release: Callable[[], None]) -> None:
        self.step = found.step
        self.path = path
        self.attempt = found.attempt
        self.metrics = found.metrics
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Allow the step to be deleted. A second call does nothing."""
        release, self._release = self._release, None
        if release is not None:
            release()

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
        root: the directory of the run, or the URL of its folder in an object store.
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
    reader = ReaderInStore(steps.root) if is_store_url(steps.root) else _Reader(steps.root)
    closing = Ending(reader.close)
    passed: set[Found] = set()
    with closing, closing:
        while True:
            # Ask before looking. Otherwise a step that is published between the look and the question would be missed.
            is_over = until is not None and (until.is_set() if isinstance(until, threading.Event) else until())
            found = _next(steps, start, passed)
            if found is not None:
                path = reader.hold(found.path, found.attempt)
                if path is not None:
                    with HeldStep(found, path, reader.release) as held:
                        yield held
            elif is_over:
                return
            elif isinstance(until, threading.Event):
                until.wait(poll_s)
            else:
                time.sleep(poll_s)


def _next(steps: Steps, start: str | int, passed: set[Found]) -> Step | None:
    """The step to give next, if there is one. It is added to ``passed``, and so are the steps that it makes stale."""
    first = start if isinstance(start, int) else 0
    found = [each for each in steps.found() if each[0] >= first]
    for each in found if start != "latest" else reversed(found):
        if each not in passed:
            step = steps.look(*each)
            if step is not None and steps.is_whole(step):
                passed.update([each] if start != "latest" else found)
                return step
        elif start == "latest":
            return None
    return None


class _Reader(locks.LockedFile):
    """A reader of the run in ``root``: the file that it keeps locked, and the folder of the steps that it holds."""

    def __init__(self, root: str) -> None:
        super().__init__(os.path.join(root, READERS_NAME, f"reader-{secrets.token_hex(8)}.lock"))
        self._root = root
        self._folder = self.path.removesuffix(".lock")

    def hold(self, step: str, attempt: str) -> str | None:
        """Hold the ``step``, and return where it can be read; None if it was deleted, or saved again, meanwhile."""
        if self.descriptor < 0:
            self._begin()
        folder = os.path.join(self._folder, os.path.basename(step))
        posix.make_directories(folder)
        try:
            has_links = self._link(step, folder)
            if not has_links:
                with contextlib.suppress(BusyError), locks.locked_directory(self._root):
                    pass  # a deletion that began before the folder existed has ended by now
            path = folder if has_links else step
            if read_summary(path)[0].attempt == attempt:
                return path
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
        """Link the files of the step into ``folder``; False if the file system has no links.

        The manifest comes first, because a directory with a manifest is not taken for the rest of a killed save.
        """
        if not posix.link(os.path.join(path, MANIFEST_NAME), os.path.join(folder, MANIFEST_NAME)):
            return False
        names = files_of(*read_summary(folder))
        return all(posix.link(os.path.join(path, name), os.path.join(folder, name)) for name in names)

    def release(self) -> None:
        """Hold nothing any more. May be called again."""
        if self.descriptor >= 0 and not self._is_inherited:
            with locks.Directory.open(os.path.dirname(self.path)) as directory:
                release_all(directory, os.path.basename(self.path))

    def close(self) -> None:
        """End as a reader. May be called again. The next reader removes what cannot be removed now."""
        with contextlib.suppress(StorageError):
            self.release()
            self.remove()
        with contextlib.suppress(StorageError):
            super().close()
