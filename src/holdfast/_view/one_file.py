"""The pages and what they show in one file, for sharing: it asks nobody for anything.

The answers are in it as JSON, by what would have been asked. That is a bounded part; what was left out is said in the
file, and to who writes it. No element of a tensor is in it, only numbers that were stored beside them.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
import time
from collections import deque
from dataclasses import dataclass
from urllib.parse import parse_qs, quote, urlsplit

from holdfast._io import posix
from holdfast._process import Ending
from holdfast._version import __version__
from holdfast._view.answers import Answer, Query, encoded
from holdfast._view.questions import Viewer
from holdfast._view.server import assets
from holdfast.errors import CheckpointError, InternalError

_MOST_CHECKPOINTS = 50
_MOST_TENSORS = 2000
_MOST_VALUES = 500
_MOST_LEVELS = 300
_ROWS = 1000

_ASSET = re.compile(r'<(?:link rel="stylesheet" href|script src)="/assets/([^"/]+)">(?:</script>)?')
_ENDS = re.compile(r"</(script|style)|<!--", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPage:
    """What was written: its bytes, how many answers are in it, and what is not."""

    bytes: int
    answers: int
    left_out: list[str]


def write_page(viewer: Viewer, path: str) -> WrittenPage:
    """Write the pages about what ``viewer`` shows to the file ``path``, which appears as a whole, or not at all."""
    gathered = _Gathered(viewer)
    gathered.sources()
    about = {"version": __version__, "made_at": int(time.time()), "left_out": gathered.left_out}
    data = one_page(assets(), gathered.answers | {"/about": about})
    target = posix.absolute(path)
    staged = f"{target}.{secrets.token_hex(4)}.tmp"
    removing = Ending(lambda: posix.remove(staged))
    with removing, removing:
        posix.write_new(staged, data)
        posix.replace(staged, target)
    return WrittenPage(bytes=len(data), answers=len(gathered.answers), left_out=gathered.left_out)


class _Gathered:
    """The answers that go into the file, asked for as the pages would."""

    def __init__(self, viewer: Viewer) -> None:
        self._viewer = viewer
        self.answers: dict[str, object] = {}
        self.left_out = ["elements of tensors, and differences"]

    def _ask(self, url: str, **more: str) -> dict[str, object]:
        """The answer to ``url``, with ``more`` parameters than the pages will give; an error is an answer too."""
        parts = urlsplit(url)
        given = parse_qs(parts.query, keep_blank_values=True) | {name: [text] for name, text in more.items()}
        try:
            answer: Answer = self._viewer.questions["GET", parts.path](Query(given))
        except CheckpointError as error:
            answer = {"error": {"kind": type(error).__name__, "message": error.message}}
        assert isinstance(answer, dict)
        return answer

    def _keep(self, url: str) -> dict[str, object]:
        self.answers[url] = answer = self._ask(url)
        return answer

    def sources(self) -> None:
        self._keep("/api/sources")
        checkpoints: list[int] = []
        for source in self._viewer.sources.all:
            if source.checkpoint is not None:
                checkpoints.append(source.checkpoint)
                continue
            run = self._keep(f"/api/run?source={source.number}")
            steps = run.get("steps")
            found = (
                [step["checkpoint"] for step in steps if step["checkpoint"] is not None]
                if isinstance(steps, list)
                else []
            )
            checkpoints += found[::-1]
            self._levels(f"/api/dynamics?source={source.number}", "series")
        for number in checkpoints[:_MOST_CHECKPOINTS]:
            self._checkpoint(number)
        if len(checkpoints) > _MOST_CHECKPOINTS:
            self.left_out.append(
                f"{len(checkpoints) - _MOST_CHECKPOINTS} of {len(checkpoints)} checkpoints, the oldest"
            )

    def _checkpoint(self, number: int) -> None:
        if "error" in self._keep(f"/api/checkpoint?checkpoint={number}"):
            return
        name = self._viewer.sources.checkpoint(number).path
        self._keep(f"/api/ranks?checkpoint={number}")
        self._levels(f"/api/tree?checkpoint={number}", "children")
        for what, most in (("tensors", _MOST_TENSORS), ("values", _MOST_VALUES)):
            url = f"/api/{what}?checkpoint={number}"
            pages = [self._ask(url, first=str(first), count=str(_ROWS)) for first in range(0, most, _ROWS)]
            rows = [row for page in pages for row in _list(page, "rows")][:most]
            total = pages[0].get("total", 0)
            self.answers[url] = {"total": total, "first": 0, "rows": rows}
            if isinstance(total, int) and total > len(rows):
                self.left_out.append(f"{total - len(rows):,} of {total:,} {what} in the table of {name}")
        table = self._viewer.sources.table(number)
        for row in range(min(len(table.keys), _MOST_TENSORS) if table.statistics else 0):
            self._keep(f"/api/tensor?checkpoint={number}&tensor={row}")

    def _levels(self, url: str, children: str) -> None:
        """The levels of a tree, from the top, as many as fit."""
        waiting = deque([""])
        for _ in range(_MOST_LEVELS):
            if not waiting:
                return
            answer = self._keep(f"{url}&under={quote(waiting.popleft(), safe=_SAFE)}")
            waiting += [str(child["under"]) for child in _list(answer, children) if child["under"]]
        if waiting:
            self.left_out.append(f"levels of the tree below {waiting[0][:200]!r} and others: {url}")


_SAFE = "-_.!~*'()"  # what encodeURIComponent leaves as it is, beside letters and digits


def _list(answer: dict[str, object], name: str) -> list[dict[str, object]]:
    found = answer.get(name)
    return found if isinstance(found, list) else []


def one_page(files: dict[str, bytes], answers: dict[str, object]) -> bytes:
    """index.html with its scripts and styles inside, and ``answers`` before the first script."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}

    def inside(match: re.Match[str]) -> str:
        text = files[match[1]].decode()
        element = "script" if match[0].startswith("<script") else "style"
        if _ENDS.search(text):
            raise InternalError(f"the asset {match[1]!r} cannot be put into a page; please report it")
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[element].append(f"'sha256-{digest}'")
        return f"<{element}>{text}</{element}>"

    page = _ASSET.sub(inside, files["index.html"].decode())
    # A key may hold anything: nothing in JSON needs these characters as they are.
    data = encoded(answers).decode().replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    policy = "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'" + "".join(
        f"; {element}-src {' '.join(found)}" for element, found in hashes.items() if found
    )
    page = page.replace("<head>", f'<head>\n<meta http-equiv="Content-Security-Policy" content="{policy}">', 1)
    first = page.index("<script>") if "<script>" in page else page.index("</body>")
    return f'{page[:first]}<script type="application/json" id="holdfast-data">{data}</script>\n{page[first:]}'.encode()
