"""Opening a checkpoint on many ranks: manifest and index are read once per host and handed over as bytes.

How is for the format to say. Every rank decodes and checks them for itself. Where a host's ranks cannot share memory,
each of them reads for itself. Where hosts are to pass blocks on to each other, they are connected here; where that
fails, each host reads for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial

from holdfast._io.sharing import SharedMemory
from holdfast._io.slabs import uses_cuda
from holdfast._native.catalog import Catalog, CatalogBytes
from holdfast._native.fetch import slot_bytes
from holdfast._ranks.carrier import Carrier, OtherHosts
from holdfast._ranks.exchange import Exchange, Link, Visit, layout_for
from holdfast._ranks.ranks import Ranks
from holdfast._ranks.rendezvous import Address, Reception, Seat, seats
from holdfast._values.deadline import Progress
from holdfast.errors import CorruptError

_MANIFEST, _INDEX = 0, 1
_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Opened:
    """The checkpoint, the same on every rank, and the exchange with the others of this host, if any.

    The exchange is the caller's to close. ``bytes_read`` is what this rank itself has read of manifest and index.
    """

    catalog: Catalog
    exchange: Exchange | None
    bytes_read: int


def open_on_ranks(
    read: Callable[[], CatalogBytes],
    decode: Callable[[CatalogBytes], Catalog],
    ranks: Ranks,
    progress: Progress,
    *,
    between_hosts: bool,
) -> Opened:
    """Open on all ``ranks`` the checkpoint whose bytes ``read`` gets from its files, and ``decode`` checks.

    ``progress`` counts each look at the exchange: who waits for what another rank reads is not the one that is stuck.
    With ``between_hosts`` the exchange is one with other hosts too, where there are enough of them and all can be
    connected.
    """
    with closing(Visit()) as visit:
        seat: Seat | None = ranks.reduce_scatter(
            "meeting the ranks of the host", visit.greet, partial(seats, between_hosts=between_hosts)
        )
        opening = _Opening(read, decode, visit, seat, limit_s=min(_CONNECT_S, ranks.deadline_s / 4))
        try:
            opening.contacts = ranks.reduce_scatter("reading the metadata", opening.read, _invited)
            opening.welcome = ranks.reduce_scatter("opening the checkpoint", opening.open, _linked)
            is_job = between_hosts and ranks.reduce_scatter("connecting the hosts", opening.connect, _connected)
            return opening.result(ranks, partial(progress.moved, 1), is_job=is_job)
        except BaseException:
            opening.leave()
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """What a rank says after reading: whom it has invited to share that, and where its host is to be connected to."""

    invited: tuple[int, ...] = ()
    hosts: tuple[int, ...] = ()
    contact: Address | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """What a rank says after opening: which save it is, whether it shares memory, and with whom it should."""

    attempt: str
    is_linked: bool
    members: tuple[int, ...]
    hosts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Welcome:
    """What a rank is told then: whether all ranks of its host share memory, and whether hosts are connected next."""

    is_linked: bool
    goes_on: bool


class _Opening:
    """One rank's part in it, step by step."""

    def __init__(
        self,
        read: Callable[[], CatalogBytes],
        decode: Callable[[CatalogBytes], Catalog],
        visit: Visit,
        seat: Seat | None,
        *,
        limit_s: float,
    ) -> None:
        self._read = read
        self._decode = decode
        self._visit = visit
        self._seat = seat
        self._limit_s = limit_s
        self._data: CatalogBytes | None = None
        self._bytes_read = 0
        self._link: Link | None = None
        self._reception: Reception | None = None
        self._catalog: Catalog | None = None
        # Where all hosts are that it shares with, or nothing; None where it is not invited to share.
        self.contacts: tuple[Address, ...] | None = None
        self.welcome = _Welcome(is_linked=False, goes_on=False)

    def read(self) -> _Read:
        """Read manifest and index, unless that is left to the leader, and invite the others to share them."""
        seat = self._seat
        if seat is not None and not seat.leads:
            return _Read()
        self._data = data = self._read_bytes()
        if seat is None:
            return _Read()
        sizes = (len(data.manifest), len(data.index))
        # A wish is one bit.
        layout = layout_for(sizes, data.most_blocks // 8 + 1, len(seat.members), slot_bytes(), len(seat.hosts))

        def fill(memory: SharedMemory) -> None:
            for number, part in ((_MANIFEST, data.manifest), (_INDEX, data.index)):
                start, stop = layout.section(number)
                memory.view[start:stop] = part
            if uses_cuda():  # everyone pins the slots, and what is pinned stays in the pages that it is in
                memory.make_huge(layout.slot(0)[0], layout.slot(layout.slots)[0])

        self._link = self._visit.invite(seat, layout, fill)
        if self._link is None:
            return _Read()
        if seat.hosts:
            with suppress(OSError):
                self._reception = Reception(seat.host, range(len(seat.hosts)), layout.slot_bytes)
        contact = None if self._reception is None else self._reception.contact
        return _Read(invited=seat.members, hosts=seat.hosts, contact=contact)

    def _read_bytes(self) -> CatalogBytes:
        data = self._read()
        self._bytes_read = len(data.manifest) + len(data.index)
        return data

    def open(self) -> _Opened:
        """Decode and check what was read here or elsewhere; the leader connects to the hosts before its own."""
        seat = None if self.contacts is None else self._seat
        if seat is not None and not seat.leads:
            self._link = self._visit.join(seat)
            if self._link is not None:
                manifest, index = (bytes(self._link.section(number)) for number in (_MANIFEST, _INDEX))
                self._data = CatalogBytes(manifest=manifest, index=index)
        self._catalog = self._decode(self._data or self._read_bytes())
        self._data = None
        contacts = dict(enumerate(self.contacts or ()))
        goes_on = self._reception is None or not contacts or self._reception.call(contacts, self._limit_s)
        return _Opened(
            attempt=self._catalog.manifest.attempt,
            is_linked=self._link is not None,
            members=() if seat is None else seat.members,
            hosts=seat.hosts if seat is not None and goes_on and self.contacts else (),
        )

    def connect(self) -> tuple[bool, tuple[int, ...]]:
        """Whether this rank's host is connected to all that it should be; the leader takes in the hosts after it."""
        hosts = () if self._seat is None or not self.welcome.goes_on else self._seat.hosts
        if not hosts or self._reception is None:
            return bool(hosts), hosts
        return self._reception.answer(self._limit_s), hosts

    def result(self, ranks: Ranks, check: Callable[[], None], *, is_job: bool) -> Opened:
        assert self._catalog is not None
        exchange = self._exchange(ranks, check, is_job=is_job)
        return Opened(catalog=self._catalog, exchange=exchange, bytes_read=self._bytes_read)

    def _exchange(self, ranks: Ranks, check: Callable[[], None], *, is_job: bool) -> Exchange | None:
        """The exchange, if all of this host share and there is somebody to share with."""
        link, seat = self._link, self._seat
        if link is None or seat is None or not self.welcome.is_linked or (len(seat.members) == 1 and not is_job):
            self.leave()
            return None
        job_ranks, deadline_s = tuple(ranks.job_ranks[member] for member in seat.members), ranks.deadline_s
        if not is_job:
            self._close_reception()
            return Exchange(link, job_ranks=job_ranks, check=check, deadline_s=deadline_s)
        carrier = None
        if self._reception is not None:
            carrier = Carrier(
                Exchange(link, job_ranks=job_ranks, check=check, deadline_s=deadline_s, carries=True),
                self._reception.take_sockets(),
                job_ranks=tuple(ranks.job_ranks[leader] for leader in seat.hosts),
                host=seat.host,
            )
            self._close_reception()
        least = min(contact.slot_bytes for contact in self.contacts or ())
        hosts = OtherHosts(host=seat.host, slot_bytes=least, carrier=carrier)

        def check_both() -> None:
            check()
            if carrier is not None:
                carrier.check()

        return Exchange(link, job_ranks=job_ranks, check=check_both, deadline_s=deadline_s, hosts=hosts)

    def leave(self) -> None:
        self._close_reception()
        if self._link is not None:
            self._link.close()
            self._link = None

    def _close_reception(self) -> None:
        if self._reception is not None:
            self._reception.close()
            self._reception = None


def _invited(read: list[_Read]) -> list[tuple[Address, ...] | None]:
    """For each rank, where the hosts are that it shares with; None where it is not invited."""
    contacts: dict[int, tuple[Address, ...]] = {}
    for each in read:
        found = [read[leader].contact for leader in each.hosts]
        of_all = tuple(contact for contact in found if contact is not None)
        for member in each.invited:
            contacts[member] = of_all if len(of_all) == len(found) else ()
    return [contacts.get(rank) for rank in range(len(read))]


def _linked(opened: list[_Opened]) -> list[_Welcome]:
    """For each rank, whether all of its host share; CorruptError unless all ranks have opened the same save."""
    if len({each.attempt for each in opened}) > 1:
        raise CorruptError("the checkpoint was replaced by another one while it was opened")
    is_linked = [bool(each.members) and all(opened[member].is_linked for member in each.members) for each in opened]
    return [
        _Welcome(
            is_linked=linked,
            goes_on=bool(each.hosts) and all(is_linked[leader] and opened[leader].hosts for leader in each.hosts),
        )
        for linked, each in zip(is_linked, opened, strict=True)
    ]


def _connected(told: list[tuple[bool, tuple[int, ...]]]) -> list[bool]:
    """For each rank, whether all hosts that it shares with are connected."""
    return [bool(hosts) and all(told[leader][0] for leader in hosts) for _, hosts in told]
