"""torch.distributed.checkpoint under the same faults: what the same harness finds there, for comparison only."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from torture.saves import BEFORE, Torn, state_of, version_of


def save(path: Path, version: int, *, threads: int = 1) -> None:
    """Save a version with torch's own storage, over whatever is there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = FileSystemWriter(path, thread_count=threads)
        dcp_save(state_of(version), storage_writer=writer, no_dist=True)


def found_version(path: Path, shape: str = "small") -> int | None:
    """The version that torch loads from ``path``; None where there is no metadata, Torn for everything else."""
    if not (path / ".metadata").exists():
        return None
    target: dict[str, Any] = state_of(0, shape)
    if "model" in target:
        target["model"]["weight"].fill_(torch.nan)
    try:
        logging.disable()  # it logs what it cannot read, with all frames
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_load(target, storage_reader=FileSystemReader(path), no_dist=True)
    except BaseException as error:  # torch's own error is no Exception
        raise Torn(f"{type(error).__name__}: {str(error)[:100]}") from error
    finally:
        logging.disable(logging.NOTSET)
    return version_of(target, shape)


def problem_after(path: Path, mode: str, shape: str = "small", *, acknowledged: bool = False) -> str | None:
    """What is wrong after version 2 was being saved, in a word or two."""
    try:
        version = found_version(path, shape)
    except Torn:
        return "torn visible"
    if acknowledged and version != 2:
        return "acknowledged but lost"
    if version not in (BEFORE[mode], 2):
        return "previous lost"
    return None


def problem_across(path: Path, shape: str, *, is_new: bool, acknowledged: bool) -> str | None:
    """What is wrong for torch while one format replaces the other: version 2 is in torch's, or version 1 was.

    What it does not find it does not mistake; but what is replaced it must not find any more.
    """
    try:
        version = found_version(path, shape)
    except Torn:
        return "torn for torch"
    after = 2 if is_new else None
    allowed = {after} if acknowledged else {after, None if is_new else 1}
    return None if version in allowed else f"torch finds version {version}"


def in_words(problems: Counter[str], points: int) -> str:
    """What was found at ``points``, for the table."""
    found = ", ".join(f"{count} {problem}" for problem, count in sorted(problems.items()))
    return f"{points} points: {found or 'nothing'}"
