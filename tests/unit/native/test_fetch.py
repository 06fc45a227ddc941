"""Wanted boxes of stored tensors: read once, verified block by block, into every kind of target."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast import _engine
from holdfast._io.direct import ALIGNMENT, InputFile
from holdfast._io.slabs import Slab, SlabRing
from holdfast._native import fetch
from holdfast._native.catalog import Catalog, read_catalog
from holdfast._native.fetch import Fetch, Wanted
from holdfast._state.tensor_bytes import Target
from holdfast._values.box import Box
from holdfast._values.deadline import Progress
from holdfast._values.digest import BLOCK_BYTES, digest

ROWS, COLUMNS = 1500, 1000  # of float32: 6 MB, 5.7 blocks


@pytest.fixture(scope="module")
def whole() -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, whole: torch.Tensor) -> Path:
    path = tmp_path_factory.mktemp("fetch") / "checkpoint"
    holdfast.save({"whole": whole, "empty": torch.empty(0, 4), "scalar": torch.tensor(3.5)}, path)
    return path


@pytest.fixture(params=["cached", "cold", "cold, many cores"])
def is_cached(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether files count as being in the page cache; cold ones are read past it."""
    cached: bool = request.param == "cached"
    if "many" in request.param:
        have_cores(16, monkeypatch)
    monkeypatch.setattr(InputFile, "is_cached", lambda self: cached)
    return cached


def have_cores(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have so many cores, and reads of two blocks, so that there are several."""
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    monkeypatch.setattr(_engine, "HOT_BYTES", 2 * BLOCK_BYTES)


class Reading:
    """Boxes of one key, fetched into new tensors or given ones."""

    def __init__(
        self,
        path: Path,
        boxes: list[tuple[str, Box]],
        *,
        verify: bool = True,
        targets: list[torch.Tensor] | None = None,
        in_memory: tuple[int, ...] = (),
    ) -> None:
        self.catalog: Catalog = read_catalog(path)
        self.files = self.catalog.data_files()
        self.opened: list[int] = []
        self.closed: list[int] = []
        self._boxes = boxes
        self._verify = verify
        self._in_memory = in_memory
        self._targets = targets or [torch.empty(box.lengths) for _, box in boxes]

    def run(self) -> list[torch.Tensor]:
        width = self.catalog.index.lo.shape[1]
        rows = [self.catalog.rows_of(key).start for key, _ in self._boxes]
        lo, length = np.zeros((len(rows), width), np.int64), np.ones((len(rows), width), np.int64)
        for number, (_, box) in enumerate(self._boxes):
            lo[number, : len(box.offsets)], length[number, : len(box.lengths)] = box.offsets, box.lengths
        address = np.zeros(len(rows), np.int64)
        for number in self._in_memory:
            address[number] = self._targets[number].data_ptr()
        wanted = Wanted(row=np.array(rows, dtype=np.int64), lo=lo, length=length, address=address)
        try:
            Fetch(
                self.catalog,
                self.files,
                wanted,
                open_targets=lambda numbers: [self._open(number) for number in numbers],
                close_target=self._close,
                verify=self._verify,
                progress=Progress(),
            ).run()
        finally:
            self.bytes_read = self.files.bytes_read
            self.files.close()
        return self._targets

    def _open(self, number: int) -> Target:
        self.opened.append(number)
        key, box = self._boxes[number]
        entry = self.catalog.entry(key)
        assert entry is not None
        return Target(self._targets[number], dtype=torch.float32, shape=tuple(entry.shape), wanted=box)

    def _close(self, number: int, target: Target) -> None:
        assert target.tensor is self._targets[number]
        assert number in self.opened
        self.closed.append(number)


def box(*ranges: tuple[int, int]) -> Box:
    return Box(tuple(low for low, _ in ranges), tuple(high - low for low, high in ranges))


EVERYTHING = box((0, ROWS), (0, COLUMNS))


@pytest.mark.parametrize("verify", [True, False])
def test_a_whole_tensor(path: Path, whole: torch.Tensor, is_cached: bool, verify: bool) -> None:
    reading = Reading(path, [("whole", EVERYTHING)], verify=verify)
    assert torch.equal(reading.run()[0], whole)
    assert (reading.opened, reading.closed) == ([0], [0])
    # A cold file is read in whole pages, once.
    assert whole.nbytes <= reading.bytes_read <= whole.nbytes + (0 if is_cached else ALIGNMENT)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    "part",
    [
        box((0, 1), (0, COLUMNS)),
        box((200, 700), (0, COLUMNS)),
        box((0, ROWS), (10, 20)),
        box((13, 1400), (990, 1000)),
        box((1499, 1500), (999, 1000)),
        box((262, 263), (0, COLUMNS)),
    ],
    ids=str,
)
def test_a_part(path: Path, whole: torch.Tensor, is_cached: bool, verify: bool, part: Box) -> None:
    reading = Reading(path, [("whole", part)], verify=verify)
    assert torch.equal(reading.run()[0], whole[part.slices()])


def test_a_part_reads_only_the_blocks_it_touches(path: Path, whole: torch.Tensor, is_cached: bool) -> None:
    reading = Reading(path, [("whole", box((270, 280), (0, COLUMNS)))])
    reading.run()
    assert reading.bytes_read == BLOCK_BYTES, "rows 270 to 280 lie within the second block"
    reading = Reading(path, [("whole", box((262, 263), (0, COLUMNS)))])
    reading.run()
    assert reading.bytes_read == 2 * BLOCK_BYTES, "row 262 lies on the border of two"


@pytest.mark.usefixtures("is_cached")
def test_without_verification_no_more_than_the_wanted_bytes_are_read(path: Path) -> None:
    reading = Reading(path, [("whole", box((270, 271), (0, 900)))], verify=False)
    reading.run()
    assert reading.bytes_read == 3600


def test_without_verification_a_cold_file_costs_at_most_the_pages_around(path: Path, is_cached: bool) -> None:
    reading = Reading(path, [("whole", box((270, 300), (0, COLUMNS)))], verify=False)
    reading.run()
    assert 120_000 <= reading.bytes_read <= 120_000 + (0 if is_cached else 2 * ALIGNMENT)


def test_boxes_that_share_blocks_read_them_once(path: Path, whole: torch.Tensor, is_cached: bool) -> None:
    parts = [("whole", box((270, 280), (low, low + 100))) for low in range(0, COLUMNS, 100)]
    reading = Reading(path, parts)
    for number, tensor in enumerate(reading.run()):
        assert torch.equal(tensor, whole[270:280, 100 * number : 100 * number + 100])
    assert sorted(reading.closed) == list(range(10))
    assert reading.bytes_read == BLOCK_BYTES


@pytest.mark.usefixtures("is_cached")
def test_many_boxes_of_many_sizes(path: Path, whole: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(2)
    parts = []
    for _ in range(60):
        low = torch.randint(0, 700, (2,), generator=generator).tolist()
        high = (torch.tensor(low) + torch.randint(1, 300, (2,), generator=generator)).tolist()
        parts.append(("whole", box((low[0], high[0]), (low[1], high[1]))))
    reading = Reading(path, parts)
    for (_, part), tensor in zip(parts, reading.run(), strict=True):
        assert torch.equal(tensor, whole[part.slices()])
    assert sorted(reading.closed) == list(range(60))


@pytest.mark.usefixtures("is_cached")
def test_targets_of_other_strides_and_dtypes(path: Path, whole: torch.Tensor) -> None:
    targets = [
        torch.empty(COLUMNS, ROWS).T,
        torch.empty(ROWS, 2 * COLUMNS)[:, ::2],
        torch.empty(ROWS, COLUMNS, dtype=torch.float64),
        torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16),
    ]
    reading = Reading(path, [("whole", EVERYTHING)] * 4, targets=targets)
    reading.run()
    for target in targets:
        assert torch.equal(target, whole.to(target.dtype))


SEVERAL = [("whole", EVERYTHING), ("scalar", box())]


@pytest.mark.parametrize("verify", [True, False])
def test_memory_is_filled_without_targets(
    path: Path, whole: torch.Tensor, verify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InputFile, "is_cached", lambda self: False)
    reading = Reading(path, SEVERAL, verify=verify, in_memory=(0, 1))
    found, scalar = reading.run()
    assert torch.equal(found, whole)
    assert scalar.item() == 3.5
    assert (reading.opened, reading.closed) == ([], [])


@pytest.mark.usefixtures("is_cached")
@pytest.mark.parametrize("in_memory", [0, 1])
def test_memory_beside_what_needs_a_target(path: Path, whole: torch.Tensor, in_memory: int) -> None:
    reading = Reading(path, SEVERAL, in_memory=(in_memory,))
    found, scalar = reading.run()
    assert torch.equal(found, whole)
    assert scalar.item() == 3.5
    assert 1 - in_memory in reading.closed


@pytest.mark.usefixtures("is_cached")
def test_tensors_of_no_bytes_and_no_dimensions(path: Path) -> None:
    reading = Reading(path, [("empty", box((0, 0), (0, 4))), ("scalar", box())])
    empty, scalar = reading.run()
    assert empty.shape == (0, 4)
    assert scalar.item() == 3.5
    assert sorted(reading.closed) == [0, 1]


def test_nothing_wanted_reads_nothing(path: Path) -> None:
    reading = Reading(path, [])
    assert reading.run() == []
    assert reading.bytes_read == 0


@pytest.fixture
def damaged(path: Path) -> Iterator[int]:
    """The offset of a byte in the third block, which is flipped during the test."""
    (file,) = path.glob("data-*")
    catalog = read_catalog(path)
    row = catalog.rows_of("whole").start
    position = int(catalog.index.offset[row]) + 2 * BLOCK_BYTES + 77
    flip(file, position)
    yield position
    flip(file, position)


def flip(file: Path, position: int) -> None:
    with open(file, "r+b") as opened:
        opened.seek(position)
        (byte,) = opened.read(1)
        opened.seek(position)
        opened.write(bytes([byte ^ 1]))
        opened.flush()
        os.fsync(opened.fileno())


@pytest.mark.usefixtures("is_cached")
@pytest.mark.parametrize("in_memory", [(), (0,)])
def test_damage_is_found_in_the_block_where_it_is(
    path: Path, whole: torch.Tensor, damaged: int, in_memory: tuple[int, ...]
) -> None:
    threads = threading.active_count()
    with pytest.raises(holdfast.CorruptError) as caught:
        Reading(path, [("whole", EVERYTHING)], in_memory=in_memory).run()
    assert caught.value.key == "whole"
    assert caught.value.span is not None
    assert caught.value.span[1] - caught.value.span[0] == BLOCK_BYTES
    assert caught.value.span[0] + 77 == damaged
    assert threading.active_count() == threads
    good = box((0, 500), (0, COLUMNS))
    assert torch.equal(Reading(path, [("whole", good)]).run()[0], whole[:500])
    Reading(path, [("whole", EVERYTHING)], verify=False).run()


@pytest.mark.usefixtures("is_cached", "damaged")
def test_damage_is_found_through_every_kind_of_target(path: Path) -> None:
    part = box((520, 540), (5, 995))
    for target in (torch.empty(20, 990), torch.empty(990, 20).T, torch.empty(20, 990, dtype=torch.float64)):
        with pytest.raises(holdfast.CorruptError):
            Reading(path, [("whole", part)], targets=[target]).run()


class Digests:
    """Who computes digests: ``threads`` has the threads; each waits for ``gate``, if there is one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: set[int] = set()
        self.gate: threading.Barrier | None = None
        monkeypatch.setattr(fetch, "digest", self)

    def __call__(self, view: memoryview) -> int:
        me = threading.get_ident()
        if me not in self.threads and self.gate is not None:
            self.gate.wait(60)
        self.threads.add(me)
        return digest(view)


@pytest.mark.parametrize("in_memory", [(), (0,)])
def test_others_deliver_too_while_full_slabs_wait(
    path: Path, whole: torch.Tensor, monkeypatch: pytest.MonkeyPatch, in_memory: tuple[int, ...]
) -> None:
    monkeypatch.setattr(InputFile, "is_cached", lambda self: False)
    have_cores(16, monkeypatch)
    digests = Digests(monkeypatch)
    digests.gate = threading.Barrier(3)  # 3 reads of 2 blocks: nobody goes on before all three have begun
    threads = threading.active_count()
    assert torch.equal(Reading(path, [("whole", EVERYTHING)], in_memory=in_memory).run()[0], whole)
    assert len(digests.threads) == 3
    assert threading.get_ident() not in digests.threads
    assert threading.active_count() == threads


def test_a_disk_that_is_slower_than_one_keeps_one_busy(
    path: Path, whole: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InputFile, "is_cached", lambda self: False)
    have_cores(16, monkeypatch)
    digests = Digests(monkeypatch)
    delivered = [threading.Event() for _ in range(4)]
    delivered[0].set()
    read, deliver, numbers = _engine.SegmentJob.read, _engine.SegmentJob.deliver_from, iter(range(1, 4))

    def slow_read(job: _engine.SegmentJob[Target], ring: SlabRing) -> tuple[Slab, int]:
        assert delivered[job._span.start // 2].wait(60)
        return read(job, ring)

    def noted(job: _engine.SegmentJob[Target], *where: Any) -> None:
        deliver(job, *where)
        delivered[next(numbers)].set()

    monkeypatch.setattr(_engine.SegmentJob, "read", slow_read)
    monkeypatch.setattr(_engine.SegmentJob, "deliver_from", noted)
    assert torch.equal(Reading(path, [("whole", EVERYTHING)]).run()[0], whole)
    assert all(each.is_set() for each in delivered)
    assert len(digests.threads) <= 2  # a thread may be told of the next read before it has said that it is done


@pytest.mark.parametrize("cores", [1, 2, 3])
def test_on_few_cores_the_calling_thread_delivers(
    path: Path, whole: torch.Tensor, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    monkeypatch.setattr(InputFile, "is_cached", lambda self: False)
    have_cores(cores, monkeypatch)
    digests = Digests(monkeypatch)
    assert torch.equal(Reading(path, [("whole", EVERYTHING)]).run()[0], whole)
    assert digests.threads == {threading.get_ident()}


@pytest.mark.parametrize("verify", [True, False])
def test_on_the_way_to_a_device_each_block_is_verified_when_it_is_read(
    path: Path, whole: torch.Tensor, damaged: int, monkeypatch: pytest.MonkeyPatch, verify: bool
) -> None:
    """With slabs that are not pinned, because there may be no device here."""
    monkeypatch.setattr(InputFile, "is_cached", lambda self: True)
    monkeypatch.setattr(_engine, "uses_cuda", lambda: True)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    made: list[int] = []

    def slab(nbytes: int) -> Slab:
        made.append(nbytes)
        tensor = torch.empty(nbytes, dtype=torch.uint8)
        return Slab(tensor.numpy().data, tensor)

    monkeypatch.setattr("holdfast._io.slabs._pinned_slab", slab)
    target = torch.empty(COLUMNS, ROWS).T  # which takes its bytes from a slab
    reading = Reading(path, [("whole", EVERYTHING)], targets=[target], verify=verify)
    if verify:
        with pytest.raises(holdfast.CorruptError) as caught:
            reading.run()
        assert caught.value.span is not None
        assert caught.value.span[0] + 77 == damaged
    else:
        reading.run()
        assert (target != whole).sum() == 1
    assert made
    assert sum(made) <= 128 * 1024 * 1024
    assert {nbytes % ALIGNMENT for nbytes in made} == {0}
    good = box((0, 500), (0, COLUMNS))
    assert torch.equal(Reading(path, [("whole", good)], targets=[torch.empty(COLUMNS, 500).T]).run()[0], whole[:500])
