from __future__ import annotations

import errno
import mmap
import threading
from pathlib import Path

import pytest
import torch

from holdfast._io import slabs as buffers
from holdfast._io.slabs import SLAB_BYTES, Slab, SlabRing
from holdfast.errors import InternalError, StorageError


def check_slab(slab: Slab) -> None:
    assert slab.view.nbytes == SLAB_BYTES
    assert not slab.view.readonly
    assert slab.address % mmap.PAGESIZE == 0
    assert slab.address == slab.tensor.data_ptr()
    assert slab.tensor.dtype == torch.uint8
    assert slab.tensor.shape == (SLAB_BYTES,)
    slab.view[:3] = b"abc"
    slab.view[-1:] = b"z"
    assert bytes(slab.tensor[:3].tolist()) == b"abc"
    slab.tensor[5] = 7
    assert slab.view[5] == 7
    assert slab.view[SLAB_BYTES - 1] == slab.tensor[-1] == ord("z")


def test_view_and_tensor_are_the_same_aligned_memory() -> None:
    with SlabRing(1).lend() as slab:
        check_slab(slab)
        assert slab.view.format == "B"


def test_slabs_are_private_memory_not_a_file_in_shared_memory() -> None:
    try:
        mappings = Path("/proc/self/maps")
        with SlabRing(1).lend() as slab:
            lines = [line.split() for line in mappings.read_text().splitlines()]
    except FileNotFoundError:
        pytest.skip("this system does not list its mappings")
    for line in lines:
        begin, end = (int(bound, 16) for bound in line[0].split("-"))
        if begin <= slab.address < end:
            assert line[1] == "rw-p"
            return
    pytest.fail("the slab is in no mapping")


@pytest.mark.gpu
def test_pinned_slabs_are_aligned_and_pinned() -> None:
    with SlabRing(1, pinned=True).lend() as slab:
        check_slab(slab)
        assert slab.tensor.is_pinned()


@pytest.mark.parametrize("misalignment", [0, 64])
def test_pinned_memory_that_is_not_aligned_is_made_so(monkeypatch: pytest.MonkeyPatch, misalignment: int) -> None:
    kept = mmap.mmap(-1, SLAB_BYTES + 2 * mmap.PAGESIZE)
    sizes = []

    def pinned_empty(size: int, *, dtype: torch.dtype, device: str, pin_memory: bool) -> torch.Tensor:
        assert (device, pin_memory) == ("cpu", True)
        sizes.append(size)
        return torch.frombuffer(kept, dtype=dtype)[misalignment : misalignment + size]

    monkeypatch.setattr(torch, "empty", pinned_empty)
    ring = SlabRing(1, pinned=True)
    slab = ring.acquire()
    monkeypatch.undo()
    check_slab(slab)
    assert sizes == ([SLAB_BYTES, SLAB_BYTES + mmap.PAGESIZE] if misalignment else [SLAB_BYTES])


def test_slabs_are_made_when_asked_for_and_then_used_in_turn() -> None:
    ring = SlabRing(3)
    assert ring.allocated == 0
    addresses = []
    for made in (1, 2, 3, 3, 3):
        with ring.lend() as slab:
            assert ring.allocated == made
            addresses.append(slab.address)
    assert len(set(addresses)) == 3
    assert addresses[3:] == addresses[:2]


def test_a_borrower_waits_for_the_last_slab() -> None:
    ring = SlabRing(1)
    slab = ring.acquire()
    got: list[Slab] = []
    started = threading.Event()

    def borrow() -> None:
        started.set()
        got.append(ring.acquire())

    thread = threading.Thread(target=borrow)
    thread.start()
    assert started.wait(300)
    assert got == []
    ring.release(slab)
    thread.join(300)
    assert got == [slab]
    assert ring.allocated == 1


def test_a_slab_comes_back_after_an_error() -> None:
    ring = SlabRing(1)
    with pytest.raises(ZeroDivisionError), ring.lend():
        raise ZeroDivisionError
    with ring.lend():
        assert ring.allocated == 1


def test_many_borrowers_never_share_a_slab() -> None:
    ring = SlabRing(2)
    conflicts = []

    def borrow(mark: int) -> None:
        for _ in range(200):
            with ring.lend() as slab:
                slab.view[0] = mark
                if slab.view[0] != mark:
                    conflicts.append(mark)

    threads = [threading.Thread(target=borrow, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert conflicts == []
    assert ring.allocated <= 2


def test_a_slab_given_back_twice_is_noticed() -> None:
    ring = SlabRing(2)
    slab = ring.acquire()
    ring.release(slab)
    with pytest.raises(InternalError, match="given back twice"):
        ring.release(slab)


def test_no_memory_is_a_storage_error_and_the_ring_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []

    def refusing(*arguments: int, **options: int) -> mmap.mmap:
        refused.append(arguments)
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    ring = SlabRing(1)
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", refusing)
        with pytest.raises(StorageError, match="cannot allocate buffers") as caught:
            ring.acquire()
    assert caught.value.errno == errno.ENOMEM
    assert len(refused) == 1
    assert ring.allocated == 0
    with ring.lend() as slab:
        check_slab(slab)


def test_no_pinned_memory_is_a_storage_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*arguments: object, **options: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory\nmore lines\nof advice")

    monkeypatch.setattr(torch, "empty", refusing)
    with pytest.raises(StorageError, match="CUDA error: out of memory; free") as caught:
        SlabRing(1, pinned=True).acquire()
    assert caught.value.errno == errno.ENOMEM
    assert "\n" not in str(caught.value)


def test_a_system_without_huge_pages_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    with SlabRing(1).lend() as slab:
        check_slab(slab)


def test_a_kernel_that_refuses_huge_pages_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999, raising=False)
    with SlabRing(1).lend() as slab:
        check_slab(slab)


def test_closing_wakes_and_refuses_borrowers() -> None:
    ring = SlabRing(1)
    slab = ring.acquire()
    errors: list[BaseException] = []
    started = threading.Event()

    def borrow() -> None:
        started.set()
        try:
            ring.acquire()
        except InternalError as error:
            errors.append(error)

    thread = threading.Thread(target=borrow)
    thread.start()
    assert started.wait(300)
    ring.close()
    thread.join(300)
    assert len(errors) == 1
    assert ring.allocated == 1
    check_slab(slab)
    ring.release(slab)
    assert ring.allocated == 0
    with pytest.raises(InternalError, match="closed ring"):
        ring.acquire()


def test_closing_lets_go_of_the_free_slabs() -> None:
    ring = SlabRing(2)
    with ring.lend(), ring.lend():
        pass
    assert ring.allocated == 2
    ring.close()
    assert ring.allocated == 0


def test_the_memory_of_a_ring_is_kept_for_the_next_one_until_it_is_released() -> None:
    buffers.release()
    first = SlabRing(3)
    with first.lend() as slab:
        address = slab.address
    first.close()
    smaller = SlabRing(5, nbytes=4096)
    with smaller.lend() as slab, smaller.lend() as second:
        assert slab.address == address
        assert second.address == address + 4096
        assert slab.view.nbytes == 4096
    smaller.close()
    assert len(buffers._kept) == 1
    larger = SlabRing(4)
    with larger.lend() as slab:
        check_slab(slab)
        assert len(buffers._kept) == 0  # too small for it, and so gone
    larger.close()
    larger.close()
    assert len(buffers._kept) == 1
    buffers.release()
    assert len(buffers._kept) == 0


def test_memory_that_is_still_lent_is_not_given_to_another_ring() -> None:
    buffers.release()
    ring = SlabRing(2)
    with ring.lend() as slab:
        ring.close()
        assert len(buffers._kept) == 0
        check_slab(slab)
    assert len(buffers._kept) == 0


def test_more_memory_than_usual_is_not_kept() -> None:
    buffers.release()
    ring = SlabRing(13)
    with ring.lend() as slab:
        check_slab(slab)
    ring.close()
    assert len(buffers._kept) == 0


def test_two_rings_at_once_have_memory_of_their_own() -> None:
    buffers.release()
    one, other = SlabRing(1), SlabRing(1)
    with one.lend() as slab, other.lend() as another:
        assert slab.address != another.address
    one.close()
    other.close()
    assert len(buffers._kept) == 1


def test_a_ring_of_nothing_is_refused() -> None:
    with pytest.raises(InternalError, match="at least one slab"):
        SlabRing(0)


def test_slabs_are_multiples_of_any_page() -> None:
    assert buffers.SLAB_BYTES == 16 << 20
    assert SLAB_BYTES % (64 << 10) == 0
