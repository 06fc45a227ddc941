"""What belongs to one rank: it is saved under the number of the rank, and given back to the same rank.

The state of a ``PerRank`` is ``{"rank-3": {"value": ...}}``, and every rank saves its own. A load asks for it with an
empty container at ``rank-3``, which takes whatever was saved there. If other ranks load than saved, no value belongs to
any of them. Then ``on_resize`` decides, and the report of the load says what was done. A rank never gets the value of
another one unless the user's function gives it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar, cast

import numpy as np
import torch

from holdfast._state.nested import AnyDict, is_stateful
from holdfast._state.stateful_values import handed_back
from holdfast.errors import Difference, MismatchError
from holdfast.metadata import Path, path_key
from holdfast.stateful import Stateful

logger = logging.getLogger("holdfast")

Value = TypeVar("Value")
OnResize = Literal["raise", "fresh"] | Callable[[list[Any], int, int], object]
"""What to do if other ranks load than saved. A function gets the values by old rank, this rank, and how many load."""

_PREFIX = "rank-"
_MOST_DIGITS = 9
ADVICE = (
    "Load on as many ranks, or say what to do on others: PerRank(..., on_resize='fresh') leaves the value as it is, "
    "on_resize=function gets the values of all ranks."
)


def job_rank() -> int:
    """The number of this process in its job; 0 if it is alone."""
    is_there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if is_there else 0


class PerRank(Generic[Value]):
    """A value in a state that is different on each rank: the state of a data loader, or of a random generator.

    Attributes:
        value: anything that may be in a state. A load puts what was saved into it, in place if that is possible.
        outcome: what the last load did: "restored", "fresh" or "re-split".
    """

    def __init__(self, value: Value, on_resize: OnResize = "raise") -> None:
        if on_resize not in ("raise", "fresh") and not callable(on_resize):
            raise ValueError(f"on_resize is 'raise', 'fresh' or a function, not {on_resize!r}")
        self.value = value
        self.on_resize = on_resize
        self.outcome = ""
        self._place = 0, 1

    def state_dict(self) -> AnyDict:
        """The value, or its state, under the number of this rank."""
        inner = cast(Stateful, self.value).state_dict() if is_stateful(self.value) else self.value
        return {f"{_PREFIX}{job_rank()}": {"value": inner}}

    def load_state_dict(self, state_dict: AnyDict) -> None:
        """Take the value of this rank, or what ``on_resize`` makes of all values. An empty dict changes nothing."""
        if not state_dict:
            return
        own = f"{_PREFIX}{job_rank()}"
        if self.outcome == "re-split" and callable(self.on_resize):
            names = sorted(state_dict, key=lambda name: int(name.removeprefix(_PREFIX)))
            inner = self.on_resize([state_dict[name]["value"] for name in names], *self._place)
        elif own in state_dict:
            inner = state_dict[own]["value"]
        else:
            raise MismatchError(f"the state has nothing of {own}, only of {', '.join(map(str, state_dict))}. {ADVICE}")
        _drop_stale(self.value, inner)
        self.value = cast(Value, handed_back(self.value, inner))

    def prepare(self, saved: Collection[int], place: tuple[int, int]) -> AnyDict | None:
        """The containers that a load fills, if these ranks ``saved`` it; None if the value stays as it is.

        ``place`` is the number of this rank among those that load, and how many they are.
        """
        self._place = place
        if len(saved) == place[1] and job_rank() in saved:
            self.outcome = "restored"
            return {f"{_PREFIX}{job_rank()}": {}}
        self.outcome = "re-split" if callable(self.on_resize) else "fresh"
        return {} if callable(self.on_resize) else None


def _drop_stale(value: object, loaded: object) -> None:
    """Remove the entries of dicts that ``loaded`` does not have, so that nothing is left of before the load."""
    if isinstance(value, MutableMapping) and isinstance(loaded, Mapping):
        for name in value.keys() - loaded.keys():
            del value[name]
        for name, entry in value.items():
            _drop_stale(entry, loaded[name])


class Rng(PerRank["_Generators"]):
    """The global random generators of this rank: Python's, numpy's, torch's, and that of the current accelerator."""

    def __init__(self, on_resize: OnResize = "raise") -> None:
        super().__init__(_Generators(), on_resize)

    def load_state_dict(self, state_dict: AnyDict) -> None:
        """Set the generators. ``outcome`` says which one could not be set."""
        super().load_state_dict(state_dict)
        self.outcome += self.value.left_out if state_dict else ""


class _Generators:
    """The state of the global generators. It is in arrays, because thousands of numbers do not belong in a manifest."""

    left_out = ""

    def state_dict(self) -> AnyDict:
        version, words, gauss = random.getstate()
        state: AnyDict = {
            "python": {"version": version, "words": torch.tensor(words, device="cpu"), "gauss": gauss},
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
        }
        device = torch.accelerator.current_accelerator(check_available=True)
        if device is not None:
            state["device"] = {"type": device.type, "state": torch.get_device_module(device).get_rng_state().cpu()}
        return state

    def load_state_dict(self, state_dict: AnyDict) -> None:
        python = state_dict["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        np.random.set_state(state_dict["numpy"])
        torch.set_rng_state(state_dict["torch"])
        device = torch.accelerator.current_accelerator(check_available=True)
        saved, here = state_dict.get("device", {}).get("type"), None if device is None else device.type
        self.left_out = ""
        if saved is not None and saved == here:
            torch.get_device_module(device).set_rng_state(state_dict["device"]["state"])
        elif saved != here:
            self.left_out = f", without the generator of {here or saved}, which is not {'here' if saved else 'saved'}"
            logger.warning("the random generators were restored%s", self.left_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRanks:
    """The ``PerRank`` values of one target, and what the checkpoint, whose keys are ``names``, has for them.

    ``place`` is the number of this rank among those that load, and how many they are. ``found`` has the values that
    were saved, ``want_nothing`` the paths of those that stay as they are, ``refused`` why some cannot be restored.
    """

    names: Collection[str]
    place: tuple[int, int]
    found: dict[str, PerRank[Any]]
    want_nothing: set[Path] = field(default_factory=set)
    refused: list[Difference] = field(default_factory=list)

    def room_for(self, value: object, trail: Path) -> AnyDict | None:
        """What the target has in the place of ``value``; None if that is its state, as for any other object."""
        if not isinstance(value, PerRank):
            return None
        key = path_key(trail)
        start = f"{key}.{_PREFIX}"
        numbers = {name[len(start) :].partition(".")[0] for name in self.names if name.startswith(start)}
        saved = sorted(int(number) for number in numbers if number.isdecimal() and len(number) <= _MOST_DIGITS)
        if not saved:
            value.outcome = "fresh"
            return None  # so its keys are reported as missing, as for any other object
        self.found[key] = value
        room = value.prepare(saved, self.place)
        if room is not None:
            return room
        self.want_nothing.add(trail)
        stored, wanted = f"values of {len(saved)} ranks", f"{self.place[1]} ranks"
        if len(saved) == self.place[1]:
            stored, wanted = f"values of ranks {', '.join(map(str, saved))}", f"rank {job_rank()}"
        if value.on_resize == "raise":
            self.refused.append(Difference(key=key, kind="ranks", stored=stored, wanted=wanted))
        else:
            logger.warning("%r has %s in the checkpoint, and is left as it is on %s", key, stored, wanted)
        return {}
