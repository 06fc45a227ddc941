"""Hostile checkpoints in all formats, looked at in every way there is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from torture import hostile_torch
from torture.crew import REPOSITORY
from torture.part import Options, PartResult

NAME = "hostile"


def run(options: Options) -> PartResult:
    """Have a process look at every case, and collect what it tells."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(REPOSITORY / "src"), str(REPOSITORY)))}
    command = [sys.executable, "-m", "torture.hostile", str(options.folder), *["--quick"] * options.quick]
    violations: list[str] = []
    counts = {"native": 0, "torch": 0, "folder": 0, "pt": 0, "looks": 0}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            told = json.loads(line)
            counts[told["name"].partition(":")[0]] += 1
            counts["looks"] += told["looks"]
            violations += [f"{told['name']}: {problem}" for problem in told["problems"]]
            done = sum(counts.values()) - counts["looks"]
            options.progress(done, done)
    if process.returncode:
        violations.append(f"the process that looks ended with {process.returncode}")
    return PartResult(
        fault="hostile checkpoints, native and torch format, Hugging Face folders, and .pt files",
        must_hold="a library error in < 100 ms (2 s for keys that collide), < 64 MB growth, nothing opened outside, "
        "nothing executed",
        injected=sum(counts.values()) - counts["looks"],
        required=700,
        violations=violations,
        counts=counts,
        torch=None if options.quick else _torch_itself(options.folder / "torch"),
    )


def _torch_itself(folder: Path) -> str:
    """How many of the pickles that run code torch's own load runs, each in a process that may be harmed."""
    folder.mkdir()
    hostile_torch.CANARY = folder / "canary"
    cases = hostile_torch.cases(folder)
    names = [f"{title} in place of the whole" for title in ("os.system", "subprocess", "eval", "exec", "open")]
    ran = 0
    for name in names:
        cases[name](folder / "case")
        script = (
            "import sys, torch, torch.distributed.checkpoint as dcp\n"
            "try: dcp.load({'weight': torch.zeros(4, 6)}, checkpoint_id=sys.argv[1])\n"
            "except BaseException: pass\n"
        )
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, str(folder / "case")], capture_output=True, timeout=60
        )
        if hostile_torch.CANARY.exists():
            ran += 1
            hostile_torch.CANARY.unlink()
        shutil.rmtree(folder / "case")
    return f"{ran} of {len(names)} pickles in .metadata run"
