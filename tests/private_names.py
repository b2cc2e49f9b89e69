"""Private names of torch outside `backend_kwargs/torch_internals/`: fails if another module imports or names one.

That is `torch._x`, `from torch.x import _y`, a text such as "torch._x", and an attribute `._x` of an object, also by
text, unless the module defines that name itself. Names of operators are no private names: they are in their schemas.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE, ROOM = "backend_kwargs", "torch_internals"
PRIVATE = re.compile(r"_[^\W_]\w*")
IN_TEXT = re.compile(r"\btorch(?:\.\w+)*?\._[a-z]\w*")
BY_TEXT = ("getattr", "setattr", "hasattr", "delattr")
# Private attributes of others than torch, which this does not watch.
OF_OTHERS = frozenset(
    {"_replace", "_fields", "_asdict", "_getframe"}  # of Python
    | {"_sess", "_iobinding"}  # of ONNX Runtime
    | {"_support_dict"}  # of OpenVINO
    | {"_known"}  # of a CompiledModule
)
FOR_USERS = {"report/advice.py"}  # texts that a user types, who has no other name


def defined(tree: ast.Module) -> set[str]:
    """Return the names that a module defines: of functions, classes, variables, fields, and attributes of `self`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each private name of torch, some of them twice."""
    own, words = (
        defined(tree) | OF_OTHERS,
        {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)},
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("torch.")]
        elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("torch."):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            chain = ast.unparse(node)
            names = [] if node.attr in own or re.match(r"(torch\.ops|aten|mkldnn)\.", chain) else [node.attr]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in BY_TEXT:
            texts = [arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)]
            names = [text for text in texts if text not in own]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in words:
            names = IN_TEXT.findall(node.value)
        else:
            continue
        yield from ((node.lineno, name) for name in names if any(map(PRIVATE.fullmatch, name.split("."))))


def faults(root: Path = ROOT) -> Iterator[str]:
    """Yield a line for each private name outside its room."""
    package = root / PACKAGE
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package).as_posix()
        if place.startswith(f"{ROOM}/") or place in FOR_USERS:
            continue
        for line, name in sorted(set(private_names(ast.parse(path.read_text(encoding="utf-8"))))):
            yield f"{PACKAGE}/{place}:{line} names {name!r}: put it behind a function in {PACKAGE}/{ROOM}/"


if __name__ == "__main__":
    if lines := list(faults()):
        sys.exit("\n".join(lines))
