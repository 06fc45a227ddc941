"""What every test gets: reproducible hypothesis runs, and gpu tests skipped where there is no GPU.

Deadlines of hypothesis are off, because two shared cores make any bound on one example flaky; pytest-timeout bounds
each test instead.
"""

from __future__ import annotations

import os

import hypothesis
import pytest
import torch

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
