"""Every fault there is a part for, injected, judged and counted: a table, torture/results/torture.json and torture.md.

    python torture/run.py                           everything; `make torture` does this
    python torture/run.py --quick                   a sample of everything, in minutes; judges outcomes, not counts
    python torture/run.py --part kill errno         these parts alone
    python torture/run.py --part stops --slice 2/5  a fifth of it; the results count once all five have been run
    python torture/run.py --list                    which parts there are

Ends with 1 when a promise was broken, or when fewer faults struck than a full run must inject.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
# Run as a script, by whatever path: the package is torture, not what lies beside this file.
sys.path[0] = str(REPOSITORY)
sys.path.insert(1, str(REPOSITORY / "src"))

from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402
from rich.table import Table  # noqa: E402

from torture.crew import Crew  # noqa: E402
from torture.part import Options, PartResult, all_parts  # noqa: E402

RESULTS = REPOSITORY / "torture" / "results"
MEMORY = Path("/dev/shm")
_MEMORY_BYTES = 4 << 30
_SHOWN_VIOLATIONS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a part by its name, and the seconds that it took."""

    name: str
    result: PartResult
    seconds: float

    def failures(self, *, quick: bool) -> list[str]:
        """Why the run has failed because of this part."""
        found = [f"{self.name}: {violation}" for violation in self.result.violations]
        if not quick and self.result.skipped is None and self.result.injected < self.result.required:
            found.append(f"{self.name}: {self.result.injected} faults, and {self.result.required} are required")
        return found


def parse_options(parts: Sequence[str], arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=parts, default=parts, metavar="NAME", help=", ".join(parts))
    parser.add_argument("--seed", type=int, default=0, help="decides everything that is random (default 0)")
    parser.add_argument("--quick", action="store_true", help="a sample of everything")
    parser.add_argument(
        "--output", type=Path, help="where the results go (default torture/results; with --quick nowhere)"
    )
    parser.add_argument("--slice", default="1/1", metavar="K/N", help="of parts that bear it, every Nth case from K on")
    parser.add_argument("--list", action="store_true", help="tell the names of the parts and end")
    told = parser.parse_args(arguments)
    number, _, slices = told.slice.partition("/")
    if not (number.isdecimal() and slices.isdecimal() and 1 <= int(number) <= int(slices)):
        parser.error(f"a slice is K/N, as 1/4, not {told.slice!r}")
    told.number, told.slices = int(number), int(slices)
    if told.slices > 1 and (whole := [name for name in told.part if not hasattr(all_parts()[name], "IN_SLICES")]):
        parser.error(f"{', '.join(whole)}: not in slices")
    return told


def main() -> int:
    """Run what was asked for; the exit status."""
    parts = all_parts()
    options = parse_options(list(parts))
    console = Console()
    if options.list:
        console.print("\n".join(parts))
        return 0
    with closing(Crew()) as crew:
        outcomes = [_run(console, parts[name], crew, options) for name in options.part]
    _print_table(console, outcomes)
    output = options.output or (None if options.quick else RESULTS)
    alone = options.quick or options.slices > 1  # a slice alone has not what a full run must have
    failures = [failure for outcome in outcomes for failure in outcome.failures(quick=alone)]
    if output is not None:
        if options.slices > 1:
            known = [of_all_slices(output, outcome, options.number, options.slices) for outcome in outcomes]
            outcomes = [outcome for outcome in known if outcome is not None]
            failures += [failure for outcome in outcomes for failure in outcome.failures(quick=options.quick)]
        write_results(output, outcomes, quick=options.quick)
        console.print(f"written to {output}")
    for failure in failures:
        console.print(f"[bold red]failed[/] {failure}", highlight=False)
    return 1 if failures else 0


def write_results(output: Path, outcomes: Sequence[Outcome], *, quick: bool) -> None:
    """Write torture.json, and torture.md for docs/guarantees.md; parts that were not run keep what they had there."""
    output.mkdir(parents=True, exist_ok=True)
    path = output / "torture.json"
    parts: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    for outcome in outcomes:
        parts[outcome.name] = {**asdict(outcome.result), "seconds": round(outcome.seconds, 1), "quick": quick}
    path.write_text(json.dumps(dict(sorted(parts.items())), indent=2) + "\n")
    (output / "torture.md").write_text(markdown_table(parts))


def markdown_table(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """The results of all ``parts`` as docs/guarantees.md shows them."""
    lines = [
        "| fault | injected | must hold | violations | torch DCP, same harness |",
        "|---|---|---|---|---|",
    ]
    for _, part in sorted(parts.items()):
        injected = f"skipped: {part['skipped']}" if part["skipped"] else f"{part['injected']:,}"
        violations = "" if part["skipped"] else len(part["violations"])
        lines.append(f"| {part['fault']} | {injected} | {part['must_hold']} | {violations} | {part['torch'] or ''} |")
    return "\n".join(lines) + "\n"


def of_all_slices(output: Path, outcome: Outcome, number: int, slices: int) -> Outcome | None:
    """The outcome of all slices together, once all were run; until then each is kept in a file below ``output``."""
    places = [output / "slices" / f"{outcome.name}-{each}-of-{slices}.json" for each in range(1, slices + 1)]
    places[0].parent.mkdir(parents=True, exist_ok=True)
    places[number - 1].write_text(json.dumps(asdict(outcome), indent=2) + "\n")
    if not all(place.exists() for place in places):
        return None
    outcomes = [json.loads(place.read_text()) for place in places]
    results = [PartResult(**each["result"]) for each in outcomes]
    for place in places:
        place.unlink()
    together = replace(
        results[0],
        injected=sum(result.injected for result in results),
        violations=[violation for result in results for violation in result.violations],
        notes=list(dict.fromkeys(note for result in results for note in result.notes)),
        counts=dict(sum((Counter(result.counts) for result in results), Counter[str]())),
        skipped=next((result.skipped for result in results if result.skipped), None),
    )
    return Outcome(name=outcome.name, result=together, seconds=sum(each["seconds"] for each in outcomes))


def _run(console: Console, part: ModuleType, crew: Crew, told: argparse.Namespace) -> Outcome:
    """Run one part with a bar that shows how far it is; what it raises is a violation."""
    columns = (TextColumn("{task.description:14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    started = time.monotonic()
    with _folder(MEMORY) as folder, _folder(None) as disk, Progress(*columns, console=console) as bars:
        bar = bars.add_task(part.NAME, total=None)

        def progress(done: int, total: int) -> None:
            bars.update(bar, completed=done, total=total)

        which = {"seed": told.seed, "quick": told.quick, "number": told.number, "slices": told.slices}
        options = Options(**which, folder=folder, disk=disk, progress=progress, crew=crew)
        try:
            result: PartResult = part.run(options)
        except Exception as error:
            console.print(traceback.format_exc(), markup=False)
            violation = f"the part itself failed: {type(error).__name__}: {error}"
            result = PartResult(fault=part.NAME, must_hold="", injected=0, required=0, violations=[violation])
    for violation in result.violations[:_SHOWN_VIOLATIONS]:
        console.print(f"  [red]violation[/] {violation}", highlight=False)
    for note in result.notes:
        console.print(f"  {note}", markup=False, highlight=False)
    return Outcome(name=part.NAME, result=result, seconds=time.monotonic() - started)


@contextmanager
def _folder(root: Path | None) -> Iterator[Path]:
    """A new directory, in ``root`` if it has room enough, else where temporary files go."""
    if root is not None and not (root.is_dir() and os.access(root, os.W_OK) and _free(root) >= _MEMORY_BYTES):
        root = None
    path = Path(tempfile.mkdtemp(prefix="holdfast-torture-", dir=root)).resolve()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _free(path: Path) -> int:
    return shutil.disk_usage(path).free


def _print_table(console: Console, outcomes: Sequence[Outcome]) -> None:
    table = Table("part", "injected", "required", "violations", "seconds", "torch DCP", box=None)
    for outcome in outcomes:
        result = outcome.result
        injected = f"skipped: {result.skipped}" if result.skipped else f"{result.injected:,}"
        color = "red" if result.violations else "green"
        violations = f"[{color}]{len(result.violations)}[/]"
        table.add_row(
            outcome.name, injected, f"{result.required:,}", violations, f"{outcome.seconds:.0f}", result.torch or ""
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
