"""Verifying: whole checkpoints pass, and whatever is wrong with one is found, all of it, under the right key."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from holdfast._io.direct import InputFile
from holdfast._native import file_layout as work
from holdfast._native.catalog import read_catalog
from holdfast._native.index import ChunkIndex, HeaderEntry, encode_header, encode_index, file_digest
from holdfast._native.manifest import FileEntry, IndexEntry, Manifest, TensorEntry, WriterEntry, encode_manifest
from holdfast._native.verify import Damage, verify_checkpoint
from holdfast._values.digest import digest, to_hex
from holdfast.errors import CorruptError, NotFoundError, StorageError

MIB = 1 << 20


def data_files(path: Path) -> list[Path]:
    return sorted(path.glob("data-*"))


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def offset_of(path: Path, key: str, *, within: int = 0) -> int:
    """Where byte ``within`` of the only chunk of ``key`` is in its file."""
    catalog = read_catalog(path)
    (row,) = catalog.rows_of(key)
    return int(catalog.index.offset[row]) + within


@pytest.fixture
def path(tmp_path: Path) -> Path:
    weight = torch.arange(3 * MIB // 4 + 5, dtype=torch.float32)
    state = {
        "model": {"weight": weight, "head": weight, "bias": torch.ones(7), "empty": torch.empty(0, 3)},
        "scale": torch.tensor(2.0, dtype=torch.bfloat16),
        "phase": torch.ones(3, dtype=torch.complex128),
        "step": 3,
        "notes": "x" * 100_000,
    }
    holdfast.save(state, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.fixture
def many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(work, "_MOST_HEADER_BYTES", 1)
    holdfast.save({f"layer{number}": torch.full((50,), number) for number in range(400)}, tmp_path / "files")
    assert len(data_files(tmp_path / "files")) > 8
    return tmp_path / "files"


# --- whole checkpoints ----------------------------------------------------------------------------------------------


def test_a_whole_checkpoint_has_no_damage_and_every_byte_on_disk_counts(path: Path) -> None:
    report = verify_checkpoint(path)
    assert report.ok
    assert (report.damage, report.damaged_keys, report.damaged_files) == ((), (), ())
    assert report.keys == 8
    assert report.files == len(list(path.iterdir())) == 3
    assert report.bytes == sum(file.stat().st_size for file in path.iterdir())
    assert report.seconds > 0


@pytest.mark.parametrize("state", [{}, {"step": 3}, {"nothing": torch.empty(0)}], ids=["empty", "values", "no bytes"])
def test_checkpoints_with_next_to_nothing_in_them_are_whole(tmp_path: Path, state: dict[str, object]) -> None:
    holdfast.save(state, tmp_path / "small")
    report = verify_checkpoint(tmp_path / "small")
    assert report.ok
    assert report.keys == len(state)


def count_open_data_files() -> int:
    descriptors = Path("/proc/self/fd")
    if not descriptors.exists():
        pytest.skip("the system does not tell which files are open")
    names = [descriptors / name for name in os.listdir(descriptors)]
    return sum("data-" in os.readlink(name) for name in names if name.is_symlink())


def test_many_files_are_whole_and_only_a_few_are_open_at_a_time(many_files: Path) -> None:
    counts: list[int] = []
    assert verify_checkpoint(many_files, on_progress=lambda done, total: counts.append(count_open_data_files())).ok
    # At most ten jobs are taken, and 32 files stay open for the next, each with at most two descriptors.
    assert 0 < max(counts) <= 2 * (10 + 32)
    assert count_open_data_files() == 0


def test_progress_grows_to_the_size_on_disk(path: Path) -> None:
    calls: list[tuple[int, int]] = []
    report = verify_checkpoint(path, on_progress=lambda done, total: calls.append((done, total)))
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert done[-1] == report.bytes
    assert {call[1] for call in calls} == {report.bytes}


def test_progress_is_complete_where_a_file_is_missing(many_files: Path) -> None:
    data_files(many_files)[0].unlink()
    done: list[int] = []
    report = verify_checkpoint(many_files, on_progress=lambda count, total: done.append(count))
    assert done[-1] == report.bytes


def test_an_error_of_the_progress_callback_is_raised_and_no_file_stays_open(many_files: Path) -> None:
    calls: list[int] = []

    def refuse(done: int, total: int) -> None:
        calls.append(done)
        if len(calls) == 4:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        verify_checkpoint(many_files, on_progress=refuse)
    assert count_open_data_files() == 0


# --- damaged data ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["model.bias", "scale", "phase", "notes"])
def test_a_flipped_bit_is_found_under_its_key_and_no_other(path: Path, key: str) -> None:
    offset = offset_of(path, key, within=1)
    flip(data_files(path)[0], offset)
    report = verify_checkpoint(path)
    assert not report.ok
    assert report.damaged_keys == (key,)
    (damage,) = report.damage
    assert damage.file == data_files(path)[0].name
    assert damage.span[0] <= offset < damage.span[1]


def test_the_span_of_damage_is_the_block_that_has_it(path: Path) -> None:
    begin = offset_of(path, "model.weight")
    flip(data_files(path)[0], begin + MIB + 17)
    assert {damage.span for damage in verify_checkpoint(path).damage} == {(begin + MIB, begin + 2 * MIB)}


def test_the_last_block_of_a_chunk_ends_with_it(path: Path) -> None:
    begin = offset_of(path, "model.weight")
    flip(data_files(path)[0], begin + 3 * MIB + 19)
    assert {damage.span for damage in verify_checkpoint(path).damage} == {(begin + 3 * MIB, begin + 3 * MIB + 20)}


def test_tied_keys_are_damaged_together(path: Path) -> None:
    flip(data_files(path)[0], offset_of(path, "model.weight"))
    report = verify_checkpoint(path)
    assert report.damaged_keys == ("model.weight", "model.head")
    assert len({damage.span for damage in report.damage}) == 1


def test_all_damage_is_collected_and_touching_blocks_are_joined(path: Path) -> None:
    begin = offset_of(path, "model.weight")
    for within in (0, MIB, 3 * MIB):
        flip(data_files(path)[0], begin + within)
    flip(data_files(path)[0], offset_of(path, "model.bias"))
    report = verify_checkpoint(path)
    spans = [damage.span for damage in report.damage if damage.key == "model.weight"]
    assert spans == [(begin, begin + 2 * MIB), (begin + 3 * MIB, begin + 3 * MIB + 20)]
    assert set(report.damaged_keys) == {"model.weight", "model.head", "model.bias"}
    assert [damage.span[0] for damage in report.damage] == sorted(damage.span[0] for damage in report.damage)


def test_no_byte_of_a_data_file_can_change_unnoticed(tmp_path: Path) -> None:
    holdfast.save({"weight": torch.arange(40, dtype=torch.int16), "bias": torch.ones(3)}, tmp_path / "bytes")
    (file,) = data_files(tmp_path / "bytes")
    content = file.read_bytes()
    for offset in [*range(0, 4096, 97), *range(4090, len(content))]:
        flip(file, offset)
        (damage,) = verify_checkpoint(tmp_path / "bytes").damage
        assert damage.span[0] <= offset < damage.span[1]
        assert (damage.key is None) == (offset < 4096)
        file.write_bytes(content)
    assert verify_checkpoint(tmp_path / "bytes").ok


@pytest.mark.parametrize("offset", [0, 9, 4095], ids=["length", "json", "padding"])
def test_a_damaged_header_is_found_and_the_data_is_still_checked(path: Path, offset: int) -> None:
    flip(data_files(path)[0], offset)
    flip(data_files(path)[0], offset_of(path, "scale"))
    report = verify_checkpoint(path)
    assert (report.damage[0].key, report.damage[0].span) == (None, (0, 4096))
    assert report.damaged_keys == ("scale",)


def test_files_read_past_the_page_cache_give_the_same_result(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("model.weight", "model.bias"):
        flip(data_files(path)[0], offset_of(path, key, within=2))
    warm = verify_checkpoint(path).damage
    direct_reads: list[int] = []
    read_direct = InputFile.read_direct_into

    def count(self: InputFile, view: memoryview, offset: int) -> None:
        direct_reads.append(offset)
        read_direct(self, view, offset)

    monkeypatch.setattr(InputFile, "is_cached", lambda self: False)
    monkeypatch.setattr(InputFile, "read_direct_into", count)
    assert verify_checkpoint(path).damage == warm
    assert direct_reads


# --- damaged files --------------------------------------------------------------------------------------------------


def remove(file: Path) -> None:
    file.unlink()


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def extend(file: Path) -> None:
    with file.open("ab") as output:
        output.write(b"\0")


def empty(file: Path) -> None:
    os.truncate(file, 0)


def make_link(file: Path) -> None:
    moved = file.parent.with_name("elsewhere")
    file.rename(moved)
    file.symlink_to(moved)


def make_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def make_fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    ("damage_file", "problem"),
    [
        (remove, "is missing"),
        (cut, "truncated"),
        (extend, "instead of"),
        (empty, "has 0 bytes"),
        (make_link, "not a regular file"),
        (make_directory, "not a regular file"),
        (make_fifo, "not a regular file"),
    ],
)
def test_a_file_that_is_not_there_whole_damages_all_its_keys_and_the_others_are_still_checked(
    many_files: Path, damage_file: Callable[[Path], None], problem: str
) -> None:
    catalog = read_catalog(many_files)
    keys = [entry.key for entry in catalog.manifest.tensors]
    file_of = {key: catalog.manifest.files[int(catalog.index.file[catalog.rows_of(key)[0]])].name for key in keys}
    lost, flipped = many_files / file_of["layer0"], many_files / file_of["layer399"]
    assert lost != flipped
    offset = offset_of(many_files, "layer399")
    flip(flipped, offset)
    damage_file(lost)
    report = verify_checkpoint(many_files)
    assert set(report.damaged_keys) == {key for key in keys if file_of[key] == lost.name} | {"layer399"}
    assert set(report.damaged_files) == {lost.name, flipped.name}
    assert all(problem in damage.problem for damage in report.damage if damage.file == lost.name)


def test_a_block_that_the_disk_fails_to_read_is_damage_and_its_neighbours_are_not(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = offset_of(path, "model.weight")
    bad = begin + MIB + 4096 * 3
    read_once = InputFile._read_once
    injected: list[int] = []

    def fail(self: InputFile, descriptor: int, view: memoryview, offset: int) -> int:
        if offset <= bad < offset + view.nbytes:
            injected.append(offset)
            raise StorageError("cannot read", errno=errno.EIO, path=self.path)
        return read_once(self, descriptor, view, offset)

    monkeypatch.setattr(InputFile, "_read_once", fail)
    report = verify_checkpoint(path)
    assert injected
    assert report.damaged_keys == ("model.weight", "model.head")
    assert report.damage[0].span == (begin + MIB, begin + 2 * MIB)
    assert "disk" in report.damage[0].problem


def test_a_refusal_that_says_nothing_about_the_bytes_is_raised(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: InputFile, descriptor: int, view: memoryview, offset: int) -> int:
        raise StorageError("cannot read: permission denied", errno=errno.EACCES, path=self.path)

    monkeypatch.setattr(InputFile, "_read_once", refuse)
    with pytest.raises(StorageError, match="permission denied"):
        verify_checkpoint(path)


# --- damaged manifest and index -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["manifest.json", "index-*"])
@pytest.mark.parametrize(
    "damage_file", [lambda file: flip(file, 60), cut, extend, empty], ids=["flip", "cut", "extend", "empty"]
)
def test_damage_of_manifest_or_index_is_an_error_that_names_it(
    path: Path, name: str, damage_file: Callable[[Path], None]
) -> None:
    (file,) = path.glob(name)
    damage_file(file)
    with pytest.raises(CorruptError) as caught:
        verify_checkpoint(path)
    assert caught.value.path == str(file)


def test_a_missing_index_is_damage_and_a_missing_manifest_is_no_checkpoint(path: Path) -> None:
    (index,) = path.glob("index-*")
    index.unlink()
    with pytest.raises(CorruptError, match="missing"):
        verify_checkpoint(path)
    (path / "manifest.json").unlink()
    with pytest.raises(NotFoundError):
        verify_checkpoint(path)


def test_a_checkpoint_that_is_replaced_meanwhile_is_verified_anew(path: Path) -> None:
    saves: list[Path] = []

    def replace_once(done: int, total: int) -> None:
        if not saves:
            saves.append(path)
            holdfast.save({"other": torch.ones(5)}, path)

    report = verify_checkpoint(path, on_progress=replace_once)
    assert report.ok
    assert report.keys == 1
    assert saves


# --- headers that lie, with a digest that does not ------------------------------------------------------------------


def write_checkpoint(directory: Path, entries: Sequence[HeaderEntry]) -> None:
    """A published checkpoint of "weight", [4] of float32 in two chunks, whose data file has a header of ``entries``."""
    data = np.arange(4, dtype="<f4").tobytes()
    header = encode_header(entries)
    digests = np.array([digest(data[:4]), digest(data[4:])], dtype=np.uint64)
    index = encode_index(
        ChunkIndex(
            tensor=np.array([0, 0]),
            file=np.array([0, 0]),
            offset=np.array([len(header), len(header) + 4]),
            bytes=np.array([4, 12]),
            lo=np.array([[0], [1]]),
            length=np.array([[1], [3]]),
            digests=digests,
        )
    )
    file = FileEntry(
        name="data-a-0-0.safetensors",
        bytes=len(header) + len(data),
        header=len(header),
        digest=file_digest(header, digests),
    )
    manifest = Manifest(
        attempt="a",
        writer=WriterEntry(holdfast="0", torch="0", python="0", world_size=1),
        files=(file,),
        index=IndexEntry(name="index-a.safetensors", bytes=len(index), digest=to_hex(digest(index))),
        tensors=(TensorEntry(key="weight", dtype="float32", shape=(4,)),),
        values=(),
    )
    directory.mkdir()
    (directory / file.name).write_bytes(header + data)
    (directory / "index-a.safetensors").write_bytes(index)
    (directory / "manifest.json").write_bytes(encode_manifest(manifest))


FIRST = HeaderEntry(name="weight@[0:1]", dtype="F32", shape=(1,), begin=0, end=4)
SECOND = HeaderEntry(name="weight@[1:4]", dtype="F32", shape=(3,), begin=4, end=16)


def entry(name: str, dtype: str, shape: tuple[int, ...], begin: int, end: int) -> HeaderEntry:
    return HeaderEntry(name=name, dtype=dtype, shape=shape, begin=begin, end=end)


def test_a_tensor_in_pieces_is_whole_when_the_header_names_the_pieces(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "pieces", [FIRST, SECOND])
    report = verify_checkpoint(tmp_path / "pieces")
    assert report.ok
    assert torch.equal(holdfast.load(tmp_path / "pieces")["weight"], torch.arange(4, dtype=torch.float32))


@pytest.mark.parametrize(
    "entries",
    [
        [FIRST, entry("weight@[1:3]", "F32", (3,), 4, 16)],
        [FIRST, entry("weight", "F32", (3,), 4, 16)],
        [FIRST, entry("weight@[1:4]", "I32", (3,), 4, 16)],
        [FIRST, entry("weight@[1:4]", "F32", (3, 1), 4, 16)],
        [FIRST, entry("weight@[1:4]", "F32", (2,), 4, 12), entry("more", "F32", (1,), 12, 16)],
        [entry("weight@[1:4]", "F32", (3,), 0, 12), entry("weight@[0:1]", "F32", (1,), 12, 16)],
        [entry("weight", "F32", (4,), 0, 16)],
        [FIRST],
        [],
    ],
    ids=["box", "name", "dtype", "shape", "more", "order", "whole", "fewer", "none"],
)
def test_a_header_that_says_other_than_the_index_is_damage(tmp_path: Path, entries: list[HeaderEntry]) -> None:
    write_checkpoint(tmp_path / "lie", entries)
    report = verify_checkpoint(tmp_path / "lie")
    assert report.damage == (
        Damage(
            file="data-a-0-0.safetensors",
            key=None,
            span=(0, 4096),
            problem="the header does not say what the index says",
        ),
    )
