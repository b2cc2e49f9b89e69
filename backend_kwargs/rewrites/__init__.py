"""Rewrites of graphs: patterns, the operators that replace them, and the pass that applies them in Inductor."""
