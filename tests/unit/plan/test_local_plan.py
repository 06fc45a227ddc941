"""What one rank offers to write: a row per leaf, ties, and fingerprints only where ranks may have to compare."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from holdfast._save_plan.plans import LocalLeaves
from holdfast.errors import InvalidStateError
from holdfast.metadata import ChunkStorageMetadata


class HalfHeld(torch.Tensor):
    """Rows 2 and 5 of six, as two chunks: a tensor that knows its own part."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> HalfHeld:
        return torch.Tensor._make_subclass(cls, data)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([1, 3])) for row in (2, 5)]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        row = index.offset[0]
        return self.as_subclass(torch.Tensor)[row : row + 1]


def test_every_leaf_is_one_row_in_the_order_of_the_state() -> None:
    state = {"w": torch.ones(2, 3), "step": 3, "array": np.ones(4, dtype=np.int16), "scalar": torch.tensor(1.0)}
    columns = LocalLeaves(state).columns
    assert columns.keys == list(state)
    assert columns.key.tolist() == [0, 1, 2, 3]
    assert columns.length.tolist() == [[2, 3], [1, 1], [4, 1], [1, 1]]
    assert not columns.is_shard.any()
    kinds = [None if head is None else (head.properties.dtype, head.kind) for head in columns.heads]
    assert kinds == [(torch.float32, None), None, (torch.int16, "numpy"), (torch.float32, None)]


def test_requires_grad_is_kept() -> None:
    heads = LocalLeaves({"w": torch.nn.Parameter(torch.ones(2)), "b": torch.ones(2)}).columns.heads
    assert [head is not None and head.properties.requires_grad for head in heads] == [True, False]


def test_a_sharded_leaf_is_one_row_per_piece() -> None:
    held = HalfHeld(torch.arange(18.0).view(6, 3))
    local = LocalLeaves({"table": held, "same": held}, replica_check="all")
    columns = local.columns
    assert columns.lo.tolist() == [[2, 0], [5, 0], [2, 0], [5, 0]]
    assert columns.length.tolist() == [[1, 3]] * 4
    assert columns.is_shard.all()
    assert [None if head is None else head.alias_of for head in columns.heads] == [None, "table"]
    assert set(local.pieces) == {"table", "same"}
    fingerprints = columns.fingerprint
    assert fingerprints is not None
    assert len(set(fingerprints.tolist())) == 2


def test_only_the_very_same_memory_is_tied() -> None:
    weight = torch.ones(4, 4)
    state = {
        "first": weight,
        "same": weight.view(4, 4),
        "transposed": weight.t(),
        "part": weight[:2],
        "bits": weight.view(torch.int32),
        "copy": weight.clone(),
        "empty": torch.empty(0),
        "empty too": torch.empty(0),
    }
    heads = LocalLeaves(state).columns.heads
    ties = {key: head.alias_of for key, head in zip(state, heads, strict=True) if head is not None and head.alias_of}
    assert ties == {"same": "first"}


@pytest.mark.parametrize("check", ["sample", "all"])
def test_fingerprints_are_made_only_when_they_are_asked_for(check: str) -> None:
    state = {"w": torch.ones(3), "step": 1, "array": np.ones(2)}
    looked_at = LocalLeaves(state, replica_check=check).columns.fingerprint
    not_looked_at = LocalLeaves(state).columns.fingerprint
    assert looked_at is not None
    assert not_looked_at is not None
    assert (looked_at != 0).all()
    assert (not_looked_at == 0).all()


def test_what_has_no_data_is_refused_by_name() -> None:
    with pytest.raises(InvalidStateError, match="'w'"):
        LocalLeaves({"w": torch.ones(3, device="meta")})


def test_an_empty_state_has_no_rows() -> None:
    assert len(LocalLeaves({}).columns) == 0
