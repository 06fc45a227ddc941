"""Bytes that torch wrote or will read: archives and pickles. The one place that may unpickle."""
