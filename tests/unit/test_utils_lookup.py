"""holdfast.utils and holdfast.api in one process: lookups, views of files, the old call form, wrapped exceptions."""

from __future__ import annotations

import io
import os
import pickle
import traceback
import warnings
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import api as torch_api
from torch.distributed.checkpoint import utils as torch_utils

import holdfast
from holdfast import MetadataIndex, utils
from holdfast.api import CheckpointException, _is_wrapped_exception, _wrap_exception
from holdfast.errors import CheckpointError, CorruptError


def test_every_name_of_torch_is_here() -> None:
    taken = {
        *("_DistWrapper", "find_tensor_shard", "find_state_dict_object", "_all_gather_keys", "_assert_same_keys"),
        *("_element_wise_add", "_element_wise_sub", "_create_file_view", "_ReaderView", "_normalize_device_info"),
        *("_profile", "ENABLE_PROFILE", "_api_bc_check"),
    }
    assert all(hasattr(utils, name) and hasattr(torch_utils, name) for name in taken)
    public = {name for name in dir(torch_utils._DistWrapper) if not name.startswith("_")}
    assert public <= set(dir(utils._DistWrapper))


# Lookups.


def test_a_plain_tensor_is_found_by_its_name_and_by_its_origin() -> None:
    tensor = torch.ones(2, 3)
    state = {"a": tensor, "step": 7}
    assert utils.find_state_dict_object(state, MetadataIndex("a")) is tensor
    assert utils.find_state_dict_object(state, MetadataIndex("a", (0, 0))) is tensor
    assert utils.find_state_dict_object(state, MetadataIndex("step")) == 7
    assert utils.find_tensor_shard(torch.tensor(1.0), MetadataIndex("x", ())).item() == 1.0


@pytest.mark.parametrize(
    "index", [MetadataIndex("b"), MetadataIndex("a", (1, 0)), MetadataIndex("a", (0,)), MetadataIndex("step", (0,))]
)
def test_what_is_not_there_is_a_value_error_that_names_it(index: MetadataIndex) -> None:
    with pytest.raises(ValueError, match=index.fqn):
        utils.find_state_dict_object({"a": torch.ones(2, 3), "step": 7}, index)


def test_element_wise_sums_and_differences() -> None:
    assert utils._element_wise_add([1, 2, 3], torch.Size([10, 20, 30])) == [11, 22, 33]
    assert utils._element_wise_sub((5, 5), (2, 7)) == [3, -2]


def test_device_names() -> None:
    assert utils._normalize_device_info("cuda", 3) == "cuda:3"
    assert utils._normalize_device_info("cpu", 0) == "cpu"


def test_keys_of_a_lone_process() -> None:
    assert utils._all_gather_keys({"a": 1, "b": 2}) == {"a", "b"}
    utils._assert_same_keys({"a": 1})


# A part of a file.


@pytest.fixture
def base() -> io.BytesIO:
    return io.BytesIO(bytes(range(100)))


def test_a_view_ends_where_it_ends(base: io.BytesIO) -> None:
    view = utils._create_file_view(base, 10, 20)
    assert view.read() == bytes(range(10, 30))
    assert view.read() == b""
    assert view.tell() == 20
    buffer = bytearray(50)
    view.seek(15)
    assert view.readinto(buffer) == 5
    assert buffer[:6] == bytes([25, 26, 27, 28, 29, 0])
    assert view.readinto(buffer) == 0
    view.seek(40)
    assert view.read(5) == b""


def test_a_view_seeks_from_all_three_places(base: io.BytesIO) -> None:
    view = utils._create_file_view(base, 10, 20)
    assert (view.readable(), view.seekable(), view.writable()) == (True, True, False)
    assert view.seek(4) == 4
    assert view.seek(3, os.SEEK_CUR) == 7
    assert view.read(1) == b"\x11"
    assert view.seek(-2, os.SEEK_END) == 18
    assert view.read() == bytes([28, 29])
    for offset, whence in ((-1, os.SEEK_SET), (-21, os.SEEK_END), (0, 9)):
        with pytest.raises(ValueError, match="cannot seek"):
            view.seek(offset, whence)


def test_views_of_one_stream_have_positions_of_their_own(base: io.BytesIO) -> None:
    one, other = utils._create_file_view(base, 0, 10), utils._create_file_view(base, 50, 10)
    assert (one.read(2), other.read(2), one.read(2)) == (b"\0\1", b"23", b"\2\3")


def test_a_closed_view_cannot_be_read_and_leaves_its_stream_open(base: io.BytesIO) -> None:
    view = utils._create_file_view(base, 10, 20)
    view.close()
    assert view.closed
    assert not base.closed
    for use in (view.read, view.tell, lambda: view.seek(0), lambda: view.readinto(bytearray(1))):
        with pytest.raises(ValueError, match="closed"):
            use()


@pytest.mark.parametrize(("offset", "length"), [(-1, 5), (0, -5)])
def test_a_view_of_nothing_is_refused(base: io.BytesIO, offset: int, length: int) -> None:
    with pytest.raises(ValueError, match="no part"):
        utils._create_file_view(base, offset, length)


def test_torch_loads_through_a_view_in_the_middle_of_a_file() -> None:
    file = io.BytesIO()
    file.write(b"before")
    torch.save({"a": torch.arange(5)}, file)
    length = file.tell() - 6
    file.write(b"after")
    loaded = torch.load(utils._create_file_view(file, 6, length), weights_only=True)
    assert loaded["a"].tolist() == [0, 1, 2, 3, 4]


# The rest.


def test_the_profile_is_off_until_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with utils._profile():
        sum(range(10))
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(utils, "ENABLE_PROFILE", True)
    with utils._profile():
        sorted(range(10))
    assert "sorted" in capsys.readouterr().out


def test_the_old_call_form_is_taken_with_a_warning() -> None:
    @utils._api_bc_check
    def write(state: dict[str, Any], *, storage_writer: Any = None, planner: Any = None) -> tuple[Any, ...]:
        return state, storage_writer, planner

    with pytest.warns(UserWarning, match="storage_writer"):
        assert write({"a": 1}, "there", planner="p") == ({"a": 1}, "there", "p")
    with pytest.raises(TypeError, match="twice"):
        write({}, "there", storage_writer="here")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert write({}, storage_writer="here") == ({}, "here", None)
    with pytest.raises(TypeError, match="neither"):
        utils._api_bc_check(lambda state: state)


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_a_wrapped_exception_keeps_its_stack_and_can_be_pickled() -> None:
    wrapped = _wrap_exception(raised(ValueError("no")))
    assert _is_wrapped_exception(wrapped)
    assert torch_api._is_wrapped_exception(wrapped)
    error, stack = pickle.loads(pickle.dumps(wrapped))
    assert str(error) == "no"
    assert [frame.name for frame in stack] == ["raised"]
    assert "raise error" in (stack[0].line or "")


@pytest.mark.parametrize("other", [None, (1, 2), (ValueError(), None), (ValueError(), 1, 2), [ValueError(), 1]])
def test_other_things_are_no_wrapped_exceptions(other: Any) -> None:
    assert not _is_wrapped_exception(other)


def test_the_exception_of_torchs_name_is_an_ordinary_one_with_failures() -> None:
    assert CheckpointException is holdfast.CheckpointException is CheckpointError is utils.CheckpointException
    assert issubclass(CheckpointException, Exception)
    failures = {1: _wrap_exception(raised(ValueError("no")))}
    error = pickle.loads(pickle.dumps(CheckpointException("saving", failures)))
    assert list(error.failures) == [1]
    assert isinstance(error.failures[1][0], ValueError)
    assert str(error) == "saving"


def test_a_lone_process_gets_its_results_as_they_are_and_its_errors_with_failures() -> None:
    alone = utils._DistWrapper(None, False, 0)
    value = object()
    assert (alone.get_rank(), alone.get_world_size(), alone.is_coordinator) == (0, 1, True)
    assert alone.broadcast_object(value) is value
    assert alone.gather_object(value) == alone.all_gather_object(value) == [value]
    assert alone.scatter_object([value]) is value
    assert alone.reduce_scatter("step", lambda: value, lambda parts: parts) is value
    assert alone.all_reduce("step", lambda: value, lambda parts: parts[0]) is value
    assert alone.all_gather("step", lambda: value) == [value]
    assert alone.broadcast("step", lambda: value) is value
    alone.barrier()
    with pytest.raises(ValueError, match="needs a list"):
        alone.scatter_object(None)


def fail(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize("step", ["reduce_scatter", "all_reduce", "all_gather", "broadcast"])
def test_the_error_of_a_lone_process_is_kept(step: str) -> None:
    alone = utils._DistWrapper(None, False, 0)
    reduce_too = [lambda parts: parts] if "reduce" in step else []
    with pytest.raises(CheckpointException, match="rank 0: making it failed: ValueError: no") as caught:
        getattr(alone, step)("making it", lambda: fail(ValueError("no")), *reduce_too)
    error, stack = pickle.loads(pickle.dumps(caught.value)).failures[0]
    assert isinstance(error, ValueError)
    assert isinstance(stack, traceback.StackSummary)
    assert (stack[-1].name, stack[-1].line) == ("fail", "raise error")
    assert caught.value.__cause__ is caught.value.failures[0][0]
    with pytest.raises(CorruptError, match="rank 0: bad"):
        getattr(alone, step)("making it", lambda: fail(CorruptError("bad")), *reduce_too)
    with pytest.raises(KeyboardInterrupt):
        getattr(alone, step)("making it", lambda: fail(KeyboardInterrupt()), *reduce_too)
