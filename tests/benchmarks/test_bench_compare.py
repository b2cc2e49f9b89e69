"""`compare OLD NEW`: verdicts and exit codes."""

import io

import pytest
from bench_cells import cell, write
from rich.console import Console

from benchmarks.compare import compare_files
from benchmarks.records import AGAIN

PEERS = ("eager", AGAIN, "default", "t")


def cells(run, **changed):
    """Return a run of four peers; `t` may be another."""
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
    """0 for same and faster, 1 for a regression; the other peers are the same."""
    outcome = compare_files(old, write(tmp_path / "new.jsonl", cells("new", seconds=seconds)))
    assert outcome.code == code
    assert verdict_of(outcome) == {"device": verdict, "wall": verdict}
    assert set(verdict_of(outcome, "default").values()) == {"SAME"}
    assert AGAIN not in {line.peer for line in outcome.lines}


@pytest.mark.parametrize(
    ("status", "code"), [("fail_accuracy", 1), ("timeout", 1), ("unavailable", 0)], ids=["wrong", "hangs", "absent"]
)
def test_what_no_longer_passes(old, tmp_path, status, code):
    """What passed and does not is a regression, unless it cannot be had here."""
    outcome = compare_files(old, write(tmp_path / "new.jsonl", cells("new", status=status)))
    assert outcome.code == code
    assert [line.note for line in outcome.lines if line.peer == "t"] == [f"pass -> {status}"]


def test_noise_is_no_regression(tmp_path):
    """Where the floors of both files are wide, a slower median is ambiguous, and nobody's failure."""
    files = []
    for run, seconds in (("old", 1e-3), ("new", 1.15e-3)):
        noisy = [cell("eager", group=run), cell(AGAIN, 1.08e-3, group=run), cell("t", seconds, group=run)]
        files.append(write(tmp_path / f"{run}.jsonl", noisy))
    outcome = compare_files(*files)
    assert outcome.code == 0
    assert set(verdict_of(outcome).values()) <= {"AMBIGUOUS", "SAME"}


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
            {}, {"case": "other"}, "Not comparable: no peer of a case passes in both files.", id="nothing in common"
        ),
    ],
)
def test_not_comparable(old, tmp_path, environment, changed, reason):
    """2, and one line that names what differs."""
    new = [cell(peer, group="new", **changed) for peer in PEERS]
    outcome = compare_files(old, write(tmp_path / "new.jsonl", new, **environment))
    assert (outcome.code, outcome.reason) == (2, reason)


def test_table_of_a_regression(old, tmp_path):
    """The table says who, by which clock, how much, and the verdict."""
    outcome = compare_files(old, write(tmp_path / "new.jsonl", cells("new", seconds=2e-3)))
    written = io.StringIO()
    Console(file=written, width=120).print(outcome.table())
    (row,) = (line for line in written.getvalue().splitlines() if " t " in line and "device" in line)
    assert row.split()[:3] == ["gemm", "t", "device"]
    assert row.split()[3].startswith("0.5")
    assert row.split()[-1] == "SLOW"
