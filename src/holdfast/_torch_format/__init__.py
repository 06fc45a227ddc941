"""torch's own on-disk format over any file system; ``holdfast.filesystem`` is its public face."""
