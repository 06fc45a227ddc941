"""Keys of the target that share memory, settled: equal data is loaded, different data is told.

What the planner could not know from digests is known by reading. The first key of a tie is loaded with everything else;
then, one after the other, what is stored of the rest is compared with the memory, or loaded, and what was there before
compared with it. So the memory never holds a mixture: in the end the last key in the order of the target is whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from holdfast._state.ties import Place, Tie
from holdfast._values.box import Box, flat_range_boxes, whole
from holdfast._values.lazy import LazyList
from holdfast.default_planner.load_planner import DefaultLoadPlanner, tied
from holdfast.errors import Difference, MismatchError
from holdfast.metadata import TensorStorageMetadata
from holdfast.planner import LoadPlan
from holdfast.planner_helpers import ReadRows
from holdfast.storage import StorageReader

# So much is read aside at a time.
_COMPARED_BYTES = 16 << 20


def settle_ties(planner: DefaultLoadPlanner, reader: StorageReader, plan: LoadPlan) -> None:
    """Load what ``plan``, which has been read, has left out; MismatchError, or a difference, for what does not fit."""
    for tie in planner.ties:
        _Settling(planner, reader, plan).settle(tie)


class _Settling:
    def __init__(self, planner: DefaultLoadPlanner, reader: StorageReader, plan: LoadPlan) -> None:
        self._planner = planner
        self._reader = reader
        self._plan = plan

    def settle(self, tie: Tie) -> None:
        """Have what is stored of the last key in the memory, and of the others what it leaves of them."""
        first, *others = tie.keys
        if tie.is_exact:
            other = next((key for key in others if not self._is_there(key)), None)
            if other is None:
                return
            if self._planner.strict:
                raise _mismatch([tied(first, other)])
            others = others[-1:]
        for key in others:
            self._read(key)
        differences = [tied(key, tie.keys[-1]) for key in tie.keys[:-1] if not self._is_there(key)]
        if differences and self._planner.strict:
            raise _mismatch(differences)
        self._planner.differences += differences

    def _read(self, key: str) -> None:
        self._read_into(self._planner, ((key, place.box) for place in self._planner.places(key)))

    def _read_into(self, planner: DefaultLoadPlanner, boxes: Iterator[tuple[str, Box | None]]) -> None:
        rows = ReadRows()
        for key, box in boxes:
            rows.add_tensor(key, self._stored(key), box)
        self._reader.read_data(dataclasses.replace(self._plan, items=LazyList(rows.columns())), planner).wait()

    def _stored(self, key: str) -> TensorStorageMetadata:
        assert self._planner.metadata is not None
        stored = self._planner.metadata.state_dict_metadata[key]
        assert isinstance(stored, TensorStorageMetadata)
        return stored

    def _is_there(self, key: str) -> bool:
        """Whether the memory of ``key`` holds what is stored of it, bit for bit."""
        return all(self._holds(place, part) for place in self._planner.places(key) for part in _parts(place.tensor))

    def _holds(self, place: Place, part: Box) -> bool:
        held = place.tensor[part.slices()]
        aside = held.clone() if held.is_quantized else torch.empty(held.shape, dtype=held.dtype, device=held.device)
        offsets = (0,) * len(part.offsets) if place.box is None else place.box.offsets
        box = Box(tuple(low + by for low, by in zip(part.offsets, offsets, strict=True)), part.lengths)
        planner = DefaultLoadPlanner(flatten_state_dict=False, cast=self._planner.cast)
        planner.state_dict = {place.key: aside}
        self._read_into(planner, iter([(place.key, box)]))
        return torch.equal(_bits(held), _bits(aside))


def _mismatch(differences: list[Difference]) -> MismatchError:
    return MismatchError.of(
        differences,
        advice="Give each key a memory of its own, or pass strict=False to have the last one. "
        "The contents of the target are undefined now.",
    )


def _parts(tensor: torch.Tensor) -> Iterator[Box]:
    """The tensor in boxes that are not too large; a quantised one as a whole, since its scales may go with its rows."""
    if tensor.is_quantized:
        yield whole(tensor.shape)
        return
    step = max(1, _COMPARED_BYTES // tensor.element_size())
    for start in range(0, tensor.numel(), step):
        yield from flat_range_boxes(tuple(tensor.shape), start, min(start + step, tensor.numel()))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """What the elements are, bit for bit; of a quantised tensor, what they stand for."""
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
