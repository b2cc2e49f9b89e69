"""Progress, log, trace and table of a race."""

import io
import json
import logging
import sys
from dataclasses import replace

import pytest
import torch

import backend_kwargs as bk
from backend_kwargs import progress as progress_line
from backend_kwargs.auto import reporting
from backend_kwargs.auto.reporting import progress, table
from backend_kwargs.facts.decision import Decision, RaceRow, Unraced
from backend_kwargs.interval import Interval
from backend_kwargs.progress import progress as progress_of
from backend_kwargs.report import origin

pytestmark = pytest.mark.noise


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_what_is_tried(monkeypatch):
    """On a terminal a line names the candidate that is being tried, and what of `pin` it is part of."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    with progress_of("pin", "1 of 3, racing"), progress() as tick:
        for at, name in enumerate(("freezing", "coordinate_descent"), 1):
            tick(name, at / 4)
        lines = [task.description for task in progress_line._shown[0].tasks]
    assert lines == ["pin: 1 of 3, racing", "auto: coordinate_descent"]
    assert "pin: 1 of 3, racing" in shown.getvalue()


def test_elsewhere_nothing_is_shown(monkeypatch):
    """Off a terminal, for instance in a log file, no progress line is written; a process may have no standard error."""
    for there in (shown := io.StringIO(), None):
        monkeypatch.setattr(sys, "stderr", there)
        with progress_of("pin", "racing"), progress() as tick:
            tick("coordinate_descent", 0.5)
    assert shown.getvalue() == ""


OF_EAGER = RaceRow("eager", seconds=100e-6)
DEFAULT = RaceRow("default", seconds=95e-6, speedup=Interval(1.05, 1.03, 1.08), against="eager", compile_s=113.0)
LEFT = RaceRow("freezing", status="skipped", untried=True, predicted_s=40.0)
UNTIMED = (RaceRow("eager"), RaceRow("default", compile_s=113.0, won=True), LEFT)


def decided(*rows, **changed):
    winner = next((row.name for row in rows if row.won), "default")
    return Decision("key", "graph", winner, rows=rows, **{"seconds": 20.0} | changed)


@pytest.mark.parametrize(
    ("decision", "what"),
    [
        pytest.param(decided(OF_EAGER, replace(DEFAULT, won=True)), "", id="nothing"),
        pytest.param(
            decided(OF_EAGER, replace(DEFAULT, won=True), *[LEFT] * 5),
            "5 of 6 not tried; budget_s=300 would try all",
            id="cut",
        ),
        pytest.param(
            decided(*UNTIMED, seconds=113.0, cut_s=20.0),
            "default was not timed; 1 of 2 not tried; budget_s=200 would try all",
            id="untimed",
        ),
        pytest.param(
            decided(OF_EAGER, replace(DEFAULT, won=True), cut_s=30.0),
            "its budget of 30 s ended it; budget_s=40 would try all",
            id="cut by the last comparison",
        ),
        pytest.param(
            decided(replace(OF_EAGER, won=True), RaceRow("default", status="unchecked", compile_s=9.0)),
            "the numbers of default were not checked; 1 of 1 not tried; budget_s=40 would try all",
            id="unchecked",
        ),
        pytest.param(
            decided(replace(OF_EAGER, won=True), RaceRow("default", status="unavailable")),
            "default could not run here",
            id="failed",
        ),
    ],
)
def test_what_is_open_in_a_decision(decision, what):
    """What was not tried, timed or checked, and the budget that would settle it."""
    assert reporting.what_is_open(decision) == what


def test_a_table_says_that_a_decision_is_provisional():
    """Beside the winner, and in a line of its own."""
    *_, kept, left, last = table(decided(*UNTIMED, cut_s=20.0)).splitlines()
    assert kept.endswith("compiled in 113.0 s  <- kept, provisional")
    assert left == "  freezing                 skipped: "
    assert last == "  provisional: default was not timed; 1 of 2 not tried; budget_s=80 would try all"


ITSELF = "with dynamo's guards, default is 0.95x [0.93, 0.97] as fast as the model itself"
EAGER_WON = (replace(OF_EAGER, won=True), replace(DEFAULT, seconds=200e-6, speedup=Interval(0.5, 0.45, 0.55)))


@pytest.mark.parametrize(
    ("rows", "guards_s", "why"),
    [
        pytest.param((OF_EAGER, replace(DEFAULT, won=True)), 10e-6, ITSELF, id="the guards cost more than is gained"),
        pytest.param((OF_EAGER, replace(DEFAULT, won=True)), 1e-6, "", id="they cost less"),
        pytest.param((OF_EAGER, replace(DEFAULT, won=True)), 0.0, "", id="not known"),
        pytest.param(
            EAGER_WON,
            10e-6,
            "nothing compiled is faster than eager, and dynamo's guards take time, about 10 µs a call",
            id="eager won",
        ),
        pytest.param(
            (EAGER_WON[0], replace(DEFAULT, speedup=Interval(0.11, 0.03, 9.69))), 10e-6, "", id="eager won by noise"
        ),
    ],
)
def test_when_the_model_itself_is_faster(rows, guards_s, why):
    """A compiled call has dynamo's guards, which a call of the model itself has not."""
    assert reporting.calls_itself(decided(*rows, guards_s=guards_s)) == why


@torch.no_grad()
def test_the_decision_is_in_torchs_trace(auto, caplog):
    """torch's structured trace contains each decision with its table, as a JSON artifact."""
    caplog.set_level(logging.DEBUG, logger="torch.__trace")
    auto(torch.nn.Linear(8, 8))(torch.randn(4, 8))
    artifacts = [each for each in caplog.records if getattr(each, "metadata", {}).get("artifact") == reporting.ARTIFACT]
    (found,) = [json.loads(record.payload) for record in artifacts]
    assert {row["name"] for row in found["rows"]} == {"eager", "default"}
    assert found["winner"] in ("eager", "default")


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        pytest.param(RaceRow("a", seconds=1e-4), "  a" + " " * 28 + "100.0 µs", id="time"),
        pytest.param(RaceRow("a", reason="no time"), "  a" + " " * 27 + "not timed  no time", id="untimed"),
        pytest.param(RaceRow("a", status="oom", reason="no memory"), "  a" + " " * 24 + "oom: no memory", id="failed"),
    ],
)
def test_each_row_has_a_time_or_a_reason(row, shown):
    """Every row of the table has a time or the reason why it has none."""
    assert table(Decision("key", "graph", "default", rows=(row,))).splitlines()[1].startswith(shown)


@pytest.mark.parametrize(
    ("peak_bytes", "shown"),
    [
        pytest.param(3 * 2**12, "compiled in 2.0 s, peak 0.012 MiB  <- kept", id="known"),
        pytest.param(0, "compiled in 2.0 s, peak 0.000 MiB  <- kept", id="none"),
        pytest.param(None, "compiled in 2.0 s  <- kept", id="unknown"),
    ],
)
def test_the_table_shows_peaks_of_memory(peak_bytes, shown):
    """If a candidate's peak memory was measured, the table shows it."""
    row = RaceRow("default", seconds=1e-4, compile_s=2.0, peak_bytes=peak_bytes, won=True)
    assert table(Decision("key", "graph", "default", rows=(row,))).endswith(shown)


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        pytest.param(
            RaceRow("a", seconds=1e-4, speedup=Interval(1.5, 1.25, 1.75), against="default", compile_s=2.0),
            f"1.50x [1.25, 1.75] over default{' ' * 13} compiled in 2.0 s",
            id="speedup",
        ),
        pytest.param(
            RaceRow("a", seconds=1e-4, reason="alone", compile_s=2.0), f"alone{' ' * 39} compiled in 2.0 s", id="reason"
        ),
        pytest.param(
            RaceRow("a", seconds=1e-4, reason="alone", rewritten={"packed": 2, "patches": 1}, error=0.00123, won=True),
            f"alone{' ' * 39} compiled in 0.0 s, rewrote packed 2x, patches 1x, error 0.0012  <- kept",
            id="rewrites and error",
        ),
    ],
)
def test_the_whole_row(row, shown):
    """What was faster than what, with its interval; then what the candidate cost and did."""
    line = table(Decision("key", "graph", "default", rows=(row,))).splitlines()[1]
    assert line == f"  a{' ' * 28}100.0 µs  {shown}"


@pytest.mark.parametrize(
    ("seconds", "error", "timed"),
    [
        pytest.param(1e-4, 0.5, " (100.0 µs)", id="beyond its bound"),
        pytest.param(1e-4, None, "", id="timed and failed later"),
        pytest.param(None, 0.5, "", id="not timed"),
    ],
)
def test_the_time_of_what_was_not_chosen(seconds, error, timed):
    """A lower precision beyond its bound has a time, which helps to judge the bound; other failures have none."""
    row = RaceRow("bf16", status="fail_accuracy", reason="too far", seconds=seconds, error=error)
    line = table(Decision("key", "graph", "default", rows=(row,))).splitlines()[1]
    assert line == f"  bf16{' ' * 20} fail_accuracy: too far{timed}"


def raced(*rows, winner, **more):
    return Decision("key", "graph", winner, rows=rows, facts="3 ops", seconds=1.5, **more)


FAST = RaceRow("fast", seconds=2.5e-5, speedup=Interval(2.0, 1.5, 2.5), against="default", won=True)
EAGERS = RaceRow("eager", seconds=1e-4)
DEFAULTS = RaceRow("default", seconds=5e-5, speedup=Interval(2.0, 1.0, 3.0), against="eager")


def test_speedups_have_one_baseline():
    """Each row's speedup is over eager, also if it was timed against another; the first line has the total gain."""
    noisy = RaceRow("noisy", seconds=4.9e-5, speedup=Interval(1.01, 0.9, 1.1), against="default")
    lines = table(raced(EAGERS, DEFAULTS, FAST, noisy, winner="fast")).splitlines()
    assert lines[0] == "auto: fast for 3 ops (1.5 s): 4.00x over eager, 2.00x over default"
    assert [" ".join(line.split()[3:8]) for line in lines[2:]] == [
        "2.00x [1.00, 3.00] over eager",
        "4.00x [1.89, 6.35] over eager",
        "2.04x [1.01, 3.09] over eager",
    ]
    assert lines[4].endswith("compiled in 0.0 s  within noise of default")


@pytest.mark.parametrize(
    ("rows", "winner", "head"),
    [
        pytest.param([EAGERS, DEFAULTS], "default", ": 2.00x over eager", id="default"),
        pytest.param([EAGERS, DEFAULTS], "eager", "", id="eager"),
        pytest.param(
            [EAGERS, DEFAULTS, FAST, RaceRow("fast", status="skipped", reason="the budget is spent")],
            "fast",
            ": 4.00x over eager, 2.00x over default",
            id="a skipped row of the winner's name",
        ),
        pytest.param([FAST], "fast", "", id="rows that do not lead to eager"),
        pytest.param([replace(FAST, against="fast")], "fast", "", id="rows in a circle, from a file"),
        pytest.param([], "fast", "", id="no row"),
    ],
)
def test_gain_is_told_if_it_is_known(rows, winner, head):
    """The first line has the gain over what was timed, and nothing else."""
    assert table(raced(*rows, winner=winner)).splitlines()[0] == f"auto: {winner} for 3 ops (1.5 s){head}"


def test_origin_of_a_decision():
    """A decision from a store says when, where and by what it was made."""
    machine = {"torch": "2.13", "backend-kwargs": "0.1", "gpu": None, "cpu": "AVX2", "threads": 2}
    told = origin(raced(EAGERS, winner="eager", made=0.0, machine=machine))
    assert told.startswith(("decided 1970-01-01 ", "decided 1969-12-31 "))
    assert told.endswith(
        "for these sizes, on a CPU with AVX2, 2 threads, by torch 2.13, backend-kwargs 0.1; not raced again"
    )
    assert ", on NVIDIA H100, by" in origin(raced(EAGERS, winner="eager", machine=machine | {"gpu": "NVIDIA H100"}))


def test_progress_goes_to_the_callers_function(monkeypatch):
    """With `on_progress` nothing is shown, and the function gets the name and the fraction."""
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    told = []
    with progress(lambda *args: told.append(args)) as tick:
        tick("aten", 0.5)
    assert (told, shown.getvalue()) == ([("aten", 0.5)], "")


@torch.no_grad()
def test_race_and_stored_decision_are_told_apart(tmp_path):
    """A report says "raced" after a race, which calls on_progress, and of a later compile when the race was."""
    net, x, told = torch.nn.Linear(8, 8), torch.randn(4, 8), []
    options = {"store": str(tmp_path / "store"), "candidates": ["no_size_asserts"], "race": "always", "budget_s": 30.0}
    first = torch.compile(
        net, backend=bk.make_backend("tmpl-inductor:auto", options, on_progress=lambda *args: told.append(args[0]))
    )
    first(x)
    head, *rest = str(bk.report(first)).splitlines()[1:]
    assert head.endswith(" s, raced")
    assert not [line for line in rest if "cache" in line or "decided" in line]
    assert told == ["no_size_asserts"]
    torch.compiler.reset()
    later = torch.compile(net, backend=bk.make_backend("tmpl-inductor:auto", options, race="missing"))
    later(x)
    head, *rest = str(bk.report(later)).splitlines()[1:]
    assert ", cache " in head
    assert len([line for line in rest if line.startswith("  decided 20")]) == 1


def test_text_from_elsewhere_is_printable():
    """A control character in a stored decision does not reach the terminal."""
    decision = Decision("key", "graph", "de\x1bfault", facts="3\x1b ops", seconds=0.25, rows=(RaceRow("a\x1b"),))
    assert "\x1b" not in table(decision)
    assert table(replace(decision, winner="aten", facts="")).startswith("auto: aten for this graph (0.2 s)\n")


def test_a_decision_is_logged_whole_once(caplog):
    """Its table is logged the first time; then a line says that it was decided before, unless the table changed."""
    caplog.set_level(logging.INFO, logger="backend_kwargs.auto")
    made = Decision("key", "graph", "aten", rows=(RaceRow("aten", won=True),), facts="3 ops", seconds=2.0, made=1.0)
    anew = replace(made, rows=(RaceRow("aten", seconds=1e-4, won=True),))
    told = set()
    for decision in (made, made, anew, replace(made, key="other")):
        reporting.tell(decision, told)
    head = "auto: aten for 3 ops (2.0 s)"
    lines = [message.splitlines() for message in caplog.messages]
    assert [line[0] for line in lines] == [head, f"{head}, as decided before", head, head]
    assert [len(line) for line in lines] == [2, 1, 2, 2]


def test_what_was_not_raced_is_no_repetition(caplog):
    """A decision without a table, such as default for a tiny graph, is logged as it is each time."""
    caplog.set_level(logging.INFO, logger="backend_kwargs.auto")
    told = set()
    for _ in range(2):
        reporting.tell(Decision("key", "graph", "eager", facts="it is tiny", unraced=Unraced.GRAPH, made=1.0), told)
    assert caplog.messages == ["auto: eager for a graph not raced: it is tiny (0.0 s)"] * 2


def test_eager_that_won_is_said(caplog):
    """A race that eager won leaves the graph uncompiled, and the log says so."""
    caplog.set_level(logging.INFO, logger="backend_kwargs.auto")
    for winner in ("eager", "aten"):
        reporting.tell(Decision("key", "graph", winner, rows=(RaceRow("eager"),), made=1.0), set())
    said = "No candidate beats eager on this graph, which runs uncompiled."
    assert [message for message in caplog.messages if not message.startswith("auto: ")] == [said]
