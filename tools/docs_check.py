"""Checks the built documentation site in ``build/docs/site``, whatever its builder may have passed over.

Every link leads to a file and an anchor that are there. No page loads anything from another host. Every public name of
``holdfast`` has its entry. Prints what is wrong, and exits with 1 if anything is.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

import holdfast  # noqa: E402

SITE = ROOT / "build" / "docs" / "site"
OTHER_HOST = re.compile(r"^\s*(https?:)?//")
# Attributes that a browser follows by itself. Of ``href``, only that of <link>: its page loads it.
LOADED = ("src", "srcset", "poster", "data", "action", "style")
MADE_BY_SCRIPTS = ("mermaid", "arithmatex")
"""Classes for which the theme's script would load a library from elsewhere."""


class Page(HTMLParser):
    """What a page links to, what it loads, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.classes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self.classes |= set(given.get("class", "").split())
        self.links += [given["href"]] if "href" in given and tag in ("a", "area") else []
        self.loaded += [given[name] for name in LOADED if name in given]
        self.loaded += [given["href"]] if "href" in given and tag == "link" else []
        if tag == "autoref":
            self.links.append("an unresolved reference")


def broken_links(pages: dict[Path, Page]) -> list[str]:
    """Links that lead to no file, or to no anchor of a page."""
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or path.name == "404.html":  # that page is shown at any path
                continue
            goal = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            goal = goal / "index.html" if goal.is_dir() else goal
            if not goal.is_file():
                broken.append(f"{path.relative_to(SITE)} links to {link}, which is not there")
            elif (
                parts.fragment and goal in pages and unquote(parts.fragment) not in pages[goal].anchors | {"__comments"}
            ):
                broken.append(f"{path.relative_to(SITE)} links to {link}; that page has no such anchor")
    return broken


def outside_requests(pages: dict[Path, Page]) -> list[str]:
    """What a browser would fetch from other hosts to show a page."""
    found = []
    for path, page in pages.items():
        for value in page.loaded:
            if OTHER_HOST.match(value) or re.search(r"url\(['\"]?(https?:)?//", value):
                found.append(f"{path.relative_to(SITE)} loads {value}")
        found += [f"{path.relative_to(SITE)} has a {name}" for name in MADE_BY_SCRIPTS if name in page.classes]
    for sheet in SITE.rglob("*.css"):
        for value in re.findall(r"(?:url\(['\"]?|@import\s*['\"])((?:https?:)?//[^)'\"]*)", sheet.read_text()):
            found.append(f"{sheet.relative_to(SITE)} loads {value}")
    return found


def main() -> None:
    """Print what is wrong, or how much was looked at."""
    pages = {path.resolve(): Page(path.read_text()) for path in SITE.rglob("*.html")}
    anchors = set().union(*(page.anchors for path, page in pages.items() if path.parent.name == "api"))
    wrong = broken_links(pages) + outside_requests(pages)
    lost = [name for name in holdfast.__all__ if f"holdfast.{name}" not in anchors]
    wrong += [f"no page has an entry for holdfast.{name}" for name in lost]
    wrong += [f"{name} is not in the site" for name in ("index.html", "llms.txt") if not (SITE / name).is_file()]
    links = sum(len(page.links) for page in pages.values())
    print("\n".join(wrong) or f"{len(pages)} pages, {links} links: all lead somewhere, nothing comes from other hosts")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
