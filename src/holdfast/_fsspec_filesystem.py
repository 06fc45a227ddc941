"""``fsspec_filesystem`` under the name that torch has for it before 2.15."""

from holdfast.fsspec_filesystem import FsspecReader, FsspecWriter
from holdfast.fsspec_filesystem import _FileSystem as FileSystem

__all__ = ["FileSystem", "FsspecReader", "FsspecWriter"]
