"""dynamo's own backends as its sources declare them, for a list of names: importing dynamo takes seconds."""

import ast
import re
from importlib.util import find_spec
from pathlib import Path

# In code as `ast.unparse` writes it: a decorated function, or a call with the name and the function.
REGISTERED = re.compile(
    r"^@register_\w*backend(?:\((?:.*\bname='(?P<given>\w+)')?.*\))?\n(?:@.+\n)*def (?P<own>\w+)"
    r"|^register_\w*backend\(name='(?P<named>\w+)', compiler_fn=(?P<function>\w+)",
    re.MULTILINE,
)


def own_backends() -> dict[str, str]:
    """Return the first line of the docstring of each backend that torch registers, "" if it has none."""
    torch, found = find_spec("torch"), dict[str, str]()
    for folder in (torch.submodule_search_locations if torch else None) or ():
        for file in sorted(Path(folder, "_dynamo", "backends").glob("*.py")):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            docs = {each.name: ast.get_docstring(each) or "" for each in tree.body if isinstance(each, ast.FunctionDef)}
            for each in REGISTERED.finditer(ast.unparse(tree)):
                name = each["given"] or each["own"] or each["named"]
                found[name] = docs.get(each["own"] or each["function"], "").partition("\n")[0]
    return found
