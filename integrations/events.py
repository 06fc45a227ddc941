"""Run the blocks of docs/guides/events.md that need somebody else's package, and look what arrived there; offline.

Prints what came of each. The exit code is 0 when every package that can run on this machine got what it should; one
that cannot is listed with the reason. ``python integrations/events.py [package ...]`` chooses.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast import events

GUIDE = Path(__file__).parents[1] / "docs" / "guides" / "events.md"
TIMEOUT_S = 300
STEPS = (7, 8)
NUMBERS = {"checkpoint/total_s", "checkpoint/write_s", "checkpoint/write_slowest_rank", "checkpoint/bytes"}


class CannotRun(Exception):
    """The package needs something that this machine does not have; the message says what."""


def block(name: str) -> str:
    """The block of the guide that needs the package ``name``."""
    found = re.findall(rf"<!-- not run: {name} .*? -->\n```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(found) == 1, f"{GUIDE} has {len(found)} blocks for {name}"
    return str(found[0])


def subscribe(name: str, **changes: str) -> dict[str, Any]:
    """Run the block of ``name``, with texts in it changed; its names."""
    text = block(name)
    for old, new in changes.items():
        text = text.replace(old.removeprefix("_"), new)
    names: dict[str, Any] = {"events": events}
    exec(compile(text, str(GUIDE), "exec"), names)
    return names


def save_twice() -> None:
    """Two saves and a load, all told when this returns."""
    for step in STEPS:
        holdfast.save({"weight": torch.ones(100_000), "step": step}, f"step-{step}", user_metadata={"step": step})
    holdfast.read("step-7")
    assert events.flush(60.0)


def wandb() -> str:
    """The numbers are in the summary, and in the file that ``wandb sync`` sends."""
    run = subscribe("wandb")["run"]
    save_twice()
    summary = dict(run.summary)
    assert summary.keys() >= NUMBERS, sorted(summary)
    assert summary["checkpoint/write_slowest_rank"] == 0
    run.finish()
    __import__("wandb").teardown()  # its service writes the file
    (file,) = Path("wandb").glob("offline-run-*/run-*.wandb")
    data = file.read_bytes()
    assert [name for name in NUMBERS if name.encode() not in data] == []
    return f"{len([name for name in summary if name.startswith('checkpoint/')])} numbers in an offline run"


def tensorboard() -> str:
    """The event files have the numbers of both steps."""
    writer = subscribe("tensorboard")["writer"]
    save_twice()
    writer.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator("runs").Reload()
    tags = set(read.Tags()["scalars"])
    assert tags >= NUMBERS, sorted(tags)
    assert [scalar.step for scalar in read.Scalars("checkpoint/total_s")] == list(STEPS)
    assert all(scalar.value > 400_000 for scalar in read.Scalars("checkpoint/bytes"))
    return f"{len(tags)} scalars, read back by step"


def mlflow() -> str:
    """The file store has the metrics of both steps."""
    os.environ.setdefault("MLFLOW_TRACKING_URI", Path("mlruns").absolute().as_uri())
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    names = subscribe("mlflow")
    save_twice()
    client = names["mlflow"].tracking.MlflowClient()
    metrics = client.get_run(names["run_id"]).data.metrics
    assert metrics.keys() >= NUMBERS, sorted(metrics)
    history = client.get_metric_history(names["run_id"], "checkpoint/total_s")
    assert sorted(metric.step for metric in history) == list(STEPS)
    names["mlflow"].end_run()
    return f"{len(metrics)} metrics in a file store, with their steps"


def prometheus_client() -> str:
    """The page that Prometheus scrapes has the counters."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    subscribe("prometheus_client", _8000=str(port))
    save_twice()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
        lines = page.read().decode().splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if line.startswith("holdfast_"))
    assert float(found['holdfast_operations_total{event="published",operation="save"}']) == 2
    assert float(found['holdfast_operations_total{event="loaded",operation="read"}']) == 1
    assert float(found['holdfast_seconds_count{operation="save",phase="write"}']) == 2
    assert float(found['holdfast_slowest_rank{phase="write"}']) == 0
    assert float(found["holdfast_last_published_timestamp_seconds"]) > 1.7e9
    return f"{len(found)} samples on the page"


def opentelemetry() -> str:
    """Spans of operations hold those of their phases."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    subscribe("opentelemetry")
    save_twice()
    try:
        holdfast.read("nothing")
    except holdfast.NotFoundError:
        assert events.flush(60.0)
    spans = exporter.get_finished_spans()
    saves = [span for span in spans if span.name == "holdfast save"]
    assert [span.attributes["step"] for span in saves] == list(STEPS)
    for save in saves:
        inside = [span for span in spans if span.parent and span.parent.span_id == save.context.span_id]
        assert sorted(span.name for span in inside) == ["commit", "plan", "sync", "write"]
        assert all(save.start_time <= each.start_time <= each.end_time <= save.end_time + 1000 for each in inside)
    assert spans[-1].status.status_code is trace.StatusCode.ERROR
    return f"{len(spans)} spans, phases inside of operations, a failure as an error"


def perfetto() -> str:
    """The trace processor of Perfetto reads the trace, as it is while the process lives."""
    from perfetto.trace_processor import TraceProcessor

    events.subscribe(events.trace("trace.json"))
    save_twice()
    try:
        processor = TraceProcessor(trace="trace.json")
    except Exception as error:
        raise CannotRun(f"it could not get its trace processor: {type(error).__name__}") from error
    with processor:
        rows = list(processor.query("select name, dur from slice order by ts"))
        (bad,) = processor.query("select sum(value) as n from stats where severity = 'error'")
    names = [row.name for row in rows]
    assert names.count("save") == 2, names
    assert names.count("write") == 2, names
    assert bad.n == 0
    return f"{len(names)} slices, no errors"


CLIENTS: dict[str, tuple[str, Callable[[], str]]] = {
    "wandb": ("wandb", wandb),
    "tensorboard": ("tensorboard", tensorboard),
    "mlflow": ("mlflow-skinny", mlflow),
    "prometheus_client": ("prometheus_client", prometheus_client),
    "opentelemetry": ("opentelemetry-sdk", opentelemetry),
    "perfetto": ("perfetto", perfetto),
}


def run(client: str) -> tuple[str, str, str]:
    """Version, result and note of ``client``, which runs in a process and a folder of its own."""
    package = CLIENTS[client][0]
    try:
        version = f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return package, "cannot run here", "it is not installed"
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory(prefix="holdfast-events-") as folder:
        command = [sys.executable, str(Path(__file__).absolute()), "--one", client]
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, env=environment
            )
        except subprocess.TimeoutExpired:
            return version, "FAILED", f"not done after {TIMEOUT_S} s"
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"result": ')]
    if done.returncode == 0 and told:
        return version, told[-1]["result"], told[-1]["note"]
    print(done.stdout[-2000:], done.stderr[-4000:], file=sys.stderr)
    return version, "FAILED", "see its output above"


def main() -> int:
    """Run the packages that the command line names, or all, and return the exit code."""
    if sys.argv[1:2] == ["--one"]:
        try:
            told = {"result": "passed", "note": CLIENTS[sys.argv[2]][1]()}
        except CannotRun as reason:
            told = {"result": "cannot run here", "note": str(reason)}
        print(json.dumps(told), flush=True)
        return 0
    unknown = sorted(set(sys.argv[1:]) - set(CLIENTS))
    if unknown:
        print(f"no such package: {', '.join(unknown)}; there are {', '.join(CLIENTS)}", file=sys.stderr)
        return 2
    outcomes = [run(client) for client in sys.argv[1:] or CLIENTS]
    print(f"events of holdfast {holdfast.__version__}, offline, by the blocks of {GUIDE.name}")
    for version, result, note in outcomes:
        print(f"{version:28} {result:16} {note}")
    return int(any(result == "FAILED" for _, result, _ in outcomes))


if __name__ == "__main__":
    sys.exit(main())
