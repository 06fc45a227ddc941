"""How far an operation is, on the terminal. The library and the command line have the same bar.

A thread looks a few times a second. So the work never waits for a terminal, and the bar moves even while a rank waits
for others. A forked child shows nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from holdfast._process import Once, forget_in_child, start_thread

logger = logging.getLogger("holdfast")

_ASK_EVERY_S = 0.2
_LAST_S = 2.0  # for a function of the caller's that hangs


class Shown(NamedTuple):
    """How far an operation is. ``bytes_total`` is 0 if it is not known; ``slowest`` names a rank that is behind."""

    phase: str
    bytes_done: int = 0
    bytes_total: int = 0
    slowest: str = ""
    is_over: bool = False


OnBytes = Callable[[int, int], object]
"""A function that is called with the bytes that are done, and the bytes in all."""


def bar(name: str, *, is_transient: bool = False) -> Callable[[Shown], None]:
    """A function that shows a line on standard error. If that is no terminal, only the last line is shown.

    A transient bar goes away at the end.
    """
    # Imported only here, because that takes a while and most programs show no bar.
    from rich import progress
    from rich.console import Console

    begun, name = time.monotonic(), name if name.isprintable() else repr(name)
    texts = [progress.TextColumn(f"{{task.{of}}}", markup=False) for of in ("description", "fields[speed]")]
    columns = texts[0], progress.BarColumn(), progress.DownloadColumn(binary_units=True), texts[1]
    console = Console(stderr=True, highlight=False, emoji=False)
    lines = progress.Progress(*columns, console=console, auto_refresh=False, transient=is_transient)
    task = lines.add_task(name, total=None, speed="")

    def show(shown: Shown) -> None:
        lines.start()
        phase, done, total, slowest, is_over = shown
        speed = f"{done / (time.monotonic() - begun) / 1e9:.2f} GB/s {slowest}"
        said = f"{name}: {phase}" if phase else name
        lines.update(task, description=said, completed=done, total=max(done, total) or None, speed=speed, refresh=True)
        if is_over:
            lines.stop()

    return show


class Following(contextlib.AbstractContextManager["Following"]):
    """Calls ``show`` with what ``look`` returns, a few times a second during its block and once at the end.

    An asynchronous save goes on after the block. It calls this object with its handle, and so ends it.
    """

    def __init__(self, show: Callable[[Shown], object], look: Callable[[], Shown]) -> None:
        self._show: Callable[[Shown], object] | None = show
        self._look = look
        self._is_over = Once()
        self._thread = threading.Thread(target=self._run, name="holdfast-progress", daemon=True)
        forget_in_child(self)

    def forget_parent(self) -> None:
        self._show = None

    def __enter__(self) -> Following:
        start_thread(self._thread)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._end("done" if kind is None else "failed")

    def __call__(self, handle: object) -> None:
        phase = getattr(handle, "phase", "")
        if phase in ("published", "failed"):
            self._end(phase)

    def _end(self, phase: str) -> None:
        self._is_over.set()
        if self._show is not None:
            self._thread.join(_LAST_S)
            last = self._look()._replace(phase=phase, slowest="", is_over=True)
            self._tell(last if phase == "failed" else last._replace(bytes_done=last.bytes_total or last.bytes_done))
        self._show, self._look = None, partial(Shown, phase)  # the old ones may lead back to this object: no cycle

    def _run(self) -> None:
        while not self._is_over.wait(_ASK_EVERY_S):
            self._tell(self._look())

    def _tell(self, shown: Shown) -> None:
        try:
            if self._show is not None:
                self._show(shown)
        except Exception:
            logger.exception("showing the progress failed and is not tried again")
            self._show = None


def check_progress(progress: object) -> None:
    """ValueError for what is no way to show progress."""
    if not isinstance(progress, bool) and not callable(progress):
        raise ValueError(f"progress is True, False or a function, not {progress!r}")


def followed(
    progress: bool | Callable[..., object], path: object, look: Callable[[], Shown], is_coordinator: bool
) -> contextlib.AbstractContextManager[Following | None]:
    """A context that shows how far an operation is: with a bar on the coordinator, or a function on every rank."""
    if not isinstance(progress, bool):
        return Following(progress, look)
    name = os.path.basename(os.fspath(path)) if isinstance(path, (str, os.PathLike)) else ""
    return Following(bar(name or "checkpoint"), look) if progress and is_coordinator else contextlib.nullcontext()


@contextlib.contextmanager
def following_bytes(progress: bool | OnBytes, doing: str, *, is_transient: bool = False) -> Iterator[OnBytes]:
    """What to call with the bytes that are done and the bytes in all: the function given, or one that shows a bar."""
    if progress is not True:
        yield progress or (lambda done, total: None)
        return
    latest = [(0, 0)]
    with Following(bar(doing, is_transient=is_transient), lambda: Shown("", *latest[0])):
        yield lambda done, total: latest.__setitem__(0, (done, total))
