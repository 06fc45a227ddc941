"""share="job": what several hosts want is read from the storage once, and sent from host to host.

The processes pretend to be on several hosts of one or more ranks each; the connections between them are real, over
loopback. Files count as cold, so that what a rank reads is what the storage delivered.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from outside_views import page_cache
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import holdfast
from holdfast import CheckpointError
from holdfast._io import sharing
from holdfast._native import fetch as shared_fetch
from holdfast._plan import reads as job_reads
from holdfast._ranks import carrier, exchange, rendezvous
from holdfast._ranks.connections import HELLO, MAGIC
from holdfast._ranks.ranks import participants

if TYPE_CHECKING:
    from tools.crew import Crew

MIB = 1 << 20
# Several blocks, parts of blocks, less than a block, nothing; and many small ones.
SHAPES = {"large": (1536, 1031), "wide": (8, 300_001), "small": (13, 5), "empty": (0, 4)}
SHAPES.update({f"many.{number}": (37, 3) for number in range(40)})
STORED = sum(4 * torch.Size(shape).numel() for shape in SHAPES.values())
# Reads past the page cache begin and end on pages.
PAGES = 200 * 4096


def truth_of(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(key.encode()))
    return torch.randint(-(1 << 30), 1 << 30, shape, dtype=torch.int32, generator=generator)


def state_on(mesh: DeviceMesh, placements: list[Placement], *, zeros: bool = False) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for key, shape in SHAPES.items():
        truth = truth_of(key, shape)
        whole = torch.zeros_like(truth) if zeros else truth
        state[key] = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    return state


@contextmanager
def hosts_of(size: int, *, least: int = 4, is_cached: bool = False, few: int = 4) -> Iterator[None]:
    """Ranks pretend to be on hosts of ``size`` ranks each, and files to be in the page cache or not."""
    host = f"host {dist.get_rank() // size}"
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(exchange.Visit.__init__, "__defaults__", (lambda: (host,),)))
        stack.enter_context(page_cache(is_full=is_cached))
        stack.enter_context(mock.patch.object(job_reads, "LEAST_HOSTS", least))
        stack.enter_context(mock.patch.object(shared_fetch, "_FEW_RANKS", few))
        yield


def open_links() -> list[str]:
    gc.collect()
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return links


def open_sockets() -> int:
    """How many there are of Python's; those of torch are not."""
    return sum(type(each) is socket.socket and each.fileno() >= 0 for each in gc.get_objects())


@contextmanager
def nothing_is_left() -> Iterator[None]:
    """No thread, shared memory or socket more than before; the connections of the ranks are there already."""
    with participants(None, no_dist=False, call="meet") as ranks:
        ranks.all_reduce("meeting", lambda: None, lambda parts: None)
    gc.collect()
    sockets = open_sockets()
    yield
    assert [thread.name for thread in threading.enumerate() if "carrier" in thread.name] == []
    assert [link for link in open_links() if "memfd:holdfast" in link] == []
    assert open_sockets() <= sockets


def save_and_load(path: str, size: int, layout: str, options: dict[str, Any]) -> tuple[int, int]:
    """The bytes that this rank read from data files, and those that its carrier moved, if it leads a host."""
    world = dist.get_world_size()
    flat = DeviceMesh("cpu", torch.arange(world))
    layouts: dict[str, list[Placement]] = {
        "replicated": [Replicate()],
        "sharded": [Shard(0)],
        "hybrid": [Replicate(), Shard(0)],
    }
    mesh, wanted = flat, layouts[layout]
    if layout == "hybrid":
        mesh = DeviceMesh("cpu", torch.arange(world).reshape(-1, size))
    holdfast.save({"state": state_on(flat, [Shard(0)]), "step": 3}, path)
    target: dict[str, Any] = {"state": state_on(mesh, wanted, zeros=True), "step": 0}
    expected = state_on(mesh, wanted)
    sent = [0]
    transmit = carrier.FrameConnection.transmit

    def count(self: carrier.FrameConnection) -> int:
        sent[0] += (moved := transmit(self))
        return moved

    load_options = {key: value for key, value in options.items() if key in ("verify", "share")}
    host_options = {key: value for key, value in options.items() if key not in load_options}
    with (
        nothing_is_left(),
        hosts_of(size, **host_options),
        mock.patch.object(carrier.FrameConnection, "transmit", count),
    ):
        report = holdfast.load(target, path, options=holdfast.LoadOptions(**{"share": "job", **load_options}))
    assert target["step"] == 3
    for key in SHAPES:
        assert torch.equal(target["state"][key].to_local(), expected[key].to_local()), key
    return report.bytes_read, sent[0]


@pytest.mark.parametrize("verify", [True, False])
def test_a_replicated_state_is_read_once_by_four_hosts_in_equal_parts(pool: Crew, tmp_path: Path, verify: bool) -> None:
    counts = pool.run(4, save_and_load, str(tmp_path / "step"), 1, "replicated", {"verify": verify})
    read, sent = ([each[column] for each in counts] for column in (0, 1))
    assert STORED <= sum(read) <= STORED + PAGES
    assert max(read) - min(read) <= shared_fetch._SLOT_BYTES, "nobody reads much more than others"
    assert STORED * 3 <= sum(sent) <= STORED * 3 + PAGES, "and each sends what it has read to the three others"


@pytest.mark.parametrize(("layout", "world", "size"), [("replicated", 5, 2), ("hybrid", 6, 2), ("hybrid", 8, 2)])
def test_hosts_of_several_ranks_read_once_together(
    pool: Crew, tmp_path: Path, layout: str, world: int, size: int
) -> None:
    options = {} if world // size >= 4 else {"least": 2}
    counts = pool.run(world, save_and_load, str(tmp_path / "step"), size, layout, options)
    assert STORED <= sum(read for read, _ in counts) <= STORED + 2 * PAGES
    leaders = set(range(0, world, size))
    assert {rank for rank, (_, sent) in enumerate(counts) if sent > MIB} == leaders


def test_shards_that_no_other_host_wants_are_not_sent(pool: Crew, tmp_path: Path) -> None:
    counts = pool.run(4, save_and_load, str(tmp_path / "step"), 1, "sharded", {})
    assert sum(read for read, _ in counts) <= STORED + PAGES
    assert sum(sent for _, sent in counts) < 10_000, "only wishes"


@pytest.mark.parametrize(
    ("world", "size", "options", "times"),
    [
        (3, 1, {}, 3),  # fewer hosts than it pays for
        (4, 2, {}, 2),
        (3, 3, {}, 1),  # one host: as share="host"
        (4, 1, {"is_cached": True}, 4),  # what is in the page cache is not sent
        (4, 2, {"is_cached": True, "least": 2, "few": 1}, 2),  # but passed on between many ranks of a host
        (4, 1, {"share": "host"}, 4),
    ],
)
def test_otherwise_each_host_reads_for_itself(
    pool: Crew, tmp_path: Path, world: int, size: int, options: dict[str, Any], times: int
) -> None:
    counts = pool.run(world, save_and_load, str(tmp_path / "step"), size, "replicated", options)
    assert times * STORED <= sum(read for read, _ in counts) <= times * (STORED + PAGES)
    assert sum(sent for _, sent in counts) < 10_000


# Connections.


def stranger(contact: rendezvous.Address, said: bytes) -> socket.socket:
    visitor = socket.create_connection((rendezvous._LOOPBACK, contact.port), timeout=5)
    visitor.sendall(said)
    return visitor


def load_with_strangers(path: str) -> tuple[int, list[str]]:
    """The bytes that this rank read, and what became of the connections that came to host 0 before all others."""
    holdfast.save({"large": truth_of("large", SHAPES["large"])}, path)
    call, visitors = rendezvous.Reception.call, []

    def call_late(self: rendezvous.Reception, contacts: Mapping[int, rendezvous.Address], limit_s: float) -> bool:
        if dist.get_rank() == 1:
            wrong_token = HELLO.pack(MAGIC, b"x" * 32, 1)
            wrong_host = HELLO.pack(MAGIC, contacts[0].token, 4)
            visitors.extend(stranger(contacts[0], said) for said in (b"", wrong_token, wrong_host, b"GET / " * 20))
        return call(self, contacts, limit_s)

    target = {"large": torch.zeros(SHAPES["large"], dtype=torch.int32)}
    fates = []
    with nothing_is_left(), hosts_of(1), mock.patch.object(rendezvous.Reception, "call", call_late):
        report = holdfast.load(target, path, options=holdfast.LoadOptions(share="job"))
        for visitor in visitors:
            with visitor, contextlib.suppress(ConnectionResetError):
                assert visitor.recv(1) == b"", "nobody answers a stranger"
            fates.append("left standing")
    assert torch.equal(target["large"], truth_of("large", SHAPES["large"]))
    return report.bytes_read, fates


def test_strangers_are_left_standing(pool: Crew, tmp_path: Path) -> None:
    results = pool.run(4, load_with_strangers, str(tmp_path / "step"))
    stored = 4 * torch.Size(SHAPES["large"]).numel()
    assert stored <= sum(read for read, _ in results) <= stored + PAGES, "and the hosts share all the same"
    assert [len(fates) for _, fates in results] == [0, 4, 0, 0]


def load_where_connecting_breaks(path: str, places: list[str]) -> list[int]:
    holdfast.save({"large": truth_of("large", SHAPES["large"])}, path)
    read = []
    for where in places:
        target = {"large": torch.zeros(SHAPES["large"], dtype=torch.int32)}
        refuse = mock.Mock(side_effect=OSError(113, "not here"))
        is_here = dist.get_rank() == 2
        where_to_patch: dict[str, tuple[Any, str]] = {
            "listening": (rendezvous, "serve"),
            "connecting": (rendezvous, "_dial"),
            "sharing memory": (exchange.SharedMemory, "create"),
            "answering": (rendezvous, "_receive"),
        }
        with (
            nothing_is_left(),
            hosts_of(1),
            mock.patch("holdfast._native.opening._CONNECT_S", 1.0),
            mock.patch.object(*where_to_patch[where], refuse) if is_here else contextlib.nullcontext(),
        ):
            read.append(holdfast.load(target, path, options=holdfast.LoadOptions(share="job")).bytes_read)
        assert refuse.called == is_here, where
        assert torch.equal(target["large"], truth_of("large", SHAPES["large"])), where
    return read


def test_hosts_that_cannot_connect_read_for_themselves(pool: Crew, tmp_path: Path) -> None:
    places = ["listening", "connecting", "answering", "sharing memory"]
    results = pool.run(4, load_where_connecting_breaks, str(tmp_path / "step"), places)
    stored = 4 * torch.Size(SHAPES["large"]).numel()
    for number, where in enumerate(places):
        assert all(result[number] >= stored for result in results), where


# What happens when something goes wrong in the middle.


def told(error: CheckpointError) -> dict[str, Any]:
    return {
        "kind": type(error).__name__,
        "message": str(error),
        "rank": getattr(error, "rank", None),
        "key": getattr(error, "key", None),
        "failures": sorted(error.failures),
    }


def load_damaged(path: str, where: str) -> dict[str, Any]:
    truth = truth_of("large", SHAPES["large"])
    if dist.get_rank() == 0:
        holdfast.save({"large": truth}, path, no_dist=True)
        if where == "file":
            (name,) = (entry.name for entry in os.scandir(path) if entry.name.startswith("data-"))
            with open(f"{path}/{name}", "r+b") as file:
                file.seek(-3 * MIB, os.SEEK_END)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 1]))
    dist.barrier()
    send = carrier.FrameConnection.send

    def send_damaged(self: carrier.FrameConnection, kind: int, number: int, payload: memoryview, sent: Any) -> None:
        if kind == carrier._READ and self.number == 3:
            payload = memoryview(bytes([payload[0] ^ 1]) + bytes(payload[1:]))
        send(self, kind, number, payload, sent)

    with nothing_is_left(), hosts_of(1), contextlib.ExitStack() as stack:
        if where == "network" and dist.get_rank() == 1:
            stack.enter_context(mock.patch.object(carrier.FrameConnection, "send", send_damaged))
        # So that each host has something to read.
        stack.enter_context(mock.patch.object(shared_fetch, "_SLOT_BYTES", MIB + 8192))
        options = holdfast.LoadOptions(share="job", deadline_s=math.inf)
        with pytest.raises(holdfast.CorruptError) as caught:
            holdfast.load({"large": torch.zeros_like(truth)}, path, options=options)
        result = told(caught.value)
        del caught
    return result


def test_a_damaged_block_is_named_on_every_host(pool: Crew, tmp_path: Path) -> None:
    results = pool.run(4, load_damaged, str(tmp_path / "step"), "file")
    for result in results:
        assert result["key"] == "large"
        assert "is damaged in bytes" in result["message"]
        assert len(result["failures"]) == 1


def test_what_is_damaged_on_the_way_is_noticed_on_arrival(pool: Crew, tmp_path: Path) -> None:
    results = pool.run(4, load_damaged, str(tmp_path / "step"), "network")
    for result in results:
        assert result["key"] == "large"
        assert "intact on the host of rank 1" in result["message"]
        assert result["failures"] == [3]


def lose_a_rank(path: str, how: str, size: int, lost: int) -> dict[str, Any] | None:
    truth = truth_of("large", SHAPES["large"])
    if dist.get_rank() == 0:
        holdfast.save({"large": truth}, path, no_dist=True)
    dist.barrier()
    read = os.preadv

    def stop(descriptor: int, buffers: list[Any], offset: int, flags: int = 0) -> int:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stuck":
            threading.Event().wait()
        if how == "raises":
            raise ValueError("no reading here")
        return read(descriptor, buffers, offset, flags)

    try:
        with (
            mock.patch.object(os, "preadv", stop if dist.get_rank() == lost else read),
            hosts_of(size, least=2),  # which answers what the page cache has, and passes reads on
            mock.patch.object(shared_fetch, "_SLOT_BYTES", MIB + 8192),
        ):
            options = holdfast.LoadOptions(share="job", deadline_s=5.0 if how == "stuck" else math.inf)
            holdfast.load({"large": torch.zeros_like(truth)}, path, options=options)
    except CheckpointError as error:
        result = told(error)
    assert [thread.name for thread in threading.enumerate() if "carrier" in thread.name] == []
    return result


@pytest.mark.parametrize(("how", "size", "lost"), [("killed", 2, 2), ("stuck", 1, 2), ("stuck", 2, 3)])
def test_a_rank_that_is_lost_while_other_hosts_wait_for_it_is_named(
    pool: Crew, tmp_path: Path, how: str, size: int, lost: int
) -> None:
    results = pool.run(4, lose_a_rank, str(tmp_path / "step"), how, size, lost, dies={lost})
    for rank in {0, 1, 2, 3} - {lost}:
        result = results[rank]
        assert result["kind"] == "RankLostError", result
        assert result["rank"] == lost, result
        assert f"rank {lost} " in result["message"]


def test_a_rank_that_raises_fails_all_hosts_at_once(pool: Crew, tmp_path: Path) -> None:
    results = pool.run(4, lose_a_rank, str(tmp_path / "step"), "raises", 2, 1)
    for result in results:
        assert "no reading here" in result["message"]
        assert result["failures"] == [1]


# Memory.


def load_and_measure(path: str) -> int:
    """How many bytes the resident memory of this process grew by at most beyond the target."""
    shapes = {f"part.{number}": (16, MIB) for number in range(5)}  # 5 x 64 MiB
    if dist.get_rank() == 0:
        holdfast.save({key: torch.ones(shape, dtype=torch.int32) for key, shape in shapes.items()}, path, no_dist=True)
    dist.barrier()
    target = {key: torch.full(shape, 2, dtype=torch.int32) for key, shape in shapes.items()}
    Path("/proc/self/clear_refs").write_text("5")
    before = os.sysconf("SC_PAGESIZE") * int(Path("/proc/self/statm").read_text().split()[1])
    with hosts_of(1, least=2):
        holdfast.load(target, path, options=holdfast.LoadOptions(share="job"))
    (peak,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    assert all(bool((tensor == 1).all()) for tensor in target.values())
    return int(peak.split()[1]) * 1024 - before


def test_memory_beyond_the_target_is_bounded_by_slots_and_slabs(pool: Crew, tmp_path: Path) -> None:
    grown = pool.run(2, load_and_measure, str(tmp_path / "step"))
    assert max(grown) <= 192 * MIB, "less than what came from the other host or was read for it"


# share="host": several hosts, and hosts that cannot share.


def load_counted(target: dict[str, Any], path: str) -> tuple[int, int]:
    """The bytes of data, and of manifest and index, that this rank read from cold files."""
    reader = holdfast.NativeReader(path)
    with page_cache(is_full=False):
        report = holdfast.load(target, storage_reader=reader)
    return report.bytes_read, reader.catalog_bytes_read


def sizes(path: str, prefix: str) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(path) if entry.name.startswith(prefix))


def load_on_hosts(path: str, hosts: list[str]) -> tuple[int, int]:
    if dist.get_rank() == 0:
        holdfast.save({"large": truth_of("large", SHAPES["large"])}, path, no_dist=True)
    dist.barrier()
    host = hosts[dist.get_rank()]
    with mock.patch.object(exchange.Visit.__init__, "__defaults__", (lambda: (host,),)):
        target = {"large": torch.zeros(SHAPES["large"], dtype=torch.int32)}
        counts = load_counted(target, path)
    assert torch.equal(target["large"], truth_of("large", SHAPES["large"]))
    return counts


def test_every_host_reads_once(pool: Crew, tmp_path: Path) -> None:
    path = str(tmp_path / "step")
    hosts = ["a", "b", "a", "b", "c"]
    counts = pool.run(5, load_on_hosts, path, hosts)
    catalog = sizes(path, "manifest") + sizes(path, "index-")
    assert [read for _, read in counts] == [catalog, catalog, 0, 0, catalog]
    for host in "abc":
        read = sum(data for (data, _), where in zip(counts, hosts, strict=True) if where == host)
        total = 4 * torch.Size(SHAPES["large"]).numel()
        assert total <= read <= total + 20 * 4096


@contextmanager
def broken(where: str) -> Iterator[None]:
    """A system that refuses one step of sharing, on some of the ranks."""
    refuse = mock.Mock(side_effect=OSError(38, "not here"))
    if where == "doorstep of all" or (where == "doorstep of rank 1" and dist.get_rank() == 1):
        patch = mock.patch.object(exchange, "Doorstep", refuse)
    elif where == "memory" and dist.get_rank() == 0:
        patch = mock.patch.object(sharing.SharedMemory, "create", refuse)
    elif where == "handing over" and dist.get_rank() == 0:
        patch = mock.patch.object(sharing, "leave_at", refuse)
    elif where == "joining on rank 2" and dist.get_rank() == 2:
        patch = mock.patch.object(sharing.SharedMemory, "__init__", refuse)
    else:
        yield
        return
    with patch:
        yield
    assert refuse.called, where


def load_where_sharing_breaks(path: str, places: list[str]) -> dict[str, int]:
    if dist.get_rank() == 0:
        holdfast.save({"large": truth_of("large", SHAPES["large"])}, path, no_dist=True)
    dist.barrier()
    read = {}
    for where in places:
        target = {"large": torch.zeros(SHAPES["large"], dtype=torch.int32)}
        with broken(where):
            read[where], _ = load_counted(target, path)
        assert torch.equal(target["large"], truth_of("large", SHAPES["large"])), where
    return read


def test_ranks_that_cannot_share_read_for_themselves(pool: Crew, tmp_path: Path) -> None:
    places = ["doorstep of all", "doorstep of rank 1", "memory", "handing over", "joining on rank 2"]
    results = pool.run(3, load_where_sharing_breaks, str(tmp_path / "step"), places)
    total = 4 * torch.Size(SHAPES["large"]).numel()
    for where in places:
        read = [result[where] for result in results]
        if where == "doorstep of rank 1":
            assert read[1] >= total
            assert total <= read[0] + read[2] < 1.5 * total, "the others still share"
        else:
            assert min(read) >= total, where
