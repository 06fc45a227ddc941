"""How the bytes of a state come into host memory, and the proof that what is written later is what was there at the
call.

Invariant: ``begin`` runs on the calling thread and ``finish`` on any; once both are through, or ``wait`` has returned,
the memory holds the snapshot and no tensor of the state is looked at again.

A number is the sum of all 8-byte words, each times a weight of its place, modulo 2**64: the same on every device, cheap
enough to take on one, and sure to tell one changed word. It finds accidents (a tensor that was changed too early), not
attackers. And a memory of the last save, to tell which tensors have not changed since.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import lru_cache, partial
from itertools import accumulate
from typing import Literal

import numpy as np
import torch

from holdfast._io.pipeline import run_bounded
from holdfast._io.slabs import Slab
from holdfast._native.file_layout import Copy
from holdfast._native.packer import Chunk
from holdfast._native.report import WriteReport
from holdfast._process import forget_in_child
from holdfast._staging.memory import CUDA, CudaTransfer, Looking, Region
from holdfast._state.pieces import pieces_of
from holdfast._state.tensor_bytes import MemorySource, ScatteredSource, Source
from holdfast._values.deadline import Progress
from holdfast._values.digest import BLOCK_BYTES, combine, digest
from holdfast.default_planner import DefaultSavePlanner
from holdfast.errors import InvalidStateError
from holdfast.planner import SavePlan, WriteItem, write_columns

logger = logging.getLogger("holdfast")

Mode = Literal["copy", "overlap", "device"]

_JOB_BYTES = 8 << 20  # whole blocks
_MOST_THREADS = 8


class Staging:
    """The copies of one save into ``region``.

    ``mode`` says what ``begin`` leaves to ``finish``: nothing ("copy"), everything but the chunks named in ``now``
    ("overlap"), or what it has cloned on the device ("device"). ``copies`` is emptied when they are done.
    ``progress`` is told of the bytes that have been copied within the host. ``digests`` is given, by
    its place in the region, the digest of each block that was copied within the host, where it costs next to nothing.
    ``numbers``, if set, looks at what is on a device before that may change.
    """

    def __init__(
        self,
        copies: list[Copy],
        region: Region,
        *,
        mode: Mode,
        now: Collection[str] = (),
        progress: Progress | None = None,
        digests: dict[int, int] | None = None,
    ) -> None:
        self._copies = copies
        self.numbers: Looking | None = None
        self._region = region
        self._mode = mode
        self._now = now
        self._copier = HostCopier(region, progress or Progress(), digests)
        self._transfer: CudaTransfer | None = None
        self._later: list[Copy] = []
        self._copied: Future[None] = Future()

    @property
    def is_done(self) -> bool:
        return self._mode == "copy" and self._copied.done()

    def begin(self) -> None:
        """Order the copies behind what the caller's streams have queued, and do those that cannot wait."""
        local: list[Copy] = []
        remote: list[Copy] = []
        for copy in self._copies:
            (remote if CUDA.holds(copy.source) else local).append(copy)
        if remote:
            self._region.pin()
        if self._mode == "overlap":
            now, remote = _divided(remote, self._now)
            if now:
                transfer = CUDA.transfer(now, self._region.tensor)
                transfer.numbers = self.numbers
                transfer.issue()
                transfer.wait()
            local, self._later = _divided(local, self._now)
        if remote:
            self._transfer = CUDA.transfer(remote, self._region.tensor)
            self._transfer.numbers = self.numbers
        if self._transfer is not None and self._mode == "device" and not self._transfer.clone():
            logger.warning("the device has no room for a clone of the state; it is copied to the host instead")
            self._mode = "copy"
        if self._mode != "copy":
            self._copier.copy(local)
            return
        if self._transfer is not None:
            self._transfer.issue()
        self._copy_beside(local)
        self._end()

    def finish(self) -> None:
        """Do the rest; returns when the memory holds all of it."""
        if self.is_done:
            return
        try:
            if self._transfer is not None:
                self._transfer.issue()
            self._copy_beside(self._later)
            self._end()
        except BaseException as error:
            self.abandon(error)
            raise

    def abandon(self, error: BaseException | None = None) -> None:
        """End the wait for copies that will not come; what is done stays done."""
        if not self._copied.done():
            self._copied.set_exception(error or CancelledError())

    def _copy_beside(self, local: Sequence[Copy]) -> None:
        """Copy within the host while the devices copy."""
        try:
            self._copier.copy(local)
        except BaseException:
            if self._transfer is not None:
                self._transfer.wait()  # the memory is the next save's only when nothing is on its way there
            raise

    def _end(self) -> None:
        if self._mode != "overlap" and self._transfer is not None:
            self._transfer.wait()
        # What is in the host's memory may change from here on; what is on a device, once it is fenced.
        self._copied.set_result(None)
        if self._mode == "overlap" and self._transfer is not None:
            self._transfer.wait()
        self._copies.clear()
        self._later = []

    def fence(self) -> None:
        """Return when the tensors may be changed by what the caller's streams get from here on; never raises."""
        if self._mode == "device" and self._transfer is not None:
            return  # the clone is in the caller's stream
        if self._copied.exception() is None and self._transfer is not None and self._mode == "overlap":
            self._transfer.fence()


def _divided(copies: Sequence[Copy], names: Collection[str]) -> tuple[list[Copy], list[Copy]]:
    """Those of ``copies`` that have one of ``names``, and the others."""
    return [copy for copy in copies if copy.name in names], [copy for copy in copies if copy.name not in names]


def is_named(key: str, names: Sequence[str]) -> bool:
    """Whether ``key``, or the start of it up to a dot, is one of ``names``."""
    return f"{key}.".startswith(tuple(f"{name}." for name in names))


class HostCopier:
    """Copies from host memory into ``region`` with the threads that torch may use; the rest is as in ``Staging``.

    A block whose digest is wanted is hashed right after it was copied, while the processor's cache has it.
    """

    def __init__(self, region: Region, progress: Progress, digests: dict[int, int] | None) -> None:
        self._region = region
        self._view = region.view
        self._progress = progress
        self._digests = digests

    def copy(self, copies: Sequence[Copy]) -> None:
        threads = min(_MOST_THREADS, torch.get_num_threads())
        jobs = list(self._jobs(copies))
        if threads == 1 or len(jobs) == 1:
            for job in jobs:
                job()
        elif jobs:
            # This thread takes its share as soon as all are handed out.
            run_bounded(jobs, workers=threads - 1, ahead=len(jobs))

    def _jobs(self, copies: Sequence[Copy]) -> Iterator[Callable[[], None]]:
        """Pieces of large copies, and small ones together."""
        pieces: list[tuple[Copy, int, int]] = []
        nbytes = 0
        for copy in copies:
            for start in range(0, copy.source.nbytes, _JOB_BYTES):
                stop = min(start + _JOB_BYTES, copy.source.nbytes)
                pieces.append((copy, start, stop))
                nbytes += stop - start
                if nbytes >= _JOB_BYTES:
                    yield partial(self._copy_pieces, pieces, nbytes)
                    pieces, nbytes = [], 0
        if pieces:
            yield partial(self._copy_pieces, pieces, nbytes)

    def _copy_pieces(self, pieces: Sequence[tuple[Copy, int, int]], nbytes: int) -> None:
        for copy, start, stop in pieces:
            self._copy_blocks(copy, start, stop)
        self._progress.moved(nbytes)

    def _copy_blocks(self, copy: Copy, start: int, stop: int) -> None:
        if self._digests is None:
            copy.source.copy_out(start, stop, self._region, copy.at + start)
            return
        for begin in range(start, stop, BLOCK_BYTES):
            end = min(begin + BLOCK_BYTES, stop)
            at = copy.at + begin
            copy.source.copy_out(begin, end, self._region, at)
            self._digests[at] = digest(self._view[at : at + end - begin])


_PIECE_BYTES = 8 << 20
_STEP = 0x9E3779B97F4A7C15
_SHOWN = 3


class Fingerprints:
    """The numbers of all ``copies`` as they are when this is made, taken on the current streams of their devices."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._places: dict[torch.device, list[tuple[str, int, int]]] = {}
        numbers: dict[torch.device, list[torch.Tensor]] = {}
        for copy in copies:
            number = _number(copy.source)
            self._places.setdefault(number.device, []).append((copy.name, copy.at, copy.source.nbytes))
            numbers.setdefault(number.device, []).append(number)
        self.numbers = {device: torch.stack(each) for device, each in numbers.items()}
        self._taken = [torch.cuda.current_stream(each).record_event() for each in numbers if each.type == "cuda"]

    def compare(self, region: Region) -> None:
        """InvalidStateError, naming the tensors, unless ``region`` holds what there was at the call."""
        for event in self._taken:
            event.synchronize()
        wrong = [
            name
            for device, places in self._places.items()
            for (name, at, nbytes), number in zip(places, self.numbers[device].tolist(), strict=True)
            if int(_number(MemorySource(region, region.address + at, nbytes))) != number
        ]
        _check_none(wrong)


def _check_none(wrong: Sequence[str]) -> None:
    """InvalidStateError if there is one whose tensor was changed too early."""
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise InvalidStateError(
            f"{', '.join(map(repr, wrong[:_SHOWN]))}{more} changed between the call of async_save and the copy; "
            "wait for the handle's wait_staged(), guard the optimizer, or name them in copy_now",
            key=wrong[0],
        )


_HELD_BYTES = 64 << 10


class Live:
    """Chunks of which the tensors, all in host memory, are written from where they are, while training goes on.

    What is not sure to stay as it is until the optimizer's step is copied when this is made: chunks for which
    ``is_held``, and small ones. With ``proves``, each block is hashed, for ``check`` to compare with what was written.
    """

    def __init__(self, chunks: list[Chunk], is_held: Sequence[bool], *, proves: bool, progress: Progress) -> None:
        for number, (chunk, is_named) in enumerate(zip(chunks, is_held, strict=True)):
            if is_named or chunk.source.nbytes < _HELD_BYTES or not isinstance(chunk.source, MemorySource):
                chunks[number] = chunk._replace(source=_copied(chunk.source))
        self._names = [chunk.name for chunk in chunks]
        self._bounds = [0, *accumulate(-(-chunk.source.nbytes // BLOCK_BYTES) for chunk in chunks)]
        self._digests, self._progress = [0] * self._bounds[-1] if proves else [], progress
        if proves:
            sources = [chunk.source for chunk in chunks]
            jobs = [partial(self._hash, *each) for each in zip(self._bounds, sources, strict=False)]
            run_bounded(jobs, workers=min(_MOST_THREADS, torch.get_num_threads()), ahead=0)

    def _hash(self, first: int, source: Source) -> None:
        assert isinstance(source, MemorySource), "all else was copied"
        for number, piece in enumerate(source.pieces(BLOCK_BYTES), first):
            self._digests[number] = digest(piece.numpy().data)
        self._progress.moved(source.nbytes)

    def check(self, written: Sequence[int]) -> None:
        """InvalidStateError, naming the tensors, unless the blocks that were ``written`` are those of the call."""
        if self._digests and self._digests != written:
            spans = zip(self._names, self._bounds, self._bounds[1:], strict=False)
            _check_none([name for name, begin, end in spans if self._digests[begin:end] != written[begin:end]])


def _copied(source: Source) -> MemorySource:
    memory = torch.empty(source.nbytes, dtype=torch.uint8, device="cpu")
    source.copy_out(0, source.nbytes, Slab(memory.numpy().data, memory), 0)
    return MemorySource(memory, memory.data_ptr(), source.nbytes)


def _number(source: Source) -> torch.Tensor:
    """One number as a tensor without dimensions, on the device of the bytes."""
    assert isinstance(source, (MemorySource, ScatteredSource)), "only what is in memory is staged"
    total: torch.Tensor | None = None
    for piece in source.pieces(_PIECE_BYTES):
        rest = piece.numel() % 8
        if rest:
            piece = torch.nn.functional.pad(piece, (0, 8 - rest))
        elif piece.data_ptr() % 8:
            piece = piece.clone()
        words = piece.view(torch.int64)
        part = (words * _weights(piece.device)[: len(words)]).sum()
        total = part if total is None else total * _weights(piece.device)[0] + part
    return torch.zeros((), dtype=torch.int64, device="cpu") if total is None else total


@lru_cache(maxsize=16)
def _weights(device: torch.device) -> torch.Tensor:
    """Odd numbers, so that no change of one word is lost."""
    places = np.arange(1, _PIECE_BYTES // 8 + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = places * np.uint64(_STEP)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9) | np.uint64(1)
    return torch.from_numpy(mixed.view(np.int64)).to(device)


class Changes:
    """What this rank wrote of each tensor at the save before, as one digest of all its bytes here."""

    def __init__(self) -> None:
        self.forget_parent()
        forget_in_child(self)

    def forget_parent(self) -> None:
        self._before: dict[str, int] = {}

    def unchanged(self, report: WriteReport, chosen: Collection[str]) -> tuple[str, ...]:
        """The keys of ``chosen`` that were written just as the time before; ``report`` is for the next comparison."""
        before, self._before = self._before, _digests(report)
        return tuple(key for key in chosen if key in self._before and before.get(key) == self._before[key])


def _digests(report: WriteReport) -> dict[str, int]:
    boxes, keys = report.boxes, report.columns.keys
    bounds = boxes.first_block()
    parts: dict[str, list[np.ndarray]] = {}
    for row, key in enumerate(boxes.key.tolist()):
        box = np.concatenate([boxes.lo[row], boxes.length[row]]).astype(np.uint64)
        parts.setdefault(keys[key], []).append(np.concatenate([box, report.digests[bounds[row] : bounds[row + 1]]]))
    return {key: combine(np.concatenate(each)) for key, each in parts.items()}


def trained_keys(leaves: Mapping[str, object], optimizers: Iterable[torch.optim.Optimizer]) -> list[str]:
    """The keys of the tensors for which an optimizer has state, known by their memory or by the names in its state."""
    addresses = {
        _address(parameter)
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        if state and isinstance(parameter, torch.Tensor)
    } - {0}
    names = {
        name.rpartition(".")[0] for key in leaves for _, mark, name in [f".{key}".partition(".state.")] if mark
    } - {""}
    return [
        key
        for key, leaf in leaves.items()
        if isinstance(leaf, torch.Tensor) and (_address(leaf) in addresses or _ends_with_one(key, names))
    ]


def _ends_with_one(key: str, names: Collection[str]) -> bool:
    """Whether ``key``, from one of its dots on, is one of ``names``; numbers name no tensor."""
    elements = key.split(".")
    tails = (".".join(elements[start:]) for start in range(len(elements)))
    return any(tail in names and not tail.isdigit() for tail in tails)


def _address(tensor: torch.Tensor) -> int:
    """Where the first part of the tensor that this rank has is; 0 for one without memory of its own."""
    try:
        return next((piece.tensor.data_ptr() for piece in pieces_of("", tensor).pieces if piece.tensor.numel()), 0)
    except InvalidStateError:
        return 0  # an optimizer may have tensors that could not be saved, and nobody does


class CopiedPlanner(DefaultSavePlanner):
    """Gives a storage, as copied to ``region``, what the planner of the save gave: ``data``, each with its place there.

    Bytes are copied now.
    """

    def __init__(self, plan: SavePlan, data: Iterable[tuple[torch.Tensor | io.BytesIO, int]], region: Region) -> None:
        super().__init__()
        columns = write_columns(plan.items)
        self._data = {columns.item(row).index: _kept(*each, region) for row, each in enumerate(data)}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data = self._data[write_item.index]
        if isinstance(data, io.BytesIO):
            data.seek(0)
        return data


def _kept(data: torch.Tensor | io.BytesIO, at: int, region: Region) -> torch.Tensor | io.BytesIO:
    """What the storage gets: a tensor in ``region``, or the bytes as they are now."""
    if not isinstance(data, torch.Tensor):
        return io.BytesIO(data.getvalue())
    return data.detach().cpu().clone() if data.is_quantized else region.tensor_at(at, data.dtype, data.shape)
