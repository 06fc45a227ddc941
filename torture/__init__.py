"""Faults, injected into saves and loads by the thousand: what the promises of docs/guarantees.md are held against.

``run.py`` runs every module of ``parts/``. Nothing in here is shipped.
"""
