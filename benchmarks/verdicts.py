"""What the project promises of its speed and memory, held against what was measured. Pure: numbers in, verdicts out."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from contestants import HOLDFAST, RAW, SAFETENSORS, TORCH_DCP
from peak_memory import Peak
from race import COLD, SAVE, WARM, Race
from rank_race import FROM_OTHER_DIM, FROM_OTHER_RANKS

LARGE, SMALL, ON_RANKS, ON_REPLICAS = "large", "small", "ranks", "replicas"
PEAK_LIMIT = 256 * 2**20
# A read of one block more where a file ends is no second read of it.
MOST_READS_OF_A_BYTE = 1.02

# state -> phase -> (holdfast's speed must be at least this many times that of ...)
REQUIRED: dict[str, dict[str, dict[str, float]]] = {
    LARGE: {
        SAVE: {RAW: 0.85, TORCH_DCP: 3.0},
        COLD: {RAW: 0.85, TORCH_DCP: 3.0},
        WARM: {TORCH_DCP: 4.0, SAFETENSORS: 0.8},
    },
    SMALL: {
        SAVE: {TORCH_DCP: 10.0, SAFETENSORS: 1.0},
        COLD: {TORCH_DCP: 10.0, SAFETENSORS: 1.0},
        WARM: {TORCH_DCP: 10.0, SAFETENSORS: 1.0},
    },
    ON_RANKS: {
        SAVE: {RAW: 0.85, TORCH_DCP: 3.0},
        COLD: {RAW: 0.85, TORCH_DCP: 3.0},
        FROM_OTHER_RANKS: {RAW: 0.8},
        FROM_OTHER_DIM: {RAW: 0.8, TORCH_DCP: 4.0},
    },
    ON_REPLICAS: {COLD: {TORCH_DCP: 3.0}},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One promise: what was measured, what is required, and whether that holds."""

    what: str
    measured: str
    required: str
    passed: bool


def ratio(race: Race, phase: str, other: str) -> float | None:
    """Holdfast's speed over that of ``other``; nothing when either did not take part."""
    ours, theirs = race.speed(phase, HOLDFAST), race.speed(phase, other)
    return ours / theirs if ours and theirs else None


def race_verdicts(race: Race) -> list[Verdict]:
    """A verdict for every promise about the race's state whose both sides took part."""
    return [
        Verdict(
            what=f"{race.state}: {phase} against {other}",
            measured=f"{measured:.2f}x",
            required=f">= {least:g}x",
            passed=measured >= least,
        )
        for phase, promises in REQUIRED.get(race.state, {}).items()
        for other, least in promises.items()
        if (measured := ratio(race, phase, other)) is not None
    ]


def fetch_verdicts(race: Race) -> list[Verdict]:
    """Whether holdfast read each byte from the disk once, where that was counted."""
    counts = race.fetched.get(HOLDFAST)
    if not counts:
        return []
    # The kernel also counts the program's own pages that it had to bring in again.
    times = statistics.median(counts)
    return [
        Verdict(
            what=f"{race.state}: {COLD}, how often a byte is read from the disk",
            measured=f"{times:.2f}x",
            required="once",
            passed=times <= MOST_READS_OF_A_BYTE,
        )
    ]


def peak_verdicts(peaks: list[Peak]) -> list[Verdict]:
    """A verdict for every measured peak."""
    return [
        Verdict(
            what=f"memory beyond the {'state' if peak.operation == SAVE else 'target'}: {peak.operation}, {peak.state}",
            measured=f"{peak.beyond / 2**20:.0f} MiB",
            required=f"<= {PEAK_LIMIT // 2**20} MiB",
            passed=peak.beyond <= PEAK_LIMIT,
        )
        for peak in peaks
    ]
