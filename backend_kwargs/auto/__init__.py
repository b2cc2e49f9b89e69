"""Races: measure which candidate compiles a graph best, check its results, and store the decision."""
