"""Measurements besides the suite, each with its own page of results."""
