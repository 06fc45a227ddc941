"""``make demo`` holds what it says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_the_demonstration_holds(tmp_path: Path) -> None:
    environment = {**os.environ, "COLUMNS": "100", "PYTHONPATH": str(Path(holdfast.__file__).parents[1])}
    try:
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / "demo.py")], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        assert "bit-equal" in done.stdout
        assert "losses are those of 4 ranks" in done.stdout
        assert "holds no finished checkpoint" in done.stdout
        assert "Everything held" in done.stdout
        assert (tmp_path / "demo-output" / "loss.png").stat().st_size > 10_000
    finally:
        # Some hundred megabytes that pytest would keep.
        shutil.rmtree(tmp_path / "demo-output", ignore_errors=True)
