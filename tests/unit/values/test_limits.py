from __future__ import annotations

import sys

from holdfast._values import dtypes as limits


def test_sums_of_offsets_and_sizes_stay_in_64_bits() -> None:
    assert 2 * limits.MAX_FILE_BYTES <= 2**63


def test_recursion_ends_before_the_interpreter_stops_it() -> None:
    assert max(limits.MAX_VALUE_DEPTH, limits.MAX_PATH_DEPTH) * 2 < sys.getrecursionlimit()


def test_an_inline_value_is_a_small_part_of_a_manifest() -> None:
    assert limits.MAX_VALUE_INLINE_BYTES * 1024 <= limits.MAX_MANIFEST_BYTES


def test_the_header_cap_is_that_of_safetensors() -> None:
    assert limits.MAX_HEADER_BYTES == 100_000_000
