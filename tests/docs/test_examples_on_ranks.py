"""The examples on several ranks resume what another layout saved."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import holdfast

if TYPE_CHECKING:
    from tools.crew import Crew

EXAMPLES = Path(__file__).parents[2] / "examples"


def torchrun(ranks: int, script: str, *arguments: str, cwd: Path | None = None, stop_at: Path | None = None) -> str:
    """What ``script`` printed on ``ranks`` ranks; no process of it is left. SIGTERM comes once ``stop_at`` is there."""
    started = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
         str(EXAMPLES / script), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(holdfast.__file__).parents[1])},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd,
    )  # fmt: skip
    try:
        while stop_at is not None and not stop_at.exists() and started.poll() is None:
            time.sleep(0.01)
        if stop_at is not None:
            started.terminate()
        output, errors = started.communicate(timeout=300)
    finally:
        if started.poll() is None:
            started.terminate()  # it ends its workers; SIGKILL would leave them
            started.communicate(timeout=300)
    assert started.returncode == 0 or stop_at is not None, errors
    return output


def losses_after_loading(output: str) -> list[float]:
    found = re.fullmatch(r".* ranks: the same losses after loading: (\[.*\])\n", output)
    assert found is not None, output
    losses: list[float] = json.loads(found[1])
    assert len(losses) == 3
    return losses


def run_example(name: str, checkpoint: Path, resume: Path | None) -> str:
    """What an example prints on this rank."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        example = importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))
    with contextlib.redirect_stdout(io.StringIO()) as output:
        example.main(checkpoint, resume)
    return output.getvalue()


@pytest.fixture(scope="module")
def saved_on_four_ranks(pool: Crew, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A checkpoint of the FSDP2 example, and the losses of the steps after it."""
    path = tmp_path_factory.mktemp("fsdp2") / "ck"
    output, *others = pool.run(4, run_example, "fsdp2", path, None)
    assert others == [""] * 3
    return path, losses_after_loading(output)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "is_started_by_torchrun"),
    [
        ("fsdp2", 2, True),
        ("fsdp2", 2, False),
        ("ddp", 2, False),
        ("hsdp", 4, False),
        ("fsdp2_tensor_parallel", 4, False),
    ],
)
def test_an_example_on_ranks_resumes_what_another_layout_saved(
    pool: Crew,
    name: str,
    ranks: int,
    is_started_by_torchrun: bool,
    saved_on_four_ranks: tuple[Path, list[float]],
    tmp_path: Path,
) -> None:
    saved, expected = saved_on_four_ranks
    if is_started_by_torchrun:
        output = torchrun(ranks, f"{name}.py", str(tmp_path / "ck"), "--resume", str(saved))
    else:
        output = pool.run(ranks, run_example, name, tmp_path / "ck", saved)[0]
    assert losses_after_loading(output) == pytest.approx(expected, rel=1e-5)
    with holdfast.open(tmp_path / "ck") as resaved, holdfast.open(saved) as original:
        assert sorted(resaved) == sorted(original)


@pytest.mark.slow
def test_the_recipe_of_the_guide_is_stopped_by_torchrun_and_goes_on_on_other_ranks(tmp_path: Path) -> None:
    guide = (EXAMPLES.parent / "docs" / "guides" / "steps.md").read_text()
    recipe = guide.partition("```python\n# train.py\n")[2].partition("```")[0]
    assert 0 < len(recipe.splitlines()) <= 30
    steps = holdfast.Steps(tmp_path / "runs" / "b")
    (tmp_path / "long.py").write_text(recipe.replace("100)", "1_000_000)"))
    torchrun(2, str(tmp_path / "long.py"), cwd=tmp_path, stop_at=tmp_path / "runs" / "b" / "step-20" / "manifest.json")
    stopped = steps.latest()
    assert stopped is not None
    assert stopped.world_size == 2
    assert holdfast.verify(stopped.path).ok
    end = stopped.step + 50
    (tmp_path / "short.py").write_text(recipe.replace("100)", f"{end})"))
    torchrun(1, str(tmp_path / "short.py"), cwd=tmp_path)
    latest = steps.latest()
    assert latest is not None
    assert (latest.step, latest.world_size) == ((end - 1) // 20 * 20, 1)
