"""What a user reads after a slip: one short line that is right, and nothing else that is not needed."""

from __future__ import annotations

import enum
import math
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast import CheckpointError, InvalidStateError, LoadOptions, MismatchError, NotACheckpointError

STATE = {"w": torch.ones(3), "n": 1}


def said(action: Callable[[], object], kind: type[Exception] = CheckpointError) -> str:
    """What the error of ``action`` says; all messages are one line."""
    with pytest.raises(kind) as caught:
        action()
    message = str(caught.value)
    assert message == message.strip()
    assert "\n" not in message
    return message


def test_swapped_arguments_are_told(path: str) -> None:
    swapped: Any = path
    state: Any = STATE
    for name, call in (("save", holdfast.save), ("async_save", holdfast.async_save)):
        assert said(lambda call=call: call(swapped, state), ValueError) == (
            f"the path comes second: {name}(state, path), not a dict"
        )
        assert said(lambda call=call: call(state, 5), ValueError).endswith("(state, path), not a int")
    assert said(lambda: holdfast.load(swapped, state), ValueError) == (
        "the state comes first: load(state, path); the first argument is a path"
    )
    assert said(lambda: holdfast.save(swapped), ValueError).endswith("save(state, path)")
    step: Any = holdfast.Step(step=1, path=path)
    assert said(lambda: holdfast.load({}, step), ValueError) == "the path comes second: load(state, path), not a Step"


def test_what_is_no_dict_is_refused_by_save_and_async_save(path: str) -> None:
    state: Any = [torch.ones(2)]
    for call in (holdfast.save, holdfast.async_save):
        assert "a state is a dict of names to values, not a list" in said(lambda call=call: call(state, path))


def test_casting_is_advised_only_where_it_helps(path: str) -> None:
    holdfast.save({"number": torch.ones(3, dtype=torch.int64), "half": torch.ones(3, dtype=torch.float16)}, path)
    assert "cast" not in said(lambda: holdfast.load({"number": torch.ones(3)}, path), MismatchError)
    assert "pass LoadOptions(cast=True)" in said(lambda: holdfast.load({"half": torch.ones(3)}, path), MismatchError)
    cast = LoadOptions(cast=True)
    message = said(lambda: holdfast.load({"number": torch.ones(3)}, path, options=cast), MismatchError)
    assert message.endswith("to load what fits; cast=True converts floating types only.")


def test_a_container_in_the_place_of_a_value_is_told(path: str) -> None:
    holdfast.save({"d": {"a": 1, "b": 2}}, path)
    message = said(lambda: holdfast.load({"d": None}, path), MismatchError)
    assert message.endswith("The checkpoint has keys below 'd': have an empty dict there to load them.")
    target: dict[str, Any] = {"d": {}}
    holdfast.load(target, path)
    assert target == {"d": {"a": 1, "b": 2}}


def test_the_directory_of_checkpoints_is_told_from_one(tmp_path: Path) -> None:
    holdfast.save(STATE, tmp_path / "run" / "step-1")
    for read in (holdfast.read, holdfast.open, holdfast.verify, lambda path: holdfast.load({}, path)):
        message = said(lambda read=read: read(tmp_path / "run"), NotACheckpointError)
        assert message.endswith(f"there are checkpoints below it, such as '{tmp_path / 'run' / 'step-1'}'")


def test_arguments_of_another_kind_are_told(path: str) -> None:
    wrong: Any = [1]
    for call in (holdfast.save, holdfast.async_save):
        message = said(lambda call=call: call(STATE, path, user_metadata=wrong), ValueError)
        assert message == "user_metadata is a dict, not [1]"
    holdfast.save(STATE, path)
    for types in (enum.Enum("Color", ["RED"]), ["Color"], "Color", Path):
        others: Any = types
        assert "types is a list of classes, not" in said(lambda others=others: LoadOptions(types=others), ValueError)
        assert "types is a list of classes" in said(lambda others=others: holdfast.read(path, types=others), ValueError)


def test_advice_is_given_once(path: str) -> None:
    message = said(lambda: holdfast.save({"a": object()}, path), InvalidStateError)
    assert message.count("convert it") == 1
    assert message.endswith("or pass allow_pickle=True on both sides")


class _Foreign(holdfast.DefaultSavePlanner):
    def __init__(self, message: str) -> None:
        super().__init__()
        self.message = message

    def create_local_plan(self) -> holdfast.SavePlan:
        raise RuntimeError(self.message)


@pytest.mark.parametrize(
    ("message", "told"),
    [("\n\n  it broke\nhere", "RuntimeError: it broke"), ("", "RuntimeError"), ("one\ntwo", "RuntimeError: one")],
)
def test_errors_of_others_become_one_line(path: str, message: str, told: str) -> None:
    found = said(lambda: holdfast.save(STATE, path, planner=_Foreign(message)))
    assert found == f"planning the save failed: {told}"


def test_a_target_that_nobody_touched_is_not_called_undefined(path: str) -> None:
    holdfast.save({"w": torch.ones(1 << 16)}, path)
    (data,) = Path(path).glob("data-*")
    whole = data.read_bytes()
    data.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    undefined = "The contents of the target are undefined now."
    assert said(lambda: holdfast.load({"w": torch.ones(1 << 16)}, path)).endswith(undefined)
    assert undefined not in said(lambda: holdfast.read(path))
    manifest = Path(path, "manifest.json")
    manifest.write_bytes(manifest.read_bytes().replace(b"writer", b"wrIter"))
    assert undefined not in said(lambda: holdfast.load({"w": torch.ones(1 << 16)}, path))


class Colour(enum.Enum):
    RED = 1


class Name(str, enum.Enum):
    ONE = "one"


@pytest.mark.parametrize("key", [Colour.RED, Name.ONE])
def test_an_enum_as_a_key_is_called_a_key(path: str, key: enum.Enum) -> None:
    message = said(lambda: holdfast.save({"x": {key: torch.ones(2)}}, path), InvalidStateError)
    assert f"lies under a dict key of type {__name__}.{type(key).__name__}, which" in message
    assert message.endswith("use its .name or .value as the key")


@pytest.mark.parametrize("deadline_s", [-1, 0, math.nan, "5", None])
def test_deadlines_are_checked_when_the_options_are_made(deadline_s: Any) -> None:
    for options in (holdfast.SaveOptions, LoadOptions):
        message = said(lambda options=options: options(deadline_s=deadline_s), ValueError)
        assert message == (
            f"deadline_s is a positive number of seconds, or math.inf for no deadline, not {deadline_s!r}"
        )


def test_choices_are_checked_when_the_options_are_made() -> None:
    some: Any = "some"
    assert said(lambda: holdfast.SaveOptions(replica_check=some), ValueError) == (
        "replica_check is 'sample', 'all', 'off' or a list of keys, not 'some'"
    )
    assert said(lambda: LoadOptions(share=some), ValueError) == "share is 'host', 'job' or 'off', not 'some'"


@pytest.mark.parametrize(
    "call",
    [lambda path: holdfast.load({}, path), holdfast.load, holdfast.read, holdfast.open, holdfast.verify],
    ids=["load", "load(path)", "read", "open", "verify"],
)
def test_a_path_that_is_not_there_has_a_short_traceback(path: str, call: Callable[[str], object]) -> None:
    with pytest.raises(holdfast.NotFoundError, match="no such directory") as caught:
        call(path)
    assert "".join(traceback.format_exception(caught.value)).count("\n") <= 20


def calls_at(path: str) -> list[Callable[[], object]]:
    return [
        lambda: holdfast.load({"w": torch.ones(3)}, path),
        lambda: holdfast.read(path),
        lambda: holdfast.open(path),
        lambda: holdfast.verify(path),
    ]


def test_files_of_other_programs_are_called_by_their_names(tmp_path: Path) -> None:
    one, other = tmp_path / "it's.pt", tmp_path / "notes.txt"
    torch.save(STATE, one)
    other.write_text("PKW")
    for call in calls_at(str(one)):
        message = said(call, NotACheckpointError)
        assert "is a .pt file, not a checkpoint; make one of it: holdfast convert " in message
    for call in calls_at(str(other)):
        assert said(call, NotACheckpointError).endswith("is a file; a checkpoint is a directory")


def test_a_pipe_is_not_opened_to_find_out_what_it_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for call in calls_at(str(tmp_path / "pipe")):
        assert said(call, NotACheckpointError).endswith("is a file; a checkpoint is a directory")


def test_a_reader_of_native_checkpoints_says_who_reads_a_hugging_face_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    for path, kind in ((tmp_path, "Hugging Face folder"), (tmp_path / "model.safetensors", ".safetensors file")):
        reader = holdfast.NativeReader(path)
        message = said(lambda reader=reader: holdfast.load({}, storage_reader=reader), NotACheckpointError)  # type: ignore[misc]
        assert f"is a {kind}, not a " in message
        assert message.endswith("holdfast.load, open and convert find that out from the path and read it as it is")
