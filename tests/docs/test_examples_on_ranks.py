"""The examples on several ranks resume what another layout saved."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast

EXAMPLES = Path(__file__).parents[2] / "examples"


def torchrun(ranks: int, script: str, *arguments: str) -> str:
    """What ``script`` printed on ``ranks`` ranks; no process of it is left."""
    started = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
         str(EXAMPLES / script), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(holdfast.__file__).parents[1])},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        output, errors = started.communicate(timeout=300)
    finally:
        if started.poll() is None:
            started.terminate()  # it ends its workers; SIGKILL would leave them
            started.communicate(timeout=300)
    assert started.returncode == 0, errors
    return output


def losses_after_loading(output: str) -> list[float]:
    found = re.fullmatch(r".* ranks: the same losses after loading: (\[.*\])\n", output)
    assert found is not None, output
    losses: list[float] = json.loads(found[1])
    assert len(losses) == 3
    return losses


@pytest.fixture(scope="module")
def saved_on_four_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A checkpoint of the FSDP2 example, and the losses of the steps after it."""
    path = tmp_path_factory.mktemp("fsdp2") / "ck"
    return path, losses_after_loading(torchrun(4, "fsdp2.py", str(path)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "ranks"), [("fsdp2.py", 2), ("ddp.py", 2), ("hsdp.py", 4), ("fsdp2_tensor_parallel.py", 4)]
)
def test_an_example_on_ranks_resumes_what_another_layout_saved(
    script: str, ranks: int, saved_on_four_ranks: tuple[Path, list[float]], tmp_path: Path
) -> None:
    saved, expected = saved_on_four_ranks
    output = torchrun(ranks, script, str(tmp_path / "ck"), "--resume", str(saved))
    assert losses_after_loading(output) == pytest.approx(expected, rel=1e-5)
    with holdfast.open(tmp_path / "ck") as resaved, holdfast.open(saved) as original:
        assert sorted(resaved) == sorted(original)
