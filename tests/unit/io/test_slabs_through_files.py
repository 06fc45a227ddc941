from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from output_files import new_output

from holdfast._io import posix
from holdfast._io.direct import ALIGNMENT, InputFile
from holdfast._io.pipeline import run_bounded
from holdfast._io.slabs import SLAB_BYTES, SlabRing


@pytest.mark.parametrize("hide_direct", [False, True])
def test_slabs_written_by_threads_are_read_back_both_ways(
    directory: Path, monkeypatch: pytest.MonkeyPatch, hide_direct: bool
) -> None:
    """Four threads, three slabs, an odd tail: what comes back is what went in, whichever way it is read."""
    if hide_direct:
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
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
