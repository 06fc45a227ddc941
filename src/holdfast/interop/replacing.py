"""use_in_torch: native storage for code that names torch's FileSystemWriter and FileSystemReader.

Names are replaced, in torch and in every module that has imported them; torch's classes themselves are never changed,
and those that torch derives from them keep them.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from types import ModuleType, TracebackType

from holdfast.interop import torch_storage
from holdfast.interop.torch_storage import Options

_log = logging.getLogger("holdfast")

_CLASSES: dict[type, type] = {
    torch_storage.TORCHS_WRITER: torch_storage.FileSystemWriter,
    torch_storage.TORCHS_READER: torch_storage.FileSystemReader,
}
_KEEP_TORCHS = (
    "holdfast.",
    "torch.distributed.checkpoint.hf_storage.",
    "torch.distributed.checkpoint.quantized_hf_storage.",
    "torch.distributed.checkpoint._fsspec_filesystem.",
)


def use_in_torch(*, verify: bool = True, cast: bool = False, allow_pickle: bool = False) -> Replacement:
    """Make torch's FileSystemWriter and FileSystemReader stand for native storage, until undone.

    What is imported later gets the replacements too. Checkpoints that torch wrote before are still read. Uses may nest;
    the names come back with the end of the last one. The process that torch's async_save starts in its process mode
    knows nothing of it: give async_save a storage_writer there.

    Args:
        verify: check every byte that is read against its digest.
        cast: let a tensor of one floating type be loaded into one of another, as torch's own storage does.
        allow_pickle: write and load objects that only a pickle can hold, as torch's own storage does.

    Returns:
        The replacement, to be undone; as a context manager it undoes itself.
    """
    return Replacement(Options(verify=verify, cast=cast, allow_pickle=allow_pickle))


class Replacement:
    """One use of native storage under torch's names; ``replaced`` lists the names, as the log does."""

    def __init__(self, options: Options) -> None:
        # torch derives its fsspec storage when it first needs it: that has to have happened before.
        with contextlib.suppress(ImportError):
            import torch.distributed.checkpoint._fsspec_filesystem  # noqa: F401
        self._options = options
        self._is_undone = False
        torch_storage.options.append(options)
        self.replaced = tuple(_replace(_CLASSES))
        _log.info("torch's file storage is native storage now, in %s", ", ".join(self.replaced) or "no further module")

    def undo(self) -> None:
        """Give the names back, unless another use still needs them; a second call does nothing."""
        if self._is_undone:
            return
        self._is_undone = True
        torch_storage.options[:] = [each for each in torch_storage.options if each is not self._options]
        if torch_storage.options:
            return
        names = _replace({ours: torchs for torchs, ours in _CLASSES.items()})
        _log.info("torch's file storage is its own again, in %s", ", ".join(names))

    def __enter__(self) -> Replacement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def _replace(classes: dict[type, type]) -> list[str]:
    """Let every name that stands for one class stand for the other; returns the names."""
    changed = []
    for module_name, module in sorted(sys.modules.items()):
        if not isinstance(module, ModuleType) or f"{module_name}.".startswith(_KEEP_TORCHS):
            continue
        for name, value in list(vars(module).items()):
            # By identity alone: asking an object of somebody's module anything else may run its code.
            for before, after in classes.items():
                if value is before:
                    setattr(module, name, after)
                    changed.append(f"{module_name}.{name}")
    return changed
