from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast._native.file_layout import pack_order


@given(st.lists(st.integers(0, 40), max_size=30), st.sampled_from([1, 4, 16]))
def test_every_page_multiple_starts_on_a_page(nbytes: list[int], page: int) -> None:
    order = pack_order(np.array(nbytes, dtype=np.int64), page).tolist()
    assert sorted(order) == list(range(len(nbytes)))
    offset = 0
    for index in order:
        if nbytes[index] % page == 0:
            assert offset % page == 0
        offset += nbytes[index]


@given(st.lists(st.integers(0, 40), max_size=30), st.sampled_from([1, 4, 16]))
def test_order_is_kept_among_multiples_and_among_the_rest(nbytes: list[int], page: int) -> None:
    order = pack_order(np.array(nbytes, dtype=np.int64), page).tolist()
    aligned = [index for index in order if nbytes[index] % page == 0]
    rest = [index for index in order if nbytes[index] % page]
    assert aligned == sorted(aligned)
    assert rest == sorted(rest)
    assert order == aligned + rest
