"""Plant random small changes in the code and see whether the tests notice: `make mutants`.

The changes are cosmic-ray's. Each is planted in a copy of the checkout, and the tests of its module and of the module's
neighbours run there. What survives is printed as a diff: it needs a test of behaviour, or simpler code, or an entry in
mutants.toml that says why nobody could notice.
"""

# ruff: noqa: T201 - a command prints

import argparse
import ast
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
from difflib import unified_diff
from fnmatch import fnmatch
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
    "backend_kwargs/measure/*.py": "test_measure.py",
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
    "*/auto/roofline.py": "auto/test_auto_head_to_head.py",
    "*/race.py": "auto/test_auto_race.py auto/test_auto_head_to_head.py auto/test_auto_traces.py",
    "*/sandbox.py": "auto/test_auto_sandbox.py auto/test_auto_traces.py auto/test_auto_race.py",
    "*/deadline.py": "auto/test_auto_deadline.py",
    "*/decide.py": "auto/test_auto_decide.py auto/test_auto_cache_key.py auto/test_auto_ranks.py"
    " auto/test_auto_race.py",
    "*/ranks.py": "auto/test_auto_ranks.py",
    "*/reporting.py": "auto/test_auto_reporting.py auto/test_auto_race.py",
    "*/auto/*.py": "auto",
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
PYTEST = ("-x", "--benchmark-disable", "-pno:cacheprovider", "-Wignore::pytest.PytestAssertRewriteWarning")
SLACK_S, SLOWER = 60, 3  # a mutant may take so much more than the code as it is


def main() -> int:
    """Sample, plant and test; return 1 where a mutant survived."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--modules", default="", help="such as accuracy,auto/cache_key; by default all")
    parser.add_argument("--sample", type=int, default=40, help="how many mutants, at as many places")
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    asked = parser.parse_args()
    tested = tests_of_modules(asked.modules)
    with copied_checkout():
        places = defaultdict(list)
        for mutant in mutants(tested):
            places[mutant.module_path, mutant.start_pos].append(mutant)
        draw = random.Random(asked.seed)
        sample = draw.sample(list(places), min(asked.sample, len(places)))
        print(f"{len(sample)} of {len(places)} places in {len(tested)} modules, seed {asked.seed}", flush=True)
        outcomes = run((draw.choice(places[place]) for place in sorted(sample)), tested)
    kinds = ("killed", "survived", "equivalent")
    print(f"\n| module | {' | '.join(kinds)} |\n|---|---|---|---|")
    for module in dict.fromkeys(module for module, _ in outcomes):
        print(f"| `{module}` | {' | '.join(str(outcomes[module, kind]) for kind in kinds)} |")
    return any(kind == "survived" for _, kind in outcomes)


def tests_of_modules(asked: str) -> dict[str, str]:
    """Return the tests of each module in TESTS, or of those whose path holds one of the names `asked` for."""
    names = [f"/{name.strip()}" for name in asked.split(",")]
    found: dict[str, str] = {}
    for path in sorted(path for top in ("backend_kwargs", "benchmarks") for path in (ROOT / top).rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        tests = next((tests for pattern, tests in TESTS.items() if fnmatch(file, pattern)), "")
        if tests and any(name in f"/{file}" for name in names):
            found[file] = " ".join(f"tests/{test}" for test in tests.split())
    return found


@contextlib.contextmanager
def copied_checkout() -> Iterator[None]:
    """Work in a copy of the checkout, where `import backend_kwargs` finds the copy's."""
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True).splitlines()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for file in listed:
            if (ROOT / file).is_file():
                (Path(folder) / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / file, Path(folder) / file)
        # For the tests' own processes, and for this one, which forks and has not loaded the package.
        os.environ["PYTHONPATH"] = sys.path[0] = folder
        sys.dont_write_bytecode = True  # a mutant is as old as its module
        with contextlib.chdir(folder):
            yield


def mutants(modules: Iterable[str]) -> list[MutationSpec]:
    """Return all mutants of the modules but those of annotations, which fail at import or change nothing."""
    with use_db(":memory:", WorkDB.Mode.create) as db:
        init([Path(module) for module in modules], db, {})
        every = [mutant for item in db.work_items for mutant in item.mutations]
    skipped = {module: list(annotations(Path(module).read_text())) for module in modules}

    def annotates(mutant: MutationSpec) -> bool:
        return any(begin <= mutant.start_pos < end for begin, end in skipped[mutant.module_path.as_posix()])

    return [mutant for mutant in every if not annotates(mutant)]


def annotations(text: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Return from where to where annotations reach: what is wrong there fails at import, or nobody asks."""
    for node in ast.walk(ast.parse(text)):
        for field in ("annotation", "returns"):
            if isinstance(at := getattr(node, field, None), ast.expr):
                yield (at.lineno, at.col_offset), (at.end_lineno or 0, at.end_col_offset or 0)


def run(sample: Iterable[MutationSpec], tested: Mapping[str, str]) -> Counter[tuple[str, str]]:
    """Test each mutant, print those that survive, and count by module and outcome."""
    limits: dict[str, float] = {}
    outcomes: Counter[tuple[str, str]] = Counter()
    equivalent = tomllib.loads(EQUIVALENT.read_text())
    for mutant in sample:
        module = mutant.module_path.as_posix()
        tests = tested[module].split()
        if module not in limits:
            began = time.monotonic()
            if not pass_within(math.inf, tests):
                raise SystemExit(f"The tests of {module} fail without a mutant: pytest {tested[module]}")
            limits[module] = SLACK_S + SLOWER * (time.monotonic() - began)
        operator = get_operator(mutant.operator_name)()
        with use_mutation(mutant.module_path, operator, mutant.occurrence) as (before, after):
            diff = list(unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0))[2:]
            # Without its place and its indent.
            change = "\n".join(f"{line[0]}{line[1:].strip()}" for line in diff[1:])
            if change in [each["change"].strip() for each in equivalent.get(module, [])]:
                outcome = "equivalent"
            else:
                outcome = "survived" if pass_within(limits[module], tests) else "killed"
        outcomes[module, outcome] += 1
        print("\n".join(["", module, *diff, ""]) if outcome == "survived" else ".", end="", flush=True)
    return outcomes


def pass_within(limit_s: float, tests: Sequence[str]) -> bool:
    """Run tests in a fork of this process, which has torch loaded; whoever hangs or crashes fails."""
    child = multiprocessing.get_context("fork").Process(target=quietly, args=(tests,))
    child.start()
    child.join(None if math.isinf(limit_s) else limit_s)
    with contextlib.suppress(ProcessLookupError):  # also what a test has started and left
        os.killpg(child.pid or 0, signal.SIGKILL)
    child.join()
    return child.exitcode == 0


def quietly(tests: Sequence[str]) -> None:
    """Run tests without a word, in a process group of their own."""
    os.setsid()
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    sys.exit(pytest.main([*PYTEST, *tests]))


if __name__ == "__main__":
    sys.exit(main())
