"""Opening a checkpoint on many ranks: manifest and index are read once per host and handed over as bytes.

Every rank decodes and checks them for itself. Where a host's ranks cannot share memory, each of them reads for itself.
"""

from __future__ import annotations

from contextlib import closing

from holdfast._coord.ranks import Ranks
from holdfast._host.exchange import Exchange, layout_for
from holdfast._host.meeting import Link, Seat, Visit, seats
from holdfast._io.sharing import SharedMemory
from holdfast._native.catalog import CatalogBytes
from holdfast._native.reader import NativeReader
from holdfast._native.shared_fetch import slot_bytes
from holdfast.errors import CorruptError
from holdfast.metadata import Metadata

_MANIFEST, _INDEX = 0, 1


def open_together(reader: NativeReader, ranks: Ranks) -> tuple[Metadata, Exchange | None]:
    """The metadata of the checkpoint, the same on every rank, and the exchange with the others of this host, if any.

    The exchange is the caller's to close.
    """
    with closing(Visit()) as visit:
        seat: Seat | None = ranks.scatter("meeting the ranks of the host", visit.greet, seats)
        opening = _Opening(reader, visit, seat)
        try:
            opening.is_invited = ranks.scatter("reading the metadata", opening.read, _invited)
            is_linked = ranks.scatter("opening the checkpoint", opening.open, _linked)
        except BaseException:
            opening.leave()
            raise
    assert opening.metadata is not None
    if not is_linked or opening.link is None:
        opening.leave()
        return opening.metadata, None
    names = tuple(ranks.names[member] for member in opening.link.seat.members)
    exchange = Exchange(opening.link, names=names, check=ranks.check, deadline_s=ranks.deadline_s)
    return opening.metadata, exchange


# What a rank says after opening: which save it has opened, whether it shares memory, and with whom it should.
_Opened = tuple[str, bool, tuple[int, ...]]


class _Opening:
    """One rank's part in it, step by step."""

    def __init__(self, reader: NativeReader, visit: Visit, seat: Seat | None) -> None:
        self._reader = reader
        self._visit = visit
        self._seat = seat
        self._data: CatalogBytes | None = None
        self.is_invited = False
        self.link: Link | None = None
        self.metadata: Metadata | None = None

    def read(self) -> tuple[int, ...]:
        """Whom this rank has invited to share what it has read; the others leave the reading to their leader."""
        seat = self._seat
        if seat is not None and not seat.leads:
            return ()
        self._data = data = self._reader.read_catalog_bytes()
        if seat is None:
            return ()
        sizes = (len(data.manifest), len(data.index))
        # The index has a byte or more for every block, and a wish is one bit.
        layout = layout_for(sizes, len(data.index) // 8 + 1, len(seat.members), slot_bytes())

        def fill(memory: SharedMemory) -> None:
            for number, part in ((_MANIFEST, data.manifest), (_INDEX, data.index)):
                start, stop = layout.section(number)
                memory.view[start:stop] = part

        self.link = self._visit.invite(seat, layout, fill)
        return () if self.link is None else seat.members

    def open(self) -> _Opened:
        """Decode and check what was read here or elsewhere."""
        seat = self._seat
        if self.is_invited and seat is not None and not seat.leads:
            self.link = self._visit.join(seat)
            if self.link is not None:
                manifest, index = (bytes(self.link.section(number)) for number in (_MANIFEST, _INDEX))
                self._data = CatalogBytes(manifest=manifest, index=index)
        self._reader.offer_catalog(self._data or self._reader.read_catalog_bytes())
        self._data = None
        self.metadata = self._reader.read_metadata()
        members = seat.members if seat is not None and self.is_invited else ()
        return self._reader.catalog.manifest.attempt, self.link is not None, members

    def leave(self) -> None:
        """Share nothing after all."""
        if self.link is not None:
            self.link.close()
            self.link = None


def _invited(told: list[tuple[int, ...]]) -> list[bool]:
    members = {member for invited in told for member in invited}
    return [rank in members for rank in range(len(told))]


def _linked(opened: list[_Opened]) -> list[bool]:
    """For each rank, whether all of its host share; CorruptError unless all ranks have opened the same save."""
    if len({attempt for attempt, _, _ in opened}) > 1:
        raise CorruptError("the checkpoint was replaced by another one while it was opened")
    return [bool(members) and all(opened[member][1] for member in members) for _, _, members in opened]
