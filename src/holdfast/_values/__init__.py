"""Pure values that everything else is built from: boxes, the dtype table, digests, limits.

Never imports torch and never touches a file.
"""
