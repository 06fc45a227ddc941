"""Every Python block of the documents runs, every link leads somewhere, and what they quote is what is written."""

from __future__ import annotations

import doctest
import inspect
import json
import operator
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

import holdfast

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SKIP_MARK = re.compile(r"<!-- not run: .{10,} -->")
"""A block is skipped only when the line before it says so, with a reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block: ``line`` is that of its first line in the document."""

    language: str
    text: str
    line: int
    is_skipped: bool


def blocks_of(document: Path) -> list[Block]:
    lines = document.read_text().splitlines()
    blocks: list[Block] = []
    opened: int | None = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if opened is None:
            opened = number
            continue
        before = next((text for text in reversed(lines[:opened]) if text.strip()), "")
        blocks.append(
            Block(
                language=lines[opened].removeprefix("```").strip(),
                text="\n".join(lines[opened + 1 : number]) + "\n",
                line=opened + 2,
                is_skipped=SKIP_MARK.fullmatch(before.strip()) is not None,
            )
        )
        opened = None
    assert opened is None, f"{document} has a block that does not end"
    return blocks


def run_blocks(document: Path) -> int:
    """How many Python blocks of ``document`` ran, in order, in one namespace."""
    namespace: dict[str, Any] = {"__name__": "document"}
    count = 0
    for block in blocks_of(document):
        if block.language == "python" and not block.is_skipped:
            # Blank lines in front, so that a traceback has the line numbers of the document.
            text = "\n" * (block.line - 1) + block.text
            exec(compile(text, str(document), "exec", dont_inherit=True), namespace)
            count += 1
    return count


WITH_PYTHON = [document for document in DOCUMENTS if any(block.language == "python" for block in blocks_of(document))]


@pytest.mark.parametrize("document", WITH_PYTHON, ids=lambda document: str(document.relative_to(ROOT)))
def test_every_python_block_runs(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_blocks(document) > 0


def test_the_documents_with_code_are_found() -> None:
    names = {document.name for document in WITH_PYTHON}
    assert {"README.md", "format.md", "saving-and-loading.md"} <= names


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    broken = [
        target
        for target in targets
        if target and "://" not in target and not (document.parent / target).resolve().exists()
    ]
    assert broken == []


def test_every_test_that_the_guarantees_name_exists() -> None:
    text = (ROOT / "docs" / "guarantees.md").read_text()
    named = re.findall(r"\]\(\.\./(tests/[^)]+\.py)\)(?: \(`(test_\w+)`\))?", text)
    assert len(named) >= 10
    missing = [
        (file, name)
        for file, name in named
        if not (ROOT / file).exists() or (name and f"def {name}(" not in (ROOT / file).read_text())
    ]
    assert missing == []


def json_blocks(document: Path) -> list[Any]:
    return [json.loads(block.text) for block in blocks_of(document) if block.language == "json"]


def header_of(path: Path) -> Any:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def test_the_json_of_the_format_page_is_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_blocks(ROOT / "docs" / "format.md") == 1
    data_header, index_header, documented = json_blocks(ROOT / "docs" / "format.md")
    (data_file,) = Path("example").glob("data-*")
    (index_file,) = Path("example").glob("index-*")

    assert list(header_of(data_file).items()) == list(data_header.items())
    assert list(header_of(index_file).items()) == list(index_header.items())

    written = json.loads(Path("example/manifest.json").read_bytes())
    # Versions are those of the day the page was written, and the digest covers them.
    changed = {"writer": documented["writer"], "digest": "0" * 16}
    canonical = json.dumps({**written, **changed}, separators=(",", ":"), ensure_ascii=False).encode()
    assert {**written, **changed, "digest": xxhash.xxh3_64_hexdigest(canonical)} == documented
    assert list(written) == list(documented)
    assert list(written["writer"]) == list(documented["writer"])


def stored_as(name: str, path: Path) -> tuple[str | None, int]:
    """The dtype of two elements in the header of their file, None for bytes, and how many bytes each of them takes."""
    dtype = getattr(torch, name)
    tensor = torch.zeros(2 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    holdfast.save({"a": tensor}, path)
    (file,) = path.glob("data-*")
    entry = next(entry for key, entry in header_of(file).items() if key != "__metadata__")
    begin, end = entry["data_offsets"]
    with holdfast.open(path) as checkpoint:
        assert checkpoint["a"].dtype is dtype
    is_bytes = entry["dtype"] == "U8" and dtype is not torch.uint8
    assert entry["shape"] == ([2, dtype.itemsize] if is_bytes and dtype.itemsize > 1 else [2])
    return None if is_bytes else entry["dtype"], (end - begin) // 2


def quantized(name: str) -> bool:
    return name.startswith(("q", "quint"))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_the_format_page_has_every_dtype_with_its_name_and_size(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "format.md").read_text()
    table = text.partition("| dtype | safetensors |")[2].partition("\n\n")[0]
    found: dict[str, tuple[str | None, int]] = {}
    for row in table.splitlines()[2:]:
        names, stored, sizes = ([part.strip() for part in cell.split(",")] for cell in row.strip("|").split("|"))
        if " to " in names[0]:
            names = [f"{prefix}{bits}" for prefix in ("int", "uint") for bits in range(1, 8)]
        stored_names = stored if stored != [""] else [""] * len(names)
        for name, stored_name, size in zip(
            names, stored_names, sizes if len(sizes) > 1 else sizes * len(names), strict=True
        ):
            found[name] = stored_name or None, int(size)
    names = {str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    assert found.keys() == names | {"bcomplex32"}  # which torch has since 2.14
    plain = {name for name in names if not quantized(name)}
    assert {name: found[name] for name in plain} == {name: stored_as(name, tmp_path / name) for name in plain}
    assert {name: found[name] for name in names - plain} == {
        name: (None, getattr(torch, name).itemsize) for name in names - plain
    }


@pytest.mark.parametrize("function", [holdfast.save, holdfast.load, holdfast.open], ids=["save", "load", "open"])
def test_the_readme_explains_every_option(function: Any) -> None:
    text = (ROOT / "README.md").read_text()
    missing = [name for name in inspect.signature(function).parameters if f"`{name}" not in text]
    assert missing == []


def test_the_guide_has_every_error() -> None:
    guide = (ROOT / "docs" / "guides" / "saving-and-loading.md").read_text().partition("## Errors to catch")[2]
    there = set(re.findall(r"^\| `(\w+)` \|", guide, re.MULTILINE))
    assert there == set(holdfast.errors.__all__) - {"CheckpointError", "CheckpointException", "Difference"}


WITH_EXAMPLES = ["save", "load", "open", "verify", "async_save", "diff", "statistics", "convert", "follow", "hf.export"]


def test_the_examples_of_docstrings_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"holdfast": holdfast, "torch": torch, "model": torch.nn.Linear(4, 4)}
    runner = doctest.DocTestRunner(verbose=False)
    for name in WITH_EXAMPLES:
        text = inspect.getdoc(operator.attrgetter(name)(holdfast))
        assert text is not None
        found = doctest.DocTestParser().get_doctest(text, names, f"holdfast.{name}", None, None)
        assert found.examples, f"holdfast.{name} has no example"
        assert runner.run(found, clear_globs=False).failed == 0


def test_architecture_stays_short() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) < 150


def test_architecture_names_every_module() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    package = ROOT / "src" / "holdfast"
    modules = [path.relative_to(package) for path in package.rglob("*.py") if path.name != "__init__.py"]
    missing = [str(module) for module in modules if f"`{module.name}`" not in text]
    assert missing == []
