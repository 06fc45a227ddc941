"""Statistics that a save keeps: the same as those of the data, beside the checkpoint, and refused when damaged."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast import AsyncCheckpointerType, SaveOptions, TensorStatistics

KEPT = SaveOptions(statistics=True)
FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
OTHERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)


def state() -> dict[str, Any]:
    """Every dtype: plain, without dimensions, empty, with what is not finite; many small ones; what is no tensor."""
    made = torch.Generator().manual_seed(1)
    found: dict[str, Any] = {}
    for dtype in (*FLOATING, *OTHERS, *COMPLEX):
        name = str(dtype).removeprefix("torch.")
        found[name] = torch.randn(700, 300, generator=made).mul(3).abs().to(dtype)
        found[f"{name} scalar"] = torch.tensor(3.0).to(dtype)
        found[f"{name} empty"] = torch.ones(0, 3).to(dtype)
        if dtype.is_floating_point:
            odd = torch.tensor([1.0, -2.0, math.nan, 0.0, math.inf, -math.inf, 4.0])
            found[f"{name} odd"] = odd.repeat(30_000).to(dtype)
            found[f"{name} nan"] = torch.full((5,), math.nan).to(dtype)
    found["complex odd"] = torch.tensor([3 + 4j, 0, complex(math.nan, 1), -1j, complex(math.inf, 2)])
    found["conjugate"] = torch.randn(50, dtype=torch.complex64, generator=made).conj()
    found["transposed"] = torch.randn(300, 400, generator=made).t()
    found["beyond float64"] = torch.full((10,), 1e200, dtype=torch.float64)
    found |= {f"small {number}": torch.randn(number, generator=made) for number in range(300)}
    return {**found, "tied": found["float32"], "array": np.arange(5.0), "step": 3, "text": "x" * 100_000}


def assert_same(kept: TensorStatistics, read: TensorStatistics) -> None:
    """The numbers, counts and range to the bit, sums to what depends on the order."""
    assert (kept.source, read.source, kept.magnitudes, kept.is_exact) == ("save", "data", None, True)
    for name in ("key", "dtype", "shape", "alias_of", "elements", "looked_at", "nan", "inf", "zeros", "min", "max"):
        assert getattr(kept, name) == getattr(read, name), (kept.key, name)
    for one, other in ((kept.sum, read.sum), (kept.sum_squares, read.sum_squares)):
        assert one == (None if other is None else pytest.approx(other, rel=1e-12, abs=1e-12)), kept.key


def check(path: str | Path, *left_out: str) -> None:
    """What was kept at ``path`` is what its data says, of all tensors but those left out."""
    with holdfast.open(path) as checkpoint:
        kept = checkpoint.statistics
        assert kept is not None
        assert checkpoint.bytes_read == 0
        read = holdfast.statistics(checkpoint, sample=None, stored=False).tensors
        assert kept.keys() == read.keys() - {*left_out}
        for key in kept:
            assert_same(kept[key], read[key])
        assert checkpoint.user_metadata == {"note": 1}
    assert holdfast.verify(path).ok


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"stage": "overlap"},
        {"max_host_bytes": 1 << 20},
        {"async_checkpointer_type": AsyncCheckpointerType.PROCESS},
        {"at": "memory://kept"},
    ],
    ids=str,
)
def test_what_a_save_keeps_is_what_its_data_says(tmp_path: Path, how: dict[str, Any]) -> None:
    kind = how.pop("async_checkpointer_type", AsyncCheckpointerType.THREAD)
    path = f"{how.pop('at', tmp_path)}/{tmp_path.name}"
    options, user = SaveOptions(statistics=True, **how), {"note": 1}
    handle = holdfast.async_save(
        state(), path, no_dist=True, async_checkpointer_type=kind, user_metadata=user, options=options
    )
    handle.result(timeout=120)
    check(path)
    holdfast.release()


def test_a_save_in_the_foreground_keeps_the_same(tmp_path: Path) -> None:
    bits = {"bits": torch.zeros(64, dtype=torch.uint8).view(torch.bits8)}
    holdfast.save(state() | bits, tmp_path / "a", no_dist=True, user_metadata={"note": 1}, options=KEPT)
    check(tmp_path / "a", "bits")
    found = holdfast.statistics(tmp_path / "a")
    assert found.bytes_read == 0
    assert found.tensors["bits"].looked_at == 0
    assert {"float32 odd", "complex odd"} <= set(found.non_finite_keys)
    assert found.tensors["tied"].alias_of == "float32"
    assert holdfast.statistics(tmp_path / "a", keys="float32", stored=False).tensors["float32"].magnitudes


def test_pieces_larger_than_what_is_looked_at_together(tmp_path: Path) -> None:
    tensor = torch.arange(500_000, dtype=torch.float64)
    holdfast.save({"w": tensor, "t": tensor.view(500, 1000).t()}, tmp_path / "a", no_dist=True, options=KEPT)
    for each in holdfast.statistics(tmp_path / "a").tensors.values():
        assert (each.sum, each.min, each.max, each.zeros) == (500_000 * 499_999 / 2, 0.0, 499_999.0, 1)


def test_without_the_option_nothing_is_kept(tmp_path: Path) -> None:
    holdfast.save({"w": torch.ones(3)}, tmp_path / "a", no_dist=True)
    holdfast.save({"w": torch.ones(3)}, storage_writer=holdfast.FileSystemWriter(tmp_path / "b"), no_dist=True)
    for name in "ab":
        with holdfast.open(tmp_path / name) as checkpoint:
            assert checkpoint.statistics is None
        assert holdfast.statistics(tmp_path / name).tensors["w"].source == "data"
    assert len(os.listdir(tmp_path / "a")) == 3


def test_a_state_without_tensors_has_none_to_tell(tmp_path: Path) -> None:
    holdfast.save({"step": 1}, tmp_path / "a", no_dist=True, options=KEPT)
    with holdfast.open(tmp_path / "a") as checkpoint:
        assert checkpoint.statistics == {}


def test_only_native_files_keep_statistics(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pass statistics=True to NativeWriter"):
        holdfast.save({}, storage_writer=holdfast.FileSystemWriter(tmp_path / "a"), options=KEPT)
    writer = holdfast.NativeWriter(tmp_path / "b", statistics=True)
    holdfast.save({"w": torch.ones(3)}, storage_writer=writer, no_dist=True)
    with holdfast.open(tmp_path / "b") as checkpoint:
        assert checkpoint.statistics is not None
        assert checkpoint.statistics["w"].sum == 3.0
    holdfast.convert(tmp_path / "b", tmp_path / "c", to="native")
    with holdfast.open(tmp_path / "c") as checkpoint:
        assert checkpoint.statistics is None
    with pytest.raises(holdfast.InvalidStateError, match="reserved"):
        holdfast.save({}, tmp_path / "d", no_dist=True, user_metadata={"holdfast.statistics": 1})


def test_the_file_goes_with_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "a"
    holdfast.save({"w": torch.ones(3)}, path, no_dist=True, options=KEPT)
    (first,) = path.glob("data-*-1-0.safetensors")
    holdfast.sweep(path, delete=True)
    assert first.exists()
    holdfast.save({"w": torch.ones(3)}, path, no_dist=True)
    assert not first.exists()
    assert len(os.listdir(path)) == 3
    holdfast.save({"w": torch.ones(3)}, path, no_dist=True, options=KEPT)
    assert len(os.listdir(path)) == 4
    assert len(holdfast.delete(path).files) == 4
    assert not path.exists()


def test_the_steps_of_a_run_keep_statistics_for_those_who_follow(tmp_path: Path) -> None:
    with holdfast.CheckpointManager(tmp_path, save=holdfast.Every(steps=1), stop=None, options=KEPT) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"w": torch.full((4,), float(step))})
    norms = []
    for step in holdfast.follow(tmp_path, start="all", until=lambda: True):
        with holdfast.open(step.path) as checkpoint:
            assert checkpoint.statistics is not None
            norms.append(checkpoint.statistics["w"].norm)
    assert norms == [2.0, 4.0, 6.0]


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    holdfast.save({"w": torch.ones(3), "v": torch.zeros(5)}, tmp_path / "a", no_dist=True, options=KEPT)
    (file,) = (tmp_path / "a").glob("data-*-1-0.safetensors")
    return file


@pytest.mark.parametrize("fault", ["flipped", "cut", "longer", "missing", "a link"])
def test_damage_is_an_error_and_the_data_still_tells(damaged: Path, fault: str) -> None:
    content = bytearray(damaged.read_bytes())
    content[-9] ^= 1
    damaged.unlink()
    if fault == "a link":
        damaged.symlink_to(damaged.parent / "manifest.json")
    elif fault != "missing":
        whole = {"flipped": bytes(content), "cut": bytes(content[:-1]), "longer": bytes(content) + b"x"}
        damaged.write_bytes(whole[fault])
    path = damaged.parent
    with holdfast.open(path) as checkpoint, pytest.raises(holdfast.CorruptError, match=damaged.name):
        _ = checkpoint.statistics
    with pytest.raises(holdfast.CorruptError):
        holdfast.statistics(path)
    assert holdfast.statistics(path, stored=False).tensors["w"].sum == 3.0
    target = {"w": torch.zeros(3)}
    holdfast.load(target, path, strict=False)
    assert target["w"].tolist() == [1.0, 1.0, 1.0]
    report = holdfast.verify(path)
    assert [damage.file for damage in report.damage] == [damaged.name]
    assert not holdfast.verify(path, level="sizes").ok or fault == "flipped"


def republished(path: Path, change: Any) -> None:
    """The manifest with ``change`` made to its metadata, and a digest that fits."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    change({name: value for name, value in manifest["metadata"]["dict"]}["holdfast.statistics"]["dict"])
    manifest["digest"] = "0" * 16
    data = json.dumps(manifest, separators=(",", ":")).encode()
    told = holdfast_digest(data)
    (path / "manifest.json").write_bytes(data.replace(b'"digest":"' + b"0" * 16, b'"digest":"' + told))


def holdfast_digest(data: bytes) -> bytes:
    import xxhash

    return xxhash.xxh3_64_hexdigest(data).encode()


@pytest.mark.parametrize("name", ["../victim", "manifest.json", "data-other-1-0.safetensors", "data 0"])
def test_a_name_that_is_not_one_of_its_own_is_the_users(damaged: Path, tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("stays")
    path = damaged.parent
    own = next(path.glob("data-*-0-0.safetensors")).name
    republished(path, lambda record: record[0].__setitem__(1, own if name == "data 0" else name))
    with holdfast.open(path) as checkpoint:
        assert checkpoint.statistics is None
    assert holdfast.verify(path).ok
    holdfast.save({"w": torch.ones(1)}, path, no_dist=True)
    assert victim.read_text() == "stays"
    assert (path / "manifest.json").exists()


def rewritten(file: Path, change: Any) -> None:
    """The file with ``change`` made to its bytes after the header, its size and digest in the manifest."""
    content = bytearray(file.read_bytes())
    content = change(content) or content
    file.write_bytes(content)

    def tell(record: list[list[Any]]) -> None:
        record[1][1], record[2][1] = len(content), holdfast_digest(bytes(content)).decode()

    republished(file.parent, tell)


def columns(content: bytearray) -> dict[str, np.ndarray]:
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    kinds = {"F64": "<f8", "U64": "<u8", "U32": "<u4"}
    return {
        name: np.frombuffer(content, kinds[entry["dtype"]], entry["shape"][0], 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__"
    }


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("nan", 1),
        ("lost", 9),
        ("nonzero", 1 << 60),
        ("min", math.nan),
        ("max", -5.0),
        ("sum_squares", -1.0),
        ("tensor", 7),
    ],
)
def test_numbers_that_cannot_be_are_refused(damaged: Path, column: str, value: float) -> None:
    def spoil(content: bytearray) -> None:
        columns(content)[column][0] = value

    rewritten(damaged, spoil)
    with holdfast.open(damaged.parent) as checkpoint, pytest.raises(holdfast.CorruptError, match="damaged"):
        _ = checkpoint.statistics


def test_a_file_larger_than_its_tensors_need_is_not_read(damaged: Path) -> None:
    rewritten(damaged, lambda content: content + bytes(1 << 20))
    with holdfast.open(damaged.parent) as checkpoint, pytest.raises(holdfast.CorruptError, match="too large"):
        _ = checkpoint.statistics
    shutil.rmtree(damaged.parent)


def test_a_replaced_checkpoint_says_so(damaged: Path) -> None:
    with holdfast.open(damaged.parent) as checkpoint:
        holdfast.save({"w": torch.ones(3)}, damaged.parent, no_dist=True)
        with pytest.raises(holdfast.StorageError, match="replaced"):
            _ = checkpoint.statistics
