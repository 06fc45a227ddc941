"""Errors on their way to other ranks: classes kept, ranks named, hostile exceptions harmless."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from holdfast._ranks.ranks import Failure, combine, describe, pack, unpack
from holdfast._torch_codec.pickles import encode_message
from holdfast.errors import (
    CheckpointError,
    CorruptError,
    InvalidStateError,
    NotFoundError,
    RankDisagreementError,
    RankLostError,
    StorageError,
)


class CannotPickle(ValueError):
    def __reduce__(self) -> Any:
        raise RuntimeError("never")


class CannotUnpickle(ValueError):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class UnpicklableStorageError(StorageError):
    def __reduce__(self) -> Any:
        raise RuntimeError("never")


class CannotPrint(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("never")


class CannotCopy(CorruptError):
    def __copy__(self) -> CannotCopy:
        raise RuntimeError("never")


def caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:
        return raised


def told(error: BaseException, rank: int = 3) -> Failure:
    failure = describe(caught(error), rank=rank, phase="writing")
    (arrived,) = unpack(pack({rank: failure})).values()
    return arrived


def combined(*failures: Failure, own: dict[int, BaseException] | None = None) -> CheckpointError:
    return combine({failure.rank: failure for failure in failures}, own or {})


def test_an_error_of_ours_keeps_class_and_attributes() -> None:
    error = combined(told(StorageError("no space; free some", errno=errno.ENOSPC, path="/data")))
    assert type(error) is StorageError
    assert str(error) == "rank 3: no space; free some"
    assert (error.errno, error.path) == (errno.ENOSPC, "/data")
    assert list(error.failures) == [3]
    assert str(error.failures[3]) == "no space; free some"
    assert error.__cause__ is None


def test_an_error_of_others_is_wrapped_with_rank_phase_and_type() -> None:
    error = combined(told(ValueError("odd\nand more")))
    assert type(error) is CheckpointError
    assert str(error) == "rank 3: writing failed: ValueError: odd"
    assert repr(error.failures) == repr({3: ValueError("odd\nand more")})
    assert "in caught" in error.tracebacks[3]


def test_the_lowest_rank_is_the_root_and_all_are_kept() -> None:
    error = combined(told(ValueError("b"), 2), told(NotFoundError("a"), 1), told(KeyError("c"), 5))
    assert type(error) is NotFoundError
    assert str(error) == "rank 1: a"
    assert {rank: type(one) for rank, one in error.failures.items()} == {1: NotFoundError, 2: ValueError, 5: KeyError}
    assert sorted(error.tracebacks) == [1, 2, 5]


def test_where_it_happened_the_original_is_the_cause() -> None:
    original = ValueError("odd")
    error = combined(told(StorageError("full"), 1), told(original, 3), own={3: original})
    assert type(error) is StorageError
    assert error.__cause__ is original
    assert error.failures[3] is original


@pytest.mark.parametrize(
    ("original", "message"),
    [
        (CannotPickle("odd"), "rank 3: writing failed: CannotPickle: odd"),
        (CannotUnpickle(1, 2), "rank 3: writing failed: CannotUnpickle: 1 and 2"),
        (CannotPrint("odd"), "rank 3: writing failed: CannotPrint: an error that cannot be printed"),
        (KeyboardInterrupt(), "rank 3: writing failed: KeyboardInterrupt: "),
        (ValueError(lambda: None), "rank 3: writing failed: ValueError: <function"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_no_exception_is_too_odd_to_be_told(original: BaseException, message: str) -> None:
    error = combined(told(original))
    assert type(error) is CheckpointError
    assert str(error).startswith(message)
    assert isinstance(error.failures[3], BaseException)


def test_ours_that_cannot_be_pickled_keeps_its_family() -> None:
    error = combined(told(UnpicklableStorageError("full")))
    assert type(error) is StorageError
    assert str(error) == "rank 3: full"


def test_ours_that_cannot_be_copied_keeps_its_family() -> None:
    error = combined(told(CannotCopy("bad")))
    assert type(error) is CorruptError
    assert str(error) == "rank 3: bad"


def test_an_encoding_that_is_something_else_is_not_raised() -> None:
    failure = Failure(
        rank=0, phase="p", type_name="X", family=None, message="m", traceback_text="", encoded=encode_message("text")
    )
    assert str(combined(failure)) == "rank 0: p failed: X: m"


@pytest.mark.parametrize("cls", [RankLostError, RankDisagreementError])
def test_errors_that_name_their_ranks_are_not_named_twice(cls: type[CheckpointError]) -> None:
    error = combined(told(cls("rank 3 is gone")))
    assert type(error) is cls
    assert str(error) == "rank 3 is gone"


def test_an_error_made_of_errors_can_be_told_again() -> None:
    error = combined(told(InvalidStateError("bad", key="w")))
    again = combined(told(error, 1))
    assert type(again) is InvalidStateError
    assert str(again) == "rank 1: rank 3: bad"
    assert isinstance(again, InvalidStateError)
    assert again.key == "w"
