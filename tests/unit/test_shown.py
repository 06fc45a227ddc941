"""What is printed of large things fits on a screen, and a handle shows what is its owner's."""

from __future__ import annotations

import pytest
import torch

import holdfast

MANY = {f"model.layers.{number}.self_attn.q_proj.weight": torch.zeros(2) for number in range(2000)}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("large"))
    holdfast.save({**MANY, "other": 1}, path, user_metadata={"notes": "x" * 10_000})
    return path


def fits_a_screen(shown: object) -> bool:
    return len(repr(shown)) < 24 * 80


def test_metadata_and_reports_fit_a_screen(large: str) -> None:
    metadata = holdfast.save(MANY, large + "-2")
    assert fits_a_screen(metadata)
    assert "2,000 keys" in repr(metadata)
    report = holdfast.load({"model.layers.7.self_attn.q_proj.weight": torch.zeros(2)}, large)
    assert fits_a_screen(report)
    assert "unexpected=('model.layers.0.self_attn.q_proj.weight'" in repr(report)
    assert "... 1,997 more" in repr(report)
    with holdfast.open(large) as checkpoint:
        for shown in (checkpoint, checkpoint["model.layers.0.self_attn.q_proj.weight"], checkpoint.metadata):
            assert fits_a_screen(shown)


def test_plans_fit_a_screen_and_are_not_changed_by_it() -> None:
    planner = holdfast.DefaultSavePlanner()
    planner.set_up_planner(dict(MANY))
    plan = planner.create_local_plan()
    for shown in (plan, plan.items, holdfast.LoadPlan(list(range(5000)))):  # type: ignore[arg-type]
        assert fits_a_screen(shown)
    assert repr(plan) == "SavePlan(2,000 items)"
    assert plan.items[0].index.fqn in MANY


def test_a_handle_shows_what_is_its_owners(path: str) -> None:
    handle = holdfast.async_save(MANY, path)
    handle.result()
    assert fits_a_screen(handle)
    assert repr(handle).startswith("<AsyncSave published, ")
    assert {name for name in dir(handle) if not name.startswith("_")} == {
        *("add_done_callback", "bytes_done", "bytes_total", "cancel", "cancelled", "done", "exception", "fence"),
        *(
            "path",
            "phase",
            "report",
            "result",
            "running",
            "staging_completion",
            "unchanged",
            "upload_completion",
            "wait_staged",
        ),
    }
