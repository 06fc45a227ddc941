"""Who is lost, when, and what is said of it: by a clock that only moves when told."""

from __future__ import annotations

import pytest

from holdfast._coord.watch import Watch
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
    return Watch(names=[4, 5, 6, 7], carrier=0, patience=Patience(), clock=clock)


def pass_time(watch: Watch, clock: HandClock, seconds: float) -> None:
    """Time in which we look every second and hear our own echo, as a rank that runs does."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now = min(end, clock.now + 1.0)
        watch.look()
        watch.echo()


def overdue(
    watch: Watch, since: float, awaited: tuple[int, ...] = (2,), excuse_waiting: bool = False
) -> dict[int, str]:
    lost = watch.overdue(awaited, phase="writing", since=since, excuse_waiting=excuse_waiting)
    return {rank: str(error) for rank, error in lost.items()}


def test_silence_after_the_last_beat_is_death(watch: Watch, clock: HandClock) -> None:
    watch.see(2, Sign(beat=1, phase="writing", progress=4096))
    pass_time(watch, clock, 9.9)
    assert watch.silent("planning") == {}
    pass_time(watch, clock, 0.1)
    (lost,) = watch.silent("planning").items()
    assert lost[0] == 2
    assert (lost[1].rank, lost[1].phase) == (6, "writing")
    assert str(lost[1]) == (
        "rank 6 gave no sign of life for 10 s in 'writing' (4,096 bytes done); see whether it was killed or stopped"
    )


def test_a_rank_that_beats_is_alive(watch: Watch, clock: HandClock) -> None:
    for beat in range(100):
        watch.see(2, Sign(beat=beat, phase="writing"))
        pass_time(watch, clock, 5)
        assert watch.silent("writing") == {}


def test_a_rank_that_left_is_not_missed(watch: Watch, clock: HandClock) -> None:
    watch.see(2, Sign(beat=1, phase="writing"))
    assert watch.present(2)
    watch.leave(2)
    pass_time(watch, clock, 1000)
    assert watch.silent("writing") == {}
    assert watch.left == {2}
    assert not watch.present(2)


def test_a_rank_that_left_too_early_is_lost_at_once(watch: Watch, clock: HandClock) -> None:
    watch.see(2, Sign(beat=1, phase="writing"))
    watch.leave(2)
    assert overdue(watch, clock.now) == {2: "rank 6 left before 'writing'; make the same calls on every rank"}


def test_our_own_beats_not_coming_back_is_the_carriers_death(watch: Watch, clock: HandClock) -> None:
    for _ in range(10):
        assert watch.unreachable("writing") == {}
        clock.now += 1
        watch.look()
    (lost,) = watch.unreachable("writing").items()
    assert (lost[0], lost[1].rank, lost[1].phase) == (0, 4, "writing")
    watch.see(0, Sign(beat=1, phase="planning"))
    (lost,) = watch.unreachable("writing").items()
    assert str(lost[1]).startswith("rank 4 gave no sign of life for 10 s in 'writing'; ")
    # Not every rank has got the last of its signs, and all are to say the same.
    watch.see(0, Sign(beat=2, phase="writing", progress=7, file="data-1"))
    assert str(watch.unreachable("writing")[0]).startswith("rank 4 gave no sign of life for 10 s in 'writing'; ")


def test_who_is_cut_off_judges_nobody_but_the_carrier(watch: Watch, clock: HandClock) -> None:
    assert not watch.is_cut_off
    clock.now += 3.0
    assert not watch.is_cut_off
    clock.now += 0.1
    assert watch.is_cut_off
    watch.echo()
    assert not watch.is_cut_off


def test_a_pause_of_our_own_is_nobodys_silence(watch: Watch, clock: HandClock) -> None:
    watch.see(2, Sign(beat=1, phase="writing"))
    clock.now += 1000
    assert watch.look() == 1000
    assert watch.silent("writing") == {}
    assert watch.unreachable("writing") == {}
    for _ in range(10):
        clock.now += 1
        watch.look()
    assert set(watch.silent("writing")) == {2}
    assert set(watch.unreachable("writing")) == {0}


def test_whoever_was_stopped_for_long_has_been_given_up(watch: Watch) -> None:
    assert watch.given_up(1, 7.9, "writing") == {}
    (lost,) = watch.given_up(1, 8.0, "writing").items()
    assert (lost[0], lost[1].rank) == (1, 5)
    assert str(lost[1]) == "rank 5 was stopped for 8 s in 'writing', so the others have given it up; try again"


def test_staleness_tells_that_nobody_looks(watch: Watch, clock: HandClock) -> None:
    clock.now += 1
    assert not watch.is_stale
    clock.now += 0.5
    assert watch.is_stale
    watch.look()
    assert not watch.is_stale


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


def test_a_coordinator_that_waits_is_excused_one_that_works_is_not(watch: Watch, clock: HandClock) -> None:
    start = clock.now
    watch.see(0, Sign(beat=1, phase="writing", working=False))
    pass_time(watch, clock, 500)
    assert overdue(watch, start, awaited=(0,), excuse_waiting=True) == {}
    watch.see(0, Sign(beat=2, phase="writing", working=True))
    pass_time(watch, clock, 120)
    assert set(overdue(watch, start, awaited=(0,), excuse_waiting=True)) == {0}


def test_a_broken_connection_names_the_carrier(watch: Watch) -> None:
    (lost,) = watch.broken("planning").items()
    assert lost[0] == 0
    assert str(lost[1]) == ("rank 4 is gone: the connection to it broke in 'planning'; look at that rank")
