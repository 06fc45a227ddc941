"""Verifying: whole checkpoints pass, and whatever is wrong with one is found, all of it, under the right key."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors import safe_open

import holdfast
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


def place_of(path: Path, key: str) -> tuple[str, int]:
    """The file that has the only chunk of ``key``, and where that begins."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    number = [entry["key"] for entry in manifest["tensors"]].index(key)
    with safe_open(path / manifest["index"]["name"], framework="np") as opened:
        tensor, file, offset = map(opened.get_tensor, ("tensor", "file", "offset"))
    (row,) = (row for row, stored in enumerate(tensor.tolist()) if stored == number)
    return manifest["files"][file[row]]["name"], int(offset[row])


def offset_of(path: Path, key: str, *, within: int = 0) -> int:
    """Where byte ``within`` of the only chunk of ``key`` is in its file."""
    return place_of(path, key)[1] + within


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
    monkeypatch.setattr("holdfast._native.file_layout._MOST_HEADER_BYTES", 1)
    holdfast.save({f"layer{number}": torch.full((50,), number) for number in range(400)}, tmp_path / "files")
    assert len(data_files(tmp_path / "files")) > 8
    return tmp_path / "files"


# --- whole checkpoints ----------------------------------------------------------------------------------------------


def test_a_whole_checkpoint_has_no_damage_and_every_byte_on_disk_counts(path: Path) -> None:
    report = holdfast.verify(path)
    assert report.ok
    assert (report.damage, report.damaged_keys, report.damaged_files) == ((), (), ())
    assert report.keys == 8
    assert report.files == len(list(path.iterdir())) == 3
    assert report.bytes == sum(file.stat().st_size for file in path.iterdir())
    assert report.seconds > 0


@pytest.mark.parametrize("state", [{}, {"step": 3}, {"nothing": torch.empty(0)}], ids=["empty", "values", "no bytes"])
def test_checkpoints_with_next_to_nothing_in_them_are_whole(tmp_path: Path, state: dict[str, object]) -> None:
    holdfast.save(state, tmp_path / "small")
    report = holdfast.verify(tmp_path / "small")
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
    assert holdfast.verify(many_files, progress=lambda done, total: counts.append(count_open_data_files())).ok
    # At most ten jobs are taken, and 32 files stay open for the next, each with at most two descriptors.
    assert 0 < max(counts) <= 2 * (10 + 32)
    assert count_open_data_files() == 0


def test_progress_grows_to_the_size_on_disk(path: Path) -> None:
    calls: list[tuple[int, int]] = []
    report = holdfast.verify(path, progress=lambda done, total: calls.append((done, total)))
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert done[-1] == report.bytes
    assert {call[1] for call in calls} == {report.bytes}


def test_progress_is_complete_where_a_file_is_missing(many_files: Path) -> None:
    data_files(many_files)[0].unlink()
    done: list[int] = []
    report = holdfast.verify(many_files, progress=lambda count, total: done.append(count))
    assert done[-1] == report.bytes


def test_an_error_of_the_progress_callback_is_raised_and_no_file_stays_open(many_files: Path) -> None:
    calls: list[int] = []

    def refuse(done: int, total: int) -> None:
        calls.append(done)
        if len(calls) == 4:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        holdfast.verify(many_files, progress=refuse)
    assert count_open_data_files() == 0


# --- damaged data ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["model.bias", "scale", "phase", "notes"])
def test_a_flipped_bit_is_found_under_its_key_and_no_other(path: Path, key: str) -> None:
    offset = offset_of(path, key, within=1)
    flip(data_files(path)[0], offset)
    report = holdfast.verify(path)
    assert not report.ok
    assert report.damaged_keys == (key,)
    (damage,) = report.damage
    assert damage.file == data_files(path)[0].name
    assert damage.span[0] <= offset < damage.span[1]


def test_the_span_of_damage_is_the_block_that_has_it(path: Path) -> None:
    begin = offset_of(path, "model.weight")
    flip(data_files(path)[0], begin + MIB + 17)
    assert {damage.span for damage in holdfast.verify(path).damage} == {(begin + MIB, begin + 2 * MIB)}


def test_the_last_block_of_a_chunk_ends_with_it(path: Path) -> None:
    begin = offset_of(path, "model.weight")
    flip(data_files(path)[0], begin + 3 * MIB + 19)
    assert {damage.span for damage in holdfast.verify(path).damage} == {(begin + 3 * MIB, begin + 3 * MIB + 20)}


def test_tied_keys_are_damaged_together(path: Path) -> None:
    flip(data_files(path)[0], offset_of(path, "model.weight"))
    report = holdfast.verify(path)
    assert report.damaged_keys == ("model.weight", "model.head")
    assert len({damage.span for damage in report.damage}) == 1


def test_all_damage_is_collected_and_touching_blocks_are_joined(path: Path) -> None:
    begin = offset_of(path, "model.weight")
    for within in (0, MIB, 3 * MIB):
        flip(data_files(path)[0], begin + within)
    flip(data_files(path)[0], offset_of(path, "model.bias"))
    report = holdfast.verify(path)
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
        (damage,) = holdfast.verify(tmp_path / "bytes").damage
        assert damage.span[0] <= offset < damage.span[1]
        assert (damage.key is None) == (offset < 4096)
        file.write_bytes(content)
    assert holdfast.verify(tmp_path / "bytes").ok


@pytest.mark.parametrize("offset", [0, 9, 4095], ids=["length", "json", "padding"])
def test_a_damaged_header_is_found_and_the_data_is_still_checked(path: Path, offset: int) -> None:
    flip(data_files(path)[0], offset)
    flip(data_files(path)[0], offset_of(path, "scale"))
    report = holdfast.verify(path)
    assert (report.damage[0].key, report.damage[0].span) == (None, (0, 4096))
    assert report.damaged_keys == ("scale",)


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="no O_DIRECT here")
def test_files_read_past_the_page_cache_give_the_same_result(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("model.weight", "model.bias"):
        flip(data_files(path)[0], offset_of(path, key, within=2))
    warm = holdfast.verify(path).damage
    direct_reads: list[int] = []
    read = os.preadv

    def count(descriptor: int, views: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            direct_reads.append(offset)
        return read(descriptor, views, offset)

    # Without this flag one cannot ask whether a file is in the page cache, and so each is taken to be cold.
    monkeypatch.delattr(os, "RWF_NOWAIT")
    monkeypatch.setattr(os, "preadv", count)
    assert holdfast.verify(path).damage == warm
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
    keys = [f"layer{number}" for number in range(400)]
    file_of = {key: place_of(many_files, key)[0] for key in keys}
    lost, flipped = many_files / file_of["layer0"], many_files / file_of["layer399"]
    assert lost != flipped
    offset = offset_of(many_files, "layer399")
    flip(flipped, offset)
    damage_file(lost)
    report = holdfast.verify(many_files)
    assert set(report.damaged_keys) == {key for key in keys if file_of[key] == lost.name} | {"layer399"}
    assert set(report.damaged_files) == {lost.name, flipped.name}
    assert all(problem in damage.problem for damage in report.damage if damage.file == lost.name)


def test_a_block_that_the_disk_fails_to_read_is_damage_and_its_neighbours_are_not(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = offset_of(path, "model.weight")
    bad = begin + MIB + 4096 * 3
    read = os.preadv
    injected: list[int] = []

    def fail(descriptor: int, views: list[memoryview], offset: int, *flags: int) -> int:
        if not flags and offset <= bad < offset + views[0].nbytes:
            injected.append(offset)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(descriptor, views, offset, *flags)

    monkeypatch.setattr(os, "preadv", fail)
    report = holdfast.verify(path)
    assert injected
    assert report.damaged_keys == ("model.weight", "model.head")
    assert report.damage[0].span == (begin + MIB, begin + 2 * MIB)
    assert "disk" in report.damage[0].problem


def test_a_refusal_that_says_nothing_about_the_bytes_is_raised(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "preadv", refuse)
    with pytest.raises(StorageError, match="Permission denied"):
        holdfast.verify(path)


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
        holdfast.verify(path)
    assert caught.value.path == str(file)


def test_a_missing_index_is_damage_and_a_missing_manifest_is_no_checkpoint(path: Path) -> None:
    (index,) = path.glob("index-*")
    index.unlink()
    with pytest.raises(CorruptError, match="missing"):
        holdfast.verify(path)
    (path / "manifest.json").unlink()
    with pytest.raises(NotFoundError):
        holdfast.verify(path)


def test_a_checkpoint_that_is_replaced_meanwhile_is_verified_anew(path: Path) -> None:
    saves: list[Path] = []

    def replace_once(done: int, total: int) -> None:
        if not saves:
            saves.append(path)
            holdfast.save({"other": torch.ones(5)}, path)

    report = holdfast.verify(path, progress=replace_once)
    assert report.ok
    assert report.keys == 1
    assert saves


# --- headers that lie, with a digest that does not ------------------------------------------------------------------


Entry = tuple[str, str, tuple[int, ...], int, int]
"""Name, dtype and shape of what a header tells of, and where it begins and ends."""

FIRST: Entry = ("weight@[0:1]", "F32", (1,), 0, 4)
SECOND: Entry = ("weight@[1:4]", "F32", (3,), 4, 16)


class InTwo(torch.Tensor):
    """A tensor that is stored as its first element and the others."""

    def __create_chunk_list__(self) -> list[holdfast.ChunkStorageMetadata]:
        return [holdfast.ChunkStorageMetadata(torch.Size([low]), torch.Size([size])) for low, size in ((0, 1), (1, 3))]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)[:1] if index.offset[0] == 0 else self.as_subclass(torch.Tensor)[1:]


def save_with_header(path: Path, entries: Sequence[Entry]) -> None:
    """A checkpoint of "weight", [4] of float32 in two chunks, whose data file has a header of ``entries``."""
    weight = torch.arange(4, dtype=torch.float32).as_subclass(InTwo)
    holdfast.save({"weight": weight}, storage_writer=holdfast.NativeWriter(path, attempt="a"))
    said = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        for name, dtype, shape, begin, end in entries
    }
    (file,) = data_files(path)
    data = file.read_bytes()[4096:]
    header = (4088).to_bytes(8, "little") + json.dumps(said, separators=(",", ":")).encode().ljust(4088)
    file.write_bytes(header + data)
    # The digests are right: that of the file, of its header and its blocks' digests, and that of the manifest.
    blocks = b"".join(xxhash.xxh3_64_intdigest(part).to_bytes(8, "little") for part in (data[:4], data[4:]))
    manifest = json.loads((path / "manifest.json").read_bytes())
    manifest["files"][0]["digest"] = xxhash.xxh3_64_hexdigest(header + blocks)
    manifest["digest"] = "0" * 16
    unsealed = json.dumps(manifest, separators=(",", ":")).encode()
    sealed = unsealed[:-18] + xxhash.xxh3_64_hexdigest(unsealed).encode() + b'"}'
    (path / "manifest.json").write_bytes(sealed)


def test_a_tensor_in_pieces_is_whole_when_the_header_names_the_pieces(tmp_path: Path) -> None:
    save_with_header(tmp_path / "pieces", [FIRST, SECOND])
    report = holdfast.verify(tmp_path / "pieces")
    assert report.ok
    assert torch.equal(holdfast.load(tmp_path / "pieces")["weight"], torch.arange(4, dtype=torch.float32))


@pytest.mark.parametrize(
    "entries",
    [
        [FIRST, ("weight@[1:3]", "F32", (3,), 4, 16)],
        [FIRST, ("weight", "F32", (3,), 4, 16)],
        [FIRST, ("weight@[1:4]", "I32", (3,), 4, 16)],
        [FIRST, ("weight@[1:4]", "F32", (3, 1), 4, 16)],
        [FIRST, ("weight@[1:4]", "F32", (2,), 4, 12), ("more", "F32", (1,), 12, 16)],
        [("weight@[1:4]", "F32", (3,), 0, 12), ("weight@[0:1]", "F32", (1,), 12, 16)],
        [("weight", "F32", (4,), 0, 16)],
        [FIRST],
        [],
    ],
    ids=["box", "name", "dtype", "shape", "more", "order", "whole", "fewer", "none"],
)
def test_a_header_that_says_other_than_the_index_is_damage(tmp_path: Path, entries: list[Entry]) -> None:
    save_with_header(tmp_path / "lie", entries)
    report = holdfast.verify(tmp_path / "lie")
    assert [dataclasses.asdict(damage) for damage in report.damage] == [
        {
            "file": "data-a-0-0.safetensors",
            "key": None,
            "span": (0, 4096),
            "problem": "the header does not say what the index says",
        }
    ]


# --- levels: each finds what it looks at, says what it did not look at, and reads no more than it says ----------------


LEVELS = ("sizes", "coverage", "digests")


@pytest.fixture
def two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("holdfast._native.packer.DataFile.takes", lambda file, chunk: not file.entries)
    state = {"small": torch.arange(10), "large": torch.zeros(40 << 20, dtype=torch.uint8), "step": 1}
    holdfast.save(state, storage_writer=holdfast.NativeWriter(tmp_path / "checkpoint", attempt="a"))
    return tmp_path / "checkpoint"


def data_file(two_files: Path, *, large: bool) -> Path:
    return sorted(two_files.glob("data-*"), key=lambda file: file.stat().st_size)[-1 if large else 0]


@pytest.mark.parametrize(("level", "unchecked"), [("sizes", 2), ("coverage", 1), ("digests", 0)])
def test_a_whole_checkpoint_is_whole_at_every_level(two_files: Path, level: Any, unchecked: int) -> None:
    report = holdfast.verify(two_files, level=level)
    assert report.ok
    assert len(report.unchecked) == unchecked
    assert (report.files, report.keys) == (4, 3)
    sizes = {file.name: file.stat().st_size for file in two_files.iterdir()}
    read = {"sizes": ("manifest",), "coverage": ("manifest", "index"), "digests": ("",)}[level]
    assert report.bytes == sum(size for name, size in sizes.items() if name.startswith(read))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("damage", ["missing", "cut", "grown", "directory"])
def test_every_level_finds_and_names_files_that_are_not_there_in_their_size(
    two_files: Path, level: Any, damage: str
) -> None:
    file = data_file(two_files, large=False)
    if damage == "missing":
        file.unlink()
    elif damage == "directory":
        file.unlink()
        file.mkdir()
    else:
        os.truncate(file, file.stat().st_size + (-1 if damage == "cut" else 1))
    report = holdfast.verify(two_files, level=level)
    assert report.damaged_files == (file.name,)
    assert report.damaged_keys == ("small",)


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_finds_an_index_of_another_size(two_files: Path, level: Any) -> None:
    (index,) = two_files.glob("index-*")
    os.truncate(index, index.stat().st_size - 1)
    with pytest.raises(holdfast.CorruptError) as caught:
        holdfast.verify(two_files, level=level)
    assert caught.value.path == str(index)


def test_coverage_reads_the_index_and_sizes_do_not(two_files: Path) -> None:
    (index,) = two_files.glob("index-*")
    flip(index, 4100)
    assert holdfast.verify(two_files, level="sizes").ok
    for level in LEVELS[1:]:
        with pytest.raises(holdfast.CorruptError):
            holdfast.verify(two_files, level=level)  # type: ignore[arg-type]


def test_only_digests_find_a_flipped_bit_of_data(two_files: Path) -> None:
    flip(data_file(two_files, large=True), -1 + data_file(two_files, large=True).stat().st_size)
    assert [holdfast.verify(two_files, level=level).ok for level in LEVELS] == [True, True, False]  # type: ignore[arg-type]


def test_a_sample_reads_about_that_part_and_all_headers(two_files: Path) -> None:
    whole = holdfast.verify(two_files).bytes
    told: list[tuple[int, int]] = []
    report = holdfast.verify(two_files, sample=0.25, progress=lambda done, total: told.append((done, total)))
    assert report.ok
    assert "25 %" in report.unchecked[0]
    assert 0.02 * whole < report.bytes < 0.7 * whole
    assert told[-1] == (report.bytes, report.bytes)
    flip(data_file(two_files, large=True), 20)
    assert not holdfast.verify(two_files, sample=1e-9).ok, "headers are always read"


def test_samples_differ_and_find_damage_sooner_or_later(two_files: Path) -> None:
    file = data_file(two_files, large=True)
    flip(file, 8192)
    found = [holdfast.verify(two_files, sample=0.3).ok for _ in range(40)]
    assert False in found
    assert True in found


@pytest.mark.parametrize("options", [{"level": "all"}, {"sample": 0}, {"sample": 1.5}, {"sample": -1}])
def test_other_levels_and_samples_are_refused(two_files: Path, options: Any) -> None:
    with pytest.raises(ValueError, match="level"):
        holdfast.verify(two_files, **options)


def test_a_replaced_checkpoint_is_looked_at_anew(two_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.lstat
    looked_for: list[bool] = []

    def overtaken(name: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if str(name).endswith("index-a.safetensors") and not looked_for:
            looked_for.append(False)
            holdfast.save({"small": torch.ones(2)}, two_files)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(os, "lstat", overtaken)
    report = holdfast.verify(two_files, level="sizes")
    assert report.ok
    assert report.keys == 1
    assert looked_for
