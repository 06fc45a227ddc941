"""What a checkpoint of torchtitan is made of: a state that is looked at only when it is saved, and that of the data.

torchtitan itself makes a pickle of the state of its data loader; here it is plain values. Every rank saves its own.
Ranks of one data-parallel rank have the same, so it may move to other ranks as long as the data is divided among as
many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import torch

from holdfast.errors import MismatchError
from holdfast.integrations import imported

_MANY_NUMBERS = 32
_NUMBERS = "list of numbers"
_ADVICE = "load on as many data-parallel ranks, or exclude 'dataloader' from loading to begin the data anew"

ParallelAwareDataloader: Any = imported("torchtitan", "torchtitan.components.dataloader").ParallelAwareDataloader


def has_plain_state(loader: object) -> bool:
    """Whether the state of ``loader`` is that of torchtitan's class, and not one that a class of the user makes."""
    return getattr(type(loader), "state_dict", None) is ParallelAwareDataloader.state_dict


class WhenSaved(Mapping[str, Any]):
    """What ``make`` returns, which is called where somebody looks: at most steps nobody does."""

    def __init__(self, make: Callable[[], dict[str, Any]]) -> None:
        self._make = make

    @cached_property
    def _made(self) -> dict[str, Any]:
        return self._make()

    def __getitem__(self, name: str) -> Any:
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


class PlainLoader:
    """What has the state of a loader of torchtitan as plain values, with the place of the rank in the data."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._place = {"dp_rank": loader.dp_rank, "dp_world_size": loader.dp_world_size}

    def state_dict(self) -> dict[str, Any]:
        inner: Any = super(ParallelAwareDataloader, self._loader)
        return {**self._place, "state": _packed(inner.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.own([state])
        inner: Any = super(ParallelAwareDataloader, self._loader)
        inner.load_state_dict(_unpacked(state["state"]))

    def own(self, states: list[Any], rank: int = 0, ranks: int = 1) -> Any:
        """The one of ``states`` that belongs to this data-parallel rank; MismatchError if there is none."""
        for state in states:
            if all(state.get(name) == number for name, number in self._place.items()):
                return state
        wanted = f"data-parallel rank {self._place['dp_rank']} of {self._place['dp_world_size']}"
        saved = sorted({state.get("dp_world_size") for state in states})
        raise MismatchError(f"the checkpoint has no loader state of {wanted}, it was saved by {saved}: {_ADVICE}")


def _packed(value: Any) -> Any:
    """``value`` with tensors in the place of long lists of whole numbers, which would not fit into a manifest."""
    if isinstance(value, dict):
        return {name: _packed(part) for name, part in value.items()}
    if isinstance(value, list):
        if len(value) > _MANY_NUMBERS and all(type(part) is int and abs(part) < 1 << 63 for part in value):
            return {_NUMBERS: torch.tensor(value, dtype=torch.int64, device="cpu")}
        return [_packed(part) for part in value]
    return value


def _unpacked(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_NUMBERS}:
            return value[_NUMBERS].tolist()
        return {name: _unpacked(part) for name, part in value.items()}
    return [_unpacked(part) for part in value] if isinstance(value, list) else value
