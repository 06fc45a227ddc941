"""Rules for models of transformers."""

from __future__ import annotations

from holdfast._mapping.rules import Rule


def rules_of(model: object) -> list[Rule]:
    raise NotImplementedError
