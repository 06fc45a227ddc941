"""What ranks report after writing, short where the plan says the rest and in full where not."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from thread_ranks import ATTEMPT, Job, states

import holdfast
from holdfast import Metadata
from holdfast._native import file_layout as work
from holdfast._native import merge
from holdfast._native.report import ShortReport, WriteReport, report_of
from holdfast._torch_codec.pickles import decode_message, encode_message
from holdfast.planner import write_columns


def rich(ranks: int) -> list[dict[str, Any]]:
    large = torch.arange(3 << 18, dtype=torch.float32).view(3, -1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates them
        quantised = torch.quantize_per_tensor(torch.arange(6.0), 0.5, 1, torch.qint8)
    extra = {"large": large, "quantised": quantised, "empty": torch.empty(0, 2), "text": "x" * 100_000, "bytes": b"y"}
    return [{**state, **extra, f"blob.{rank}": bytes(70_000 + rank)} for rank, state in enumerate(states(ranks))]


@pytest.mark.parametrize("ranks", [2, 3])
def test_short_reports_make_the_same_bytes_as_long_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    job = Job(ranks, tmp_path)
    job.save(rich(ranks))
    merged = job.board.rounds[-1]
    for report in map(report_of, merged):
        assert isinstance(report, WriteReport)
        assert report.short is not None
    monkeypatch.setattr(work, "shortened", lambda report, plan, rows: report)
    job.save(rich(ranks))
    for name in (f"index-{ATTEMPT}.safetensors", "manifest.json"):
        short, long = ((tmp_path / number / name).read_bytes() for number in ("1", "2"))
        assert short == long, name
    for number in ("1", "2"):
        assert torch.equal(holdfast.load(tmp_path / number)["large"], rich(1)[0]["large"])


def test_a_short_report_in_full_is_the_long_one(tmp_path: Path) -> None:
    job = Job(2, tmp_path)
    job.save(rich(2))
    for rank, result in enumerate(job.board.rounds[-1]):
        long = report_of(result)
        assert isinstance(long, WriteReport)
        short = decode_message(encode_message(long))
        assert isinstance(short, ShortReport)
        columns = write_columns(job.planners[rank].plan.items)
        short.plan = lambda columns=columns: columns
        full = short.whole()
        assert sorted(map(repr, map(full.item, range(len(full))))) == sorted(
            map(repr, map(long.item, range(len(long))))
        )


@pytest.mark.parametrize("fault", ["offset", "row", "digests", "file"])
def test_reports_that_are_not_whole_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    found: list[Any] = []
    keep = merge.short_reports

    def spoilt(metadata: Metadata, reports: Any) -> Any:
        plan, shorts = keep(metadata, reports) or (None, None)
        assert shorts is not None
        short = shorts[1]
        found.append(short)
        if fault == "offset":
            short = dataclasses.replace(short, offset=short.offset + np.uint32(8))
        elif fault == "digests":
            short = dataclasses.replace(short, digests=short.digests[:-1])
        elif fault == "file":
            short = dataclasses.replace(short, files=[dataclasses.replace(short.files[0], bytes=1 << 20)])
        else:
            short = dataclasses.replace(short, row=np.zeros_like(short.row))
        return plan, [shorts[0], short]

    monkeypatch.setattr(merge, "short_reports", spoilt)
    job = Job(2, tmp_path)
    with pytest.raises(holdfast.CheckpointError, match=r"not whole|not written once"):
        job.save([{f"w{number}": torch.ones(64) for number in range(6)}] * 2)
    assert len(found) == 1
    with pytest.raises(holdfast.NotFoundError):
        job.loaded()
