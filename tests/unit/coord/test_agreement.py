"""Who differs, in words."""

from __future__ import annotations

import pickle

import pytest

from holdfast._ranks.ranks import agreed
from holdfast.errors import RankDisagreementError


@pytest.mark.parametrize("said", [{}, {0: "a"}, {0: "a", 1: "a", 2: "a"}])
def test_the_same_is_agreement(said: dict[int, str]) -> None:
    agreed("path", said)


def test_the_minority_is_named() -> None:
    said = {0: "'a'", 1: "'a'", 2: "'a'", 3: "'b'", 5: "'a'"}
    with pytest.raises(RankDisagreementError) as caught:
        agreed("checkpoint path", said)
    error = pickle.loads(pickle.dumps(caught.value))
    assert str(error) == (
        "the ranks disagree on the checkpoint path: ranks 0-2 and 5 say 'a', rank 3 says 'b'; "
        "call with the same on every rank"
    )
    assert error.said == said
    assert list(error.failures) == [3]
    assert str(error.failures[3]) == "rank 3 said 'b'"


def test_all_different_stays_readable() -> None:
    with pytest.raises(RankDisagreementError, match=r"rank 0 says 0+\.\.\., .* and 6 other answers;") as caught:
        agreed("path", {rank: str(rank) * 1000 for rank in range(10)})
    assert len(str(caught.value)) < 1200
    assert len(caught.value.failures) == 9
