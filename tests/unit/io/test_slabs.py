"""Slabs: page-aligned memory, used again, and given back."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from output_files import new_output

from holdfast._io import posix
from holdfast._io import slabs as buffers
from holdfast._io.direct import ALIGNMENT, InputFile
from holdfast._io.pipeline import run_bounded
from holdfast._io.slabs import SLAB_BYTES, Slab, SlabRing, pinned
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


# --- shared memory made known to a GPU; the runtime is a stand-in, tests/gpu has the real one -------------------------


def stand_in(monkeypatch: pytest.MonkeyPatch, *, code: int) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []

    def noting(name: str, result: int) -> Callable[..., int]:
        return lambda *arguments: calls.append((name, *arguments)) or result

    runtime = SimpleNamespace(cudaHostRegister=noting("pin", code), cudaHostUnregister=noting("unpin", 0))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)

    def next_operation(*arguments: Any, **options: Any) -> None:
        calls.append(("operation",))
        raise RuntimeError("CUDA error: invalid argument")

    monkeypatch.setattr(torch, "zeros", next_operation)
    return calls


def test_memory_is_pinned_for_the_length_of_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    slab = SlabRing(1).acquire()
    calls = stand_in(monkeypatch, code=0)
    with pinned(slab):
        assert calls == [("pin", slab.address, slab.tensor.numel(), 1)]
    assert calls[1:] == [("unpin", slab.address)]


def test_a_refusal_costs_nothing_but_the_operation_that_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    slab = SlabRing(1).acquire()
    calls = stand_in(monkeypatch, code=1)
    with pinned(slab):
        pass
    assert [call[0] for call in calls] == ["pin", "operation"]


# --- through files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hide_direct", [False, True])
def test_slabs_written_by_threads_are_read_back_both_ways(
    directory: Path, monkeypatch: pytest.MonkeyPatch, hide_direct: bool
) -> None:
    """Four threads, three slabs, an odd tail: what comes back is what went in, whichever way it is read."""
    if hide_direct:
        monkeypatch.setattr("holdfast._io.direct._O_DIRECT", 0)
    pieces = [os.urandom(64) * (SLAB_BYTES // 64) for _ in range(2)]
    tail = os.urandom(1000)
    contents = [pieces[0], pieces[1], pieces[0][::-1], tail]
    size = 3 * SLAB_BYTES + len(tail)
    path = directory / "file"
    ring = SlabRing(3)
    output = new_output(path, expected_bytes=size)

    def write_job(number: int) -> Callable[[], None]:
        slab = ring.acquire()
        slab.view[: len(contents[number])] = contents[number]

        def run() -> None:
            try:
                output.write(slab.view[: -(-len(contents[number]) // ALIGNMENT) * ALIGNMENT], number * SLAB_BYTES)
            finally:
                ring.release(slab)

        return run

    run_bounded((write_job(number) for number in range(4)), workers=4)
    output.finish(size)
    output.close()
    posix.sync_directory(directory)
    assert ring.allocated <= 3

    def read_job(number: int, file: InputFile, past_cache: bool) -> Callable[[], None]:
        def run() -> None:
            expected = contents[number]
            with ring.lend() as slab:
                if past_cache:
                    file.read_direct_into(slab.view, number * SLAB_BYTES)
                else:
                    file.read_into(slab.view[: len(expected)], number * SLAB_BYTES)
                assert slab.view[: len(expected)] == expected

        return run

    with InputFile.open(path) as file:
        jobs = [read_job(number, file, past_cache) for past_cache in (True, False) for number in range(4)]
        run_bounded(jobs, workers=4)
        assert file.size == size
        assert file.bytes_read == 2 * size
    ring.close()
