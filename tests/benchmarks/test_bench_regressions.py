"""`compare OLD NEW`: verdicts and exit codes."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks.analysis.regressions import compare_files
from benchmarks.execution.records import AGAIN
from tests.benchmarks.bench_cells import cell, write

PEERS = ("eager", AGAIN, "default", "t")


def cells(run, **changed):
    """Return a run of four peers; `t` may differ."""
    return [cell(peer, group=run, **(changed if peer == "t" else {})) for peer in PEERS]


@pytest.fixture
def old(tmp_path):
    return write(tmp_path / "old.jsonl", cells("old"))


def verdict_of(outcome, peer="t"):
    return {line.clock: line.verdict for line in outcome.lines if line.peer == peer}


@pytest.mark.parametrize(
    ("seconds", "code", "verdict"),
    [
        pytest.param(1e-3, 0, "SAME", id="same"),
        pytest.param(0.7e-3, 0, "FAST", id="faster"),
        pytest.param(1.3e-3, 1, "SLOW", id="slower"),
    ],
)
def test_exit_code(old, tmp_path, seconds, code, verdict):
    """The exit code is 0 for same or faster and 1 for a regression; the other peers are the same."""
    outcome = compare_files(old, write(tmp_path / "new.jsonl", cells("new", seconds=seconds)))
    assert outcome.code == code
    assert verdict_of(outcome) == {"device": verdict, "wall": verdict}
    assert set(verdict_of(outcome, "default").values()) == {"SAME"}
    assert AGAIN not in {line.peer for line in outcome.lines}


@pytest.mark.parametrize(
    ("status", "code"), [("fail_accuracy", 1), ("timeout", 1), ("unavailable", 0)], ids=["wrong", "hangs", "absent"]
)
def test_what_no_longer_passes(old, tmp_path, status, code):
    """A peer that passed and no longer does is a regression, unless it is unavailable here."""
    outcome = compare_files(old, write(tmp_path / "new.jsonl", cells("new", status=status)))
    assert outcome.code == code
    assert [line.note for line in outcome.lines if line.peer == "t"] == [f"pass -> {status}"]


def compared(tmp_path, old, new, **environment):
    """Compare two files with these cells."""
    return compare_files(
        *(write(tmp_path / f"{name}.jsonl", of, **environment) for name, of in (("old", old), ("new", new)))
    )


def times(run, eager, t, again=1.0):
    """Return a run of three peers, in milliseconds; the A/A peer takes `again` times as long as eager."""
    each = {"eager": eager, AGAIN: eager * again, "t": t}
    return [cell(peer, ms * 1e-3, group=run) for peer, ms in each.items()]


@pytest.mark.parametrize(
    ("eager", "t", "code", "verdict"),
    [
        pytest.param(1.3, 1.3, 0, "SAME", id="both slower"),
        pytest.param(0.7, 0.7, 0, "SAME", id="both faster"),
        pytest.param(0.7, 1.0, 0, "AMBIGUOUS", id="eager alone faster"),
        pytest.param(1.3, 1.6, 0, "AMBIGUOUS", id="slower by more than eager, by less than eager moved"),
        pytest.param(1.05, 2.0, 1, "SLOW", id="slower by far more"),
    ],
)
def test_the_machines_drift(tmp_path, eager, t, code, verdict):
    """A change of eager is not a regression, nor is that of a peer that changes with it, more, or not at all."""
    outcome = compared(tmp_path, times("old", 1, 1), times("new", eager, t))
    assert outcome.code == code
    assert verdict_of(outcome) == {"device": verdict, "wall": verdict}
    assert verdict_of(outcome, "eager") == {"device": "", "wall": ""}


def test_how_far_eager_moved(tmp_path):
    """A library that became slower as a whole has no verdict, but is reported."""
    outcome = compared(tmp_path, times("old", 1, 1), times("new", 2, 2))
    assert outcome.reason == (
        "By speedup over eager 0 FAST, 0 SLOW, 0 AMBIGUOUS, 2 SAME; 0 worse; 0 peers of a case in one file only; "
        "eager itself 0.501x (0.501x to 0.501x) by the device's clock; "
        "eager itself 0.502x (0.502x to 0.502x) by the wall's clock."
    )


@pytest.mark.parametrize(("again", "t"), [(1.08, 1.15), (3.0, 2.5)], ids=["wide", "very wide"])
def test_noise_is_no_regression(tmp_path, again, t):
    """With wide noise floors a slower median is ambiguous, neither a failure nor the same."""
    outcome = compared(tmp_path, times("old", 1, 1, again), times("new", 1, t, again))
    assert outcome.code == 0
    assert verdict_of(outcome) == {"device": "AMBIGUOUS", "wall": "AMBIGUOUS"}


@pytest.mark.parametrize(
    ("compiles", "verdict"),
    [((1, 1.3, 1.3), "AMBIGUOUS"), ((1.8, 1.8, 1.9), "SLOW")],
    ids=["some slower", "all slower"],
)
def test_the_unit_is_the_compile(tmp_path, compiles, verdict):
    """Compiles that differ from each other are not a regression, however many rounds each has."""
    sides = [
        [replace(each, run=run) for run, t in enumerate(of) for each in times(f"{name} {run}", 1, t)]
        for name, of in (("old", (1, 1, 1.3)), ("new", compiles))
    ]
    assert verdict_of(compared(tmp_path, *sides)) == {"device": verdict, "wall": verdict}


@pytest.mark.parametrize(("compiles", "verdict"), [(2, "AMBIGUOUS"), (3, "SLOW")], ids=["two", "three"])
@pytest.mark.parametrize(
    "tuned", [{"options": {"max_autotune": True}}, {"kind": "auto"}], ids=["by its options", "by a race"]
)
def test_what_tuning_took_by_chance_is_no_regression(tmp_path, tuned, compiles, verdict):
    """A peer that chooses kernels by timing needs three compiles on each side for a verdict."""
    sides = [
        [replace(each, run=run) for run in range(compiles) for each in cells(f"{name} {run}", seconds=t, **tuned)]
        for name, t in (("old", 1e-3), ("new", 1.3e-3))
    ]
    assert verdict_of(compared(tmp_path, *sides)) == {"device": verdict, "wall": verdict}


def test_processes_differ_by_the_walls_clock(tmp_path):
    """A loss of 8 % is a regression in device time, and ambiguous in wall time."""
    outcome = compared(tmp_path, times("old", 1, 1), times("new", 1, 1.08))
    assert verdict_of(outcome) == {"device": "SLOW", "wall": "AMBIGUOUS"}


@pytest.mark.parametrize(("field", "what"), [("threads", "number of threads"), ("cpus", "number of CPUs")])
@pytest.mark.parametrize(
    ("device", "code", "reason"),
    [
        pytest.param("cpu", 2, "Not comparable: {}.", id="cpu"),
        pytest.param("cuda", 0, "; no verdict by the wall's clock, which is the host's: {}.", id="cuda"),
    ],
)
def test_hosts_that_differ(tmp_path, field, what, device, code, reason):
    """Different hosts make CPU files incomparable; with a GPU only wall times have no verdict."""
    files = [
        write(tmp_path / f"{n}.jsonl", cells(str(n)), **{"device": device, "cpus": 8, "threads": 8} | {field: n})
        for n in (2, 4)
    ]
    outcome = compare_files(*files)
    assert outcome.code == code
    assert outcome.reason.endswith(reason.format(f"{what} 2 in the old file, 4 in the new"))
    assert verdict_of(outcome) == ({} if code else {"device": "SAME", "wall": "AMBIGUOUS"})


def test_without_eager(tmp_path):
    """A peer that was timed without eager is not compared."""
    outcome = compared(tmp_path, cells("old"), cells("new")[1:])
    assert (outcome.code, outcome.reason) == (
        2,
        "Not comparable: no peer is timed with eager in both files in one case, mode, dtype, L2 and scale.",
    )


@pytest.mark.parametrize(
    ("environment", "changed", "reason"),
    [
        pytest.param(
            {"device_name": "NVIDIA H100"},
            {},
            "Not comparable: device NVIDIA H200 in the old file, NVIDIA H100 in the new.",
            id="device",
        ),
        pytest.param(
            {"torch": "2.12.0"}, {}, "Not comparable: torch 2.11.0 in the old file, 2.12.0 in the new.", id="torch"
        ),
        pytest.param(
            {},
            {"case_version": 2},
            "Not comparable: version of case 'gemm' 1 in the old file, 2 in the new.",
            id="version",
        ),
        pytest.param(
            {},
            {"case": "other"},
            "Not comparable: case gemm in the old file, other in the new.",
            id="nothing in common",
        ),
        pytest.param({}, {"l2": "warm"}, "Not comparable: L2 cold in the old file, warm in the new.", id="l2"),
        pytest.param(
            {}, {"scale": "smoke"}, "Not comparable: scale full in the old file, smoke in the new.", id="scale"
        ),
    ],
)
def test_not_comparable(old, tmp_path, environment, changed, reason):
    """Files that cannot be compared exit with 2 and one line that names the difference."""
    new = [cell(peer, group="new", **changed) for peer in PEERS]
    outcome = compare_files(old, write(tmp_path / "new.jsonl", new, **environment))
    assert (outcome.code, outcome.reason) == (2, reason)


def test_table_of_a_regression(old, tmp_path):
    """The table shows the peer, the clock, the change and the verdict."""
    outcome = compare_files(old, write(tmp_path / "new.jsonl", cells("new", seconds=2e-3)))
    written = io.StringIO()
    Console(file=written, width=120).print(outcome.table())
    (row,) = (line for line in written.getvalue().splitlines() if " t " in line and "device" in line)
    assert row.split()[:3] == ["gemm", "t", "device"]
    assert row.split()[3].startswith("0.5")
    assert row.split()[-1] == "SLOW"
