"""What the coordinator refuses to publish: reports of the ranks that do not make up what was planned."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import holdfast
from holdfast._native import writer as writer_module
from holdfast._native.merge import merge_reports
from holdfast._native.report import WriteReport
from holdfast.errors import InternalError, InvalidStateError
from holdfast.metadata import Metadata


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Metadata, WriteReport]:
    """What a save of two tensors, one tied twice, and a value planned, and what its one rank reported."""
    seen: list[tuple[Metadata, WriteReport]] = []

    def merging(metadata: Metadata, reports: list[WriteReport], **options: Any) -> Any:
        seen.append((metadata, reports[0]))
        return merge_reports(metadata, reports, **options)

    monkeypatch.setattr(writer_module, "merge_reports", merging)
    weight = torch.arange(6.0)
    holdfast.save({"weight": weight, "tied": weight, "bias": torch.ones(2), "step": 1}, tmp_path / "checkpoint")
    return seen[0]


def merge(metadata: Metadata, *reports: WriteReport) -> Any:
    return merge_reports(metadata, reports, attempt="a", versions=("1", "2", "3"), user_metadata={})


def test_what_was_planned_and_written_is_merged(saved: tuple[Metadata, WriteReport]) -> None:
    manifest, index = merge(*saved)
    assert sorted(entry.key for entry in manifest.tensors) == ["bias", "tied", "weight"]
    assert [entry.key for entry in manifest.values] == ["step"]
    assert len(index) == manifest.index.bytes


def test_a_value_that_nobody_wrote_is_refused(saved: tuple[Metadata, WriteReport]) -> None:
    metadata, report = saved
    with pytest.raises(InternalError, match="'step' was planned but no rank wrote it"):
        merge(metadata, dataclasses.replace(report, values={}))


def without(report: WriteReport, key: str) -> WriteReport:
    """The report of a plan without that key, of which it wrote as much as before."""
    columns, number = report.columns, report.columns.keys.index(key)
    heads = [None if which == number else head for which, head in enumerate(columns.heads)]
    return dataclasses.replace(report, plan=dataclasses.replace(columns, heads=heads))


def test_a_tensor_that_nobody_wrote_is_refused(saved: tuple[Metadata, WriteReport]) -> None:
    metadata, report = saved
    with pytest.raises(InternalError, match="'tied' was planned but no rank wrote it"):
        merge(metadata, without(report, "tied"))


def test_a_tensor_that_nobody_planned_is_refused(saved: tuple[Metadata, WriteReport]) -> None:
    metadata, report = saved
    less = {key: value for key, value in metadata.state_dict_metadata.items() if key != "bias"}
    with pytest.raises(InternalError, match="a rank wrote a key that the metadata does not have"):
        merge(dataclasses.replace(metadata, state_dict_metadata=less), report)


def test_ranks_that_wrote_one_key_differently_are_refused(saved: tuple[Metadata, WriteReport]) -> None:
    metadata, report = saved
    tensors = {key: msgspec.structs.replace(tensor, dtype="int32") for key, tensor in report.written.items()}
    with pytest.raises(InvalidStateError, match=r"was written as float32 .* and as int32"):
        merge(metadata, report, dataclasses.replace(report, tensors=tensors))


def test_chunks_that_do_not_tile_are_refused(saved: tuple[Metadata, WriteReport]) -> None:
    metadata, report = saved
    columns = report.columns
    lo = columns.lo.copy()
    lo[columns.key == columns.keys.index("weight"), 0] = 1
    with pytest.raises(InvalidStateError, match=r"what was written of 'weight' is not whole") as caught:
        merge(metadata, dataclasses.replace(report, plan=dataclasses.replace(columns, lo=lo)))
    assert caught.value.key == "weight"


def test_a_chunk_outside_of_its_file_is_refused(saved: tuple[Metadata, WriteReport]) -> None:
    metadata, report = saved
    with pytest.raises(InvalidStateError, match="what rank 0 wrote is not whole"):
        merge(metadata, dataclasses.replace(report, offset=report.offset + np.int64(4096)))


def test_an_alias_of_a_tensor_that_nobody_wrote_is_refused(saved: tuple[Metadata, WriteReport]) -> None:
    metadata, report = saved
    tied = msgspec.structs.replace(report.written["tied"], alias_of="nothing")
    with pytest.raises(InvalidStateError, match="'nothing', which nobody wrote") as caught:
        merge(metadata, dataclasses.replace(report, tensors={"tied": tied}))
    assert caught.value.key == "tied"
