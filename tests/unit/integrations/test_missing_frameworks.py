"""The adapters, where their framework cannot be imported."""

from __future__ import annotations

import importlib
import sys

import pytest

from holdfast.integrations import TESTED


@pytest.mark.parametrize("adapter", ["ray", "torchtitan"])
def test_without_the_framework_the_error_says_what_to_install(adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, adapter, None)
    for name in (adapter, f"{adapter}_state"):
        monkeypatch.delitem(sys.modules, f"holdfast.integrations.{name}", raising=False)
    with pytest.raises(ImportError) as raised:
        importlib.import_module(f"holdfast.integrations.{adapter}")
    said = str(raised.value)
    assert f"holdfast.integrations.{adapter} needs {adapter}" in said
    assert f"pip install '{TESTED[adapter].package}'" in said
    assert f"tested with {TESTED[adapter].oldest}" in said
