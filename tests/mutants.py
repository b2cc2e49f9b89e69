"""Plant random small changes in the code and check whether the tests notice: `make mutants`.

The changes are cosmic-ray's. Each is planted in a copy of the checkout, in which the tests of its module and of
neighbouring modules run. A mutant that survives is printed as a diff: it needs a test of behaviour, simpler code, or an
entry in mutants.toml with the reason why it has no visible effect.
"""

# ruff: noqa: T201 - a command prints

import argparse
import ast
import atexit
import contextlib
import math
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from difflib import unified_diff
from fnmatch import fnmatch
from multiprocessing.connection import Connection
from pathlib import Path

import hypothesis
import pytest
import torch._inductor.compile_fx
from cosmic_ray.commands import init
from cosmic_ray.mutating import use_mutation
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec

LOADED = (hypothesis, torch)  # once, and not in each fork
ROOT = Path(__file__).parent.parent
EQUIVALENT = Path(__file__).with_suffix(".toml")
# Below tests/, the nearest first; of two patterns that a module fits the first counts.
TESTS: Mapping[str, str] = {
    "backend_kwargs/measure/accuracy.py": "test_accuracy.py",
    "backend_kwargs/measure/*.py": "test_measure.py test_accuracy.py",
    "backend_kwargs/layers.py": "test_layers.py test_backend.py",
    "backend_kwargs/spec.py": "test_spec.py test_backend.py",
    "backend_kwargs/options.py": "test_options.py test_catalogue.py test_backend_written.py",
    "backend_kwargs/backend.py": "test_backend.py test_backend_written.py test_backend_environment.py test_registry.py"
    " test_dynamo_backends.py test_inductor.py",
    "*/cudagraph_outputs.py": "test_inductor.py test_effects.py",
    "*/inductor/*.py": "test_inductor.py test_effects.py test_registry.py test_explain.py test_cutlass.py"
    " auto/test_auto_decide.py",
    "*/freezing.py": "test_freezing.py auto/test_auto_traces.py auto/test_auto_decide.py",
    "*/cache_key.py": "auto/test_auto_cache_key.py auto/test_auto_decide.py",
    "*/auto/decision.py": "auto/test_auto_decision.py auto/test_auto_decisions_toml.py",
    "*/decisions_toml.py": "auto/test_auto_decisions_toml.py",
    "*/candidates.py": "auto/test_auto_candidates.py auto/test_auto_settings.py auto/test_auto_decide.py",
    "*/graph_stats.py": "auto/test_auto_candidates.py auto/test_auto_race.py auto/test_auto_ranks.py",
    "*/head_to_head.py": "auto/test_auto_head_to_head.py auto/test_auto_race.py",
    "*/auto/roofline.py": "auto/test_auto_roofline.py auto/test_auto_worth.py auto/test_auto_head_to_head.py",
    "*/race.py": "auto/test_auto_race.py auto/test_auto_worth.py auto/test_auto_head_to_head.py"
    " auto/test_auto_deadline.py auto/test_auto_traces.py",
    "*/sandbox.py": "auto/test_auto_sandbox.py auto/test_auto_traces.py auto/test_auto_race.py",
    "*/deadline.py": "auto/test_auto_deadline.py",
    "*/decide.py": "auto/test_auto_decide.py auto/test_auto_cache_key.py auto/test_auto_ranks.py"
    " auto/test_auto_race.py",
    "*/ranks.py": "auto/test_auto_ranks.py",
    "*/reporting.py": "auto/test_auto_reporting.py auto/test_auto_race.py",
    "*/auto/settings.py": "auto/test_auto_settings.py auto/test_auto_decide.py",
    "*/auto/store.py": "auto/test_auto_decision.py faults/test_faults_store.py",
    "*/auto/eligibility.py": "auto/test_auto_effects.py auto/test_auto_decide.py auto/test_auto_race.py",
    "*/auto/workload.py": "auto/test_auto_sandbox.py auto/test_auto_effects.py auto/test_auto_race.py"
    " auto/test_auto_traces.py",
    "*/auto/ddp_buckets.py": "auto/test_auto_ddp.py",
    "*/auto/*.py": "auto/test_auto_decide.py auto/test_auto_race.py",
    "*/tvm/supported.py": "tvm_backend/test_tvm_supported.py tvm_backend/test_tvm_lowering.py",
    "*/tvm/partition.py": "tvm_backend/test_tvm_correct.py tvm_backend/test_tvm_inputs.py",
    "*/tvm/lowering/*.py": "tvm_backend/test_tvm_lowering.py tvm_backend/test_tvm_linear.py"
    " tvm_backend/test_tvm_training.py tvm_backend/test_tvm_shapes.py",
    "*/compare/rows.py": "test_compare_output.py",
    "benchmarks/analysis/verdicts.py": "benchmarks/test_verdicts.py",
    "benchmarks/execution/roofline.py": "benchmarks/test_bench_roofline.py benchmarks/test_ceilings.py",
    "benchmarks/execution/device_timer.py": "benchmarks/test_device_timer.py",
    "benchmarks/execution/controls.py": "benchmarks/test_controls.py",
}
PYTEST = ("--benchmark-disable", "-pno:cacheprovider", "-Wignore::pytest.PytestAssertRewriteWarning")
SLACK_S, SLOWER = 60, 3  # a mutant may take so much more than the code as it is


def main() -> int:
    """Sample, plant and test; return 1 if a mutant survived."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--modules", default="", help="such as accuracy,auto/cache_key; by default all")
    parser.add_argument("--sample", type=int, default=40, help="how many mutants, at as many places")
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--jobs", type=int, default=1, help="how many mutants are tested at once")
    asked = parser.parse_args()
    tested = tests_of_modules(asked.modules)
    places = defaultdict(list)
    for mutant in mutants(tested):
        places[mutant.module_path, mutant.start_pos].append(mutant)
    draw = random.Random(asked.seed)
    drawn = draw.sample(sorted(places), min(asked.sample, len(places)))
    print(f"{len(drawn)} of {len(places)} places in {len(tested)} modules, seed {asked.seed}", flush=True)
    outcomes = run([draw.choice(places[place]) for place in sorted(drawn)], tested, asked.jobs)
    kinds = ("killed", "survived", "equivalent", "gpu")
    print(f"\n| module | {' | '.join(kinds)} |\n|---|---|---|---|---|")
    for module in dict.fromkeys(module for module, _ in outcomes):
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
    folder = tempfile.TemporaryDirectory(prefix="mutants-")
    for file in listed:
        if (ROOT / file).is_file():
            (Path(folder.name) / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, Path(folder.name) / file)
    # For the tests' processes and for this one, which forks before it loads the package.
    os.environ["PYTHONPATH"] = os.pathsep.join([folder.name, os.environ.get("PYTHONPATH", "")])
    sys.path[0] = folder.name
    sys.dont_write_bytecode = True  # a mutant is as old as its module
    os.chdir(folder.name)
    atexit.register(folder.cleanup)


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
    """Return the positions of annotations and dataclass flags: a mutant there fails at import or changes nothing."""
    for node in ast.walk(ast.parse(text)):
        found = [getattr(node, field, None) for field in ("annotation", "returns")]
        if isinstance(node, ast.keyword) and node.arg in ("frozen", "slots"):
            found.append(node.value)
        for at in found:
            if isinstance(at, ast.expr):
                yield (at.lineno, at.col_offset), (at.end_lineno or 0, at.end_col_offset or 0)


@dataclass(frozen=True)
class Baseline:
    """A file of tests without a mutant: its duration, and the tests that fail anyway and show nothing."""

    seconds: float
    failing: frozenset[str]


def run(sample: Sequence[MutationSpec], tested: Mapping[str, str], jobs: int) -> Counter[tuple[str, str]]:
    """Test each mutant, print those that survive, and count by module and outcome."""
    outcomes: Counter[tuple[str, str]] = Counter()
    files = {mutant.module_path.as_posix(): tested[mutant.module_path.as_posix()].split() for mutant in sample}
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(jobs, mp_context=fork, initializer=work_in_a_copy) as pool:
        names = sorted({name for each in files.values() for name in each})
        known = dict(zip(names, pool.map(baseline, names), strict=True))
        if failing := sorted(test for each in known.values() for test in each.failing):
            print("Left out, as they fail without a mutant:", *failing, sep="\n  ", flush=True)
        tests_of = {module: {name: known[name] for name in names} for module, names in files.items()}
        waiting = [pool.submit(outcome_of, mutant, tests_of[mutant.module_path.as_posix()]) for mutant in sample]
        for each in as_completed(waiting):
            module, outcome, diff = each.result()
            outcomes[module, outcome] += 1
            print(f"{outcome} {module} {diff[0]}", *(diff[1:] if outcome == "survived" else ()), sep="\n", flush=True)
    return outcomes


def baseline(file: str) -> Baseline:
    """Run a file of tests without a mutant."""
    began = time.monotonic()
    failing = failures(math.inf, [file], maxfail=0)
    if failing is None:
        raise SystemExit(f"{file} does not end well without a mutant.")
    return Baseline(time.monotonic() - began, failing)


def outcome_of(mutant: MutationSpec, tests: Mapping[str, Baseline]) -> tuple[str, str, list[str]]:
    """Plant a mutant; return its module, its outcome, and its diff."""
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
        limit_s = SLACK_S + SLOWER * sum(each.seconds for each in tests.values())
        left_out = [test for each in tests.values() for test in each.failing]
        failing = failures(limit_s, list(tests), maxfail=1, deselected=left_out)
    return module, "survived" if failing == frozenset() else "killed", diff


def failures(
    limit_s: float, tests: Sequence[str], *, maxfail: int, deselected: Iterable[str] = ()
) -> frozenset[str] | None:
    """Return the tests that fail, in a fork of this process with torch loaded; None if it hangs or crashes."""
    receiving, sending = multiprocessing.Pipe(duplex=False)
    arguments = [*PYTEST, f"--maxfail={maxfail}", *(f"--deselect={test}" for test in deselected), *tests]
    child = multiprocessing.get_context("fork").Process(target=quietly, args=(arguments, sending))
    child.start()
    sending.close()
    failing = None
    with contextlib.suppress(EOFError):
        if receiving.poll(None if math.isinf(limit_s) else limit_s):
            failing = receiving.recv()
    with contextlib.suppress(ProcessLookupError):  # also processes that a test started and left
        os.killpg(child.pid or 0, signal.SIGKILL)
    child.join()
    return failing


class Failing:
    """A pytest plugin that records failed tests and files that could not be collected."""

    def __init__(self) -> None:
        self.tests: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            self.tests.add(report.nodeid)

    pytest_collectreport = pytest_runtest_logreport


def quietly(arguments: Sequence[str], sending: Connection) -> None:
    """Run pytest without output, in its own process group; send the failed tests."""
    os.setsid()
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    plugin = Failing()
    if pytest.main([*arguments], plugins=[plugin]) in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        sending.send(frozenset(plugin.tests))


if __name__ == "__main__":
    sys.exit(main())
