"""torchtitan: its CheckpointManager saves steps of an FSDP2 model and resumes from the last."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from client import CannotRun, assert_same, native_checkpoints, run_client, small_model, whole
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from holdfast.interop import use_in_torch


class _Optimizer:
    """What the manager asks of an optimizer: its state by names."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state)


class _Counter:
    """A state of plain values."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def client(directory: str) -> str:
    """Train two steps, save both, train on, load, compare."""
    dist.init_process_group("gloo")
    try:
        from torchtitan.components.checkpoint import CheckpointManager
    except Exception as error:
        raise CannotRun(f"torchtitan.components.checkpoint: {type(error).__name__}: {error}") from error
    model = fully_shard(small_model())
    optimizer, counter = _Optimizer(model), _Counter()
    config = CheckpointManager.Config(enable=True, interval=1, async_mode="disabled", last_save_model_only=False)
    manager = CheckpointManager(
        config,
        dataloader=None,
        model_parts=[model],
        optimizers=optimizer,
        lr_schedulers=_Counter(),
        states={"train_state": counter},
        sd_adapter=None,
        base_folder=directory,
    )

    def step(seed: int) -> None:
        torch.manual_seed(seed)
        optimizer.optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.optimizer.step()
        counter.step = seed

    with use_in_torch():
        for number in (1, 2):
            step(number)
            assert manager.save(number)
        weights, moments = whole(model.state_dict()), whole(optimizer.state_dict())
        step(3)
        # It finds the last one by looking for torch's .metadata, which is a marker here.
        assert manager.load(step=-1)
    manager.close()
    assert_same(whole(model.state_dict()), weights)
    assert_same(whole(optimizer.state_dict()), moments)
    assert counter.step == 2
    return f"save and load of steps, native: {', '.join(native_checkpoints(directory))}"


if __name__ == "__main__":
    run_client(client)
