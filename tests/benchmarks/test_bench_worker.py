"""One group: every peer is checked on the timed callable, timed with the others, and reported if it fails."""

import json
import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from backend_kwargs import make_backend, trial
from backend_kwargs.harness.trial import isolated
from benchmarks.analysis import verdicts
from benchmarks.execution import device_timer, worker
from benchmarks.execution.records import AGAIN
from benchmarks.execution.study import CaseStudy
from benchmarks.execution.trial import cache_at, decided, restart_workers
from benchmarks.execution.worker import compile_peer
from benchmarks.workloads.peers import Peer
from tests.benchmarks import tiny_cases
from tests.benchmarks.tiny_cases import DOUBLE, HELD, MUTATING, NOISY, SEVERAL, SWEEP, TRAINED

QUICK = Peer("auto", "auto", "tmpl-inductor:auto", options={"candidates": []})


def test_cells_of_a_group(timed):
    """Passing peers have one sample per round, in one group with the baseline's controls; others have none."""
    cells = timed(DOUBLE, ("eager", "hand:*"))
    assert {peer: (cell.status, len(cell.wall_s)) for peer, cell in cells.items()} == {
        "eager": ("pass", 3),
        "hand:add": ("pass", 3),
        "hand:wrong": ("fail_accuracy", 0),
        AGAIN: ("pass", 3),
        "+5 %": ("pass", 3),
    }
    assert {cell.group_id for cell in cells.values()} == {"g"}
    assert cells["+5 %"].options.keys() == {"injected"}
    assert cells["eager"].work == {"flops": 64, "bytes": 512, "unit": "fp32", "written": None}


def test_gradients_are_checked(timed):
    """A kernel with wrong gradients fails; the work is that of the first mode only."""
    cells = timed(DOUBLE, ("eager", "hand:*"), mode="fwd_bwd")
    assert cells["hand:add"].status == "pass"
    assert cells["hand:wrong"].status == "fail_accuracy"
    assert cells["eager"].work is None


def test_mutated_arguments_are_checked(timed):
    """A peer with the right result fails if it does not change its arguments as eager does."""
    cells = timed(MUTATING, ("eager", "hand:*"))
    assert cells["hand:same"].status == "pass"
    assert (cells["hand:forgets"].status, cells["hand:forgets"].reason.partition(":")[0]) == (
        "fail_accuracy",
        "state['input 0']",
    )


def test_one_cache_tells_no_compile_time(timed, tmp_path):
    """Peers that share a cache have no compile times, and auto's race has none either."""
    cells = timed(DOUBLE, ("eager", "default"), extra=(QUICK,), one_cache=True)
    assert [cells[peer].status for peer in ("default", "auto")] == ["pass", "pass"]
    assert (cells["default"].compile.cold_s, cells["auto"].decided["seconds"]) == (None, None)
    assert {cell.one_cache for cell in cells.values()} == {True}
    kept = {path.name for path in (tmp_path / "cache" / "group").iterdir()}
    assert "decisions" in kept
    assert not {"default", "auto"} & kept


def test_a_cache_puts_back_what_it_sets(tmp_path, monkeypatch):
    """The three variables of a cache are restored; variables that torch sets meanwhile stay."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    for name in ("TORCHINDUCTOR_CACHE_DIR", "BACKEND_KWARGS_STORE"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    with cache_at(tmp_path / "a"):
        assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "a" / "triton")
        monkeypatch.setenv("TRITON_PTXAS_PATH", "found")
    assert dict(os.environ) == {**before, "TRITON_PTXAS_PATH": "found"}


def test_what_is_decided_is_the_folders(tmp_path, monkeypatch):
    """A decision is found only in the folder where it was stored."""
    monkeypatch.setenv("BACKEND_KWARGS_STORE", str(tmp_path / "mine"))

    def seconds(place):
        compiled = isolated(tiny_cases.several, backend=make_backend(QUICK.backend, QUICK.options))
        with place:
            compiled(torch.ones(1024, 1024))
        return decided(compiled)["seconds"]

    first, mine, other = map(seconds, (cache_at(tmp_path / "a"), nullcontext(), cache_at(tmp_path / "b")))
    assert len({first, mine, other}) == 3
    assert seconds(cache_at(tmp_path / "a")) == first


def test_arguments_that_calls_change_are_not_copied(timed, monkeypatch):
    """All peers are timed on the same arguments, since a copy for each would fill a GPU."""
    steps = []
    make = CaseStudy.step
    monkeypatch.setattr(CaseStudy, "step", lambda *args: steps.append(make(*args)) or steps[-1])
    timed(MUTATING, ("eager", "hand:same"))
    assert len({step.call.args[0].data_ptr() for step in steps}) == 1


def test_what_is_fast_only_while_results_are_dropped_loses(timed):
    """A planted peer that is slow while its last result is alive wins only in the column of dropped results."""
    cells = timed(HELD, ("eager", "hand:planted"))
    (table,) = verdicts.entries(list(cells.values()), "wall").values()
    planted = next(entry for entry in table if entry.cell.peer == "hand:planted")
    assert planted.speedups["eager"].median < 1
    assert planted.dropped.median < min(cells["eager"].dropped_s)


def test_a_cell_says_how_many_calls_a_sample_is(timed):
    """Calls far below a millisecond are repeated, also those of controls; untimed peers have no count."""
    cells = timed(DOUBLE, ("eager", "hand:*"))
    assert min(cells[name].repeats["wall"] for name in ("eager", "hand:add", AGAIN)) > 1
    assert (cells["hand:wrong"].repeats, cells["eager"].exposed) == ({}, False)


def test_a_cell_says_on_whom_the_host_shows(job, monkeypatch):
    """A call with exposed launches is marked only in its own cell."""

    def device_times(calls, rounds, device, l2, *, failed, repeated, exposed):
        exposed("b")
        for name in calls:
            repeated(name, 1)
        return {name: [1e-3] * rounds for name in calls}

    monkeypatch.setattr(device_timer, "device_times", device_times)
    racing = {name: SimpleNamespace(step=None) for name in "ab"}
    timed = worker._time(job(DOUBLE, device="meta", clocks=("events",)), racing)
    found = {"wall_s": [], "dropped_s": [], "device_s": [1e-3] * 3, "repeats": {"events": 1}}
    assert timed.of("a") == {**found, "exposed": False}
    assert timed.of("b") == {**found, "exposed": True}


def test_no_growth_is_no_peak(timed, monkeypatch):
    """A peak of zero beyond the memory used before counts as unknown."""
    monkeypatch.setattr(trial, "peak_memory", lambda *args: 0)
    assert timed(DOUBLE, ("eager",))["eager"].compile.peak_bytes is None


def test_auto_says_what_it_chose(timed):
    """Only auto's own cell has the winner, its options and the race."""
    cells = timed(SEVERAL, ("eager",), extra=(QUICK,))
    decided = cells["auto"].decided
    assert cells["auto"].status == "pass", cells["auto"].reason
    assert decided.keys() == {"winner", "options", "seconds", "rows"}
    assert decided["winner"] in ("eager", "default")
    assert decided["seconds"] > 0
    rows = {name: (status, reason, against) for name, status, _, _, reason, against, _ in decided["rows"]}
    assert rows == {"eager": ("pass", "", ""), "default": ("pass", "", "eager")}
    low, median, high = decided["rows"][1][-1]
    assert 0 < low <= median <= high
    assert cells["eager"].decided is None
    json.dumps(decided)


def test_eager_that_differs_from_itself_stops_the_case(timed):
    """If eager is not reproducible, no peer is timed."""
    cell = timed(NOISY)["eager"]
    assert (cell.status, cell.wall_s) == ("eager_two_runs_differ", [])


@pytest.mark.parametrize("case", [SWEEP, TRAINED], ids=["sweep", "training"])
def test_a_call_may_be_several(timed, case):
    """A sweep over several lengths is one call, served by one graph; an optimizer step gives eager's parameters."""
    cells = timed(case, ("eager",), extra=(Peer("aot", "control", "aot_eager"),))
    assert cells["aot"].status == "pass", cells["aot"].reason


def half_gradients(gm, example_inputs):
    return lambda *args: tuple(0.5 * leaf + 0.5 * leaf.detach() for leaf in gm(*args))


def test_training_notices_wrong_gradients(timed):
    """Right outputs with half the gradient fail."""
    cells = timed(TRAINED, ("eager",), extra=(Peer("half", "control", half_gradients),))
    assert (cells["half"].status, cells["half"].reason.partition("[")[0]) == ("fail_accuracy", "gradients")


def breaks(x):
    y = x * 2
    torch._dynamo.graph_break()
    return y + 0


def recompiles(x):
    tiny_cases.turn = getattr(tiny_cases, "turn", "") + "."
    return x * 2 + 0 * len(tiny_cases.turn)


disabled = torch._dynamo.disable(lambda x: x * 2)


def hides(x):
    return disabled(x)


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        pytest.param(breaks, "the graph broke: 2 graphs. ", id="break"),
        pytest.param(recompiles, "compiled ", id="recompile"),
        pytest.param(hides, "no graph reached the backend", id="eager"),
    ],
)
def test_what_does_not_stay_one_graph_fails(timed, fn, reason):
    """A graph break, a recompile and a silent fallback to eager have no latency."""
    build = DOUBLE.build

    def planted(*args):
        problem = build(*args)
        return type(problem)(fn, problem.args)

    case = type(DOUBLE)("planted", "tiny", planted, dtype=torch.float32)
    cell = timed(case, ("eager",), extra=(Peer("compiled", "control", "eager"),))["compiled"]
    assert (cell.status, cell.wall_s) == ("fail_to_run", [])
    assert cell.reason.startswith(reason)


def test_nine_peers_each_compile(timed):
    """Beyond dynamo's limit of eight variants every peer still has its own graph."""
    extra = tuple(Peer(f"peer {at}", "control", "eager", options={}) for at in range(10))
    cells = timed(DOUBLE, ("eager",), extra=extra)
    assert {cells[peer.name].status for peer in extra} == {"pass"}


def test_an_ahead_of_time_package_is_a_peer(timed):
    """A case that is a function is exported, compiled, checked and timed as a package."""
    cell = timed(DOUBLE, ("eager", "aoti"))["aoti"]
    assert (cell.status, cell.reason, len(cell.wall_s)) == ("pass", "", 3)


def test_what_cannot_be_had_says_why(timed):
    """A peer for another device is unavailable, not a failure."""
    cell = timed(DOUBLE, ("eager", "eager+graph"))["eager+graph"]
    assert (cell.status, cell.reason) == ("unavailable", "no peer of its own on cpu")


def test_a_template_that_falls_back_is_not_timed(timed):
    """A template that would fall back to library kernels is not timed."""
    options = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "CPP", "fx_graph_cache": False}
    peer = Peer("cpp", "template", "tmpl-inductor:default", options=options)
    cell = timed(tiny_cases.PRODUCT, ("eager",), extra=(peer,))["cpp"]
    assert (cell.status, cell.wall_s) == ("fail_to_run", [])
    assert cell.reason == (
        "BackendKwargsError: A GEMM or convolution of this graph has no CPP kernel; "
        "without strict=True ATEN's serve the graph as well."
    )


def test_compile_in_a_process_of_its_own(job):
    """A cold compile reports seconds and memory, a warm one only seconds."""
    peer = Peer("aot", "control", "aot_eager")
    cold, warm = (compile_peer(lambda step: None, job(DOUBLE, extra=(peer,)), "aot", first) for first in (True, False))
    assert (cold.status, cold.compile.fresh, cold.compile.warm_s, warm.compile.cold_s) == ("pass", True, None, None)
    assert cold.compile.cold_s > 0
    assert warm.compile.warm_s > 0


def test_compile_workers_begin_with_the_cache_to_fill(tmp_path):
    """Inductor's workers are restarted, since running ones would keep using their old cache."""
    from torch._inductor.async_compile import AsyncCompile, shutdown_compile_workers
    from torch._inductor.compile_worker.subproc_pool import SubprocPool

    try:
        for name in ("one", "two"):
            restart_workers(tmp_path / name)
            pool = AsyncCompile.process_pool()
            assert isinstance(pool, SubprocPool)
            assert pool.submit(os.getenv, "TORCHINDUCTOR_CACHE_DIR").result(60) == str(tmp_path / name)
    finally:
        shutdown_compile_workers()
