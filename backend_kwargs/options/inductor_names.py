"""Inductor's options and this package's as types: the names are in the stub beside this file, which editors read."""

from typing import TypedDict


class InductorOptions(TypedDict, total=False):
    """Inductor's options and this package's, by name, with their types."""


class InductorKeywords(TypedDict, total=False):
    """Those whose names are Python's, for make_backend's keywords."""
