"""holdfast.format_utils: torch's two conversions, in Python and from a shell, against torch's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import format_utils as torch_format_utils

import holdfast
from holdfast import format_utils
from holdfast.errors import AlreadyPublishedError, NotFoundError, UnsafeError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def state() -> dict[str, Any]:
    return {"model": {"weight": torch.arange(6.0).view(2, 3)}, "step": 3, "names": ["a", "b"]}


class Custom:
    pass


def test_every_public_name_of_torch_is_here() -> None:
    assert sorted(format_utils.__all__) == sorted(torch_format_utils.__all__)


def test_what_torch_writes_is_converted_here_and_the_other_way_round(tmp_path: Path, same: Callable[..., None]) -> None:
    torch.save(state(), tmp_path / "a.pt")
    torch_format_utils.torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "theirs")
    format_utils.dcp_to_torch_save(tmp_path / "theirs", tmp_path / "b.pt")
    same(torch.load(tmp_path / "b.pt", weights_only=True), state())

    format_utils.torch_save_to_dcp(tmp_path / "b.pt", tmp_path / "ours")
    torch_format_utils.dcp_to_torch_save(tmp_path / "ours", tmp_path / "c.pt")
    same(torch.load(tmp_path / "c.pt", weights_only=True), state())


def test_results_replace_what_is_of_the_same_kind_only(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "a.pt")
    for _ in range(2):
        format_utils.torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "torch")
        format_utils.dcp_to_torch_save(tmp_path / "torch", tmp_path / "b.pt")
    holdfast.save(state(), tmp_path / "native")
    with pytest.raises(AlreadyPublishedError):
        format_utils.torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "native")
    format_utils.dcp_to_torch_save(tmp_path / "native", tmp_path / "b.pt")


def test_pickles_need_permission(tmp_path: Path) -> None:
    torch.save({"object": Custom()}, tmp_path / "a.pt")
    with pytest.raises(UnsafeError):
        format_utils.torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "torch")
    format_utils.torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "torch", allow_pickle=True)


def test_the_command_converts_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(state(), tmp_path / "a.pt")
    assert format_utils.main(["torch_to_dcp", str(tmp_path / "a.pt"), str(tmp_path / "torch")]) == 0
    assert format_utils.main(["dcp_to_torch", str(tmp_path / "torch"), str(tmp_path / "b.pt")]) == 0
    assert torch.load(tmp_path / "b.pt", weights_only=True)["step"] == 3
    assert capsys.readouterr().out.count("converted ") == 2


def test_the_command_fails_where_there_is_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for mode in ("torch_to_dcp", "dcp_to_torch"):
        assert format_utils.main([mode, str(tmp_path / "missing"), str(tmp_path / "target")]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 2
    with pytest.raises(SystemExit) as caught:
        format_utils.main(["sideways", "a", "b"])
    assert caught.value.code == 2
    with pytest.raises(NotFoundError):
        format_utils.torch_save_to_dcp(tmp_path / "missing", tmp_path / "target")


def test_a_folder_that_holds_other_files_takes_a_checkpoint_and_keeps_them(tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "a.pt")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "plots").mkdir()
    format_utils.torch_save_to_dcp(tmp_path / "a.pt", folder)
    assert holdfast.load(folder)["step"] == 3
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / "plots").is_dir()
