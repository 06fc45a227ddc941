"""CheckpointManager: saves the steps of a run when they are due, deletes old ones, resumes the run, and stops it.

It decides when, and leaves the work to ``save``, ``async_save``, ``load`` and ``Steps``. Every rank makes a manager and
calls the same methods. What depends on time or on signals is decided by an ``Agreement``, so that all ranks do the
same. At a step where nothing is due, no message is sent. Old steps are deleted after a new one was published, never
before, in a thread of the coordinator. The coordinator holds the lock of the run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from holdfast._async_saver import AsyncCheckpointerType, async_save
from holdfast._loader import LoadOptions, load
from holdfast._process import Lock, Once, forget_in_child, start_thread
from holdfast._ranks.agreement import Agreement
from holdfast._ranks.ranks import agreed, participants
from holdfast._saver import SaveOptions, State, save
from holdfast._staging.one_at_a_time import AsyncSave, interpreter_ends
from holdfast._steps.listing import Step, Steps, checked_metrics, checked_step
from holdfast._steps.policies import Every, Keep, checked_policies, kept
from holdfast._steps.resuming import Initial, OnCrashLoop, Resumed, Target, remove_leftovers, resume, withdraw
from holdfast._steps.stopping import StopOn, StopWatch
from holdfast.errors import BusyError, CheckpointError, InvalidStateError, MismatchError, RankLostError
from holdfast.planner import SavePlanner

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger("holdfast")

_STOP, _SAVE, _LOAD = StopOn(), SaveOptions(), LoadOptions()
_MOST_FAILURES = 3
# What training on would not change: the program is wrong, or a rank is gone.
_FATAL = InvalidStateError, MismatchError, RankLostError


class CheckpointManager(Steps):
    """The checkpoints of one run, in the directory ``root``. Close it, or use it in a ``with`` block.

    All ranks make one, with the same arguments, and call ``resume``, ``save`` and ``should_stop`` alike. Any rank may
    call the methods of ``Steps`` on its own. Leaving the block finishes the save under way, even after an error.

    Args:
        root: a directory, which is made if it does not exist, or the URL of a folder in an object store. Step 100 is
            saved at ``root/step-100``.
        save: when to save.
        keep: policies. A step stays if any of them wants it. Without policies, every step stays.
        stop: what the run stops for; with None nothing stops it, and no signal is handled.
        on_error: "raise" raises the error of a failed save, at the latest when the next save is due. "warn" logs it,
            and training goes on; but the fourth failure in a row is raised, and so is what more training cannot mend.
        asynchronous: save in the background, in a thread; "process" has another process write.
        options: the options of every save.
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
        if on_error not in ("raise", "warn"):
            raise ValueError(f"on_error is 'raise' or 'warn', not {on_error!r}")
        if asynchronous not in (True, False, "process"):
            raise ValueError(f"asynchronous is True, False or 'process', not {asynchronous!r}")
        if not isinstance(stop, StopOn | None):
            raise ValueError(f"stop says what the run stops for, as in stop=StopOn(file='stop'), and is not {stop!r}")
        self._every, self._on_error, self._asynchronous = save, on_error, asynchronous
        self._options, self._process_group = options, process_group
        # With a listing of its own, because its thread must not keep this manager alive.
        self._retention = _Retention(Steps(root), checked_policies(keep))
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
            self._ending.callback(self._run.claim())
            remove_leftovers(self._run)
            return secrets.token_hex(8)

        try:
            with ranks:
                topic = ranks.all_reduce("opening the run", lambda: said, begin)
            self._is_coordinator = ranks.is_coordinator
            self._agreement = Agreement(ranks, topic)
            self._ending.callback(self._agreement.close)
            self._watch = None if stop is None else StopWatch(stop, self._agreement)
        except BaseException:
            self._ending.close()
            raise
        forget_in_child(self)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
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
        """Load the newest step into ``state``, in place. A damaged step is passed over, and named in the log.

        Args:
            state: the target, as for ``load``.
            initial: what to begin with if there is no step yet: a checkpoint that ``load`` can read, or a function
                that is called with the state.
            strict: as for ``load``.
            options: as for ``load``.
            on_crash_loop: what to do about a step that was resumed from twice with nothing published since: "raise", or
                "step back" to the step before.

        Raises:
            MismatchError: the state does not fit the newest step that is whole. No older one is tried.
            CorruptError: there are steps, and none of them can be loaded.
            CrashLoopError: see ``on_crash_loop``.
        """
        self._check_open()
        if not isinstance(state, MutableMapping):
            raise InvalidStateError(f"resume takes the state, a dict of names to values, not a {type(state).__name__}")
        if self._begun >= 0:
            raise ValueError("resume comes once, and before the first save")
        group = self._process_group
        load_it = partial(load, state, strict=strict, options=options, process_group=group)
        job = partial(participants, group, no_dist=False, call="resume", place=self.root, deadline_s=options.deadline_s)
        resumed, self._resumed = resume(self, self._run, state, initial, load_it, job, on_crash_loop)
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
        """Save ``state`` as ``step`` if that is due, or in any case with ``force``; returns whether a save was begun.

        Call it at every step: where nothing is due, it costs next to nothing. If there is a step of this number from an
        earlier run, it is replaced, atomically.

        Args:
            step: a number that never goes down.
            state: as for ``save``.
            metrics: numbers by name, for ``Best`` and ``best``; those of the coordinator count.
            force: save in any case, even if this step was just saved.
            user_metadata: as for ``save``; the names "step" and "metrics" are taken.
            planner: as for ``save``.

        Raises:
            CheckpointError: this save or the one before failed; see ``on_error``.
        """
        number = checked_step(step)
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
            with self._retention.held_off():
                self._finish_before(waits="stop" in asked)
                self._begin_save(number, state, told, planner)
        except CheckpointError as error:
            self._fail(number, error)
            return False
        self._saved = number
        return True

    def should_stop(self, step: int) -> bool:
        """Whether the run is to stop at ``step``. Every rank gets the same answer. If it is True, the step is durable.

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

    @property
    def under_way(self) -> AsyncSave | None:
        """The handle of the save in the background, until its outcome is taken."""
        return None if self._under_way is None else self._under_way.handle

    def stop_requested(self) -> bool:
        """Whether this rank knows that the run is to stop soon. For loops that do not save, such as evaluation."""
        return self._is_stopped or (self._watch is not None and self._watch.reason != "")

    def wait(self) -> None:
        """Return when the save under way is durable and old steps are deleted; raises the error of that save."""
        self._finish()
        self._retention.wait()

    def close(self) -> None:
        """Finish the save under way and unlock the run; raises the error of that save, as ``on_error`` says."""
        self._end(None)

    def _locked(self, step: int) -> Any:
        if (last := self._under_way) is not None and last.step == step:
            error = last.handle.exception()  # so that a step can be reported to, or pinned, right after ``save``
            if error is not None:
                raise error
        return super()._locked(step)

    def forget_parent(self) -> None:
        """Count as closed: a forked child takes no part in the run."""
        self._is_closed, self._under_way = True, None

    def _begin_step(self, step: int, *, is_saved: bool) -> frozenset[str]:
        """What all ranks have agreed to do at ``step``. Measures how long the step before took."""
        if step < self._begun:
            raise ValueError(f"steps never go down: {step} comes after {self._begun}, which was saved or resumed from")
        self._check_open()
        now, every_s = time.monotonic(), self._every.seconds
        if self._stepped_at < 0:
            self._save_begun_at = now  # the time before the first step does not count
        elif self._watch is not None:
            self._watch.measured(step_s=now - self._stepped_at)
        if every_s is not None and self._is_coordinator and now - self._save_begun_at >= every_s:
            self._agreement.request("save", f"the last save began {now - self._save_begun_at:.0f} s ago")
        asked = self._agreement.begin_step(step, is_saved=is_saved)
        self._stepped_at, self._begun = now, step
        return asked

    def _begin_save(self, step: int, state: State, told: Mapping[str, object], planner: SavePlanner | None) -> None:
        self._save_begun_at = began = time.monotonic()
        path, group, options = self.path(step), self._process_group, self._options
        if not self._asynchronous:
            save(state, path, planner=planner, process_group=group, user_metadata=told, options=options)
            self._failures = 0
            self._published(step, began)
            return
        kind = AsyncCheckpointerType("process" if self._asynchronous == "process" else "thread")
        begin = partial(async_save, process_group=group, async_checkpointer_type=kind)
        handle = begin(state, path, planner=planner, user_metadata=told, options=options)
        self._under_way = _UnderWay(step, handle, Once())
        handle.add_done_callback(partial(self._over, self._under_way, began))

    def _over(self, save: _UnderWay, began: float, _: object) -> None:
        """Do what follows the end of a background save. Called by the thread of that save."""
        try:
            if save.handle.phase == "published":
                self._published(save.step, began)
        finally:
            save.is_told.set()

    def _published(self, step: int, began: float) -> None:
        if self._watch is not None:
            self._watch.measured(durable_s=time.monotonic() - began)
        if self._is_coordinator:
            self._retention.begin(step)

    def _finish_before(self, *, waits: bool) -> None:
        """Take the outcome of the save before, if it is over. ``waits`` waits for it, and so does ``when_busy``."""
        last = self._under_way
        if last is not None and (waits or last.handle.done() or self._options.when_busy == "wait"):
            try:
                self._finish()
            except CheckpointError as error:
                self._fail(last.step, error)

    def _finish(self) -> None:
        """Return when no save is under way; raises the error of the last one."""
        last, self._under_way = self._under_way, None
        if last is not None:
            error = last.handle.exception()
            last.is_told.wait()
            if error is not None:
                self._saved = -1 if self._saved == last.step else self._saved
                raise error
            self._failures = 0

    def _fail(self, step: int, error: CheckpointError) -> None:
        """Raise ``error``, or log it, as ``on_error`` says."""
        self._failures += 1
        if self._on_error == "raise" or isinstance(error, _FATAL) or self._failures > _MOST_FAILURES:
            raise error
        said = f"step {step} could not be saved, and training goes on; {self._failures} in a row"
        logger.error("%s, and after %d the next one is raised: %s", said, _MOST_FAILURES, error)

    def _look_once(self) -> None:
        """Warn, once, if this run is about to replace steps of another one."""
        self._has_looked, there = True, [] if self._has_looked or not self._is_coordinator else self.found()
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
            if is_orderly and self._resumed is not None and self._is_coordinator:
                withdraw(self._run, self._resumed.attempt)


class _UnderWay(NamedTuple):
    """A save in the background. ``is_told`` is set when all that follows its end is done."""

    step: int
    handle: AsyncSave
    is_told: Once


class _Retention:
    """Deletes the steps that no policy keeps, after each publish, in a thread. Failures are logged, and tried again.

    So the step that a run was resumed from stays at least until there is a newer one. When ``is_brief`` is set, no
    further deletion is begun, because the run is about to stop.
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
        """Delete what is not kept, now that ``newest`` was published. Returns at once."""
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
        """Do nothing more during the block: training waits for a copy then, which anything else would slow down."""
        self._pause = pause = Once()
        try:
            yield
        finally:
            self._pause = None
            pause.set()

    def wait(self) -> None:
        for event in self._under_way:
            event.wait()

    def _wait_for_training(self) -> None:
        if (pause := self._pause) is not None:
            pause.wait()

    def _run(self, newest: int, is_over: Once) -> None:
        try:
            self._wait_for_training()
            with self._turn:
                self._retire(newest)
        except Exception as error:
            logger.warning("old steps could not be deleted, which is tried again after the next save: %s", error)
        finally:
            is_over.set()

    def _retire(self, newest: int) -> None:
        listed: list[Step] = []
        for found in self._steps.found():
            self._wait_for_training()
            listed += self._steps.look_at([found])
        stay = kept(listed, self._policies, newest=newest, held=self._steps.held())
        going = [step for step in listed if step.step not in stay]
        if going and not any(step.step == newest and self._steps.is_whole(step) for step in listed):
            logger.error("step %d was just published and has not all its files; no other step is deleted", newest)
            return
        for step in going:
            self._wait_for_training()
            if self.is_brief:
                return
            try:
                for problem in self._steps.delete(step.step).problems:
                    logger.warning("of step %d, which was deleted: %s", step.step, problem)
            except BusyError as error:
                logger.info("step %d stays for now: %s", step.step, error)
