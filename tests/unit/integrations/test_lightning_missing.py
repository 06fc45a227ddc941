"""Without Lightning, its adapter says what to install."""

from __future__ import annotations

import importlib
import sys

import pytest


def test_the_error_names_the_package_and_the_tested_range(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("holdfast.integrations.lightning")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lightning", None)
    with pytest.raises(ImportError, match=r"pip install 'lightning'; tested with 2\.6 to 2\.6") as raised:
        importlib.import_module("holdfast.integrations.lightning")
    assert str(raised.value).startswith("holdfast.integrations.lightning needs lightning.")
