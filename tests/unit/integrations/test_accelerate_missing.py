"""The adapter for accelerate, where it cannot be imported."""

from __future__ import annotations

import importlib
import sys

import pytest

from holdfast.integrations import TESTED


def test_without_accelerate_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "holdfast.integrations.accelerate", raising=False)
    with pytest.raises(ImportError) as raised:
        importlib.import_module("holdfast.integrations.accelerate")
    said = str(raised.value)
    assert "holdfast.integrations.accelerate needs accelerate" in said
    assert "pip install 'accelerate'" in said
    assert f"tested with {TESTED['accelerate'].oldest}" in said
