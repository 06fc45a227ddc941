"""Run real programs that save with torch.distributed.checkpoint on native storage, and print what came of each.

The exit code is 0 when every client that can run on this machine did what it should; one that cannot is listed with the
reason. ``python integrations/run.py [client ...]`` chooses.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
RANKS = 2
TIMEOUT_S = 300
CANNOT_RUN = 77
CLIENTS = {
    "accelerate_fsdp2": "accelerate",
    "fabric_model_parallel": "lightning",
    "torchtitan_manager": "torchtitan",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a client: ``result`` is "passed", "cannot run here" or "FAILED"."""

    client: str
    version: str
    result: str
    note: str


def run(client: str) -> Outcome:
    """What comes of ``client`` on two ranks over gloo."""
    try:
        version = f"{CLIENTS[client]} {importlib.metadata.version(CLIENTS[client])}"
    except importlib.metadata.PackageNotFoundError:
        return Outcome(client=client, version=CLIENTS[client], result="cannot run here", note="it is not installed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory(prefix="holdfast-integration-") as directory:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        try:
            done = subprocess.run(
                [*command, str(HERE / f"{client}.py"), directory],
                capture_output=True,
                text=True,
                check=False,
                timeout=TIMEOUT_S,
                env=environment,
            )
        except subprocess.TimeoutExpired:
            return Outcome(client=client, version=version, result="FAILED", note=f"not done after {TIMEOUT_S} s")
    notes = [json.loads(line)["note"] for line in done.stdout.splitlines() if line.startswith('{"note": ')]
    note = notes[-1] if notes else ""
    if done.returncode == 0 and notes:
        return Outcome(client=client, version=version, result="passed", note=note)
    # The launcher has an exit code of its own, and tells those of the ranks in its report.
    if notes and f"exitcode  : {CANNOT_RUN} " in done.stderr:
        return Outcome(client=client, version=version, result="cannot run here", note=note)
    print(done.stderr[-6000:], file=sys.stderr)
    return Outcome(client=client, version=version, result="FAILED", note="see its output above")


def main() -> int:
    """Run the clients that the command line names, or all, and return the exit code."""
    unknown = sorted(set(sys.argv[1:]) - set(CLIENTS))
    if unknown:
        print(f"no such client: {', '.join(unknown)}; there are {', '.join(CLIENTS)}", file=sys.stderr)
        return 2
    outcomes = [run(client) for client in sys.argv[1:] or CLIENTS]
    print(f"torch {importlib.metadata.version('torch')}, {RANKS} ranks, CPU and gloo, native storage by use_in_torch()")
    for outcome in outcomes:
        print(f"{outcome.client:22} {outcome.version:20} {outcome.result:16} {outcome.note}")
    return int(any(outcome.result == "FAILED" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
