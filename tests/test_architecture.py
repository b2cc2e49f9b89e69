"""What may import what, and what an import may pull in."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import backend_kwargs

ROOT = Path(backend_kwargs.__file__).parent
# Each imports only from those above it, at its head and inside its functions. `compilers` and `cli` count as one each.
ORDER = (
    "errors",
    "files",
    "spec",
    "layers",
    "templates",
    "options",
    "trust",
    "catalogue",
    "toml",
    "requirements",
    "interval",
    "accuracy",
    "measure",
    "compilers",
    "records",
    "backend",
    "registry",
    "regions",
    "entry_points",
    "explain",
    "report",
    "compiled",
    "harness",
    "compare",
    "cli",
)
DOORS = ("__init__", "__main__")  # of the package itself; they import what they show
TORCH_AT_THE_HEAD = ("accuracy", "measure", "harness", "compare", "compilers", "compiled")
# Of the compilers, what loads before a graph comes.
BEFORE_A_GRAPH = (
    "__init__",
    "auto/__init__",
    "auto/candidates",
    "auto/decisions",
    "auto/exchange",
    "auto/settings",
    "auto/store",
    "cutlass",
    "declared",
    "dynamo",
    "inductor",
    "openvino",
    "tvm/__init__",
    "tvm/checks",
    "tvm/settings",
    "tvm/versions",
)
FILES = {str(path.relative_to(ROOT)): path for path in sorted(ROOT.rglob("*.py"))}
ROOMS = {name: path for name, path in FILES.items() if Path(name).stem not in DOORS or "/" in name}
WATCHED = (
    "torch",
    "torch._dynamo",
    "torch._inductor",
    "torch._inductor.compile_fx",
    "tvm",
    "tvm_ffi",
    "openvino",
    "typer",
    "rich",
    "matplotlib",
    "msgspec",
)


def room(name):
    return name.removesuffix(".py").partition("/")[0]


def imported(tree):
    """Yield the full name of everything that `import` and `from` name below `tree`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_the_head(tree):
    """Return what runs when the module is imported: all but the bodies of functions and of TYPE_CHECKING."""
    kept = [
        node
        for node in tree.body
        if not isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    return ast.Module(kept, [])


def modules_after(statement):
    code = f"import json, sys\n{statement}\nprint(json.dumps([name for name in {WATCHED} if name in sys.modules]))"
    return json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def test_every_module_has_its_place():
    """The order names each module, and none that is gone."""
    assert {room(name) for name in ROOMS} == set(ORDER)


@pytest.mark.parametrize("name", ROOMS)
def test_imports_only_from_above(name):
    """A module imports from those above it alone."""
    above = {"__future__", *ORDER[: ORDER.index(room(name)) + 1]} - ({room(name)} if "/" not in name else set())
    ours = (
        full.split(".") for full in imported(ast.parse(ROOMS[name].read_text())) if full.startswith("backend_kwargs")
    )
    assert {parts[1] for parts in ours} <= above


LIGHT = [name for name in FILES if room(name) not in TORCH_AT_THE_HEAD]
LIGHT += [f"compilers/{name}.py" for name in BEFORE_A_GRAPH]
LIGHT += [f"compiled/{name}.py" for name in ("__init__", "config", "module", "states")]


@pytest.mark.parametrize("name", LIGHT)
def test_torch_waits(name):
    """torch and TVM are imported inside functions, but for the modules that are nothing without them."""
    heads = {full.partition(".")[0] for full in imported(at_the_head(ast.parse(FILES[name].read_text())))}
    assert not heads & {"torch", "tvm", "tvm_ffi"}


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("compilers/tvm/")])
def test_tvm_has_one_folder(name):
    """What touches TVM lies in one folder, since each TVM renames what it has."""
    packages = {full.partition(".")[0] for full in imported(ast.parse(FILES[name].read_text()))}
    assert not packages & {"tvm", "tvm_ffi"}


def test_import_is_light():
    """`import backend_kwargs` imports no torch and nothing of the command line."""
    assert modules_after("import backend_kwargs") == []


@pytest.mark.parametrize("spec", ["tmpl-inductor", "tmpl-tvm", "tvm", "tmpl-openvino", "openvino"])
def test_plain_backend_is_light(spec):
    """A backend without options costs no torch, no TVM and no OpenVINO."""
    assert modules_after(f"from backend_kwargs.backend import find_backend\nfind_backend({spec!r})") == []


def test_tvm_options_are_light():
    """Options of TVM's are checked without TVM."""
    bound = "find_backend('tvm').bind('test', {'target': {'kind': 'llvm', 'num-cores': 2}, 'trials': 8})"
    assert modules_after(f"from backend_kwargs.backend import find_backend\n{bound}") == []


def test_entry_point_is_light():
    """What dynamo's entry points name loads without Inductor's compiler."""
    loaded = modules_after("from backend_kwargs.entry_points import max_autotune")
    assert "torch._dynamo" in loaded
    assert "torch._inductor.compile_fx" not in loaded


def test_public_names():
    """Every public name exists and says what it is."""
    assert sorted(backend_kwargs.__all__) == backend_kwargs.__all__
    assert all(getattr(backend_kwargs, name).__doc__ for name in backend_kwargs.__all__)


@pytest.mark.parametrize("path", sorted((ROOT.parent / "benchmarks").rglob("*.py")), ids=lambda path: path.stem)
def test_the_suite_asks_for_nothing_hidden(path):
    """The benchmark suite names modules, functions and classes of the package that have no underscore."""
    names = imported(ast.parse(path.read_text()))
    assert not [name for name in names if name.startswith("backend_kwargs.") and "._" in name]
