"""CheckpointManager: the steps of a run, saved when it is time, kept as asked, resumed from, stopped at one of them.

It decides when, and leaves the work to ``save``, ``async_save``, ``load`` and ``Steps``. All ranks make one and call
the same methods. What depends on time or on signals is decided by an ``Agreement``, so that all ranks do the same; at a
step at which nothing is due, nobody says a word. Steps are deleted after another was published, never before, in a
thread of the coordinator, which holds the lock of the run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from holdfast._async_saver import AsyncCheckpointerType, async_save
from holdfast._loader import LoadOptions, load
from holdfast._process import Lock, Once, forget_in_child, start_thread
from holdfast._ranks.agreement import Agreement
from holdfast._ranks.ranks import agreed, participants
from holdfast._saver import SaveOptions, State, save
from holdfast._staging.one_at_a_time import AsyncSave, interpreter_ends
from holdfast._steps.listing import Step, Steps, checked_metrics, checked_step, held_steps, is_whole
from holdfast._steps.policies import Every, Keep, checked_policies, kept
from holdfast._steps.resuming import Initial, OnCrashLoop, Resumed, Target, lock_run, remove_leftovers, resume, withdraw
from holdfast._steps.stopping import StopOn, StopWatch
from holdfast.errors import BusyError, CheckpointError, InvalidStateError, MismatchError, RankLostError
from holdfast.planner import SavePlanner

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger("holdfast")

_AnyManager = TypeVar("_AnyManager", bound="CheckpointManager")
_STOP, _SAVE, _LOAD = StopOn(), SaveOptions(), LoadOptions()
_MOST_FAILURES = 3
# What training on would not change: the program is wrong, or a rank is gone.
_FATAL = InvalidStateError, MismatchError, RankLostError


class CheckpointManager(Steps):
    """The checkpoints of one run, below the directory ``root``; close it, or use it in a ``with`` block.

    All ranks make one, with the same arguments, and call ``resume``, ``save`` and ``should_stop`` alike. What it has of
    ``Steps``, each rank may call for itself. Leaving the block finishes the save under way, whatever ended it.

    Args:
        root: a directory, which is made if it does not exist. Step 100 is saved at ``root/step-100``.
        save: when to save.
        keep: which steps stay: those that any of these policies wants. None at all: every step stays.
        stop: what the run stops for; None for nothing, and no signal is handled.
        on_error: "raise" what a save failed with, at the latest when the next one is due; "warn" logs it, and training
            goes on. The fourth failure in a row is raised, and so is what training on would not change.
        asynchronous: save in the background, written by a thread, or by another process where it is "process".
        options: those of every save.
        process_group: only these ranks take part.

    Raises:
        BusyError: another manager has this root.
        NotACheckpointError: ``root`` is a file.
        RankDisagreementError: the ranks do not have the same arguments.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        save: Every,
        keep: Keep | Sequence[Keep] = (),
        stop: StopOn | None = _STOP,
        on_error: Literal["raise", "warn"] = "raise",
        asynchronous: bool | Literal["process"] = True,
        options: SaveOptions = _SAVE,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(root)
        if not isinstance(save, Every):
            raise ValueError(f"save says when, as in save=Every(steps=500), and is not {save!r}")
        if on_error not in ("raise", "warn") or asynchronous not in (True, False, "process"):
            raise ValueError(
                f"on_error is 'raise' or 'warn', not {on_error!r}; asynchronous is True, False or 'process', not "
                f"{asynchronous!r}"
            )
        self._every, self._on_error, self._asynchronous = save, on_error, asynchronous
        self._options, self._process_group = options, process_group
        self._retention = _Retention(Steps(root), checked_policies(keep))  # which is not to keep this one
        self._begun = self._saved = -1
        self._stepped_at = self._save_begun_at = -1.0
        self._failures = 0
        self._under_way: _UnderWay | None = None
        self._resumed: Step | None = None
        self._has_looked = self._is_stopped = self._is_closed = False
        self._ending = contextlib.ExitStack()
        said = repr((save, keep, stop, on_error, asynchronous))
        ranks = participants(
            process_group, no_dist=False, call="CheckpointManager", place=root, deadline_s=options.deadline_s
        )

        def begin(sayings: list[str]) -> str:
            agreed("arguments of CheckpointManager", dict(zip(ranks.job_ranks, sayings, strict=True)))
            self._ending.callback(lock_run(self).discard)
            remove_leftovers(self)
            return secrets.token_hex(8)

        try:
            with ranks:
                topic = ranks.all_reduce("opening the run", lambda: said, begin)
            self._leads = ranks.is_coordinator
            self._agreement = Agreement(ranks, topic)
            self._ending.callback(self._agreement.close)
            self._watch = None if stop is None else StopWatch(stop, self._agreement)
        except BaseException:
            self._ending.close()
            raise
        forget_in_child(self)

    def __enter__(self: _AnyManager) -> _AnyManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(error)

    def resume(
        self,
        state: Target,
        initial: Initial | None = None,
        *,
        strict: bool = True,
        options: LoadOptions = _LOAD,
        on_crash_loop: OnCrashLoop = "raise",
    ) -> Resumed:
        """Load the newest step into ``state``, in place; a damaged one is passed over, and named in the log.

        Args:
            state: the target, as for ``load``.
            initial: what a run begins with where there is no step yet: a checkpoint that ``load`` can read, or a
                function that is called with the state.
            strict: as for ``load``.
            options: as for ``load``.
            on_crash_loop: what to do about a step that was resumed from twice with nothing published since: "raise", or
                "step back" to the one before.

        Raises:
            MismatchError: the state does not fit the newest step that is whole; no older one is tried.
            CorruptError: there are steps, and none of them can be loaded.
            CrashLoopError: see ``on_crash_loop``.
        """
        self._check_open()
        if self._begun >= 0:
            raise ValueError("resume comes once, and before the first save")
        group = self._process_group
        load_it = partial(load, state, strict=strict, options=options, process_group=group)
        ranks = partial(
            participants, group, no_dist=False, call="resume", place=self.root, deadline_s=options.deadline_s
        )
        resumed, self._resumed = resume(self, state, initial, load_it, ranks, on_crash_loop)
        self._has_looked = True
        if resumed.step is not None:
            self._begun = self._saved = resumed.step
        return resumed

    def save(
        self,
        step: int,
        state: State,
        *,
        metrics: Mapping[str, object] | None = None,
        force: bool = False,
        user_metadata: Mapping[str, object] | None = None,
        planner: SavePlanner | None = None,
    ) -> bool:
        """Save ``state`` as ``step`` if it is time, or in any case with ``force``; returns whether a save was begun.

        Call it at every step: where nothing is due, it costs next to nothing. A step of this number that a run saved
        before is replaced, atomically.

        Args:
            step: a number that never goes down.
            state: as for ``save``.
            metrics: numbers by name, for ``Best`` and ``best``; those of the coordinator count.
            force: save, also again where this step was saved.
            user_metadata: as for ``save``; the names "step" and "metrics" are taken.
            planner: as for ``save``.

        Raises:
            CheckpointError: this save or the one before failed; see ``on_error``.
        """
        number = step if type(step) is int and step >= 0 else checked_step(step)
        is_due = force or self._every.is_due(number)
        asked = frozenset[str]() if number == self._begun else self._begin_step(number, is_saved=is_due)
        if not (is_due or asked) or (number == self._saved and not force):
            return False
        self._check_open()
        told = {**(user_metadata or {}), "step": number, "metrics": checked_metrics(metrics or {})}
        if len(told) < len(user_metadata or {}) + 2:
            raise ValueError("the names 'step' and 'metrics' in user_metadata are the manager's; use others")
        self._look_once()
        try:
            self._finish_before(waits="stop" in asked)
            with self._retention.held_off():
                self._begin_save(number, state, told, planner)
        except CheckpointError as error:
            self._fail(number, error)
            return False
        self._saved = number
        return True

    def should_stop(self, step: int) -> bool:
        """Whether the run is to stop at ``step``, the same answer on every rank; if so, that step is durable by now.

        Call it after ``save`` of the same step.
        """
        if step != self._begun:
            raise ValueError(f"call save({step}, state) before should_stop({step}); the last call was of {self._begun}")
        if not self._is_stopped and not self._agreement.pass_step():
            return False
        self._is_stopped = self._retention.is_brief = True
        self._finish()
        if self._saved != step:
            raise CheckpointError(f"the run was asked to stop at step {step}, which could not be saved; see the log")
        return True

    def stop_requested(self) -> bool:
        """Whether this rank knows that the run is to stop soon; for loops that do not save, such as evaluation."""
        return self._is_stopped or (self._watch is not None and self._watch.requested)

    def wait(self) -> None:
        """Return when the save under way is durable, and old steps are deleted; raises what the save failed with."""
        self._finish()
        self._retention.wait()

    def close(self) -> None:
        """Finish the save under way and let go of the run; raises what that save failed with, as ``on_error`` says."""
        self._end(None)

    def forget_parent(self) -> None:
        """Be closed: a forked child has no part in the run."""
        self._is_closed, self._under_way = True, None

    def _begin_step(self, step: int, *, is_saved: bool) -> frozenset[str]:
        """What all ranks have agreed to do at ``step``; takes note of how long the step before took."""
        if step < self._begun:
            raise ValueError(f"steps never go down: {step} comes after {self._begun}, which was saved or resumed from")
        self._check_open()
        now, every_s = time.monotonic(), self._every.seconds
        if self._stepped_at < 0:
            self._save_begun_at = now  # what came before the first step is no part of it
        elif self._watch is not None:
            self._watch.measured(step_s=now - self._stepped_at)
        if every_s is not None and self._leads and now - self._save_begun_at >= every_s:
            self._agreement.request("save", f"the last save began {now - self._save_begun_at:.0f} s ago")
        asked = self._agreement.begin_step(step, is_saved=is_saved)
        self._stepped_at, self._begun = now, step
        return asked

    def _begin_save(self, step: int, state: State, told: Mapping[str, object], planner: SavePlanner | None) -> None:
        path, group, began = self.path(step), self._process_group, time.monotonic()
        self._save_begun_at, options = began, self._options
        if not self._asynchronous:
            save(state, path, planner=planner, process_group=group, user_metadata=told, options=options)
            self._failures = 0
            self._published(step, began)
            return
        kind = AsyncCheckpointerType("process" if self._asynchronous == "process" else "thread")
        start = partial(async_save, state, path, planner=planner, process_group=group, async_checkpointer_type=kind)
        handle = start(user_metadata=told, options=options)
        self._under_way = _UnderWay(step, handle, Once())
        handle.add_done_callback(partial(self._over, self._under_way, began))

    def _over(self, save: _UnderWay, began: float, _: object) -> None:
        """What follows from the end of a save in the background; in its thread."""
        try:
            if save.handle.phase == "published":
                self._published(save.step, began)
        finally:
            save.is_told.set()

    def _published(self, step: int, began: float) -> None:
        if self._watch is not None:
            self._watch.measured(durable_s=time.monotonic() - began)
        if self._leads:
            self._retention.begin(step)

    def _finish_before(self, *, waits: bool) -> None:
        """Look at what became of the save before; where one is to wait for it, once it is over."""
        last = self._under_way
        if last is not None and (waits or last.handle.done() or self._options.when_busy == "wait"):
            try:
                self._finish()
            except CheckpointError as error:
                self._fail(last.step, error)

    def _finish(self) -> None:
        """Return when no save is under way; raises what it failed with."""
        last, self._under_way = self._under_way, None
        if last is not None:
            error = last.handle.exception()
            last.is_told.wait()
            if error is not None:
                self._saved = -1 if self._saved == last.step else self._saved
                raise error
            self._failures = 0

    def _fail(self, step: int, error: CheckpointError) -> None:
        """Raise ``error``, or log it, as the user wants it."""
        self._failures += 1
        if self._on_error == "raise" or isinstance(error, _FATAL) or self._failures > _MOST_FAILURES:
            raise error
        said = f"step {step} could not be saved, and training goes on; {self._failures} in a row"
        logger.error("%s, and after %d the next one is raised: %s", said, _MOST_FAILURES, error)

    def _look_once(self) -> None:
        """Say it if this run goes over another one."""
        there = [] if self._has_looked or not self._leads else self.found()
        self._has_looked = True
        if there:
            said = f"{self.root!r} has steps up to {there[-1][0]}, and resume() was not called"
            logger.warning("%s: steps of the same numbers are replaced, and none of the others is deleted", said)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("this CheckpointManager is closed, or belongs to the parent of this process")

    def _end(self, error: BaseException | None) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        is_exit = isinstance(error, SystemExit) and not error.code
        is_orderly = error is None or isinstance(error, KeyboardInterrupt) or is_exit
        with self._ending as ending:
            if self._watch is not None:
                ending.callback(self._watch.close, error)
            ending.callback(self._retention.wait)
            last = self._under_way
            try:
                self._finish()
            except CheckpointError as failure:
                if error is not None:
                    logger.error("the run ends, and the save under way failed: %s", failure)
                elif last is not None:
                    self._fail(last.step, failure)
            if is_orderly and self._resumed is not None and self._leads:
                withdraw(self.root, self._resumed.attempt)


class _UnderWay(NamedTuple):
    """A save in the background; ``is_told`` happens when all that follows from its end is done."""

    step: int
    handle: AsyncSave
    is_told: Once


class _Retention:
    """Deletes what no policy keeps, after each publish, in a thread; what fails is logged, and tried the next time.

    So the step that a run was resumed from stays at least until there is a newer one. Where it ``is_brief``, nothing
    more is begun.
    """

    def __init__(self, steps: Steps, policies: Sequence[Keep]) -> None:
        self._steps = steps
        self._policies = policies
        self.is_brief = False
        self._turn = Lock()
        self._under_way: list[Once] = []
        self._pause: Once | None = None
        forget_in_child(self)

    def forget_parent(self) -> None:
        self._under_way = []

    def begin(self, newest: int) -> None:
        """Delete what is not kept now that ``newest`` was published; returns at once."""
        if not self._policies or self.is_brief or interpreter_ends():
            return
        is_over = Once()
        self._under_way = [*(event for event in self._under_way if not event.is_set()), is_over]
        try:
            start_thread(threading.Thread(target=self._run, args=(newest, is_over), name="holdfast-retention"))
        except RuntimeError as error:
            is_over.set()
            logger.warning("old steps are not deleted now: %s", error)

    @contextlib.contextmanager
    def held_off(self) -> Iterator[None]:
        """Begin no deletion during the block: the caller waits for a copy, and the interpreter has one lock."""
        self._pause = pause = Once()
        try:
            yield
        finally:
            self._pause = None
            pause.set()

    def wait(self) -> None:
        for event in self._under_way:
            event.wait()

    def _run(self, newest: int, is_over: Once) -> None:
        try:
            with self._turn:
                self._retire(newest)
        except Exception as error:
            logger.warning("old steps could not be deleted, which is tried again after the next save: %s", error)
        finally:
            is_over.set()

    def _retire(self, newest: int) -> None:
        listed = self._steps.steps()
        held = held_steps(self._steps.root)
        stay = kept(listed, self._policies, newest=newest, held=held)
        going = [step for step in listed if step.step not in stay]
        if going and not any(step.step == newest and is_whole(step) for step in listed):
            logger.error("step %d was just published and has not all its files; no other step is deleted", newest)
            return
        for step in going:
            if (pause := self._pause) is not None:
                pause.wait()
            if self.is_brief:
                return
            try:
                self._steps.delete(step.step)
            except BusyError as error:
                logger.info("step %d stays for now: %s", step.step, error)
