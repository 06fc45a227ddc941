"""Scripts that know only torch, started by torchrun: native checkpoints without a change to the script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast

SCRIPT = """
import glob, os, sys, warnings
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

warnings.simplefilter("ignore")
assert "holdfast" not in open(__file__).read().replace('"holdfast"', "")
dist.init_process_group("gloo")
root, how = sys.argv[1:]
for step in (1, 2):
    state = {"w": torch.full((10,), float(step)), "step": step}
    place = os.path.join(root, f"step-{step}")
    if how == "async":
        dcp.async_save(state, checkpoint_id=place).result()
    else:
        dcp.save(state, checkpoint_id=place)
dist.barrier()
newest = max(glob.glob(os.path.join(root, "step-*", ".metadata")))
target = {"w": torch.zeros(10), "step": 0}
dcp.load(target, checkpoint_id=os.path.dirname(newest))
assert target["step"] == 2 and target["w"].sum() == 20, target
print(f"rank {dist.get_rank()}: {dcp.save.__module__} from {sys.path[0]}")
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("variable", "how", "module"),
    [
        (None, "sync", "torch.distributed.checkpoint.state_dict_saver"),
        ("functions", "async", "holdfast.interop.replacing"),
        ("0", "sync", "torch.distributed.checkpoint.state_dict_saver"),
    ],
)
def test_a_script_that_torchrun_starts_stays_as_it_is(
    tmp_path: Path, variable: str | None, how: str, module: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    source = str(Path(holdfast.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment.pop("HOLDFAST_IN_TORCH", None)
    if variable is not None:
        environment["HOLDFAST_IN_TORCH"] = variable
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = ["-m", "holdfast", "run", str(script), str(tmp_path), how]
    done = subprocess.run([*launcher, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in (0, 1):
        assert f"rank {rank}: {module} from {tmp_path}" in done.stdout
    is_native = (tmp_path / "step-2" / "manifest.json").exists()
    assert is_native == (variable != "0")
    assert holdfast.load(tmp_path / "step-2")["step"] == 2
