"""torch's format at URLs, under the name that torch.distributed.checkpoint has for the module since 2.15."""

from holdfast._torch_format.file_systems import RemoteFileSystem as _FileSystem
from holdfast._torch_format.reader import FsspecReader
from holdfast._torch_format.writer import FsspecWriter

__all__ = ["FsspecReader", "FsspecWriter", "_FileSystem"]
