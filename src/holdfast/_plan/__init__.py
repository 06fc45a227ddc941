"""Pure planning over numpy columns: coverage, overlap, byte ranges, packing.

Every function here depends on its arguments only. Never imports torch and never touches a file.
"""
