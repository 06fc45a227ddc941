"""A run of four ranks under torchrun is asked to stop, at any moment after it has begun.

The signal goes to torchrun's agent or to one of the ranks, or a file is made; while ranks resume, train, save or
evaluate, with loader workers or without. Loader workers have begun by then: the signal ends one that has not, and its
rank with it, which the library cannot prevent. Every launch goes on where the one before was stopped, and every loss
that any of them writes down is compared with that of a run that nobody has disturbed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import holdfast
from torture import forked_torchrun, trainee
from torture.crew import REPOSITORY, Case
from torture.part import Options, PartResult
from torture.trainee import STOP_FILE, Run

NAME = "stops"
IN_SLICES = True
RANKS = 4
_MOST_STEPS = 300  # of one launch
_CHAIN = 5
_WORKERS = max(2, (os.cpu_count() or 1) // 4)  # each launch has four ranks
_PAUSE_S = 0.01
_LONGEST_DELAY_S = 1.5
_START_S = 300.0
_SHOWN_LINES = 20
_STOP_S = 30.0  # what torchrun gives
_FORKED = 5  # of so many launches, one is started by the command line: that takes some ten seconds of processor time
_TO = ("agent", "worker", "file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """How a run is asked to stop: by whom, when after it is ready, and what it does at the time."""

    to: str
    rank: int
    number: int
    delay_s: float
    evaluates: bool
    loader_workers: int
    asynchronous: bool | Literal["process"]
    is_forked: bool

    def __str__(self) -> str:
        name = "a file" if self.to == "file" else f"{signal.Signals(self.number).name} to the {self.to}"
        during = "an evaluation" if self.evaluates else "training"
        return f"{name} after {self.delay_s:.3f} s, in {during}, with {self.loader_workers} loader workers"


def run(options: Options) -> PartResult:
    """Stop runs, chain by chain; then the same with a loop that is written by hand."""
    chance = random.Random(options.seed)
    stops = [_random_stop(chance, number) for number in range(4 if options.quick else 200)]
    length = 2 if options.quick else _CHAIN
    chains = [stops[start : start + length] for start in range(0, len(stops), length)]
    same: Case = {"folder": str(options.folder), "steps": 500 if options.quick else 1500}
    for _, outcome in options.crew.each(leave_alone, [same], limit_s=_START_S):
        if "failure" in outcome:
            raise RuntimeError(outcome["failure"])
    cases: list[Case] = [
        {**same, "library": library, "number": number, "stops": [asdict(stop) for stop in chain]}
        for library in ("holdfast", "torch")
        for number, chain in enumerate(chains)
        if library == "holdfast" or (number < 2 * len(_TO) and not options.quick)
    ]
    # A hand-written loop that hangs would keep its chain waiting: one stop each is enough to compare.
    cases = [case if case["library"] == "holdfast" else {**case, "stops": case["stops"][:1]} for case in cases]
    cases = options.share_of(cases)
    total = sum(len(case["stops"]) for case in cases)
    violations: list[str] = []
    counts: Counter[str] = Counter()
    torchs: Counter[str] = Counter()
    longest_s = 0.0
    for case, outcome in options.crew.each(stop_again_and_again, cases, workers=_WORKERS, limit_s=3600.0):
        if case["library"] == "torch":
            torchs.update(outcome.get("problems", [outcome.get("failure", "")]))
        else:
            violations += outcome.get("problems", [outcome.get("failure", "")])
            counts.update(outcome.get("counts", {}))
            longest_s = max(longest_s, outcome.get("longest_s", 0.0))
        options.progress(sum(counts[to] for to in _TO) + torchs.total(), total)
    return PartResult(
        fault=f"a stop at any moment of a run of {RANKS} ranks under torchrun: to the agent, to one rank, by a file; "
        "some in an evaluation, some with loader workers",
        must_hold="all ranks stop at one step, it is published, torchrun need not kill, and the losses of what goes on "
        "from there are those of a run that was never stopped",
        injected=sum(counts[to] for to in _TO),
        required=200,
        violations=[violation for violation in violations if violation],
        notes=[f"the longest stop took {longest_s:.1f} s"],
        counts=dict(counts),
        torch=_in_words(torchs) if torchs else None,
    )


def _random_stop(chance: random.Random, number: int) -> Stop:
    """One of every kind in turn; all else by chance."""
    to = _TO[number % len(_TO)]
    return Stop(
        to=to,
        rank=chance.randrange(RANKS),
        number=chance.choice((signal.SIGTERM, signal.SIGUSR1)) if to == "worker" else signal.SIGTERM,
        delay_s=chance.uniform(0, _LONGEST_DELAY_S),
        evaluates=number // len(_TO) % 3 == 1,
        loader_workers=2 if number // len(_TO) % 2 == 1 else 0,
        asynchronous=chance.choice((True, True, True, False, "process")),
        is_forked=number % _FORKED != 3,
    )


def leave_alone(*, folder: str, steps: int) -> Case:
    """Have a run without stops and without checkpoints write its losses down."""
    notes = Path(folder) / "expected"
    agent = _launch(notes, Run(library="", root="", notes=str(notes), steps=steps), is_forked=True)
    if agent.wait() != 0:
        raise RuntimeError(f"the run without a stop failed{_log_of(notes)}")
    return {}


def stop_again_and_again(*, folder: str, steps: int, library: str, number: int, stops: list[Case]) -> Case:
    """Launch, stop and launch again; what was wrong each time ("" where nothing was), and how often who was asked."""
    place = Path(folder) / f"{library}-{number}"
    expected = _losses(Path(folder) / "expected")
    problems: list[str] = []
    counts: Counter[str] = Counter()
    longest_s, first = 0.0, 0
    for launch, stop in enumerate(Stop(**each) for each in stops):
        notes, root = place / f"launch-{launch}", place / "run"
        told = Run(
            library=library,
            root=str(root),
            notes=str(notes),
            steps=steps,
            pause_s=_PAUSE_S,
            evaluates=stop.evaluates,
            loader_workers=stop.loader_workers,
            asynchronous=stop.asynchronous,
        )
        agent = _launch(notes, told, is_forked=stop.is_forked)
        try:
            waited_for = ["evaluating" if stop.evaluates else "ready"]
            if library == "holdfast":
                waited_for += [f"loading-{worker}" for worker in range(stop.loader_workers)]
            _until(agent, [notes / f"{name}-{rank}" for name in waited_for for rank in range(RANKS)])
            time.sleep(stop.delay_s)
            asked_at = time.monotonic()
            _ask(stop, agent, notes)
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(_STOP_S)
            took_s = time.monotonic() - asked_at
        finally:
            _kill(agent, notes)
        problem, stopped = _judged(stop, agent, notes, root, expected, first, took_s, library)
        problems.append(f"{stop}: {problem}" if problem and library == "holdfast" else problem)
        counts.update({stop.to: 1, "in an evaluation": stop.evaluates, "with loader workers": stop.loader_workers > 0})
        counts.update({"started by the command line": not stop.is_forked})
        longest_s, first = max(longest_s, took_s), stopped + 1
        if problem or first > steps - _MOST_STEPS:
            shutil.rmtree(root, ignore_errors=True)
            first = 0
    shutil.rmtree(place, ignore_errors=True)
    return {"problems": problems, "counts": dict(counts), "longest_s": longest_s}


def _judged(
    stop: Stop,
    agent: subprocess.Popen[bytes],
    notes: Path,
    root: Path,
    expected: list[dict[int, str]],
    first: int,
    took_s: float,
    library: str,
) -> tuple[str, int]:
    """What is wrong with how a run ended, and the step at which it did."""
    said = [path.read_text() if path.exists() else "" for path in (notes / f"over-{rank}" for rank in range(RANKS))]
    if took_s >= _STOP_S or "" in said:
        how = "hung" if took_s >= _STOP_S else "a rank died"
        return f"{how}{_log_of(notes) if library == 'holdfast' else ''}", 0
    if len(set(said)) > 1:
        return f"ranks stopped at different steps{f': {said}' if library == 'holdfast' else ''}", 0
    if said[0] == "None":
        return "came to its end before it was asked to stop", 0
    step = int(said[0])
    if library == "torch":
        return "" if (root / f"step-{step}" / ".metadata").exists() else "the last step is not there", step
    if stop.to != "agent" and agent.returncode != 0:  # which ends with an error when it is told to end
        return f"torchrun ended with {agent.returncode}{_log_of(notes)}", 0
    latest = holdfast.Steps(root).latest()
    if latest is None or latest.step != step:
        return f"stopped at step {step}, and the newest one is {latest}", 0
    report = holdfast.verify(latest.path)
    if not report.ok:
        return f"step {step} is damaged: {report}", 0
    for rank, losses in enumerate(_losses(notes)):
        if list(losses) != list(range(first, step + 1)):
            return f"rank {rank} went from {first} to {step} by the steps {list(losses)}", 0
        if any(loss != expected[rank][each] for each, loss in losses.items()):
            return f"the losses of rank {rank}, resumed at step {first}, are not those of a run without a stop", 0
    return "", step


def _launch(notes: Path, told: Run, *, is_forked: bool) -> subprocess.Popen[bytes]:
    """torchrun, with a run on each of its ranks."""
    notes.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "FATAL"}
    places = [str(REPOSITORY), str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    environment.pop("LD_PRELOAD", None)
    argument = json.dumps(asdict(told))
    if is_forked:
        return forked_torchrun.launch(RANKS, trainee.main, argument, environment, notes / "log")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += ["-m", trainee.__name__, argument]
    with open(notes / "log", "wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


def _until(agent: subprocess.Popen[bytes], paths: Iterable[Path]) -> None:
    """Return when all of ``paths`` are there, or the run has ended."""
    deadline = time.monotonic() + _START_S
    while agent.poll() is None and not all(path.exists() for path in paths):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the run has not begun within {_START_S:g} s")
        time.sleep(0.01)


def _ask(stop: Stop, agent: subprocess.Popen[bytes], notes: Path) -> None:
    if stop.to == "file":
        (notes / STOP_FILE).touch()
    elif stop.to == "agent":
        agent.send_signal(signal.SIGTERM)
    else:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has died, which will be seen
            os.kill(int((notes / f"ready-{stop.rank}").read_text()), stop.number)


def _kill(agent: subprocess.Popen[bytes], notes: Path) -> None:
    """End what may be left: each rank is the leader of a group of processes, and the agent of another."""
    leaders = [int(path.read_text()) for path in notes.glob("ready-*")] if agent.poll() is None else []
    for leader in [agent.pid, *leaders]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
    agent.wait()


def _losses(notes: Path) -> list[dict[int, str]]:
    """The losses that each rank wrote down, by step."""
    lines = [(notes / f"losses-{rank}").read_text().split() for rank in range(RANKS)]
    return [dict(zip(map(int, words[::2]), words[1::2], strict=True)) for words in lines]


def _log_of(notes: Path) -> str:
    """Why the first rank died, as it has noted; the others may have died of that. Else the end of the common log."""
    died = sorted(notes.glob("died-*"), key=lambda path: path.stat().st_mtime_ns)
    said = (died[0] if died else notes / "log").read_text(errors="replace").splitlines()
    whose = f"rank {died[0].name.removeprefix('died-')} of {len(died)} with an error" if died else "its log"
    return f"; {whose} ends with {' | '.join(line.strip() for line in said[-_SHOWN_LINES:])}"


def _in_words(problems: Counter[str]) -> str:
    total, good = problems.total(), problems[""]
    bad = ", ".join(f"{count} {problem}" for problem, count in problems.most_common() if problem)
    return f"{total} stops of a hand-written loop: {good} at one step{bad and ', '}{bad}"
