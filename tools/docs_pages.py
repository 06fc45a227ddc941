"""Makes the sources of the documentation site in ``build/docs``: pages, their order, and what programs read.

Documents are taken as they are; links to files that are no pages lead to copies of them. Pages of the API and of the
commands are made from docstrings and from the commands themselves. Fails if a document has no place, a link leads
nowhere, or a public name has no docstring. ``tools/docs_check.py`` checks what the site's builder makes of it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
import typer.main

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

import holdfast  # noqa: E402
import holdfast.cli  # noqa: E402

BUILD = ROOT / "build" / "docs"
PAGES = BUILD / "pages"

# Documents outside of docs/, and the pages that they become.
OUTSIDE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
GUIDES = {
    "saving-and-loading": "Saving and loading",
    "steps": "The steps of a run",
    "async": "In the background",
    "hugging-face": "Hugging Face folders",
    "frameworks": "Frameworks",
    "object-stores": "Object stores",
    "looking": "Look at checkpoints",
    "viewer": "The viewer",
    "events": "Events",
    "migrate-from-dcp": "Moving over from torch",
    "planners": "Planners and storages",
}
# Pages of the API: title, guide, and the modules whose public names they have, in this order.
API = {
    "saving": ("Save and load", "saving-and-loading", "_saver _loader _state.per_rank _values.records _version"),
    "async": ("Save in the background", "async", "_async_saver staging"),
    "looking": (
        "Open, check, compare, convert",
        "looking",
        "_checkpoint _look.diff _look.elements _look.statistics _values.statistics interop",
    ),
    "steps": (
        "The steps of a run",
        "steps",
        "_steps.manager _steps.resuming _steps.policies _steps.stopping _steps.listing _steps.following "
        "_native.delete _native.sweep",
    ),
    "errors": ("Errors", "saving-and-loading", "errors"),
    "hugging-face": ("Hugging Face folders", "hugging-face", "hf hf_storage quantized_hf_storage"),
    "mapping": ("Names and layouts", "hugging-face", "_mapping.mappings mapping"),
    "stores": ("Object stores", "object-stores", "_io.stores"),
    "events": ("Events", "events", "events"),
    "frameworks": (
        "Frameworks",
        "frameworks",
        "integrations integrations.accelerate integrations.lightning integrations.ray integrations.torchtitan "
        "integrations.transformers",
    ),
    "planners": (
        "Planners and storages",
        "planners",
        "planner default_planner planner_helpers storage metadata stateful _native.writer _native.reader",
    ),
    "torch": (
        "Modules with torch's names",
        "migrate-from-dcp",
        "api filesystem format_utils fsspec_filesystem logger optimizer resharding state_dict state_dict_loader "
        "state_dict_saver utils cli",
    ),
}

Nav = list[str | dict[str, "str | Nav"]]


def documents() -> dict[str, str]:
    """The page of each document of the repository."""
    inside = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    return OUTSIDE | {path: re.sub(r"README\.md$", "index.md", path.removeprefix("docs/")) for path in inside}


def copy_documents() -> None:
    """All documents as pages, and the files that they show or link to."""
    pages = documents()
    for file in (ROOT / "docs").rglob("*.*"):
        if file.suffix in (".png", ".svg", ".css"):
            copy(file, PAGES / file.relative_to(ROOT / "docs"))
    for document, page in pages.items():
        target = PAGES / page
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(with_links(ROOT / document, target, pages))


def copy(source: Path, target: Path) -> None:
    """Copy a file, and make the folder that it goes to."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def with_links(document: Path, page: Path, pages: dict[str, str]) -> str:
    """The text of ``document`` with links that lead from ``page`` to where all files are in the site."""

    def moved(found: re.Match[str]) -> str:
        target, mark, anchor = found[2].partition("#")
        if "://" in target or not target or found[2].startswith("mailto:"):
            return found[0]
        path = (document.parent / target).resolve()
        path = path / "README.md" if path.is_dir() else path
        if not path.is_file() or ROOT not in path.parents:
            raise SystemExit(f"{document.relative_to(ROOT)} links to {target}, which is not there")
        name = path.relative_to(ROOT).as_posix()
        if name in pages:
            goal = PAGES / pages[name]
        elif path.suffix in (".png", ".svg") and name.startswith("docs/"):
            goal = PAGES / name.removeprefix("docs/")
        else:  # as text, which browsers show
            shown = path.suffix in (".json", ".png", ".svg")
            goal = PAGES / "source" / (name if shown else f"{name}.txt")
            copy(path, goal)
        return f"{found[1]}{os.path.relpath(goal, page.parent)}{mark}{anchor}{found[3]}"

    parts = re.split(r"(^```.*?^```$)", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else re.sub(r"(\]\()([^)\s]+)(\))", moved, part) for part in parts)


def public_names(module: griffe.Module) -> list[str]:
    """The names of a public module, without those that only torch's own programs use."""
    if module.exports is not None:
        return [str(name) for name in module.exports if not str(name).startswith("_") or str(name) == "__version__"]
    return [
        name
        for name, member in module.members.items()
        if not name.startswith("_") and isinstance(member, griffe.Object) and not member.is_module
        if not member.is_attribute or member.docstring
    ]


def write_api(package: griffe.Module) -> Nav:
    """A page for each topic, with every public name once; returns where they are."""
    adapters = [name for name, each in package["integrations"].members.items() if isinstance(each, griffe.Module)]
    modules = set(dir(holdfast)) - set(holdfast.__all__) | {f"integrations.{name}" for name in adapters}
    modules -= {"integrations.torchtitan_state"}  # a part of the adapter
    placed = {module for *_, names in API.values() for module in names.split()}
    at_top: dict[str, list[str]] = {}
    for name in public_names(package):
        at_top.setdefault(package.members[name].target_path.removeprefix("holdfast.").rpartition(".")[0], []).append(
            name
        )
    if lost := (modules | at_top.keys()) - placed:
        raise SystemExit(f"no page of the API has {', '.join(sorted(lost))}: add it to API in tools/docs_pages.py")
    nav: Nav = []
    (PAGES / "api").mkdir()
    for page, (title, guide, names) in API.items():
        found = [name for module in names.split() for name in at_top.get(module, [])]
        listed = ", ".join(f"[`{name}`][holdfast.{name}]" for name in sorted(found, key=lambda name: name[0].isupper()))
        text = f"# {title}\n\n{listed}{listed and '. '}By example: [{GUIDES[guide]}](../guides/{guide}.md).\n\n"
        for module in names.split():
            if module in modules:
                text += module_section(package, module, at_top.get(module, []))
            else:
                text += "".join(entries(package, "holdfast", at_top[module], "##"))
        (PAGES / "api" / f"{page}.md").write_text(text)
        nav.append({title: f"api/{page}.md"})
    return nav


def module_section(package: griffe.Module, name: str, at_top: list[str]) -> str:
    """What a public module is for, and its names; links to those that are on other pages, as names of ``holdfast``."""
    module = package[name]
    said = documented(module, f"holdfast.{name}")
    shared = [each for each in public_names(module) if each in holdfast.__all__ and each not in at_top]
    own = [each for each in public_names(module) if each not in holdfast.__all__]
    text = f"## holdfast.{name} {{ #holdfast.{name} }}\n\n{said}\n\n"
    if shared:
        links = ", ".join(f"[`{each}`][holdfast.{each}]" for each in shared)
        text += f"It also has these names of `holdfast`: {links}.\n\n"
    text += "".join(entries(package, "holdfast", at_top, "###"))
    return text + "".join(entries(package, f"holdfast.{name}", own, "###"))


def documented(value: griffe.Object | griffe.Alias, path: str) -> str:
    """The docstring of ``value``, which must have one."""
    said: str = value.docstring.value.strip() if value.docstring is not None else ""
    if not said:
        raise SystemExit(f"{path} is public and has no docstring")
    return said


def entries(package: griffe.Module, module: str, names: list[str], heading: str) -> Iterator[str]:
    """A block of mkdocstrings for each name: functions first, as they stand in their files."""
    where = package if module == "holdfast" else package[module.removeprefix("holdfast.")]
    found = [(name, where.members[name]) for name in names]
    found = [(name, each.final_target if isinstance(each, griffe.Alias) else each) for name, each in found]
    for name, value in sorted(found, key=lambda each: (each[1].is_attribute, each[1].is_class, each[1].lineno or 0)):
        documented(value, f"{module}.{name}")
        # Where a signature has the fields, only those with a docstring of their own are shown once more.
        has_signature = value.is_class and ("dataclass" in value.labels or "__init__" in value.members)
        shown = [
            member
            for member, each in value.members.items()
            if not member.startswith("_") and isinstance(each, (griffe.Function, griffe.Attribute))
            if each.is_function or each.docstring or not has_signature
        ]
        yield f"::: {module}.{name}\n    options:\n      heading_level: {len(heading)}\n"
        yield f"      members: {json.dumps(shown) if shown and value.is_class else 'false'}\n\n"


def write_commands() -> Nav:
    """A page for each command, made from the command itself."""
    (PAGES / "cli").mkdir()
    group: Any = typer.main.get_command(holdfast.cli.app)
    commands = group.commands.items()
    (PAGES / "cli" / "index.md").write_text(
        command_page(group, "holdfast")
        + "\n## Commands\n\n| | |\n|---|---|\n"
        + "".join(f"| [`{name}`]({name}.md) | {first_line(each.help)} |\n" for name, each in commands)
    )
    for name, command in commands:
        (PAGES / "cli" / f"{name}.md").write_text(command_page(command, f"holdfast {name}"))
    rows: Nav = [{name: f"cli/{name}.md"} for name, _ in commands]
    return [{"holdfast": "cli/index.md"}, *rows]


def first_line(text: str | None) -> str:
    """The first line of ``text``, for a table."""
    return (text or "").partition("\n")[0].replace("|", "\\|")


def command_page(command: Any, name: str) -> str:
    """Help, usage, options, examples and exit codes of a command."""
    context = command.context_class(command, info_name=name, help_option_names=["-h", "--help"])
    usage = command.get_usage(context).removeprefix("Usage: ")
    rows = [row for each in command.get_params(context) if (row := each.get_help_record(context))]
    table = "".join(f"| `{option}` | {cell(meaning)} |\n" for option, meaning in rows)
    if not command.help:
        raise SystemExit(f"{name} has no help")
    said = re.sub(r"(?<!`)(--?[a-z][a-z-]*)(?!`)", r"`\1`", command.help)
    text = f"# {name}\n\n{said}\n\n```console\n$ {usage}\n```\n\n| | |\n|---|---|\n{table}"
    for part in (command.epilog or "").split("\b\n"):
        title, _, lines = part.strip().partition(":\n")
        if lines:
            text += f"\n## {title}\n\n```text\n{re.sub('^  ', '', lines, flags=re.MULTILINE)}\n```\n"
    return text


def cell(text: str) -> str:
    """``text`` as Markdown that says the same, in one line."""
    return re.sub(r"([*_|\[\]])", r"\\\1", " ".join(text.split())).replace("<", "&lt;")


def order(api: Nav, commands: Nav) -> Nav:
    """The sections of the site; every page is in one of them."""
    guides = sorted((PAGES / "guides").glob("*.md"), key=lambda page: ([*GUIDES, page.stem].index(page.stem), page))
    decisions = [f"adr/{page.name}" for page in sorted((PAGES / "adr").glob("0*.md"))]
    nav: Nav = [
        {"Holdfast": "index.md"},
        {"Start in five minutes": "start.md"},
        {"Guides": [{GUIDES.get(page.stem, page.stem): f"guides/{page.name}"} for page in guides]},
        {"API": api},
        {"Commands": commands},
        {"Promises": [{"Guarantees": "guarantees.md"}, {"Security": "security.md"}, {"Versions": "deprecation.md"}]},
        {"Format": "format.md"},
        {"Performance": [{"Asynchronous saves": "performance.md"}, {"Thousands of ranks": "performance-scale.md"}]},
        {"How it is built": [{"Architecture": "architecture.md"}, {"Contributing": "contributing.md"}]},
        {"Decisions": ["adr/index.md", *decisions]},
        {"Changes": "changes.md"},
    ]  # fmt: skip
    named = set(re.findall(r'"([^"]+\.md)"', json.dumps(nav)))
    there = {page.relative_to(PAGES).as_posix() for page in PAGES.rglob("*.md")}
    if named != there:
        raise SystemExit(f"no section of the site has, or no document is: {', '.join(sorted(named ^ there))}")
    return nav


def toml(value: str | Nav | dict[str, str | Nav]) -> str:
    """``value`` as TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {toml(each)}" for key, each in value.items()) + " }"
    return json.dumps(value) if isinstance(value, str) else f"[{', '.join(map(toml, value))}]"


def write_for_programs(nav: Nav) -> None:
    """``llms.txt``, a list of all pages with their first sentences, and ``llms-full.txt``, their text."""
    listed, full = f"# Holdfast\n\n> {holdfast.__doc__.strip().splitlines()[0]}\n", ""
    for section, pages in ((name, pages) for each in nav if isinstance(each, dict) for name, pages in each.items()):
        listed += f"\n## {section}\n\n"
        for page in re.findall(r'"([^"]+\.md)"', json.dumps(pages)):
            text = (PAGES / page).read_text()
            title = text.partition("\n")[0].removeprefix("# ")
            said = re.search(r"^(?!#|:::|\||```|<|- |\s)(.+?)(?=\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
            summary = re.sub(r"\[([^]]*)\](\([^)]*\)|\[[^]]*\])", r"\1", " ".join(said[1].split())) if said else ""
            listed += f"- [{title}]({page.removesuffix('.md')}.html): {summary}\n"
            full += f"<!-- {page} -->\n\n{text}\n\n"
    (PAGES / "llms.txt").write_text(listed)
    (PAGES / "llms-full.txt").write_text(full)


def main() -> None:
    """Make everything in ``build/docs`` anew, but the site itself."""
    shutil.rmtree(BUILD, ignore_errors=True)
    PAGES.mkdir(parents=True)
    copy_documents()
    package = griffe.load("holdfast", search_paths=[str(ROOT / "src")])
    assert isinstance(package, griffe.Module)
    nav = order(write_api(package), write_commands())
    write_for_programs(nav)
    settings = (ROOT / "docs" / "zensical.toml").read_text()
    (BUILD / "zensical.toml").write_text(settings.replace("nav = []", f"nav = {toml(nav)}"))


if __name__ == "__main__":
    main()
