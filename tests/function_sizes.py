"""The sizes of functions: fails if a tree has too many short helpers, or a function is too long.

A helper here is private, has at most five lines, and is used only once, by a call: to read that call, a reader must
look it up. Such a helper should hide a decision; one that only names an expression is better inlined. A function that
is passed as a value, for instance in a table, does not count.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SHORT, LONG = 5, 60  # lines, of which the docstring's count
MOST_SHARE = {"backend_kwargs": 0.08, "benchmarks": 0.08}  # of all functions that are such helpers


class Function(NamedTuple):
    place: str
    name: str
    lines: int
    called_once: bool

    @property
    def is_helper(self) -> bool:
        """Whether it is private, called once and short."""
        private = self.name.startswith("_") and not self.name.endswith("__")
        return private and self.called_once and self.lines <= SHORT


def name_of(node: ast.AST) -> str:
    """Return the name that a node reads, or ""."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def functions(tree: Path) -> Iterator[Function]:
    """Yield every function and method below a folder."""
    for path in sorted(tree.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        uses = Counter(map(name_of, nodes))
        calls = Counter(name_of(node.func) for node in nodes if isinstance(node, ast.Call))
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                place = f"{path.relative_to(tree.parent)}:{node.lineno}"
                once = uses[node.name] == calls[node.name] == 1
                yield Function(place, node.name, node.end_lineno - node.lineno + 1, once)


def faults(root: Path = ROOT) -> Iterator[str]:
    """Yield a line for each tree with too many helpers, and for each function that is too long."""
    for tree, most in MOST_SHARE.items():
        found = list(functions(root / tree))
        helpers = [function for function in found if function.is_helper]
        share = len(helpers) / len(found)
        if share > most:
            names = ", ".join(f"{each.place} {each.name}" for each in helpers)
            yield f"{tree}: {share:.1%} of the functions are helpers of at most {SHORT} lines, over {most:.0%}: {names}"
        yield from (
            f"{each.place} {each.name} has {each.lines} lines, over {LONG}" for each in found if each.lines > LONG
        )


if __name__ == "__main__":
    if lines := list(faults()):
        sys.exit("\n".join(lines))
