"""Races: which candidate compiles a graph, decided by measuring, checked, and remembered."""
