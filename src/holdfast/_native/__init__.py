"""The native format: its codec, its writer, its reader and how a checkpoint is published.

docs/format.md is the specification. Nothing in here unpickles, and all that is read is bounded before it is used.
"""
