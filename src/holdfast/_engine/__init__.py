"""Bytes between files and memory, for every format: read in verified segments, written in whole pages."""
