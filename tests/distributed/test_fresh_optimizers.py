"""Optimizers that have taken no step, as objects in a target: restored from any layout into any layout.

Models are trained and saved; others, with other weights and new optimizers, are loaded and trained on. In the same
layout their losses are equal bit by bit, elsewhere they agree to rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import holdfast

if TYPE_CHECKING:
    from tools.crew import Crew

BATCH = 12
TOLERANCE = 1e-3  # Muon computes in bfloat16


class Factored(torch.optim.Optimizer):
    """Keeps a plain tensor for each row of a parameter, a scalar, a number, a list and nothing: no shape of its own."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad
                whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                state = self.state[parameter]
                if not state:
                    state.update(rows=whole.new_zeros(whole.shape[0]), peak=torch.zeros(()), count=0, nothing=None)
                    state["moments"] = [torch.zeros_like(parameter), {"mean": whole.new_zeros(1, 2)}]
                state["rows"].mul_(0.9).add_(whole.square().reshape(len(whole), -1).sum(1))
                state["peak"].copy_(torch.maximum(state["peak"].cpu(), whole.abs().max().cpu()))
                state["count"] += 1
                first, more = state["moments"]
                first.mul_(0.9).add_(gradient)
                more["mean"].add_(whole.mean())
                scale = 1 + state["rows"].sqrt().mean() + state["peak"] + state["count"] + more["mean"].sum()
                parameter.add_(first, alpha=-group["lr"] / float(scale))


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "adam-amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True, foreach=False),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.01),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "sgd-momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.9, centered=True),
    "muon": lambda params: torch.optim.Muon([each for each in params if each.ndim == 2], lr=0.01),
    "factored": Factored,
    "groups": lambda params: torch.optim.AdamW(
        [{"params": params[3:], "lr": 0.02}, {"params": params[:3], "betas": (0.8, 0.9)}], lr=0.01
    ),
}


class Model(nn.Module):
    """Sizes that no number of ranks divides; a parameter without gradients in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 10)
        self.up = nn.Linear(10, 26)
        self.unused = nn.Parameter(torch.ones(7, 3))
        self.down = nn.Linear(26, 10)
        self.out = nn.Linear(10, 17)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.down(torch.relu(self.up(self.embed(tokens)))))  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Setup:
    """How a model is spread: ``kind`` and the shape of its mesh."""

    kind: str
    mesh: tuple[int, ...]

    @property
    def world(self) -> int:
        return int(torch.Size(self.mesh).numel())


def spread(setup: Setup, seed: int) -> nn.Module:
    """The model as ``setup`` wants it, with weights of ``seed``."""
    torch.manual_seed(seed)
    model = Model()
    if setup.kind == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    if setup.kind == "plain":
        return model
    names = {"fsdp": ("dp",), "hsdp": ("replicate", "shard"), "fsdp-tp": ("dp", "tp")}[setup.kind]
    mesh = init_device_mesh("cpu", setup.mesh, mesh_dim_names=names)
    if setup.kind == "fsdp-tp":
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = mesh["dp"]
    for part in (model.up, model.down, model):
        fully_shard(part, mesh=mesh)
    return model


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], setup: Setup, steps: range) -> list[float]:
    """The global loss of each step; the data depends on the step alone, each data parallel rank takes its part."""
    losses = []
    parts = setup.mesh[0] if setup.kind == "fsdp-tp" else setup.world
    first = dist.get_rank() // (setup.world // parts) * (BATCH // parts)
    for step in steps:
        tokens = torch.randint(17, (BATCH, 2), generator=torch.Generator().manual_seed(step))
        tokens = tokens[first : first + BATCH // parts]
        loss = nn.functional.cross_entropy(model(tokens[:, 0]), tokens[:, 1])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / setup.world)
    return losses


def made(setup: Setup, name: str, seed: int) -> tuple[dict[str, Any], nn.Module, list[torch.optim.Optimizer]]:
    """A state of objects; "two" has two optimizers."""
    model = spread(setup, seed)
    params = list(model.parameters())
    if name == "two":
        optimizers = [torch.optim.AdamW(params[::2], lr=0.01), torch.optim.SGD(params[1::2], lr=0.05, momentum=0.9)]
    elif setup.kind == "fsdp-tp":
        optimizers = [torch.optim.AdamW(params, lr=0.01, foreach=False)]  # of several meshes, which foreach refuses
    else:
        optimizers = [OPTIMIZERS[name](params)]
    named = {f"optimizer {number}": optimizer for number, optimizer in enumerate(optimizers)}
    return {"model": unwrapped(model), **named}, model, optimizers


def unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


@contextmanager
def quiet() -> Iterator[None]:
    """Torch's own parallel code warns of its own deprecated parts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def train_and_save(setup: Setup, folder: str, names: list[str], writer: str = "native") -> dict[str, list[float]]:
    """The losses after the save, by optimizer."""
    losses = {}
    with quiet():
        for name in names:
            state, model, optimizers = made(setup, name, 1)
            train(model, optimizers, setup, range(3))
            path = f"{folder}/{name}"
            if writer == "dcp":
                dcp.save(state, checkpoint_id=path)
            elif writer == "torch":
                holdfast.save(state, storage_writer=holdfast.FileSystemWriter(path))
            else:
                holdfast.save(state, path)
            losses[name] = train(model, optimizers, setup, range(3, 6))
    return losses


def load_and_train(setup: Setup, folder: str, names: list[str]) -> dict[str, list[float]]:
    losses = {}
    with quiet():
        for name in names:
            state, model, optimizers = made(setup, name, 2)
            report = holdfast.load(state, f"{folder}/{name}")
            assert report.unexpected == report.differences == (), name
            assert bool(report.made) == (name not in ("sgd", "adagrad")), name  # which never have any, or at once
            for optimizer in optimizers:
                check_placed(optimizer)
            losses[name] = train(model, optimizers, setup, range(3, 6))
    return losses


def check_placed(optimizer: torch.optim.Optimizer) -> None:
    """What has the shape of its parameter has its device, mesh and placements too; the rest is plain."""
    for parameter, entry in optimizer.state.items():
        for name, value in entry.items():
            if not isinstance(value, torch.Tensor):
                continue
            if isinstance(parameter, DTensor) and value.shape == parameter.shape and name != "rows":
                assert isinstance(value, DTensor), name
                assert (value.device_mesh, value.placements) == (parameter.device_mesh, parameter.placements), name
                assert value.to_local().shape == parameter.to_local().shape, name
            else:
                assert type(value) is torch.Tensor, name
            assert value.device == parameter.device


PLAIN, DDP_2 = Setup("plain", (1,)), Setup("ddp", (2,))
FSDP_1, FSDP_2, FSDP_4 = Setup("fsdp", (1,)), Setup("fsdp", (2,)), Setup("fsdp", (4,))
HSDP, FSDP_TP = Setup("hsdp", (2, 2)), Setup("fsdp-tp", (2, 2))
ALL = [*OPTIMIZERS, "two"]


def compare(found: list[dict[str, list[float]]], expected: dict[str, list[float]], *, exactly: bool) -> None:
    for losses in found:
        for name, values in losses.items():
            assert values == (expected[name] if exactly else pytest.approx(expected[name], abs=TOLERANCE)), name


@pytest.mark.parametrize("setup", [FSDP_1, FSDP_2, DDP_2])
def test_every_optimizer_goes_on_as_it_would_have(pool: Crew, tmp_path: Path, setup: Setup) -> None:
    expected = pool.run(setup.world, train_and_save, setup, str(tmp_path), ALL)
    found = pool.run(setup.world, load_and_train, setup, str(tmp_path), ALL)
    compare(found, expected[0], exactly=True)
    other = FSDP_2 if setup is DDP_2 else FSDP_4 if setup is FSDP_2 else PLAIN
    found = pool.run(other.world, load_and_train, other, str(tmp_path), ALL)
    compare(found, expected[0], exactly=False)


@pytest.mark.parametrize("saver", [PLAIN, DDP_2, FSDP_1, FSDP_2, FSDP_4, HSDP, FSDP_TP])
def test_from_every_layout_into_every_layout(pool: Crew, tmp_path: Path, saver: Setup) -> None:
    expected = pool.run(saver.world, train_and_save, saver, str(tmp_path), ["adamw"])
    for loader in (PLAIN, DDP_2, FSDP_1, FSDP_2, FSDP_4, HSDP, FSDP_TP):
        found = pool.run(loader.world, load_and_train, loader, str(tmp_path), ["adamw"])
        compare(found, expected[0], exactly=loader == saver)


@pytest.mark.parametrize("writer", ["torch", "dcp"])
def test_from_torchs_format(pool: Crew, tmp_path: Path, writer: str) -> None:
    names = ["adamw", "factored", "groups", "two"]
    expected = pool.run(2, train_and_save, FSDP_2, str(tmp_path), names, writer)
    for loader in (FSDP_2, PLAIN):
        found = pool.run(loader.world, load_and_train, loader, str(tmp_path), names)
        compare(found, expected[0], exactly=loader is FSDP_2)


def load_dicts(folder: str) -> list[tuple[str, str]]:
    """What is said of a state_dict next to sharded tensors, and of an optimizer for a checkpoint of names."""
    said = []
    with quiet():
        model, (optimizer,) = made(FSDP_2, "adamw", 2)[1:]
        for target in ({"model": model, "optimizer 0": optimizer.state_dict()}, {"model": model, "named": optimizer}):
            with pytest.raises(holdfast.MismatchError) as caught:
                holdfast.load(target, f"{folder}/adamw")
            said.append((caught.value.differences[0].key, str(caught.value)))
            assert holdfast.load(target, f"{folder}/adamw", strict=False).differences == caught.value.differences
            assert not optimizer.state
    return said


def save_names(folder: str) -> None:
    with quiet():
        state, model, (optimizer,) = made(FSDP_2, "adamw", 1)
        train(model, [optimizer], FSDP_2, range(1))
        holdfast.save({**state, "named": get_optimizer_state_dict(model, optimizer)}, f"{folder}/adamw")


def test_what_nobody_can_place_is_refused(pool: Crew, tmp_path: Path) -> None:
    pool.run(2, save_names, str(tmp_path))
    for said in pool.run(2, load_dicts, str(tmp_path)):
        (key, message), (named, other) = said
        assert key == "optimizer 0.state"
        assert "put the optimizer itself into the target" in message
        assert named == "named.state.embed.weight"
        assert "load into the result of torch's get_optimizer_state_dict" in other


class Late:
    """Has no state before it is used."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def save_late(path: str) -> None:
    with quiet():
        model = nn.Linear(1 << 10, 1 << 10)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        model(torch.ones(1, 1 << 10)).sum().backward()
        optimizer.step()
        holdfast.save({"optimizer": optimizer, "late": Late(mean=torch.arange(5.0), seen=[3])}, path)


def load_late(path: str) -> tuple[int, int]:
    """Bytes read of the optimizer's state, which is its shard; and of everything, into nothing."""
    with quiet():
        model = nn.Linear(1 << 10, 1 << 10)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer, late = torch.optim.SGD(model.parameters(), momentum=0.9), Late()
        report = holdfast.load(
            {"optimizer": optimizer, "late": late}, path, options=holdfast.LoadOptions(verify=False, share="off")
        )
        assert late.state["mean"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert late.state["seen"] == [3]
        # As for save, a rank may come with nothing; then it is given everything.
        target: dict[str, Any] = {"late": Late()} if dist.get_rank() == 0 else {}
        everything = holdfast.load(target, path, options=holdfast.LoadOptions(verify=False, share="off"))
        assert len(target) == (1 if dist.get_rank() == 0 else 2)
        return report.bytes_read, everything.bytes_read


def test_each_rank_reads_its_shard_alone(pool: Crew, tmp_path: Path) -> None:
    pool.run(2, save_late, str(tmp_path / "late"))
    (first, little), (second, all_of_it) = pool.run(2, load_late, str(tmp_path / "late"))
    half = 4 * ((1 << 20) + (1 << 10)) // 2
    assert half < first == second < half + (1 << 17)
    assert little < 1 << 17
    assert 2 * half < all_of_it < 2 * half + (1 << 17)
