"""What describes a checkpoint: read from its files or from bytes, checked, and followed where it is replaced."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import holdfast
from holdfast._native.catalog import decode_catalog, read_catalog, read_catalog_bytes, was_replaced
from holdfast._native.index import encode_index
from holdfast._native.manifest import IndexEntry, encode_manifest
from holdfast._native.publish import read_manifest
from holdfast._values.digest import digest, to_hex


def save(path: Path, state: dict[str, Any], attempt: str = "one") -> Path:
    holdfast.save(state, storage_writer=holdfast.NativeWriter(path, attempt=attempt, user_metadata={"run": 7}))
    return path


def tied_state() -> dict[str, Any]:
    tensor = torch.arange(12.0).reshape(3, 4)
    return {
        "step": 5,
        "first": tensor,
        "again": tensor,
        "list": [torch.ones(2, dtype=torch.int8), {3: "x"}],
        "bytes": bytes(100_000),
    }


def test_a_catalog_comes_from_bytes_as_from_its_files(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoint", tied_state())
    data = read_catalog_bytes(path)
    assert data.manifest == (path / "manifest.json").read_bytes()
    assert data.index == next(path.glob("index-*")).read_bytes()
    for given in (data, dataclasses.replace(data, decoded=None)):
        assert decode_catalog(path, given).manifest == read_catalog(path).manifest


def test_bytes_that_nobody_wrote_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoint", tied_state())
    data = read_catalog_bytes(path)
    for damaged in (
        dataclasses.replace(data, manifest=data.manifest.replace(b"first", b"fir5t"), decoded=None),
        dataclasses.replace(data, index=data.index[:-1]),
    ):
        with pytest.raises(holdfast.CorruptError):
            decode_catalog(path, damaged)


def test_a_catalog_knows_keys_rows_and_values(tmp_path: Path) -> None:
    catalog = read_catalog(save(tmp_path / "checkpoint", tied_state()))
    assert set(catalog.tensor_ids) == {"first", "again", "list.0", "bytes"}
    assert catalog.values == {"step": 5, "list.1.3": "x"}
    assert catalog.rows_of("first") == catalog.rows_of("again")
    assert len(catalog.rows_of("first")) == 1
    assert catalog.storing_id("again") == catalog.tensor_ids["first"]
    entry = catalog.entry("again")
    assert entry is not None
    assert entry.alias_of == "first"
    assert catalog.entry("step") is None
    assert catalog.entry("nothing") is None
    assert catalog.file_path(0) == str(tmp_path / "checkpoint" / "data-one-0-0.safetensors")


def test_the_metadata_says_it_in_the_words_of_the_protocol(tmp_path: Path) -> None:
    metadata = read_catalog(save(tmp_path / "checkpoint", tied_state())).metadata()
    assert list(metadata.state_dict_metadata) == ["step", "first", "again", "list.0", "list.1.3", "bytes"]
    first = metadata.state_dict_metadata["first"]
    assert isinstance(first, holdfast.TensorStorageMetadata)
    assert (first.properties.dtype, first.size) == (torch.float32, torch.Size([3, 4]))
    assert [(chunk.offsets, chunk.sizes) for chunk in first.chunks] == [(torch.Size([0, 0]), torch.Size([3, 4]))]
    assert isinstance(metadata.state_dict_metadata["step"], holdfast.BytesStorageMetadata)
    assert isinstance(metadata.state_dict_metadata["bytes"], holdfast.BytesStorageMetadata)
    assert metadata.user_metadata == {"run": 7}
    assert metadata.storage_meta is not None
    assert metadata.storage_meta.save_id == "one"


def test_reading_a_catalog_opens_no_data_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "checkpoint", tied_state())
    opened: list[str] = []
    real = os.open

    def recording(name: Any, *args: Any, **kwargs: Any) -> int:
        opened.append(os.path.basename(os.fspath(name)))
        return real(name, *args, **kwargs)

    monkeypatch.setattr(os, "open", recording)
    read_catalog(path)
    assert opened == ["manifest.json", "index-one.safetensors"]


def test_a_replacement_between_manifest_and_index_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "checkpoint", {"a": torch.zeros(3)}, "one")
    attempts = iter(["two", "three"])
    replaced: list[str] = []
    real = os.open

    def overtaking(name: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if os.path.basename(os.fspath(name)).startswith("index") and not flags & os.O_CREAT:
            attempt = next(attempts, None)
            if attempt is not None:
                save(path, {"a": torch.ones(4)}, attempt)
                replaced.append(attempt)
        return real(name, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", overtaking)
    catalog = read_catalog(path)
    assert replaced == ["two", "three"]
    assert catalog.manifest.attempt == "three"
    assert catalog.index.length.tolist() == [[4]]


def test_a_missing_index_is_damage_when_nothing_was_replaced(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoint", tied_state())
    os.unlink(path / "index-one.safetensors")
    with pytest.raises(holdfast.CorruptError, match="is missing") as caught:
        read_catalog(path)
    assert caught.value.path == str(path / "index-one.safetensors")


def test_an_index_that_does_not_fit_its_manifest(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoint", {"a": torch.zeros(3)})
    other = save(tmp_path / "other", {"a": torch.zeros(4)})
    os.replace(other / "index-one.safetensors", path / "index-one.safetensors")
    with pytest.raises(holdfast.CorruptError, match="not the index that was written"):
        read_catalog(path)


def test_was_replaced_tells_of_another_attempt_or_of_none(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoint", {"a": 1}, "one")
    assert not was_replaced(str(path), "one")
    assert was_replaced(str(path), "two")
    (path / "manifest.json").write_text("damaged")
    assert not was_replaced(str(path), "two")
    os.unlink(path / "manifest.json")
    assert was_replaced(str(path), "two")
    assert was_replaced(str(tmp_path / "nothing"), "two")


def test_data_files_are_opened_once_and_closed_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast._native.packer.DataFile.takes", lambda file, chunk: not file.entries)
    catalog = read_catalog(save(tmp_path / "checkpoint", {"a": torch.zeros(30), "b": torch.ones(30)}))
    files = catalog.data_files()
    with files.lend(0) as (first, _), files.lend(0) as (again, _):
        assert again is first
    buffer = bytearray(120)
    with files.lend(1) as (second, _):
        second.read_into(memoryview(buffer), int(catalog.index.offset[1]))
    with files.lend(0) as (again, _):
        assert again is first
    assert np.frombuffer(buffer, dtype=np.float32).tolist() == [1.0] * 30
    assert files.bytes_read == 120
    files.close()
    files.close()
    assert files.bytes_read == 120
    with files.lend(0) as (again, _):
        assert again is not first
    files.close()


@pytest.mark.parametrize("change", [-1, 1])
def test_a_data_file_of_another_size_is_refused(tmp_path: Path, change: int) -> None:
    catalog = read_catalog(save(tmp_path / "checkpoint", tied_state()))
    path = catalog.file_path(0)
    os.truncate(path, os.stat(path).st_size + change)
    with pytest.raises(holdfast.CorruptError, match=r"instead of \d+") as caught, catalog.data_files().lend(0):
        pass
    assert caught.value.path == path


def test_a_missing_data_file_is_named(tmp_path: Path) -> None:
    catalog = read_catalog(save(tmp_path / "checkpoint", tied_state()))
    os.unlink(catalog.file_path(0))
    with pytest.raises(holdfast.CorruptError, match="is missing") as caught, catalog.data_files().lend(0):
        pass
    assert caught.value.path == catalog.file_path(0)


def test_an_index_that_makes_no_sense_is_refused_under_right_digests(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoint", {"weight": torch.arange(6.0)})
    manifest, index = read_manifest(str(path)), read_catalog(path).index
    forged = encode_index(dataclasses.replace(index, lo=index.lo + 1))
    (path / manifest.index.name).write_bytes(forged)
    entry = IndexEntry(name=manifest.index.name, bytes=len(forged), digest=to_hex(digest(forged)))
    (path / "manifest.json").write_bytes(encode_manifest(msgspec.structs.replace(manifest, index=entry)))
    with pytest.raises(holdfast.CorruptError, match="'weight' do not tile it"):
        read_catalog(path)


@pytest.mark.parametrize("name", ["manifest.json", "index-one.safetensors", "data-one-0-0.safetensors"])
def test_a_refusal_of_the_system_is_not_taken_for_a_missing_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = save(tmp_path / "checkpoint", {"weight": torch.arange(6.0)})
    real = os.open

    def refuse(file: str, *args: Any, **kwargs: Any) -> int:
        if os.path.basename(file) == name:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(file, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(holdfast.StorageError) as caught:
        holdfast.load(path)
    assert caught.value.errno == errno.EMFILE


def test_something_else_in_place_of_a_data_file_is_no_data_file(tmp_path: Path) -> None:
    catalog = read_catalog(save(tmp_path / "checkpoint", {"weight": torch.arange(6.0)}))
    catalog.check_files()
    path = Path(catalog.file_path(0))
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(holdfast.CorruptError, match="is not a regular file"):
        catalog.check_files()
