"""How much memory holdfast takes beyond what is saved or loaded into; each case in a process of its own.

Run as a script it is that process: it makes the state resident, resets the kernel's high-water mark, saves or loads,
and prints the difference as one JSON line. Memory that was there before (the interpreter, torch, the state) does not
count; whatever the call itself takes, threads and buffers included, does.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from disk import drop_caches, empty_folder, read_through_cache, require_space
from race import COLD, PHASES, SAVE, WARM
from states import Shapes, State, byte_count, large_shapes, random_state, transposed_state

CONTIGUOUS, STRIDED = "contiguous", "strided"
STRIDED_BYTES = 2**30
QUICK_STRIDED_BYTES = 2**26
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The memory one operation took beyond the state (save) or the target (load)."""

    state: str
    operation: str
    total: int
    beyond: int


def measure_peaks(folder: Path, *, quick: bool, say: Callable[[str], None]) -> list[Peak]:
    """Every operation on both states; the files under ``folder`` are removed afterwards."""
    peaks = []
    for kind in (CONTIGUOUS, STRIDED):
        place = folder / f"memory-{kind}"
        wanted = byte_count(_contiguous_shapes(quick=quick)) if kind == CONTIGUOUS else _strided_bytes(quick=quick)
        require_space(folder, wanted + 2**28)
        empty_folder(place)
        for operation in PHASES:
            peak = _in_new_process(kind, operation, place, quick=quick)
            say(f"  memory  {kind:10}  {operation:9}  {peak.beyond / 2**20:6.0f} MiB beyond {peak.total / 1e9:.2f} GB")
            peaks.append(peak)
        empty_folder(place).rmdir()
    return peaks


def _in_new_process(kind: str, operation: str, place: Path, *, quick: bool) -> Peak:
    command = [sys.executable, __file__, kind, operation, str(place), *(["--quick"] if quick else [])]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"measuring the memory of a {operation} ({kind}) failed:\n{done.stderr}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return Peak(state=kind, operation=operation, total=answer["total"], beyond=answer["beyond"])


def measure_here(kind: str, operation: str, place: Path, *, quick: bool) -> Peak:
    """The peak of one operation in this process, which should have done nothing else before."""
    import holdfast  # here, because the process that starts this one has no need of it

    state = _make_state(kind, quick=quick)
    checkpoint = place / "checkpoint"
    if operation == COLD:
        drop_caches([place])
    if operation == WARM:
        read_through_cache(place)
    reset_high_water_mark()
    before = resident()
    if operation == SAVE:
        holdfast.save(state, checkpoint)
    else:
        holdfast.load(state, checkpoint)
    beyond = max(0, high_water_mark() - before)
    return Peak(state=kind, operation=operation, total=sum(t.nbytes for t in state.values()), beyond=beyond)


def reset_high_water_mark() -> None:
    """Forget earlier peaks, where the kernel can; where it cannot, a peak is at least that of making the state."""
    if _CLEAR_REFS.exists():
        _CLEAR_REFS.write_text("5\n")


def high_water_mark() -> int:
    """The most bytes that were resident at once since the last reset."""
    if _STATUS.exists():
        return _status_bytes("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident() -> int:
    """The bytes that are resident now."""
    return _status_bytes("VmRSS") if _STATUS.exists() else high_water_mark()


def _status_bytes(field: str) -> int:
    lines = _STATUS.read_text(encoding="utf-8").splitlines()
    value = next(line for line in lines if line.startswith(field + ":"))
    return int(value.split()[1]) * 1024


def _make_state(kind: str, *, quick: bool) -> State:
    if kind == STRIDED:
        return transposed_state(total=_strided_bytes(quick=quick))
    return random_state(_contiguous_shapes(quick=quick))


def _strided_bytes(*, quick: bool) -> int:
    return QUICK_STRIDED_BYTES if quick else STRIDED_BYTES


def _contiguous_shapes(*, quick: bool) -> Shapes:
    if not quick:
        return large_shapes()
    return {key: shape for key, shape in large_shapes(layers=1).items() if key.startswith("layers.")}


def main() -> None:
    """Measure one case and print it."""
    parser = argparse.ArgumentParser(description="Peak memory of one holdfast operation, as one line of JSON.")
    parser.add_argument("kind", choices=(CONTIGUOUS, STRIDED))
    parser.add_argument("operation", choices=PHASES)
    parser.add_argument("place", type=Path, help="folder of the checkpoint; a save must come before a load")
    parser.add_argument("--quick", action="store_true", help="a small state")
    arguments = parser.parse_args()
    peak = measure_here(arguments.kind, arguments.operation, arguments.place, quick=arguments.quick)
    print(json.dumps({"total": peak.total, "beyond": peak.beyond}))


if __name__ == "__main__":
    main()
