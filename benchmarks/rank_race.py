"""The race of two ranks: one state as DTensors, saved and loaded cold, in the same layout and in others; and that of
four ranks which all hold, and want, the whole state.

Everything that race.py says of fairness holds here too. A time is that of the slowest rank, from a barrier to a
barrier. The checkpoints of four ranks are written once, by four processes, before the first round. The raw limit reads
the very files that holdfast loads, where it takes part, half of them on each rank: below a virtual disk may be a cache
of the host's, and what one file finds there says nothing of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from contestants import HOLDFAST, RAW, TORCH_DCP, TORCH_DCP_4
from disk import bytes_under, drop_caches, empty_folder, require_space
from peak_memory import Peak
from race import COLD, SAVE, Race
from rank_crew import Job, RankCrew
from states import Shapes, byte_count

RANKS = 2
OTHER_RANKS = 4
FROM_OTHER_RANKS = f"cold load, {OTHER_RANKS} to {RANKS} ranks"
FROM_OTHER_DIM = "cold load, Shard(0) to (1)"
RANK_PHASES = (SAVE, COLD, FROM_OTHER_RANKS, FROM_OTHER_DIM)
REPLICA_PHASES = (SAVE, COLD)
# Who can take part, by short name: whoever knows DTensors, and the limit.
RANK_CONTESTANTS = {"raw": RAW, "holdfast": HOLDFAST, "dcp": TORCH_DCP, "dcp4": TORCH_DCP_4}


def run_rank_race(
    name: str, shapes: Shapes, field: list[str], *, folder: Path, rounds: int, say: Callable[[str], None]
) -> tuple[Race, list[Peak]]:
    """The race between the short names in ``field``, and holdfast's peaks of memory on the same files.

    The files under ``folder`` are removed when it is over.
    """
    require_space(folder, int(2 * byte_count(shapes) * len(field) * 1.05) + 2**28)
    _write_on_other_ranks(shapes, field, folder)
    race = _race(name, shapes, field, folder=folder, rounds=rounds, say=say)
    peaks = _measure_peaks(name, shapes, folder=folder, say=say) if "holdfast" in field else []
    for place in _places(field, folder):
        empty_folder(place).rmdir()
    return race, peaks


def run_replica_race(
    name: str, shapes: Shapes, field: list[str], *, folder: Path, rounds: int, say: Callable[[str], None]
) -> Race:
    """The race of four ranks with a replicated state; how often each byte was read from the disk is counted too."""
    total = byte_count(shapes)
    require_space(folder, int(total * len(field) * 1.05) + 2**28)
    say(f"{name}: {len(shapes)} tensors, {total / 1e9:.2f} GB on each of {OTHER_RANKS} ranks, {rounds} rounds")
    race = Race(state=name, tensors=len(shapes), total=total, rounds=rounds, phases=REPLICA_PHASES, ranks=OTHER_RANKS)
    places = [_place(short, OTHER_RANKS, folder) for short in field]
    with RankCrew(OTHER_RANKS, shapes) as crew:
        _warm_up(crew, field, folder, OTHER_RANKS)
        for number in range(rounds):
            order = field if number % 2 == 0 else field[::-1]
            for phase in REPLICA_PHASES:
                for short in order:
                    place = _place(
                        "holdfast" if short == "raw" and phase == COLD and "holdfast" in field else short,
                        OTHER_RANKS,
                        folder,
                    )
                    if phase == SAVE:
                        empty_folder(place)
                    else:
                        drop_caches(places)
                    outcomes = crew.do(Job(contestant=short, is_save=phase == SAVE, folder=place, dim=None))
                    seconds = max(outcome.seconds for outcome in outcomes)
                    contestant = RANK_CONTESTANTS[short]
                    race.seconds.setdefault(phase, {}).setdefault(contestant, []).append(seconds)
                    if phase == COLD:
                        times = sum(outcome.fetched for outcome in outcomes) / bytes_under(place)
                        race.fetched.setdefault(contestant, []).append(times)
                    say(f"  round {number + 1}  {phase:26}  {contestant:20} {total / seconds / 1e9:6.2f} GB/s")
    for place in places:
        empty_folder(place).rmdir()
    return race


def _race(
    name: str, shapes: Shapes, field: list[str], *, folder: Path, rounds: int, say: Callable[[str], None]
) -> Race:
    total = byte_count(shapes)
    say(f"{name}: {len(shapes)} tensors, {total / 1e9:.2f} GB on {RANKS} ranks, {rounds} rounds")
    race = Race(state=name, tensors=len(shapes), total=total, rounds=rounds, phases=RANK_PHASES, ranks=RANKS)
    with RankCrew(RANKS, shapes) as crew:
        _warm_up(crew, field, folder)
        for number in range(rounds):
            order = field if number % 2 == 0 else field[::-1]
            for phase, short, seconds in _run_round(crew, order, folder):
                contestant = RANK_CONTESTANTS[short]
                race.seconds.setdefault(phase, {}).setdefault(contestant, []).append(seconds)
                say(f"  round {number + 1}  {phase:26}  {contestant:20} {total / seconds / 1e9:6.2f} GB/s")
    return race


def _measure_peaks(name: str, shapes: Shapes, *, folder: Path, say: Callable[[str], None]) -> list[Peak]:
    """The memory of the worst rank in every phase; each in new processes, that have done nothing else before."""
    field = ["holdfast"]
    empty_folder(_place("holdfast", RANKS, folder))
    peaks = []
    for phase in RANK_PHASES:
        with RankCrew(RANKS, shapes) as crew:
            drop_caches(_places(field, folder))
            worst = max(crew.do(_job(phase, "holdfast", field, folder)), key=lambda outcome: outcome.beyond)
        peaks.append(Peak(state=name, operation=phase, total=worst.total, beyond=worst.beyond))
        say(f"  memory  {name}  {phase:26}  {worst.beyond / 2**20:6.0f} MiB beyond {worst.total / 1e9:.2f} GB")
    return peaks


def _write_on_other_ranks(shapes: Shapes, field: list[str], folder: Path) -> None:
    writers = [short for short in field if short != "raw"]
    if not writers:
        return
    with RankCrew(OTHER_RANKS, shapes) as crew:
        for short in writers:
            crew.do(Job(contestant=short, is_save=True, folder=empty_folder(_place(short, OTHER_RANKS, folder))))


def _warm_up(crew: RankCrew, field: list[str], folder: Path, ranks: int = RANKS) -> None:
    """Let everyone do what is done once in a process, and once between ranks, before the first round."""
    for short in field:
        place = empty_folder(_place(short, ranks, folder))
        for is_save in (True, False):
            crew.do(Job(contestant=short, is_save=is_save, folder=place, is_warm_up=True))


def _run_round(crew: RankCrew, order: list[str], folder: Path) -> Iterator[tuple[str, str, float]]:
    for phase in RANK_PHASES:
        for short in order:
            if phase == SAVE:
                empty_folder(_place(short, RANKS, folder))
            else:
                drop_caches(_places(order, folder))
            yield phase, short, max(outcome.seconds for outcome in crew.do(_job(phase, short, order, folder)))


def _job(phase: str, short: str, field: list[str], folder: Path) -> Job:
    owner = "holdfast" if short == "raw" and phase != SAVE and "holdfast" in field else short
    writers = OTHER_RANKS if phase == FROM_OTHER_RANKS and owner != "raw" else RANKS
    dim = 1 if phase == FROM_OTHER_DIM else 0
    return Job(contestant=short, is_save=phase == SAVE, folder=_place(owner, writers, folder), dim=dim)


def _place(short: str, writers: int, folder: Path) -> Path:
    return folder / f"{short}-by-{writers}-ranks"


def _places(field: list[str], folder: Path) -> list[Path]:
    return [_place(short, writers, folder) for short in field for writers in (RANKS, OTHER_RANKS)]
