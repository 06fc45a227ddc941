"""open(): a lazy mapping that reads just what is asked of it, counted in bytes."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from outside_views import page_cache

import holdfast

MIB = 1 << 20
PAGE_BYTES = 4096  # what reads past the page cache are multiples of
ROWS, COLUMNS = 2100, 1111  # 8.9 MiB of float32, neither dimension a multiple of anything


def matrix() -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint whose large tensor does not start on a page."""
    path = str(tmp_path_factory.mktemp("open") / "checkpoint")
    state = {
        "first": torch.arange(1001, dtype=torch.float64),
        "large": matrix(),
        "cube": torch.arange(120).view(4, 5, 6),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "values": {"step": 7, "name": "x"},
        "array": np.arange(5),
    }
    holdfast.save(state, path, user_metadata={"run": 3})
    return path


@pytest.fixture
def cached() -> Iterator[None]:
    with page_cache(is_full=True):
        yield


@pytest.fixture
def cold() -> Iterator[None]:
    with page_cache(is_full=False):
        yield


@contextlib.contextmanager
def counting(checkpoint: holdfast.Checkpoint) -> Iterator[list[int]]:
    """The bytes that were read in the block, as the one element of a list."""
    counted: list[int] = []
    before = checkpoint.bytes_read
    yield counted
    counted.append(checkpoint.bytes_read - before)


def test_it_is_a_mapping_in_the_order_of_the_state(stored: str) -> None:
    with holdfast.open(stored) as checkpoint:
        keys = ["first", "large", "cube", "scalar", "empty", "values.step", "values.name", "array"]
        assert list(checkpoint) == list(checkpoint.keys()) == keys
        assert len(checkpoint) == 8
        assert "large" in checkpoint
        assert "values" not in checkpoint
        assert None not in checkpoint
        assert checkpoint["values.step"] == 7
        assert checkpoint.get("nothing", 5) == 5
        assert checkpoint.user_metadata == {"run": 3}
        with pytest.raises(KeyError):
            checkpoint["nothing"]
        assert repr(checkpoint) == f"Checkpoint({stored!r}, 8 keys)"


def test_descriptions_cost_no_reads(stored: str) -> None:
    with holdfast.open(stored) as checkpoint:
        large = checkpoint["large"]
        assert (large.key, large.shape, large.dtype) == ("large", torch.Size([ROWS, COLUMNS]), torch.float32)
        assert large.nbytes == ROWS * COLUMNS * 4
        assert len(large) == ROWS
        assert (large.alias_of, large.chunks) == (None, 1)
        assert repr(large) == "StoredTensor('large', shape=[2100, 1111], dtype=torch.float32)"
        assert checkpoint["scalar"].nbytes == 4
        assert checkpoint["empty"].nbytes == 0
        with pytest.raises(TypeError, match="0-d"):
            len(checkpoint["scalar"])
        assert checkpoint.bytes_read == 0


INDEXES: list[Any] = [
    ...,
    0,
    -1,
    np.int64(2),
    slice(None),
    slice(1, 3),
    slice(-2, None),
    slice(None, None, 2),
    slice(3, 1),
    slice(10, 20),
    slice(-100, 100),
    (1, 2, 3),
    (-1, -1, -1),
    (slice(1, 3), 2),
    (..., 2),
    (0, ..., slice(1, 4)),
    (..., slice(None, None, 3), 1),
    (slice(1, 4, 2), slice(None, None, 3), slice(5, 0)),
    (slice(None), slice(None), slice(2, 3)),
    (),
    (1, 2, 3, ...),
]


@pytest.mark.parametrize("index", INDEXES, ids=repr)
@pytest.mark.parametrize("verify", [True, False])
def test_any_index_gives_what_torch_gives(index: Any, verify: bool, stored: str) -> None:
    expected = torch.arange(120).view(4, 5, 6)[index]
    with holdfast.open(stored, verify=verify) as checkpoint:
        found = checkpoint["cube"][index]
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (4, "index 4 is out of range for a dimension of 4"),
        (-5, "index -5 is out of range"),
        ((0, 0, 6), "index 6 is out of range for a dimension of 6"),
        ((0, 0, 0, 0), "'cube' has 3 dimensions, but the index has 4"),
        ((0, 0, ..., 0, 0), "'cube' has 3 dimensions"),
        ((..., ...), "'cube' has 3 dimensions"),
        (slice(None, None, -1), "step must be positive"),
        (None, "not by a NoneType"),
        ([0, 1], "not by a list"),
        (True, "not by a bool"),
        (1.0, "not by a float"),
        ("x", "not by a str"),
    ],
    ids=repr,
)
def test_indexes_that_make_no_sense(index: Any, message: str, stored: str) -> None:
    with holdfast.open(stored) as checkpoint, pytest.raises(IndexError, match=message):
        checkpoint["cube"][index]


def test_scalars_empty_tensors_and_rows_one_after_the_other(stored: str) -> None:
    with holdfast.open(stored) as checkpoint:
        assert checkpoint["scalar"][...].item() == 2.5
        assert checkpoint["scalar"][()].shape == ()
        assert checkpoint["empty"][...].shape == (0, 3)
        assert checkpoint["empty"][:, 1].shape == (0,)
        rows = list(checkpoint["cube"])
        assert len(rows) == 4
        assert torch.equal(torch.stack(rows), torch.arange(120).view(4, 5, 6))
        assert torch.equal(checkpoint["array"][1:3], torch.tensor([1, 2]))


def touched(start: int, stop: int) -> int:
    """Bytes of the 1 MiB blocks that bytes [start, stop) of the large tensor touch."""
    nbytes = ROWS * COLUMNS * 4
    blocks = range(start // MIB, (stop - 1) // MIB + 1)
    return sum(min(MIB, nbytes - block * MIB) for block in blocks)


SLICES = [(0, 1), (0, 236), (236, 237), (100, 1000), (944, 945), (2099, 2100), (0, ROWS), (1887, 2100)]


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize(("start", "stop"), SLICES)
def test_a_verified_slice_reads_just_the_blocks_it_touches(start: int, stop: int, stored: str) -> None:
    with holdfast.open(stored) as checkpoint:
        with counting(checkpoint) as counted:
            found = checkpoint["large"][start:stop]
        assert torch.equal(found, matrix()[start:stop])
        assert counted == [touched(start * COLUMNS * 4, stop * COLUMNS * 4)]


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize(("start", "stop"), SLICES)
def test_an_unverified_slice_reads_just_its_bytes(start: int, stop: int, stored: str) -> None:
    with holdfast.open(stored, verify=False) as checkpoint:
        with counting(checkpoint) as counted:
            found = checkpoint["large"][start:stop]
        assert torch.equal(found, matrix()[start:stop])
        assert counted == [(stop - start) * COLUMNS * 4]


@pytest.mark.usefixtures("cached")
def test_a_column_reads_all_blocks_or_from_its_first_element_to_its_last(stored: str) -> None:
    expected = matrix()[:, 500:503]
    with holdfast.open(stored) as checkpoint:
        with counting(checkpoint) as counted:
            assert torch.equal(checkpoint["large"][:, 500:503], expected)
        assert counted == [ROWS * COLUMNS * 4]
    with holdfast.open(stored, verify=False) as checkpoint:
        with counting(checkpoint) as counted:
            assert torch.equal(checkpoint["large"][:, 500:503], expected)
        assert counted == [((ROWS - 1) * COLUMNS + 3) * 4]  # the gaps are small: one read is faster than many


@pytest.mark.usefixtures("cached")
def test_part_of_a_few_rows_reads_just_the_blocks_of_those_rows(stored: str) -> None:
    rows, columns = slice(300, 310), slice(17, 400)
    begin, end = (300 * COLUMNS + 17) * 4, (309 * COLUMNS + 400) * 4
    with holdfast.open(stored) as checkpoint, counting(checkpoint) as counted:
        assert torch.equal(checkpoint["large"][rows, columns], matrix()[rows, columns])
    assert counted == [touched(begin, end)]
    with holdfast.open(stored, verify=False) as checkpoint, counting(checkpoint) as counted:
        assert torch.equal(checkpoint["large"][rows, columns], matrix()[rows, columns])
    assert counted == [end - begin]


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize(("columns", "gaps"), [(16 * 1024, 2), (16 * 1024 + 1, 0)])
def test_unverified_reads_leave_out_gaps_of_more_than_64_kib(columns: int, gaps: int, path: str) -> None:
    wide = torch.arange(3 * (columns + 5), dtype=torch.int32).view(3, -1)
    holdfast.save({"wide": wide}, path)
    with holdfast.open(path, verify=False) as checkpoint, counting(checkpoint) as counted:
        assert torch.equal(checkpoint["wide"][:, :5], wide[:, :5])
    assert counted == [(3 * 5 + gaps * columns) * 4]


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize(("start", "stop"), SLICES)
@pytest.mark.parametrize("verify", [True, False])
def test_past_the_page_cache_at_most_two_pages_more_per_read_of_4_mib(
    start: int, stop: int, verify: bool, stored: str
) -> None:
    begin, end = start * COLUMNS * 4, stop * COLUMNS * 4
    wanted = touched(begin, end) if verify else end - begin
    with holdfast.open(stored, verify=verify) as checkpoint:
        with counting(checkpoint) as counted:
            assert torch.equal(checkpoint["large"][start:stop], matrix()[start:stop])
        reads = -(-wanted // (3 << 20)) + 1  # of at most 4 MiB, each of at least three blocks
        assert wanted <= counted[0] < wanted + reads * 2 * PAGE_BYTES


@pytest.mark.usefixtures("cached")
def test_values_and_empty_slices_read_no_data(stored: str) -> None:
    with holdfast.open(stored) as checkpoint:
        assert checkpoint["values.name"] == "x"
        assert checkpoint["large"][5:5].shape == (0, COLUMNS)
        assert checkpoint["large"][:, 9:3].shape == (ROWS, 0)
        assert checkpoint.bytes_read == 0


@pytest.mark.usefixtures("cached")
def test_reads_add_up(stored: str) -> None:
    with holdfast.open(stored, verify=False) as checkpoint:
        for count in range(1, 4):
            checkpoint["first"][10:20]
            assert checkpoint.bytes_read == count * 80


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("storage", [holdfast.NativeWriter, holdfast.FileSystemWriter])
def test_quantised_tensors_are_read_whole_or_not_at_all(path: str, storage: Callable[[str], Any]) -> None:
    values = torch.linspace(-1, 1, 12).view(3, 4)
    channels = torch.quantize_per_channel(values, torch.ones(3) / 8, torch.arange(3), 0, torch.qint8)
    state = {"tensor": torch.quantize_per_tensor(values, 0.1, 0, torch.qint8), "channels": channels}
    holdfast.save(state, storage_writer=storage(path))
    assert holdfast.load(path)["tensor"].q_scale() == 0.1
    with holdfast.open(path) as checkpoint:
        assert checkpoint["tensor"][...].q_scale() == 0.1
        assert torch.equal(checkpoint["channels"][...].dequantize(), channels.dequantize())
        with pytest.raises(holdfast.InvalidStateError, match="'channels' is quantised"):
            checkpoint["channels"][1]


def test_every_dtype_can_be_read_in_parts(path: str, bits: Callable[[torch.Tensor], bytes]) -> None:
    plain = [torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex32, torch.complex128, torch.uint64]
    state = {str(dtype): torch.arange(96, dtype=torch.uint8).view(dtype) for dtype in [*plain, torch.bits16]}
    state["torch.bool"] = torch.arange(96) % 3 == 0
    holdfast.save(state, path)
    with holdfast.open(path) as checkpoint:
        for key, tensor in state.items():
            assert bits(checkpoint[key][1:5]) == bits(tensor[1:5]), key


def test_what_is_read_belongs_to_the_caller(stored: str) -> None:
    with holdfast.open(stored) as checkpoint:
        once = checkpoint["cube"][...]
        once.zero_()
        assert checkpoint["cube"][3, 4, 5].item() == 119


def test_a_closed_checkpoint_reads_nothing_more(stored: str) -> None:
    checkpoint = holdfast.open(stored)
    cube = checkpoint["cube"]
    cube[0]
    read = checkpoint.bytes_read
    assert read > 0
    checkpoint.close()
    checkpoint.close()
    assert checkpoint.bytes_read == read
    assert "cube" in checkpoint
    for use in (lambda: cube[0], lambda: checkpoint["values.step"]):
        with pytest.raises(ValueError, match="the checkpoint is closed"):
            use()


def test_it_stays_what_was_opened_while_the_name_gets_another(path: str) -> None:
    holdfast.save({"w": torch.zeros(1000)}, path)
    with holdfast.open(path) as checkpoint:
        checkpoint["w"][0]  # opens the data file
        holdfast.save({"w": torch.ones(1000)}, path)
        assert torch.equal(checkpoint["w"][...], torch.zeros(1000))
    with holdfast.open(path) as checkpoint:
        assert torch.equal(checkpoint["w"][...], torch.ones(1000))


def test_files_that_are_gone_are_never_mistaken_for_the_new_ones(path: str) -> None:
    holdfast.save({"w": torch.zeros(1000)}, path)
    with holdfast.open(path) as checkpoint:
        holdfast.save({"w": torch.ones(1000)}, path)
        with pytest.raises(holdfast.StorageError, match="was replaced by another one since it was opened") as caught:
            checkpoint["w"][...]
        assert caught.value.errno == errno.ESTALE


@pytest.mark.parametrize("later", ["native", "torch"])
@pytest.mark.parametrize("first", ["native", "torch"])
def test_one_that_was_replaced_by_either_format_says_so(path: str, first: str, later: str) -> None:
    def writer(kind: str) -> holdfast.StorageWriter:
        return holdfast.NativeWriter(path) if kind == "native" else holdfast.FileSystemWriter(path)

    holdfast.save({"w": torch.zeros(1000)}, storage_writer=writer(first))
    with holdfast.open(path) as checkpoint:
        holdfast.save({"w": torch.ones(1000)}, storage_writer=writer(later))
        with pytest.raises(holdfast.StorageError, match="open it again") as caught:
            checkpoint["w"][...]
        assert caught.value.errno == errno.ESTALE
        with holdfast.open(path) as again:
            assert again["w"][0] == 1


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_damage_stays_damage(path: str, kind: str) -> None:
    writer = holdfast.NativeWriter(path) if kind == "native" else holdfast.FileSystemWriter(path)
    holdfast.save({"w": torch.zeros(1000)}, storage_writer=writer)
    with holdfast.open(path) as checkpoint:
        for name in os.listdir(path):
            if name.endswith((".distcp", "-0-0.safetensors")):
                os.unlink(os.path.join(path, name))
        with pytest.raises(holdfast.CorruptError, match="is missing"):
            checkpoint["w"][...]


def test_nothing_there(path: str) -> None:
    with pytest.raises(holdfast.NotFoundError):
        holdfast.open(path)
