"""The manager in one process: what is saved when, what stays, what fails, and who may have a run."""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from forked_children import end_of, start_child

import holdfast
from holdfast import Best, CheckpointManager, Every, EverySteps, Latest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def manager(root: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(root, **{"save": Every(steps=1), "stop": None, **options})


def numbers(steps: holdfast.Steps) -> list[int]:
    return [step.step for step in steps.steps()]


def state(step: int = 0) -> dict[str, Any]:
    return {"weight": torch.full((16,), float(step)), "step": step}


@pytest.mark.parametrize("asynchronous", [True, False, "process"])
def test_steps_are_saved_when_they_are_due_and_no_others(root: Path, asynchronous: Any) -> None:
    with manager(root, save=Every(steps=10, at=(1, 3)), asynchronous=asynchronous) as checkpoints:
        begun = [step for step in range(25) if checkpoints.save(step, state(step))]
    assert begun == [1, 3, 10, 20]
    assert numbers(holdfast.Steps(root)) == begun
    assert holdfast.load(root / "step-20")["step"] == 20
    holdfast.release()


def test_the_save_under_way_has_a_handle_until_its_outcome_is_taken(root: Path) -> None:
    with manager(root) as checkpoints:
        assert checkpoints.under_way is None
        checkpoints.save(1, state())
        handle = checkpoints.under_way
        assert handle is not None
        checkpoints.wait()
        assert handle.done()
        assert checkpoints.under_way is None


def test_metrics_and_step_are_in_the_checkpoint_beside_what_the_user_keeps(root: Path) -> None:
    with manager(root) as checkpoints:
        metrics = {"loss": torch.tensor(0.5), "accuracy": 1}
        checkpoints.save(1, state(), metrics=metrics, user_metadata={"commit": "abc"})
        checkpoints.wait()
        (step,) = checkpoints.steps()
    assert step.metrics == {"loss": 0.5, "accuracy": 1.0}
    with holdfast.open(root / "step-1") as checkpoint:
        assert checkpoint.user_metadata == {"commit": "abc", "step": 1, "metrics": {"loss": 0.5, "accuracy": 1.0}}


def test_every_so_many_seconds_counts_from_the_first_step_and_from_each_save(root: Path) -> None:
    now = [1000.0]
    with (
        mock.patch("time.monotonic", side_effect=lambda: now[0]),
        manager(root, save=Every(seconds=60), asynchronous=False) as run,
    ):
        begun = []
        now[0] += 5000  # the set-up
        for step in range(10):
            if run.save(step, state()):
                begun.append(step)
            now[0] += 25
    assert begun == [3, 6, 9]


def test_a_step_is_saved_once_unless_forced(root: Path) -> None:
    with manager(root) as checkpoints:
        assert checkpoints.save(5, {"a": 1})
        assert not checkpoints.save(5, {"a": 2})
        checkpoints.wait()
        assert holdfast.load(root / "step-5") == {"a": 1}
        assert checkpoints.save(5, {"a": 3}, force=True)
    assert holdfast.load(root / "step-5") == {"a": 3}


def test_force_saves_a_step_that_is_not_due(root: Path) -> None:
    with manager(root, save=Every(steps=100)) as checkpoints:
        assert not checkpoints.save(7, state())
        assert checkpoints.save(8, state(), force=True)
    assert numbers(holdfast.Steps(root)) == [8]


@pytest.mark.parametrize("step", ["7", 7.0, None, True, -1, float("nan")], ids=repr)
def test_a_step_that_is_not_a_number_is_refused(root: Path, step: Any) -> None:
    with manager(root) as checkpoints, pytest.raises(ValueError, match="a step is a whole number from 0 on"):
        checkpoints.save(step, state())


def test_a_step_may_be_an_int_of_another_kind(root: Path) -> None:
    with manager(root) as checkpoints:
        assert checkpoints.save(torch.tensor(3), state())  # type: ignore[arg-type]
    assert numbers(holdfast.Steps(root)) == [3]


def test_steps_that_go_down_are_refused(root: Path) -> None:
    with manager(root, save=Every(steps=2)) as checkpoints:
        checkpoints.save(4, state())
        checkpoints.save(5, state())
        with pytest.raises(ValueError, match="steps never go down: 4 comes after 5"):
            checkpoints.save(4, state())


@pytest.mark.parametrize("value", ["low", None, True, torch.ones(2), [1.0]], ids=repr)
def test_metrics_that_are_not_numbers_are_refused_and_nothing_is_lost(root: Path, value: Any) -> None:
    with manager(root) as checkpoints:
        checkpoints.save(1, state(1))
        with pytest.raises(ValueError, match="the metric 'loss' is one number"):
            checkpoints.save(2, state(2), metrics={"loss": value})
        with pytest.raises(ValueError, match="metrics is a dict of numbers by name, not"):
            checkpoints.save(2, state(2), metrics=[value])  # type: ignore[arg-type]
        assert checkpoints.save(2, state(2), metrics={"loss": 1.0})
    assert numbers(holdfast.Steps(root)) == [1, 2]


@pytest.mark.parametrize("name", ["step", "metrics"])
def test_names_of_the_manager_in_user_metadata_are_refused(root: Path, name: str) -> None:
    with manager(root) as checkpoints, pytest.raises(ValueError, match="use others"):
        checkpoints.save(1, state(), user_metadata={name: 1})


def test_a_root_that_is_a_file_is_refused_and_left_alone(root: Path) -> None:
    root.write_text("precious")
    with pytest.raises(holdfast.NotACheckpointError, match="is a file; the root of a run is a directory"):
        manager(root)
    assert root.read_text() == "precious"


def test_a_root_at_a_url_is_refused() -> None:
    with pytest.raises(ValueError, match="in a directory, or in an object store"):
        CheckpointManager("ftp://bucket/run", save=Every(steps=1))


@pytest.mark.parametrize(
    "options",
    [
        {"save": 500},
        {"keep": ["latest"]},
        {"keep": [Latest(1), Latest(2)]},
        {"on_error": "ignore"},
        {"asynchronous": "thread"},
        {"stop": "SIGTERM"},
    ],
    ids=repr,
)
def test_arguments_that_nobody_can_mean_are_refused(root: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"not|leave one"):
        manager(root, **options)
    assert not root.exists()


def test_a_second_manager_on_the_root_is_refused_by_name_until_the_first_is_closed(root: Path) -> None:
    first = manager(root)
    with pytest.raises(holdfast.BusyError, match=rf"another CheckpointManager has .*: process {os.getpid()} on "):
        manager(root)
    first.save(1, state())
    first.close()
    with manager(root) as second:
        assert numbers(second) == [1]


def no_locks(*args: object) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_where_locks_do_not_show_a_second_manager_is_warned(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with mock.patch("holdfast._io.locks.are_reliable", return_value=(False, "nfs4")):
        with manager(root), pytest.raises(holdfast.BusyError):  # one host sees its own locks
            manager(root)
        with mock.patch.object(fcntl, "flock", no_locks), manager(root, keep=Latest(1)) as first, manager(root):
            first.save(1, state())
            first.save(2, state())
            first.wait()
            assert numbers(first) == [2]
    assert caplog.text.count("locks of other hosts may be invisible on nfs4; have one manager only") == 4


def test_a_manager_that_is_dropped_lets_go_of_the_run(root: Path) -> None:
    manager(root)
    with manager(root):
        pass


def test_a_run_whose_beginning_fails_is_let_go(root: Path) -> None:
    failures: list[str] = []

    def make() -> None:
        try:
            manager(root, stop=holdfast.StopOn())
        except ValueError as error:
            failures.append(str(error))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "signals are handled in the main thread" in failures[0]
    manager(root).close()


def test_retention_keeps_what_any_policy_wants(root: Path) -> None:
    keep = [Latest(2), EverySteps(5), Best(1, "loss")]
    with manager(root, keep=keep) as checkpoints:
        for step in range(1, 13):
            checkpoints.save(step, state(step), metrics={"loss": 0.0 if step == 4 else float(step)})
            checkpoints.wait()
        assert numbers(checkpoints) == [4, 5, 10, 11, 12]
    assert sorted(path.name for path in root.iterdir()) == sorted(
        [".holdfast", *(f"step-{n}" for n in (4, 5, 10, 11, 12))]
    )


def test_keep_1_with_asynchronous_saves_never_deletes_the_only_whole_checkpoint(root: Path) -> None:
    with manager(root, keep=Latest(1)) as checkpoints:
        checkpoints.save(1, state(1))
        checkpoints.wait()
        real, is_writing, may_go_on = os.fsync, threading.Event(), threading.Event()

        def slow(descriptor: int) -> None:
            is_writing.set()
            assert may_go_on.wait(60)
            real(descriptor)

        with mock.patch("os.fsync", slow):
            checkpoints.save(2, state(2))
            assert is_writing.wait(60)
            latest = checkpoints.latest()
            may_go_on.set()
            assert latest is not None
            assert latest.step == 1  # the step whose save is under way is never listed as latest
            checkpoints.wait()
        assert numbers(checkpoints) == [2]


def test_a_save_that_fails_deletes_nothing(root: Path) -> None:
    with manager(root, keep=Latest(1), on_error="warn") as checkpoints:
        checkpoints.save(1, state(1))
        checkpoints.wait()
        with refusing_to_sync():
            checkpoints.save(2, state(2))
            with pytest.raises(holdfast.StorageError):
                checkpoints.wait()
        assert numbers(checkpoints) == [1]
        assert holdfast.verify(root / "step-1").ok


def refusing_to_sync() -> Any:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return mock.patch("os.fsync", refuse)


def test_unfinished_and_foreign_directories_count_for_nothing(root: Path) -> None:
    with manager(root, keep=Latest(2)) as checkpoints:
        for name in ("step-100", "step-100.tmp", "step-backup", "step-007"):
            (root / name).mkdir()
            (root / name / "data-abc-0-0.safetensors").write_bytes(b"cut off")
        for step in (1, 2, 3):
            checkpoints.save(step, state(step))
            checkpoints.wait()
        assert numbers(checkpoints) == [2, 3]
        latest = checkpoints.latest()
        assert latest is not None
        assert latest.step == 3
    assert (root / "step-100.tmp" / "data-abc-0-0.safetensors").exists()


def test_a_newest_step_without_its_files_lets_nothing_be_deleted(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with manager(root, keep=Latest(1)) as checkpoints:
        checkpoints.save(1, state(1))
        checkpoints.wait()
        real = holdfast.Steps.found

        def lose_a_file(self: holdfast.Steps) -> Any:
            for file in (root / "step-2").glob("data-*"):
                file.unlink()
            return real(self)

        with mock.patch.object(holdfast.Steps, "found", lose_a_file):
            checkpoints.save(2, state(2))
            checkpoints.wait()
    assert (root / "step-1" / "manifest.json").exists()
    assert "step 2 was just published and has not all its files" in caplog.text


def test_pinned_steps_stay_until_unpinned(root: Path) -> None:
    with manager(root, keep=Latest(1)) as checkpoints:
        checkpoints.save(1, state())
        checkpoints.wait()
        checkpoints.pin(1)
        for step in (2, 3):
            checkpoints.save(step, state())
            checkpoints.wait()
        assert numbers(checkpoints) == [1, 3]
        checkpoints.unpin(1)
        checkpoints.save(4, state())
        checkpoints.wait()
        assert numbers(checkpoints) == [4]


def test_metrics_may_come_late_and_the_best_survives_a_move_of_the_root(root: Path, tmp_path: Path) -> None:
    with manager(root, keep=[Latest(1), Best(1, "val_loss", awaits=3)]) as checkpoints:
        for step in range(1, 6):
            checkpoints.save(step, state(step))
            checkpoints.wait()
            if step == 3:
                assert numbers(checkpoints) == [1, 2, 3]
                holdfast.Steps(root).report(2, {"val_loss": 0.5})  # from another process, as an evaluator would
            if step == 4:
                checkpoints.report(3, {"val_loss": math.nan})
        assert numbers(checkpoints) == [1, 2, 4, 5]  # 1, 4 and 5 may still get theirs
    root.rename(tmp_path / "moved")
    best = holdfast.Steps(tmp_path / "moved").best("val_loss")
    assert best is not None
    assert best.step == 2
    assert holdfast.load(best.path)["step"] == 2


def test_a_step_can_be_reported_to_and_pinned_while_it_is_being_saved(root: Path) -> None:
    sync, exception, is_waited_for = os.fsync, holdfast.AsyncSave.exception, threading.Event()

    def slow(descriptor: int) -> None:
        assert is_waited_for.wait(60)
        sync(descriptor)

    def wait(save: Any, timeout: float | None = None) -> BaseException | None:
        is_waited_for.set()
        return exception(save, timeout)

    with manager(root) as checkpoints, mock.patch.object(holdfast.AsyncSave, "exception", wait):
        with mock.patch("os.fsync", slow):
            checkpoints.save(1, state(1))
            checkpoints.report(1, {"val_loss": 0.5})
            is_waited_for.clear()
            checkpoints.save(2, state(2))
            checkpoints.pin(2)
        assert [(step.metrics, step.pinned) for step in checkpoints.steps()] == [({"val_loss": 0.5}, False), ({}, True)]
        with pytest.raises(holdfast.NotFoundError, match="there is no step 3"):
            checkpoints.report(3, {"val_loss": 0.5})


def test_steps_that_a_reader_holds_stay(root: Path) -> None:
    with manager(root, keep=Latest(1)) as checkpoints:
        checkpoints.save(1, state(1))
        checkpoints.wait()
        reader = holdfast.follow(root)
        held = next(reader)
        checkpoints.save(2, state(2))
        checkpoints.wait()
        assert numbers(checkpoints) == [1, 2]
        assert holdfast.load(held.path)["step"] == 1
        reader.close()  # type: ignore[attr-defined]
        checkpoints.save(3, state(3))
        checkpoints.wait()
        assert numbers(checkpoints) == [3]


def test_a_reader_in_another_process_keeps_its_step_while_retention_runs(root: Path) -> None:
    ours, theirs = multiprocessing.Pipe()

    def follow() -> None:
        for held in holdfast.follow(root, poll_s=0.001):
            theirs.send(held.step)
            theirs.recv()
            theirs.send((holdfast.verify(held.path).ok, holdfast.load(held.path)["step"]))
            if held.step == 3:
                break

    def told() -> Any:
        assert ours.poll(300)
        return ours.recv()

    with manager(root, keep=Latest(1)) as checkpoints:
        checkpoints.save(1, state(1))
        checkpoints.wait()
        child = start_child(follow)
        for step in (1, 2, 3):
            assert told() == step
            checkpoints.save(step + 1, state(step + 1))
            checkpoints.wait()
            assert numbers(checkpoints) == [step, step + 1]
            ours.send("go on")
            assert told() == (True, step)
        assert end_of(child) == 0
        checkpoints.save(5, state(5))
        checkpoints.wait()
        assert numbers(checkpoints) == [5]


def test_retention_that_fails_is_told_and_tried_again(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with manager(root, keep=Latest(1)) as checkpoints:
        checkpoints.save(1, state())
        checkpoints.wait()
        with mock.patch("os.rename", side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS))):
            checkpoints._retention.begin(1)
            checkpoints.save(2, state())
            with pytest.raises(holdfast.StorageError):
                checkpoints.wait()
        checkpoints.save(3, state())
        checkpoints.wait()
        with mock.patch.object(holdfast.Steps, "delete", side_effect=holdfast.StorageError("no")):
            checkpoints.save(4, state())
            checkpoints.wait()
        assert "old steps could not be deleted, which is tried again after the next save: no" in caplog.text
        assert numbers(checkpoints) == [3, 4]
        checkpoints.save(5, state())
        checkpoints.wait()
        assert numbers(checkpoints) == [5]


def test_nothing_is_deleted_while_a_save_blocks_the_caller(root: Path) -> None:
    with manager(root, keep=Latest(1)) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state())
        checkpoints.wait()
    with manager(root) as checkpoints:
        for step in (3, 4):
            checkpoints.save(step, state())
    is_blocking, deleted = [True], []
    with manager(root, keep=Latest(1)) as checkpoints, mock.patch.object(holdfast.Steps, "delete") as delete:
        delete.return_value.problems = ()
        delete.side_effect = lambda step: deleted.append((step, is_blocking[0])) or mock.DEFAULT
        with checkpoints._retention.held_off():
            checkpoints._retention.begin(4)
            is_blocking[0] = False
        checkpoints.wait()
    assert deleted == [(2, False), (3, False)]


def failing(checkpoints: CheckpointManager, steps: Iterator[int]) -> None:
    """Have the save of the next step fail, and be over."""
    with refusing_to_sync():
        checkpoints.save(next(steps), state())
        last = checkpoints._under_way
        if last is not None:
            last.handle.exception(60)
            last.handle._is_observed = False


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_failed_save_ends_the_run_unless_told_otherwise(root: Path, asynchronous: bool) -> None:
    steps = iter(range(1, 100))
    checkpoints = manager(root, asynchronous=asynchronous)
    with pytest.raises(holdfast.StorageError):  # noqa: PT012
        failing(checkpoints, steps)
        checkpoints.save(next(steps), state())
    checkpoints.close()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_with_warn_training_goes_on_until_the_fourth_failure_in_a_row(
    root: Path, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    steps = iter(range(1, 100))
    with manager(root, asynchronous=asynchronous, on_error="warn") as checkpoints:
        for _ in range(3):
            failing(checkpoints, steps)
        assert checkpoints.save(next(steps), state())
        checkpoints.wait()  # which ends the row
        assert numbers(checkpoints) == [4]
        for _ in range(3):
            failing(checkpoints, steps)
        with pytest.raises(holdfast.StorageError):  # noqa: PT012
            failing(checkpoints, steps)
            checkpoints.save(next(steps), state())
    assert "could not be saved, and training goes on; 3 in a row" in caplog.text


def test_with_warn_a_wrong_program_still_fails(root: Path) -> None:
    with manager(root, on_error="warn") as checkpoints:
        with pytest.raises(holdfast.InvalidStateError):
            checkpoints.save(1, {"a": object()})
        assert checkpoints.save(1, state(), force=True)


def test_when_busy_raise_is_for_the_caller_to_see(root: Path) -> None:
    real, may_go_on = os.fsync, threading.Event()

    def slow(descriptor: int) -> None:
        assert may_go_on.wait(60)
        real(descriptor)

    options = holdfast.SaveOptions(when_busy="raise")
    with manager(root, options=options) as checkpoints, mock.patch("os.fsync", slow):
        checkpoints.save(1, state())
        with pytest.raises(holdfast.BusyError):
            checkpoints.save(2, state())
        may_go_on.set()
        checkpoints.wait()
    assert numbers(holdfast.Steps(root)) == [1]


def test_an_exception_in_the_block_finishes_the_save_and_stays(root: Path) -> None:
    with pytest.raises(KeyError), manager(root) as checkpoints:  # noqa: PT012
        checkpoints.save(1, state())
        raise KeyError("training")
    assert numbers(holdfast.Steps(root)) == [1]


def test_an_exception_in_the_block_is_not_replaced_by_that_of_the_save(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyError), manager(root) as checkpoints:  # noqa: PT012
        failing(checkpoints, iter([1]))
        raise KeyError("training")
    assert "the run ends, and the save under way failed" in caplog.text


def test_the_end_of_the_block_raises_what_the_last_save_failed_with(root: Path) -> None:
    with pytest.raises(holdfast.StorageError), manager(root) as checkpoints:
        failing(checkpoints, iter([1]))
    manager(root).close()


def test_a_report_to_a_step_that_could_not_be_saved_raises_why_and_changes_nothing(root: Path) -> None:
    with manager(root) as checkpoints:
        checkpoints.save(1, state())
        checkpoints.wait()
    with manager(root, on_error="warn") as checkpoints:
        failing(checkpoints, iter([1]))
        with pytest.raises(holdfast.StorageError):
            checkpoints.report(1, {"val_loss": 0.5})
        assert [step.metrics for step in checkpoints.steps()] == [{}]


def test_with_warn_the_end_of_the_block_logs_what_the_last_save_failed_with(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with manager(root, on_error="warn") as checkpoints:
        failing(checkpoints, iter([1]))
    assert "step 1 could not be saved" in caplog.text


def test_where_no_thread_can_be_started_old_steps_stay_and_nobody_waits(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with manager(root, keep=Latest(1), asynchronous=False) as checkpoints:
        checkpoints.save(1, state())
        checkpoints.wait()
        with mock.patch("holdfast._steps.manager.start_thread", side_effect=RuntimeError("can't start new thread")):
            checkpoints.save(2, state())
            checkpoints.wait()
        assert numbers(checkpoints) == [1, 2]
    assert "old steps are not deleted now: can't start new thread" in caplog.text


def test_a_closed_manager_saves_nothing(root: Path) -> None:
    checkpoints = manager(root)
    checkpoints.close()
    checkpoints.close()
    with pytest.raises(ValueError, match="closed"):
        checkpoints.save(1, state())
    with pytest.raises(ValueError, match="closed"):
        checkpoints.resume(state())


def _save_in_child(checkpoints: CheckpointManager, answers: Any) -> None:
    try:
        checkpoints.save(2, state())
    except ValueError as error:
        answers.send(str(error))
    checkpoints.close()
    os._exit(0)


def test_a_forked_child_has_no_part_in_the_run(root: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    with manager(root) as checkpoints:
        checkpoints.save(1, state())
        child = multiprocessing.get_context("fork").Process(target=_save_in_child, args=(checkpoints, theirs))
        child.start()
        assert ours.poll(60)
        assert "belongs to the parent" in ours.recv()
        child.join(60)
        assert checkpoints.save(3, state())
        with pytest.raises(holdfast.BusyError):
            manager(root)
    assert numbers(holdfast.Steps(root)) == [1, 3]


def test_what_killed_saves_and_deletions_left_is_removed_at_the_start(root: Path) -> None:
    with manager(root) as checkpoints:
        checkpoints.save(1, state())
    for name in ("step-1", "step-2"):
        (root / name).mkdir(exist_ok=True)
        (root / name / "data-dead-0-0.safetensors").write_bytes(b"cut off")
    (root / "step-2" / "manifest-dead.tmp").write_bytes(b"{}")
    with manager(root):
        pass
    assert not (root / "step-2").exists()
    assert not list((root / "step-1").glob("*dead*"))
    assert holdfast.verify(root / "step-1").ok


def test_a_run_that_goes_over_another_one_says_so(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with manager(root) as checkpoints:
        checkpoints.save(9, state())
    with manager(root, keep=Latest(1)) as checkpoints:
        checkpoints.save(1, state())
        checkpoints.save(2, state())
        checkpoints.wait()
        assert numbers(checkpoints) == [2, 9]
    assert caplog.text.count("has steps up to 9, and resume() was not called") == 1


def test_should_stop_needs_the_save_before_it(root: Path) -> None:
    with manager(root, save=Every(steps=10)) as checkpoints:
        checkpoints.save(1, state())
        assert not checkpoints.should_stop(1)
        with pytest.raises(ValueError, match=r"call save\(2, state\) before should_stop\(2\)"):
            checkpoints.should_stop(2)


def test_a_planner_is_that_of_this_save(root: Path) -> None:
    class Half(holdfast.DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            data = super().transform_object(write_item, object)
            return data.half() if isinstance(data, torch.Tensor) else data

        def create_local_plan(self) -> Any:
            self.state_dict = {key: self._half(value) for key, value in self.state_dict.items()}
            return super().create_local_plan()

        def _half(self, value: Any) -> Any:
            return value.half() if isinstance(value, torch.Tensor) else value

    with manager(root) as checkpoints:
        checkpoints.save(1, state(), planner=Half())
    assert holdfast.load(root / "step-1")["weight"].dtype is torch.float16


@pytest.mark.parametrize("make", [lambda root: manager(root), lambda root: holdfast.Steps(root)])
def test_the_manager_lists_as_steps_does(root: Path, make: Callable[[Path], holdfast.Steps]) -> None:
    with manager(root) as checkpoints:
        checkpoints.save(1, state(), metrics={"loss": 2.0})
        checkpoints.save(2, state(), metrics={"loss": 1.0})
    steps = make(root)
    best = steps.best("loss")
    assert best is not None
    assert best.step == 2
    report = steps.delete(1)
    assert report.files
    assert numbers(steps) == [2]


def test_log_of_a_quiet_run_is_empty(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="holdfast"), manager(root, keep=Latest(1)) as checkpoints:
        checkpoints.resume(state())
        for step in range(4):
            checkpoints.save(step, state(step))
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


def run_until_stopped(root: Path, ask: Callable[[int], None], **options: Any) -> int:
    """The step at which a run ends; ``ask`` is called at each."""
    with manager(root, save=Every(steps=10**12), **options) as checkpoints:
        for step in itertools.count(1):
            ask(step)
            checkpoints.save(step, state(step))
            if checkpoints.should_stop(step):
                assert checkpoints.stop_requested()
                assert checkpoints.should_stop(step)
                break
    return step


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_ends_the_run_at_a_step_that_is_durable(root: Path, name: str) -> None:
    def ask(step: int) -> None:
        if step == 5:
            signal.raise_signal(signal.Signals[name])

    before = signal.getsignal(signal.Signals[name])
    step = run_until_stopped(root, ask, stop=holdfast.StopOn())
    assert step >= 5
    assert numbers(holdfast.Steps(root)) == [step]
    assert holdfast.verify(root / f"step-{step}").ok
    assert signal.getsignal(signal.Signals[name]) == before
    with manager(root) as checkpoints:
        assert checkpoints.resume(state()).next_step == step + 1


def test_a_stop_that_is_asked_for_during_a_step_that_is_saved_ends_there(root: Path) -> None:
    with manager(root, save=Every(steps=1), stop=holdfast.StopOn()) as checkpoints:
        checkpoints.save(1, state(1))
        signal.raise_signal(signal.SIGTERM)
        wait_until(lambda: "stop" in checkpoints._agreement.reasons)
        assert checkpoints.should_stop(1)  # the save under way is finished instead of starting another
    assert numbers(holdfast.Steps(root)) == [1]


def test_the_last_save_of_a_stop_waits_for_the_one_before_it(root: Path) -> None:
    real, may_go_on = os.fsync, threading.Event()

    def slow(descriptor: int) -> None:
        assert may_go_on.wait(60)
        real(descriptor)

    options = holdfast.SaveOptions(when_busy="raise")
    with manager(root, stop=holdfast.StopOn(), options=options) as checkpoints, mock.patch("os.fsync", slow):
        checkpoints.save(1, state(1))
        assert not checkpoints.should_stop(1)
        signal.raise_signal(signal.SIGTERM)
        wait_until(lambda: "stop" in checkpoints._agreement.reasons)
        assert checkpoints._under_way is not None
        handle = checkpoints._under_way.handle
        awaited = handle.exception

        def wait() -> BaseException | None:
            may_go_on.set()
            return awaited()

        with mock.patch.object(handle, "exception", wait):
            checkpoints.save(2, state(2))
        assert checkpoints.should_stop(2)
    assert numbers(holdfast.Steps(root)) == [1, 2]


def test_a_stop_leaves_what_is_yet_to_be_deleted_to_the_next_run(root: Path) -> None:
    with manager(root) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state(step))
    with manager(root, stop=holdfast.StopOn(), keep=Latest(1)) as checkpoints:
        checkpoints.resume(state())
        signal.raise_signal(signal.SIGTERM)
        wait_until(lambda: "stop" in checkpoints._agreement.reasons)
        with mock.patch.object(holdfast.Steps, "delete", side_effect=lambda step: delete(step)) as deleted:

            def delete(step: int) -> None:
                checkpoints._retention.is_brief = True

            checkpoints.save(4, state(4))
            assert checkpoints.should_stop(4)
            checkpoints.wait()
        assert deleted.call_count <= 1
    with manager(root, keep=Latest(1)) as checkpoints:
        checkpoints.resume(state())
        checkpoints.save(5, state(5))
    assert numbers(holdfast.Steps(root)) == [5]


def test_a_stop_whose_save_fails_is_never_told_as_done(root: Path) -> None:
    with manager(root, stop=holdfast.StopOn(), on_error="warn") as checkpoints:
        signal.raise_signal(signal.SIGTERM)
        wait_until(lambda: "stop" in checkpoints._agreement.reasons)
        with refusing_to_sync():
            checkpoints.save(1, state(1))
            with pytest.raises(holdfast.CheckpointError):
                checkpoints.should_stop(1)


def wait_until(condition: Callable[[], bool]) -> None:
    """Return when a thread has come so far; a test that would wait for ever is ended by its limit."""
    while not condition():
        time.sleep(0.001)
