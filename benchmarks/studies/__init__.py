"""Measurements besides the suite, each with its own page of results; `commands` is their part of the command line."""
