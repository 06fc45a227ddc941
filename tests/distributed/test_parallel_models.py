"""Small models under FSDP2, tensor parallelism, DDP and HSDP with AdamW: train, save, load elsewhere, train on.

The state goes through torch's get_state_dict and set_state_dict. On the same number of ranks and the same mesh the next
three steps are equal bit by bit; elsewhere they agree to rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import holdfast

if TYPE_CHECKING:
    from tools.crew import Crew

BATCH = 12  # divides by every number of data parallel ranks here
STEPS = 3
TOLERANCE = 1e-4


class Block(nn.Module):
    """Two layers of uneven width and a norm between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 26)
        self.norm = nn.LayerNorm(width)
        self.down = nn.Linear(26, width)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.down(torch.relu(self.up(self.norm(values))))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Embedding, two blocks, output; sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 10)
        self.blocks = nn.ModuleList(Block(10) for _ in range(2))
        self.out = nn.Linear(10, 17)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        values = self.embed(tokens)
        for block in self.blocks:
            values = block(values)
        return self.out(values)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Setup:
    """How a model is spread: ``kind`` and the shape of its mesh."""

    kind: str
    mesh: tuple[int, ...]

    @property
    def world(self) -> int:
        return int(torch.Size(self.mesh).numel())

    @property
    def data_ranks(self) -> int:
        """How many ranks have data of their own."""
        return {"fsdp-tp": self.mesh[0], "tp": 1}.get(self.kind, self.world)


def spread(setup: Setup, seed: int) -> nn.Module:
    """The model as ``setup`` wants it, with weights of ``seed``."""
    torch.manual_seed(seed)
    model = Model()
    if setup.kind == "ddp":
        return DistributedDataParallel(model)
    names = {"fsdp": ("dp",), "hsdp": ("replicate", "shard"), "fsdp-tp": ("dp", "tp"), "tp": ("tp",)}[setup.kind]
    mesh = init_device_mesh("cpu", setup.mesh, mesh_dim_names=names)
    for block in model.blocks:
        if "tp" in names:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if setup.kind != "tp":
            fully_shard(block, mesh=mesh["dp"] if "tp" in names else mesh)
    if setup.kind != "tp":
        fully_shard(model, mesh=mesh["dp"] if "tp" in names else mesh)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, setup: Setup, steps: range) -> list[float]:
    """The global loss of each step; the data depends on the step alone, each data parallel rank takes its part."""
    losses = []
    part = BATCH // setup.data_ranks
    ranks_per_part = setup.world // setup.data_ranks
    first = dist.get_rank() // ranks_per_part * part
    for step in steps:
        tokens = torch.randint(17, (BATCH, 2), generator=torch.Generator().manual_seed(step))[first : first + part]
        loss = nn.functional.cross_entropy(model(tokens[:, 0]), tokens[:, 1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / setup.world)
    return losses


def made(setup: Setup, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = spread(setup, seed)
    # Tensor parallel models mix DTensors of two meshes and plain tensors, which foreach does not take.
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def train_and_save(setup: Setup, path: str) -> tuple[list[float], dict[str, list[float]]]:
    """The losses after the save, and the parameters at the end."""
    with quiet():
        model, optimizer = made(setup, 1)
        train(model, optimizer, setup, range(3))
        weights, state = get_state_dict(model, optimizer)
        holdfast.save({"model": weights, "optimizer": state, "step": 3}, path)
        return train(model, optimizer, setup, range(3, 3 + STEPS)), parameters(model)


def load_and_train(setup: Setup, path: str) -> tuple[list[float], dict[str, list[float]]]:
    with quiet():
        model, optimizer = made(setup, 2)
        weights, state = get_state_dict(model, optimizer)
        target = {"model": weights, "optimizer": state, "step": 0}
        holdfast.load(target, path)
        assert target["step"] == 3
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        return train(model, optimizer, setup, range(3, 3 + STEPS)), parameters(model)


def parameters(model: nn.Module) -> dict[str, list[float]]:
    """Every parameter, whole."""
    found = {}
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        found[name.removeprefix("module.")] = whole.detach().flatten().tolist()
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Torch's own parallel code warns of its own deprecated parts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


FSDP_4, FSDP_2, FSDP_3 = Setup("fsdp", (4,)), Setup("fsdp", (2,)), Setup("fsdp", (3,))
HSDP = Setup("hsdp", (2, 2))
FSDP_TP, TP = Setup("fsdp-tp", (2, 2)), Setup("tp", (2,))
DDP_2, DDP_3 = Setup("ddp", (2,)), Setup("ddp", (3,))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[Setup, tuple[str, list[float], dict[str, list[float]]]]:
    """What each setup has saved so far, and how it went on."""
    return {}


def saved_by(
    setup: Setup,
    pool: Crew,
    saved: dict[Setup, tuple[str, list[float], dict[str, list[float]]]],
    factory: pytest.TempPathFactory,
) -> tuple[str, list[float], dict[str, list[float]]]:
    if setup not in saved:
        path = str(factory.mktemp("models") / setup.kind)
        losses, weights = pool.run(setup.world, train_and_save, setup, path)[0]
        saved[setup] = path, losses, weights
    return saved[setup]


PAIRS = [
    (FSDP_4, FSDP_4),
    (FSDP_4, FSDP_3),
    (FSDP_4, HSDP),
    (FSDP_4, FSDP_TP),
    (FSDP_4, DDP_2),
    (FSDP_TP, FSDP_TP),
    (FSDP_TP, FSDP_2),
    (FSDP_TP, TP),
    (HSDP, HSDP),
    (HSDP, DDP_3),
    (DDP_2, DDP_2),
    (DDP_2, FSDP_TP),
    (TP, TP),
    (TP, FSDP_3),
]


@pytest.mark.parametrize(
    ("source", "target"), PAIRS, ids=lambda setup: f"{setup.kind}-{'x'.join(map(str, setup.mesh))}"
)
def test_training_goes_on_where_it_was(
    pool: Crew,
    tmp_path_factory: pytest.TempPathFactory,
    saved: dict[Setup, tuple[str, list[float], dict[str, list[float]]]],
    source: Setup,
    target: Setup,
) -> None:
    path, losses, weights = saved_by(source, pool, saved, tmp_path_factory)
    results = pool.run(target.world, load_and_train, target, path)
    found_losses, found_weights = results[0]
    assert set(found_weights) == set(weights)
    if source == target:
        assert found_losses == losses
        assert found_weights == weights
    else:
        assert found_losses == pytest.approx(losses, rel=TOLERANCE)
        for name, expected in weights.items():
            assert found_weights[name] == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE), name


def test_the_model_that_loads_was_another_one_before(pool: Crew) -> None:
    """What the other test compares would be worth nothing if seeds 1 and 2 gave the same model."""
    first, second = pool.run(1, two_seeds)[0]
    assert first != second


def two_seeds() -> tuple[list[float], list[float]]:
    with quiet():
        first, second = (parameters(spread(Setup("fsdp", (1,)), seed))["out.weight"] for seed in (1, 2))
    return first, second
