"""Object stores: every request spoiled in every way, kill -9 at every request, savers who race, a run used by many.

A case that failed is named as a call, and runs alone: ``python -m torture.parts.stores "killed(mode='save', ...)"``.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

from tools import crew, store_servers
from torture import store_races, store_worlds
from torture.crew import Case, Child
from torture.part import Options, PartResult
from torture.spoiling import WAYS, Moment, Request
from torture.store_races import together
from torture.store_worlds import OF_RUNS, PLAIN, Told, clear, in_child, judged, judged_run, new_url, world

NAME = "stores"
IN_SLICES = True
RACES, TOGETHER = 100, 30
_KILLED = ("save", "save in parts", "replace", "delete", *OF_RUNS)
_RACES_AT_ONCE = 10
_WORKERS = 4  # many cases wait for time limits
_LIMIT_S = 600.0
_WAITS = ("stall", "late")
_REPLIES = ("half body down", "flipped bit down")


def run(options: Options) -> PartResult:
    """List the requests of each operation that nothing happens to, then disturb each of them; then the races."""
    violations, counts = list[str](), Counter[str]()
    try:
        store_servers.moto()
    except store_servers.NotInstalled as error:
        return _result(violations, counts, skipped=str(error))
    at_once = 2 if options.quick else _WORKERS
    with closing(crew.Crew()) as workers:  # without the shim
        modes: list[Case] = [{"mode": mode} for mode in (*PLAIN, *OF_RUNS)]
        listed = {case["mode"]: outcome for case, outcome in workers.each(requests_of, modes, workers=at_once)}
        for mode, outcome in listed.items():
            if outcome.get("problems") or "failure" in outcome:
                raise RuntimeError(f"{mode} fails undisturbed: {outcome}")
        spoiling = [case for mode in PLAIN for case in _spoilt(mode, listed[mode]["requests"])]
        killing: list[Case] = [
            {"mode": mode, "at": at, "moment": moment}
            for mode in _KILLED
            for at in range(1, len(listed[mode]["requests"]) + 1)
            for moment in ("before", "after")
        ]
        racing: list[Case] = [
            {"rounds": _RACES_AT_ONCE, "overwrite": each, "number": number}
            for each in (False, True)
            for number in range(RACES // _RACES_AT_ONCE)
        ]
        running: list[Case] = [{"folder": str(options.folder), "number": number} for number in range(TOGETHER)]
        if options.quick:
            chosen = random.Random(options.seed)
            of_commit = [case for case in spoiling if _is_of_commit(case)]
            spoiling = of_commit + chosen.sample(spoiling, 8)
            of_commit = [case for case in killing if case["mode"] == "replace" and case["at"] > 8]
            killing = of_commit + chosen.sample(killing, 4)
            racing = [{**racing[0], "rounds": 1}, {**racing[-1], "rounds": 1}]
            running = running[:1]
        groups: list[tuple[Callable[..., Case], list[Case], int]] = [
            (spoiled, spoiling, at_once),
            (killed, killing, at_once),
            (raced, racing, 1),
            (together, running, 1),
        ]
        shares = [(function, options.share_of(cases), number) for function, cases, number in groups]
        done, total = 0, sum(len(cases) for _, cases, _ in shares)
        for function, cases, number in shares:
            if not cases:
                continue
            for case, outcome in workers.each(function, cases, workers=number, limit_s=_LIMIT_S):
                done += 1
                options.progress(done, total)
                counts.update(outcome.get("counts", {}))
                problems = [outcome["failure"]] if "failure" in outcome else outcome["problems"]
                violations += [f"{function.__name__}({_named(case)}): {problem}" for problem in problems]
    return _result(violations, counts)


def _result(violations: list[str], counts: Counter[str], *, skipped: str | None = None) -> PartResult:
    spoilt = sum(number for name, number in counts.items() if name.startswith("spoilt"))
    return PartResult(
        fault="an object store (moto): each request of save, replace, delete, load and verify spoiled in each way, "
        "once and always; kill -9 at each of them, and of a manager and a follower; 16 savers who race; a run that is "
        "saved, retired, followed and read at once",
        must_hold="old or new, whole, and as the caller was told; unknown only as UncertainError; nothing of others "
        "removed; the next try succeeds; one winner",
        injected=spoilt + counts["killed"] + counts["races"] + counts["runs"],
        required=1000 + 150 + 2 * RACES + TOGETHER,
        violations=violations,
        counts=dict(sorted(counts.items())),
        skipped=skipped,
    )


def _named(case: Case) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in case.items())


def _is_of_commit(case: Case) -> bool:
    """Whether it is about the put that publishes, or about reading it back; a sample has these."""
    is_read = case["operation"] == "get" and case["always"] and case["way"] == "500 not done"
    return case["mode"] == "replace" and (is_read or (case["is_commit"] and not case["always"]))


def _spoilt(mode: str, requests: list[Case]) -> Iterator[Case]:
    """Each request of an operation with each way that changes something."""
    for each in requests:
        request = Request(
            number=0, method="", path="", operation=each["operation"], query="", condition="", range="", nbytes=0
        )
        for way in WAYS:
            if WAYS[way].applies(request) and (way not in _REPLIES or each["status"] in (200, 206)):
                place = {"operation": each["operation"], "nth": each["nth"], "is_commit": each["is_commit"]}
                yield from ({"mode": mode, **place, "way": way, "always": always} for always in (False, True))


def requests_of(*, mode: str) -> Case:
    """The requests of an operation: what each is for, and its number among those for the same."""
    _, proxy = world()
    url, seen, requests = new_url(), Counter[str](), list[Case]()
    proxy.reset()
    told = Told(**in_child(lambda: store_worlds.disturbed(url, mode, 10.0)))
    for request in proxy.requests():
        seen[request.operation] += 1
        is_commit = request.operation == "put" and request.path.endswith("/manifest.json")
        place = {"operation": request.operation, "nth": seen[request.operation]}
        requests.append({**place, "status": request.status, "is_commit": is_commit})
    problems = _judged(url, mode, "", told)["problems"]
    return {"requests": requests, "problems": problems}


def spoiled(*, mode: str, operation: str, nth: int, is_commit: bool, way: str, always: bool) -> Case:
    """Spoil one request, and judge what is told, and what is there."""
    _, proxy = world()
    url = new_url()
    proxy.reset()
    proxy.spoil(way, at=nth, always=always, where=lambda request: request.operation == operation)
    limit_s = 1.0 if always or way in _WAITS else 10.0
    told = Told(**in_child(lambda: store_worlds.disturbed(url, mode, limit_s)))
    if not proxy.spoiled() and limit_s == 1.0 and told.error is not None:  # a busy machine, on which time was up before
        return {"problems": [], "counts": {"time was up before": 1}}
    if not proxy.spoiled():
        return {"failure": f"the fault did not strike: {told}"}
    is_late = way == "late" and always  # it arrives when there is something else
    if not is_late:
        proxy.release()
    outcome = _judged(url, mode, way, told, operation, is_over=not is_late)
    if is_late:
        proxy.release()
        there = in_child(lambda: store_worlds.now(url, mode))
        if there != outcome["there"]:
            outcome["problems"].append(f"what came late has changed {outcome['there']} to {there}")
        in_child(lambda: clear(url))
    came = f"raises {told.error}" if told.error else "returns"
    return {"problems": outcome["problems"], "counts": {f"spoilt, {'always' if always else 'once'}, {way}: {came}": 1}}


def _judged(
    url: str, mode: str, way: str, told: Told, spoilt: str = "", *, is_over: bool = True, lost: bool = False
) -> Any:
    def judge() -> Case:
        outcome = judged_run(url, mode) if mode in OF_RUNS else judged(url, mode, way, told, spoilt=spoilt, lost=lost)
        if is_over:
            clear(url)
        return outcome

    return in_child(judge)


def killed(*, mode: str, at: int, moment: Moment) -> Case:
    """Kill the process at a request, and judge what it leaves, and whether the next one can go on."""
    _, proxy = world()
    url = new_url()
    proxy.reset()
    readable, writable = os.pipe()

    def victim() -> Any:
        os.read(readable, 1)  # until we know whom to kill
        return store_worlds.disturbed(url, mode, 10.0)

    child = Child(victim)
    proxy.kill_at(child.pid, at=at, moment=moment)
    os.write(writable, b"1")
    os.close(readable)
    os.close(writable)
    end = child.end(store_worlds.CHILD_S)
    if end.signal != signal.SIGKILL or end.hung:
        return {"failure": f"the fault did not strike: {end}"}
    return {"problems": _judged(url, mode, "", Told(), lost=True)["problems"], "counts": {"killed": 1}}


def raced(*, rounds: int, overwrite: bool, number: int) -> Case:
    """Some rounds of a race."""
    outcome = store_races.raced(rounds=rounds, overwrite=overwrite)
    name = "replacing" if overwrite else "new"
    counts = {f"race, {name}: {what}": count for what, count in outcome["counts"].items()}
    return {"problems": outcome["problems"], "counts": {**counts, "races": rounds}}


if __name__ == "__main__":
    print(eval(sys.argv[1]), flush=True)
    os._exit(0)  # the server and the proxy end with us
