"""Plant random small changes in the code and check whether the tests notice: `make mutants`.

The changes are cosmic-ray's. Each is planted in a copy of the checkout, and the tests of its module and of the module's
neighbours run there: first those that run the changed lines where nothing is planted, the fastest first; then the
others, since they may run the lines in another process, or use what an earlier test has left. What survives is printed
as a diff: it needs a test of behaviour, or simpler code, or an entry in mutants.toml with the reason why it has no
visible effect. A module has the tests that import it, and those of its row in TESTS, or else of its folder. With
`--out` each outcome is kept in a file of JSON lines: a run that is started again with it leaves out what is there, and
prints the table of all.

With `--conditions` the changes are others: of each `and` and `or` one operand is left out, and of each `if` that only
returns the whole. What survives then is a condition that no test comes near to.
"""

# ruff: noqa: T201 - a command prints

import argparse
import ast
import contextlib
import inspect
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from difflib import unified_diff
from fnmatch import fnmatch
from itertools import accumulate, chain, islice
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

import hypothesis
import pytest
import torch._inductor.compile_fx
from cosmic_ray.commands import init
from cosmic_ray.mutating import use_mutation
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec
from torch._dynamo.eval_frame import skip_code

T = TypeVar("T")
LOADED = (hypothesis, torch)  # once, and not in each fork
ROOT = Path(__file__).parent.parent
EQUIVALENT = Path(__file__).with_suffix(".toml")
# Below tests/, the nearest first; of two patterns that a module fits the first counts.
TESTS: Mapping[str, str] = {
    "backend_kwargs/trial/accuracy.py": "trial/ precision/test_precision_bound.py",
    "backend_kwargs/options/option.py": "options/test_options.py options/test_catalogue.py options/test_spec.py"
    " options/test_layers.py options/test_false_none_absent.py test_backend_written.py",
    "backend_kwargs/backend.py": "test_backend.py test_backend_written.py test_backend_environment.py test_registry.py"
    " backends/test_dynamo_backends.py backends/inductor/test_inductor.py",
    "*/cudagraph_outputs.py": "backends/inductor/test_inductor.py backends/inductor/test_effects.py graphs/",
    "*/rewrites/kernels/*.py": "rewrites/test_rewrite_kernels.py",
    "*/rewrites/traced.py": "rewrites/test_rewrites.py rewrites/test_linear.py rewrites/test_places.py",
    "*/rewrites/attention.py": "rewrites/test_attention.py rewrites/test_rewrite_cases.py",
    "*/rewrites/convolution.py": "rewrites/test_convolution.py",
    "*/rewrites/folding.py": "rewrites/test_folding.py rewrites/test_convolution.py",
    "*/rewrites/decode_attention.py": "rewrites/test_decode_attention.py",
    "*/rewrites/fused_attention.py": "rewrites/test_fused_attention.py",
    "*/rewrites/gather_sum.py": "rewrites/test_gather_sum.py rewrites/test_rewrite_kernels.py",
    "*/rewrites/scatter_reduce.py": "rewrites/test_scatter_reduce.py rewrites/test_rewrite_kernels.py",
    "*/rewrites/aligned_products.py": "rewrites/test_aligned_products.py",
    "*/rewrites/window_attention.py": "rewrites/test_window_attention.py rewrites/test_rewrite_kernels.py",
    "*/rewrites/multihead_attention.py": "rewrites/test_multihead_attention.py",
    "*/rewrites/patches.py": "rewrites/test_patches.py",
    "*/rewrites/interpolation.py": "rewrites/test_interpolation.py",
    "*/rewrites/scaled_product.py": "rewrites/test_scaled_product.py",
    "*/rewrites/depthwise_convolution.py": "rewrites/test_depthwise_convolution.py",
    "*/rewrites/transposed_convolution.py": "rewrites/test_transposed_convolution.py",
    "*/rewrites/convolution_as_product.py": "rewrites/test_convolution_as_product.py",
    "*/rewrites/contraction.py": "rewrites/test_contraction.py",
    "*/rewrites/grouped_convolution.py": "rewrites/test_grouped_convolution.py rewrites/test_rewrite_kernels.py",
    "*/rewrites/stem_convolution.py": "rewrites/test_stem_convolution.py rewrites/test_rewrite_kernels.py",
    "*/rewrites/layer_norm_backward.py": "rewrites/test_layer_norm.py",
    "*/rewrites/linear_activation.py": "rewrites/test_linear.py rewrites/test_onednn.py",
    "*/rewrites/*cross_entropy.py": "rewrites/test_losses.py",
    "*/rewrites/onednn.py": "rewrites/test_onednn.py",
    "*/rewrites/matching.py": "rewrites/test_rewrites.py rewrites/test_attention.py rewrites/test_convolution.py"
    " rewrites/test_linear.py rewrites/test_losses.py",
    "*/rewrites/packed.py": "test_keys.py rewrites/test_packed.py",
    "*/rewrites/table.py": "test_keys.py rewrites/test_rewrites.py",
    "*/rewrites/*.py": "rewrites/test_linear.py rewrites/test_attention.py rewrites/test_losses.py"
    " rewrites/test_packed.py",
    "*/inductor/*.py": "backends/inductor/test_inductor.py backends/inductor/test_inductor_parts.py"
    " backends/inductor/test_effects.py test_registry.py test_explain.py backends/inductor/test_cutlass.py"
    " auto/test_auto_decide.py",
    "*/freezing.py": "graphs/ auto/test_auto_traces.py auto/test_auto_decide.py",
    "*/keys.py": "test_keys.py auto/test_auto_keys.py test_written_before.py",
    "*/graphs/spelling.py": "auto/test_auto_keys.py auto/test_auto_cache_key.py auto/test_auto_decide.py"
    " rewrites/test_places.py",
    "*/auto/lock.py": "auto/test_lock.py test_pinning.py",
    "*/pinning/*.py": "test_pinning.py auto/test_lock.py",
    "*/facts/__init__.py": "auto/test_lock.py torch_internals/test_choices.py test_pinning.py",
    "*/choices.py": "torch_internals/test_choices.py test_pinning.py",
    "*/determinism.py": "graphs/test_determinism.py test_pinning.py",
    "*/fleet/audit.py": "fleet/test_audit_choices.py fleet/test_findings.py fleet/test_contenders.py"
    " fleet/test_audit.py",
    "*/decisions_toml.py": "auto/test_auto_decisions_toml.py auto/test_auto_compilers.py auto/test_auto_precision.py",
    "*/candidates.py": "auto/test_auto_steps.py auto/test_auto_candidates.py auto/test_auto_settings.py"
    " auto/test_auto_compilers.py auto/test_auto_rewrites.py auto/test_auto_worth.py auto/test_auto_decide.py",
    "*/graph_stats.py": "auto/test_auto_candidates.py auto/test_auto_race.py auto/test_auto_ranks.py",
    "*/auto/places.py": "auto/test_auto_places.py auto/test_auto_rewrites.py benchmarks/test_headroom.py",
    "*/auto/verdicts.py": "auto/test_auto_places.py",
    "*/auto/steps.py": "auto/test_auto_race.py auto/test_auto_race_steps.py auto/test_auto_worth.py"
    " auto/test_auto_head_to_head.py",
    "*/race.py": "auto/test_auto_race.py auto/test_auto_race_steps.py auto/test_auto_worth.py"
    " auto/test_auto_head_to_head.py auto/test_auto_traces.py auto/test_auto_precision.py"
    " auto/test_auto_compilers.py auto/test_auto_rewrites.py auto/test_auto_compiling.py",
    "*/auto/compiling.py": "auto/test_auto_compiling.py",
    "*/inductor/lowered.py": "auto/test_auto_compiling.py",
    "*/selection.py": "auto/test_auto_race_steps.py auto/test_auto_worth.py auto/test_auto_compiling.py"
    " auto/test_auto_rewrites.py auto/test_auto_unfrozen.py",
    "*/auto/result_checks.py": "auto/test_auto_result_checks.py auto/test_auto_race_steps.py auto/test_auto_race.py"
    " auto/test_auto_precision.py",
    "*/auto/budget.py": "auto/test_auto_race_steps.py auto/test_auto_compiling.py auto/test_auto_race.py",
    "*/sandbox.py": "auto/test_auto_sandbox.py auto/test_auto_traces.py auto/test_auto_race.py",
    "*/question.py": "auto/test_auto_keys.py auto/test_auto_decide_steps.py auto/test_auto_decide.py",
    "*/process_memory.py": "auto/test_auto_decide_steps.py auto/test_auto_artifacts.py auto/test_auto_decide.py",
    "*/decide.py": "auto/test_auto_decide_steps.py auto/test_auto_keys.py auto/test_auto_decide.py"
    " auto/test_auto_cache_key.py auto/test_auto_ranks.py auto/test_auto_race.py",
    "*/ranks.py": "auto/test_auto_ranks.py",
    "*/reporting.py": "auto/test_auto_reporting.py auto/test_auto_precision.py auto/test_auto_race.py",
    "*/auto/settings.py": "auto/test_auto_settings.py auto/test_auto_decide.py",
    "*/auto/store.py": "auto/test_auto_decision.py faults/test_faults_store.py auto/test_auto_stored.py"
    " test_explain.py",
    "*/auto/machine.py": "auto/test_auto_keys.py auto/test_auto_cache_key.py",
    "*/graphs/writes.py": "graphs/test_eligibility.py auto/test_auto_effects.py"
    " auto/test_auto_decide.py auto/test_auto_race.py",
    "*/graphs/replay.py": "auto/test_auto_sandbox.py auto/test_auto_effects.py auto/test_auto_race.py"
    " auto/test_auto_traces.py",
    "*/graphs/ddp_buckets.py": "auto/test_auto_ddp.py",
    "*/auto/*.py": "auto/test_auto_decide.py auto/test_auto_race.py",
    "*/tvm/part_compiler.py": "backends/tvm/test_tvm_supported.py backends/tvm/test_tvm_lowering.py",
    "*/backends/part*.py": "backends/test_partitioned.py backends/tvm/test_tvm_correct.py"
    " backends/tvm/test_tvm_inputs.py backends/test_engines.py",
    "*/tvm/lowering/*.py": "backends/tvm/test_tvm_lowering.py backends/tvm/test_tvm_linear.py"
    " backends/tvm/test_tvm_training.py backends/tvm/test_tvm_shapes.py",
    "*/compare/comparison.py": "compare/test_compare_output.py",
    "*/options/machine.py": "test_keys.py cli/test_doctor.py precision/test_precision_options.py",
    "*/bundles/config.py": "test_keys.py bundles/test_compile_config.py",
    "*/disk/place.py": "test_keys.py bundles/test_extensions.py bundles/test_bundle_place.py"
    " bundles/test_private_folders.py",
    "*/disk/*.py": "test_keys.py bundles/test_bundle_weights.py bundles/test_bundle_place.py"
    " bundles/test_private_folders.py bundles/test_bundle_faults.py bundles/test_extensions.py bundles/test_bundle.py",
    "*/bundles/graphs.py": "bundles/test_graph_keys.py bundles/test_gradients.py bundles/test_bundle.py test_keys.py",
    "*/bundles/samples.py": "bundles/test_building.py bundles/test_bundle.py",
    "*/bundles/*.py": "bundles/test_compile_config.py bundles/test_states.py bundles/test_building.py"
    " bundles/test_build_fails.py bundles/test_bundle.py",
    "*/facts/*.py": "report/test_report.py report/test_found.py auto/test_auto_decision.py"
    " auto/test_auto_decisions_toml.py",
    "*/graphs/parts.py": "backends/test_partitioned.py backends/test_engines.py",
    "*/pipeline.py": "test_registry.py test_explain.py test_keys.py backends/inductor/test_inductor.py",
    "*/compile_records.py": "report/ test_left_by_exceptions.py",
    "*/cache_artifacts.py": "test_cache_artifacts.py auto/test_auto_artifacts.py",
    "*/registry.py": "test_registry.py",
    "*/regions.py": "test_regions.py",
    "*/explain.py": "test_explain.py",
    "*/errors.py": "test_errors.py options/test_options.py",
    "*/tables.py": "compare/test_compare_output.py cli/test_cli.py",
    "*/torch_internals/*.py": "torch_internals/ test_left_by_exceptions.py graphs/ auto/test_auto_sandbox.py",
    "*/backends/openvino/*.py": "backends/openvino/ backends/test_engines.py",
    "*/backends/onnxruntime/*.py": "backends/test_engines.py test_left_by_exceptions.py",
    "*/backends/tvm/*.py": "backends/tvm/test_tvm_correct.py backends/tvm/test_tvm_inputs.py"
    " backends/tvm/test_tvm_build.py backends/tvm/test_tvm_options.py backends/tvm/test_tvm_tune.py",
    "*/backends/*.py": "backends/test_dynamo_backends.py backends/test_engines.py backends/test_partitioned.py",
    "*/page/*.py": "page/test_derived.py page/test_document.py page/test_markdown.py page/test_plots.py"
    " page/test_sentence.py page/test_sharing.py page/test_writing.py",
    "benchmarks/analysis/verdicts.py": "benchmarks/test_verdicts.py",
    "benchmarks/execution/roofline.py": "benchmarks/test_bench_roofline.py benchmarks/test_ceilings.py",
    "benchmarks/execution/device_timer.py": "benchmarks/test_device_timer.py",
    "benchmarks/execution/controls.py": "benchmarks/test_controls.py",
}
PYTEST = ("--benchmark-disable", "-pno:cacheprovider", "-Wignore::pytest.PytestAssertRewriteWarning")
CONDITION = "without a condition"  # in place of the name of cosmic-ray's operator
FUNCTIONS = (ast.FunctionDef, ast.Lambda)
FAST = ("-m", "not slow")
UNTESTED = ("backend_kwargs/options/inductor_names.py",)  # names alone
SLACK_S, SLOWER = 60.0, 3.0  # a test of a mutant may take so much more than without


def main() -> int:
    """Sample, plant and test; return 1 if a mutant survived."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--modules", default="", help="such as accuracy,graphs/spelling; by default all")
    parser.add_argument("--sample", type=int, default=40, help="how many mutants, at as many places")
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--jobs", type=int, default=1, help="how many mutants are tested at once")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="seconds after which no mutant is started")
    parser.add_argument("--reaching", action="store_true", help="run only the tests that run the changed lines")
    parser.add_argument("--conditions", action="store_true", help="leave out conditions instead")
    parser.add_argument("--fast", action="store_true", help="leave out the tests that tests/slow.txt lists")
    parser.add_argument("--each-s", type=float, default=math.inf, help="seconds of tests for a mutant, nearest first")
    parser.add_argument("--out", type=Path, help="a file of JSON lines in which outcomes are kept, and found again")
    asked = parser.parse_args()
    ends = time.monotonic() + asked.limit_s
    tested = tests_of_modules(asked.modules)
    places = defaultdict(list)
    with ProcessPoolExecutor(asked.jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        for mutant in chain.from_iterable(pool.map(conditions if asked.conditions else mutants, tested)):
            places[mutant.module_path, mutant.start_pos].append(mutant)
    draw = random.Random(asked.seed)
    drawn = draw.sample(sorted(places), min(asked.sample, len(places)))
    print(f"{len(drawn)} of {len(places)} places in {len(tested)} modules, seed {asked.seed}", flush=True)
    sample = [draw.choice(places[place]) for place in sorted(drawn)]
    draw.shuffle(sample)  # of what --limit-s leaves out, too
    kept = Kept.read(asked.out)
    sample = [each for each in sample if name_of(each) not in kept.outcomes]
    how = How(asked.jobs, ends, asked.each_s, reaching=asked.reaching, fast=asked.fast)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(sample, tested, how, kept)
    except (KeyboardInterrupt, BrokenProcessPool):
        print("\nInterrupted.", end="")
    if left := sum(name_of(each) not in kept.outcomes for each in sample):
        print(f"\n{left} were not tested.", end="")
    kept.print_table()
    return any(each["outcome"] == "survived" for each in kept.outcomes.values())


@dataclass(frozen=True)
class How:
    """How mutants are tested; the names are those of the arguments."""

    jobs: int
    ends: float  # by time.monotonic()
    each_s: float
    reaching: bool
    fast: bool


@dataclass
class Kept:
    """The outcomes by mutant, and the file that has them."""

    file: Path | None
    outcomes: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path | None) -> "Kept":
        """Return what a file has, also one of a run that was killed while it wrote a line."""
        kept = cls(file)
        for line in file.read_text().splitlines() if file and file.exists() else ():
            with contextlib.suppress(ValueError):
                each = json.loads(line)
                kept.outcomes[each["mutant"]] = each
        return kept

    def add(self, mutant: MutationSpec, outcome: str, diff: Sequence[str]) -> None:
        """Print an outcome and keep it."""
        module = mutant.module_path.as_posix()
        lines = diff[1:] if outcome == "survived" else ()
        print(f"{outcome} {module} {diff[0]}", *lines, sep="\n", flush=True)
        each = {"mutant": name_of(mutant), "module": module, "outcome": outcome, "diff": "\n".join(diff)}
        self.outcomes[each["mutant"]] = each
        if self.file:
            with self.file.open("a") as opened:
                opened.write(f"{json.dumps(each)}\n")

    def print_table(self) -> None:
        """Print the number of each outcome by module, and all survivors."""
        kinds = ("killed", "survived", "equivalent", "gpu")
        count = Counter((each["module"], each["outcome"]) for each in self.outcomes.values())
        print(f"\n\n| module | {' | '.join(kinds)} |\n|---|---|---|---|---|")
        for module in sorted({module for module, _ in count}):
            print(f"| `{module}` | {' | '.join(str(count[module, kind]) for kind in kinds)} |")
        print(f"| all | {' | '.join(str(sum(count[m, k] for m, k in count if k == kind)) for kind in kinds)} |\n")
        for each in sorted(self.outcomes.values(), key=lambda each: each["mutant"]):
            if each["outcome"] == "survived":
                print(f"`{each['module']}`\n```diff\n{each['diff']}\n```")


def name_of(mutant: MutationSpec) -> str:
    """Return what a mutant of a checkout is known by."""
    at = ":".join(map(str, (*mutant.start_pos, mutant.occurrence)))
    return f"{mutant.module_path.as_posix()} {mutant.operator_name} {at}"


def tests_of_modules(asked: str) -> dict[str, str]:
    """Return the tests of each module in TESTS, or of those whose path contains one of the names in `asked`."""
    names = [f"/{name.strip()}" for name in asked.split(",")]
    found: dict[str, str] = {}
    texts = {file: (ROOT / "tests" / file).read_text() for file in files_of(ROOT / "tests")}
    for path in sorted(path for top in ("backend_kwargs", "benchmarks") for path in (ROOT / top).rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        folder = file.removeprefix("backend_kwargs/").rpartition("/")[0]
        tests = next((tests for pattern, tests in TESTS.items() if fnmatch(file, pattern)), folder and f"{folder}/")
        listed = [each for test in tests.split() for each in files_of(ROOT / "tests" / test)]
        imported = importing(file)
        files = dict.fromkeys([*listed, *(each for each, text in texts.items() if imported.search(text))])
        if files and file not in UNTESTED and any(name in f"/{file}" for name in names):
            found[file] = " ".join(each.relative_to(ROOT).as_posix() for each in files)
    return found


def importing(module: str) -> re.Pattern[str]:
    """Return what a file contains that imports a module."""
    package, _, name = module.removesuffix(".py").replace("/", ".").rpartition(".")
    return re.compile(rf"^from ({package}\.{name} import|{package} import .*\b{name}\b)", re.MULTILINE)


def files_of(tests: Path) -> list[Path]:
    """Return the files of tests at a path: itself, or those of a folder; raise where TESTS names one that is gone."""
    if tests.suffix and not tests.is_file():
        raise SystemExit(f"TESTS names {tests}, which does not exist.")
    return [tests] if tests.is_file() else sorted(tests.rglob("test_*.py"))


def files_of_the_checkout() -> list[str]:
    """Return the files that git knows or would add; where there is no git, all that no dot hides."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    if listed.returncode == 0:
        return listed.stdout.splitlines()
    every = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return [path.as_posix() for path in every if not any(part.startswith(".") for part in path.parts)]


def work_in_a_copy() -> None:
    """Copy the checkout and change to it, so that `import backend_kwargs` finds the copy of this worker."""
    folder = Path(tempfile.mkdtemp(prefix="mutants-"))
    for file in files_of_the_checkout():
        if (ROOT / file).is_file():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, folder / file)
    # For the tests' processes and for this one, which forks before it loads the package.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    sys.path[0] = str(folder)
    sys.modules.pop("tests", None)  # the package that this file was run from
    sys.dont_write_bytecode = True  # a mutant is as old as its module
    os.chdir(folder)
    Finalize(None, shutil.rmtree, [folder], exitpriority=0)  # atexit does nothing in a worker

    def stop(*_: object) -> None:
        for child in multiprocessing.active_children():
            end(child.pid)
        shutil.rmtree(folder)
        os._exit(1)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)


def mutants(module: str) -> list[MutationSpec]:
    """Return all mutants of a module, except those that `annotations` finds."""
    with use_db(":memory:", WorkDB.Mode.create) as db:
        init([Path(module)], db, {})
        every = [mutant for item in db.work_items for mutant in item.mutations]
    skipped = list(annotations(Path(module).read_text()))

    def annotates(mutant: MutationSpec) -> bool:
        return any(begin <= mutant.start_pos < end for begin, end in skipped)

    return [mutant for mutant in every if not annotates(mutant)]


def conditions(module: str) -> list[MutationSpec]:
    """Return a mutant for each condition of a module's functions that can be left out."""
    found = enumerate(without_conditions(Path(module).read_text()))
    return [MutationSpec(Path(module), CONDITION, at, begin, end, {}, name) for at, (name, begin, end, _) in found]


def without_conditions(text: str) -> Iterator[tuple[str, tuple[int, int], tuple[int, int], str]]:
    """Yield the function, begin and end of each condition, and the text without it; none that names a value."""
    raw, starts = text.encode(), [0, *accumulate(map(len, text.encode().splitlines(keepends=True)))]
    for function in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)):
        left_out = [(each, isinstance(node.op, ast.And)) for node in own(function, ast.BoolOp) for each in node.values]
        returns = [
            node for node in own(function, ast.If) if [*map(type, node.body)] == [ast.Return] and not node.orelse
        ]
        left_out += [(node.test, False) for node in returns if not isinstance(node.test, ast.BoolOp)]
        for each, neutral in left_out:
            begin, end = (each.lineno, each.col_offset), (each.end_lineno or 0, each.end_col_offset or 0)
            if not any(isinstance(part, ast.NamedExpr) for part in ast.walk(each)):
                first, last = (starts[line - 1] + column for line, column in (begin, end))
                yield function.name, begin, end, (raw[:first] + str(neutral).encode() + raw[last:]).decode()


def own(function: ast.FunctionDef, kind: type[T]) -> list[T]:
    """Return the nodes of a kind in a function, without those of functions within it."""
    inner = {
        part
        for node in ast.walk(function)
        if isinstance(node, FUNCTIONS) and node is not function
        for part in ast.walk(node)
    }
    return [node for node in ast.walk(function) if isinstance(node, kind) and node not in inner]


@contextlib.contextmanager
def planted(mutant: MutationSpec) -> Iterator[tuple[str, str]]:
    """Plant a mutant; yield the text of its module before and after."""
    if mutant.operator_name != CONDITION:
        operator = get_operator(mutant.operator_name)()
        with use_mutation(mutant.module_path, operator, mutant.occurrence) as texts:
            yield texts
        return
    before = mutant.module_path.read_text()
    *_, after = next(islice(without_conditions(before), mutant.occurrence, None))
    mutant.module_path.write_text(after)
    try:
        yield before, after
    finally:
        mutant.module_path.write_text(before)


def annotations(text: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Return where annotations, a bare `*`, dataclass flags and zip's `strict` are.

    A mutant there fails at import or changes nothing: `strict=True` only asserts that lengths are equal.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.args.kwonlyargs and not node.args.vararg:
            before = [*node.args.posonlyargs, *node.args.args, *node.args.defaults]
            ends = [(each.end_lineno or 0, each.end_col_offset or 0) for each in before]
            yield max([(node.lineno, 0), *ends]), (node.args.kwonlyargs[0].lineno, node.args.kwonlyargs[0].col_offset)
        found = [getattr(node, field, None) for field in ("annotation", "returns")]
        if isinstance(node, ast.Call):
            flags = {"strict"} if ast.unparse(node.func) == "zip" else {"frozen", "slots", "repr"}
            constants = (each for each in node.keywords if isinstance(each.value, ast.Constant))
            found += [each.value for each in constants if each.arg in flags]
        for at in found:
            if isinstance(at, ast.expr):
                yield (at.lineno, at.col_offset), (at.end_lineno or 0, at.end_col_offset or 0)


@dataclass
class Baseline:
    """A file of tests without a mutant."""

    seconds: dict[str, float] = field(default_factory=dict)  # by test
    reaching: dict[tuple[str, int], set[str]] = field(default_factory=dict)  # the tests that run a line of a module
    failing: set[str] = field(default_factory=set)  # tests that fail even so, and show nothing


def run(sample: Sequence[MutationSpec], tested: Mapping[str, str], how: How, kept: Kept) -> None:
    """Test each mutant, print those that survive, and keep the outcomes."""
    tests_of = {mutant.module_path.as_posix(): tested[mutant.module_path.as_posix()].split() for mutant in sample}
    files = sorted({name for names in tests_of.values() for name in names}, key=lambda name: -Path(name).stat().st_size)
    known: dict[str, Baseline] = {}
    to_start = list(sample)
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(how.jobs, mp_context=fork, initializer=work_in_a_copy) as pool:
        baselines = {pool.submit(baseline, name, sorted(tests_of), how.fast): name for name in files}
        running: dict[Future[Any], MutationSpec] = {}
        waiting: set[Future[Any]] = {*baselines}
        try:
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for each in done & baselines.keys():
                    known[baselines[each]] = found = each.result()
                    if found.failing:
                        print(
                            "Left out, as they fail without a mutant:", *sorted(found.failing), sep="\n  ", flush=True
                        )
                for each in done & running.keys():
                    if result := each.result():
                        kept.add(running[each], *result)
                for mutant in [each for each in to_start if known.keys() >= {*tests_of[each.module_path.as_posix()]}]:
                    to_start.remove(mutant)
                    tests = [known[name] for name in tests_of[mutant.module_path.as_posix()]]
                    submitted = pool.submit(outcome_of, mutant, in_order(mutant, tests, how), how.ends)
                    running[submitted] = mutant
                    waiting.add(submitted)
        except KeyboardInterrupt:
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise


def in_order(mutant: MutationSpec, known: Sequence[Baseline], how: How) -> dict[str, float]:
    """Return the seconds of each test of a mutant's module: first those that run its lines, the fastest first."""
    module = mutant.module_path.as_posix()
    places = [(module, line) for line in lines_of_statement(Path(module).read_text(), mutant.start_pos[0])]
    near = {test for each in known for place in places for test in each.reaching.get(place, ())}
    every = {test: seconds for each in known for test, seconds in each.seconds.items() if test not in each.failing}
    if how.reaching and near and mutant.definition_name:  # a constant may be read by any test
        every = {test: every[test] for test in every if test in near}
    ordered = sorted(every.items(), key=lambda item: (item[0] not in near, item[1]))
    spent = accumulate(seconds for _, seconds in ordered)
    return dict(each for each, until in zip(ordered, spent, strict=True) if until <= how.each_s or each is ordered[0])


def lines_of_statement(text: str, line: int) -> range:
    """Return the lines of the smallest statement at a line; of one that has others within, those before these."""
    found = range(line, line + 1)
    for node in ast.walk(ast.parse(text)):  # outer ones first
        if isinstance(node, (ast.stmt, ast.ExceptHandler)) and node.lineno <= line <= (node.end_lineno or 0):
            body = getattr(node, "body", None)
            found = range(node.lineno, (body[0].lineno if body else node.end_lineno + 1))
    return found if line in found else range(line, line + 1)


def baseline(file: str, modules: Sequence[str], fast: bool) -> Baseline:
    """Run a file of tests as it is, and note which tests run which lines of the modules."""
    result = tested_in_a_fork([file, *(FAST if fast else ())], Recorder(modules), 0, SLACK_S * 60)
    return result or Baseline(failing={f"{file}, which does not end well"})


def outcome_of(mutant: MutationSpec, tests: Mapping[str, float], ends: float) -> tuple[str, list[str]] | None:
    """Plant a mutant; return its outcome and its diff; None after the time at which all ends."""
    if time.monotonic() > ends:
        return None
    module = mutant.module_path.as_posix()
    with planted(mutant) as (before, after):
        diff = list(unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0))[2:]
        # Without its place and its indent.
        change = "\n".join(f"{line[0]}{line[1:].strip()}" for line in diff[1:])
        listed = tomllib.loads(EQUIVALENT.read_text())
        if change in [each["change"].strip() for each in listed.get(module, [])]:
            return "equivalent", diff
        if mutant.definition_name in listed["on_a_gpu_alone"].get(module, []):
            return "gpu", diff
        if not tests:
            return "survived", diff
        files = sorted({test.partition("::")[0] for test in tests})
        found = tested_in_a_fork(files, InOrder(tests), 1, SLACK_S * SLOWER)
    return "survived" if found and not found.failing else "killed", diff


def tested_in_a_fork(files: Sequence[str], plugin: "Plugin", maxfail: int, limit_s: float) -> Baseline | None:
    """Run tests in a fork of this process, which has torch loaded; None where one hangs or crashes."""
    receiving, sending = multiprocessing.Pipe(duplex=False)
    arguments = [*PYTEST, f"--maxfail={maxfail}", *files]
    child = multiprocessing.get_context("fork").Process(target=quietly, args=(arguments, plugin, sending))
    child.start()
    sending.close()
    found: Baseline | float = limit_s
    with contextlib.suppress(EOFError):
        while isinstance(found, float) and receiving.poll(found):
            found = receiving.recv()
    end(child.pid)  # also what a test has started and left
    child.join()
    return found if isinstance(found, Baseline) else None


def end(group: int | None) -> None:
    """Kill a group of processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group or 0, signal.SIGKILL)


def quietly(arguments: Sequence[str], plugin: "Plugin", sending: Connection) -> None:
    """Run pytest without output, in a process group of its own; send the next test's time limit, then the results."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    plugin.sending = sending
    if pytest.main([*arguments], plugins=[plugin]) in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        sending.send(plugin.found)


class Plugin:
    """A plugin of pytest that notes which tests failed, and which files could not be collected."""

    sending: Connection

    def __init__(self) -> None:
        self.found = Baseline()

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            self.found.failing.add(report.nodeid)

    pytest_collectreport = pytest_runtest_logreport


class InOrder(Plugin):
    """Run these tests alone, in this order, each with a time limit."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        super().__init__()
        self.seconds, self.rank = seconds, {test: at for at, test in enumerate(seconds)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((item for item in items if item.nodeid in self.rank), key=lambda item: self.rank[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.sending.send(SLACK_S + SLOWER * self.seconds[nodeid])


class Recorder(Plugin):
    """Note how long each test takes, and which lines of functions of some modules it runs."""

    def __init__(self, modules: Iterable[str]) -> None:
        super().__init__()
        self.modules = {str(Path.cwd() / module): module for module in modules}
        self.lines: set[tuple[str, int]] = set()

    def pytest_sessionstart(self) -> None:
        if sys.version_info >= (3, 12):
            sys.monitoring.use_tool_id(sys.monitoring.COVERAGE_ID, "mutants")
            sys.monitoring.register_callback(sys.monitoring.COVERAGE_ID, sys.monitoring.events.PY_START, self.on_start)
            sys.monitoring.register_callback(sys.monitoring.COVERAGE_ID, sys.monitoring.events.LINE, self.on_line)
            sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, sys.monitoring.events.PY_START)
        else:
            threading.settrace(self.on_call)
            sys.settrace(self.on_call)
        for each in (self.on_start, self.on_line, self.on_call, self.recorded):
            skip_code(each.__code__)  # dynamo is not to compile it

    def on_start(self, code: CodeType, offset: int) -> object:
        """Note the lines of a function from now on, if a module has it."""
        if self.recorded(code):
            self.lines.add((code.co_filename, code.co_firstlineno))
            sys.monitoring.set_local_events(sys.monitoring.COVERAGE_ID, code, sys.monitoring.events.LINE)
        return sys.monitoring.DISABLE

    def on_line(self, code: CodeType, line: int) -> object:
        """Note a line, once in each test."""
        self.lines.add((code.co_filename, line))
        return sys.monitoring.DISABLE

    def on_call(self, frame: FrameType, event: str, argument: object) -> Callable[..., object] | None:
        """Do the same before Python 3.12."""
        if event != "line" and not self.recorded(frame.f_code):
            return None
        self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self.on_call

    def recorded(self, code: CodeType) -> bool:
        """Return whether this is a function's code, of one of the modules."""
        return code.co_filename in self.modules and bool(code.co_flags & inspect.CO_OPTIMIZED)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.lines.clear()
        if sys.version_info >= (3, 12):
            sys.monitoring.restart_events()
        began = time.monotonic()
        result = yield
        self.found.seconds[item.nodeid] = time.monotonic() - began
        for path, line in self.lines:
            self.found.reaching.setdefault((self.modules[path], line), set()).add(item.nodeid)
        return result


if __name__ == "__main__":
    sys.exit(main())
