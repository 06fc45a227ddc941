"""Carriers: several hosts of one rank each as threads of one process, over real memory, pipes and connections."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from holdfast._plan.reads import Blocks, CommonReads
from holdfast._ranks import carrier as module
from holdfast._ranks.carrier import Carrier, Freight
from holdfast._ranks.exchange import Exchange, Link, Visit, layout_for
from holdfast._ranks.rendezvous import Greeting, Reception, seats
from holdfast.errors import CorruptError, InternalError, RankLostError

SLOT = 2 << 20
NBYTES = 300_000  # more than a connection takes at once, and not a whole number of anything


def nothing() -> None:
    pass


@contextmanager
def links(hosts: int) -> Iterator[list[Link]]:
    visits = [Visit(lambda host=host: (f"host {host}",)) for host in range(hosts)]  # type: ignore[misc]
    places = seats([visit.greet() for visit in visits], between_hosts=True)
    made = []
    try:
        for visit, seat in zip(visits, places, strict=True):
            assert seat is not None
            link = visit.invite(seat, layout_for((0, 0), 64, 1, SLOT, hosts), lambda memory: None)
            assert link is not None
            made.append(link)
        yield made
    finally:
        for part in (*made, *visits):
            part.close()


def carriers_on(
    made: list[Link], *, check: Callable[[], None] = nothing, deadline_s: float = 30.0
) -> tuple[list[Carrier], list[dict[int, socket.socket]]]:
    """A carrier for each host, and the connections by host."""
    count = len(made)
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(count)]
    for first in range(count):
        for second in range(first + 1, count):
            sockets[first][second], sockets[second][first] = socket.socketpair()
    for each in (one for by_host in sockets for one in by_host.values()):
        each.setblocking(False)
    leaders = tuple(10 + host for host in range(count))
    return [
        Carrier(
            Exchange(link, job_ranks=(leaders[host],), check=check, deadline_s=deadline_s, carries=True),
            sockets[host],
            job_ranks=leaders,
            host=host,
        )
        for host, link in enumerate(made)
    ], sockets


def job_of(reader: list[int], hosts: int) -> CommonReads:
    """Reads that all hosts want."""
    count = len(reader)
    column = np.arange(count, dtype=np.int64)
    blocks = Blocks(number=column, chunk=column, file=column, offset=column, nbytes=column)
    takers = np.ones((count, hosts), dtype=bool)
    return CommonReads(
        blocks=blocks, bounds=np.arange(count + 1), reader=np.array(reader, dtype=np.int64), takers=takers
    )


def reads_on(job: CommonReads, host: int) -> CommonReads:
    """The same as the one rank of a host sees it: it reads for the carrier, 1, or the carrier does for it."""
    is_mine = job.reader == host
    return CommonReads(
        blocks=job.blocks,
        bounds=job.bounds,
        reader=np.where(is_mine, 0, 1),
        takers=np.stack([np.ones(len(job), dtype=bool), is_mine], axis=1),
    )


def freight_of(job: CommonReads, check: Callable[[int, memoryview, int], None] = lambda *said: None) -> Freight:
    return Freight(job=job, number=np.arange(len(job)), place=lambda read: (read, read + NBYTES), check=check)


def content_of(read: int) -> bytes:
    return np.random.default_rng(read).bytes(NBYTES)


def work(link: Link, carrier: Carrier, job: CommonReads, host: int) -> list[int]:
    """What the one rank of a host does; the reads that came from other hosts as they should be."""
    exchange = Exchange(link, job_ranks=(10 + host,), check=carrier.check, deadline_s=30.0)
    reads = reads_on(job, host)
    exchange.begin(reads)
    carrier.start(reads, freight_of(job))
    right = []
    while True:
        exchange.collect()
        if (filled := exchange.next_filled()) is not None:
            read, slot = filled
            if bytes(exchange.slot(slot).view[read : read + NBYTES]) == content_of(read):
                right.append(read)
            exchange.tell_taken(read, slot)
        elif (to_fill := exchange.next_to_fill()) is not None:
            read, slot = to_fill
            exchange.slot(slot).view[read : read + NBYTES] = content_of(read)
            exchange.tell_filled(read, slot)
            if reads.takers[read, exchange.place]:
                exchange.tell_taken(read, slot)
        elif exchange.is_done:
            carrier.wait(exchange.mail.check)
            return sorted(right)
        else:
            exchange.wait()


@pytest.mark.parametrize("reads", [1, 5, 60])
def test_what_one_host_reads_reaches_all_others_through_few_slots(reads: int) -> None:
    reader = np.random.default_rng(reads).integers(0, 4, reads).tolist()
    job = job_of(reader, 4)
    with links(4) as made, ThreadPoolExecutor(4) as pool:
        carriers, _ = carriers_on(made)
        hosts = range(4)
        futures = [pool.submit(work, made[host], carriers[host], job, host) for host in hosts]
        for host, future in zip(hosts, futures, strict=True):
            assert future.result() == [read for read in range(reads) if reader[read] != host]
        for each in carriers:
            each.close()
        assert "holdfast-carrier" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("length", [0, 1, 1_000_000])
def test_wishes_of_all_hosts_reach_each(length: int) -> None:
    rows = [bytes([host]) * length for host in range(4)]
    with links(4) as made, ThreadPoolExecutor(4) as pool:
        carriers, _ = carriers_on(made)
        futures = [pool.submit(each.gather_wishes, row) for each, row in zip(carriers, rows, strict=True)]
        assert [future.result() for future in futures] == [rows] * 4
        for each in carriers:
            each.close()


def frame(kind: int, number: int, nbytes: int, magic: bytes = module._MAGIC) -> bytes:
    return module._HEADER.pack(magic, kind, number, nbytes)


@pytest.mark.parametrize(
    "said",
    [
        frame(module._READ, 0, NBYTES, magic=b"GET "),
        frame(module._WISHES, 0, NBYTES),
        frame(module._READ, 7, NBYTES),  # no such read
        frame(module._READ, 1, NBYTES),  # another host's
        frame(module._READ, 0, NBYTES + 1),
        frame(module._READ, 0, 1 << 63),
    ],
)
def test_a_frame_that_was_not_agreed_on_is_refused(said: bytes) -> None:
    job = job_of([1, 2], 4)
    with links(4) as made:
        carriers, sockets = carriers_on(made)
        carriers[0].start(reads_on(job, 0), freight_of(job))
        sockets[1][0].send(said)
        with pytest.raises(InternalError, match="rank 11 sent unexpected data"):
            carriers[0].wait(nothing)
        for each in carriers:
            each.close()


def test_wishes_of_another_length_are_refused() -> None:
    with links(4) as made:
        carriers, sockets = carriers_on(made)
        sockets[2][0].send(frame(module._WISHES, 2, 9))
        with pytest.raises(InternalError, match="rank 12 sent unexpected data"):
            carriers[0].gather_wishes(b"12345678")
        for each in carriers:
            each.close()


def test_what_arrives_is_checked_before_anyone_sees_it() -> None:
    def check(read: int, view: memoryview, rank: int) -> None:
        raise CorruptError(f"read {read} of {len(view)} bytes from rank {rank}")

    job = job_of([1], 4)
    with links(4) as made:
        carriers, sockets = carriers_on(made)
        exchange = Exchange(made[0], job_ranks=(10,), check=nothing, deadline_s=30.0)
        exchange.begin(reads_on(job, 0))
        carriers[0].start(reads_on(job, 0), freight_of(job, check))
        sockets[1][0].setblocking(True)
        sockets[1][0].sendall(frame(module._READ, 0, NBYTES) + content_of(0))
        with pytest.raises(CorruptError, match=f"read 0 of {NBYTES} bytes from rank 11"):
            carriers[0].wait(nothing)
        exchange.collect()
        assert exchange.next_filled() is None
        for each in carriers:
            each.close()


def test_a_lost_connection_is_named_when_nobody_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_NAMING_S", 0.2)
    monkeypatch.setattr(module, "_SLICE_S", 0.02)
    job = job_of([3, 3], 4)
    with links(4) as made:
        carriers, sockets = carriers_on(made)
        carriers[0].start(reads_on(job, 0), freight_of(job))
        sockets[3][0].close()
        with pytest.raises(RankLostError, match="rank 13 closed its connection before it was done") as caught:
            carriers[0].wait(nothing)
        assert caught.value.rank == 13
        for each in carriers:
            each.close()


def test_whoever_is_waited_for_too_long_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLICE_S", 0.02)
    cases = {
        "a host that sends nothing": ([2], "rank 12 made no progress for 0.2 s"),
        "the rank of this host that reads nothing": ([0, 2], "rank 10 made no progress for 0.1 s"),
    }
    for reader, message in cases.values():
        job = job_of(reader, 4)
        with links(4) as made:
            carriers, _ = carriers_on(made, deadline_s=0.1)
            carriers[0].start(reads_on(job, 0), freight_of(job))
            with pytest.raises(RankLostError, match=message):
                carriers[0].wait(nothing)
            for each in carriers:
                each.close()
    with links(4) as made:
        carriers, _ = carriers_on(made, deadline_s=0.1)
        with pytest.raises(RankLostError, match=r"rank 11 made no progress for 0\.2 s"):
            carriers[0].gather_wishes(b"1")
        for each in carriers:
            each.close()


def test_what_another_rank_failed_with_ends_carrying() -> None:
    def check() -> None:
        raise CorruptError("rank 12: a file is damaged")

    job = job_of([2], 4)
    with links(4) as made:
        carriers, _ = carriers_on(made, check=check)
        carriers[0].start(reads_on(job, 0), freight_of(job))
        with pytest.raises(CorruptError, match="rank 12"):
            carriers[0].wait(nothing)
        with pytest.raises(CorruptError, match="rank 12"):
            carriers[1].gather_wishes(b"1")
        for each in carriers:
            each.close()


def greetings(hosts: list[str]) -> list[Greeting]:
    return [Greeting(host=(host,), address=str(rank)) for rank, host in enumerate(hosts)]


def test_hosts_are_told_of_each_other_when_there_are_enough() -> None:
    found = seats(greetings(["a", "b", "a", "c", "d"]), between_hosts=True)
    assert [seat and (seat.members, seat.place, seat.hosts, seat.host) for seat in found] == [
        ((0, 2), 0, (0, 1, 3, 4), 0),
        ((1,), 0, (0, 1, 3, 4), 1),
        ((0, 2), 1, (0, 1, 3, 4), 0),
        ((3,), 0, (0, 1, 3, 4), 2),
        ((4,), 0, (0, 1, 3, 4), 3),
    ]
    few = greetings(["a", "b", "a", "c"])
    assert seats(few, between_hosts=True) == seats(few)
    assert seats(greetings(["a", "b", "c", "d"])) == [None] * 4


def test_very_many_hosts_are_split_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast._ranks.rendezvous.MOST_HOSTS", 8)
    found = seats(greetings([str(host) for host in range(9)]), between_hosts=True)
    assert [seat and (seat.hosts, seat.host) for seat in found] == [
        *(((0, 1, 2, 3), host) for host in range(4)),
        *(((4, 5, 6, 7, 8), host) for host in range(5)),
    ]


def test_whoever_answers_without_the_token_is_not_taken_for_a_host() -> None:
    first, second = (Reception(host, range(2), SLOT) for host in range(2))
    with socket.create_server(("", 0)) as impostor:
        told = replace(first.contact, port=impostor.getsockname()[1])
        assert second.call({0: told}, 5.0)
        visitor, _ = impostor.accept()
        with visitor:
            visitor.sendall(b"?" * 32)
            assert not second.answer(5.0)
    # And without any caller nobody waits for longer than was said.
    assert first.call({1: second.contact}, 5.0)
    assert not first.answer(0.1)
    first.close()
    second.close()


def test_two_leaders_that_know_each_others_tokens_are_connected() -> None:
    first, second = (Reception(host, range(2), SLOT) for host in range(2))
    contacts = {0: first.contact, 1: second.contact}
    assert first.call(contacts, 5.0)
    assert second.call(contacts, 5.0)
    assert first.answer(5.0)
    assert second.answer(5.0)
    (one,), (other,) = (reception.take_sockets().values() for reception in (first, second))
    with one, other:
        one.setblocking(True)
        one.sendall(b"hello")
        other.settimeout(5.0)
        assert other.recv(5) == b"hello"
    first.close()
    second.close()
    assert contacts[0].token.hex() not in repr(contacts[0])
    assert repr(contacts[0].token) not in repr(contacts[0]), "tokens do not get into logs"
