"""Who is lost, when, and what is said of it: by a clock that only moves when told."""

from __future__ import annotations

import pytest

from holdfast._ranks.ranks import Watch
from holdfast._values.deadline import Patience, Sign


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
        "look at what it hangs on, or allow more with deadline_s"
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
    assert str(lost[1]) == "rank 5 was stopped for 118 s in 'writing', so the others have given it up; try again"


def test_no_progress_in_the_phase_we_wait_in_is_a_hang(watch: Watch, clock: HandClock) -> None:
    start = clock.now
    for beat in range(120):
        watch.see(2, Sign(beat=beat, phase="writing", progress=7))
        assert overdue(watch, start) == {}
        pass_time(watch, clock, 1)
    said = (
        "rank 6 made no progress for 120 s in 'writing' (7 bytes done); "
        "look at what it hangs on, or allow more with deadline_s"
    )
    assert overdue(watch, start + 1) == {}
    assert overdue(watch, start) == {2: said}
    assert overdue(watch, start, awaited=(1, 3)) == {
        1: "rank 5 did not come to 'writing' within 120 s; look at that rank",
        3: "rank 7 did not come to 'writing' within 120 s; look at that rank",
    }


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
        2: "rank 6 made no progress for 120 s in 'planning'; look at what it hangs on, or allow more with deadline_s"
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
