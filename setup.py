"""What the package page shows: README.md with links that work there. All else is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def found(pattern: str, file: str) -> str:
    """What ``pattern`` finds in a file of the project."""
    text = re.search(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    if text is None:
        raise SystemExit(f"{file} has nothing like {pattern}")
    return text[1]


repository = found(r'^Repository = "(.*)"$', "pyproject.toml")
version = found(r'^__version__ = "(.*)"$', "src/holdfast/_version.py")
readme = (ROOT / "README.md").read_text(encoding="utf-8")
setup(
    long_description=re.sub(r"\]\((?!https?:|#)", f"]({repository}/blob/v{version}/", readme),
    long_description_content_type="text/markdown",
)
