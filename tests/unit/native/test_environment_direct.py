"""File systems that refuse O_DIRECT, at whatever moment: saving and loading work, through the page cache."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast

if not hasattr(os, "O_DIRECT"):
    pytest.skip("there is no O_DIRECT here to be refused", allow_module_level=True)


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(4)
    return {
        "large": torch.randint(0, 256, (20 << 20,), dtype=torch.uint8, generator=generator),
        "strided": torch.randn(700, 300, generator=generator).T,
        "small": [torch.tensor(3), torch.rand(5, generator=generator)],
        "text": "t" * 100_000,
    }


def check_round_trip(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without this flag one cannot ask whether a file is in the page cache, and so each is taken to be cold.
    monkeypatch.delattr(os, "RWF_NOWAIT", raising=False)
    holdfast.save(state(), path)
    expected, loaded = state(), holdfast.load(path)
    target = state()
    for tensor in (target["large"], target["strided"], *target["small"]):
        tensor.zero_()
    report = holdfast.load(target, path)
    assert report.bytes_read > 20 << 20
    for found in (loaded, target):
        assert torch.equal(found["large"], expected["large"])
        assert torch.equal(found["strided"], expected["strided"])
        assert all(map(torch.equal, found["small"], expected["small"]))
        assert found["text"] == expected["text"]
    assert len(os.listdir(path)) == 3


class Transfers:
    """Reads or writes that are refused on descriptors with O_DIRECT; ``direct`` and ``buffered`` count both kinds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: str, *, refuses: bool = True) -> None:
        self.direct = self.buffered = 0
        real = getattr(os, call)

        def transfer(descriptor: int, *args: Any, **kwargs: Any) -> Any:
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
                self.direct += 1
                if refuses:
                    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            else:
                self.buffered += 1
            return real(descriptor, *args, **kwargs)

        monkeypatch.setattr(os, call, transfer)


def test_without_a_refusal_large_transfers_go_past_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes, reads = (Transfers(monkeypatch, call, refuses=False) for call in ("pwrite", "preadv"))
    check_round_trip(tmp_path / "checkpoint", monkeypatch)
    if not writes.direct:
        pytest.skip("this file system itself refuses O_DIRECT")
    assert writes.buffered == 0
    assert reads.direct >= 2


def test_refused_by_fcntl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl
    refused = []

    def control(descriptor: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            refused.append(descriptor)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", control)
    writes = Transfers(monkeypatch, "pwrite")
    check_round_trip(tmp_path / "checkpoint", monkeypatch)
    assert len(refused) == 1
    assert writes.direct == 0
    assert writes.buffered >= 3


def test_refused_at_the_first_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = Transfers(monkeypatch, "pwrite")
    check_round_trip(tmp_path / "checkpoint", monkeypatch)
    if not writes.direct:
        pytest.skip("this file system itself refuses O_DIRECT")
    # Several threads may have started before the first of them came back with the refusal.
    assert 1 <= writes.direct <= 8
    assert writes.buffered >= 3


def test_refused_when_a_file_is_opened_for_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open
    refused = []

    def opening(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", opening)
    reads = Transfers(monkeypatch, "preadv")
    check_round_trip(tmp_path / "checkpoint", monkeypatch)
    assert len(refused) == 2, "once for each of the two loads"
    assert reads.direct == 0
    assert reads.buffered >= 2


def test_refused_at_the_first_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Transfers(monkeypatch, "preadv")
    check_round_trip(tmp_path / "checkpoint", monkeypatch)
    if not reads.direct:
        pytest.skip("this file system itself refuses O_DIRECT")
    assert 2 <= reads.direct <= 16
    assert reads.buffered >= 2


@pytest.mark.parametrize("code", [errno.ENOTSUP, errno.EINVAL])
def test_room_that_cannot_be_reserved_is_not_needed(tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []

    def refusing(descriptor: int, offset: int, size: int) -> None:
        refused.append(size)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refusing)
    check_round_trip(tmp_path / "checkpoint", monkeypatch)
    assert len(refused) == 1


def test_locks_that_do_not_work_are_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []

    def refusing(descriptor: int, operation: int) -> None:
        refused.append(operation)
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refusing)
    check_round_trip(tmp_path / "checkpoint", monkeypatch)
    assert len(refused) == 4  # of the data file, of the index, and of the directory, twice: it is let go too


def test_short_transfers_go_on_where_they_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write, real_read = os.pwrite, os.preadv
    shortened = {"write": 0, "read": 0}

    def writing(descriptor: int, data: Any, offset: int) -> int:
        shortened["write"] += len(data) > 4096
        return real_write(descriptor, data[: max(4096, len(data) // 8192 * 4096)], offset)

    def reading(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
        (buffer,) = buffers
        shortened["read"] += len(buffer) > 4096
        return real_read(descriptor, [memoryview(buffer)[: max(4096, len(buffer) // 8192 * 4096)]], offset, *flags)

    monkeypatch.setattr(os, "pwrite", writing)
    monkeypatch.setattr(os, "preadv", reading)
    check_round_trip(tmp_path / "checkpoint", monkeypatch)
    assert shortened["write"] > 2
    assert shortened["read"] > 4
