"""Resume in one process: the newest step that can be loaded, no silent fresh start, not the same crash for ever."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast
from holdfast import CheckpointManager, Every, Latest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def manager(root: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(root, **{"save": Every(steps=1), "stop": None, **options})


def state(step: int = 0) -> dict[str, Any]:
    return {"weight": torch.full((1000,), float(step)), "step": step}


def made(root: Path, *steps: int, **options: Any) -> None:
    """A run that saved these steps."""
    with manager(root, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, state(step))


def resumed(root: Path, **options: Any) -> tuple[holdfast.Resumed, dict[str, Any]]:
    target = state()
    with manager(root) as checkpoints:
        return checkpoints.resume(target, **options), target


def flip_a_bit(step: Path) -> None:
    (file,) = step.glob("data-*")
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)


def remove_data(step: Path) -> None:
    for file in step.glob("data-*"):
        file.unlink()


def cut_off_data(step: Path) -> None:
    for file in step.glob("data-*"):
        os.truncate(file, file.stat().st_size // 2)


def remove_index(step: Path) -> None:
    for file in step.glob("index-*"):
        file.unlink()


def tear_manifest(step: Path) -> None:
    os.truncate(step / "manifest.json", 100)


def empty_manifest(step: Path) -> None:
    os.truncate(step / "manifest.json", 0)


def forge_manifest(step: Path) -> None:
    (step / "manifest.json").write_bytes(b'{"format": "holdfast"}')


DAMAGE = [flip_a_bit, remove_data, cut_off_data, remove_index, tear_manifest, empty_manifest, forge_manifest]


def test_a_run_begins_where_nothing_is(root: Path) -> None:
    found, target = resumed(root)
    assert (found.step, found.path, found.report, found.skipped, found.next_step) == (None, None, None, (), 0)
    assert found.per_rank == {}
    assert target["step"] == 0


def test_the_newest_step_is_loaded_by_number_not_by_name(root: Path) -> None:
    made(root, 9, 20, 100)
    found, target = resumed(root)
    assert (found.step, found.next_step, found.path) == (100, 101, str(root / "step-100"))
    assert found.report is not None
    assert found.report.missing == ()
    assert target["step"] == 100
    assert target["weight"].eq(100).all()


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_a_damaged_newest_step_is_passed_over_and_named(
    root: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    made(root, 1, 2, 3)
    damage(root / "step-3")
    found, target = resumed(root)
    assert found.step == 2
    assert target["weight"].eq(2).all()
    ((step, path, why),) = found.skipped
    assert (step, path) == (3, str(root / "step-3"))
    assert why
    assert f"step 3 is passed over: {why}" in caplog.text


def test_a_step_whose_manifest_is_gone_is_none(root: Path) -> None:
    made(root, 1, 2)
    (root / "step-2" / "manifest.json").unlink()
    found, target = resumed(root)
    assert found.step == 1
    assert target["step"] == 1


def test_a_save_that_was_killed_is_no_step_however_high_its_number(root: Path) -> None:
    made(root, 1)
    (root / "step-999").mkdir()
    (root / "step-999" / "data-dead-0-0.safetensors").write_bytes(b"cut off")
    (root / "step-1000.tmp").mkdir()
    assert resumed(root)[0].step == 1


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_where_steps_are_and_none_is_whole_it_never_starts_afresh(root: Path, damage: Callable[[Path], None]) -> None:
    made(root, 1, 2)
    damage(root / "step-1")
    damage(root / "step-2")
    initial = mock.Mock()
    with pytest.raises(holdfast.CorruptError, match=r"no step of .* can be loaded: step 2: .*; step 1: ") as caught:
        resumed(root, initial=initial)
    assert "needs another root" in str(caught.value)
    initial.assert_not_called()
    assert (root / "step-2" / "manifest.json").exists()


def test_steps_that_are_all_damaged_are_no_crash_loop_however_often_they_are_tried(root: Path) -> None:
    made(root, 1, 2)
    remove_data(root / "step-1")
    remove_data(root / "step-2")
    for _ in range(4):
        with pytest.raises(holdfast.CorruptError, match=r"no step of .* can be loaded: step 2: .*; step 1: "):
            resumed(root)


def test_a_disk_that_cannot_read_is_passed_over_and_one_that_refuses_is_not(root: Path) -> None:
    made(root, 1, 2)
    real = holdfast._steps.manager.load

    def refuse(number: int) -> Any:
        def load(target: Any, path: Any, **options: Any) -> Any:
            if path.endswith("step-2"):
                raise holdfast.StorageError("no", errno=number)
            return real(target, path, **options)

        return mock.patch("holdfast._steps.manager.load", load)

    with refuse(errno.EIO):
        assert resumed(root)[0].step == 1
    with refuse(errno.EACCES), pytest.raises(holdfast.StorageError):
        resumed(root)


def test_a_mismatch_is_never_passed_over(root: Path) -> None:
    made(root, 1, 2)
    target = {"weight": torch.zeros(7), "step": 0}
    for _ in range(4):  # and counts for no crash
        with manager(root) as checkpoints, pytest.raises(holdfast.MismatchError):
            checkpoints.resume(target)
    assert resumed(root)[0].step == 2


def test_options_of_load_are_those_of_resume(root: Path) -> None:
    made(root, 1)
    with manager(root) as checkpoints:
        target = {"weight": torch.zeros(1000, dtype=torch.float64), "more": 1, "step": 0}
        found = checkpoints.resume(target, strict=False, options=holdfast.LoadOptions(cast=True))
    assert found.report is not None
    assert found.report.missing == ("more",)
    assert target["weight"].eq(1).all()  # type: ignore[union-attr]


def test_resume_comes_once_and_first(root: Path) -> None:
    made(root, 1)
    with manager(root) as checkpoints:
        checkpoints.resume(state())
        with pytest.raises(ValueError, match="once, and before the first save"):
            checkpoints.resume(state())


@pytest.mark.parametrize("target", ["runs/old", torch.nn.Linear(2, 2), None])
def test_what_is_no_state_is_refused_where_there_is_nothing_to_load_too(root: Path, target: Any) -> None:
    """A path in the place of the state must not become a fresh start."""
    with manager(root) as checkpoints:
        with pytest.raises(
            holdfast.InvalidStateError, match="resume takes the state, a dict of names to values, not a"
        ):
            checkpoints.resume(target)
        assert checkpoints.resume(state()).next_step == 0


def test_steps_go_on_from_the_one_resumed_from(root: Path) -> None:
    made(root, 5)
    with manager(root) as checkpoints:
        checkpoints.resume(state())
        with pytest.raises(ValueError, match="steps never go down: 4 comes after 5"):
            checkpoints.save(4, state())
        assert not checkpoints.save(5, state())
        assert checkpoints.save(6, state())


def test_a_native_checkpoint_is_what_a_run_begins_with(root: Path, tmp_path: Path) -> None:
    holdfast.save(state(7), tmp_path / "pretrained")
    found, target = resumed(root, initial=tmp_path / "pretrained")
    assert (found.step, found.next_step, found.path) == (None, 0, str(tmp_path / "pretrained"))
    assert found.report is not None
    assert target["weight"].eq(7).all()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_checkpoint_is_what_a_run_begins_with(root: Path, tmp_path: Path) -> None:
    dcp.save(state(7), checkpoint_id=tmp_path / "torchs")
    found, target = resumed(root, initial=tmp_path / "torchs")
    assert found.report is not None
    assert target["weight"].eq(7).all()


def test_a_function_fills_the_state_that_a_run_begins_with(root: Path, tmp_path: Path) -> None:
    holdfast.save({"weight": torch.full((1000,), 7.0)}, tmp_path / "weights")

    def only_weights(target: dict[str, Any]) -> holdfast.LoadReport:
        return holdfast.load({"weight": target["weight"]}, tmp_path / "weights")

    found, target = resumed(root, initial=only_weights)
    assert found.report is not None
    assert found.report.loaded == ("weight",)
    assert target["weight"].eq(7).all()


def test_the_initial_checkpoint_is_not_looked_at_where_steps_are(root: Path, tmp_path: Path) -> None:
    made(root, 3)
    found, target = resumed(root, initial=tmp_path / "is not there")
    assert found.step == 3
    assert target["step"] == 3


def test_an_initial_checkpoint_that_is_not_there_is_an_error(root: Path, tmp_path: Path) -> None:
    with pytest.raises(holdfast.NotFoundError):
        resumed(root, initial=tmp_path / "is not there")


def crash(root: Path, *saves: int, **options: Any) -> int | None:
    """A run that ends without a word after these saves; the step that it resumed from."""
    checkpoints = manager(root, keep=options.pop("keep", ()))
    found = checkpoints.resume(state(), **options)
    for step in saves:
        checkpoints.save(step, state(step))
        checkpoints.wait()
    checkpoints._ending.close()  # as the system does when a process ends
    return found.step


def test_damage_to_an_older_step_is_no_news(root: Path) -> None:
    made(root, 1, 2)
    assert [crash(root), crash(root)] == [2, 2]
    (root / "step-1" / "manifest.json").write_bytes(b"{}")
    with manager(root) as checkpoints, pytest.raises(holdfast.CrashLoopError):
        checkpoints.resume(state())


def test_a_step_that_ends_the_run_again_and_again_is_a_crash_loop(root: Path) -> None:
    made(root, 1, 2)
    assert [crash(root), crash(root)] == [2, 2]
    target = state()
    with manager(root) as checkpoints, pytest.raises(holdfast.CrashLoopError) as caught:
        checkpoints.resume(target)
    assert target["step"] == 0  # before anything was loaded
    assert (caught.value.step, caught.value.times) == (2, 2)
    assert "resumed 2 times from step 2" in str(caught.value)
    assert re.search(r"on_crash_loop='step back'.*or remove '.*resumes\.json'", str(caught.value))


def test_a_run_that_publishes_something_is_in_no_crash_loop(root: Path) -> None:
    made(root, 1)
    assert [crash(root, step) for step in range(2, 9)] == list(range(1, 8))


def test_a_run_that_ends_in_order_is_in_no_crash_loop(root: Path) -> None:
    made(root, 1)
    assert [resumed(root)[0].step for _ in range(5)] == [1] * 5


def test_an_exception_counts_as_a_crash(root: Path) -> None:
    made(root, 1)
    for end in (KeyError("training"), SystemExit(1)):
        with pytest.raises(type(end)), manager(root) as checkpoints:  # noqa: PT012
            checkpoints.resume(state())
            raise end
    with manager(root) as checkpoints, pytest.raises(holdfast.CrashLoopError):
        checkpoints.resume(state())


@pytest.mark.parametrize("end", [KeyboardInterrupt(), SystemExit(), SystemExit(0)], ids=repr)
def test_who_ends_a_run_on_purpose_crashes_nothing(root: Path, end: BaseException) -> None:
    made(root, 1)
    for _ in range(4):
        with pytest.raises(type(end)), manager(root) as checkpoints:  # noqa: PT012
            assert checkpoints.resume(state()).step == 1
            raise end


def test_step_back_goes_on_from_the_step_before_and_never_to_the_bad_one_again(root: Path) -> None:
    made(root, 1, 2, 3)
    back = {"on_crash_loop": "step back"}
    assert [crash(root, **back) for _ in range(2)] == [3, 3]
    assert crash(root, **back) == 2
    found, _ = resumed(root, **back)
    assert found.step == 2
    assert found.skipped[0][:2] == (3, str(root / "step-3"))
    assert found.skipped[0].why == "the run ended too often after resuming from it"
    with manager(root) as checkpoints:  # which saves between the two
        assert checkpoints.resume(state()).step == 2
        checkpoints.save(3, state(33))
        checkpoints.save(4, state(4))
    assert resumed(root)[0].step == 4
    assert holdfast.load(root / "step-3")["step"] == 33


def test_step_back_ends_where_there_is_no_step_before(root: Path) -> None:
    made(root, 1)
    assert [crash(root), crash(root)] == [1, 1]
    with manager(root) as checkpoints, pytest.raises(holdfast.CrashLoopError, match=r"no step of .* is left"):
        checkpoints.resume(state(), on_crash_loop="step back")


def test_a_broken_newest_checkpoint_does_not_restart_the_job_for_ever(root: Path) -> None:
    made(root, 1, 2)
    flip_a_bit(root / "step-2")
    assert [crash(root), crash(root)] == [1, 1]
    with manager(root) as checkpoints, pytest.raises(holdfast.CrashLoopError, match="from step 1"):
        checkpoints.resume(state())


def test_another_word_about_crash_loops_is_refused(root: Path) -> None:
    with pytest.raises(ValueError, match="'raise' or 'step back'"):
        resumed(root, on_crash_loop="ignore")


@pytest.mark.parametrize(
    "note", [b"", b"{", b'{"times": 3}', b'{"times": {"a": "b"}}', b"\xff" * 100, b"0" * (2 << 20)]
)
def test_a_note_that_cannot_be_read_counts_as_none_and_is_told(
    root: Path, note: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    made(root, 1)
    assert [crash(root), crash(root)] == [1, 1]
    (root / ".holdfast" / "resumes.json").write_bytes(note)
    assert crash(root) == 1
    assert "so resumes are counted anew" in caplog.text


def test_the_note_says_what_it_counts(root: Path) -> None:
    made(root, 1, 2)
    crash(root)
    note = json.loads((root / ".holdfast" / "resumes.json").read_bytes())
    attempts = {step.step: step.attempt for step in holdfast.Steps(root).steps()}
    assert sorted(note["published"]) == sorted(attempts.values())
    assert note["times"] == {attempts[2]: 1}


def test_after_falling_back_steps_of_the_lost_run_neither_count_nor_go(root: Path) -> None:
    made(root, 1, 2, 3, 4)
    flip_a_bit(root / "step-4")
    with manager(root, keep=Latest(1), save=Every(at=(3, 5))) as checkpoints:
        checkpoints.resume(state())
        assert [step.step for step in checkpoints.steps()] == [1, 2, 3, 4]
        checkpoints.save(4, state(44), force=True)
        checkpoints.wait()
        assert [step.step for step in checkpoints.steps()] == [4]
    assert resumed(root)[0].step == 4
    assert holdfast.load(root / "step-4")["step"] == 44


def test_a_damaged_step_is_never_what_is_kept_in_place_of_a_whole_one(root: Path) -> None:
    made(root, 10, 20, 30)
    flip_a_bit(root / "step-30")
    assert crash(root, 25, keep=Latest(1)) == 20
    assert [step.step for step in holdfast.Steps(root).steps()] == [25, 30]
    assert resumed(root)[0].step == 25


def test_best_k_does_not_evict_the_one_a_job_resumes_from(root: Path) -> None:
    made(root, 1, 2)
    with manager(root, keep=[holdfast.Best(1, "loss", awaits=0)], on_error="warn") as checkpoints:
        assert checkpoints.resume(state()).step == 2
        checkpoints.report(1, {"loss": 0.0})
        with mock.patch("os.fsync", side_effect=OSError(errno.ENOSPC, "full")):
            checkpoints.save(3, state(3))
            with pytest.raises(holdfast.StorageError):
                checkpoints.wait()
        assert [step.step for step in checkpoints.steps()] == [1, 2]
        checkpoints.save(4, state(4))
        checkpoints.wait()
        assert [step.step for step in checkpoints.steps()] == [1, 4]


def test_values_of_this_rank_are_told(root: Path) -> None:
    with manager(root) as checkpoints:
        checkpoints.save(1, {"rng": holdfast.Rng(), "seen": holdfast.PerRank([1, 2])})
    with manager(root) as checkpoints:
        seen = holdfast.PerRank[list[int]]([])
        found = checkpoints.resume({"rng": holdfast.Rng(), "seen": seen})
    assert found.per_rank == {"rng": "restored", "seen": "restored"}
    assert seen.value == [1, 2]
