"""A run of the suite: processes that fail separately, result files, shards and budgets."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from backend_kwargs.errors import BackendKwargsError, BackendKwargsWarning
from benchmarks.execution import process, records, session
from benchmarks.execution.session import SHARED, Plan, groups, key_of, run, select
from benchmarks.workloads.peers import Peer
from tests.benchmarks.tiny_cases import DOUBLE, FAULTY, MUTATING, SEVERAL
from tests.processes import ends

ROOT = Path(__file__).parents[2]


def plan_of(out, *cases, **given):
    settings = {"device": "cpu", "suite": "smoke", "globs": ("eager", "hand:*"), "rounds": 2, "ceilings": False}
    return Plan(cases, out, **settings | given)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def sleep(tell, seconds):
    tell("asleep")
    time.sleep(seconds)


def start_another(tell, path):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(path).write_text(str(child.pid))
    return child.pid


def test_step_that_hangs_is_killed():
    """A process that reports nothing for too long ends as a timeout, at the last step it reported."""
    outcome = process.run(sleep, 600, step_s=0.5)
    assert (outcome.at, outcome.status, outcome.out_of_time) == ("asleep", "timeout", False)


def test_deadline_is_no_timeout():
    """A step that is stopped by the run's budget is not a timeout."""
    assert process.run(sleep, 600, step_s=60, deadline=time.monotonic() + 0.5).out_of_time


def test_process_is_killed_with_its_children(tmp_path):
    """A process is killed with all processes that it started."""
    started = process.run(start_another, str(tmp_path / "pid"), step_s=60).value
    assert ends(started)


def test_faulty_peers_fail_alone(tmp_path):
    """If peers hang, crash or run out of memory, the other peers are timed all the same."""
    progress = run(plan_of(tmp_path / "r.jsonl", FAULTY, step_s=8.0))
    found = {cell.peer: (cell.status, cell.reason) for cell in progress.cells}
    assert found == {
        "eager": ("pass", ""),
        "hand:hang": ("timeout", "longer than 8 s"),
        "hand:crash": ("fail_to_run", "its process died: SIGKILL"),
        "hand:greedy": ("oom", "OutOfMemoryError: no memory left"),
        "hand:same": ("pass", ""),
        "A/A": ("pass", ""),
        "+5 %": ("pass", ""),
    }


def test_file_begins_with_the_environment(tmp_path, monkeypatch):
    """A file starts with environment and command, and each group ends with its mark."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/benchmarks/__main__.py", "run", "--rounds", "3"])
    run(plan_of(tmp_path / "r.jsonl", MUTATING))
    lines = lines_of(tmp_path / "r.jsonl")
    assert [line["record"] for line in lines] == ["environment", *["cell"] * 5, "group"]
    wanted = {"torch", "triton", "device_name", "driver", "revision", "backend_kwargs", "command", "clocks", "time"}
    assert wanted <= lines[0].keys()
    assert lines[0]["command"] == "python -m benchmarks run --rounds 3"


def test_ceilings_are_in_the_file_and_limits_in_the_cells(tmp_path):
    """Limits use the ceilings measured in the same run."""
    cells = run(plan_of(tmp_path / "r.jsonl", DOUBLE, modes=("fwd",), ceilings=True)).cells
    assert lines_of(tmp_path / "r.jsonl")[1]["record"] == "ceilings"
    assert cells[0].limit_s > 0
    assert cells[0].bound in ("launch", "memory", "compute", "L2")


def test_resume_runs_what_is_left(tmp_path):
    """--resume skips groups that are in the file, or in another one."""
    out, other = tmp_path / "r.jsonl", tmp_path / "other.jsonl"
    run(plan_of(out, MUTATING))
    assert [cell.case for cell in run(plan_of(out, MUTATING, DOUBLE, modes=("fwd",), resume=True)).cells[:1]] == [
        "double"
    ]
    assert run(plan_of(out, MUTATING, DOUBLE, modes=("fwd",), resume=True)).cells == []
    assert run(plan_of(other, MUTATING, also=(out,))).cells == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"torch": "1.0"}, f"torch '1.0': here it is {torch.__version__!r}"),
        ({"device_name": "NVIDIA H100"}, "device_name 'NVIDIA H100': here it is "),
    ],
    ids=["torch", "device"],
)
def test_another_machines_results_are_not_continued(tmp_path, changed, message):
    """--resume refuses results of another device or torch, and does not count their groups as done."""
    other = tmp_path / "other.jsonl"
    records.append(other, [{"record": "environment", "version": records.VERSION, **changed}])
    before = other.read_bytes()
    for out, also in ((other, ()), (tmp_path / "r.jsonl", (other,))):
        with pytest.raises(BackendKwargsError) as error:
            run(plan_of(out, MUTATING, resume=True, also=also))
        assert str(error.value).startswith(f"Cannot go on with results of {message}")
        assert str(error.value).endswith("; give another --out.")
    assert other.read_bytes() == before
    assert not (tmp_path / "r.jsonl").exists()


def test_another_revisions_results_are_continued(tmp_path):
    """--resume continues results of another revision, with a warning, and the file records it."""
    out = tmp_path / "r.jsonl"
    records.append(out, [{"record": "environment", "version": records.VERSION, "revision": "abc"}])
    with pytest.warns(BackendKwargsWarning, match=r"^Goes on with results of revision abc: here it is "):
        assert run(plan_of(out, MUTATING, resume=True)).cells


def test_file_that_is_there_is_not_overwritten(tmp_path):
    """Without --resume an existing file is not changed."""
    (tmp_path / "r.jsonl").write_text("")
    with pytest.raises(BackendKwargsError) as error:
        run(plan_of(tmp_path / "r.jsonl", DOUBLE))
    assert str(error.value) == f"{str(tmp_path / 'r.jsonl')!r} is there already: give --resume, or another --out."


def test_killed_run_keeps_finished_groups(tmp_path):
    """A run killed in its second group keeps the first, leaves no process behind, and can be resumed."""
    out = tmp_path / "r.jsonl"
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path; from tests.benchmarks.test_bench_session import plan_of\n"
        "from tests.benchmarks.tiny_cases import *\n"
        "from benchmarks.execution.session import run\n"
        "run(plan_of(Path(sys.argv[1]), MUTATING, FAULTY))"
    )
    command = [sys.executable, "-c", code, str(out), str(ROOT)]
    child = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    deadline = time.monotonic() + 120
    while not (out.exists() and '"group"' in out.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert {cell.case for cell in records.read(out).cells} == {"mutating"}
    rest = run(plan_of(out, MUTATING, DOUBLE, modes=("fwd",), resume=True))
    assert (rest.done, rest.total, {cell.case for cell in rest.cells}) == (2, 2, {"double"})


def test_budget_ends_between_groups(tmp_path):
    """A run whose budget has ended writes nothing more, and says so."""
    progress = run(plan_of(tmp_path / "r.jsonl", DOUBLE, budget_s=0.0))
    assert (progress.out_of_time, progress.done, progress.total) == (True, 0, 2)


def test_shards_share_out_the_groups(tmp_path):
    """Every group is in exactly one shard, urgent ones first and later compiles last."""
    headline = replace(MUTATING, headline=True, suites=frozenset({"start"}))
    whole = plan_of(tmp_path / "r.jsonl", DOUBLE, headline, FAULTY, suite="full")
    order = [(job.case.name, job.mode, job.run) for job in groups(whole)]
    assert order == [
        ("mutating", "fwd", 0),
        ("double", "fwd", 0),
        ("double", "fwd_bwd", 0),
        ("faulty", "fwd", 0),
        ("mutating", "fwd", 1),
        ("mutating", "fwd", 2),
    ]
    shares = [groups(replace(whole, shard=(at, 4))) for at in (1, 2, 3, 4)]
    assert sorted(key_of(job) for share in shares for job in share) == sorted(map(key_of, groups(whole)))


def test_each_compile_has_a_process_of_its_own(tmp_path):
    """With --apart peers compile cold and warm before timing; each compile is recorded, and its cache is removed."""
    aot = Peer("aot", "control", "aot_eager")
    plan = plan_of(tmp_path / "r.jsonl", DOUBLE, modes=("fwd",), globs=("eager",), beside=False, jobs=2, extra=(aot,))
    made = next(cell.compile for cell in run(plan).cells if cell.peer == "aot")
    assert (made.fresh, made.cold_s > 0, made.warm_s > 0) == (True, True, True)
    lines = lines_of(plan.out)
    assert [line["record"] for line in lines] == ["environment", *["compile"] * 3, *["cell"] * 4, "group"]
    found = [line["compile"] for line in lines[1:4] if line["key"].endswith(" aot")]
    assert [each["warm_s"] for each in found] == [None, made.warm_s]
    assert not [path for path in plan.where.iterdir() if path.is_dir()]
    assert run(replace(plan, resume=True)).cells == []


def test_what_another_machine_compiled_is_compiled_again(tmp_path):
    """A compile of another machine is repeated, since its cache is missing and autos would race during timing."""
    aot = Peer("aot", "control", "aot_eager")
    given = {"modes": ("fwd",), "globs": ("eager",), "beside": False, "extra": (aot,)}
    plan = plan_of(tmp_path / "r.jsonl", DOUBLE, **given)
    run(plan)
    kept = [line for line in lines_of(plan.out) if line["record"] in ("environment", "compile")]
    plan.out.write_text("".join(json.dumps(line) + "\n" for line in kept))
    run(replace(plan, resume=True))
    compiled = [line["key"].split()[-1] for line in lines_of(plan.out) if line["record"] == "compile"]
    assert compiled == ["eager", "aot", "aot", "aot", "aot"]


def test_eagers_memory_is_of_a_process_of_its_own(tmp_path):
    """With --apart eager's memory is measured in a separate process, as that of its peers."""
    aot = Peer("aot", "control", "aot_eager")
    plan = plan_of(tmp_path / "r.jsonl", DOUBLE, modes=("fwd",), globs=("eager",), beside=False, extra=(aot,))
    made = {cell.peer: cell.compile for cell in run(plan).cells}
    assert (made["eager"].fresh, made["eager"].cold_s, made["aot"].fresh) == (True, None, True)


def test_groups_ahead_compile_before_any_is_timed(tmp_path):
    """With --ahead two groups compile first; while a group is timed, nothing else compiles or is timed."""
    aot = Peer("aot", "control", "aot_eager")
    given = {"modes": ("fwd",), "globs": ("eager",), "beside": False, "jobs": 2, "ahead": 2, "extra": (aot,)}
    plan = plan_of(tmp_path / "r.jsonl", DOUBLE, MUTATING, **given)
    assert {cell.status for cell in run(plan).cells} == {"pass"}
    kinds = [line["record"] for line in lines_of(plan.out)]
    assert kinds == ["environment", *["compile"] * 6, *["cell"] * 4, "group", *["cell"] * 4, "group"]


def test_nothing_is_compiled_twice(tmp_path):
    """With --fewer-compiles each peer compiles once, with nothing stored."""
    aot = Peer("aot", "control", "aot_eager")
    given = {"modes": ("fwd",), "globs": ("eager",), "beside": False, "extra": (aot,)}
    warm = []
    for name, plan in (("a", {}), ("b", {"fewer_compiles": True})):
        made = {c.peer: c.compile for c in run(plan_of(tmp_path / f"{name}.jsonl", DOUBLE, **given, **plan)).cells}
        warm.append(made["aot"].warm_s is not None)
    assert warm == [True, False]


def test_what_one_mode_tuned_is_there_for_the_next(tmp_path):
    """With --fewer-compiles max-autotune begins with the cache of max-autotune-no-cudagraphs; its time is not cold."""
    first = Peer("max-autotune-no-cudagraphs", "mode", "inductor", "max-autotune-no-cudagraphs")
    given = {"modes": ("fwd",), "globs": ("eager", "max-autotune"), "beside": False, "fewer_compiles": True}
    plan = plan_of(tmp_path / "r.jsonl", DOUBLE, extra=(first,), **given)
    made = {cell.peer: cell.compile for cell in run(plan).cells if cell.passed}
    assert made["max-autotune-no-cudagraphs"].cold_s > 0
    assert (made["max-autotune"].cold_s, made["max-autotune"].kernels) == (None, made[first.name].kernels)


def hold(tell, lock, log, seconds):
    with process.taking_turns(Path(lock), lambda: None) as alone:
        _note(log, "compiles")
        alone()
        _note(log, "begins")
        time.sleep(seconds)
        _note(log, "ends")


def race(tell, lock, log, seconds):
    _note(log, "starts")
    with process.alone(Path(lock), lambda: None):
        _note(log, "begins")
        time.sleep(seconds)
        _note(log, "ends")


def _note(log, what):
    with Path(log).open("a") as file:
        file.write(what + "\n")


def test_races_do_not_overlap(tmp_path):
    """Two processes start at the same time, but their step under the lock comes one after the other."""
    with ThreadPoolExecutor(2) as pool:
        given = (str(tmp_path / "lock"), str(tmp_path / "log"), 1.0)
        outcomes = [pool.submit(process.run, race, *given, step_s=60) for _ in range(2)]
    assert all(outcome.result().passed for outcome in outcomes)
    assert [line for line in (tmp_path / "log").read_text().split() if line != "starts"] == ["begins", "ends"] * 2


def test_turns_do_not_overlap(tmp_path):
    """Two processes compile at the same time, but are timed one after the other."""
    with ThreadPoolExecutor(2) as pool:
        given = (str(tmp_path / "lock"), str(tmp_path / "log"), 0.3)
        outcomes = [pool.submit(process.run, hold, *given, step_s=60) for _ in range(2)]
    assert all(outcome.result().passed for outcome in outcomes)
    words = (tmp_path / "log").read_text().split()
    at = words.index("begins")
    assert words[at + 1] in ("ends", "compiles")
    assert [word for word in words if word != "compiles"] == ["begins", "ends"] * 2


def test_a_real_models_auto_is_held_against_its_winner(tmp_path, monkeypatch):
    """For real models auto's first call with a stored decision is measured together with its winner's alone."""
    monkeypatch.setattr(session, "PAIRS", 1)
    case = replace(SEVERAL, suites=frozenset({"models"}))
    given = {"suite": "models", "globs": ("eager", "tmpl-inductor:auto"), "modes": ("fwd",)}
    auto = next(cell for cell in run(plan_of(tmp_path / "r.jsonl", case, **given)).cells if cell.kind == "auto")
    assert (auto.status, auto.compile.fresh) == ("pass", True)
    assert auto.compile.cold_s > auto.compile.warm_s > 0
    assert auto.compile.alone_s > 0
    assert auto.decided["winner"]


def test_compiles_apart_are_not_those_beside(tmp_path):
    """Groups compiled with --beside and --apart have different keys; older files count as --beside."""
    beside, apart = (key_of(groups(plan_of(tmp_path / "r.jsonl", MUTATING, beside=each))[0]) for each in (True, False))
    assert beside == "mutating@1 fwd torch.float32 smoke cold run0 events wall 2 eager,hand:*"
    assert apart == "mutating@1 fwd torch.float32 smoke cold run0 apart events wall 2 eager,hand:*"


def test_one_cache_is_one_compile(tmp_path):
    """--one-cache allows only one compile, since a second one would find everything in the cache."""
    headline = replace(MUTATING, headline=True)
    asked = [plan_of(tmp_path / "r.jsonl", headline, suite="full", one_cache=one) for one in (False, True)]
    assert [len(groups(plan)) for plan in asked] == [3, 1]


def test_one_cache_begins_and_ends_with_nothing(tmp_path):
    """The shared cache of another run is removed, with its decisions; that of an interrupted run is kept."""
    plan = plan_of(tmp_path / "r.jsonl", MUTATING, one_cache=True)
    left = plan.where / SHARED / "decisions"
    left.mkdir(parents=True)
    run(replace(plan, budget_s=0.0))
    assert not left.exists()
    assert {cell.one_cache for cell in run(plan).cells} == {True}
    longer = replace(plan, cases=(MUTATING, DOUBLE), modes=("fwd",), resume=True)
    left.mkdir(parents=True)
    run(replace(longer, budget_s=0.0))
    assert left.exists()
    run(longer)
    assert not left.parent.exists()


def test_select_by_suite_name_and_device():
    """Cases are selected by suite, globs and device; a glob that matches nothing raises."""
    cases = {
        case.name: case for case in (DOUBLE, replace(FAULTY, gpus_only=True), replace(MUTATING, suites=frozenset()))
    }
    assert [case.name for case in select(cases, "full", [], "cpu")] == ["double", "mutating"]
    assert [case.name for case in select(cases, "smoke", ["*"], "cuda")] == ["double", "faulty"]
    with pytest.raises(BackendKwargsError) as error:
        select(cases, "full", ["x*"], "cpu")
    assert str(error.value) == "No case is called 'x*': `python -m benchmarks list` shows all."
