"""torch's format at URLs, under the name that torch.distributed.checkpoint has for the module."""

from holdfast._torch_format.reader import FsspecReader
from holdfast._torch_format.writer import FsspecWriter

__all__ = ["FsspecReader", "FsspecWriter"]
