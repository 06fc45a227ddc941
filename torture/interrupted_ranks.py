"""Two ranks, one of which is interrupted: the other one is told, and the next call of both works."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import socket
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast._values.deadline import Patience
from torture.crew import Case, Child
from torture.interrupting import Interruption, Point, points_of
from torture.meeting import meet
from torture.operations import Operation, Place, Standing, work_in_small_pieces
from torture.samples import get_ready_to_fork

OPERATIONS = ("save", "async_save", "load")
WORLD = 2
_PATIENCE = Patience(progress_s=60.0)  # a busy machine may stop a process for a quarter of a minute
_LIMIT_S = 300.0
_HEAD_START_S = 0.1


def interrupt_rank(*, folder: str, operation: str, victim: int, number: int, seed: int) -> Case:
    """Interrupt one of two ranks at ``number`` points of an operation, one after the other, and judge both."""
    home = Path(folder) / f"ranks-{operation}-{victim}"
    home.mkdir()
    get_ready_to_fork()
    ends = [socket.socketpair() for _ in range(WORLD)]
    children = [
        Child(partial(_act, home, operation, rank, ends[rank][1], number if rank == victim else 0, seed))
        for rank in range(WORLD)
    ]
    for ours, theirs in ends:
        theirs.close()
        ours.settimeout(_LIMIT_S)
    streams = [ours.makefile("rw") for ours, _ in ends]
    problems: list[str] = []
    struck = 0
    try:
        place = ""
        for turn in range(2 * number + 1):
            for rank in (1 - victim, victim):
                streams[rank].write("go\n")
                streams[rank].flush()
                time.sleep(_HEAD_START_S)  # else it may come when all is over, and wait for nobody until its deadline
            said = [json.loads(stream.readline()) for stream in streams]
            place, struck = said[victim]["point"] or place, struck + said[victim]["has_struck"]
            wrong = [each["problem"] for each in said if each["problem"]]
            if turn % 2 == 0:  # nobody was interrupted: all is well
                wrong += [f"rank {rank} after it: {each['error']}" for rank, each in enumerate(said) if each["error"]]
            elif said[victim]["error"] not in (None, "KeyboardInterrupt"):
                wrong.append(f"another error came: {said[victim]['error']}")
            elif not said[1 - victim]["is_ours"]:
                wrong.append(f"the other rank was told {said[1 - victim]['error']}")
            problems += [f"rank {victim} at {place}: {each}" for each in wrong]
    except (OSError, ValueError) as error:
        problems.append(f"rank {victim} after {place}: no answer: {type(error).__name__}: {error}")
    for stream, (ours, _) in zip(streams, ends, strict=True):
        with contextlib.suppress(OSError):
            stream.write("end\n")
            stream.close()
        ours.close()
    ended = [child.end(20.0) for child in children]
    problems += [f"a rank did not end: {end}" for end in ended if end.status != 0 and not problems]
    shutil.rmtree(home)
    return {"problems": problems, "counts": {"ranks": struck}}


def _act(home: Path, name: str, rank: int, connection: socket.socket, number: int, seed: int) -> None:
    """Be a rank that does as it is told: every second call is the one that may be interrupted."""
    work_in_small_pieces()
    place = Place(home / f"place-{rank}")
    meet(home / "address", rank=rank, world=WORLD, patience=_PATIENCE)
    operation = Operation(partial(_operate, home / "checkpoint", name))
    points: list[Point] = []
    standing: Standing | None = None
    with connection, connection.makefile("rw") as stream:
        for turn, order in enumerate(stream):
            if order != "go\n":
                return
            told: dict[str, Any] = {"point": "", "has_struck": False, "error": None, "is_ours": True, "problem": None}
            try:
                if turn == 0:
                    counted = points_of(lambda: operation.run(place))
                    points = random.Random(seed).sample(sorted(counted), min(number, len(counted)))
                elif turn % 2 and points:
                    told["point"] = str(points[-1])
                    with Interruption(points.pop()) as interruption:
                        operation.run(place)
                    told["has_struck"] = interruption.has_struck
                else:
                    operation.run(place)
            except KeyboardInterrupt:
                told["error"], told["has_struck"], told["is_ours"] = "KeyboardInterrupt", True, False
            except holdfast.CheckpointError as error:
                told["error"] = f"{type(error).__name__}: {error}"
            except BaseException as error:
                told["error"], told["is_ours"] = "".join(traceback.format_exception(error))[-1500:], False
            holdfast.release()
            if turn == 2:
                standing = Standing(place, operation)
            elif standing is not None and turn % 2 == 0:
                told["problem"] = standing.change(is_released=True)
            stream.write(json.dumps(told) + "\n")
            stream.flush()


def _operate(path: Path, name: str, place: Place) -> None:
    state = {"weight": torch.arange(300_000.0), "step": 5, "layers": [torch.ones(10)]}
    if name == "save":
        holdfast.save(state, path)
    elif name == "async_save":
        holdfast.async_save(state, path).result()
    else:
        if not path.exists():
            holdfast.save(state, path)
        target = {"weight": torch.zeros(300_000), "step": 0, "layers": [torch.zeros(10)]}
        holdfast.load(target, path)
        if not torch.equal(target["weight"], state["weight"]):  # type: ignore[arg-type]
            raise AssertionError("what was loaded is not what was saved")
