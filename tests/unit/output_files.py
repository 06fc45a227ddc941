"""New files, as the packers make them."""

from __future__ import annotations

from pathlib import Path

from holdfast._io.direct import OutputFile


def new_output(path: str | Path, *, expected_bytes: int) -> OutputFile:
    """A file that is made; nothing stays after a failure."""
    file = OutputFile(path)
    try:
        file.make(expected_bytes)
    except BaseException:
        file.abandon()
        raise
    return file
