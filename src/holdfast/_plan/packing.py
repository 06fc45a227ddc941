"""Packing: in which order a file holds its chunks.

Chunks whose size is a multiple of a page come first, so that each of them starts on a page, as the file's data does,
and can be read and written without the page cache. Never leaves room between chunks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def pack_order(nbytes: npt.NDArray[np.int64], page: int) -> npt.NDArray[np.int64]:
    """The order to store chunks of sizes ``nbytes``: multiples of ``page`` (0 too), then the rest, each as given."""
    return np.argsort(np.asarray(nbytes, dtype=np.int64) % page != 0, kind="stable")
