"""What tests share: rank processes, reproducible hypothesis runs, quick garbage collections, skips where no GPU is.

Deadlines of hypothesis are off, because two shared cores make any bound on one example flaky; pytest-timeout bounds
each test instead.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from tools.crew import Crew

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell has it for what runs in its background
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("developer", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "developer")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="no CUDA device here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(no_gpu)


def pytest_collection_finish() -> None:
    gc.freeze()  # torch and all tests are here to stay: a collection need not look through them


@pytest.fixture(scope="session")
def pool() -> Iterator[Crew]:
    """Rank processes: ``pool.run(world, function, *arguments)`` returns the results by rank."""
    with Crew(for_tests=True) as crew:
        yield crew
