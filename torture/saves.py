"""The saves that are disturbed, and what may be found afterwards.

Every tensor and value of a state tells its version, so that whatever is loaded is whole and of one version, or torn.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast import events
from holdfast._async_saver import AsyncCheckpointerType, async_save
from holdfast._io.slabs import SLAB_BYTES
from torture import exports

MODES = ("fresh", "fresh, may overwrite", "replacing")
ASYNC_MODES = ("async, fresh", "async, replacing")
PROCESS_MODES = ("process, fresh", "process, replacing")
"""In the background too, by a process of its own."""

TORCH_FORMAT_MODES = tuple(f"torch's format, {kind}" for kind in ("fresh", "replacing", "async, replacing"))
TOLD_MODES = ("told, replacing", "told, async, replacing")
"""Listeners to events are told of it: one whose disk is full, and another one."""

ACROSS_MODES = ("torch's format over native, replacing", "native over torch's format, replacing")
"""One format in the place of the other."""

EXPORT_MODES = exports.MODES
"""A folder as Hugging Face has it, of the tensors alone."""

BEFORE = {
    mode: 1 if mode.endswith("replacing") else None
    for mode in (*MODES, *ASYNC_MODES, *PROCESS_MODES, *TORCH_FORMAT_MODES, *TOLD_MODES, *ACROSS_MODES, *EXPORT_MODES)
}
"""Which version is published before the save of version 2."""

RANKS = 4


def state_of(version: int, shape: str = "small") -> dict[str, Any]:
    """A state of a version.

    ``shape`` is "small", two tensors; "blob", also a value that goes to a data file; "slabs", tensors of several slabs;
    "values", no tensor at all; "ranks", what four ranks save together; "rank 2", what one of them has of it.
    """
    state: dict[str, Any] = {"step": version}
    if shape.startswith("rank"):
        ranks = range(RANKS) if shape == "ranks" else [int(shape.removeprefix("rank "))]
        return {**state, **{f"of rank {rank}": torch.full((100 + rank,), float(version)) for rank in ranks}}
    if shape != "values":
        elements = 2 * SLAB_BYTES // 4 + 1000 if shape == "slabs" else 300
        state["model"] = {
            "weight": torch.full((elements,), float(version)),
            "layers": [torch.full((2, 3), version)],
        }
    if shape == "blob":
        state["note"] = bytes([version]) * 70_000
    return state


def exported(version: int, shape: str = "small") -> dict[str, torch.Tensor]:
    """The tensors of a state of a version, as a folder has them."""
    tensors = exports.flat(exports.tensors_of(state_of(version, shape)))
    return {**tensors, **(exports.sharded(version, RANKS, None) if shape == "ranks" else {})}


def reach(path: Path, mode: str) -> Path:
    """The directory below which a save to ``path`` does all its work: an export begins beside it."""
    return path.parent if mode in EXPORT_MODES else path


class Torn(Exception):
    """What was loaded is of no one version."""


def version_of(state: dict[str, Any], shape: str = "small") -> int:
    """The version of a loaded state; Torn unless it is whole."""
    step, make = state.get("step"), state_of
    if isinstance(step, torch.Tensor):
        step, make = int(step), exported
    if type(step) is not int:
        raise Torn(f"the step is {step!r}")
    try:
        wanted = make(step, shape)
        same = (
            state.keys() == wanted.keys()
            and (make is exported or list(state) == list(wanted))
            and all(equal(state[key], wanted[key]) for key in wanted)
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Torn(f"not a state of the shape {shape!r}: {error}") from error
    if not same:
        raise Torn(f"step {step}, but not everything is of that version")
    return step


def equal(one: Any, other: Any) -> bool:
    """Whether two states are the same, values and types of tensors alike."""
    if isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(other, dict):
        return isinstance(one, dict) and list(one) == list(other) and all(equal(one[key], other[key]) for key in other)
    if isinstance(other, list):
        return isinstance(one, list) and len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def prepare(path: Path, mode: str, shape: str = "small") -> None:
    """Make what is there before the save: nothing, or version 1."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if BEFORE[mode] is not None:
        first = first_mode(mode)
        kind = next(kind for kind in ("torch's", "export", "") if first.startswith(kind))
        template = path.parent.parent / f"template-{kind}-{shape}-{os.getpid()}"
        if not template.exists():
            save(template, first, shape, version=1)
            if kind == "export":
                exports.add_own(template)
        shutil.copytree(template, path)


def first_mode(mode: str) -> str:
    """How the checkpoint that a save in ``mode`` replaces was saved: nothing was there."""
    if mode in EXPORT_MODES:
        return EXPORT_MODES[0]
    return TORCH_FORMAT_MODES[0] if mode in (*TORCH_FORMAT_MODES, ACROSS_MODES[1]) else MODES[0]


def save(path: Path, mode: str, shape: str = "small", *, version: int = 2, attempt: str | None = None) -> None:
    """The save that is disturbed; when this returns it is acknowledged."""
    if mode in TOLD_MODES:
        with told_on_a_full_disk():
            save(path, mode.removeprefix("told, "), shape, version=version, attempt=attempt)
        return
    if mode in EXPORT_MODES:
        tensors = exports.tensors_of(state_of(version, shape))
        if shape.startswith("rank"):
            tensors.update(exports.sharded(version, RANKS, None if shape == "ranks" else int(shape.split()[1])))
        exports.save(path, tensors, version, overwrite=mode != EXPORT_MODES[0], in_background="async" in mode)
        return
    is_new = mode in (MODES[0], TORCH_FORMAT_MODES[0])
    writer = _writer(path, mode, overwrite=not is_new, attempt=attempt)
    if mode in PROCESS_MODES:
        in_process = AsyncCheckpointerType.PROCESS
        async_save(state_of(version, shape), storage_writer=writer, async_checkpointer_type=in_process).result()
    elif "async" in mode:
        async_save(state_of(version, shape), storage_writer=writer).result()
    else:
        holdfast.save(state_of(version, shape), storage_writer=writer)


@contextlib.contextmanager
def told_on_a_full_disk() -> Iterator[None]:
    """Have listeners told of what the block does; whoever's disk is full is dropped, and nobody else may notice."""
    heard: list[events.Event] = []
    logger = logging.getLogger("holdfast")
    handler = logging.NullHandler()  # or each case would print that a listener was dropped
    logger.addHandler(handler)
    try:
        with events.subscribe(events.jsonl("/dev/full")), events.subscribe(heard.append):
            yield
    finally:
        logger.removeHandler(handler)
    if [event.name for event in heard][-1:] != ["published"]:
        raise Torn(f"the listener heard {[event.name for event in heard]}")


def _writer(path: Path, mode: str, *, overwrite: bool, attempt: str | None = None) -> holdfast.StorageWriter:
    if mode.startswith("torch's format"):
        return holdfast.FileSystemWriter(path, overwrite=overwrite, thread_count=2)
    return holdfast.NativeWriter(path, overwrite=overwrite, attempt=attempt)


def found_version(path: Path, shape: str = "small") -> int | None:
    """The version that is published, whole; None where a resuming job would be told to start fresh.

    Torn, or what load raises, for anything else.
    """
    try:
        version = version_of(holdfast.load(path), shape)
        if (
            os.path.exists(path / "model.safetensors.index.json")
            and (problem := exports.mixture(path, version)) is not None
        ):
            raise Torn(problem)
        return version
    except holdfast.NotACheckpointError as error:
        raise Torn(f"a job that resumes is not told to start fresh: {error}") from error
    except holdfast.NotFoundError:
        return None


def problem_after(path: Path, mode: str, shape: str = "small", *, acknowledged: bool = False) -> str | None:
    """What is wrong after version 2 was being saved; None when the promises hold and the next save succeeds."""
    try:
        version = found_version(path, shape)
    except (Torn, holdfast.CheckpointError) as error:
        return f"torn: {type(error).__name__}: {error}"
    if acknowledged and version != 2:
        return f"acknowledged but lost: version {version} is there"
    if version not in (BEFORE[mode], 2):
        return f"the previous one is lost: version {version} is there"
    try:
        # What is not visible does not forbid a save either.
        if mode in EXPORT_MODES:
            if (problem := _beside(path, mode, version)) is not None:
                return problem
            save(path, EXPORT_MODES[version is not None], shape, version=3)
        else:
            holdfast.save(state_of(3, shape), storage_writer=_writer(path, mode, overwrite=version is not None))
        after = found_version(path, shape)
    except (Torn, holdfast.CheckpointError) as error:
        return f"the next save failed: {type(error).__name__}: {error}"
    return None if after == 3 else f"the next save is not there: version {after} is"


def _beside(path: Path, mode: str, version: int | None) -> str | None:
    """What is wrong in the folder beside the weights, and beside the folder."""
    if version is not None:
        has_own = BEFORE[mode] is not None  # a file of the user's, which is in whatever replaces that folder
        if (problem := exports.mixture(path, version, has_own=has_own)) is not None:
            return problem
    return exports.unswept(path)
