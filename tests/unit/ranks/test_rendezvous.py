"""Which ranks share a host, and how what they share reaches them; several ranks in one process."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import socket

import msgspec
import pytest
from torch.distributed import HashStore

from holdfast._io import sharing
from holdfast._io.sharing import SharedMemory
from holdfast._ranks import exchange, rendezvous
from holdfast._ranks.exchange import Link, SharedLayout, Visit
from holdfast._ranks.rendezvous import Address, Greeting, Seat, caller, seats
from holdfast.errors import RankLostError

LAYOUT = SharedLayout(sections=(3, 5000, 2), slots=4, slot_bytes=8192)


def open_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def greeting(host: str, address: str | None = "somewhere") -> Greeting:
    return Greeting(host=(host,), address=address)


def test_ranks_of_one_host_sit_together_in_order() -> None:
    found = seats([greeting("a", "0"), greeting("b", "1"), greeting("a", "2"), greeting("b", "3"), greeting("a", "4")])
    assert [None if seat is None else (seat.members, seat.place) for seat in found] == [
        ((0, 2, 4), 0),
        ((1, 3), 0),
        ((0, 2, 4), 1),
        ((1, 3), 1),
        ((0, 2, 4), 2),
    ]
    assert [seat.addresses for seat in found if seat is not None and seat.leads] == [("0", "2", "4"), ("1", "3")]


def test_who_is_alone_or_cannot_be_reached_has_no_seat() -> None:
    assert seats([greeting("a"), greeting("b")]) == [None, None]
    found = seats([greeting("a"), greeting("a", None), greeting("a")])
    assert found[1] is None
    assert [seat.members for seat in found if seat is not None] == [(0, 2)] * 2


def test_large_hosts_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "MOST_MEMBERS", 3)
    found = seats([greeting("a", str(rank)) for rank in range(7)])
    assert [None if seat is None else seat.members for seat in found] == [(0, 1, 2)] * 3 + [(3, 4, 5)] * 3 + [None]


def test_sections_and_slots_do_not_overlap() -> None:
    places = [LAYOUT.section(number) for number in range(3)] + [LAYOUT.slot(number) for number in range(4)]
    assert places[:3] == [(0, 3), (4096, 9096), (12288, 12290)]
    assert places[3] == (2 << 20, (2 << 20) + 8192)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(places))
    assert LAYOUT.size >= places[-1][1]
    assert SharedLayout(sections=(0, 0, 0), slots=0, slot_bytes=8192).size > 0, "no memory can be of no size"


def visit_all(count: int) -> tuple[list[Visit], list[Seat]]:
    visits = [Visit(lambda: ("here",)) for _ in range(count)]
    found = seats([visit.greet() for visit in visits])
    assert all(seat is not None for seat in found)
    return visits, [seat for seat in found if seat is not None]


def fill(memory: SharedMemory) -> None:
    memory.view[:3] = b"abc"


def test_what_the_leader_shares_reaches_everyone() -> None:
    before = open_descriptors()
    visits, places = visit_all(3)
    first = visits[0].invite(places[0], LAYOUT, fill)
    assert first is not None
    links: list[Link] = [first]
    for visit, seat in zip(visits[1:], places[1:], strict=True):
        link = visit.join(seat)
        assert link is not None
        assert link.layout == LAYOUT
        assert bytes(link.section(0)) == b"abc"
        links.append(link)
    for sender, link in enumerate(links):
        for place in range(3):
            link.outboxes[place].post(bytes([sender]) * 16)
    for link in links:
        assert [message[0] for message in link.inboxes[0].collect()] == [0, 1, 2]
    for link in links:
        link.close()
    for visit in visits:
        visit.close()
    assert open_descriptors() <= before


@pytest.mark.parametrize("missing", ["memfd_create", "pipe2"])
def test_a_system_that_cannot_share_gives_no_link_and_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    before = open_descriptors()
    visits, places = visit_all(2)
    monkeypatch.delattr(os, missing)
    assert visits[0].invite(places[0], LAYOUT, fill) is None
    for visit in visits:
        visit.close()
    assert open_descriptors() <= before


def test_one_that_cannot_be_reached_means_no_link_for_all() -> None:
    before = open_descriptors()
    visits, places = visit_all(3)
    visits[1].close()
    assert visits[0].invite(places[0], LAYOUT, fill) is None
    for visit in visits:
        visit.close()
    assert open_descriptors() <= before


def test_what_was_not_left_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_HANDOVER_S", 0.02)
    visits, places = visit_all(2)
    assert visits[1].join(places[1]) is None
    for visit in visits:
        visit.close()


@pytest.mark.parametrize("message", [b"{}", b"not json"])
def test_something_else_that_was_left_is_no_link(message: bytes) -> None:
    before = open_descriptors()
    visits, places = visit_all(2)
    sharing.leave_at(places[1].addresses[1], message, [0, 0, 0, 0], 1.0)
    assert visits[1].join(places[1]) is None
    for visit in visits:
        visit.close()
    assert open_descriptors() <= before


def test_without_a_place_to_leave_things_a_rank_stays_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError("no such sockets here")

    monkeypatch.setattr(exchange, "Doorstep", refuse)
    visit = Visit(lambda: ("here",))
    assert visit.greet() == Greeting(host=("here",), address=None)
    visit.close()


def test_whoever_looks_for_a_coordinator_that_has_not_come_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, comes = HashStore(), logging.Handler()
    address = Address(hostname="here", candidates=("a",), port=7, token=bytes(32))
    monkeypatch.setattr(comes, "emit", lambda record: store.set("key", msgspec.json.encode(address).decode()))
    monkeypatch.setattr(logging.getLogger("holdfast"), "handlers", [comes])
    assert rendezvous._find(store, "key", 3, 300.0, notice_s=0.0) == address
    said = "rank 3 has not come after 0 s; call it on every rank, or pass no_dist=True"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("WARNING", said)]


def test_a_connection_that_nobody_answers_is_closed_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        address = Address(hostname=socket.gethostname(), candidates=(), port=port, token=bytes(32))
        before = open_descriptors()
        with pytest.raises(RankLostError, match="cannot be reached") as raised:
            caller(lambda limit_s: address, rank=1, coordinator=0)(0.05)
        assert raised.tb is not None, "its frames are still there, and what they hold"
        assert len(os.listdir("/proc/self/fd")) == before
