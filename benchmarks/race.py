"""One race: all contestants save one state, load it cold and load it warm, round after round in alternating order.

Only the contestant's own call is timed. Removing old files, writing back, dropping or filling caches and comparing what
was loaded all happen outside. Everyone's first loads are compared byte by byte; a difference ends the run.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from contestants import Contestant
from disk import drop_caches, empty_folder, read_through_cache, require_space
from states import Shapes, State, byte_count, clear, different_keys, empty_state, random_state

SAVE, COLD, WARM = "save", "cold load", "warm load"
PHASES = (SAVE, COLD, WARM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """The times of one state: ``seconds[phase][contestant]`` has one entry for each round.

    ``fetched[contestant]`` is, where it was counted, how many times each byte of its files was read from the disk.
    """

    state: str
    tensors: int
    total: int
    rounds: int
    phases: tuple[str, ...] = PHASES
    ranks: int = 1
    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    fetched: dict[str, list[float]] = field(default_factory=dict)

    def names(self) -> list[str]:
        """The contestants that saved, in the order of the first round."""
        return list(self.seconds[SAVE])

    def speed(self, phase: str, contestant: str) -> float | None:
        """Bytes per second, the median over the rounds; nothing for whoever did not take part."""
        times = self.seconds.get(phase, {}).get(contestant)
        return self.total / statistics.median(times) if times else None


def run_race(
    name: str,
    shapes: Shapes,
    contestants: list[Contestant],
    *,
    folder: Path,
    rounds: int,
    say: Callable[[str], None],
) -> Race:
    """The race over ``shapes``, its files under ``folder`` removed when it is over."""
    total = byte_count(shapes)
    require_space(folder, int(total * len(contestants) * 1.05) + 2**28)
    say(f"{name}: {len(shapes)} tensors, {total / 1e9:.2f} GB, {rounds} rounds")
    _warm_up(contestants, folder)
    state, target = random_state(shapes), empty_state(shapes)
    race = Race(state=name, tensors=len(shapes), total=total, rounds=rounds)
    for number in range(rounds):
        order = contestants if number % 2 == 0 else contestants[::-1]
        for phase, contestant, seconds in _run_round(order, state, target, folder=folder, check=number == 0):
            race.seconds.setdefault(phase, {}).setdefault(contestant, []).append(seconds)
            say(f"  round {number + 1}  {phase:9}  {contestant:20} {total / seconds / 1e9:6.2f} GB/s")
    for contestant_folder in _folders(contestants, folder):
        empty_folder(contestant_folder).rmdir()
    return race


def _run_round(
    order: list[Contestant], state: State, target: State, *, folder: Path, check: bool
) -> Iterator[tuple[str, str, float]]:
    for contestant in order:
        place = empty_folder(_folder_of(contestant, folder))
        yield SAVE, contestant.name, _timed(contestant.save, state, place)
    for contestant in order:
        drop_caches(_folders(order, folder))
        yield COLD, contestant.name, _load(contestant, state, target, folder=folder, check=check)
    for contestant in order:
        if contestant.loads_data:
            read_through_cache(_folder_of(contestant, folder))
            yield WARM, contestant.name, _load(contestant, state, target, folder=folder, check=check)


def _warm_up(contestants: list[Contestant], folder: Path) -> None:
    """Let everyone do what is done once in a process (late imports, thread pools) before the first round."""
    state = random_state({"warm.up": (64, 64)})
    for contestant in contestants:
        place = empty_folder(_folder_of(contestant, folder))
        contestant.save(state, place)
        contestant.load(state, place)


def _load(contestant: Contestant, state: State, target: State, *, folder: Path, check: bool) -> float:
    if check:
        clear(target)
    seconds = _timed(contestant.load, target, _folder_of(contestant, folder))
    if check and contestant.loads_data:
        wrong = different_keys(state, target)
        if wrong:
            raise SystemExit(
                f"{contestant.name} loaded other bytes than it saved: {len(wrong)} keys, first {wrong[0]!r}"
            )
    return seconds


def _timed(action: Callable[[State, Path], None], state: State, folder: Path) -> float:
    gc.collect()
    start = time.perf_counter()
    action(state, folder)
    return time.perf_counter() - start


def _folder_of(contestant: Contestant, folder: Path) -> Path:
    return folder / "".join(letter if letter.isalnum() else "-" for letter in contestant.name)


def _folders(contestants: Iterable[Contestant], folder: Path) -> list[Path]:
    return [_folder_of(contestant, folder) for contestant in contestants]
