"""Run real programs of the frameworks, under torchrun on CPU and gloo, and print a table of what came of each.

The exit code is 0 when every case that can run on this machine did what it should; one that cannot is listed with the
reason. ``python integrations/run.py [word ...]`` chooses those whose framework or name has one of the words. Two cases
run at a time, because ranks wait a lot; ``HOLDFAST_CASES_AT_ONCE`` is another number.

A case (``cases.py``) is one or more launches of a script of this folder, one after the other, with one directory that
stays. The script gets that directory and the name of the action, and prints what it has checked as its last line
(``client.py``).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cases import CASES, Case, Launch

HERE = Path(__file__).parent
TIMEOUT_S = 900
OWN_RANKS_TIMEOUT_S = 1200  # what starts ranks itself starts services too, and starts them again
CANNOT_RUN = 77
AT_ONCE = int(os.environ.get("HOLDFAST_CASES_AT_ONCE", "2"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a case: ``result`` is "passed", "not run here" or "FAILED"."""

    result: str
    note: str


def launched(case: Case, launch: Launch, directory: str) -> Outcome:
    """What comes of one launch."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # a hundred processes import the package, which is compiled once
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={launch.ranks}"]
    command = [sys.executable, *([] if launch.starts_ranks else torchrun)]
    timeout_s = OWN_RANKS_TIMEOUT_S if launch.starts_ranks else TIMEOUT_S
    try:
        done = subprocess.run(
            [*command, str(HERE / case.script), directory, launch.action],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return Outcome(result="FAILED", note=f"{launch.action}: not done after {timeout_s} s")
    notes = [json.loads(line)["note"] for line in done.stdout.splitlines() if line.startswith('{"note": ')]
    note = notes[-1] if notes else ""
    # The launcher has an exit code of its own, and tells those of the ranks in its report.
    if launch.is_killed and "exitcode  : -9 " in done.stderr and not notes:
        return Outcome(result="passed", note="killed")
    if done.returncode == 0 and notes and not launch.is_killed:
        return Outcome(result="passed", note=note)
    if notes and (f"exitcode  : {CANNOT_RUN} " in done.stderr or done.returncode == CANNOT_RUN):
        return Outcome(result="not run here", note=note)
    print(done.stdout[-2000:], done.stderr[-6000:], file=sys.stderr)
    expected = "it was to be killed, and was not" if launch.is_killed else "see its output above"
    return Outcome(result="FAILED", note=f"{launch.action} on {launch.ranks} ranks: {expected}")


def run(case: Case) -> Outcome:
    """What comes of all launches of ``case``; the note is that of the last one."""
    try:
        importlib.metadata.version(case.framework)
    except importlib.metadata.PackageNotFoundError:
        return Outcome(result="not run here", note="needs the package, which is not installed")
    outcome = Outcome(result="FAILED", note="it has no launches")
    with tempfile.TemporaryDirectory(prefix="holdfast-integration-") as directory:
        for launch in case.launches:
            outcome = launched(case, launch, directory)
            if outcome.result != "passed":
                break
    return outcome


def row(case: Case) -> tuple[str, bool]:
    """Run ``case``, tell how long it took; its line of the table, and whether that is as it should be."""
    begun = time.monotonic()
    outcome = run(case)
    try:
        version = importlib.metadata.version(case.framework)
    except importlib.metadata.PackageNotFoundError:
        version = "-"
    print(f"{time.monotonic() - begun:4.0f} s {outcome.result:12} {case.framework}, {case.name}", flush=True)
    ranks = ", then ".join(str(launch.ranks) for launch in case.launches)
    line = f"{case.framework:13} {version:9} {case.name:48} {ranks:16} {outcome.result:13} {outcome.note}"
    return line.rstrip(), outcome.result != "FAILED"


def main() -> int:
    """Run the cases that the command line chooses, or all; print the table, and return the exit code."""
    words = sys.argv[1:]
    chosen = [case for case in CASES if not words or any(word in f"{case.framework} {case.name}" for word in words)]
    if not chosen:
        print(f"no case has one of: {', '.join(words)}", file=sys.stderr)
        return 2
    with ThreadPoolExecutor(AT_ONCE) as pool:
        rows = list(pool.map(row, chosen))
    heading = f"{'framework':13} {'version':9} {'case':48} {'ranks':16} {'result':13} what was seen"
    print(
        "",
        f"torch {importlib.metadata.version('torch')}, CPU and gloo",
        heading,
        *(line for line, _ in rows),
        sep="\n",
        flush=True,
    )
    return int(not all(is_well for _, is_well in rows))


if __name__ == "__main__":
    sys.exit(main())
