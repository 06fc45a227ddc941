"""The error tree: drawn as it is, every error through pickle and back, one line each."""

from __future__ import annotations

import copy
import errno
import inspect
import pickle
import re
import traceback
from collections.abc import Iterator
from typing import Any

import pytest

import holdfast
from holdfast import errors
from holdfast.errors import CheckpointError, Difference

DIFFERENCE = Difference(key="w", kind="shape", stored="[2]", wanted="[3]")
ARGUMENTS: dict[str, dict[str, Any]] = {
    "InvalidStateError": {"key": "model.w"},
    "MismatchError": {"differences": [DIFFERENCE, Difference(key="x", kind="missing", stored="", wanted="")]},
    "CorruptError": {"path": "/data/file", "key": "w", "span": (4096, 8192)},
    "UnsafeError": {"key": "value"},
    "StorageError": {"errno": errno.ENOSPC, "path": "/data/file"},
}


def error_classes() -> list[type[CheckpointError]]:
    return [
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, CheckpointError) and value.__module__ == errors.__name__
    ]


def unique_classes() -> list[type[CheckpointError]]:
    return list(dict.fromkeys(error_classes()))


@pytest.mark.parametrize("cls", unique_classes(), ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_every_error_survives_pickling(cls: type[CheckpointError], protocol: int) -> None:
    error = cls("it failed; do something", **ARGUMENTS.get(cls.__name__, {}))
    error.failures = {3: (ValueError("of rank 3"), traceback.StackSummary.from_list([("job.py", 3, "main", "save()")]))}
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is cls
    assert str(again) == again.message == "it failed; do something"
    assert again.args == error.args
    assert {name: value for name, value in vars(again).items() if name != "failures"} == {
        name: value for name, value in vars(error).items() if name != "failures"
    }
    assert repr(again.failures) == repr(error.failures)
    assert type(copy.deepcopy(error)) is cls


@pytest.mark.parametrize("cls", unique_classes(), ids=lambda cls: cls.__name__)
def test_every_error_is_public(cls: type[CheckpointError]) -> None:
    assert getattr(holdfast, cls.__name__) is cls
    assert cls.__name__ in errors.__all__
    assert inspect.getdoc(cls)


def drawn_tree() -> Iterator[tuple[str, str]]:
    """(class, base) of each line that the docstring of the module draws."""
    bases = {0: "CheckpointError"}
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"    ([│ ]*)[├└]── (\w+)", line)
        if found is not None:
            level = len(found[1]) // 4 + 1
            bases[level] = found[2]
            yield found[2], bases[level - 1]


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn = dict(drawn_tree())
    actual = {cls.__name__: cls.__bases__[0].__name__ for cls in unique_classes() if cls is not CheckpointError}
    assert drawn == actual


def test_the_base_goes_by_the_name_of_torch_too() -> None:
    assert holdfast.CheckpointException is holdfast.CheckpointError
    assert issubclass(holdfast.CheckpointError, Exception)
    error = holdfast.CheckpointException("it failed", {0: (ValueError("x"), traceback.StackSummary())})
    assert list(error.failures) == [0]
    assert CheckpointError("no failures").failures == {}


def test_a_job_that_resumes_catches_nothing_there_by_one_name(path: str, tmp_path: Any) -> None:
    for place in (path, str(tmp_path)):
        with pytest.raises(holdfast.NotFoundError):
            holdfast.load(place)
    (tmp_path / "file").write_text("something else")
    for place in (str(tmp_path), str(tmp_path / "file")):
        with pytest.raises(holdfast.NotACheckpointError):
            holdfast.load(place)


def test_differences_read_as_sentences() -> None:
    assert str(DIFFERENCE) == "'w' has shape [2] in the checkpoint but [3] in the target"
    missing = Difference(key="x", kind="missing", stored="nothing", wanted="a tensor")
    assert str(missing) == "'x' is not in the checkpoint"
    error = errors.MismatchError.of([DIFFERENCE, missing], advice="Fix it.")
    assert error.message == f"the target does not fit the checkpoint: {DIFFERENCE}; {missing}. Fix it."
    assert error.differences == (DIFFERENCE, missing)


def test_the_errno_of_the_system_is_kept() -> None:
    refused = OSError(errno.ENOSPC, "No space left on device")
    error = errors.StorageError.from_os(refused, "write", "/data/file")
    assert (error.errno, error.path) == (errno.ENOSPC, "/data/file")
    assert error.message == "cannot write '/data/file': No space left on device"
    nameless = errors.StorageError.from_os(OSError("odd"), "read", "/data/file")
    assert nameless.message == "cannot read '/data/file': odd"
    assert nameless.errno is None


def test_paths_may_be_path_objects(tmp_path: Any) -> None:
    assert errors.CorruptError("x", path=tmp_path).path == str(tmp_path)
    assert errors.StorageError("x", path=tmp_path).path == str(tmp_path)
    assert errors.CorruptError("x").path is None
