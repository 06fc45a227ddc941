"""Typed paths of the state <-> their form in the manifest.

A str is a str dict key; ``{"key": value}`` another dict key as typed JSON; ``{"list": i}`` and ``{"tuple": i}`` are
positions. A leaf at the top of the state under its own key has no path in the manifest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from holdfast._native.paths import PathElement as StoredElement
from holdfast._native.values import decode_value, encode_value
from holdfast._state.paths import Path, PathElement, TupleIndex, TypedKey
from holdfast._values.limits import MAX_KEY_BYTES
from holdfast.errors import InvalidStateError


def check_key(key: str) -> None:
    """InvalidStateError when no manifest can hold ``key``."""
    if key.isascii() and len(key) <= MAX_KEY_BYTES:
        return
    try:
        is_short = len(key.encode()) <= MAX_KEY_BYTES
    except UnicodeEncodeError:
        raise InvalidStateError(f"the key {key[:200]!r} has lone surrogates; rename it", key=key) from None
    if not is_short:
        raise InvalidStateError(f"the key {key[:200]!r}... has more than {MAX_KEY_BYTES} bytes; shorten it", key=key)


def encode_path(key: str, path: Path | None) -> tuple[StoredElement, ...] | None:
    """The manifest's form of ``path``; None when the state has the leaf at the top under ``key``."""
    if path is None or (len(path) == 1 and type(path[0]) is str and path[0] == key):
        return None
    return tuple(_encode_element(key, element) for element in path)


def _encode_element(key: str, element: PathElement) -> StoredElement:
    if isinstance(element, TypedKey):
        return {"key": encode_value(element.value, key=key)}
    if isinstance(element, str):
        return str(element)
    return {"tuple" if isinstance(element, TupleIndex) else "list": int(element)}


def decode_path(key: str, path: Sequence[StoredElement] | None) -> Path:
    """The path of ``key``, from what the manifest says and has been checked to mean."""
    if path is None:
        return (key,)
    return tuple(_decode_element(key, element) for element in path)


def _decode_element(key: str, element: StoredElement) -> PathElement:
    if isinstance(element, str):
        return element
    ((tag, body),) = element.items()
    if tag == "key":
        return TypedKey(decode_value(body, key=key))
    position = cast(int, body)
    return TupleIndex(position) if tag == "tuple" else position
