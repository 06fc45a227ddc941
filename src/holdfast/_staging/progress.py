"""A progress bar on the terminal for a save in the background."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from holdfast._staging.handle import AsyncSave


class TerminalProgress:
    """Shows phase, bytes and speed on standard error; it is called with the handle whenever something has changed."""

    def __init__(self, name: str) -> None:
        self._name = name
        # Without a thread of its own: the save's threads call often enough.
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=Console(stderr=True),
            auto_refresh=False,
        )
        self._task = self._progress.add_task(name, total=None)

    def __call__(self, handle: AsyncSave) -> None:
        """Show where ``handle`` is."""
        if not self._progress.live.is_started and not handle.done():
            self._progress.start()
        self._progress.update(
            self._task,
            description=f"{self._name}: {handle.phase}",
            completed=handle.bytes_done,
            total=handle.bytes_total or None,
        )
        self._progress.refresh()
        if handle.phase in ("published", "failed"):
            self._progress.stop()
