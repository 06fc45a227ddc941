"""What one rank has to write: the leaves of its state as write items, in columns."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from holdfast._state.pieces import Pieces, Spread, is_sharded, pieces_of
from holdfast._state.tensors import (
    DTYPE_NAMES,
    as_tensor,
    check_savable,
    fingerprint_of_tensor,
    fingerprint_of_value,
    plain_address,
)
from holdfast._values.dtypes import MAX_DIMENSIONS
from holdfast.metadata import STATE_DICT_TYPE, TensorProperties
from holdfast.planner import Memory, TensorHead, WriteColumns, padded

_Memory = tuple[object, ...]
# Number of the key, offsets, lengths, whether it is a shard.
_Row = tuple[int, tuple[int, ...], tuple[int, ...], bool]
EVERYWHERE, UNKNOWN = "everywhere", "unknown"
_ZEROS = [(0,) * dimensions for dimensions in range(MAX_DIMENSIONS + 1)]


class LocalLeaves:
    """The leaves of one rank's state: ``columns`` to be planned, ``pieces`` of the leaves that are sharded.

    ``memory`` has those that are plain tensors.
    ``replica_check`` says how the contents of what several ranks may hold are compared: "sample", "all" or "off";
    ``lenient`` are keys of which they may differ.
    ``spreads`` tells for each key how it is spread: EVERYWHERE where each rank has all of it, over a mesh, or UNKNOWN
    where only the rank itself knows what it holds.
    """

    def __init__(
        self, leaves: STATE_DICT_TYPE, *, replica_check: str = "off", lenient: frozenset[str] = frozenset()
    ) -> None:
        self.pieces: dict[str, Pieces] = {}
        self.memory: dict[str, Memory] = {}
        self.spreads: list[Spread | str] = []
        self._contents: list[object] = []
        self._heads: list[TensorHead | None] = []
        self._rows: list[_Row] = []
        self._firsts: dict[int, list[tuple[str, torch.Tensor]]] = {}
        self._sharded_firsts: dict[_Memory, str] = {}
        for number, (key, leaf) in enumerate(leaves.items()):
            self._add(number, key, leaf)
        # One tuple for each row, and columns of them at the end: the cheapest way to thousands of rows.
        numbers, lows, lengths, is_shard = zip(*self._rows, strict=True) if self._rows else [()] * 4
        self.columns = WriteColumns(
            keys=list(leaves),
            heads=self._heads,
            key=np.array(numbers, dtype=np.int64),
            lo=padded(lows, fill=0),
            length=padded(lengths, fill=1),
            hint=np.zeros(len(self._rows), dtype=np.int64),
            is_shard=np.array(is_shard, dtype=bool),
            fingerprint=self.fingerprints(np.arange(len(self._rows)), replica_check),
            lenient=lenient,
        )

    def fingerprints(self, rows: np.ndarray, replica_check: str) -> np.ndarray:
        """What tells the contents of these rows apart, looked at as ``replica_check`` says; 0 where nobody looked."""
        if replica_check == "off":
            return np.zeros(len(rows), dtype=np.uint64)
        everything = replica_check == "all"
        return np.array(
            [
                fingerprint_of_tensor(content, everything=everything)
                if isinstance(content, torch.Tensor)
                else fingerprint_of_value(content)
                for content in map(self._contents.__getitem__, rows.tolist())
            ],
            dtype=np.uint64,
        )

    def _add(self, number: int, key: str, leaf: object) -> None:
        if isinstance(leaf, torch.Tensor):
            address = plain_address(leaf)
            if address and leaf.dtype in DTYPE_NAMES:
                self.memory[key] = leaf, address
            else:
                if is_sharded(leaf):
                    self._add_sharded(number, key, leaf)
                    return
                check_savable(key, leaf)
                address = leaf.data_ptr()
            self._add_whole(number, leaf, self._head_of(key, leaf, address))
        elif isinstance(leaf, np.ndarray):
            tensor = as_tensor(key, leaf)
            self._add_whole(number, tensor, TensorHead(properties_of(tensor.dtype, False), tensor.shape, None, "numpy"))
        else:
            self._heads.append(None)
            self._rows.append((number, (), (), False))
            self._contents.append(leaf)
            self.spreads.append(EVERYWHERE)

    def _add_whole(self, number: int, tensor: torch.Tensor, head: TensorHead) -> None:
        shape = head.size
        self._heads.append(head)
        self._rows.append((number, _ZEROS[len(shape)], shape, False))
        self._contents.append(tensor)
        self.spreads.append(EVERYWHERE)

    def _add_sharded(self, number: int, key: str, leaf: torch.Tensor) -> None:
        self.pieces[key] = pieces = pieces_of(key, leaf)
        for piece in pieces.pieces:
            check_savable(key, piece.tensor)
            self._rows.append((number, piece.box.offsets, piece.box.lengths, True))
            self._contents.append(piece.tensor)
        self.spreads.append(pieces.spread or UNKNOWN)
        alias_of = None
        if pieces.pieces:
            memory = tuple((piece.tensor.data_ptr(), piece.box, piece.tensor.stride()) for piece in pieces.pieces)
            first = self._sharded_firsts.setdefault((pieces.size, pieces.dtype, memory), key)
            alias_of = None if first == key else first
        self._heads.append(TensorHead(properties_of(pieces.dtype, pieces.requires_grad), pieces.size, alias_of))

    def _head_of(self, key: str, tensor: torch.Tensor, address: int) -> TensorHead:
        """What ``tensor`` is; tied to the first one that has just the same memory."""
        alias_of = None
        shape = tensor.shape
        if 0 not in shape:
            mine = key, tensor
            neighbours = self._firsts.setdefault(address, [mine])
            if neighbours[0] is not mine:
                alias_of = next((other for other, first in neighbours if _is_same_memory(first, tensor)), None)
                if alias_of is None:
                    neighbours.append(mine)
        return TensorHead(properties_of(tensor.dtype, tensor.requires_grad), shape, alias_of)


def _is_same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors that start at the same address have the same elements and always will."""
    return (
        first.device == second.device
        and first.dtype == second.dtype
        and first.shape == second.shape
        and first.stride() == second.stride()
        and first.is_conj() == second.is_conj()
        and first.is_neg() == second.is_neg()
    )


@cache
def properties_of(dtype: torch.dtype, requires_grad: bool) -> TensorProperties:
    """One object for all tensors that are alike: whoever hands it out makes a copy."""
    return TensorProperties(dtype, torch.strided, requires_grad)
