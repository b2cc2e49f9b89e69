"""What modules may import, and what an import may load."""

import ast
import json
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import backend_kwargs

ROOT = Path(backend_kwargs.__file__).parent
# Each layer imports only from those before it, at its head and inside its functions.
LAYERS = (
    "errors interval tables keys files progress",
    "torch_internals",
    "options",
    "facts stores",
    "trial",
    "graphs",
    "backends",
    "rewrites",
    "precision",
    "auto",
    "pipeline",
    "compile_records cache_artifacts backend registry regions entry_points integrations",
    "page",
    "explain report",
    "bundles harness",
    "sealing pinning",
    "fleet",
    "compare cli",
)
SUITE_ORDER = """
workloads workloads.case workloads.nets
workloads.nets.counting workloads.nets.convs workloads.nets.encoders workloads.nets.libraries workloads.nets.llama
workloads.nets.scan workloads.nets.sparse
workloads.kernels
workloads.kernels.launch workloads.kernels.attention workloads.kernels.bandwidth workloads.kernels.elementwise
workloads.kernels.matmul workloads.kernels.norms workloads.kernels.softmax workloads.kernels.cross_entropy
workloads.cases.gemm workloads.cases.attention workloads.cases.norms workloads.cases.elementwise
workloads.cases.optimizer workloads.cases.models workloads.cases.libraries workloads.cases.segments
workloads.cases workloads.user_models workloads.held_out workloads.drawn workloads.peers
execution execution.preload execution.preload_models execution.records execution.device_timer execution.ceilings
execution.roofline execution.controls execution.process execution.study execution.trial execution.worker
execution.session execution.ways execution.turns
analysis analysis.verdicts analysis.markdown analysis.regressions analysis.auto_choices analysis.plots
analysis.real_models analysis.auto_tables analysis.report analysis.page
analysis.held_out analysis.readme
arguments
studies studies.audit studies.bundles studies.fleet
studies.headroom studies.held_out studies.kernel_times studies.library_calls
studies.overhead studies.pinned studies.public_reports studies.regret
studies.rewrite_cases studies.rewrites
studies.templates studies.training_nets studies.tune_kernels
studies.commands
cli
"""
DOORS = ("__init__.py", "__main__.py")  # of a tree itself; they import what they show
# torch is imported at the head of these alone: they are loaded when a graph is there, or a model to measure.
TORCH_AT_THE_HEAD = (
    "torch_internals",
    "trial",
    "graphs",
    "backends",
    "rewrites",
    "precision",
    "auto",
    "harness",
    "compare",
    "bundles",
    "sealing",
    "fleet/audit.py",
    "fleet/racing.py",
    "cli/measured.py",
    "pinning/phases.py",
    "cache_artifacts.py",
)
# Modules of these folders that are loaded before there is a graph.
BEFORE_A_GRAPH = (
    "torch_internals/__init__.py",
    "torch_internals/replacing.py",
    "auto/__init__.py",
    "auto/candidates.py",
    "auto/decisions_toml.py",
    "auto/machine.py",
    "auto/settings.py",
    "auto/store.py",
    "backends/__init__.py",
    "backends/dynamo.py",
    "backends/others.py",
    "backends/inductor/__init__.py",
    "backends/inductor/compiler.py",
    "backends/inductor/cutlass.py",
    "backends/onnxruntime/__init__.py",
    "backends/onnxruntime/compiler.py",
    "backends/openvino/__init__.py",
    "backends/openvino/compiler.py",
    "backends/tvm/__init__.py",
    "backends/tvm/compiler.py",
    "backends/tvm/settings.py",
    "bundles/__init__.py",
    "bundles/config.py",
    "bundles/module.py",
    "graphs/__init__.py",
    "precision/__init__.py",
    "rewrites/__init__.py",
    "rewrites/table.py",
    "sealing/__init__.py",
    "sealing/declared.py",
)
FILES = {str(path.relative_to(ROOT)): path for path in sorted(ROOT.rglob("*.py"))}
WATCHED = (
    "torch",
    "torch._dynamo",
    "torch._inductor",
    "torch._inductor.compile_fx",
    "tvm",
    "tvm_ffi",
    "openvino",
    "onnxruntime",
    "typer",
    "rich",
    "matplotlib",
    "msgspec",
)


def modules(root):
    """Return the path of each module below `root`, by its dotted name."""
    files = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*.py"))}
    return {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
        for name, path in files.items()
        if name not in DOORS
    }


TREES = {
    "backend_kwargs": (" ".join(LAYERS).split(), modules(ROOT)),
    "benchmarks": (SUITE_ORDER.split(), modules(ROOT.parent / "benchmarks")),
}


@cache
def parsed(path):
    """Return the code of a file as a tree."""
    return ast.parse(path.read_text())


@cache
def imported(path):
    """Return the full names that the `import` and `from` statements of a file name."""
    return names_in(parsed(path))


def names_in(tree):
    """Return the full names that `import` and `from` statements below `tree` name."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def at_the_head(tree):
    """Return the code that runs at import: all but the bodies of functions and of TYPE_CHECKING."""
    kept = [
        node
        for node in tree.body
        if not isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    return ast.Module(kept, [])


def modules_after(statement):
    code = f"import json, sys\n{statement}\nprint(json.dumps([name for name in {WATCHED} if name in sys.modules]))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("tree", TREES)
def test_every_module_has_its_place(tree):
    """The order names each folder and module at the top, of the suite each module, exactly once."""
    order, found = TREES[tree]
    assert sorted(order) == sorted({_place(tree, name) for name in found})


def _place(tree, name):
    return name.partition(".")[0] if tree == "backend_kwargs" else name


@pytest.mark.parametrize("tree", TREES)
def test_imports_only_from_above(tree):
    """A module imports only from its own folder and from layers above it."""
    order, found = TREES[tree]
    upward = []
    for name in found:
        place = _place(tree, name)
        wanted = {_place(tree, each) for each in imports_of(tree, name)} - {place if tree == "backend_kwargs" else ""}
        upward += [f"{name} imports {each}" for each in wanted - set(order[: order.index(place)])]
    assert not upward


def test_what_the_suite_imports_is_there():
    """Each name of the package that the suite imports is defined, also where a function imports it."""
    found, missing = TREES["backend_kwargs"][1], []
    for path in (ROOT.parent / "benchmarks").rglob("*.py"):
        for full in (each for each in imported(path) if each.startswith("backend_kwargs.")):
            inner = full.removeprefix("backend_kwargs.")
            module, _, name = inner.rpartition(".")
            if module in found and inner not in found and name not in defined(found[module]):
                missing.append(f"{path.name} imports {full}")
    assert not missing


@cache
def defined(path):
    """Return the names that a module defines or imports at its top, also under a condition."""
    names, left = set(), [*parsed(path).body]
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        left += ast.iter_child_nodes(node)
    return names


@pytest.mark.parametrize("tree", TREES)
def test_no_module_imports_itself_by_others(tree):
    """No imports go in a circle, those inside functions included."""
    TopologicalSorter({name: imports_of(tree, name) for name in TREES[tree][1]}).prepare()


def imports_of(tree, name):
    """Return the modules of `tree` that this one imports."""
    _, found = TREES[tree]
    wanted = set()
    for full in imported(found[name]):
        if full.startswith(f"{tree}."):
            parts = full.split(".")[1:]
            # `from a.b import c`: the module a.b.c, or a name in a.b.
            wanted.add(next(".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in found))
    return wanted


def test_the_package_knows_no_suite():
    """The package imports nothing from the benchmark suite, which is not installed with it."""
    assert not [
        (name, full) for name, path in FILES.items() for full in imported(path) if full.startswith("benchmarks")
    ]


LIGHT = [name for name in FILES if not {name, name.partition("/")[0]} & {*TORCH_AT_THE_HEAD}]
LIGHT += BEFORE_A_GRAPH


def test_torch_waits():
    """torch and TVM are imported inside functions, except in modules that are useless without them."""
    heads = {name: {full.partition(".")[0] for full in names_in(at_the_head(parsed(FILES[name])))} for name in LIGHT}
    assert not [name for name, packages in heads.items() if packages & {"torch", "tvm", "tvm_ffi"}]


def test_tvm_has_one_folder():
    """Only one folder uses TVM's API, since each TVM release renames parts of it."""
    outside = {name: path for name, path in FILES.items() if not name.startswith("backends/tvm/")}
    packages = {name: {full.partition(".")[0] for full in imported(path)} for name, path in outside.items()}
    assert not [name for name, used in packages.items() if used & {"tvm", "tvm_ffi"}]


def test_import_is_light():
    """`import backend_kwargs` imports neither torch nor the command line."""
    assert modules_after("import backend_kwargs") == []


@pytest.mark.parametrize("word", ["--help", "--version", "lsit"])
def test_the_command_line_is_light(word):
    """Help, the version and an error about a typo wait for no torch."""
    run = "from backend_kwargs.cli import main\ntry: main()\nexcept SystemExit: pass"
    ran = f"sys.argv = ['backend-kwargs', {word!r}]\n{run}"
    assert not {"torch", "openvino", "onnxruntime", "tvm", "matplotlib"} & {*modules_after(ran)}


@pytest.mark.parametrize("spec", ["tmpl-inductor", "tmpl-tvm", "tvm", "openvino-native", "onnxruntime"])
def test_plain_backend_is_light(spec):
    """A backend without options imports no torch, TVM or OpenVINO."""
    assert modules_after(f"from backend_kwargs.backend import find_backend\nfind_backend({spec!r})") == []


def test_tvm_options_are_light():
    """TVM's options are checked without importing TVM, but for those that its own tables know."""
    bound = "find_backend('tvm').bind('test', {'target': 'llvm', 'trials': 8})"
    assert modules_after(f"from backend_kwargs.backend import find_backend\n{bound}") == []


def test_entry_point_is_light():
    """dynamo's entry points load without Inductor's compiler."""
    loaded = modules_after("from backend_kwargs.entry_points import max_autotune")
    assert "torch._dynamo" in loaded
    assert "torch._inductor.compile_fx" not in loaded


def test_public_names():
    """Every public name exists and has a docstring."""
    assert sorted(backend_kwargs.__all__) == backend_kwargs.__all__
    assert all(getattr(backend_kwargs, name).__doc__ for name in backend_kwargs.__all__)
    assert len(backend_kwargs.__all__) <= 20


@pytest.mark.parametrize("name", backend_kwargs._MOVED)
def test_a_name_that_was_moved(name):
    """The error is the line to write instead."""
    with pytest.raises(AttributeError, match=f"^bk.{name} was moved: from backend_kwargs") as raised:
        getattr(backend_kwargs, name)
    exec(str(raised.value).partition(": ")[2])


def test_the_suite_asks_for_nothing_hidden():
    """The benchmark suite uses only names of the package without an underscore."""
    names = {name for path in (ROOT.parent / "benchmarks").rglob("*.py") for name in imported(path)}
    assert not [name for name in names if name.startswith("backend_kwargs.") and "._" in name]


def test_listed_mutants_are_of_todays_code():
    """Each entry of mutants.toml names lines, or a function, that its module has."""
    listed = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text())
    gone = []
    for module, functions in listed.pop("on_a_gpu_alone").items():
        text = (ROOT.parent / module).read_text()
        gone += [(module, name) for name in functions if f"def {name}(" not in text]
    for module, entries in listed.items():
        lines = {line.strip() for line in (ROOT.parent / module).read_text().splitlines()}
        taken = [line[1:].strip() for each in entries for line in each["change"].splitlines() if line.startswith("-")]
        gone += [(module, line) for line in taken if line not in lines]
    assert gone == []
