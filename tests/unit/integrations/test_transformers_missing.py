"""The adapter for the Trainer, where transformers cannot be imported."""

from __future__ import annotations

import importlib
import sys

import pytest

from holdfast.integrations import TESTED


def test_without_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "holdfast.integrations.transformers", raising=False)
    with pytest.raises(ImportError) as raised:
        importlib.import_module("holdfast.integrations.transformers")
    said = str(raised.value)
    assert "holdfast.integrations.transformers needs transformers" in said
    assert "pip install 'transformers'" in said
    assert f"tested with {TESTED['transformers'].oldest}" in said
