"""Graphs: what they write, their parts, frozen parameters, and calls that can be repeated."""
