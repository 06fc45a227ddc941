"""A seeded sample of the parts of ``make torture`` that damage data: each must find no violation.

They run in a process of their own: some fork, some watch the interpreter, one changes its user.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
LEAST = {
    "bitflips": 80,
    "truncation": 130,
    "hostile": 500,
    "fuzz": 2_000,
    "concurrency": 8,
    "permissions": 30,
    "memory": 15,
    "clock": 10,
    "fresh-targets": 50,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each part told."""
    output = tmp_path_factory.mktemp("torture")
    command = [sys.executable, "torture/run.py", "--quick", "--seed", "7", "--output", str(output), "--part", *LEAST]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=500)
    assert (output / "torture.json").exists(), done.stdout[-3000:] + done.stderr[-3000:]
    parts: dict[str, Any] = json.loads((output / "torture.json").read_text())
    return parts


@pytest.mark.parametrize("part", LEAST)
def test_no_violation(results: dict[str, Any], part: str) -> None:
    result = results[part]
    if result["skipped"]:
        pytest.skip(result["skipped"])
    assert result["violations"] == []
    assert result["injected"] >= LEAST[part]
