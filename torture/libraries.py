"""The same save by this library or by torch's, or what is done to the steps of a run, and what is wrong after it was
disturbed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torture import saves, stepping, torch_dcp


def save(path: Path, mode: str, shape: str, library: str, acknowledge: Callable[[], None] = lambda: None) -> None:
    """Save version 2, or do what ``mode`` says to a run; when this returns it is acknowledged.

    ``acknowledge`` is called where a run has its new step before it is rid of old ones.
    """
    if mode in stepping.MODES:
        stepping.operate(path, mode, library, acknowledge)
    elif library == "torch":
        torch_dcp.save(path, 2)
    else:
        saves.save(path, mode, shape)


def problem_after(
    path: Path, mode: str, shape: str, library: str, *, acknowledged: bool = False, published: bool = False
) -> str | None:
    """What is wrong after version 2 was being saved; what is in torch's format, torch has to find whole as well."""
    if mode in stepping.MODES:
        return stepping.problem_after(path, mode, library, acknowledged=acknowledged, published=published)
    if mode in saves.ACROSS_MODES:
        problem = torch_dcp.problem_across(path, shape, is_new=mode == saves.ACROSS_MODES[0], acknowledged=acknowledged)
        return problem or saves.problem_after(path, mode, shape, acknowledged=acknowledged)
    if library == "torch" or mode in saves.TORCH_FORMAT_MODES:
        problem = torch_dcp.problem_after(path, mode, shape, acknowledged=acknowledged)
        if problem is not None or library == "torch":
            return problem
    return saves.problem_after(path, mode, shape, acknowledged=acknowledged)
