"""The size of the code: fails if a tree has more of it than before, too many short helpers, or a too long function.

Statements and tokens are counted, since a formatter moves lines. What a tree may have is in pyproject.toml; a number
there rises only with a sentence in CHANGELOG.md. Generated stubs do not count.

A helper here is private, has at most five lines, and is used only once, by a call: to read that call, a reader must
look it up. Such a helper should hide a decision; one that only names an expression is better inlined. A function that
is passed as a value, for instance in a table, does not count.
"""

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SHORT, LONG = 5, 60  # lines, of which the docstring's count
MOST: dict[str, dict[str, int]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["size"]
RELEASED: dict[str, tuple[int, int]] = {  # statements and tokens of 0.1.0, where it had the folder
    "backend_kwargs": (10932, 128366),
    "backend_kwargs/cli": (643, 7079),
    "backend_kwargs/compare": (336, 3813),
    "backend_kwargs/harness": (347, 3511),
    "backend_kwargs/integrations": (33, 256),
    "backend_kwargs/report": (451, 4985),
    "benchmarks": (5254, 75468),
    "benchmarks/analysis": (1071, 15339),
    "benchmarks/execution": (1404, 16225),
    "benchmarks/studies": (739, 10149),
    "benchmarks/workloads": (1788, 30509),
    "tests": (14556, 197806),
    "tests/auto": (2439, 30345),
    "tests/benchmarks": (2299, 32177),
    "tests/faults": (516, 6094),
    "tests/frameworks": (531, 5614),
    "tests/gpu": (1234, 15677),
}
OTHER_CODE = (".css", ".j2", ".js", ".sh")  # counted by lines, and by words and signs
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
MOST_SHARE = {"backend_kwargs": 0.08, "benchmarks": 0.08}  # of all functions that are such helpers


class Size(NamedTuple):
    statements: int
    tokens: int


def size_of(folder: Path) -> Size:
    """Return how much code is in a folder, docstrings included."""
    found = [_of_file(path) for path in folder.rglob("*") if path.suffix in (".py", *OTHER_CODE)]
    return Size(*map(sum, zip(*found, strict=True))) if found else Size(0, 0)


@cache
def _of_file(path: Path) -> Size:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return Size(len(list(filter(str.strip, text.splitlines()))), len(re.findall(r"\w+|[^\w\s]", text)))
    statements = sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text)))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return Size(statements, sum(each.type not in LAYOUT for each in tokens))


def sizes(root: Path = ROOT) -> Iterator[str]:
    """Yield a table of the statements and tokens in each folder, what its tree may have, and what it had in 0.1.0."""
    yield f"{'':24} {'statements':>10} {'at most':>10} {'0.1.0':>10} {'tokens':>10} {'at most':>10} {'0.1.0':>10}"
    for tree, most in MOST.items():
        for folder in (root / tree, *sorted(path for path in (root / tree).iterdir() if path.is_dir())):
            limits = most.values() if folder.name == tree else ("", "")
            before = RELEASED.get(str(folder.relative_to(root)), ("", ""))
            if (size := size_of(folder)).statements:
                columns = (f"{each:>10}" for row in zip(size, limits, before, strict=True) for each in row)
                yield f"{'  ' * (folder.name != tree) + folder.name:24} {' '.join(columns)}"


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
    """Yield a line for each tree with too much code or too many helpers, and for each function that is too long."""
    for tree, limits in MOST.items():
        for name, size in size_of(root / tree)._asdict().items():
            if size > limits[name]:
                yield (
                    f"{tree} has {size} {name}, over {limits[name]}: make it smaller, or raise the number in "
                    "pyproject.toml and say why in CHANGELOG.md"
                )
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
    sys.stdout.writelines(f"{line}\n" for line in sizes())
    if lines := list(faults()):
        sys.exit("\n".join(lines))
