"""Ready-made listeners: a log, lines of JSON, a trace, numbers for an experiment tracker, Prometheus, OpenTelemetry.

Each function makes a listener for ``subscribe``. Files are appended to, a whole line at a time, so what a killed
process leaves can be read. Packages of others are imported only when their listener is asked for.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast._io.direct import appender
from holdfast.events import HOST, Event, Listener

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer
    from prometheus_client import CollectorRegistry

logger = logging.getLogger("holdfast")

_PHASES = {"planned": "plan", "staged": "stage", "written": "write"}
_ENDS = ("published", "loaded", "verified", "failed", "removed")
_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


def log(level: int = logging.INFO) -> Listener:
    """A line in the log for each operation that ends. For a save, it has the slowest rank of each phase."""

    def write(event: Event) -> None:
        if event.name in _ENDS:
            speed = f", {event.bytes / event.seconds / 1e9:.2f} GB/s" if event.bytes and event.seconds else ""
            said = [
                f"{event.operation}: {event.name} {event.path}, {event.bytes:,} bytes in {event.seconds:.3f} s{speed}"
            ]
            said += [event.problem] if event.problem else []
            for name, phase in event.report.phases.items() if event.report else ():
                slowest = f" on rank {phase.rank} ({phase.host}), {phase.mean_s:.3f} s on average"
                took = f"{name} {phase.max_s:.3f} s{slowest if phase.max_s > phase.mean_s else ''}"
                said += [took] if phase.max_s else []
            logger.log(max(level, logging.WARNING) if event.problem else level, "; ".join(said))

    return write


def jsonl(path: str | os.PathLike[str]) -> Listener:
    """A line of JSON for each event, appended to ``path``. Each process needs a file of its own."""
    append = appender(path)
    return lambda event: append(f"{json.dumps(dataclasses.asdict(event))}\n".encode())


def trace(path: str | os.PathLike[str]) -> Listener:
    """Spans in the Chrome trace event format, appended to ``path``, for ui.perfetto.dev.

    Each process needs a file of its own. The format does not ask for the end of its list, so what a killed process
    leaves opens too. Operations that overlap are shown on different lines.
    """
    append, process = appender(path, begin=b"[\n"), os.getpid()
    lines: dict[int, int] = {}

    def write(event: Event) -> None:
        if event.number not in lines:
            lines[event.number] = min(set(range(len(lines) + 1)) - set(lines.values()))
        common = {"cat": event.operation, "pid": process, "tid": lines[event.number], "args": dataclasses.asdict(event)}
        spans = [{"name": name, "ph": "X", "ts": at * 1e6, "dur": took * 1e6} for name, at, took in _spans(event)]
        for span in spans or [{"name": event.name, "ph": "i", "s": "t", "ts": event.at * 1e6}]:
            append(f"{json.dumps({**span, **common})},\n".encode())
        if event.name in _ENDS:
            del lines[event.number]

    named = {"name": "process_name", "ph": "M", "pid": process, "args": {"name": f"{HOST} {process}"}}
    append(f"{json.dumps(named)},\n".encode())
    return write


def _spans(event: Event) -> list[tuple[str, float, float]]:
    """Name, start and seconds of what has ended with ``event``, the longest first."""
    if event.name not in (*_PHASES, *_ENDS):
        return []
    spans = [(_PHASES.get(event.name, event.operation), event.at - event.seconds, event.seconds)]
    last_s = {"sync": event.sync_s, "commit": event.report.commit_s if event.report else 0.0}
    return spans + [(name, event.at - seconds, seconds) for name, seconds in last_s.items() if seconds]


def scalars(fn: Callable[[str, float, int | None], object]) -> Listener:
    """Calls ``fn(name, value, step)`` with each number of an operation that has ended: for experiment trackers.

    For a save, only the coordinator has numbers, those of its report: "checkpoint/total_s", "checkpoint/write_s",
    "checkpoint/write_mean_s", "checkpoint/write_slowest_rank" and so on.
    """

    def tell(event: Event) -> None:
        numbers: dict[str, float] = {}
        if event.report is not None:
            numbers = dataclasses.asdict(event.report) | {"bytes_per_s": event.report.bytes_per_s}
            del numbers["phases"]
            for name, phase in event.report.phases.items():
                numbers |= {f"{name}_mean_s": phase.mean_s, f"{name}_slowest_rank": phase.rank}
        elif event.name == "failed":
            numbers = {f"{event.operation}_failed": 1}
        elif event.name in _ENDS and "save" not in event.operation:
            numbers = {f"{event.operation}_s": event.seconds, f"{event.operation}_bytes": event.bytes}
        for name, value in numbers.items():
            fn(f"checkpoint/{name}", float(value), event.step)

    return tell


def prometheus(registry: CollectorRegistry | None = None) -> Listener:
    """Metrics of prometheus_client, in ``registry`` or in its default one. Make one listener for each registry."""
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram

    into = registry or REGISTRY
    ended = Counter("holdfast_operations", "Operations that ended.", ["operation", "event"], registry=into)
    nbytes = Counter("holdfast_bytes", "Bytes written, read or removed.", ["operation"], registry=into)
    seconds = Histogram("holdfast_seconds", "Seconds.", ["operation", "phase"], registry=into, buckets=_BUCKETS_S)
    slowest = Gauge("holdfast_slowest_rank", "The slowest rank of the last save.", ["phase"], registry=into)
    published = Gauge("holdfast_last_published_timestamp_seconds", "When one was last published.", registry=into)

    def tell(event: Event) -> None:
        for name, _, took in _spans(event):
            seconds.labels(event.operation, "total" if name == event.operation else name).observe(took)
        if event.name in _ENDS:
            ended.labels(event.operation, event.name).inc()
            nbytes.labels(event.operation).inc(event.bytes)
        if event.name == "published":
            published.set(event.at)
        for name, phase in event.report.phases.items() if event.report else ():
            slowest.labels(name).set(phase.rank)

    return tell


def opentelemetry(tracer: Tracer | None = None) -> Listener:
    """A span of OpenTelemetry for each operation that ends. The spans of its phases are inside it."""
    from opentelemetry import trace as telemetry

    by = tracer or telemetry.get_tracer("holdfast")
    phases: dict[int, list[tuple[str, float, float]]] = {}

    def tell(event: Event) -> None:
        spans = phases.pop(event.number, []) + _spans(event)
        if event.name not in _ENDS:
            phases[event.number] = spans
            return
        fields = {name: value for name, value in dataclasses.asdict(event).items() if type(value) in (str, int, float)}
        begin = int((event.at - event.seconds) * 1e9)
        whole = by.start_span(f"holdfast {event.operation}", start_time=begin, attributes=fields)
        if event.name == "failed":
            whole.set_status(telemetry.StatusCode.ERROR, event.problem)
        inside = telemetry.set_span_in_context(whole)
        for name, start, took in spans:
            if name != event.operation:
                by.start_span(name, context=inside, start_time=int(start * 1e9)).end(int((start + took) * 1e9))
        whole.end(int(event.at * 1e9))

    return tell
