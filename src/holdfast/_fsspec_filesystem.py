"""torch's format at URLs, under the name that torch.distributed.checkpoint has for the module."""

from holdfast._torch_format.remote import FsspecReader, FsspecWriter

__all__ = ["FsspecReader", "FsspecWriter"]
