"""Values of one rank in a process alone: restored exactly, and what is said where other ranks saved them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast


class Counter:
    """What a loader is to a checkpoint."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "order": torch.arange(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]
        assert state["order"].tolist() == list(range(self.seen))


def saved_on(ranks: int, value: Any, path: str, *, key: str = "loader") -> None:
    """A checkpoint as so many ranks would have saved it."""
    holdfast.save({key: {f"rank-{rank}": {"value": value(rank)} for rank in range(ranks)}}, path)


def test_an_object_keeps_its_identity_and_gets_its_state(path: str) -> None:
    counter = Counter()
    counter.seen = 5
    holdfast.save({"loader": holdfast.PerRank(counter)}, path)
    new = Counter()
    value = holdfast.PerRank(new)
    report = holdfast.load({"loader": value}, path)
    assert value.value is new
    assert new.seen == 5
    assert report.per_rank == {"loader": "restored"}
    assert value.outcome == "restored"


def test_a_plain_value_is_exactly_what_was_saved(path: str) -> None:
    holdfast.save({"seen": holdfast.PerRank({"a": 1, "deep": {"b": [1, 2]}})}, path)
    value = holdfast.PerRank({"a": 0, "stale": 3, "deep": {"stale": 4}})
    kept = value.value
    holdfast.load({"seen": value}, path)
    assert value.value is kept
    assert kept == {"a": 1, "deep": {"b": [1, 2]}}


@pytest.mark.parametrize("value", [7, "text", None, [], {}, (1, 2), torch.arange(3)], ids=repr)
def test_every_kind_of_value_comes_back(path: str, same: Any, value: Any) -> None:
    holdfast.save({"value": holdfast.PerRank(value)}, path)
    target = holdfast.PerRank[Any](None)
    holdfast.load({"value": target}, path)
    same(target.value, value)


def test_a_generator_stays_the_one_that_the_program_holds(path: str) -> None:
    generator = torch.Generator().manual_seed(3)
    holdfast.save({"order": holdfast.PerRank(generator)}, path)
    expected = torch.rand(4, generator=generator)
    held = torch.Generator()
    value = holdfast.PerRank(held)
    holdfast.load({"order": value}, path)
    assert value.value is held
    assert torch.equal(torch.rand(4, generator=held), expected)


def test_objects_in_a_dict_get_their_state(path: str) -> None:
    counter = Counter()
    counter.seen = 2
    holdfast.save({"all": holdfast.PerRank({"train": counter, "epoch": 1})}, path)
    new = Counter()
    value = holdfast.PerRank({"train": new, "epoch": 0})
    holdfast.load({"all": value}, path)
    assert value.value == {"train": new, "epoch": 1}
    assert new.seen == 2


def test_rng_or_loader_state_is_never_reused_silently_on_another_number_of_ranks(path: str) -> None:
    saved_on(4, lambda rank: {"seen": rank, "order": torch.arange(rank)}, path)
    counter = Counter()
    weight = torch.zeros(2)
    with pytest.raises(
        holdfast.MismatchError, match=r"'loader' has values of 4 ranks in the checkpoint but 1 ranks"
    ) as caught:
        holdfast.load({"loader": holdfast.PerRank(counter)}, path)
    assert counter.seen == 0
    assert weight.eq(0).all()
    assert [(each.key, each.kind) for each in caught.value.differences] == [("loader", "ranks")]
    assert "on_resize='fresh'" in str(caught.value)


def test_without_strict_it_is_left_alone_and_told(path: str) -> None:
    saved_on(4, lambda rank: {"seen": rank, "order": torch.arange(rank)}, path)
    counter = Counter()
    counter.seen = 9
    report = holdfast.load({"loader": holdfast.PerRank(counter)}, path, strict=False)
    assert counter.seen == 9
    assert [each.kind for each in report.differences] == ["ranks"]
    assert report.per_rank == {"loader": "fresh"}


def test_fresh_leaves_it_alone_and_says_so(path: str, caplog: pytest.LogCaptureFixture) -> None:
    saved_on(4, lambda rank: {"seen": rank, "order": torch.arange(rank)}, path)
    counter = Counter()
    counter.seen = 9
    report = holdfast.load({"loader": holdfast.PerRank(counter, on_resize="fresh")}, path)
    assert counter.seen == 9
    assert report.per_rank == {"loader": "fresh"}
    assert "'loader' has values of 4 ranks in the checkpoint, and is left as it is on 1 ranks" in caplog.text


def test_a_function_gets_the_values_in_the_order_of_the_old_ranks(path: str) -> None:
    saved_on(11, lambda rank: {"seen": rank}, path)
    asked: list[tuple[list[Any], int, int]] = []

    def split(values: list[Any], rank: int, world: int) -> Any:
        asked.append((values, rank, world))
        return {"seen": sum(value["seen"] for value in values)}

    value = holdfast.PerRank({"seen": 0}, on_resize=split)
    report = holdfast.load({"loader": value}, path)
    assert asked == [([{"seen": rank} for rank in range(11)], 0, 1)]
    assert value.value == {"seen": 55}
    assert report.per_rank == {"loader": "re-split"}


def test_one_that_was_never_saved_is_missing(path: str) -> None:
    holdfast.save({"other": 1}, path)
    counter = Counter()
    with pytest.raises(holdfast.MismatchError, match=r"'loader\.rank-0\.value\.seen' is not in the checkpoint"):
        holdfast.load({"other": 0, "loader": holdfast.PerRank(counter)}, path)
    report = holdfast.load({"other": 0, "loader": holdfast.PerRank(counter)}, path, strict=False)
    assert "loader.rank-0.value.seen" in report.missing
    assert report.per_rank == {}


def test_it_is_found_under_another_key(path: str) -> None:
    holdfast.save({"run": {"loader": holdfast.PerRank({"seen": 4})}}, path)
    value = holdfast.PerRank({"seen": 0})
    holdfast.load({"loader": value}, path, options=holdfast.LoadOptions(mapping={"": "run"}))
    assert value.value == {"seen": 4}


def test_it_is_found_deep_inside_a_state(path: str) -> None:
    holdfast.save({"a": [{"b": holdfast.PerRank(3)}]}, path)
    value = holdfast.PerRank(0)
    report = holdfast.load({"a": [{"b": value}]}, path)
    assert value.value == 3
    assert report.per_rank == {"a.0.b": "restored"}


@pytest.mark.parametrize("on_resize", ["ignore", None, 3])
def test_another_word_for_what_to_do_is_refused(on_resize: Any) -> None:
    with pytest.raises(ValueError, match="on_resize is 'raise', 'fresh' or a function"):
        holdfast.PerRank(1, on_resize=on_resize)


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def draws() -> tuple[float, float, float, list[float]]:
    return random.random(), random.gauss(0, 1), float(np.random.standard_normal()), torch.rand(3).tolist()


def test_every_global_generator_goes_on_as_if_nothing_had_happened(path: str) -> None:
    seed(1)
    draws()  # which leaves half of a pair of normal numbers behind
    holdfast.save({"rng": holdfast.Rng()}, path)
    expected = [draws() for _ in range(3)]
    seed(9)
    report = holdfast.load({"rng": holdfast.Rng()}, path)
    assert [draws() for _ in range(3)] == expected
    assert report.per_rank == {"rng": "restored"}


def test_numbers_of_generators_are_no_json(path: str) -> None:
    holdfast.save({"rng": holdfast.Rng()}, path)
    with holdfast.open(path) as checkpoint:
        sizes = {key: value.nbytes for key, value in checkpoint.items() if isinstance(value, holdfast.StoredTensor)}
    assert {key.removeprefix("rng.rank-0.value.") for key in sizes} == {"python.words", "numpy.state.key", "torch"}


def test_a_device_that_is_not_here_is_said(path: str, caplog: pytest.LogCaptureFixture) -> None:
    state = holdfast.Rng().state_dict()
    state["rank-0"]["value"]["device"] = {"type": "cuda", "state": torch.zeros(16, dtype=torch.uint8)}
    holdfast.save({"rng": state}, path)
    report = holdfast.load({"rng": holdfast.Rng()}, path)
    if not torch.accelerator.is_available():
        assert report.per_rank == {"rng": "restored, without the generator of cuda, which is not here"}
        assert "which is not here" in caplog.text


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_load_gives_each_rank_its_own(path: str) -> None:
    counter = Counter()
    counter.seen = 3
    holdfast.save({"loader": holdfast.PerRank(counter)}, path, storage_writer=holdfast.FileSystemWriter(path))
    new = Counter()
    report = holdfast.load({"loader": holdfast.PerRank(new)}, path)
    assert new.seen == 3
    assert report.per_rank == {"loader": "restored"}
    again = Counter()
    again.seen = 3  # torch fills tensors in place
    dcp.load({"loader": holdfast.PerRank(again)}, checkpoint_id=path)
    assert again.seen == 3
