"""Rewrites of graphs: patterns, the operators that replace them, and how they join Inductor's passes."""
