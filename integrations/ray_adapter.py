"""Ray Train with ``holdfast.integrations.ray``: a TorchTrainer of Ray on this machine, with workers of its own.

This is no script for torchrun. Ray starts its services on loopback, with little memory, and ends them at the end.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

CANNOT_RUN = 77
STEPS, EVERY, KILLED_AT = 9, 3, 6


def train(settings: dict[str, Any]) -> None:
    """What every worker does: train, save, report, and resume if Ray has started it again."""
    import importlib

    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import holdfast
    from holdfast import Every, PerRank, Rng
    from holdfast.integrations.ray import manager, report

    rank, world = dist.get_rank(), dist.get_world_size()
    place: Any = importlib.import_module("holdfast._native.writer").DirectoryPlace
    publish = place.publish
    if settings["is_failing"]:

        def fail(path: str, *arguments: Any, **more: Any) -> None:
            if path.endswith(f"step-{KILLED_AT}"):
                raise OSError(errno.ENOSPC, "no space is left")
            publish(path, *arguments, **more)

        place.publish = staticmethod(fail)
    killing = Path(settings["killing"]) if settings["killing"] else None
    if killing is not None:
        killing.mkdir(exist_ok=True)
        (killing / f"pid-{rank}").write_text(str(os.getpid()))
        dist.barrier()

        def publish_or_die(path: str, *arguments: Any, **more: Any) -> None:
            if path.endswith(f"step-{KILLED_AT}") and not (killing / "done").exists():
                (killing / "done").touch()
                for other in reversed(range(world)):
                    os.kill(int((killing / f"pid-{other}").read_text()), signal.SIGKILL)
            publish(path, *arguments, **more)

        place.publish = staticmethod(publish_or_die)
    torch.manual_seed(7)
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(rank)
    state = {"model": model, "optimizer": optimizer, "data": PerRank(data, "fresh"), "rng": Rng("fresh")}
    with manager(save=Every(steps=EVERY), asynchronous=settings["asynchronous"]) as checkpoints:
        resumed = checkpoints.resume(state)
        print(f"rank {rank} begins after {resumed.step}", flush=True)
        for step in range(max(resumed.next_step, 1), settings["steps"] + 1):
            loss = model(torch.randn(4, 8, generator=data)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with Path(settings["losses"], f"{rank}.jsonl").open("a") as file:
                file.write(json.dumps([step, loss.item().hex(), resumed.step]) + "\n")
            is_saved = checkpoints.save(step, state, metrics={"loss": loss.item()})
            durable = None if settings["asynchronous"] else checkpoints.path(step)
            report({"step": step, "loss": loss.item()}, (durable or checkpoints.under_way) if is_saved else None)
    if settings["export"]:
        holdfast.hf.export(model, settings["export"])


def fit(
    directory: str, name: str, *, workers: int, steps: int = STEPS, is_killed: bool = False, **settings: object
) -> Any:
    """The result of a run of Ray, and the losses of each rank."""
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    losses = Path(directory, f"losses-{name}-{workers}-{steps}")
    losses.mkdir(exist_ok=True)
    trainer = TorchTrainer(
        train,
        train_loop_config={
            "steps": steps,
            "losses": str(losses),
            "killing": str(Path(directory, "killing")) if is_killed else "",
            **{"asynchronous": True, "is_failing": False, "export": "", **settings},
        },
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            storage_path=directory,
            name=name,
            failure_config=FailureConfig(max_failures=int(is_killed)),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    told = [[json.loads(line) for line in (losses / f"{rank}.jsonl").open()] for rank in range(workers)]
    return result, told


def others(directory: str) -> str:
    """Saves that block, and an export at the end; and a save in the background that fails."""
    from ray.train import TrainingFailedError

    import holdfast

    folder = f"{directory}/exported"
    result, told = fit(directory, "synchronous", workers=2, asynchronous=False, export=folder)
    steps = holdfast.Steps(Path(directory, "synchronous", "steps"))
    assert [step.step for step in steps.steps()] == [6, 9]
    assert result.checkpoint.path == steps.path(STEPS), result.checkpoint
    assert all(len(losses) == STEPS for losses in told)
    kept, exported = holdfast.read(steps.path(STEPS))["model"], holdfast.read(folder)
    assert all(exported[name].equal(tensor) for name, tensor in kept.items())
    message = ""
    try:
        fit(directory, "failing", workers=2, is_failing=True)
    except TrainingFailedError as error:
        message = str(error)
    assert "no space is left" in message, message
    found = [step.step for step in holdfast.Steps(Path(directory, "failing", "steps")).steps()]
    assert found == [EVERY], found
    return "asynchronous=False: steps reported and exported; a failed save ends the run, step 3 stays"


def killed(directory: str) -> str:
    """Train, kill all workers in the middle of a save, let Ray start them again, and go on with more workers."""
    import holdfast

    _, unbroken = fit(directory, "unbroken", workers=2)
    result, killed = fit(directory, "killed", workers=2, is_killed=True)
    assert Path(directory, "killing", "done").exists(), "nobody was killed"
    for expected, found in zip(unbroken, killed, strict=True):
        losses = {step: loss for step, loss, _ in expected}
        again = {step: loss for step, loss, after in found if after == EVERY}
        assert again == {step: loss for step, loss in losses.items() if step > EVERY}, (again, losses)
    steps = holdfast.Steps(Path(directory, "killed", "steps"))
    assert [step.step for step in steps.steps()] == [6, 9]
    assert all(holdfast.verify(step.path).ok for step in steps.steps())
    assert result.checkpoint.path == steps.path(STEPS), result.checkpoint
    _, more = fit(directory, "killed", workers=4, steps=STEPS + 3)
    assert all([(step, after) for step, _, after in told] == [(10, 9), (11, 9), (12, 9)] for told in more), more
    return f"all workers killed in the save of step {KILLED_AT}: Ray restarts them, losses bit-equal; then 4 workers"


def main() -> int:
    """Start Ray, run the client, and end Ray, whatever comes of it."""
    os.environ.update(RAY_TRAIN_V2_ENABLED="1", RAY_USAGE_STATS_ENABLED="0", RAY_DEDUP_LOGS="0")
    import ray

    try:
        ray.init(
            address="local",
            num_cpus=6,
            object_store_memory=100 << 20,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=os.path.join("/tmp", f"ray-{os.getpid()}"),  # the paths of its sockets have to be short
        )
    except Exception as error:
        print(json.dumps({"note": f"ray.init: {type(error).__name__}: {error}"}), flush=True)
        return CANNOT_RUN
    try:
        note = {"killed": killed, "others": others}[sys.argv[2]](sys.argv[1])
    finally:
        ray.shutdown()
    print(json.dumps({"note": note}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
