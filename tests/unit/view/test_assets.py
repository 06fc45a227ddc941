"""The pages as files: small, of one origin, without code in markup, with the licences of what is not ours."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

VIEW = Path(str(files("holdfast") / "_view"))
ASSETS = {path.name: path.read_text(encoding="utf-8") for path in (VIEW / "assets").iterdir()}
OURS = {name: text for name, text in ASSETS.items() if name != "preact.js"}


def test_all_assets_together_are_small() -> None:
    assert sum(len(text.encode()) for text in ASSETS.values()) <= 120_000


def test_the_page_names_every_asset_once() -> None:
    named = re.findall(r'(?:src|href)="/assets/([^"]+)"', ASSETS["index.html"])
    assert sorted([*named, "index.html"]) == sorted(ASSETS)


def test_no_text_becomes_markup_or_code() -> None:
    """Keys are hostile: they may be text nodes and nothing else. The policy forbids the rest."""
    refused = (
        r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function|style=\"|\son\w+=\"|javascript:"
    )
    found = {name: re.findall(refused, text) for name, text in OURS.items()}
    assert not any(found.values()), found


def test_nothing_is_asked_of_another_origin() -> None:
    found = {name: re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text) for name, text in OURS.items()}
    assert not any(found.values()), found


def test_scripts_fit_into_one_file() -> None:
    """They share one scope, also in the file of --html: no name is given twice, and nothing ends its element."""
    scripts = {name: text for name, text in OURS.items() if name.endswith(".js")}
    names = [
        name
        for text in scripts.values()
        for name in re.findall(r"^(?:async )?(?:function|const|let|class) (\w+)", text, re.MULTILINE)
    ]
    assert len(names) > 50
    assert len(names) == len(set(names)), sorted(name for name in set(names) if names.count(name) > 1)
    assert not [name for name, text in ASSETS.items() if name != "index.html" and re.search(r"</script|<!--", text)]


def test_what_is_not_ours_has_its_licence_and_its_source() -> None:
    folder = VIEW / "licences"
    for name in ("htm", "preact"):
        text = (folder / f"{name}.txt").read_text(encoding="utf-8")
        assert "Apache License" in text or "MIT License" in text
    assert "standalone.umd.js" in (folder / "VENDORED.md").read_text(encoding="utf-8")
