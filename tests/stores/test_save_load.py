"""States go to an object store and come back, in one part or several, whole or by the range."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import obstore
import pytest
import torch
from obstore.store import LocalStore
from typer.testing import CliRunner

import holdfast
from holdfast.cli import app
from tests.stores.conftest import MIB, Place

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
]


def nested_state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    tied = torch.randn(7, 5, generator=generator)
    bits = torch.randint(0, 2, (24,), dtype=torch.uint8, generator=generator)
    return {
        "dtypes": {str(dtype): bits.to(dtype) for dtype in DTYPES},
        "layers": [{"weight": tied, "bias": torch.randn(5, generator=generator)}, {"weight": tied}],
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3.5),
        "values": {"text": "ä\n", "none": None, "tuple": (1, 2.5, True), "bytes": b"\x00\xff", 7: "seven", "no": {}},
    }


def zeros_like(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: zeros_like(value) for key, value in state.items()}
    return [zeros_like(each) for each in state] if isinstance(state, list) else state


def large_state(seed: int) -> dict[str, Any]:
    """More than three parts of 5 MiB, the last of them an odd one, and not as whole blocks."""
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in (9 * MIB + 17, 7 * MIB)]
    return {"first": draw[0], "second": draw[1].view(7, MIB), "seed": seed}


def test_a_nested_state_comes_back(place: Place, same: Callable[..., None]) -> None:
    url, saved = f"{place.url}/a", nested_state()
    holdfast.save(saved, url, user_metadata={"who": "we", "n": [1, 2]})
    into = zeros_like(saved)
    report = holdfast.load(into, url)
    same(into, saved)
    same(holdfast.read(url), saved)
    assert report.bytes_read > 0
    with holdfast.open(url) as checkpoint:
        assert checkpoint.user_metadata == {"who": "we", "n": [1, 2]}
        assert checkpoint["layers.1.weight"][:].equal(saved["layers"][1]["weight"])
        assert checkpoint["values.text"] == "ä\n"
    assert holdfast.verify(url).ok
    kinds = sorted(name.partition("-")[0] for name in place.objects("a"))
    assert kinds == ["data", "index", "manifest.json"]


def test_more_than_one_part_and_only_what_is_asked_for_is_read(place: Place, same: Callable[..., None]) -> None:
    url, saved = f"{place.url}/large", large_state(1)
    holdfast.save(saved, url)
    into = zeros_like(saved)
    holdfast.load(into, url)
    same(into, saved)
    assert place.objects("large")[place.data_of("large").partition("/")[2]] > 16 * MIB
    with holdfast.open(url) as checkpoint:
        rows = checkpoint["second"][3:5, 100:200]
        assert rows.equal(saved["second"][3:5, 100:200])
        # A row is a block of 1 MiB; the header is between the blocks and the start.
        assert 0 < checkpoint.bytes_read <= 4 * MIB
        assert checkpoint["first"][5 * MIB : 5 * MIB + 9].equal(saved["first"][5 * MIB : 5 * MIB + 9])


def test_a_part_may_be_more_than_the_memory_that_is_used_for_it(bucket: Place, same: Callable[..., None]) -> None:
    """All slabs of a small ring were in one part, which waited for the next."""
    holdfast.Store(bucket.url, config=bucket.store.config, part_bytes=128 * MIB)
    saved = {"x": torch.arange(5 * MIB, dtype=torch.int64)}
    holdfast.save(saved, f"{bucket.url}/a")
    same(holdfast.read(f"{bucket.url}/a"), saved)


def test_what_is_replaced_is_gone(place: Place, same: Callable[..., None]) -> None:
    url = f"{place.url}/a"
    holdfast.save(nested_state(), url)
    before = place.objects("a")
    holdfast.save({"x": torch.arange(9)}, url)
    same(holdfast.read(url), {"x": torch.arange(9)})
    after = place.objects("a")
    assert len(after) == 3
    assert not (before.keys() & after.keys()) - {"manifest.json"}
    assert holdfast.sweep(place.url).leftovers == ()


def test_what_must_not_be_replaced_stays(place: Place, same: Callable[..., None]) -> None:
    url = f"{place.url}/a"
    holdfast.save({"x": 1}, url, overwrite=False)
    before = place.objects("a")
    with pytest.raises(holdfast.AlreadyPublishedError, match="a"):
        holdfast.save({"x": 2}, url, overwrite=False)
    assert place.objects("a") == before
    same(holdfast.read(url), {"x": 1})


def test_other_folders_and_longer_names_are_nothing_to_it(place: Place, same: Callable[..., None]) -> None:
    for number, name in enumerate(("a", "ab", "a/b")):
        holdfast.save({"x": number}, f"{place.url}/{name}")
    holdfast.delete(f"{place.url}/a")
    same(holdfast.read(f"{place.url}/ab"), {"x": 1})
    same(holdfast.read(f"{place.url}/a/b"), {"x": 2})
    with pytest.raises(holdfast.NotFoundError):
        holdfast.read(f"{place.url}/a")


@pytest.mark.parametrize("name", ["with space", "a~b", "a%20b", "a+b=c", "é", "A[1]{2}"])
def test_names_of_all_sorts(place: Place, name: str, same: Callable[..., None]) -> None:
    root = f"{place.url}/{name}"
    holdfast.save({"x": torch.arange(3)}, f"{root}/step-4/")
    same(holdfast.read(f"{root}/step-4"), {"x": torch.arange(3)})
    assert [step.step for step in holdfast.Steps(root).steps()] == [4]
    assert holdfast.sweep(root).leftovers == ()
    assert holdfast.verify(f"{root}/step-4").ok


def test_a_directory_copied_up_and_a_folder_copied_down(
    place: Place, tmp_path: Path, same: Callable[..., None]
) -> None:
    saved = nested_state()
    holdfast.save(saved, tmp_path / "here")
    for file in (tmp_path / "here").iterdir():
        place.put(f"up/{file.name}", file.read_bytes())
    same(holdfast.read(f"{place.url}/up"), saved)
    assert holdfast.verify(f"{place.url}/up").ok
    again = LocalStore(tmp_path / "again", mkdir=True)
    for name in place.objects("up"):
        obstore.put(again, name, place.get(f"up/{name}"))
    same(holdfast.read(tmp_path / "again"), saved)
    assert holdfast.verify(tmp_path / "again").ok


def test_the_command_line_shows_it(place: Place) -> None:
    holdfast.save({"w": torch.zeros(4, 3), "step": 7}, f"{place.url}/a")
    shown = CliRunner().invoke(app, ["show", f"{place.url}/a"])
    assert shown.exit_code == 0, shown.output
    assert "w" in shown.output
    as_json = CliRunner().invoke(app, ["show", "--json", f"{place.url}/a"])
    assert as_json.exit_code == 0, as_json.output
    assert "step" in json.dumps(json.loads(as_json.stdout))
    missing = CliRunner().invoke(app, ["show", f"{place.url}/nothing"])
    assert missing.exit_code != 0


def test_the_folder_above_says_where_the_checkpoints_are(place: Place) -> None:
    holdfast.save({"x": 1}, f"{place.url}/run/step-3")
    with pytest.raises(holdfast.NotACheckpointError, match="step-3"):
        holdfast.read(f"{place.url}/run")
