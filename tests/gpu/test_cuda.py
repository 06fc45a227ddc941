"""States on a GPU: saved from it, loaded into it, through pinned slabs, whatever the strides and dtypes there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from outside_views import page_cache

import holdfast

pytestmark = pytest.mark.gpu

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.bool,
)


@pytest.fixture(params=["cached", "cold"], autouse=True)
def cache(request: pytest.FixtureRequest) -> Iterator[str]:
    """Files count as being in the page cache, or are read past it."""
    with page_cache(is_full=request.param == "cached"):
        yield request.param


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def test_every_dtype_out_and_in(tmp_path: Path) -> None:
    state = {str(dtype): (random(37, 11) * 3).to(dtype) for dtype in DTYPES}
    state |= {"scalar": torch.tensor(2.5, device="cuda"), "empty": torch.empty(0, 3, device="cuda")}
    holdfast.save(state, tmp_path / "checkpoint")
    on_cpu = holdfast.load(tmp_path / "checkpoint")
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    report = holdfast.load(target, tmp_path / "checkpoint")
    assert set(report.loaded) == set(state)
    for key, tensor in state.items():
        assert on_cpu[key].device.type == "cpu"
        assert target[key].is_cuda
        assert torch.equal(bits(on_cpu[key]), bits(tensor))
        assert torch.equal(bits(target[key]), bits(tensor))


def test_a_tensor_of_many_slabs(tmp_path: Path) -> None:
    large = random(25_000_001)
    assert large.nbytes > 64 << 20
    holdfast.save({"large": large, "small": large[:7]}, tmp_path / "checkpoint")
    target = {"large": torch.zeros_like(large), "small": torch.zeros(7, device="cuda")}
    address = target["large"].data_ptr()
    holdfast.load(target, tmp_path / "checkpoint")
    assert torch.equal(target["large"], large)
    assert torch.equal(target["small"], large[:7])
    assert target["large"].data_ptr() == address, "a target is filled in place"


def test_strided_sources_and_targets(tmp_path: Path) -> None:
    matrix = random(3000, 2501)
    holdfast.save({"rows": matrix, "columns": matrix.T, "steps": matrix[::3, 1::2]}, tmp_path / "checkpoint")
    target = {
        "rows": torch.zeros(2501, 3000, device="cuda").T,
        "columns": torch.zeros(2501, 6000, device="cuda")[:, ::2],
        "steps": torch.zeros(1000, 1250, device="cuda"),
    }
    holdfast.load(target, tmp_path / "checkpoint")
    assert torch.equal(target["rows"], matrix)
    assert torch.equal(target["columns"], matrix.T)
    assert torch.equal(target["steps"], matrix[::3, 1::2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float8_e5m2])
def test_casts_happen_on_the_way(tmp_path: Path, dtype: torch.dtype) -> None:
    matrix = random(5000, 1001)
    holdfast.save({"a": matrix, "b": matrix.T}, tmp_path / "checkpoint")
    target = {
        "a": torch.zeros(5000, 1001, dtype=dtype, device="cuda"),
        "b": torch.zeros(5000, 1001, dtype=dtype, device="cuda").T,
    }
    with pytest.raises(holdfast.MismatchError):
        holdfast.load(target, tmp_path / "checkpoint")
    assert not bits(target["a"]).any()
    report = holdfast.load(target, tmp_path / "checkpoint", options=holdfast.LoadOptions(cast=True))
    assert {difference.key for difference in report.casts} == {"a", "b"}
    assert torch.equal(bits(target["a"]), bits(matrix.to(dtype)))
    assert torch.equal(bits(target["b"]), bits(matrix.T.to(dtype)))


def test_one_state_on_several_devices(tmp_path: Path) -> None:
    tensor = random(1_000_003)
    state = {"gpu": tensor, "cpu": tensor.cpu() + 1, "values": {"step": 3}}
    holdfast.save(state, tmp_path / "checkpoint")
    target: dict[str, Any] = {
        "gpu": torch.zeros(1_000_003),
        "cpu": torch.zeros(1_000_003, device="cuda"),
        "values": {"step": 0},
    }
    holdfast.load(target, tmp_path / "checkpoint")
    assert torch.equal(target["gpu"], tensor.cpu())
    assert torch.equal(target["cpu"].cpu(), tensor.cpu() + 1)
    assert target["values"] == {"step": 3}


def test_thousands_of_small_tensors(tmp_path: Path) -> None:
    state = {f"layer.{number}": random(number % 97 + 1, 5, seed=number) for number in range(2000)}
    holdfast.save(state, tmp_path / "checkpoint")
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    holdfast.load(target, tmp_path / "checkpoint")
    assert all(torch.equal(target[key], state[key]) for key in state)


def fill_late(tensor: torch.Tensor, value: float) -> None:
    """Queue, on the current stream, work of a good part of a second and then the filling of ``tensor``."""
    torch.cuda._sleep(500_000_000)
    tensor.fill_(value)


@pytest.mark.parametrize("is_side_stream", [False, True])
@pytest.mark.parametrize("is_strided", [False, True])
def test_work_that_is_queued_on_the_callers_stream_comes_first(
    tmp_path: Path, is_side_stream: bool, is_strided: bool
) -> None:
    """What is queued before a save is in it, and what is queued before a load does not overwrite it."""
    stream = torch.cuda.Stream() if is_side_stream else torch.cuda.current_stream()
    tensor = torch.zeros(3000, 2000, device="cuda")
    tensor = tensor.T if is_strided else tensor
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        fill_late(tensor, 7.0)
        holdfast.save({"a": tensor}, tmp_path / "checkpoint")
        assert holdfast.load(tmp_path / "checkpoint")["a"].unique().tolist() == [7.0]
        torch.cuda.synchronize()
        fill_late(tensor, 1.0)
        holdfast.load({"a": tensor}, tmp_path / "checkpoint")
        torch.cuda.synchronize()
        assert tensor.unique().tolist() == [7.0]


def test_a_part_of_a_stored_tensor_comes_to_the_gpu(tmp_path: Path) -> None:
    matrix = random(4000, 1000)
    holdfast.save({"a": matrix}, tmp_path / "checkpoint")
    with holdfast.open(tmp_path / "checkpoint") as checkpoint:
        assert torch.equal(checkpoint["a"][100:2000, 7:9].cuda(), matrix[100:2000, 7:9])


def test_damage_is_found_before_a_load_into_the_gpu_returns(tmp_path: Path) -> None:
    tensor = random(5_000_000)
    path = tmp_path / "checkpoint"
    holdfast.save({"a": tensor}, path)
    (file,) = path.glob("data-*")
    with open(file, "r+b") as opened:
        opened.seek(10_000_000)
        (byte,) = opened.read(1)
        opened.seek(10_000_000)
        opened.write(bytes([byte ^ 4]))
    with pytest.raises(holdfast.CorruptError) as caught:
        holdfast.load({"a": torch.zeros_like(tensor)}, path)
    assert caught.value.key == "a"


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="there is no tmpfs at /dev/shm")
@pytest.mark.parametrize("cores", [2, 12, 16])
def test_from_memory_blocks_are_verified_as_they_are_read(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        state = {f"part{number}": random(9_000_000 + number, seed=number).cuda() for number in range(8)}
        holdfast.save(state, folder)
        target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
        holdfast.load(target, folder)
        for key, tensor in state.items():
            assert torch.equal(bits(target[key]), bits(tensor))
        file = next(Path(folder).glob("data-*"))
        data = bytearray(file.read_bytes())
        data[-1000] ^= 1
        file.write_bytes(data)
        with pytest.raises(holdfast.CorruptError, match="part"):
            holdfast.load(target, folder)


def test_parameters_and_a_model_on_the_gpu(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(50, 70), torch.nn.Linear(70, 3)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model(random(8, 50)).sum().backward()
    optimizer.step()
    holdfast.save({"model": model, "optimizer": optimizer}, tmp_path / "checkpoint")
    other = torch.nn.Sequential(torch.nn.Linear(50, 70), torch.nn.Linear(70, 3)).cuda()
    other_optimizer = torch.optim.AdamW(other.parameters())
    other(random(8, 50, seed=5)).sum().backward()
    other_optimizer.step()
    holdfast.load({"model": other, "optimizer": other_optimizer}, tmp_path / "checkpoint")
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(other_optimizer.state[mine]["exp_avg"], optimizer.state[theirs]["exp_avg"])


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}, {"foreach": False, "amsgrad": True}])
def test_a_new_optimizer_on_the_gpu_goes_on(tmp_path: Path, options: dict[str, bool]) -> None:
    def made(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(72, 5)).cuda()
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model, torch.optim.AdamW(model.parameters(), **options)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for seed in range(3):
            loss = model(random(4, 3, 5, 5, seed=seed)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, optimizer = made(1)
    train(model, optimizer)
    holdfast.save({"model": model, "optimizer": optimizer}, tmp_path / "checkpoint")
    expected = train(model, optimizer)
    other, fresh = made(2)
    holdfast.load({"model": other, "optimizer": fresh}, tmp_path / "checkpoint")
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        for name, value in fresh.state[mine].items():
            assert value.device == optimizer.state[theirs][name].device, name
            assert value.stride() == optimizer.state[theirs][name].stride(), name
    assert train(other, fresh) == expected
