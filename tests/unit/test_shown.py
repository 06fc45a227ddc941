"""What is printed of large things fits on a screen, and a handle shows what is its owner's."""

from __future__ import annotations

from html.parser import HTMLParser

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


def test_what_looks_at_checkpoints_fits_a_screen(large: str) -> None:
    holdfast.save(MANY, large + "-3", options=holdfast.SaveOptions(statistics=True))
    with holdfast.open(large + "-3") as checkpoint:
        for shown in (
            checkpoint.statistics,
            holdfast.statistics(checkpoint),
            holdfast.statistics(checkpoint, stored=False),
        ):
            assert fits_a_screen(shown)
    found = holdfast.diff(large, large + "-3")
    report = holdfast.verify(large)
    handle = holdfast.async_save(MANY, large + "-4")
    handle.result()
    deleted = holdfast.delete(large + "-3")
    for other in (found, report, deleted, handle.report, holdfast.sweep(large)):
        assert fits_a_screen(other)
    assert repr(found).startswith("Diff(keys={'model.layers.0.self_attn.q_proj.weight', ")
    # A histogram may have two thousand bins.
    many = (2.0 ** torch.arange(-1000, 1000, dtype=torch.float64)).repeat(2)
    holdfast.save({"w": many}, large + "-5")
    assert fits_a_screen(holdfast.statistics(large + "-5").tensors["w"])


class Page(HTMLParser):
    """The cells of a page, row by row; any other tag than those of a table is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ("table", "caption", "tr", "td", "th")
        assert {name for name, _ in attrs} <= {"style", "colspan"}
        if tag == "tr":
            self.rows.append([])

    def handle_data(self, data: str) -> None:
        if self.rows:
            self.rows[-1].append(data)


def test_a_notebook_shows_a_small_table(large: str, path: str) -> None:
    state = {"<script>alert(1)</script>": torch.ones(1000), "\u202eb" * 500: torch.ones(500).half(), "step": 1}
    holdfast.save(state, path, user_metadata={"<b>": 1})
    with holdfast.open(path) as checkpoint:
        rows = Page(checkpoint._repr_html_()).rows
        assert checkpoint.bytes_read == 0
    assert rows[:4] == [
        ["format", "native"],
        ["holds", "2 tensors, 1 values, 4.9 KiB"],
        ["types", "float32 3.9 KiB, float16 1000 B"],
        ["user metadata", "{'<b>'}"],
    ]
    assert rows[5] == ["<script>alert(1)</script>", "float32", "[1000]", "3.9 KiB"]
    assert rows[6][0].startswith(r"\u202eb\u202eb")
    assert len(rows[6][0]) < 1000
    with holdfast.open(large) as checkpoint:
        assert len(Page(checkpoint._repr_html_()).rows) == 15
    holdfast.save({"w": torch.ones(2)}, path + "-torch", storage_writer=holdfast.FileSystemWriter(path + "-torch"))
    holdfast.hf.export({"w": torch.ones(2)}, path + "-hf")
    kinds = {"-torch": "torch.distributed.checkpoint", "-hf": "Hugging Face folder"}
    for suffix, kind in kinds.items():
        with holdfast.open(path + suffix) as checkpoint:
            assert Page(checkpoint._repr_html_()).rows[0] == ["format", kind]
