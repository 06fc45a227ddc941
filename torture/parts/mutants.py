"""Seeded bugs: each promise broken in a copy of the source, one at a time; some test has to fail for each."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from contextlib import closing
from pathlib import Path

# Imported for the children, which find them warm; the package itself they import from the copy.
import msgspec  # noqa: F401
import pytest
import safetensors.torch  # noqa: F401
import torch.distributed.tensor  # noqa: F401

from torture.crew import REPOSITORY, Case, Child, Crew
from torture.part import Options, PartResult
from torture.seeded import all_bugs

NAME = "mutants"
_QUICK = 6
_TESTS_S = 300.0


def run(options: Options) -> PartResult:
    """Run the tests of every bug without it, which must pass, then with it, which must not."""
    bugs = all_bugs(REPOSITORY / "src")
    if options.quick:
        bugs = bugs[options.seed % 7 :: len(bugs) // _QUICK]
    selections = sorted({bug.tests for bug in bugs})
    cases: list[Case] = [{"folder": str(options.disk), "bug": None, "tests": list(tests)} for tests in selections]
    cases += [{"folder": str(options.disk), "bug": bug.name, "tests": list(bug.tests)} for bug in bugs]
    violations: list[str] = []
    injected = 0
    with closing(Crew()) as crew:  # which has not imported the package
        for done, (case, outcome) in enumerate(crew.each(run_tests, cases, limit_s=2 * _TESTS_S), start=1):
            options.progress(done, len(cases))
            injected += case["bug"] is not None
            if "failure" in outcome:
                violations.append(f"{case['bug']}: {outcome['failure']}")
            elif case["bug"] is None and not outcome["passed"]:
                violations.append(f"the tests fail without any bug: {case['tests']}: {outcome['said']}")
            elif case["bug"] is not None and outcome["passed"]:
                violations.append(f"no test noticed: {case['bug']}")
    return PartResult(
        fault="seeded bugs: each fsync, directory fsync, digest check, bound and coverage check removed, one at a time",
        must_hold="some test fails for each",
        injected=injected,
        required=100,
        violations=violations,
    )


def run_tests(*, folder: str, bug: str | None, tests: list[str]) -> Case:
    """Run ``tests`` on a copy of the source that has the bug; whether they pass."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        copy, log = Path(place) / "src", Path(place) / "log"
        shutil.copytree(REPOSITORY / "src", copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        if bug is not None:
            next(known for known in all_bugs(REPOSITORY / "src") if known.name == bug).seed(copy)
        end = Child(lambda: _pytest(copy, tests, log)).end(_TESTS_S)
        said = log.read_text()[-2000:] if log.exists() else ""
    if end.hung:
        return {"failure": f"the tests did not end within {_TESTS_S:g} s: {said}"}
    return {"passed": end.told == 0, "said": said}


def _pytest(source: Path, tests: list[str], log: Path) -> int:
    """The exit status of pytest in this process, which has imported what is slow to import but not the package."""
    os.chdir(REPOSITORY)
    os.environ.pop("LD_PRELOAD", None)
    sys.path[:] = [str(source), str(REPOSITORY), *(path for path in sys.path if path != str(REPOSITORY / "src"))]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # the tests start interpreters
    assert not any(name.partition(".")[0] == "holdfast" for name in sys.modules)
    with open(log, "w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    options = [
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--no-header",
        "--timeout=60",
        f"--basetemp={source.parent}/pytest",
    ]
    return int(pytest.main([*options, *tests]))
