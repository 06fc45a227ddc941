"""Parts of plans travel as they are, columns and the user's own classes included."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast._torch_codec.pickles import decode_message, encode_message


@dataclass
class OwnPlan:
    columns: np.ndarray
    note: str


def test_a_plan_of_the_users_own_arrives_equal() -> None:
    sent = OwnPlan(columns=np.arange(1000, dtype=np.int64).reshape(10, 100), note="mine")
    found = decode_message(encode_message([sent, None, (1, "a")]))
    assert found[1:] == [None, (1, "a")]
    assert found[0].note == "mine"
    assert np.array_equal(found[0].columns, sent.columns)
