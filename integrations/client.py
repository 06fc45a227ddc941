"""What the clients share: a small training on CPU over gloo, what it looks like, and how a client tells its result.

A client is a script for two ranks. It uses a framework as its users do, inside ``use_in_torch()``, and compares what
came back from the checkpoint with what went in. Its last line says what was checked, or why it cannot run here.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

CANNOT_RUN = 77
"""Exit code of a client that cannot run on this machine: no failure, and no success either."""


class CannotRun(Exception):
    """The framework needs something that this machine does not have; the message says what."""


def small_model() -> torch.nn.Module:
    """The same two layers on every rank."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


def whole(state: Any) -> Any:
    """``state`` with plain, copied tensors in place of sharded ones."""
    if isinstance(state, DTensor):
        return state.full_tensor().detach().clone()
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    return [whole(value) for value in state] if isinstance(state, (list, tuple)) else state


def assert_same(found: Any, expected: Any, place: str = "state") -> None:
    """Fail, naming the place, unless both are the same all the way down."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), place
    elif isinstance(expected, dict):
        assert list(found) == list(expected), place
        for key, value in expected.items():
            assert_same(found[key], value, f"{place}[{key!r}]")
    elif isinstance(expected, list):
        assert len(found) == len(expected), place
        for number, value in enumerate(expected):
            assert_same(found[number], value, f"{place}[{number}]")
    else:
        assert found == expected, f"{place}: {found!r} is not {expected!r}"


def refusal(kind: type[Exception], action: Callable[[], object]) -> str:
    """What the error of ``action`` says, which is to fail with one of that ``kind``."""
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError(f"it was not refused with {kind.__name__}")


def native_checkpoints(directory: str) -> list[str]:
    """The native checkpoints below ``directory``; none of torch's own may be there, only markers."""
    root = Path(directory)
    markers = list(root.rglob(".metadata"))
    assert all((each.parent / "manifest.json").exists() for each in markers), "torch's own format was written"
    return sorted(str(path.parent.relative_to(root)) for path in root.rglob("manifest.json"))


def run_client(client: Callable[[str], str]) -> None:
    """Run ``client`` in the directory that the command line names, tell its result, and exit."""
    code = 0
    try:
        note = client(sys.argv[1])
    except CannotRun as reason:
        note, code = str(reason), CANNOT_RUN
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps({"note": note}), flush=True)
    if dist.is_initialized():
        # Without these two, torch with gloo now and then aborts a rank at its exit, after all work is done.
        gc.collect()
        if code == 0:
            dist.barrier()
        dist.destroy_process_group()
    sys.exit(code)
