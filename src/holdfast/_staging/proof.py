"""Proof that a checkpoint is the snapshot: numbers of every tensor at the call, compared with what was written.

A number is the sum of all 8-byte words, each times a weight of its place, modulo 2**64: the same on every device, cheap
enough to take on one, and sure to tell one changed word. It finds accidents (a tensor that was changed too early), not
attackers. And a memory of the last save, to tell which tensors have not changed since.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch

from holdfast._native.image import Copy
from holdfast._native.report import WriteReport
from holdfast._staging.memory import Region
from holdfast._state.pieces import pieces_of
from holdfast._state.raw import MemorySource, ScatteredSource, Source
from holdfast._values.digest import combine
from holdfast._values.forks import forget_in_child
from holdfast.errors import InvalidStateError

_PIECE_BYTES = 8 << 20
_STEP = 0x9E3779B97F4A7C15
_SHOWN = 3


class Fingerprints:
    """The numbers of all ``copies`` as they are when this is made, taken on the current streams of their devices."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._places: dict[torch.device, list[tuple[str, int, int]]] = {}
        numbers: dict[torch.device, list[torch.Tensor]] = {}
        for copy in copies:
            number = _number(copy.source)
            self._places.setdefault(number.device, []).append((copy.name, copy.at, copy.source.nbytes))
            numbers.setdefault(number.device, []).append(number)
        self._numbers = {device: torch.stack(each) for device, each in numbers.items()}
        self._taken = [torch.cuda.current_stream(each).record_event() for each in numbers if each.type == "cuda"]

    def compare(self, region: Region) -> None:
        """InvalidStateError, naming the tensors, unless ``region`` holds what there was at the call."""
        for event in self._taken:
            event.synchronize()
        wrong = [
            name
            for device, places in self._places.items()
            for (name, at, nbytes), number in zip(places, self._numbers[device].tolist(), strict=True)
            if int(_number(MemorySource(region, region.address + at, nbytes))) != number
        ]
        if wrong:
            more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise InvalidStateError(
                f"{', '.join(map(repr, wrong[:_SHOWN]))}{more} changed between the call of async_save and the copy; "
                "wait for the handle's wait_staged(), guard the optimizer, or name them in copy_now",
                key=wrong[0],
            )


def _number(source: Source) -> torch.Tensor:
    """One number as a tensor without dimensions, on the device of the bytes."""
    assert isinstance(source, (MemorySource, ScatteredSource)), "only what is in memory is staged"
    total: torch.Tensor | None = None
    for piece in source.pieces(_PIECE_BYTES):
        rest = piece.numel() % 8
        if rest:
            piece = torch.nn.functional.pad(piece, (0, 8 - rest))
        elif piece.data_ptr() % 8:
            piece = piece.clone()
        words = piece.view(torch.int64)
        part = (words * _weights(piece.device)[: len(words)]).sum()
        total = part if total is None else total * _weights(piece.device)[0] + part
    return torch.zeros((), dtype=torch.int64, device="cpu") if total is None else total


@lru_cache(maxsize=16)
def _weights(device: torch.device) -> torch.Tensor:
    """Odd numbers, so that no change of one word is lost."""
    places = np.arange(1, _PIECE_BYTES // 8 + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = places * np.uint64(_STEP)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9) | np.uint64(1)
    return torch.from_numpy(mixed.view(np.int64)).to(device)


class Changes:
    """What this rank wrote of each tensor at the save before, as one digest of all its bytes here."""

    def __init__(self) -> None:
        self.forget_parent()
        forget_in_child(self)

    def forget_parent(self) -> None:
        """Have nothing to compare with."""
        self._before: dict[str, int] = {}

    def unchanged(self, report: WriteReport, chosen: Collection[str]) -> tuple[str, ...]:
        """The keys of ``chosen`` that were written just as the time before; ``report`` is for the next comparison."""
        before, self._before = self._before, _digests(report)
        return tuple(key for key in chosen if key in self._before and before.get(key) == self._before[key])


def _digests(report: WriteReport) -> dict[str, int]:
    bounds = report.first_block()
    parts: dict[str, list[np.ndarray]] = {}
    for row, key in enumerate(report.key.tolist()):
        box = np.concatenate([report.lo[row], report.length[row]]).astype(np.uint64)
        parts.setdefault(report.keys[key], []).append(
            np.concatenate([box, report.digests[bounds[row] : bounds[row + 1]]])
        )
    return {key: combine(np.concatenate(each)) for key, each in parts.items()}


def trained_keys(leaves: Mapping[str, object], optimizers: Iterable[torch.optim.Optimizer]) -> list[str]:
    """The keys of the tensors for which an optimizer has state, known by their memory or by the names in its state."""
    addresses = {
        _address(parameter)
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        if state and isinstance(parameter, torch.Tensor)
    } - {0}
    names = {
        name.rpartition(".")[0] for key in leaves for _, mark, name in [f".{key}".partition(".state.")] if mark
    } - {""}
    return [
        key
        for key, leaf in leaves.items()
        if isinstance(leaf, torch.Tensor) and (_address(leaf) in addresses or any(_tails(key, names)))
    ]


def _tails(key: str, names: Collection[str]) -> Iterable[str]:
    """Those of ``names`` that are the end of ``key``, from a dot on; numbers name no tensor."""
    steps = key.split(".")
    for start in range(len(steps)):
        tail = ".".join(steps[start:])
        if tail in names and not tail.isdigit():
            yield tail


def _address(tensor: torch.Tensor) -> int:
    """Where the first part of the tensor that this rank has is; 0 for one without memory of its own."""
    try:
        return next((piece.tensor.data_ptr() for piece in pieces_of("", tensor).pieces if piece.tensor.numel()), 0)
    except InvalidStateError:
        return 0  # an optimizer may have tensors that could not be saved, and nobody does
