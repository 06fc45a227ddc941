"""Lightning Fabric: ``save`` and ``load`` with ModelParallelStrategy, which shards by FSDP2."""

from __future__ import annotations

import os
from typing import Any

import torch
from client import CannotRun, assert_same, native_checkpoints, run_client, small_model, whole
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from holdfast.interop import use_in_torch


def _shard(model: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    for layer in model:  # type: ignore[attr-defined]
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def client(directory: str) -> str:
    """Train a step, save, train on, load, compare."""
    world = int(os.environ["WORLD_SIZE"])
    strategy = ModelParallelStrategy(parallelize_fn=_shard, data_parallel_size=world, tensor_parallel_size=1)
    try:
        fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
        fabric.launch()
        model = fabric.setup_module(small_model())
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.1))
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise CannotRun(f"Fabric: {error}") from error

    def step(seed: int) -> None:
        torch.manual_seed(seed)
        optimizer.zero_grad()
        fabric.backward(model(torch.randn(4, 8)).square().mean())
        optimizer.step()

    path = os.path.join(directory, "fabric")
    with use_in_torch():
        step(1)
        weights, moments = whole(model.state_dict()), whole(optimizer.state_dict())
        fabric.save(path, {"model": model, "optimizer": optimizer, "step": 1})
        step(2)
        rest = fabric.load(path, {"model": model, "optimizer": optimizer})
    assert_same(whole(model.state_dict()), weights)
    assert_same(whole(optimizer.state_dict()), moments)
    assert rest["step"] == 1
    return f"save and load, native: {', '.join(native_checkpoints(directory))}"


if __name__ == "__main__":
    run_client(client)
