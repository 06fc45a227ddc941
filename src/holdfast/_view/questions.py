"""All that can be asked, by method and path, and who answers it. The pages are another program, with this contract.

Sources, checkpoints, tensors and tasks have numbers; ``answers.Query`` says what else a request may have.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from holdfast._checkpoint import VerifyReport, verify
from holdfast._version import __version__
from holdfast._view import checkpoints, tensors
from holdfast._view.answers import Answer, Query
from holdfast._view.comparisons import Comparisons
from holdfast._view.dynamics import Dynamics
from holdfast._view.sources import Sources
from holdfast._view.tables import Table, identity_at
from holdfast._view.tasks import Task, Tasks
from holdfast.events.progress import OnBytes

_MOST_DAMAGE = 1000
_MOST_REMEMBERED = 10_000
_MOST_WAIT_S = 20

Question = Callable[[Query], Answer]


class Viewer:
    """The answers about what is at ``paths``."""

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        self.sources = Sources(paths)
        self._tasks = Tasks()
        self._comparisons, self._dynamics = Comparisons(self.sources), Dynamics()
        self._verified: dict[int, tuple[tuple[int, ...], VerifyReport]] = {}
        rows = ("search", "first", "count")
        self.questions: Mapping[tuple[str, str], Question] = {
            ("GET", "/api/sources"): _asked(self._sources),
            ("GET", "/api/run"): _asked(self._run, "source", "after"),
            ("GET", "/api/checkpoint"): self._of_table(self._summary),
            ("GET", "/api/tree"): self._of_table(checkpoints.tree, "under"),
            ("GET", "/api/tensors"): self._of_table(checkpoints.tensors, "sort", "descending", *rows),
            ("GET", "/api/values"): self._of_table(checkpoints.values, *rows),
            ("GET", "/api/ranks"): self._of_table(self._ranks),
            ("GET", "/api/tensor"): self._of_table(tensors.about, "tensor"),
            ("GET", "/api/chunks"): self._of_table(tensors.chunks, "tensor", "first"),
            ("GET", "/api/slice"): self._of_table(tensors.elements, "tensor", "at", "rows", "columns"),
            ("GET", "/api/statistics"): self._of_table(tensors.sampled, "tensor"),
            ("POST", "/api/statistics"): _asked(self._begin_statistics, "checkpoint", "tensor"),
            ("GET", "/api/blocks"): self._of_table(self._blocks, "tensor"),
            ("GET", "/api/diff"): _asked(self._comparisons.rows, "a", "b", "status", *rows),
            ("POST", "/api/diff/values"): _asked(self._begin_diff, "a", "b", "row"),
            ("GET", "/api/dynamics"): _asked(self._moves, "source", "under"),
            ("POST", "/api/verify"): _asked(self._begin_verify, "checkpoint"),
            ("GET", "/api/task"): _asked(self._task, "task", "wait"),
            ("DELETE", "/api/task"): _asked(self._cancel, "task"),
        }

    def close(self) -> None:
        """End what waits and what works."""
        self.sources.closing.set()
        self._tasks.close()

    def _of_table(self, answer: Callable[[Table, Query], Answer], *names: str) -> Question:
        """A question about one checkpoint, with these parameters beside its number."""

        def ask(query: Query) -> Answer:
            return answer(self.sources.table(query.number("checkpoint")), query)

        return _asked(ask, "checkpoint", *names)

    def _sources(self, query: Query) -> Answer:
        told = [
            {
                "source": each.number,
                "path": each.path,
                "kind": "checkpoint" if each.steps is None else "run",
                "checkpoint": each.checkpoint,
            }
            for each in self.sources.all
        ]
        return {"version": __version__, "sources": told}

    def _run(self, query: Query) -> Answer:
        return self.sources.listing(query.number("source"), after=query.text("after"))

    def _summary(self, table: Table, query: Query) -> Answer:
        return checkpoints.summary(self.sources.checkpoint(query.number("checkpoint")), table)

    def _ranks(self, table: Table, query: Query) -> Answer:
        return checkpoints.ranks(table, self.sources.times(query.number("checkpoint"), table.manifest.attempt))

    def _blocks(self, table: Table, query: Query) -> Answer:
        number = query.number("checkpoint")
        identity, report = self._verified.get(number, ((), None))
        known = report is not None and identity == identity_at(table.path)
        return tensors.blocks(table, tensors.row_asked(table, query), report.damage if report and known else None)

    def _moves(self, query: Query) -> Answer:
        source, under = self.sources.source(query.number("source")), query.text("under")
        if source.steps is None:
            raise ValueError(f"the source {source.number} is no run")
        steps = [(step.step, step.path, step.attempt) for step in source.steps.steps() if not step.problem]
        return {"source": source.number, **self._dynamics.series(under, steps)}

    # --- tasks --------------------------------------------------------------------------------------------------------

    def _begin(self, kind: str, checkpoint: int, work: Callable[[OnBytes], dict[str, object]]) -> Answer:
        self.sources.checkpoint(checkpoint)
        return {"task": self._tasks.begin(kind, checkpoint, work).number}

    def _begin_verify(self, query: Query) -> Answer:
        number = query.number("checkpoint")
        return self._begin("verify", number, lambda progress: self._verify(number, progress))

    def _verify(self, number: int, progress: OnBytes) -> dict[str, object]:
        path = self.sources.checkpoint(number).path
        identity = identity_at(path)
        report = verify(path, progress=progress)
        if identity == identity_at(path):
            few = replace(report, damage=report.damage[:_MOST_REMEMBERED])
            self._verified[number] = identity, few
        damage = [
            {
                "file": each.file,
                "key": each.key,
                "first": each.span[0],
                "last": each.span[1] - 1,
                "problem": each.problem,
            }
            for each in report.damage[:_MOST_DAMAGE]
        ]
        fields = {name: getattr(report, name) for name in ("ok", "files", "bytes", "keys", "unchecked")}
        counts = {name: len(getattr(report, name)) for name in ("damaged_keys", "damaged_files")}
        return {**fields, **counts, "damage": damage, "rest": max(0, len(report.damage) - _MOST_DAMAGE)}

    def _begin_statistics(self, query: Query) -> Answer:
        number, table = query.number("checkpoint"), self.sources.table(query.number("checkpoint"))
        row = tensors.row_asked(table, query)
        return self._begin("statistics", number, lambda progress: tensors.numbers(table, row, progress))

    def _begin_diff(self, query: Query) -> Answer:
        return self._begin("diff", query.number("a"), lambda progress: self._comparisons.elements(query, progress))

    def _task(self, query: Query) -> Answer:
        task: Task = self._tasks.find(query.number("task"))
        task.over.wait(query.number("wait", 0, most=_MOST_WAIT_S))
        return task.told()

    def _cancel(self, query: Query) -> Answer:
        return self._tasks.cancel(query.number("task")).told()


def _asked(answer: Question, *names: str) -> Question:
    """``answer``, of requests that have no other parameters than ``names``."""

    def ask(query: Query) -> Answer:
        query.check_names(names)
        return answer(query)

    return ask
