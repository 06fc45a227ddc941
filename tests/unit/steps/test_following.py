"""A reader that follows a run gets each step whole, and keeps it until it is done, whatever others delete."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import holdfast


def save(root: Path, *steps: int, value: float = 1.0, **metrics: float) -> None:
    for step in steps:
        kept = {"step": step, "metrics": metrics}
        holdfast.save({"a": torch.full((100,), value), "step": step}, root / f"step-{step}", user_metadata=kept)


def over() -> bool:
    return True


def numbers(root: Path, **options: Any) -> list[int]:
    """The steps that a run which is over gives."""
    return [held.step for held in holdfast.follow(root, until=over, **options)]


def readers(root: Path) -> list[str]:
    return sorted(os.listdir(root / ".holdfast" / "readers"))


def files_of(path: str | Path) -> dict[str, int]:
    return {file.name: file.stat().st_ino for file in Path(path).iterdir()}


def no_links(*args: object, **kwargs: object) -> None:
    raise OSError(errno.EPERM, "no links here")


class Poll:
    """Has waiting for new steps call a function each time, and ends after the last one."""

    def __init__(self, *calls: Callable[[], object]) -> None:
        self._calls = iter(calls)

    def __call__(self, seconds: float) -> None:
        next(self._calls)()

    @staticmethod
    def patched(*calls: Callable[[], object]) -> Any:
        return mock.patch("time.sleep", Poll(*calls))


def test_the_newest_step_comes_first_then_what_is_new(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, loss=0.5)
    followed = holdfast.follow(tmp_path)
    held = next(followed)
    assert (held.step, held.metrics) == (2, {"loss": 0.5})
    assert held.attempt == holdfast.Steps(tmp_path).steps()[1].attempt
    save(tmp_path, 3, 4)
    assert next(followed).step == 4
    with Poll.patched(lambda: save(tmp_path, 5)):
        assert next(followed).step == 5
    assert numbers(tmp_path) == [5]


def test_all_steps_in_order_or_from_one_on(tmp_path: Path) -> None:
    save(tmp_path, 10, 9, 100)
    assert numbers(tmp_path, start="all") == [9, 10, 100]
    assert numbers(tmp_path, start=10) == [10, 100]
    assert numbers(tmp_path, start=101) == []
    followed = holdfast.follow(tmp_path, start="all", until=over)
    assert next(followed).step == 9
    save(tmp_path, 8)
    assert [held.step for held in followed] == [8, 10, 100]


def test_a_step_that_is_saved_again_comes_again(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    followed = holdfast.follow(tmp_path, until=over)
    assert next(followed).step == 2
    save(tmp_path, 2, value=7.0)
    held = next(followed)
    assert (held.step, float(holdfast.read(held.path)["a"][0])) == (2, 7.0)
    holdfast.Steps(tmp_path).delete(1)
    assert list(followed) == []


def test_an_older_step_does_not_come_when_the_newest_goes(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    followed = holdfast.follow(tmp_path, until=over)
    next(followed).release()
    holdfast.Steps(tmp_path).delete(3)
    assert list(followed) == []


def test_what_is_not_whole_does_not_come(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    next((tmp_path / "step-3").glob("data-*")).unlink()
    os.truncate(tmp_path / "step-2" / "manifest.json", 10)
    assert numbers(tmp_path) == [1]
    assert numbers(tmp_path, start="all") == [1]


def test_a_held_step_cannot_be_taken_away(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    followed = holdfast.follow(tmp_path, start="all")
    held = next(followed)
    assert held.path.startswith(str(tmp_path / ".holdfast" / "readers"))
    assert files_of(held.path) == files_of(tmp_path / "step-1")
    steps = holdfast.Steps(tmp_path)
    with pytest.raises(holdfast.BusyError, match="a reader holds step 1"):
        steps.delete(1)
    with pytest.raises(holdfast.BusyError, match="a reader holds step 1"):
        steps.delete(1, force=True)
    holdfast.delete(tmp_path / "step-1")
    holdfast.sweep(tmp_path, delete=True)
    assert holdfast.verify(held.path).ok
    assert holdfast.read(held.path)["step"] == 1
    assert next(followed).step == 2
    assert not os.path.exists(held.path)


def test_a_released_step_may_go(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    followed = holdfast.follow(tmp_path, start="all")
    with next(followed) as held:
        assert os.path.exists(held.path)
    assert not os.path.exists(held.path)
    holdfast.Steps(tmp_path).delete(1)
    second = next(followed)
    held.release()
    assert holdfast.verify(second.path).ok
    second.release()
    second.release()
    assert not os.path.exists(second.path)
    assert repr(second).startswith("HeldStep(step=2, path=")


def test_a_reader_may_let_go_while_somebody_deletes(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    followed = holdfast.follow(tmp_path)
    held = next(followed)
    real = os.scandir

    def scan(place: Any) -> Any:
        if "reader-" in str(place):
            held.release()
        return real(place)

    with mock.patch.object(os, "scandir", scan):
        holdfast.Steps(tmp_path).delete(1)
    assert not os.path.exists(held.path)
    assert sorted(os.listdir(tmp_path)) == [".holdfast", "step-2"]


def test_a_reader_that_ends_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    followed: Any = holdfast.follow(tmp_path)
    next(followed)
    assert len(readers(tmp_path)) == 2
    followed.close()
    assert readers(tmp_path) == []
    for held in holdfast.follow(tmp_path):
        assert held.step == 2
        break
    del held
    assert readers(tmp_path) == []


def test_what_dead_readers_left_goes_with_the_next_or_a_sweep(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    place = tmp_path / ".holdfast" / "readers"

    def die() -> None:
        (place / "reader-dead" / "step-1").mkdir(parents=True)
        (place / "reader-dead.lock").touch()
        os.link(tmp_path / "step-1" / "manifest.json", place / "reader-dead" / "step-1" / "manifest.json")

    die()
    holdfast.Steps(tmp_path).delete(1)
    save(tmp_path, 1)
    assert numbers(tmp_path) == [2]
    assert readers(tmp_path) == []
    die()
    report = holdfast.sweep(tmp_path)
    assert [(leftover.attempt, leftover.verdict) for leftover in report.leftovers] == [("dead", "dead")]
    assert readers(tmp_path) == ["reader-dead", "reader-dead.lock"]
    report = holdfast.sweep(tmp_path, delete=True)
    assert report.problems == ()
    assert report.removed_files == 1
    assert readers(tmp_path) == []


def test_living_readers_are_no_leftovers(tmp_path: Path) -> None:
    save(tmp_path, 1)
    followed = holdfast.follow(tmp_path)
    held = next(followed)
    (leftover,) = holdfast.sweep(tmp_path, delete=True).leftovers
    assert leftover.verdict == "living"
    assert numbers(tmp_path) == [1]
    assert holdfast.verify(held.path).ok


def test_where_locks_do_not_tell_readers_count_as_living(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    (tmp_path / ".holdfast" / "readers" / "reader-far" / "step-1").mkdir(parents=True)
    (tmp_path / ".holdfast" / "readers" / "reader-far.lock").touch()
    with mock.patch("holdfast._io.locks.are_reliable", return_value=(False, "nfs4")):
        with pytest.raises(holdfast.BusyError, match="a reader holds step 1"):
            holdfast.Steps(tmp_path).delete(1)
        assert numbers(tmp_path) == [2]
        (leftover,) = holdfast.sweep(tmp_path, delete=True).leftovers
        assert leftover.verdict == "unknown"
        holdfast.sweep(tmp_path, delete=True, attempts=["far"])
        holdfast.Steps(tmp_path).delete(1)
    assert readers(tmp_path) == []


def test_without_links_the_step_itself_is_read_and_stays(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    with mock.patch.object(os, "link", no_links):
        followed = holdfast.follow(tmp_path, start="all")
        held = next(followed)
        assert held.path == str(tmp_path / "step-1")
        with pytest.raises(holdfast.BusyError, match="a reader holds step 1"):
            holdfast.Steps(tmp_path).delete(1)
        assert next(followed).step == 2
    holdfast.Steps(tmp_path).delete(1)


@pytest.mark.parametrize("has_links", [True, False])
@pytest.mark.parametrize("change", ["delete", "replace"])
def test_a_step_that_goes_while_it_is_taken_is_passed_over(tmp_path: Path, has_links: bool, change: str) -> None:
    save(tmp_path, 1, 2)
    calls = itertools.count()
    real = os.link

    def link(source: Any, target: Any, **kwargs: Any) -> None:
        if ".holdfast" in str(target) and next(calls) == (1 if has_links else 0):
            with mock.patch.object(os, "link", real):
                holdfast.delete(tmp_path / "step-2") if change == "delete" else save(tmp_path, 2, value=7.0)
        if not has_links:
            no_links()
        real(source, target, **kwargs)

    with mock.patch.object(os, "link", link):
        found = [(held.step, float(holdfast.read(held.path)["a"][0])) for held in holdfast.follow(tmp_path, until=over)]
    assert found == ([] if change == "delete" else [(2, 7.0)])


def test_a_run_may_begin_later(tmp_path: Path) -> None:
    followed = holdfast.follow(tmp_path / "run")
    with Poll.patched(lambda: None, lambda: save(tmp_path / "run", 5)):
        assert next(followed).step == 5


def test_the_end_is_told_by_an_event_or_a_function(tmp_path: Path) -> None:
    save(tmp_path, 1)
    ended = threading.Event()
    followed = holdfast.follow(tmp_path, until=ended, poll_s=0.001)
    assert next(followed).step == 1
    ended.set()
    save(tmp_path, 2)
    assert [held.step for held in followed] == [2], "what is there when the run is over still comes"
    answers = iter([False, False, True])
    with Poll.patched(lambda: None):
        assert [held.step for held in holdfast.follow(tmp_path, until=lambda: next(answers))] == [2]


def test_bad_options_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a step is a whole number"):
        holdfast.follow(tmp_path, start="newest")  # type: ignore[arg-type]
    for poll_s in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="poll_s"):
            holdfast.follow(tmp_path, poll_s=poll_s)
    (tmp_path / "file").touch()
    with pytest.raises(holdfast.NotACheckpointError):
        next(holdfast.follow(tmp_path / "file"))


def test_a_reader_needs_to_write_to_the_root(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / ".holdfast").touch()
    with pytest.raises(holdfast.StorageError, match=r"cannot create .*\.holdfast"):
        next(holdfast.follow(tmp_path))


def test_a_step_that_cannot_be_held_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1)
    real, calls = os.link, itertools.count()

    def link(*args: Any, **kwargs: Any) -> None:
        if next(calls):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(*args, **kwargs)

    with mock.patch.object(os, "link", link), pytest.raises(holdfast.StorageError, match="No space left"):
        next(holdfast.follow(tmp_path))
    assert readers(tmp_path) == []


def test_the_lock_is_held_while_a_step_is_not(tmp_path: Path) -> None:
    """A reader between two steps lives, and its folder must not be taken from it."""
    save(tmp_path, 1)
    followed = holdfast.follow(tmp_path)
    next(followed).release()
    (name,) = readers(tmp_path)
    with open(tmp_path / ".holdfast" / "readers" / name, "rb") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    save(tmp_path, 2)
    assert next(followed).step == 2


def test_iterating_is_typed(tmp_path: Path) -> None:
    followed: Iterator[holdfast.HeldStep] = holdfast.follow(tmp_path, until=over)
    assert list(followed) == []
