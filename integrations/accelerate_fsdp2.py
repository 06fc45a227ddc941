"""accelerate: ``save_state`` and ``load_state`` of a model under FSDP2 with sharded states."""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from client import CannotRun, assert_same, native_checkpoints, run_client, small_model, whole

from holdfast.interop import use_in_torch


def client(directory: str) -> str:
    """Train a step, save, train on, load, compare."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    if not accelerator.is_fsdp2:
        # accelerate has FSDP for accelerators only, though nothing in it needs one: tell it that it has it here.
        PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    model = small_model()
    try:
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise CannotRun(f"Accelerator.prepare: {error}") from error

    def step(seed: int) -> None:
        torch.manual_seed(seed)
        optimizer.zero_grad()
        accelerator.backward(model(torch.randn(4, 8)).square().mean())
        optimizer.step()

    with use_in_torch():
        step(1)
        weights, moments = whole(model.state_dict()), whole(optimizer.state_dict())
        accelerator.save_state(directory)
        step(2)
        accelerator.load_state(directory)
    assert_same(whole(model.state_dict()), weights)
    assert_same(whole(optimizer.state_dict()), moments)
    return f"save_state and load_state, native: {', '.join(native_checkpoints(directory))}"


if __name__ == "__main__":
    run_client(client)
