"""Measurements beside the suite, each with a page of results of its own."""
