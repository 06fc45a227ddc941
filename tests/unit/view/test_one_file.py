"""The one file for sharing: what is in it, what is said not to be, and that no key can end its elements."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast._view import one_file
from holdfast._view.questions import Viewer
from holdfast.errors import InternalError
from tests.unit.view.conftest import HOSTILE

PAGES = {
    "index.html": b'<!doctype html>\n<html>\n<head>\n<link rel="stylesheet" href="/assets/app.css">\n</head>\n<body>\n'
    b'<script src="/assets/one.js"></script>\n<script src="/assets/app.js"></script>\n</body>\n</html>\n',
    "app.css": b"body { margin: 0 }",
    "one.js": b"const one = 1 < 2;",
    "app.js": b'document.title = "\xc3\xa9";',
}


class Elements(HTMLParser):
    """The elements of a page, with their attributes and the text in each script and style."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=False)
        self.found: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self.found:
            tag, attributes, text = self.found[-1]
            self.found[-1] = tag, attributes, text + data


def written(path: Path, *shown: Path) -> tuple[Elements, dict[str, object], one_file.WrittenPage]:
    with contextlib.closing(Viewer(shown)) as viewer:
        report = one_file.write_page(viewer, str(path))
    page = path.read_text(encoding="utf-8")
    assert report.bytes == path.stat().st_size
    elements = Elements(page)
    [data] = [text for tag, attributes, text in elements.found if attributes.get("id") == "holdfast-data"]
    return elements, json.loads(data), report


@pytest.fixture(autouse=True)
def pages(monkeypatch):
    monkeypatch.setattr(one_file, "assets", lambda: dict(PAGES))


def test_the_answers_are_those_of_the_server(serve, run, tmp_path):
    _, answers, report = written(tmp_path / "out.html", run)
    browser = serve(run)
    browser.ask("/api/run?source=0")
    for url, answer in answers.items():
        if url != "/about":
            assert answer == browser.ask(url), url
    assert report.answers == len(answers) - 1
    assert {"/api/sources", "/api/run?source=0", "/api/tree?checkpoint=1&under=model.layers.", "/about"} <= set(answers)
    assert answers["/about"]["left_out"] == report.left_out == ["elements of tensors, and differences"]


def test_hostile_keys_stay_inside_and_scripts_have_their_hashes(run, tmp_path):
    elements, answers, _ = written(tmp_path / "out.html", run)
    keys = [row["key"] for row in answers["/api/tensors?checkpoint=0"]["rows"]]
    assert HOSTILE in keys
    tags = [tag for tag, _, _ in elements.found]
    assert tags == ["html", "head", "meta", "style", "body", "script", "script", "script"]
    policy = next(attributes["content"] for tag, attributes, _ in elements.found if tag == "meta")
    parts = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert parts["default-src"] == "'none'"
    for tag in ("script", "style"):
        texts = [text for name, attributes, text in elements.found if name == tag and "id" not in attributes]
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in map(str.rstrip, texts)]
        assert parts[f"{tag}-src"].split() == [f"'sha256-{digest}'" for digest in digests]
    page = (tmp_path / "out.html").read_text()
    assert not re.search(r"(src|href)\s*=", page.partition('id="holdfast-data"')[0])
    assert "alert" not in re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.DOTALL)


def test_what_is_cut_off_is_said(tmp_path, monkeypatch):
    for name, most in (("_MOST_TENSORS", 3), ("_MOST_VALUES", 2), ("_MOST_LEVELS", 2), ("_MOST_CHECKPOINTS", 1)):
        monkeypatch.setattr(one_file, name, most)
    state = {f"layer.{number}": {"w": torch.ones(1), "v": number} for number in range(5)}
    for step in (1, 2):
        holdfast.save(state, tmp_path / "run" / f"step-{step}", no_dist=True)
    _, answers, report = written(tmp_path / "out.html", tmp_path / "run")
    said = "\n".join(report.left_out)
    assert "2 of 5 tensors" in said
    assert "3 of 5 values" in said
    assert "levels of the tree below" in said
    assert "1 of 2 checkpoints, the oldest" in said
    assert len(answers["/api/tensors?checkpoint=1"]["rows"]) == 3
    assert answers["/api/tensors?checkpoint=1"]["total"] == 5
    assert "/api/checkpoint?checkpoint=0" not in answers


def test_a_damaged_checkpoint_is_in_it_as_an_error(run, tmp_path):
    manifest = run / "step-1" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-5])
    _, answers, _ = written(tmp_path / "out.html", run)
    assert answers["/api/checkpoint?checkpoint=0"]["error"]["kind"] == "CorruptError"
    assert answers["/api/checkpoint?checkpoint=1"]["tensors"] == 7


def test_the_file_is_replaced_as_a_whole(run, tmp_path):
    (tmp_path / "out.html").write_text("old")
    written(tmp_path / "out.html", run)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out.html", "run"]


@pytest.mark.parametrize("text", ["x = '</script>'", "x = '<!--'", "x = '</STYLE '"])
def test_an_asset_that_would_end_its_element_is_refused(text):
    with pytest.raises(InternalError, match="app"):
        one_file.one_page({**PAGES, "app.js": text.encode()}, {})
