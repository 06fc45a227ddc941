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
from holdfast._native import merge, writer
from holdfast._native.report import report_of
from holdfast._torch_codec.pickles import decode_message, encode_message
from holdfast.planner import write_columns
from tools.timeless import timeless


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
    merged = [result for result, _ in job.board.rounds[-1]]
    assert all(report_of(result).planning for result in merged)
    monkeypatch.setattr(merge, "_plan_of_all", lambda metadata, reports: None)
    job.save(rich(ranks))
    for name in (f"index-{ATTEMPT}.safetensors", "manifest.json"):
        short, long = (timeless(tmp_path / number / name) for number in ("1", "2"))
        assert short == long, name
    for number in ("1", "2"):
        assert torch.equal(holdfast.load(tmp_path / number)["large"], rich(1)[0]["large"])


def test_a_report_that_was_sent_without_its_plan_says_the_same_with_it(tmp_path: Path) -> None:
    job = Job(2, tmp_path)
    job.save(rich(2))
    for rank, (result, _) in enumerate(job.board.rounds[-1]):
        sent = report_of(result)
        received = report_of(decode_message(encode_message(result)))
        with pytest.raises(holdfast.InternalError, match="unknown plan"):
            received.item(0)
        bound = received.with_plan(lambda rank=rank: write_columns(job.planners[rank].plan.items))
        assert list(map(repr, map(bound.item, range(len(bound))))) == list(map(repr, map(sent.item, range(len(sent)))))


def test_results_that_somebody_looked_at_say_the_same(tmp_path: Path) -> None:
    job = Job(2, tmp_path)
    job.save(rich(2))
    for result, _ in job.board.rounds[-1]:
        report = report_of(result)
        again = report_of([report.item(row) for row in range(len(report))])
        assert list(map(repr, map(again.item, range(len(again))))) == [
            repr(report.item(row)) for row in range(len(report))
        ]


@pytest.mark.parametrize("fault", ["offset", "row", "digests", "file"])
def test_reports_that_are_not_whole_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    found: list[Any] = []
    keep = writer.merge_reports

    def spoilt(metadata: Metadata, reports: Any, **options: Any) -> Any:
        report = reports[1]
        found.append(report)
        assert report.planning
        if fault == "offset":
            report = dataclasses.replace(report, offset=report.offset + np.uint32(8))
        elif fault == "digests":
            report = dataclasses.replace(report, digests=report.digests[:-1])
        elif fault == "file":
            report = dataclasses.replace(report, files=[dataclasses.replace(report.files[0], bytes=1 << 20)])
        else:
            report = dataclasses.replace(report, row=np.zeros_like(report.row))
        return keep(metadata, [reports[0], report], **options)

    monkeypatch.setattr(writer, "merge_reports", spoilt)
    job = Job(2, tmp_path)
    with pytest.raises(holdfast.CheckpointError, match=r"not whole|not the planned ones"):
        job.save([{f"w{number}": torch.ones(64) for number in range(6)}] * 2)
    assert len(found) == 1
    with pytest.raises(holdfast.NotFoundError):
        job.loaded()
