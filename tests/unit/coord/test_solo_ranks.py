"""One process as all the ranks there are: the same phases, the same errors, nobody to wait for."""

from __future__ import annotations

import pytest

from holdfast._ranks.ranks import Ranks, SoloRanks
from holdfast.errors import CheckpointError, StorageError


def test_both_kinds_of_phase_merge_the_one_part() -> None:
    ranks: Ranks = SoloRanks()
    with ranks as entered:
        assert entered is ranks
        assert ranks.reduce_scatter("planning", lambda: 2, lambda parts: [sum(parts) + 1]) == 3
        assert ranks.all_reduce("writing", lambda: 2, lambda parts: parts) == [2]
        assert ranks.locally("staging", lambda: 2) == 2
        ranks.again()
        ranks.follow(lambda: 7, str)
        ranks.check()
    assert (ranks.rank, ranks.size, ranks.is_coordinator) == (0, 1, True)


def raising(error: BaseException) -> None:
    raise error


def test_errors_are_named_by_phase_and_interrupts_pass() -> None:
    ranks = SoloRanks()
    with pytest.raises(CheckpointError, match=r"^writing failed: ValueError: odd$") as caught:
        ranks.all_reduce("writing", lambda: raising(ValueError("odd\nmore")), lambda parts: None)
    assert isinstance(caught.value.__cause__, ValueError)
    assert list(caught.value.failures) == [0]
    with pytest.raises(CheckpointError, match=r"^staging failed: ValueError: odd$"):
        ranks.locally("staging", lambda: raising(ValueError("odd")))
    with pytest.raises(StorageError, match=r"^full$"):
        ranks.reduce_scatter("writing", lambda: raising(StorageError("full")), lambda parts: parts)
    with pytest.raises(KeyboardInterrupt):
        ranks.all_reduce("writing", lambda: raising(KeyboardInterrupt()), lambda parts: None)
