"""holdfast.state_dict and holdfast.optimizer are torch's helpers themselves, and cost nothing until asked for."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import optimizer as torch_optimizer
from torch.distributed.checkpoint import state_dict as torch_state_dict

import holdfast
import holdfast.optimizer
import holdfast.state_dict


@pytest.mark.parametrize(
    ("ours", "theirs"), [(holdfast.state_dict, torch_state_dict), (holdfast.optimizer, torch_optimizer)]
)
def test_every_public_name_is_torchs_own(ours: Any, theirs: Any) -> None:
    assert sorted(ours.__all__) == sorted(theirs.__all__)
    assert all(getattr(ours, name) is getattr(theirs, name) for name in ours.__all__)


@pytest.mark.parametrize("name", ["_patch_model_state_dict", "_patch_optimizer_state_dict"])
def test_private_names_that_frameworks_use_are_there(name: str) -> None:
    assert getattr(holdfast.state_dict, name) is getattr(torch_state_dict, name)


def test_a_model_and_its_optimizer_go_through_a_checkpoint(path: str) -> None:
    def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    helpers = importlib.import_module("holdfast.state_dict")
    model, optimizer = trained(0)
    saved = dict(zip(("model", "optimizer"), helpers.get_state_dict(model, optimizer), strict=True))
    holdfast.save(saved, path)

    other_model, other_optimizer = trained(1)
    target = dict(zip(("model", "optimizer"), helpers.get_state_dict(other_model, other_optimizer), strict=True))
    holdfast.load(target, path)
    helpers.set_state_dict(
        other_model,
        other_optimizer,
        model_state_dict=target["model"],
        optim_state_dict=target["optimizer"],
    )
    assert torch.equal(other_model.weight, model.weight)  # type: ignore[arg-type]
    assert other_optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    (state,) = [other_optimizer.state[p]["exp_avg"] for n, p in other_model.named_parameters() if n == "weight"]
    (expected,) = [optimizer.state[p]["exp_avg"] for n, p in model.named_parameters() if n == "weight"]
    assert torch.equal(state, expected)


def test_importing_the_library_does_not_import_torchs() -> None:
    code = "import sys, holdfast; sys.exit('torch.distributed.checkpoint' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(holdfast.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment, timeout=300).returncode == 0
