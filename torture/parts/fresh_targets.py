"""Targets that have nothing yet where the checkpoint has something: new optimizers, some of their state, empty dicts.

Optimizers, groups, layouts, formats and what is missing are drawn at random; what is loaded is compared with what was
saved, bit by bit. One process is a group of its own: how shards are cut is the business of other tests.
"""

from __future__ import annotations

import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast
from torture.crew import Case
from torture.part import Options, PartResult

NAME = "fresh-targets"
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "Adam": {"amsgrad": True},
    "NAdam": {},
    "ASGD": {},
    "SGD": {"momentum": 0.9},
    "Adagrad": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adadelta": {},
}


def run(options: Options) -> PartResult:
    """Load into targets of which some of the state is not there yet."""
    cases = [{"folder": str(options.folder), "seed": options.seed + number} for number in range(_rounds(options))]
    violations: list[str] = []
    missing = 0
    for done, (case, outcome) in enumerate(options.crew.each(load_what_is_missing, cases), start=1):
        options.progress(done, len(cases))
        missing += outcome.get("missing", 0)
        if outcome.get("problem") or "failure" in outcome:
            violations.append(f"seed {case['seed']}: {outcome.get('problem') or outcome['failure']}")
    return PartResult(
        fault="targets that lack the state of some or all parameters, or have an empty dict for it, in any layout",
        must_hold="everything is restored as it was saved, each tensor as its parameter is spread",
        injected=missing,
        required=1_000,
        violations=violations,
        counts={"loads": len(cases)},
    )


def _rounds(options: Options) -> int:
    return 10 if options.quick else 600


def load_what_is_missing(*, folder: str, seed: int) -> Case:
    """Save, load into a target without some of the state, and say what is not as it was."""
    torch.manual_seed(seed)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group-{seed}", rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about its own deprecated parts
            return _lack_and_load(Path(folder) / f"fresh-{seed}", random.Random(seed))
    finally:
        dist.destroy_process_group()


def _lack_and_load(path: Path, chosen: random.Random) -> Case:
    mesh = init_device_mesh("cpu", (1,))
    shapes = [[chosen.randint(1, 5) for _ in range(chosen.randint(1, 3))] for _ in range(chosen.randint(1, 6))]
    name, cut = chosen.choice(list(OPTIMIZERS)), chosen.randrange(len(shapes))

    def made(used: list[int]) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
        """Parameters spread at random, and an optimizer in two groups that has state for ``used`` ones."""
        parameters = [torch.nn.Parameter(_spread(torch.randn(shape), mesh, chosen)) for shape in shapes]
        groups = [{"params": part} for part in (parameters[:cut], parameters[cut:]) if part]
        optimizer = getattr(torch.optim, name)(groups, **OPTIMIZERS[name], foreach=False)
        for number in used:
            parameters[number].grad = torch.ones_like(parameters[number])
        optimizer.step()
        return parameters, optimizer

    used = chosen.sample(range(len(shapes)), chosen.randint(0, len(shapes)))
    parameters, optimizer = made(used)
    extra: dict[str, Any] = {"numbers": {"7": torch.randn(3)}, "text": "x"}
    state = {"a": {"o": optimizer}, "extra": extra}
    if chosen.random() < 0.7:
        holdfast.save(state, path)
    else:
        holdfast.save(state, storage_writer=holdfast.FileSystemWriter(path))
    others, fresh = made(used[: chosen.choice((0, 0, len(used) // 2))])
    target: dict[str, Any] = {"a": {"o": fresh}, "extra": {}}
    report = holdfast.load(target, path)
    shutil.rmtree(path)
    problem = f"unexpected: {report.unexpected}" if report.unexpected else None
    for mine, theirs in zip(others, parameters, strict=True):
        problem = problem or _difference(fresh.state.get(mine, {}), optimizer.state.get(theirs, {}), mine)
    if target["extra"]["text"] != "x" or not torch.equal(target["extra"]["numbers"]["7"], extra["numbers"]["7"]):
        problem = "the empty dict was not filled"
    return {"problem": problem, "missing": len(report.made)}


def _spread(tensor: torch.Tensor, mesh: DeviceMesh, chosen: random.Random) -> torch.Tensor:
    kind = chosen.choice(("plain", "whole", "cut", "cut"))
    if kind == "plain":
        return tensor
    return distribute_tensor(tensor, mesh, [Shard(chosen.randrange(tensor.ndim)) if kind == "cut" else Replicate()])


def _difference(found: dict[str, Any], expected: dict[str, Any], parameter: torch.Tensor) -> str | None:
    """How the state of a parameter is not what was saved, or not spread as the parameter is."""
    if found.keys() != expected.keys():
        return f"{sorted(found)} was restored of {sorted(expected)}"
    for name, value in expected.items():
        mine = found[name]
        if name != "step" and mine.shape == parameter.shape and type(mine) is not type(parameter.data):
            return f"{name} is a {type(mine).__name__}"
        if isinstance(mine, DTensor) and mine.placements != parameter.placements:  # type: ignore[attr-defined]
            return f"{name} is placed {mine.placements}"
        if not torch.equal(_whole(mine), _whole(value)):
            return f"{name} has other values"
    return None


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
