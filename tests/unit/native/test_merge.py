"""What the coordinator refuses to publish: results of the ranks that do not make up what was planned."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import holdfast
from holdfast.errors import InternalError, InvalidStateError
from holdfast.metadata import Metadata
from holdfast.storage import WriteResult

Ranks = list[list[WriteResult]]
Change = Callable[[Metadata, list[WriteResult]], tuple[Metadata, Ranks]]


class Changing(holdfast.NativeWriter):
    """A writer whose coordinator gets something else than what was planned and written."""

    def __init__(self, path: Path, change: Change) -> None:
        super().__init__(path, attempt="a")
        self._change = change

    def finish(self, metadata: Metadata, results: Any) -> None:
        (result,) = results
        metadata, changed = self._change(metadata, list(result))
        super().finish(metadata, changed)


def save(path: Path, change: Change) -> None:
    """A save of two tensors, one tied twice, and a value."""
    weight = torch.arange(6.0)
    state = {"weight": weight, "tied": weight, "bias": torch.ones(2), "step": 1}
    holdfast.save(state, storage_writer=Changing(path, change))


def refuse(path: Path, error: type[Exception], words: str, change: Change) -> Any:
    with pytest.raises(error, match=words) as caught:
        save(path, change)
    assert os.listdir(path) == []
    return caught.value


def stored(result: WriteResult, **changes: Any) -> WriteResult:
    """The result, with something else about the chunk."""
    return dataclasses.replace(result, storage_data=dataclasses.replace(result.storage_data, **changes))


def tensor(result: WriteResult, **changes: Any) -> WriteResult:
    """The result, with something else about the tensor; of a tied one there is no chunk."""
    if result.size_in_bytes == 0:
        return dataclasses.replace(result, storage_data=msgspec.structs.replace(result.storage_data, **changes))
    return stored(result, tensor=msgspec.structs.replace(result.storage_data.tensor, **changes))


def without(key: str) -> Change:
    return lambda metadata, results: (metadata, [[result for result in results if result.index.fqn != key]])


def with_other(key: str, change: Callable[[WriteResult], WriteResult]) -> Change:
    return lambda metadata, results: (
        metadata,
        [[change(result) if result.index.fqn == key else result for result in results]],
    )


def test_what_was_planned_and_written_is_merged(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint", lambda metadata, results: (metadata, [results]))
    loaded = holdfast.load(tmp_path / "checkpoint")
    assert {key: loaded[key].tolist() for key in ("weight", "tied", "bias")} == {
        "weight": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
        "tied": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
        "bias": [1.0, 1.0],
    }
    assert loaded["step"] == 1
    with holdfast.open(tmp_path / "checkpoint") as checkpoint:
        assert checkpoint["tied"].alias_of == "weight"


@pytest.mark.parametrize("key", ["step", "tied", "bias"])
def test_a_key_that_nobody_wrote_is_refused(tmp_path: Path, key: str) -> None:
    refuse(tmp_path, InternalError, f"'{key}' was planned but no rank wrote it", without(key))


def test_a_tensor_that_nobody_planned_is_refused(tmp_path: Path) -> None:
    def change(metadata: Metadata, results: list[WriteResult]) -> tuple[Metadata, Ranks]:
        less = {key: entry for key, entry in metadata.state_dict_metadata.items() if key != "bias"}
        return dataclasses.replace(metadata, state_dict_metadata=less), [results]

    refuse(tmp_path, InternalError, "a rank wrote a key that the metadata does not have", change)


def test_ranks_that_wrote_one_key_differently_are_refused(tmp_path: Path) -> None:
    def change(metadata: Metadata, results: list[WriteResult]) -> tuple[Metadata, Ranks]:
        chunks = [result for result in results if result.index.fqn != "step"]
        return metadata, [results, [tensor(result, dtype="int32") for result in chunks]]

    refuse(tmp_path, InvalidStateError, r"was written as float32 .* and as int32", change)


def test_chunks_that_do_not_tile_are_refused(tmp_path: Path) -> None:
    change = with_other("weight", lambda result: stored(result, lo=(1,)))
    error = refuse(tmp_path, InvalidStateError, r"'weight' was not written as a whole", change)
    assert error.key == "weight"


def test_a_chunk_outside_of_its_file_is_refused(tmp_path: Path) -> None:
    change = with_other("weight", lambda result: stored(result, offset=result.storage_data.offset + 4096))
    refuse(tmp_path, InvalidStateError, "what rank 0 wrote is not whole", change)


def test_a_chunk_without_its_digests_is_refused(tmp_path: Path) -> None:
    change = with_other("weight", lambda result: stored(result, digests=()))
    refuse(tmp_path, InvalidStateError, "what rank 0 wrote is not whole", change)


def test_an_alias_of_a_tensor_that_nobody_wrote_is_refused(tmp_path: Path) -> None:
    change = with_other("tied", lambda result: tensor(result, alias_of="nothing"))
    error = refuse(tmp_path, InvalidStateError, "'nothing', which no rank wrote", change)
    assert error.key == "tied"
