"""Ranks in phases: what they say to each other of failures, who differs, who is lost."""

from __future__ import annotations

import errno
import pickle
from typing import Any

import pytest

from holdfast._ranks.ranks import Failure, Ranks, Watch, agreed, combine, describe, pack, unpack
from holdfast._torch_codec.pickles import encode_message
from holdfast._values.deadline import Patience, Sign
from holdfast.errors import (
    CheckpointError,
    CorruptError,
    InvalidStateError,
    NotFoundError,
    RankDisagreementError,
    RankLostError,
    StorageError,
)

# --- one process is all the ranks there are ---------------------------------------------------------------------------


def test_both_kinds_of_phase_merge_the_one_part() -> None:
    ranks = Ranks()
    with ranks as entered:
        assert entered is ranks
        assert ranks.reduce_scatter("planning", lambda: 2, lambda parts: [sum(parts) + 1]) == 3
        assert ranks.all_reduce("writing", lambda: 2, lambda parts: parts) == [2]
        assert ranks.locally("staging", lambda: 2) == 2
        ranks.again()
        ranks.follow(lambda: 7, str)
        ranks.check()
    assert (ranks.rank, ranks.size, ranks.is_coordinator) == (0, 1, True)


def raising(error: BaseException) -> None:
    raise error


def test_errors_are_named_by_phase_and_interrupts_pass() -> None:
    ranks = Ranks()
    with pytest.raises(CheckpointError, match=r"^writing failed: ValueError: odd$") as caught:
        ranks.all_reduce("writing", lambda: raising(ValueError("odd\nmore")), lambda parts: None)
    assert isinstance(caught.value.__cause__, ValueError)
    assert list(caught.value.failures) == [0]
    with pytest.raises(CheckpointError, match=r"^staging failed: ValueError: odd$"):
        ranks.locally("staging", lambda: raising(ValueError("odd")))
    with pytest.raises(StorageError, match=r"^full$"):
        ranks.reduce_scatter("writing", lambda: raising(StorageError("full")), lambda parts: parts)
    with pytest.raises(KeyboardInterrupt):
        ranks.all_reduce("writing", lambda: raising(KeyboardInterrupt()), lambda parts: None)


# --- who differs, in words --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [{}, {0: "a"}, {0: "a", 1: "a", 2: "a"}])
def test_the_same_is_agreement(said: dict[int, str]) -> None:
    agreed("path", said)


def test_the_minority_is_named() -> None:
    said = {0: "'a'", 1: "'a'", 2: "'a'", 3: "'b'", 5: "'a'"}
    with pytest.raises(RankDisagreementError) as caught:
        agreed("checkpoint path", said)
    error = pickle.loads(pickle.dumps(caught.value))
    assert str(error) == (
        "the ranks disagree on the checkpoint path: ranks 0-2 and 5 say 'a', rank 3 says 'b'; "
        "use the same one on every rank"
    )
    assert error.said == said
    assert list(error.failures) == [3]
    assert str(error.failures[3][0]) == "rank 3 said 'b'"


def test_all_different_stays_readable() -> None:
    with pytest.raises(RankDisagreementError, match=r"rank 0 says 0+\.\.\., .* and 6 other answers;") as caught:
        agreed("path", {rank: str(rank) * 1000 for rank in range(10)})
    assert len(str(caught.value)) < 1200
    assert len(caught.value.failures) == 9


# --- errors on their way to other ranks: classes kept, ranks named, hostile exceptions harmless -----------------------


class CannotPickle(ValueError):
    def __reduce__(self) -> Any:
        raise RuntimeError("never")


class CannotUnpickle(ValueError):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class UnpicklableStorageError(StorageError):
    def __reduce__(self) -> Any:
        raise RuntimeError("never")


class CannotPrint(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("never")


class CannotCopy(CorruptError):
    def __copy__(self) -> CannotCopy:
        raise RuntimeError("never")


def caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:
        return raised


def told(error: BaseException, rank: int = 3) -> Failure:
    failure = describe(caught(error), rank=rank, phase="writing")
    (arrived,) = unpack(pack({rank: failure})).values()
    return arrived


def combined(*failures: Failure, own: dict[int, BaseException] | None = None) -> CheckpointError:
    return combine({failure.rank: failure for failure in failures}, own or {})


def test_an_error_of_ours_keeps_class_and_attributes() -> None:
    error = combined(told(StorageError("no space; free some", errno=errno.ENOSPC, path="/data")))
    assert type(error) is StorageError
    assert str(error) == "rank 3: no space; free some"
    assert (error.errno, error.path) == (errno.ENOSPC, "/data")
    assert list(error.failures) == [3]
    assert str(error.failures[3][0]) == "no space; free some"
    assert error.__cause__ is None


def test_an_error_of_others_is_wrapped_with_rank_phase_and_type() -> None:
    error = combined(told(ValueError("odd\nand more")))
    assert type(error) is CheckpointError
    assert str(error) == "rank 3: writing failed: ValueError: odd"
    original, stack = error.failures[3]
    assert repr(original) == repr(ValueError("odd\nand more"))
    assert stack[-1].name == "caught"


def test_the_lowest_rank_is_the_root_and_all_are_kept() -> None:
    error = combined(told(ValueError("b"), 2), told(NotFoundError("a"), 1), told(KeyError("c"), 5))
    assert type(error) is NotFoundError
    assert str(error) == "rank 1: a"
    kinds = {rank: type(one) for rank, (one, stack) in error.failures.items() if stack}
    assert kinds == {1: NotFoundError, 2: ValueError, 5: KeyError}


def test_where_it_happened_the_original_is_the_cause() -> None:
    original = ValueError("odd")
    error = combined(told(StorageError("full"), 1), told(original, 3), own={3: original})
    assert type(error) is StorageError
    assert error.__cause__ is original
    assert error.failures[3][0] is original


@pytest.mark.parametrize(
    ("original", "message"),
    [
        (CannotPickle("odd"), "rank 3: writing failed: CannotPickle: odd"),
        (CannotUnpickle(1, 2), "rank 3: writing failed: CannotUnpickle: 1 and 2"),
        (CannotPrint("odd"), "rank 3: writing failed: CannotPrint: an error that cannot be printed"),
        (KeyboardInterrupt(), "rank 3: writing failed: KeyboardInterrupt"),
        (ValueError(lambda: None), "rank 3: writing failed: ValueError: <function"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_no_exception_is_too_odd_to_be_told(original: BaseException, message: str) -> None:
    error = combined(told(original))
    assert type(error) is CheckpointError
    assert str(error).startswith(message)
    assert isinstance(error.failures[3][0], BaseException)


def test_ours_that_cannot_be_pickled_keeps_its_family() -> None:
    error = combined(told(UnpicklableStorageError("full")))
    assert type(error) is StorageError
    assert str(error) == "rank 3: full"


def test_ours_that_cannot_be_copied_keeps_its_family() -> None:
    error = combined(told(CannotCopy("bad")))
    assert type(error) is CorruptError
    assert str(error) == "rank 3: bad"


def test_an_encoding_that_is_something_else_is_not_raised() -> None:
    failure = Failure(
        rank=0, phase="p", type_name="X", family=None, message="m", stack=[], encoded=encode_message("text")
    )
    assert str(combined(failure)) == "rank 0: p failed: X: m"


@pytest.mark.parametrize("cls", [RankLostError, RankDisagreementError])
def test_errors_that_name_their_ranks_are_not_named_twice(cls: type[CheckpointError]) -> None:
    error = combined(told(cls("rank 3 is gone")))
    assert type(error) is cls
    assert str(error) == "rank 3 is gone"


def test_an_error_made_of_errors_can_be_told_again() -> None:
    error = combined(told(InvalidStateError("bad", key="w")))
    again = combined(told(error, 1))
    assert type(again) is InvalidStateError
    assert str(again) == "rank 1: rank 3: bad"
    assert isinstance(again, InvalidStateError)
    assert again.key == "w"


# --- who is lost, when, and what is said of it: by a clock that only moves when told ----------------------------------


class HandClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def watch(clock: HandClock) -> Watch:
    return Watch(job_ranks=[4, 5, 6, 7], patience=Patience(), clock=clock)


def pass_time(watch: Watch, clock: HandClock, seconds: float) -> None:
    """Time in which we look often, as a rank that runs does."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now = min(end, clock.now + 0.5)
        watch.look()


def overdue(
    watch: Watch, since: float, awaited: tuple[int, ...] = (2,), excuse_waiting: bool = False
) -> dict[int, str]:
    lost = watch.overdue(awaited, phase="writing", since=since, excuse_waiting=excuse_waiting)
    return {rank: str(error) for rank, error in lost.items()}


def test_silence_is_no_death_but_work_without_progress(watch: Watch, clock: HandClock) -> None:
    start = clock.now
    watch.see(2, Sign(beat=1, phase="writing", progress=4096))
    pass_time(watch, clock, 119.5)
    assert overdue(watch, start) == {}
    pass_time(watch, clock, 0.5)
    assert overdue(watch, start) == {
        2: "rank 6 made no progress for 120 s in 'writing' (4,096 bytes done); "
        "find out where it hangs, or raise deadline_s"
    }


def test_whose_connection_ended_is_gone_unless_it_was_through(watch: Watch) -> None:
    watch.see(2, Sign(beat=1, phase="writing", progress=4096))
    watch.see(1, Sign(beat=1, phase="writing"))
    watch.left.add(1)
    assert not watch.present(1)
    assert watch.present(2)
    assert watch.left == {1}
    lost = watch.gone([1, 2, 3], "planning")
    said = "is gone: its process or its host died, or the network broke, in"
    assert {rank: (str(error), error.rank, error.phase) for rank, error in lost.items()} == {
        2: (f"rank 6 {said} 'writing' (4,096 bytes done)", 6, "writing"),
        3: (f"rank 7 {said} 'planning'", 7, "planning"),
    }


def test_a_rank_that_left_too_early_is_lost_at_once(watch: Watch, clock: HandClock) -> None:
    watch.see(2, Sign(beat=1, phase="writing"))
    watch.left.add(2)
    assert overdue(watch, clock.now) == {2: "rank 6 left before 'writing'; make the same calls on every rank"}


def test_a_pause_of_our_own_is_nobodys_delay(watch: Watch, clock: HandClock) -> None:
    start = clock.now
    watch.see(2, Sign(beat=1, phase="writing"))
    clock.now += 1000
    assert watch.look() == 1000
    assert overdue(watch, start) == {}
    clock.now += 0.9
    assert watch.look() == 0


def test_whoever_was_stopped_for_long_has_been_given_up(watch: Watch) -> None:
    assert watch.given_up(1, 117.9, "writing") == {}
    (lost,) = watch.given_up(1, 118.0, "writing").items()
    assert (lost[0], lost[1].rank) == (1, 5)
    assert str(lost[1]) == "rank 5 was stopped for 118 s in 'writing', so the other ranks have given it up; try again"


def test_no_progress_in_the_phase_we_wait_in_is_a_hang(watch: Watch, clock: HandClock) -> None:
    start = clock.now
    for beat in range(120):
        watch.see(2, Sign(beat=beat, phase="writing", progress=7))
        assert overdue(watch, start) == {}
        pass_time(watch, clock, 1)
    said = "rank 6 made no progress for 120 s in 'writing' (7 bytes done); find out where it hangs, or raise deadline_s"
    assert overdue(watch, start + 1) == {}
    assert overdue(watch, start) == {2: said}
    assert overdue(watch, start, awaited=(1, 3)) == {
        1: "rank 5 did not come to 'writing' within 120 s; call it on every rank, or pass no_dist=True",
        3: "rank 7 did not come to 'writing' within 120 s; call it on every rank, or pass no_dist=True",
    }


def test_who_has_not_come_at_all_is_noticed_once_before_the_deadline(watch: Watch, clock: HandClock) -> None:
    start = clock.now
    watch.see(2, Sign(beat=1, phase="writing"))
    pass_time(watch, clock, 9.5)
    assert watch.notice((1, 2, 3), since=start) == ""
    pass_time(watch, clock, 0.5)
    assert watch.notice((2,), since=start) == "", "it has come, however long it takes"
    said = watch.notice((1, 2, 3), since=start)
    assert said == "ranks 5 and 7 have not come after 10 s; call it on every rank, or pass no_dist=True"
    assert watch.notice((1, 2, 3), since=start) == ""


@pytest.mark.parametrize(
    ("progress", "file", "place"),
    [
        (7, "data-1.safetensors", "'writing' (7 bytes done, at 'data-1.safetensors')"),
        (0, "manifest.json", "'writing' (at 'manifest.json')"),
        (0, "", "'writing'"),
    ],
)
def test_a_hang_tells_file_and_bytes(watch: Watch, clock: HandClock, progress: int, file: str, place: str) -> None:
    start = clock.now
    for beat in range(121):
        watch.see(2, Sign(beat=beat, phase="writing", progress=progress, file=file))
        pass_time(watch, clock, 1)
    assert overdue(watch, start)[2].startswith(f"rank 6 made no progress for 120 s in {place}; ")


def test_slow_progress_is_no_hang(watch: Watch, clock: HandClock) -> None:
    start = clock.now
    for step in range(20):
        watch.see(2, Sign(beat=step, phase="writing", progress=step))
        pass_time(watch, clock, 100)
        assert overdue(watch, start) == {}


def test_a_rank_still_on_its_way_has_time_from_when_we_wait(watch: Watch, clock: HandClock) -> None:
    watch.see(2, Sign(beat=1, phase="planning", working=False))
    pass_time(watch, clock, 1000)
    start = clock.now
    assert overdue(watch, start) == {}
    pass_time(watch, clock, 119)
    assert overdue(watch, start) == {}
    pass_time(watch, clock, 1)
    assert overdue(watch, start) == {
        2: "rank 6 made no progress for 120 s in 'planning'; find out where it hangs, or raise deadline_s"
    }


def test_a_coordinator_that_says_that_it_waits_is_excused(watch: Watch, clock: HandClock) -> None:
    start = clock.now
    for beat in range(500):
        watch.see(0, Sign(beat=beat, phase="writing", working=False))
        pass_time(watch, clock, 1)
    assert overdue(watch, start, awaited=(0,), excuse_waiting=True) == {}
    pass_time(watch, clock, 120)
    assert set(overdue(watch, start, awaited=(0,), excuse_waiting=True)) == {0}


def test_a_coordinator_that_works_is_not_excused(watch: Watch, clock: HandClock) -> None:
    start = clock.now
    for beat in range(121):
        watch.see(0, Sign(beat=beat, phase="writing"))
        pass_time(watch, clock, 1)
    assert set(overdue(watch, start, awaited=(0,), excuse_waiting=True)) == {0}
