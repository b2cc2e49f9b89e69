"""Rewrites of graphs: a module for each, with its row, operators and patterns; and the pass that applies them.

To add one, write `rewrites/NAME.py`. No other file of the package changes:

1. After the imports, the row, `REWRITE = Rewrite("what it does", ...)`, and a blank line. `table` reads it from the
   text, so it may name only what `table` has. `order` is its place among the others.
2. For dynamo's graph, before autograd: `traced=f"{__name__}:rewrite"`, and `rewrite = traced.replacing(targets,
   new_node)`. For the graph that Inductor lowers: `patterns=f"{__name__}:add_patterns"`, and `matching.register`.
3. `matching.define` defines an operator where ATen has none; its fake kernel returns the strides of what is replaced.
   Raise the row's `version` where it may win or lose as it did not before: what was decided with it is raced again.
4. Read arguments by their names (`read`), and `require` conditions, with sizes compared by `same_sizes` and
   `known_true`: what is not known to be equal is different. `NoMatchError` says that a node stays.
5. In `tests/rewrites/`, a match, a near miss for each condition, and programs in `test_drawn_calls.py`; then
   `python -m tests.docs_tables --write`.
"""

from backend_kwargs.rewrites.table import Rewrite, list_rewrites, register_rewrite

__all__ = ["Rewrite", "list_rewrites", "register_rewrite"]
