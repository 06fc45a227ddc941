"""A server of ``holdfast view`` in a process of its own, and a window of a real browser on it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.support.ui import WebDriverWait

TIMEOUT_S = 60
BROWSER, DRIVER = "chromium", "chromedriver"
SIZE = 1280, 860
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    f"--window-size={SIZE[0]},{SIZE[1]}",
)


class Server:
    """``holdfast view`` on ``paths``; ends with the block."""

    def __init__(self, paths: Sequence[Path]) -> None:
        command = [sys.executable, "-m", "holdfast", "view", *map(str, paths), "--no-browser"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        if not self.url.startswith("http://127.0.0.1:"):
            self.process.kill()
            raise AssertionError(f"the server did not begin: {self.url!r}")
        self.origin = self.url.partition("/?")[0]

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=TIMEOUT_S)

    def memory(self) -> int:
        """The memory that it has now, in bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        return int(status.partition("VmRSS:")[2].split()[0]) << 10


class Window:
    """A browser with an empty profile, and what its page says."""

    def __init__(self) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="holdfast-chromium-", ignore_cleanup_errors=True)
        options = Options()
        for flag in (*_FLAGS, f"--user-data-dir={self._profile.name}"):
            options.add_argument(flag)
        options.binary_location = str(shutil.which(BROWSER))
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        service = Service(
            str(shutil.which(DRIVER)), log_output=subprocess.DEVNULL, env={**os.environ, "LANG": "C.UTF-8"}
        )
        self.driver = webdriver.Chrome(options=options, service=service)
        self.driver.set_page_load_timeout(TIMEOUT_S)
        self._events: list[dict[str, Any]] = []

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *error: object) -> None:
        self.driver.quit()
        self._profile.cleanup()

    def open(self, url: str) -> None:
        self.driver.get(url)

    def go(self, place: str) -> None:
        """Show the page at ``place``, the hash of the address, and wait until it has its answers."""
        self.run("location.hash = arguments[0]", place)
        self.settle()

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def settle(self) -> None:
        """Wait until nothing on the page waits for an answer."""
        self.run("return new Promise((resolve) => setTimeout(() => requestAnimationFrame(resolve), 50))")
        self.wait_for(
            "return document.querySelector('main') && !document.querySelector('.waiting, progress, [aria-busy=true]')",
            "the answers",
        )

    def wait_for(self, script: str, what: str, *arguments: object) -> Any:
        """What ``script`` returns once that is true."""
        waiting = WebDriverWait(self.driver, TIMEOUT_S, poll_frequency=0.05)
        return waiting.until(
            lambda driver: driver.execute_script(script, *arguments),
            f"{what} did not come; the page: {self.text()[:600]}",
        )

    def wait_for_text(self, text: str) -> None:
        self.wait_for("return document.body.innerText.includes(arguments[0])", repr(text), text)

    def text(self) -> str:
        return str(self.run("return document.body.innerText"))

    def press(self, *keys: str) -> None:
        """Press keys one after the other, wherever the focus is."""
        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def click(self, selector: str, text: str = "") -> None:
        """Click on the first element of ``selector`` that has ``text`` in it."""
        find = (
            "return [...document.querySelectorAll(arguments[0])].find((each) => each.innerText.includes(arguments[1]))"
        )
        self.wait_for(find, f"{selector} with {text!r}", selector, text).click()

    def see_as(self, theme: str) -> None:
        """Have the system say that it is dark, or light."""
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.run("return new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)))")

    def messages(self) -> list[str]:
        """What was written to the console since the last call."""
        return [f"{each['level']}: {each['message']}" for each in self.driver.get_log("browser")]

    def requested(self) -> list[str]:
        """The URLs that were asked for, by anything, since the last call."""
        events = [json.loads(each["message"])["message"] for each in self.driver.get_log("performance")]
        return [each["params"]["request"]["url"] for each in events if each["method"] == "Network.requestWillBeSent"]

    def first_rows_s(self) -> float:
        """The seconds from the begin of the navigation until rows of a table were there."""
        script = "const [mark] = performance.getEntriesByName('holdfast-rows'); return mark && mark.startTime"
        return float(self.wait_for(script, "rows")) / 1000
