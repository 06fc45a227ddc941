"""How a run begins: it locks its root, removes what killed runs left, and loads the newest step that can be loaded.

All ranks load the same step. Each try is noted in the root before anything is loaded. The note is withdrawn when the
run ends in order, or when the step turns out to be damaged. So a step that crashes the run again and again is known
without a clock. Never starts afresh where steps are, and never passes over a step because the program does not fit it.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec

from holdfast._io import files
from holdfast._loader import LoadReport
from holdfast._ranks.ranks import Ranks
from holdfast._steps.listing import Step, Steps
from holdfast._steps.runs import FOLDER, MOST_NOTE_BYTES, Run
from holdfast.errors import CheckpointError, CorruptError, CrashLoopError, NotFoundError, StorageError

logger = logging.getLogger("holdfast")

Target = MutableMapping[Any, Any]
Initial = str | os.PathLike[str] | Callable[[Any], object]
"""A checkpoint to begin with, or a function that is called with the state and fills it."""
OnCrashLoop = Literal["raise", "step back"]

_MOST_RESUMES = 2
"""How often a run may resume from one step with nothing published since. The next time is a crash loop."""

_NOTE_NAME = "resumes.json"
_NOTE = os.path.join(FOLDER, _NOTE_NAME)
# A file that the disk cannot read any more, or that is gone, is damage. Other errors are for people to look into.
_DAMAGE = frozenset({errno.EIO, errno.ENOENT, errno.ESTALE})


class Skipped(NamedTuple):
    """A step that was passed over, and why."""

    step: int
    path: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What ``resume`` did.

    Attributes:
        step: the step that was loaded; None for a run that begins.
        path: the checkpoint that was loaded; None if nothing was loaded, or a function did it.
        report: the report of the load; None if nothing was loaded.
        skipped: newer steps that could not be loaded, with the reasons.
    """

    step: int | None = None
    path: str | None = None
    report: LoadReport | None = None
    skipped: tuple[Skipped, ...] = ()

    @property
    def next_step(self) -> int:
        """The step to go on with: 0 for a run that begins."""
        return 0 if self.step is None else self.step + 1

    @property
    def per_rank(self) -> Mapping[str, str]:
        """What became of each ``PerRank`` of the state: "restored", "fresh" or "re-split"."""
        return {} if self.report is None else self.report.per_rank


class _Note(msgspec.Struct, kw_only=True):
    """How many ``times`` each attempt was resumed from, since the ``published`` attempts were all there is.

    ``passed_over`` are attempts that crashed the run too often. They are not tried again.
    """

    published: set[str] = msgspec.field(default_factory=set)
    times: dict[str, int] = msgspec.field(default_factory=dict)
    passed_over: set[str] = msgspec.field(default_factory=set)


def resume(
    steps: Steps,
    run: Run,
    state: Target,
    initial: Initial | None,
    load_it: Callable[[str | os.PathLike[str]], LoadReport],
    participants: Callable[[], Ranks],
    on_crash_loop: OnCrashLoop,
) -> tuple[Resumed, Step | None]:
    """Have ``load_it`` load the newest step that it can, on all ``participants``; what was done, and the step."""
    if on_crash_loop not in ("raise", "step back"):
        raise ValueError(f"on_crash_loop is 'raise' or 'step back', not {on_crash_loop!r}")
    skipped: list[Skipped] = []
    while True:
        with participants() as ranks:
            choose = partial(_choose, steps, run, tuple(skipped), on_crash_loop)
            step, passed_over = ranks.all_reduce("choosing a step to resume from", int, choose)
        skipped += _logged(passed_over)
        if step is None:
            return _begin(state, initial, load_it), None
        try:
            report = load_it(step.path)
        except CheckpointError as error:
            if not isinstance(error, (CorruptError, NotFoundError)) and getattr(error, "errno", None) not in _DAMAGE:
                if ranks.is_coordinator:
                    withdraw(run, step.attempt)  # the step does not fit, or was refused: that is no crash
                raise
            skipped += _logged([Skipped(step.step, step.path, error.message)])
        else:
            return Resumed(step=step.step, path=step.path, report=report, skipped=tuple(skipped)), step


def _logged(skipped: list[Skipped]) -> list[Skipped]:
    for each in skipped:
        logger.warning("step %d is passed over: %s", each.step, each.why)
    return skipped


def _begin(state: Target, initial: Initial | None, load_it: Callable[[str | os.PathLike[str]], LoadReport]) -> Resumed:
    if callable(initial):
        report = initial(state)
        return Resumed(report=report if isinstance(report, LoadReport) else None)
    return Resumed() if initial is None else Resumed(path=os.fspath(initial), report=load_it(initial))


def _choose(
    steps: Steps, run: Run, skipped: tuple[Skipped, ...], on_crash_loop: OnCrashLoop, _: object
) -> tuple[Step | None, list[Skipped]]:
    """The newest step that was not ``skipped``, and the crash loops that were passed over. Notes the try.

    Only the coordinator calls it.
    """
    listed = steps.steps()
    if not listed:
        return None, []
    attempts = {step.attempt for step in listed if not step.problem}
    note = _read_note(steps.root)
    if attempts - note.published:
        note.times.clear()
    note.published = attempts
    note.passed_over &= attempts
    passed_over: list[Skipped] = []
    for step in reversed(listed):
        if any(each.step == step.step for each in skipped):
            note.times.pop(step.attempt, None)  # it is damaged: that was no crash
            continue
        times = note.times.get(step.attempt, 0)
        if times >= _MOST_RESUMES and on_crash_loop == "step back":
            note.passed_over.add(step.attempt)
        if step.attempt in note.passed_over:
            passed_over.append(Skipped(step.step, step.path, "the run ended too often after resuming from it"))
            continue
        if times >= _MOST_RESUMES:
            raise CrashLoopError(
                f"the run was resumed {times} times from step {step.step} and published nothing since; find out why it "
                f"ends, then pass on_crash_loop='step back' to resume from the step before, or remove "
                f"{os.path.join(steps.root, _NOTE)!r} to try this one again",
                step=step.step,
                times=times,
            )
        note.times[step.attempt] = times + 1
        run.put(_NOTE_NAME, msgspec.json.encode(note))
        return step, passed_over
    run.put(_NOTE_NAME, msgspec.json.encode(note))
    reasons = "; ".join(f"step {each.step}: {each.why}" for each in (*skipped, *passed_over))
    if passed_over:
        raise CrashLoopError(f"no step of {steps.root!r} is left to resume from: {reasons}", step=passed_over[-1].step)
    raise CorruptError(
        f"no step of {steps.root!r} can be loaded: {reasons}; a run that is to begin again needs another root",
        path=steps.root,
    )


def withdraw(run: Run, attempt: str) -> None:
    """Forget that the run was resumed from ``attempt``, because it did not crash. Only the coordinator calls it."""
    try:
        note = _read_note(run.root)
        if note.times.pop(attempt, None) is not None:
            run.put(_NOTE_NAME, msgspec.json.encode(note))
    except CheckpointError as error:
        logger.warning("the note of a resume could not be withdrawn: %s", error)


def _read_note(root: str) -> _Note:
    path = os.path.join(root, _NOTE)
    try:
        return msgspec.json.decode(files.read_whole(path, limit=MOST_NOTE_BYTES), type=_Note)
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
    except (msgspec.DecodeError, CorruptError) as error:
        logger.warning("%r cannot be read, so resumes are counted anew: %s", path, error)
    return _Note()


def remove_leftovers(run: Run) -> None:
    """Remove what killed deletions, saves and readers left. Only whoever has claimed the run may call it."""
    try:
        run.finish_deletions()
        run.remove_leftovers()
    except CheckpointError as error:
        logger.warning("what killed saves left in %r could not be removed: %s", run.root, error)
