"""The exchange of blocks: several ranks as threads of one process, over the memory and pipes that processes use."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from holdfast._plan.reads import Blocks, CommonReads
from holdfast._ranks import exchange as module
from holdfast._ranks.exchange import Exchange, Link, Visit, layout_for
from holdfast._ranks.rendezvous import seats
from holdfast.errors import CorruptError, InternalError, RankLostError

SLOT = 8192


@contextmanager
def linked(size: int, *, wishes: int = 64, slots: int = 2) -> Iterator[list[Link]]:
    visits = [Visit(lambda: ("here",)) for _ in range(size)]
    places = [seat for seat in seats([visit.greet() for visit in visits]) if seat is not None]
    layout = layout_for((0, 0), wishes, size, SLOT)
    layout = type(layout)(sections=layout.sections, slots=min(size, 16) * slots, slot_bytes=SLOT)
    first = visits[0].invite(places[0], layout, lambda memory: None)
    others = [visit.join(seat) for visit, seat in zip(visits[1:], places[1:], strict=True)]
    links = [link for link in (first, *others) if link is not None]
    assert len(links) == size
    try:
        yield links
    finally:
        for part in (*links, *visits):
            part.close()


def exchange_of(link: Link, *, check: Callable[[], None] = lambda: None, deadline_s: float = 30.0) -> Exchange:
    job_ranks = tuple(10 + member for member in link.seat.members)
    return Exchange(link, job_ranks=job_ranks, check=check, deadline_s=deadline_s)


def reads_of(reader: list[int], takers: list[list[int]], size: int) -> CommonReads:
    wants = np.zeros((len(reader), size), dtype=bool)
    for read, ranks in enumerate(takers):
        wants[read, ranks] = True
    count = len(reader)
    column = np.arange(count, dtype=np.int64)
    blocks = Blocks(number=column, chunk=column, file=column, offset=column, nbytes=column)
    return CommonReads(
        blocks=blocks, bounds=np.arange(count + 1), reader=np.array(reader, dtype=np.int64), takers=wants
    )


def work(exchange: Exchange, reads: CommonReads, seed: int) -> list[int]:
    """Do everything there is to do in the order in which it becomes possible; the reads whose content was right."""
    draw = random.Random(seed)
    exchange.begin(reads)
    taken = []
    while True:
        exchange.collect()
        if draw.random() < 0.5 and (filled := exchange.next_filled()) is not None:
            read, slot = filled
            if bytes(exchange.slot(slot).view[:8]) == read.to_bytes(8, "little"):
                taken.append(read)
            exchange.tell_taken(read, slot)
        elif (to_fill := exchange.next_to_fill()) is not None:
            read, slot = to_fill
            exchange.slot(slot).view[:8] = read.to_bytes(8, "little")
            exchange.tell_read(read, slot)
        elif (own := exchange.next_read()) is not None:
            read, slot = own
            exchange.tell_filled(read, slot)
            if reads.takers[read, exchange.place]:
                if bytes(exchange.slot(slot).view[:8]) == read.to_bytes(8, "little"):
                    taken.append(read)
                exchange.tell_taken(read, slot)
        elif exchange.is_done:
            return taken
        elif not exchange._filled:
            exchange.wait()


@pytest.mark.parametrize("seed", range(8))
def test_everyone_gets_what_it_wants_and_nothing_is_overwritten_too_early(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.choice([2, 3, 4, 5])
    count = draw.choice([1, 7, 200])
    readers = [draw.randrange(size) for _ in range(count)]
    takers = [draw.sample(range(size), draw.randint(2, size)) for _ in range(count)]
    reads = reads_of(readers, takers, size)
    with linked(size, slots=draw.choice([1, 2, 3])) as links, ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(work, exchange_of(link), reads, seed + place) for place, link in enumerate(links)]
        for place, future in enumerate(futures):
            wanted = [read for read in range(count) if place in takers[read]]
            assert sorted(future.result()) == wanted


def test_wishes_reach_everyone_bit_by_bit() -> None:
    generator = np.random.default_rng(1)
    wanted = generator.random((3, 501)) < 0.3
    with linked(3) as links, ThreadPoolExecutor(3) as pool:
        exchanges = [exchange_of(link) for link in links]
        results = list(pool.map(lambda pair: pair[0].gather_wishes(pair[1]), zip(exchanges, wanted, strict=True)))
    for result in results:
        assert np.array_equal(result, wanted)


def test_wishes_without_room_for_them_are_our_mistake() -> None:
    with linked(2, wishes=1) as links, pytest.raises(InternalError, match="do not fit"):
        exchange_of(links[0]).gather_wishes(np.ones(9, dtype=bool))


def test_a_rank_that_was_filled_for_before_it_began_takes_it_later() -> None:
    reads = reads_of([0], [[0, 1]], 2)
    with linked(2) as links:
        first, second = (exchange_of(link) for link in links)
        assert work(first, reads, 0) == [0]
        second.collect()
        assert work(second, reads, 0) == [0]


def test_a_slot_is_free_only_when_all_are_done_with_it() -> None:
    reads = reads_of([0, 0], [[0, 1, 2], [1, 2]], 3)
    with linked(3, slots=1) as links:
        reader, second, third = (exchange_of(link) for link in links)
        for each in (reader, second, third):
            each.begin(reads)
        assert reader.next_to_fill() == (0, 0)
        reader.tell_filled(0, 0)
        assert reader.next_to_fill() is None
        for each in (second, reader, third):
            assert reader.next_to_fill() is None
            each.collect()
            assert each.next_filled() == (None if each is reader else (0, 0))
            each.tell_taken(0, 0)
            reader.collect()
        assert reader.next_to_fill() == (1, 0)
        assert not reader.is_done
        reader.tell_filled(1, 0)
        assert reader.is_done
        assert not second.is_done


def test_what_another_rank_failed_with_ends_every_wait() -> None:
    def check() -> None:
        raise CorruptError("rank 11: a file is damaged")

    with linked(2) as links:
        with pytest.raises(CorruptError, match="rank 11"):
            exchange_of(links[0], check=check).gather_wishes(np.ones(3, dtype=bool))
        waiting = exchange_of(links[0], check=check)
        waiting.begin(reads_of([1], [[0, 1]], 2))
        with pytest.raises(CorruptError, match="rank 11"):
            waiting.wait()


def test_a_rank_that_is_waited_for_too_long_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLICE_S", 0.01)
    with linked(3) as links:
        waits: list[None] = []
        exchange = exchange_of(links[0], check=lambda: waits.append(None), deadline_s=0.05)
        with pytest.raises(RankLostError, match=r"rank 11 made no progress for 0\.05 s") as caught:
            exchange.gather_wishes(np.ones(3, dtype=bool))
        assert caught.value.rank == 11
        assert waits
        at_file = r"' \(at 'data-1'\);"
        for reader, takers, is_told, lost, place in (
            (2, [0, 2], False, 12, at_file),
            (0, [0, 1], True, 11, "';"),
            (0, [0, 1], False, 10, at_file),  # its own disk
        ):
            waiting = exchange_of(links[0], deadline_s=0.05)
            waiting.begin(reads_of([reader], [takers], 3), files=["data-1"])
            waiting.next_to_fill()
            if is_told:
                waiting.tell_filled(0, 0)
            with pytest.raises(RankLostError, match=f"rank {lost} .*{place}"):
                waiting.wait()


def test_a_message_starts_the_deadline_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLICE_S", 0.05)
    with linked(3) as links:
        now = [0.0]
        exchange = Exchange(links[0], job_ranks=(0, 1, 2), check=lambda: None, deadline_s=5.0, clock=lambda: now[0])
        others = [exchange_of(link) for link in links[1:]]
        bits = np.ones(3, dtype=bool)

        def answer() -> None:
            for other in others:
                now[0] += 4.0
                other.mail.post(0, module._WISHED)

        thread = threading.Thread(target=answer)
        thread.start()
        assert exchange.gather_wishes(bits).shape == (3, 3)
        thread.join()


@pytest.mark.parametrize(
    ("size", "slot_bytes"), [(2, 2 << 20), (2, 16 << 20), (8, 16 << 20), (16, 2 << 20), (32, 16 << 20)]
)
def test_the_slots_stay_within_bounds(size: int, slot_bytes: int) -> None:
    layout = layout_for((100, 1000), 10, size, slot_bytes)
    assert layout.slots >= 2 * min(size, 16)
    assert layout.slots % min(size, 16) == 0
    assert layout.slots * layout.slot_bytes <= 128 << 20
    assert 2 << 20 <= layout.slot_bytes <= slot_bytes
