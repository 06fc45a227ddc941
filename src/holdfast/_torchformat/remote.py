"""Storage at a URL: torch's own fsspec storage, which is what there is for ``scheme://`` ids."""

from __future__ import annotations

import os
from typing import Any

from holdfast.errors import UnsafeError


def is_remote(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether the id is a URL and not a path."""
    return "://" in os.fspath(checkpoint_id)


def remote_writer(url: str | os.PathLike[str], *, overwrite: bool) -> Any:
    """The writer of torch for ``url``; ValueError where there is none."""
    return _storage("FsspecWriter", url)(os.fspath(url), overwrite=overwrite)


def remote_reader(url: str | os.PathLike[str], *, allow_pickle: bool) -> Any:
    """The reader of torch for ``url``; ValueError where there is none, UnsafeError unless it may unpickle."""
    if not allow_pickle:
        raise UnsafeError(
            f"the reader of URLs unpickles what it finds; pass allow_pickle=True if you trust {os.fspath(url)!r}"
        )
    return _storage("FsspecReader", url)(os.fspath(url))


def _storage(name: str, url: str | os.PathLike[str]) -> Any:
    try:
        from torch.distributed.checkpoint import _fsspec_filesystem
    except ImportError as error:
        raise ValueError(f"{os.fspath(url)!r} is a URL, and those need fsspec; install it, or use a path") from error
    storage = getattr(_fsspec_filesystem, name)
    if not storage.validate_checkpoint_id(url):
        raise ValueError(f"fsspec knows no storage for {os.fspath(url)!r}; install the one that its scheme names")
    return storage
