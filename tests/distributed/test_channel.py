"""Real processes over real connections: payloads, subgroups, failures, death, stops, and nothing left behind.

Limits are small where a test waits for them to pass. Everywhere else there is none, so whoever waits for it hangs.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import math
import os
import random
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from holdfast._ranks import rendezvous
from holdfast._ranks.channel_ranks import ChannelRanks
from holdfast._ranks.rendezvous import connect
from holdfast._values.deadline import Patience
from holdfast.errors import CheckpointError, RankLostError, StorageError

if TYPE_CHECKING:
    from tools.crew import Crew

QUICK = Patience(beat_s=0.1, progress_s=4.0, settle_s=0.1, farewell_s=0.5)
ENDLESS = Patience(progress_s=math.inf)
UNTIL_ALL_HAVE_TOLD = Patience(progress_s=math.inf, settle_s=math.inf)


def together(
    group: dist.ProcessGroup | None = None, patience: Patience = ENDLESS, coordinator: int = 0
) -> ChannelRanks:
    return ChannelRanks(connect(group, coordinator=coordinator), patience=patience)


def told(error: CheckpointError) -> dict[str, Any]:
    """What a test asserts of an error, as plain values."""
    return {
        "type": type(error).__name__,
        "message": str(error),
        "failures": {rank: type(one).__name__ for rank, (one, _) in error.failures.items()},
        "cause": type(error.__cause__).__name__,
        "stacks": {rank: [frame.name for frame in stack] for rank, (_, stack) in error.failures.items()},
        "rank": getattr(error, "rank", None),
        "phase": getattr(error, "phase", None),
    }


def sum_over(group: dist.ProcessGroup | None = None) -> int:
    with together(group) as ranks:
        return ranks.all_reduce("summing", lambda: ranks.rank, sum)


def both_phases() -> tuple[int, tuple[int, list[int]], list[int]]:
    with together() as ranks:
        own = ranks.reduce_scatter("planning", lambda: ranks.rank, lambda parts: [(part * 10, parts) for part in parts])
        return ranks.size, own, ranks.all_reduce("writing", lambda: own[0], lambda parts: parts[::-1])


def large_payloads(size: int) -> list[str]:
    payload = random.Random(dist.get_rank()).randbytes(size)
    with together() as ranks:
        # Everyone gets the payload of its right neighbour, then the digests of what all got.
        found = ranks.reduce_scatter("exchanging", lambda: payload, lambda parts: [*parts[1:], parts[0]])
        return ranks.all_reduce("comparing", lambda: hashlib.sha256(found).hexdigest(), lambda parts: parts)


def in_subgroups() -> Any:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine, other = groups[dist.get_rank() % 2], groups[1 - dist.get_rank() % 2]
    refused = False
    try:
        connect(other)
    except ValueError:
        refused = True
    with together(mine, coordinator=1) as ranks:
        names = ranks.all_reduce("naming", dist.get_rank, lambda parts: parts)
    same = connect(mine) is connect(mine) and connect(mine) is not connect()
    return refused, names, same, sum_over(mine), sum_over()


def failure_in_subgroup() -> Any:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    try:
        with together(group) as ranks:
            ranks.all_reduce("failing", lambda: 1 // (2 - dist.get_rank()), sum)
    except CheckpointError as error:
        return told(error)


class Odd(ValueError):
    """Cannot be unpickled: its constructor needs two arguments."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)
        self.lock = threading.Lock()


ERRORS = {
    "storage": lambda: StorageError("no space; free some", errno=28, path="/data"),
    "value": lambda: ValueError("odd"),
    "unpicklable": lambda: Odd("very ", "odd"),
}


def fail(kind: str, failing: list[int], where: str) -> Any:
    """Fail on some ranks in one of the places; then see that group and channel still work."""

    def local() -> int:
        if where == "local" and dist.get_rank() in failing:
            raise ERRORS[kind]()
        return 1

    def merge(parts: list[int]) -> int:
        if where == "merge":
            raise ERRORS[kind]()
        return sum(parts)

    sum_over()
    found = None
    try:
        with together(patience=UNTIL_ALL_HAVE_TOLD) as ranks:
            ranks.all_reduce("writing", local, merge)
    except CheckpointError as error:
        found = told(error)
    total = torch.ones(1)
    dist.all_reduce(total)
    return found, float(total), sum_over()


def signal_self(rank: int, which: int, coordinator: int) -> Any:
    """One rank kills or stops itself in its second phase; what the others raise."""
    sum_over()

    def local() -> None:
        if dist.get_rank() == rank:
            os.kill(os.getpid(), which)

    try:
        with together(patience=QUICK if which == signal.SIGSTOP else ENDLESS, coordinator=coordinator) as ranks:
            ranks.all_reduce("planning", lambda: None, lambda parts: None)
            ranks.all_reduce("writing", local, lambda parts: None)
    except CheckpointError as error:
        return told(error)


def hold_the_interpreter(rank: int, seconds: int) -> Any:
    """One rank does not let go of the interpreter's lock, as an extension may, and is waited for."""
    sum_over()
    hold = ctypes.PyDLL(None).sleep  # unlike CDLL, it does not release the lock
    with together(patience=Patience(beat_s=0.1, progress_s=math.inf)) as ranks:
        return ranks.all_reduce("writing", lambda: hold(seconds if dist.get_rank() == rank else 0), len)


def fork_and_die(rank: int) -> Any:
    """A rank forks, and is killed; its child lives on with what it inherited."""
    sum_over()
    reading, writing = os.pipe()

    def local() -> None:
        if dist.get_rank() == rank:
            if os.fork() == 0:
                os.close(writing)
                os.read(reading, 1)  # until the test's pool ends, or its parent's copy of the pipe does
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        with together() as ranks:
            ranks.all_reduce("writing", local, lambda parts: None)
    except CheckpointError as error:
        return told(error)


def stop_and_continue(stopped: int) -> Any:
    """One rank is stopped until the others have given it up, then goes on; the next operation works for all."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"pid-{dist.get_rank()}", str(os.getpid()))
    sum_over()
    found = None

    def local() -> None:
        if dist.get_rank() == stopped:
            os.kill(os.getpid(), signal.SIGSTOP)

    try:
        with together(patience=QUICK) as ranks:
            ranks.all_reduce("writing", local, lambda parts: None)
    except CheckpointError as error:
        found = told(error)
    waker = 1 - stopped
    if dist.get_rank() == waker:
        os.kill(int(store.get(f"pid-{stopped}")), signal.SIGCONT)
    return found, sum_over()


def after_the_coordinator_died() -> Any:
    """Kill rank 0; the others meet again in a group of their own, made without it."""
    store = dist.distributed_c10d._get_default_store()
    sum_over()
    rank = dist.get_rank()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        with together(patience=QUICK) as ranks:
            ranks.all_reduce("writing", lambda: None, lambda parts: None)
    except RankLostError as error:
        lost = told(error)
    try:
        sum_over()
    except RankLostError as error:
        again = told(error)
    dist.destroy_process_group()
    gc.collect()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank - 1, world_size=2)
    return lost, again, sum_over()


def slow_but_alive() -> int:
    def local() -> int:
        for step in range(10 if dist.get_rank() == 1 else 0):
            ranks.follow(lambda step=step: step, str)
            ranks.check()
            threading.Event().wait(0.5)  # the work that takes its time
        return 1

    sum_over()
    with together(patience=QUICK) as ranks:
        return ranks.all_reduce("writing", local, sum)


def hang_beating() -> Any:
    store = dist.distributed_c10d._get_default_store()

    def local() -> None:
        if dist.get_rank() == 1:
            ranks.follow(lambda: 1_000_000, str)
            store.wait(["given up"])

    sum_over()
    try:
        with together(patience=QUICK) as ranks:
            ranks.all_reduce("writing the checkpoint", local, lambda parts: None)
    except CheckpointError as error:
        store.set("given up", "")
        return told(error), sum_over()


def many_operations(count: int) -> tuple[Any, Any]:
    def counts() -> tuple[int, int, int]:
        gc.collect()
        return (
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            threading.active_count(),
        )

    def operate(number: int) -> None:
        try:
            with together(patience=Patience(settle_s=0.01, progress_s=math.inf)) as ranks:
                payload = b"x" * (100_000 if number % 5 else 5_000_000)
                ranks.reduce_scatter("planning", lambda: payload, lambda parts: parts)
                ranks.all_reduce("writing", lambda: 1 // ((number % 10) or (dist.get_rank() - 1)), sum)
        except CheckpointError:
            assert number % 10 == 0

    for number in range(10):
        operate(number)
    before = counts()
    for number in range(count):
        operate(number)
    dist.barrier()
    return before, counts()


def without_a_store() -> tuple[int, int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "_store_of", lambda group: None)
        return sum_over(), sum_over()


def leave_at_once(size: int) -> Any:
    """The coordinator's process ends right after the last phase; the others still get all of its last word."""
    with together() as ranks:
        whole = ranks.all_reduce("writing", lambda: None, lambda parts: b"x" * size)
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return len(whole)


def keys_at_the_rendezvous() -> list[int]:
    sum_over()
    dist.barrier()
    group: Any = dist.group.WORLD
    store = dist.distributed_c10d._get_process_group_store(group)
    return [
        rank for rank in range(dist.get_world_size()) if store.check([f"holdfast/{group.group_name}/address-{rank}"])
    ]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6])
def test_parts_and_wholes_go_where_they_belong(pool: Crew, world: int) -> None:
    everyone = list(range(world))
    assert pool.run(world, both_phases) == [
        (world, (10 * rank, everyone), [10 * one for one in everyone[::-1]]) for rank in everyone
    ]


@pytest.mark.parametrize("size", [0, (4 << 20) - 1, 50_000_000])
def test_payloads_of_any_size_arrive_as_they_are(pool: Crew, size: int) -> None:
    world = 3
    digests = [hashlib.sha256(random.Random(rank).randbytes(size)).hexdigest() for rank in range(world)]
    assert pool.run(world, large_payloads, size) == [[*digests[1:], digests[0]]] * world


def test_subgroups_have_channels_of_their_own(pool: Crew) -> None:
    found = pool.run(4, in_subgroups)
    assert found == [(True, [0, 2] if rank % 2 == 0 else [1, 3], True, 1, 6) for rank in range(4)]


def test_a_subgroup_names_ranks_as_the_job_does(pool: Crew) -> None:
    nobody, *found = pool.run(3, failure_in_subgroup)
    assert nobody is None
    for error in found:
        assert error["message"] == "rank 2: failing failed: ZeroDivisionError: integer division or modulo by zero"
        assert error["failures"] == {2: "ZeroDivisionError"}


@pytest.mark.parametrize(
    ("kind", "type_name", "message", "arrives_as"),
    [
        ("storage", "StorageError", "rank 1: no space; free some", "StorageError"),
        ("value", "CheckpointError", "rank 1: writing failed: ValueError: odd", "ValueError"),
        ("unpicklable", "CheckpointError", "rank 1: writing failed: Odd: very odd", "CheckpointError"),
    ],
)
def test_a_failing_rank_fails_all_with_its_class(
    pool: Crew, kind: str, type_name: str, message: str, arrives_as: str
) -> None:
    found = pool.run(4, fail, kind, [1, 3], "local")
    for rank, (error, total, again) in enumerate(found):
        assert (error["type"], error["message"]) == (type_name, message)
        own = {one: type(ERRORS[kind]()).__name__ if rank == one else arrives_as for one in (1, 3)}
        assert error["failures"] == own
        assert error["cause"] == own.get(rank, "NoneType")
        assert "local" in error["stacks"][1]
        assert (total, again) == (4.0, 6)


def test_a_failing_merge_fails_all(pool: Crew) -> None:
    for error, total, again in pool.run(3, fail, "storage", [], "merge"):
        assert (error["type"], error["message"]) == ("StorageError", "rank 0: no space; free some")
        assert error["failures"] == {0: "StorageError"}
        assert (total, again) == (3.0, 3)


@pytest.mark.parametrize("which", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize(("lost", "coordinator"), [(2, 0), (0, 0), (1, 1), (0, 1)])
def test_a_rank_that_dies_or_stops_is_named(pool: Crew, which: int, lost: int, coordinator: int) -> None:
    found = pool.run(3, signal_self, lost, int(which), coordinator, dies=[lost])
    survivors = [error for rank, error in enumerate(found) if rank != lost]
    for error in survivors:
        assert error["type"] == "RankLostError"
        assert error["rank"] == lost
        assert error["message"].startswith(f"rank {lost} ")
        assert list(error["failures"]) == [lost]
    # Survivors of the coordinator speak for themselves, and may not have come to the next phase yet.
    phases = {error["phase"] for error in survivors}
    assert phases <= ({"writing"} if lost != coordinator else {"planning", "writing"})
    assert lost == coordinator or len({error["message"] for error in survivors}) == 1


@pytest.mark.parametrize("busy", [0, 1])
def test_a_rank_that_holds_the_interpreters_lock_is_not_dead(pool: Crew, busy: int) -> None:
    assert pool.run(2, hold_the_interpreter, busy, 3) == [2, 2]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_rank_is_known_although_a_child_of_it_lives(pool: Crew, lost: int) -> None:
    found = pool.run(2, fork_and_die, lost, dies=[lost])
    assert found[1 - lost]["message"].startswith(f"rank {lost} is gone: ")


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_was_stopped_and_goes_on_hears_of_it_and_joins_the_next(pool: Crew, stopped: int) -> None:
    for error, again in pool.run(3, stop_and_continue, stopped):
        assert error["type"] == "RankLostError"
        assert error["rank"] == stopped
        assert again == 3


def test_after_the_death_of_the_coordinator_a_new_group_gets_a_new_channel(pool: Crew) -> None:
    nobody, *found = pool.run(3, after_the_coordinator_died, dies=[0])
    assert nobody is None
    for lost, again, total in found:
        assert (lost["rank"], again["rank"], total) == (0, 0, 1)
        assert again["message"].startswith("rank 0 cannot be reached in 'meeting the other ranks' (")


def test_a_slow_rank_with_progress_outlives_the_deadline(pool: Crew) -> None:
    assert pool.run(2, slow_but_alive) == [2, 2]


def test_a_rank_that_beats_without_progress_is_named_with_phase_and_bytes(pool: Crew) -> None:
    for error, again in pool.run(2, hang_beating):
        assert error["type"] == "RankLostError"
        assert error["message"].startswith(
            "rank 1 made no progress for 4 s in 'writing the checkpoint' (1,000,000 bytes done)"
        )
        assert again == 1


def test_operations_leave_no_thread_or_socket_behind(pool: Crew) -> None:
    for before, after in pool.run(3, many_operations, 50):
        assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)


def test_a_group_without_a_store_meets_by_one_broadcast(pool: Crew) -> None:
    assert pool.run(2, without_a_store) == [(1, 1)] * 2


def test_the_last_word_of_a_coordinator_that_ends_arrives_whole(pool: Crew) -> None:
    assert pool.run(3, leave_at_once, 30_000_000, dies=[0]) == [None, 30_000_000, 30_000_000]


def test_the_rendezvous_leaves_no_keys(pool: Crew) -> None:
    assert pool.run(3, keys_at_the_rendezvous) == [[], [], []]
