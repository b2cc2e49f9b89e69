"""What modules may import, and what an import may load."""

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import backend_kwargs

ROOT = Path(backend_kwargs.__file__).parent
# Each module imports only from those before it, at its head and inside its functions.
PACKAGE_ORDER = """
errors atomic_write plain_data tables interval spec layers named_values templates options trust catalogue templates_toml
requirements
rewrites
measure.trees measure.inputs measure.accuracy measure.bound measure.environment measure.failures measure.roundings
measure.served measure.timing measure.memory measure.statistics measure
compilers compilers.declared compilers.dynamo compilers.openvino compilers.tensorrt compilers.generated_code
compilers.graphs
compilers.fell_back compilers.parameter_guards compilers.freezing compilers.fused_steps compilers.layouts
compilers.parts
compilers.precision compilers.precision.table compilers.precision.bounds
compilers.precision.casts compilers.precision.weights compilers.precision.quantised compilers.precision.reference
compilers.auto
compilers.auto.settings compilers.auto.eligibility compilers.auto.deadline compilers.auto.workload
compilers.precision.error compilers.precision.serving compilers.precision.lowered
compilers.part_compiler compilers.partitioned
compilers.tvm
compilers.tvm.versions compilers.tvm.checks compilers.tvm.settings compilers.tvm.decompositions compilers.tvm.shapes
compilers.tvm.opaque compilers.tvm.lowering.node compilers.tvm.lowering.vector compilers.tvm.lowering.pointwise
compilers.tvm.lowering.reductions compilers.tvm.lowering.linear compilers.tvm.lowering.indexing
compilers.tvm.lowering.views compilers.tvm.lowering.windows compilers.tvm.lowering.table compilers.tvm.lowering.kernels
compilers.tvm.lowering.graph
compilers.tvm.lowering compilers.tvm.supported compilers.tvm.target
compilers.tvm.no_fast_math compilers.tvm.tune compilers.tvm.cpu_schedule compilers.tvm.schedules
compilers.tvm.build compilers.tvm.runtime compilers.tvm.against_eager compilers.tvm.part_compiler compilers.tvm.compiler
compilers.engines compilers.engines.engine compilers.engines.onnx_settings compilers.engines.onnx_session
compilers.engines.onnxruntime compilers.engines.openvino_settings compilers.engines.openvino_model
compilers.engines.openvino_native
compilers.others
compilers.inductor
compilers.inductor.compile_step compilers.inductor.fallbacks compilers.inductor.torch_fixes
compilers.inductor.allowed_attention compilers.inductor.cutlass
compilers.inductor.tuned_products compilers.inductor.frozen_code
compilers.inductor.cudagraph_outputs compilers.inductor.rewrites compilers.inductor.rewrites.matching
compilers.inductor.rewrites.traced
compilers.inductor.rewrites.kernels compilers.inductor.rewrites.kernels.launch
compilers.inductor.rewrites.kernels.convolution compilers.inductor.rewrites.kernels.attention
compilers.inductor.rewrites.kernels.decode compilers.inductor.rewrites.kernels.cross_entropy
compilers.inductor.rewrites.kernels.layer_norm compilers.inductor.rewrites.kernels.rotary
compilers.inductor.rewrites.kernels.gather_sum
compilers.inductor.rewrites.operators
compilers.inductor.rewrites.folding
compilers.inductor.rewrites.convolution compilers.inductor.rewrites.grouped_convolution
compilers.inductor.rewrites.linear compilers.inductor.rewrites.onednn
compilers.inductor.rewrites.library_attention compilers.inductor.rewrites.attention
compilers.inductor.rewrites.packed compilers.inductor.rewrites.losses compilers.inductor.rewrites.layer_norm
compilers.inductor.rewrites.rotary compilers.inductor.rewrites.attention_mask compilers.inductor.rewrites.matrix_vector
compilers.inductor.rewrites.gather_sum compilers.inductor.rewrites.decode_attention compilers.inductor.rewrites.patches
compilers.inductor.rewrites.multihead_attention
compilers.inductor.rewrites.apply
compilers.auto.request compilers.auto.graph_stats
compilers.auto.candidates compilers.auto.decision compilers.auto.store compilers.auto.decisions_toml
compilers.auto.ranks compilers.auto.cache_key compilers.auto.reporting
compilers.auto.ddp_buckets
compilers.auto.sandbox compilers.auto.roofline compilers.auto.products
compilers.auto.rewritten compilers.auto.head_to_head compilers.auto.budget compilers.auto.checks
compilers.auto.selection compilers.auto.race
compilers.auto.decide
compilers.inductor.compiler
compile_records cache_artifacts backend registry regions entry_points integrations integrations.accelerate explain
report.graphs report.advice report.uncaptured report.generated report.ran report
compiled.config compiled.states compiled.samples compiled.files compiled.libraries compiled.library_code
compiled.operators compiled.graphs compiled.identity compiled.frames compiled.package_guards compiled.package
compiled.running compiled.exported
compiled.ahead compiled.building compiled.loading compiled.deploying compiled.extensions compiled.fingerprint
compiled.manifest compiled.replacing compiled.bundle compiled.module compiled
harness harness.named_models harness.isolation harness.read_only harness.study harness.trial
compare.rows compare.drawing compare.trial compare
cli.console cli.modules cli.models cli.pasting cli.arguments cli.listing cli.options cli.explain cli.doctor
cli.decisions cli.compare cli.tune cli.bundles cli
"""
SUITE_ORDER = """
workloads workloads.case workloads.nets
workloads.nets.counting workloads.nets.convs workloads.nets.encoders workloads.nets.libraries workloads.nets.llama
workloads.nets.graphs workloads.nets.scan workloads.nets.sparse
workloads.kernels
workloads.kernels.launch workloads.kernels.attention workloads.kernels.bandwidth workloads.kernels.elementwise
workloads.kernels.matmul workloads.kernels.norms workloads.kernels.softmax workloads.kernels.cross_entropy
workloads.cases.gemm workloads.cases.attention workloads.cases.norms workloads.cases.elementwise
workloads.cases.optimizer workloads.cases.models workloads.cases.libraries workloads.cases.segments
workloads.cases workloads.user_models workloads.peers
execution execution.preload execution.preload_models execution.records execution.device_timer execution.ceilings
execution.roofline execution.controls execution.process execution.study execution.trial execution.worker
execution.session
analysis analysis.verdicts analysis.markdown analysis.regressions analysis.auto_choices analysis.plots
analysis.real_models analysis.auto_tables analysis.report analysis.compilers
arguments
studies studies.bundles studies.compilers studies.kernel_times studies.overhead studies.precision studies.public_reports
studies.rewrite_cases studies.rewrites
studies.templates studies.tune_kernels
studies.tvm_speed
studies.commands
cli
"""
DOORS = ("__init__.py", "__main__.py")  # of a tree itself; they import what they show
# torch is imported at the head of these alone: they are loaded when a graph is there, or a model to measure.
TORCH_AT_THE_HEAD = ("measure", "harness", "compare", "compilers", "compiled")
# Modules of the compilers that are loaded before there is a graph.
BEFORE_A_GRAPH = (
    "__init__",
    "auto/__init__",
    "auto/candidates",
    "auto/decision",
    "auto/decisions_toml",
    "auto/settings",
    "auto/store",
    "declared",
    "dynamo",
    "engines/__init__",
    "engines/onnx_settings",
    "engines/onnxruntime",
    "engines/openvino_native",
    "engines/openvino_settings",
    "inductor/__init__",
    "inductor/compiler",
    "inductor/cutlass",
    "inductor/fallbacks",
    "inductor/torch_fixes",
    "others",
    "tensorrt",
    "openvino",
    "precision/__init__",
    "precision/bounds",
    "precision/table",
    "tvm/__init__",
    "tvm/checks",
    "tvm/compiler",
    "tvm/settings",
    "tvm/versions",
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
    "backend_kwargs": (PACKAGE_ORDER.split(), modules(ROOT)),
    "benchmarks": (SUITE_ORDER.split(), modules(ROOT.parent / "benchmarks")),
}
MODULES = [(tree, name) for tree, (_, found) in TREES.items() for name in found]


def imported(tree):
    """Yield the full names that `import` and `from` statements below `tree` name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


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
    return json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("tree", TREES)
def test_every_module_has_its_place(tree):
    """The order names each existing module exactly once."""
    order, found = TREES[tree]
    assert sorted(order) == sorted(found)


@pytest.mark.parametrize(("tree", "name"), MODULES, ids=[f"{tree}.{name}" for tree, name in MODULES])
def test_imports_only_from_above(tree, name):
    """A module imports only from those above it."""
    order, found = TREES[tree]
    wanted = set()
    for full in imported(ast.parse(found[name].read_text())):
        if full.startswith(f"{tree}."):
            parts = full.split(".")[1:]
            # `from a.b import c`: the module a.b.c, or a name in a.b.
            wanted.add(next(".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in found))
    assert not wanted - set(order[: order.index(name)])


def test_the_package_knows_no_suite():
    """The package imports nothing from the benchmark suite, which is not installed with it."""
    assert not [
        (name, full)
        for name, path in FILES.items()
        for full in imported(ast.parse(path.read_text()))
        if full.startswith("benchmarks")
    ]


LIGHT = [name for name in FILES if name.partition("/")[0] not in TORCH_AT_THE_HEAD]
LIGHT += [f"compilers/{name}.py" for name in BEFORE_A_GRAPH]
LIGHT += [f"compiled/{name}.py" for name in ("__init__", "config", "module", "states")]


@pytest.mark.parametrize("name", LIGHT)
def test_torch_waits(name):
    """torch and TVM are imported inside functions, except in modules that are useless without them."""
    heads = {full.partition(".")[0] for full in imported(at_the_head(ast.parse(FILES[name].read_text())))}
    assert not heads & {"torch", "tvm", "tvm_ffi"}


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("compilers/tvm/")])
def test_tvm_has_one_folder(name):
    """Only one folder uses TVM's API, since each TVM release renames parts of it."""
    packages = {full.partition(".")[0] for full in imported(ast.parse(FILES[name].read_text()))}
    assert not packages & {"tvm", "tvm_ffi"}


def test_import_is_light():
    """`import backend_kwargs` imports neither torch nor the command line."""
    assert modules_after("import backend_kwargs") == []


@pytest.mark.parametrize(
    "spec", ["tmpl-inductor", "tmpl-tvm", "tvm", "tmpl-openvino", "openvino", "openvino-native", "onnxruntime"]
)
def test_plain_backend_is_light(spec):
    """A backend without options imports no torch, TVM or OpenVINO."""
    assert modules_after(f"from backend_kwargs.backend import find_backend\nfind_backend({spec!r})") == []


def test_tvm_options_are_light():
    """TVM's options are checked without importing TVM."""
    bound = "find_backend('tvm').bind('test', {'target': {'kind': 'llvm', 'num-cores': 2}, 'trials': 8})"
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


@pytest.mark.parametrize("path", sorted((ROOT.parent / "benchmarks").rglob("*.py")), ids=lambda path: path.stem)
def test_the_suite_asks_for_nothing_hidden(path):
    """The benchmark suite uses only names of the package without an underscore."""
    names = imported(ast.parse(path.read_text()))
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
