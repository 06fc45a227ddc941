"""Snapshots in host memory, and who writes them: the slab, the copies into it, the thread or process behind a save."""
