"""URLs of object stores."""

from __future__ import annotations

import os
import re

from holdfast._io import posix
from holdfast._io.store_errors import without_secrets

SCHEMES = frozenset({"s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "memory"})
# Settings and passwords do not belong there, and stores differ in what a name without letters stands for.
_NO_PLACE = re.compile(r"[?#\x00-\x1f]|://[^/]*:[^/]*@|://.+//+[^/]")


def is_store_url(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is the URL of an object store that is used by itself, not through fsspec.

    ValueError for one with a password or settings in it: it is to be refused before anybody tells or logs it.
    """
    text = posix.text_path(path)
    scheme, mark, _ = text.partition("://")
    is_one = bool(mark) and scheme.lower() in SCHEMES
    if is_one and _NO_PLACE.search(text):
        raise _refusal(text)
    return is_one


def checked_url(url: str) -> str:
    """``url`` without "/" at its end, its scheme in small letters; ValueError if it is not that of an object store."""
    text = posix.text_path(url).rstrip("/")
    if text.endswith(":"):
        text += "//"
    if not is_store_url(text):
        raise _refusal(text)
    scheme, mark, rest = text.partition("://")
    return scheme.lower() + mark + rest


def _refusal(text: str) -> ValueError:
    return ValueError(
        f"{without_secrets(text, {})!r} is no URL of an object store, such as s3://bucket/run, without a password, "
        "anything behind ? or #, and // in between"
    )


def root_of(url: str) -> str:
    """The bucket, or all that is in memory. The scheme is in small letters."""
    scheme, _, rest = checked_url(url).partition("://")
    return "memory://" if scheme == "memory" else f"{scheme}://{rest.partition('/')[0]}"
