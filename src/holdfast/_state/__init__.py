"""Torch objects on one side, keys, boxes and raw bytes on the other. No I/O, no planning."""
