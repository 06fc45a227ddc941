"""Exports of tensors that ranks of several hosts have parts of the same rows of.

The processes pretend to be on several hosts; the connections between them are real, over loopback.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import holdfast
from holdfast import CheckpointError, hf
from holdfast._huggingface import places, stripes
from holdfast._huggingface.packing import packed
from holdfast._ranks import carrier, exchange, rendezvous
from holdfast._ranks.ranks import participants
from holdfast.mapping import Concat, Interleave, Mapping, Move, Transpose

if TYPE_CHECKING:
    from tools.crew import Crew

MIB = 1 << 20
R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
LAYOUTS: dict[str, tuple[Sequence[int], tuple[Placement, ...]]] = {
    "columns": ((-1,), (S1,)),
    "depth": ((-1,), (S2,)),
    "rows in a host, columns over hosts": ((2, -1), (S0, S1)),
    "columns in a host, rows over hosts": ((2, -1), (S1, S0)),
    "strided": ((2, -1), (_StridedShard(0, split_factor=2), S0)),
    "strided columns": ((2, -1), (_StridedShard(1, split_factor=2), S1)),
    "copies of columns": ((2, -1), (R, S1)),
}
MAPPING = Mapping(
    (
        Move("out.turned", "turned", (Transpose(0, 1),)),
        Move("out.pairs", "pairs", (Interleave(1, 4),)),
        Move(("out.q", "out.k"), "qk", (Concat(1),)),
    )
)


def truth() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = {"large": (800, 600), "odd": (37, 13), "few columns": (50, 3), "one": (3, 1), "long": (2, 70_000)}
    return {
        **{f"{name} {layout}": torch.randn(shape, generator=generator)
           for name, shape in shapes.items() for layout in LAYOUTS
           if layout != "depth" and not (layout.startswith("strided") and name != "large")},
        "experts depth": torch.randn(5, 30, 44, generator=generator),
        "whole": torch.arange(11),
    }  # fmt: skip


def sharded(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for key, tensor in found.items():
        shape, placements = LAYOUTS.get(key.partition(" ")[2].removeprefix("columns "), ((-1,), (S1,)))
        mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()).reshape(*shape))
        state[key] = tensor if key == "whole" else distribute_tensor(tensor, mesh, placements, src_data_rank=None)
    return state


@contextmanager
def on_hosts(hosts: Sequence[str], *, stripe_bytes: int = 1 << 16) -> Iterator[None]:
    """Ranks pretend to be on hosts of these names, and stripes to be so small that there are many."""
    host = hosts[dist.get_rank()]
    with (
        mock.patch.object(exchange.Visit.__init__, "__defaults__", (lambda: (host,),)),
        mock.patch.object(places, "STRIPE_BYTES", stripe_bytes),
    ):
        yield


def export(path: str, hosts: Sequence[str], in_background: bool = False) -> int:
    """How many bytes this rank sent to ranks of other hosts."""
    sent = [0]
    send = carrier.FrameConnection.send

    def count(self: carrier.FrameConnection, kind: int, number: int, payload: memoryview, then: Any) -> None:
        sent[0] += len(payload)
        send(self, kind, number, payload, then)

    with on_hosts(hosts), mock.patch.object(carrier.FrameConnection, "send", count):
        state = sharded(truth())
        hf.async_export(state, path).result() if in_background else hf.export(state, path)
    return sent[0]


HOSTS = {"2 x 2": "aabb", "turns": "abab", "4 x 1": "abcd", "3 + 1": "aaab", "2 x 1": "ab", "3 + 2 + 1": "aaabbc"}


@pytest.mark.parametrize("hosts", HOSTS)
def test_the_files_hold_what_the_ranks_have(pool: Crew, tmp_path: Path, hosts: str) -> None:
    sent = pool.run(len(HOSTS[hosts]), export, str(tmp_path / "model"), HOSTS[hosts], hosts == "turns")
    assert sum(sent) > 0
    found = load_file(tmp_path / "model/model.safetensors")
    assert found.keys() == truth().keys()
    for key, tensor in truth().items():
        assert torch.equal(found[key], tensor), key
    assert holdfast.verify(tmp_path / "model").ok
    assert sorted(os.listdir(tmp_path)) == ["model"]


def export_mapped(path: str, hosts: str) -> None:
    tensors = {
        key: torch.randn(96, 520, generator=torch.Generator().manual_seed(2)) for key in ("turned", "pairs", "qk")
    }
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
    state = {key: distribute_tensor(each, mesh, [S0, S1], src_data_rank=None) for key, each in tensors.items()}
    with on_hosts(hosts):
        hf.export(state, path, mapping=MAPPING, dtype=torch.bfloat16)


def test_mapped_and_rounded_the_files_are_those_of_one_host(pool: Crew, tmp_path: Path) -> None:
    for hosts in ("aaaa", "aabb", "abab", "abcd"):
        pool.run(4, export_mapped, str(tmp_path / hosts), hosts)
    names = ["model.safetensors", "model.safetensors.index.json"]
    contents = {hosts.name: [(hosts / name).read_bytes() for name in names] for hosts in tmp_path.iterdir()}
    assert len(contents) == 4
    assert all(each == contents["aaaa"] for each in contents.values())
    found = load_file(tmp_path / "aaaa/model.safetensors")
    assert sorted(found) == ["out.k", "out.pairs", "out.q", "out.turned"]
    assert found["out.turned"].shape == (520, 96)


def test_little_travels_and_everybody_writes(pool: Crew, tmp_path: Path) -> None:
    """Three of four ranks are of one host: it writes more than three quarters, and sends a quarter of the rest."""
    columns = sum(tensor.nbytes for key, tensor in truth().items() if key != "whole")
    sent = pool.run(4, export, str(tmp_path / "model"), "aaab")
    assert sum(sent) < columns / 2
    assert sent[3] > 0
    assert min(sum(sent[:3]), sent[3]) > columns / 20, "the other host writes too"


# What happens when something goes wrong in the middle.


def fail(path: str, how: str, hosts: str, lost: int) -> dict[str, Any]:
    send, packs = carrier.FrameConnection.send, []

    def come_to_grief(source: Any) -> torch.Tensor:
        packs.append(source)
        if len(packs) == 3 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if len(packs) == 3 and how == "stuck":
            threading.Event().wait()
        if len(packs) == 3 and how == "raises":
            raise ValueError("no packing here")
        return packed(source)

    def send_damaged(self: carrier.FrameConnection, kind: int, number: int, payload: memoryview, then: Any) -> None:
        if kind == stripes._PART:
            payload = memoryview(bytes([payload[0] ^ 1]) + bytes(payload[1:]))
        send(self, kind, number, payload, then)

    with contextlib.ExitStack() as stack:
        stack.enter_context(on_hosts(hosts))
        if dist.get_rank() == lost and how == "damaged":
            stack.enter_context(mock.patch.object(carrier.FrameConnection, "send", send_damaged))
        elif dist.get_rank() == lost:
            stack.enter_context(mock.patch("holdfast._huggingface.rank_work.packed", come_to_grief))
        options = hf.ExportOptions(deadline_s=4.0 if how == "stuck" else math.inf)
        with pytest.raises(CheckpointError) as caught:
            hf.export(sharded(truth()), path, options=options)
        error = caught.value
        told = {
            "kind": type(error).__name__,
            "message": str(error),
            "rank": getattr(error, "rank", None),
            "failures": sorted(error.failures),
        }
        del caught, error
    gc.collect()
    assert not [link for link in open_links() if "memfd:holdfast" in link]
    return told


def open_links() -> list[str]:
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return links


@pytest.mark.parametrize(
    ("how", "hosts", "lost"), [("killed", "aabb", 2), ("killed", "abcd", 3), ("stuck", "aabb", 3), ("stuck", "abcd", 1)]
)
def test_a_rank_that_is_lost_in_the_middle_is_named(
    pool: Crew, tmp_path: Path, how: str, hosts: str, lost: int
) -> None:
    results = pool.run(4, fail, str(tmp_path / "model"), how, hosts, lost, dies={lost})
    for rank in {0, 1, 2, 3} - {lost}:
        result = results[rank]
        assert (result["kind"], result["rank"]) == ("RankLostError", lost), result
        assert f"rank {lost} " in result["message"]
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("how", "message"),
    [("raises", "no packing here"), ("damaged", "was intact on the host of rank 2 and arrived damaged")],
)
def test_what_goes_wrong_is_told_to_all(pool: Crew, tmp_path: Path, how: str, message: str) -> None:
    for result in pool.run(4, fail, str(tmp_path / "model"), how, "aabb", 2):
        assert message in result["message"], result
        assert 1 <= len(result["failures"]) <= 2
    assert os.listdir(tmp_path) == []


def export_unconnected(path: str, where: str) -> str:
    refuse = mock.Mock(side_effect=OSError(113, "not here"))
    place = {"listening": "serve", "connecting": "_dial", "answering": "_receive"}[where]
    with participants(None, no_dist=False, call="meet") as ranks:  # whose own connections are to be there already
        ranks.all_reduce("meeting", lambda: None, lambda parts: None)
    with (
        on_hosts("abcd"),
        mock.patch.object(stripes, "_CONNECT_S", 1.0),
        mock.patch.object(rendezvous, place, refuse) if dist.get_rank() == 2 else contextlib.nullcontext(),
        pytest.raises(CheckpointError) as caught,
    ):
        hf.export(sharded(truth()), path)
    return str(caught.value)


@pytest.mark.parametrize("where", ["listening", "connecting", "answering"])
def test_hosts_that_cannot_be_connected_are_told_what_to_do(pool: Crew, tmp_path: Path, where: str) -> None:
    for message in pool.run(4, export_unconnected, str(tmp_path / "model"), where):
        if where == "listening":
            assert "not here" in message
        else:
            assert "cannot be connected with ranks of other hosts" in message
            assert "holdfast convert" in message
    assert os.listdir(tmp_path) == []


# Memory.


def export_and_measure(path: str) -> int:
    """How many bytes the resident memory of this process grew by at most beyond the state."""
    mesh = DeviceMesh("cpu", torch.arange(2))
    state = {
        f"part.{number}": distribute_tensor(torch.ones(64, MIB // 2), mesh, [S1], src_data_rank=None)
        for number in range(4)
    }
    Path("/proc/self/clear_refs").write_text("5")
    before = os.sysconf("SC_PAGESIZE") * int(Path("/proc/self/statm").read_text().split()[1])
    with on_hosts("ab", stripe_bytes=stripes.STRIPE_BYTES):
        hf.export(state, path)
    (peak,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) * 1024 - before


def test_memory_beyond_the_state_is_bounded_by_slots_and_what_is_on_the_way(pool: Crew, tmp_path: Path) -> None:
    grown = pool.run(2, export_and_measure, str(tmp_path / "model"))
    assert max(grown) <= 192 * MIB, grown
    assert holdfast.verify(tmp_path / "model").ok
