"""Plant random small changes in the code and check whether the tests notice: `make mutants`.

The changes are cosmic-ray's. Each is planted in a copy of the checkout, and the tests of its module and of the module's
neighbours run there: first those that run the changed lines where nothing is planted, the fastest first; then the
others, since they may run the lines in another process, or use what an earlier test has left. What survives is printed
as a diff: it needs a test of behaviour, or simpler code, or an entry in mutants.toml with the reason why it has no
visible effect.
"""

# ruff: noqa: T201 - a command prints

import argparse
import ast
import contextlib
import inspect
import math
import multiprocessing
import os
import random
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
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from pathlib import Path
from types import CodeType, FrameType

import hypothesis
import pytest
import torch._inductor.compile_fx
from cosmic_ray.commands import init
from cosmic_ray.mutating import use_mutation
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec
from torch._dynamo.eval_frame import skip_code

LOADED = (hypothesis, torch)  # once, and not in each fork
ROOT = Path(__file__).parent.parent
EQUIVALENT = Path(__file__).with_suffix(".toml")
# Below tests/, the nearest first; of two patterns that a module fits the first counts.
TESTS: Mapping[str, str] = {
    "backend_kwargs/measure/accuracy.py": "measure/test_accuracy.py",
    "backend_kwargs/measure/bound.py": "measure/test_measure_bound.py precision/test_precision_bound.py",
    "backend_kwargs/measure/*.py": "measure/test_measure.py measure/test_measure_bound.py measure/test_accuracy.py",
    "backend_kwargs/options/layers.py": "options/test_layers.py test_backend.py",
    "backend_kwargs/options/spec.py": "options/test_spec.py test_backend.py",
    "backend_kwargs/options/option.py": "options/test_options.py options/test_catalogue.py test_backend_written.py",
    "backend_kwargs/backend.py": "test_backend.py test_backend_written.py test_backend_environment.py test_registry.py"
    " backends/test_dynamo_backends.py backends/inductor/test_inductor.py",
    "*/cudagraph_outputs.py": "backends/inductor/test_inductor.py backends/inductor/test_effects.py graphs/",
    "*/rewrites/kernels/*.py": "rewrites/test_rewrite_kernels.py",
    "*/rewrites/apply.py": "rewrites/test_rewrites.py rewrites/test_linear.py",
    "*/rewrites/attention.py": "rewrites/test_attention.py rewrites/test_rewrite_cases.py",
    "*/rewrites/convolution.py": "rewrites/test_convolution.py",
    "*/rewrites/folding.py": "rewrites/test_folding.py rewrites/test_convolution.py",
    "*/rewrites/decode_attention.py": "rewrites/test_decode_attention.py",
    "*/rewrites/gather_sum.py": "rewrites/test_gather_sum.py rewrites/test_rewrite_kernels.py",
    "*/rewrites/multihead_attention.py": "rewrites/test_multihead_attention.py",
    "*/rewrites/patches.py": "rewrites/test_patches.py",
    "*/rewrites/grouped_convolution.py": "rewrites/test_grouped_convolution.py rewrites/test_rewrite_kernels.py",
    "*/rewrites/layer_norm_backward.py": "rewrites/test_layer_norm.py",
    "*/rewrites/linear_activation.py": "rewrites/test_linear.py rewrites/test_onednn.py",
    "*/rewrites/*cross_entropy.py": "rewrites/test_losses.py",
    "*/rewrites/onednn.py": "rewrites/test_onednn.py",
    "*/rewrites/operators.py": "rewrites/test_rewrites.py rewrites/test_attention.py rewrites/test_convolution.py"
    " rewrites/test_linear.py rewrites/test_losses.py",
    "*/rewrites/packed.py": "test_keys.py rewrites/test_packed.py",
    "*/rewrites/rotary.py": "rewrites/test_rotary.py",
    "*/rewrites/*.py": "rewrites/test_linear.py rewrites/test_attention.py rewrites/test_losses.py"
    " rewrites/test_rotary.py rewrites/test_packed.py",
    "*/inductor/*.py": "backends/inductor/test_inductor.py backends/inductor/test_inductor_parts.py"
    " backends/inductor/test_effects.py test_registry.py test_explain.py backends/inductor/test_cutlass.py"
    " auto/test_auto_decide.py",
    "*/freezing.py": "graphs/ auto/test_auto_traces.py auto/test_auto_decide.py",
    "*/cache_key.py": "auto/test_auto_keys.py auto/test_auto_cache_key.py auto/test_auto_decide.py",
    "*/auto/decision.py": "auto/test_auto_decision.py auto/test_auto_decisions_toml.py",
    "*/decisions_toml.py": "auto/test_auto_decisions_toml.py auto/test_auto_compilers.py auto/test_auto_precision.py",
    "*/candidates.py": "auto/test_auto_steps.py auto/test_auto_candidates.py auto/test_auto_settings.py"
    " auto/test_auto_compilers.py auto/test_auto_rewrites.py auto/test_auto_worth.py auto/test_auto_decide.py",
    "*/graph_stats.py": "auto/test_auto_candidates.py auto/test_auto_roofline.py auto/test_auto_race.py"
    " auto/test_auto_ranks.py",
    "*/auto/rewritten.py": "auto/test_auto_rewrites.py",
    "*/head_to_head.py": "auto/test_auto_head_to_head.py auto/test_auto_race.py",
    "*/auto/roofline.py": "auto/test_auto_roofline.py auto/test_auto_worth.py auto/test_auto_head_to_head.py"
    " auto/test_auto_compiling.py",
    "*/race.py": "auto/test_auto_race.py auto/test_auto_race_steps.py auto/test_auto_worth.py"
    " auto/test_auto_head_to_head.py auto/test_auto_deadline.py auto/test_auto_traces.py auto/test_auto_precision.py"
    " auto/test_auto_compilers.py auto/test_auto_rewrites.py auto/test_auto_compiling.py",
    "*/auto/compiling.py": "auto/test_auto_compiling.py auto/test_auto_ahead.py",
    "*/auto/ahead.py": "auto/test_auto_ahead.py",
    "*/inductor/lowered.py": "auto/test_auto_compiling.py",
    "*/selection.py": "auto/test_auto_race_steps.py auto/test_auto_worth.py auto/test_auto_compiling.py"
    " auto/test_auto_rewrites.py auto/test_auto_unfrozen.py",
    "*/auto/result_checks.py": "auto/test_auto_race_steps.py auto/test_auto_race.py auto/test_auto_precision.py",
    "*/auto/budget.py": "auto/test_auto_race_steps.py auto/test_auto_compiling.py auto/test_auto_race.py",
    "*/sandbox.py": "auto/test_auto_sandbox.py auto/test_auto_traces.py auto/test_auto_race.py",
    "*/deadline.py": "auto/test_auto_deadline.py",
    "*/decide.py": "auto/test_auto_decide_steps.py auto/test_auto_keys.py auto/test_auto_decide.py"
    " auto/test_auto_cache_key.py auto/test_auto_ranks.py auto/test_auto_race.py",
    "*/ranks.py": "auto/test_auto_ranks.py test_left_by_exceptions.py",
    "*/reporting.py": "auto/test_auto_reporting.py auto/test_auto_precision.py auto/test_auto_race.py",
    "*/auto/settings.py": "auto/test_auto_settings.py auto/test_auto_decide.py",
    "*/auto/store.py": "auto/test_auto_store.py auto/test_auto_decision.py faults/test_faults_store.py",
    "*/graphs/eligibility.py": "graphs/test_eligibility.py auto/test_auto_effects.py"
    " auto/test_auto_decide.py auto/test_auto_race.py",
    "*/graphs/replay.py": "auto/test_auto_sandbox.py auto/test_auto_effects.py auto/test_auto_race.py"
    " auto/test_auto_traces.py",
    "*/auto/ddp_buckets.py": "auto/test_auto_ddp.py",
    "*/auto/*.py": "auto/test_auto_decide.py auto/test_auto_race.py",
    "*/tvm/supported.py": "backends/tvm/test_tvm_supported.py backends/tvm/test_tvm_lowering.py",
    "*/backends/part*.py": "backends/test_partitioned.py backends/tvm/test_tvm_correct.py"
    " backends/tvm/test_tvm_inputs.py backends/test_engines.py",
    "*/tvm/lowering/*.py": "backends/tvm/test_tvm_lowering.py backends/tvm/test_tvm_linear.py"
    " backends/tvm/test_tvm_training.py backends/tvm/test_tvm_shapes.py",
    "*/compare/rows.py": "compare/test_compare_output.py",
    "benchmarks/analysis/verdicts.py": "benchmarks/test_verdicts.py",
    "benchmarks/execution/roofline.py": "benchmarks/test_bench_roofline.py benchmarks/test_ceilings.py",
    "benchmarks/execution/device_timer.py": "benchmarks/test_device_timer.py",
    "benchmarks/execution/controls.py": "benchmarks/test_controls.py",
}
PYTEST = ("--benchmark-disable", "-pno:cacheprovider", "-Wignore::pytest.PytestAssertRewriteWarning")
SLACK_S, SLOWER = 60.0, 3.0  # a test of a mutant may take so much more than without


def main() -> int:
    """Sample, plant and test; return 1 if a mutant survived."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--modules", default="", help="such as accuracy,auto/cache_key; by default all")
    parser.add_argument("--sample", type=int, default=40, help="how many mutants, at as many places")
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--jobs", type=int, default=1, help="how many mutants are tested at once")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="seconds after which no mutant is started")
    parser.add_argument("--reaching", action="store_true", help="run only the tests that run the changed lines")
    asked = parser.parse_args()
    ends = time.monotonic() + asked.limit_s
    tested = tests_of_modules(asked.modules)
    places = defaultdict(list)
    for mutant in mutants(tested):
        places[mutant.module_path, mutant.start_pos].append(mutant)
    draw = random.Random(asked.seed)
    drawn = draw.sample(sorted(places), min(asked.sample, len(places)))
    print(f"{len(drawn)} of {len(places)} places in {len(tested)} modules, seed {asked.seed}", flush=True)
    sample = [draw.choice(places[place]) for place in sorted(drawn)]
    draw.shuffle(sample)  # of what --limit-s leaves out, too
    outcomes: Counter[tuple[str, str]] = Counter()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(sample, tested, asked.jobs, ends, asked.reaching, outcomes)
    except (KeyboardInterrupt, BrokenProcessPool):
        print("\nInterrupted.", end="")
    if left := len(sample) - outcomes.total():
        print(f"\n{left} were not tested.", end="")
    kinds = ("killed", "survived", "equivalent", "gpu")
    print(f"\n\n| module | {' | '.join(kinds)} |\n|---|---|---|---|---|")
    for module in sorted({module for module, _ in outcomes}):
        print(f"| `{module}` | {' | '.join(str(outcomes[module, kind]) for kind in kinds)} |")
    return any(kind == "survived" for _, kind in outcomes)


def tests_of_modules(asked: str) -> dict[str, str]:
    """Return the tests of each module in TESTS, or of those whose path contains one of the names in `asked`."""
    names = [f"/{name.strip()}" for name in asked.split(",")]
    found: dict[str, str] = {}
    for path in sorted(path for top in ("backend_kwargs", "benchmarks") for path in (ROOT / top).rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        tests = next((tests for pattern, tests in TESTS.items() if fnmatch(file, pattern)), "")
        if tests and any(name in f"/{file}" for name in names):
            found[file] = " ".join(f"tests/{test}" for test in tests.split())
    return found


def work_in_a_copy() -> None:
    """Copy the checkout and change to it, so that `import backend_kwargs` finds the copy of this worker."""
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True).splitlines()
    folder = Path(tempfile.mkdtemp(prefix="mutants-"))
    for file in listed:
        if (ROOT / file).is_file():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, folder / file)
    # For the tests' processes and for this one, which forks before it loads the package.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    sys.path[0] = str(folder)
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


def mutants(modules: Iterable[str]) -> list[MutationSpec]:
    """Return all mutants of the modules, except those that `annotations` finds."""
    with use_db(":memory:", WorkDB.Mode.create) as db:
        init([Path(module) for module in modules], db, {})
        every = [mutant for item in db.work_items for mutant in item.mutations]
    skipped = {module: list(annotations(Path(module).read_text())) for module in modules}

    def annotates(mutant: MutationSpec) -> bool:
        return any(begin <= mutant.start_pos < end for begin, end in skipped[mutant.module_path.as_posix()])

    return [mutant for mutant in every if not annotates(mutant)]


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
            flags = {"strict"} if ast.unparse(node.func) == "zip" else {"frozen", "slots"}
            found += [each.value for each in node.keywords if each.arg in flags and ast.unparse(each.value) == "True"]
        for at in found:
            if isinstance(at, ast.expr):
                yield (at.lineno, at.col_offset), (at.end_lineno or 0, at.end_col_offset or 0)


@dataclass
class Baseline:
    """A file of tests without a mutant."""

    seconds: dict[str, float] = field(default_factory=dict)  # by test
    reaching: dict[tuple[str, int], set[str]] = field(default_factory=dict)  # the tests that run a line of a module
    failing: set[str] = field(default_factory=set)  # tests that fail even so, and show nothing


def run(
    sample: Sequence[MutationSpec],
    tested: Mapping[str, str],
    jobs: int,
    ends: float,
    reaching: bool,
    outcomes: Counter[tuple[str, str]],
) -> None:
    """Test each mutant, print those that survive, and count by module and outcome."""
    tests_of = {mutant.module_path.as_posix(): tested[mutant.module_path.as_posix()].split() for mutant in sample}
    files = sorted({name for names in tests_of.values() for name in names}, key=lambda name: -Path(name).stat().st_size)
    known: dict[str, Baseline] = {}
    to_start = list(sample)
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(jobs, mp_context=fork, initializer=work_in_a_copy) as pool:
        baselines = {pool.submit(baseline, name, sorted(tests_of)): name for name in files}
        waiting: set[Future[object]] = {*baselines}
        try:
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for each in done & baselines.keys():
                    known[baselines[each]] = found = each.result()
                    if found.failing:
                        print(
                            "Left out, as they fail without a mutant:", *sorted(found.failing), sep="\n  ", flush=True
                        )
                for each in done - baselines.keys():
                    if result := each.result():
                        module, outcome, diff = result
                        outcomes[module, outcome] += 1
                        lines = diff[1:] if outcome == "survived" else ()
                        print(f"{outcome} {module} {diff[0]}", *lines, sep="\n", flush=True)
                for mutant in [each for each in to_start if known.keys() >= {*tests_of[each.module_path.as_posix()]}]:
                    to_start.remove(mutant)
                    tests = [known[name] for name in tests_of[mutant.module_path.as_posix()]]
                    waiting.add(pool.submit(outcome_of, mutant, in_order(mutant, tests, reaching), ends))
        except KeyboardInterrupt:
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise


def in_order(mutant: MutationSpec, known: Sequence[Baseline], reaching: bool) -> dict[str, float]:
    """Return the seconds of each test of a mutant's module: first those that run its lines, the fastest first."""
    module = mutant.module_path.as_posix()
    places = [(module, line) for line in lines_of_statement(Path(module).read_text(), mutant.start_pos[0])]
    near = {test for each in known for place in places for test in each.reaching.get(place, ())}
    every = {test: seconds for each in known for test, seconds in each.seconds.items() if test not in each.failing}
    if reaching and near and mutant.definition_name:  # a constant may be read by any test
        every = {test: every[test] for test in every if test in near}
    return dict(sorted(every.items(), key=lambda item: (item[0] not in near, item[1])))


def lines_of_statement(text: str, line: int) -> range:
    """Return the lines of the smallest statement at a line; of one that has others within, those before these."""
    found = range(line, line + 1)
    for node in ast.walk(ast.parse(text)):  # outer ones first
        if isinstance(node, (ast.stmt, ast.ExceptHandler)) and node.lineno <= line <= (node.end_lineno or 0):
            body = getattr(node, "body", None)
            found = range(node.lineno, (body[0].lineno if body else node.end_lineno + 1))
    return found if line in found else range(line, line + 1)


def baseline(file: str, modules: Sequence[str]) -> Baseline:
    """Run a file of tests as it is, and note which tests run which lines of the modules."""
    result = tested_in_a_fork([file], Recorder(modules), 0, SLACK_S * 60)
    if result is None:
        raise SystemExit(f"{file} does not end well without a mutant.")
    return result


def outcome_of(mutant: MutationSpec, tests: Mapping[str, float], ends: float) -> tuple[str, str, list[str]] | None:
    """Plant a mutant; return its module, its outcome, and its diff; None after the time at which all ends."""
    if time.monotonic() > ends:
        return None
    module, operator = mutant.module_path.as_posix(), get_operator(mutant.operator_name)()
    with use_mutation(mutant.module_path, operator, mutant.occurrence) as (before, after):
        diff = list(unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0))[2:]
        # Without its place and its indent.
        change = "\n".join(f"{line[0]}{line[1:].strip()}" for line in diff[1:])
        listed = tomllib.loads(EQUIVALENT.read_text())
        if change in [each["change"].strip() for each in listed.get(module, [])]:
            return module, "equivalent", diff
        if mutant.definition_name in listed["on_a_gpu_alone"].get(module, []):
            return module, "gpu", diff
        files = sorted({test.partition("::")[0] for test in tests})
        found = tested_in_a_fork(files, InOrder(tests), 1, SLACK_S * SLOWER)
    return module, "survived" if found and not found.failing else "killed", diff


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
