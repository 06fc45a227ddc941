from __future__ import annotations

import numpy as np

from holdfast._native.file_layout import pack_order


def test_page_multiples_go_first_and_order_is_kept() -> None:
    order = pack_order(np.array([5, 4096, 0, 8192, 4097, 4095, 4096]), 4096)
    assert order.tolist() == [1, 2, 3, 6, 0, 4, 5]
    assert order.dtype == np.int64


def test_nothing_to_pack() -> None:
    assert pack_order(np.empty(0, dtype=np.int64), 4096).tolist() == []
