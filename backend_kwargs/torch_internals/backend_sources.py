"""dynamo's own backends as its sources declare them, for a list of names: importing dynamo takes seconds."""

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

REGISTERS = frozenset({"register_backend", "register_debug_backend", "register_experimental_backend"})


def own_backends() -> dict[str, str]:
    """Return the first line of the docstring of each backend that torch registers, "" if it has none."""
    torch = find_spec("torch")
    folders = torch.submodule_search_locations if torch else None
    files = (file for folder in folders or () for file in sorted(Path(folder, "_dynamo", "backends").glob("*.py")))
    return {name: doc.partition("\n")[0] for file in files for name, doc in _declared(file)}


def _declared(file: Path) -> Iterator[tuple[str, str]]:
    body = ast.parse(file.read_text(encoding="utf-8")).body
    docs = {each.name: ast.get_docstring(each) or "" for each in body if isinstance(each, ast.FunctionDef)}
    for each in body:
        if isinstance(each, ast.FunctionDef):
            for decorator in each.decorator_list:
                named, given = _call(decorator)
                if named in REGISTERS:
                    yield _text(given.get("name")) or each.name, docs[each.name]
        elif isinstance(each, ast.Expr):
            named, given = _call(each.value)
            if named in REGISTERS and (name := _text(given.get("name"))):
                compiler_fn = given.get("compiler_fn")
                yield name, docs.get(compiler_fn.id, "") if isinstance(compiler_fn, ast.Name) else ""


def _call(node: ast.expr) -> tuple[str, dict[str | None, ast.expr]]:
    """Return the name of what is called, or named alone, and its keywords."""
    called = node.func if isinstance(node, ast.Call) else node
    keywords = node.keywords if isinstance(node, ast.Call) else []
    return (called.id if isinstance(called, ast.Name) else ""), {each.arg: each.value for each in keywords}


def _text(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
