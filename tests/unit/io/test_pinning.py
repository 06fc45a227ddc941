"""Shared memory made known to a GPU; the runtime is a stand-in, tests/gpu has the real one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast._io.slabs import SlabRing, pinned


def stand_in(monkeypatch: pytest.MonkeyPatch, *, code: int) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []

    def noting(name: str, result: int) -> Callable[..., int]:
        return lambda *arguments: calls.append((name, *arguments)) or result

    runtime = SimpleNamespace(cudaHostRegister=noting("pin", code), cudaHostUnregister=noting("unpin", 0))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)

    def next_operation(*arguments: Any, **options: Any) -> None:
        calls.append(("operation",))
        raise RuntimeError("CUDA error: invalid argument")

    monkeypatch.setattr(torch, "zeros", next_operation)
    return calls


def test_memory_is_pinned_for_the_length_of_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    slab = SlabRing(1).acquire()
    calls = stand_in(monkeypatch, code=0)
    with pinned(slab):
        assert calls == [("pin", slab.address, slab.tensor.numel(), 1)]
    assert calls[1:] == [("unpin", slab.address)]


def test_a_refusal_costs_nothing_but_the_operation_that_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    slab = SlabRing(1).acquire()
    calls = stand_in(monkeypatch, code=1)
    with pinned(slab):
        pass
    assert [call[0] for call in calls] == ["pin", "operation"]
