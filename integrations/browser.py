"""The pages of ``holdfast view`` in a real browser, on real runs; prints what came of each case.

Four ranks train and save a run; checkpoints with 100,000 tensors, 2.2 million chunks and hostile keys are made. The
exit code is 1 if a case failed. ``python integrations/browser.py WORD ...`` runs those with all the words.
``--images FOLDER`` writes the screenshots of the docs too.
"""

from __future__ import annotations

import argparse
import http.client
import io
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import browser_run
import torch
from browser_window import SIZE, Server, Window
from PIL import Image
from selenium.webdriver.common.keys import Keys

import holdfast
import look
from tools.crew import Crew

RANKS, SAVES, TIMEOUT_S = 4, 8, 600.0
MANY_TENSORS, MANY_RANKS, MANY_SHARDED = 100_000, 1100, 2000
MOST_TENSORS_S, MOST_CHUNKS_S, MOST_SERVER_BYTES = 1.0, 3.0, 300 << 20
ROUNDS = 3
PAGES = {
    "run": ("#run?source=0", "newest whole"),
    "checkpoint": ("#checkpoint?source=0", "Modules by bytes"),
    "tensor": ("#tensor?source=0&tensor=9", "4 ranks wrote it"),
    "ranks": ("#ranks?source=0", "Bytes per rank"),
    "diff": ("#diff?source=0&row=9", "relative L2"),
    "dynamics": ("#dynamics?source=0&under=model.blocks.", "Over the steps"),
    "integrity": ("#integrity?source=0", "Every byte"),
}
COUNT_OTHERS = "return document.querySelectorAll('img, iframe, object, body script:not([src])').length"

TO_LAST_ROW = "const rows = document.querySelector('.rows'); rows.scrollTop = rows.scrollHeight; return rows.scrollTop"
ARE_ROWS_FILLED = (
    "const rows = document.querySelector('.table').querySelectorAll('.tr');"
    "return [...rows].every((each) => each.innerText.trim())"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the cases have their checkpoints, which are made when the first case needs them."""

    folder: Path
    crew: Crew

    def made(self, name: str, make: Callable[[Path], object]) -> Path:
        path = self.folder / name
        if not path.exists():
            make(path)
        return path

    @property
    def run(self) -> Path:
        """The run of the example, as it was trained: cases that change one take a copy."""
        return self.made("run", lambda path: self.crew.run(RANKS, browser_run.train, path, SAVES, timeout_s=TIMEOUT_S))

    def copy_of_run(self, name: str) -> Path:
        return Path(shutil.copytree(self.run, self.folder / name))

    @property
    def hostile(self) -> Path:
        return self.made("hostile", browser_run.save_hostile)

    @property
    def many_tensors(self) -> Path:
        return self.made("many tensors", partial(browser_run.save_tensors, tensors=MANY_TENSORS))

    @property
    def many_chunks(self) -> Path:
        def make(path: Path) -> None:
            path.mkdir()
            look.write_steps(path, MANY_RANKS, MANY_SHARDED)

        return self.made("many chunks", make)


def every_page(place: Place, window: Window) -> str:
    """Every page renders and answers, in both themes, without a word on the console, and asks its own server alone."""
    with Server([place.run, place.hostile]) as server:
        window.requested(), window.messages()
        window.open(server.url)
        window.wait_for_text("What shall be shown?")
        for theme in ("light", "dark"):
            window.see_as(theme)
            for name, (hash_, text) in PAGES.items():
                window.go(hash_)
                window.wait_for_text(text)
                assert window.run("return document.querySelector('.trouble')") is None, f"{name}: {window.text()[:500]}"
        assert "token" not in window.run("return location.href"), "the token stays in the address"
        urls, messages = window.requested(), window.messages()
    others = [url for url in urls if not url.startswith((f"{server.origin}/", "data:"))]
    assert not others, others
    assert not messages, messages
    return f"{len(PAGES)} pages in 2 themes, {len(urls)} requests to one origin, no message"


def hostile_keys(place: Place, window: Window) -> str:
    """Keys and values that look like markup are text."""
    with Server([place.hostile]) as server:
        window.open(server.url)
        window.settle()
        shown = window.text()
        for number in range(len(browser_run.HOSTILE_KEYS) + 1):
            window.go(f"#tensor?checkpoint=0&tensor={number}")
            shown += window.text()
        elements = window.run(COUNT_OTHERS)
    for key in (
        "<img src=x onerror=alert(1)>",
        "</script><script>alert(2)</script>",
        "\\u{202e}gnp.exe",
        "line\\u{a}break",
    ):
        assert key in shown, f"{key} is not shown"
    assert elements == 0, f"{elements} elements came out of keys"
    assert not window.messages(), "something was run, or refused"
    return f"{len(browser_run.HOSTILE_KEYS)} hostile keys, all text"


def refused(place: Place, window: Window) -> str:
    """A wrong Host, or no token, is 403; so is a page of another origin."""
    with Server([place.hostile]) as server:
        at = urlsplit(server.url)

        def status(path: str, **headers: str) -> int:
            connection = http.client.HTTPConnection("127.0.0.1", at.port, timeout=30)
            connection.request("GET", path, headers=headers)
            found = connection.getresponse().status
            connection.close()
            return found

        right = f"/?{at.query}"
        found = [status("/"), status("/api/sources"), status("/?token=wrong"), status("/assets/main.js")]
        found += [status(right, Host=f"evil.example:{at.port}"), status(right, Host="127.0.0.1")]
        assert found == [403] * len(found), found
        assert status(right) in (200, 302, 303), "the right token is refused"
    return f"{len(found)} requests refused with 403, the right one answered"


def deleted_step(place: Place, window: Window) -> str:
    """A step that is deleted while it is shown says so, and so does what is asked of it afterwards."""
    run = place.copy_of_run("run with a deleted step")
    steps = holdfast.Steps(run)
    with Server([run]) as server:
        window.open(server.url)
        window.settle()
        window.click(".tr", f"step {steps.latest().step}")
        window.settle()
        holdfast.delete(steps.latest().path)
        window.wait_for_text("This step has been deleted")
        window.click(".tr", "model.embedding.weight")
        window.wait_for_text("It is not there any more")
    window.messages()  # the browser writes a line for the answer 404
    return "said at once, and where it is asked for"


def live_run(place: Place, window: Window) -> str:
    """New steps appear by themselves, those of a run that has not begun too."""
    run = place.folder / "live"
    run.mkdir()
    with Server([run]) as server:
        window.open(server.url)
        window.wait_for_text("No step has been saved here yet")
        for step in (10, 20):
            holdfast.save({"weight": torch.randn(64, 48)}, run / f"step-{step}", no_dist=True)
            window.wait_for_text(f"step {step}")
        window.wait_for_text("step 20 has been saved")
    # The browser tells of a kept connection that the server has closed; the page asks again.
    messages = [each for each in window.messages() if "Failed to load resource: net::" not in each]
    assert not messages, messages
    return "2 steps appeared, the second was announced"


def keyboard(place: Place, window: Window) -> str:
    """All can be reached by keys; Back leads back."""
    with Server([place.run]) as server:
        window.open(server.url)
        window.settle()
        window.press("g", "c")
        window.settle()
        window.press("/", *"down.weight")
        window.wait_for("return location.hash.includes('down.weight')", "the search")
        window.settle()
        window.press(Keys.ESCAPE)
        window.run("document.querySelector('[role=grid]').focus()")
        window.press(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_UP, Keys.ENTER)
        window.settle()
        title = window.run("return document.querySelector('h1.key').innerText")
        assert title.endswith("down.weight"), title
        window.driver.back()
        window.settle()
        assert window.run("return document.querySelector('.search').value") == "down.weight", "Back lost the search"
        for letter, page in (
            ("r", "run"),
            ("k", "ranks"),
            ("d", "diff"),
            ("y", "dynamics"),
            ("i", "integrity"),
            ("t", "tensor"),
        ):
            window.press("g", letter)
            window.wait_for("return document.querySelector('main').id === arguments[0]", page, page)
        window.press("?")
        window.wait_for("return document.querySelector('dialog').open", "the list of keys")
        window.press(Keys.ESCAPE)
        names = window.run(
            "return [...document.querySelectorAll('button, input, select, canvas')]"
            ".filter((each) => !(each.innerText || each.ariaLabel || each.labels?.length)).length"
        )
        assert names == 0, f"{names} elements without a name for screen readers"
    return "search, arrows, Enter, Back, all pages, the list of keys"


def themes(place: Place, window: Window) -> str:
    """Dark and light are as the system has them, and can be switched."""
    paper = "return getComputedStyle(document.body).backgroundColor"
    with Server([place.run]) as server:
        window.open(server.url)
        window.settle()
        found = []
        for theme in ("light", "dark"):
            window.see_as(theme)
            found.append(window.run(paper))
        window.click("button[aria-label='Dark or light']")
        found.append(window.run(paper))
        assert found[0] == found[2] != found[1], found
        window.run("localStorage.clear(); delete document.documentElement.dataset.theme")
    return f"{found[0]} and {found[1]}"


def damaged(place: Place, window: Window) -> str:
    """Verify names file, key and range; the strip of blocks of that tensor has them too."""
    run = place.copy_of_run("run with damage")
    step = holdfast.Steps(run).latest()
    file = max(Path(step.path).glob("*"), key=lambda each: each.stat().st_size)
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, io.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))
    with Server([run]) as server:
        window.open(server.url)
        window.go("#integrity")
        window.click("button", "Verify")
        window.wait_for_text("It is damaged: 1 key in 1 file")
        window.wait_for_text(file.name)
    return f"one flipped bit in {file.stat().st_size:,} bytes found"


def lost_server(place: Place, window: Window) -> str:
    """A server that has ended is said to be lost."""
    with Server([place.run]) as server:
        window.open(server.url)
        window.settle()
        server.end()
        window.wait_for_text("The server does not answer")
        window.messages()  # of requests that nobody took
    return "said on the page"


def one_file(place: Place, window: Window) -> str:
    """The file of --html opens from the disk, asks for nothing, and says what is not in it."""
    target = place.folder / "run.html"
    command = [sys.executable, "-m", "holdfast", "view", str(place.run), "--html", str(target)]
    subprocess.run(command, check=True, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    window.requested(), window.messages()
    window.open(target.as_uri())
    for name, (hash_, text) in PAGES.items():
        window.go(hash_)
        window.wait_for_text("ot part of this file" if name in ("tensor", "diff", "integrity") else text)
    window.go("#checkpoint?search=embedding")
    shown = window.run("return document.querySelector('.table').querySelectorAll('.tr').length")
    urls, messages = window.requested(), window.messages()
    others = [url for url in urls if not url.startswith(("file:", "data:"))]
    assert not others, others
    assert not messages, messages
    assert 0 < shown < 10, f"the search shows {shown} rows"
    return f"{target.stat().st_size:,} bytes, no request, no message"


def large(path: Path, most_s: float, window: Window) -> str:
    """The seconds until a checkpoint is seen by whom opens a link to it, and the memory of the server."""
    seconds = []
    for _ in range(ROUNDS):
        with Server([path]) as server:
            window.open("about:blank")
            window.open(f"{server.url}#checkpoint")
            seconds.append(window.first_rows_s())
            window.settle()
            assert window.run(TO_LAST_ROW) > 0, "the table does not scroll"
            window.wait_for(ARE_ROWS_FILLED, "the last rows")
            elements = window.run("return document.querySelectorAll('*').length")
            assert elements < 2000, f"{elements} elements on the page"
            window.go("#tensor?tensor=0")
            window.wait_for_text("Blocks")
            memory = server.memory()
    said = ", ".join(f"{each:.2f}" for each in seconds)
    assert min(seconds) <= most_s, f"rows after {said} s; at most {most_s} s"
    assert memory <= MOST_SERVER_BYTES, f"the server has {memory >> 20} MiB"
    return f"rows after {said} s (at most {most_s:g}), server {memory >> 20} MiB, {elements} elements"


def write_images(place: Place, window: Window, folder: Path) -> str:
    """The screenshots of the docs: every page in the light, the first ones in the dark too."""
    folder.mkdir(parents=True, exist_ok=True)
    written = 0
    with Server([place.run]) as server:
        window.open(server.url)
        for name, (hash_, _) in PAGES.items():
            for theme in ("light", "dark") if name in ("run", "tensor") else ("light",):
                window.see_as(theme)
                window.go(hash_)
                if name == "integrity":
                    window.click("button", "Verify")
                    window.wait_for_text("It is whole")
                image = Image.open(io.BytesIO(window.driver.get_screenshot_as_png())).convert("RGB")
                suffix = "-dark" if theme == "dark" else ""
                image.quantize(128).save(folder / f"view-{name}{suffix}.png", optimize=True)
                written += 1
    return f"{written} images of {SIZE[0]} x {SIZE[1]} in {folder}"


def cases(place: Place, images: Path | None) -> dict[str, Callable[[Window], str]]:
    """What is to be proven, by name."""
    simple = (
        every_page,
        hostile_keys,
        refused,
        deleted_step,
        live_run,
        keyboard,
        themes,
        damaged,
        lost_server,
        one_file,
    )
    found: dict[str, Callable[[Window], str]] = {
        each.__name__.replace("_", " "): partial(each, place) for each in simple
    }
    found["100,000 tensors"] = lambda window: large(place.many_tensors, MOST_TENSORS_S, window)
    found["2.2 million chunks"] = lambda window: large(place.many_chunks / "step-1", MOST_CHUNKS_S, window)
    if images is not None:
        found["images"] = lambda window: write_images(place, window, images)
    return found


def run(case: Callable[[Window], str]) -> tuple[str, str]:
    """What came of a case in a window of its own, and a note."""
    try:
        with Window() as window:
            return "passed", case(window)
    except Exception as error:
        print(traceback.format_exc()[-4000:], file=sys.stderr)
        return "FAILED", f"{type(error).__name__}, see above"


def main() -> int:
    """Run the cases that have all the words of the command line, or all, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--images", type=Path)
    asked = parser.parse_args()
    results: dict[str, tuple[str, str]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-browser-")))
        place = Place(folder=folder, crew=stack.enter_context(Crew()))
        for name, case in cases(place, asked.images).items():
            if all(word in name for word in asked.words):
                results[name] = run(case)
                print(f"{name}: {results[name][0]}", file=sys.stderr, flush=True)
    for name, (result, note) in results.items():
        print(f"{name:20} {result:8} {note}")
    failed = sum(result == "FAILED" for result, _ in results.values())
    print(f"{len(results) - failed} of {len(results)} passed")
    return int(failed > 0 or not results)


if __name__ == "__main__":
    sys.exit(main())
