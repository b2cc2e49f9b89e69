"""Progress, log, trace and table of a race."""

import io
import json
import logging
import sys

import pytest
import torch

from backend_kwargs.compilers.auto.decision import Decision, RaceRow
from backend_kwargs.compilers.auto.reporting import ARTIFACT, progress, table


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_what_is_tried(monkeypatch):
    """On a terminal a line names the candidate that is being tried."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    with progress() as tick:
        tick("coordinate_descent", 0.5)
    assert "auto: coordinate_descent" in shown.getvalue()


def test_elsewhere_nothing_is_shown(monkeypatch):
    """Off a terminal, for instance in a log file, no progress line is written."""
    monkeypatch.setattr(sys, "stderr", shown := io.StringIO())
    with progress() as tick:
        tick("coordinate_descent", 0.5)
    assert shown.getvalue() == ""


@torch.no_grad()
def test_the_decision_is_in_torchs_trace(auto, caplog):
    """torch's structured trace contains each decision with its table, as a JSON artifact."""
    caplog.set_level(logging.DEBUG, logger="torch.__trace")
    auto(torch.nn.Linear(8, 8))(torch.randn(4, 8))
    artifacts = [r for r in caplog.records if getattr(r, "metadata", {}).get("artifact", {}).get("name") == ARTIFACT]
    (told,) = [json.loads(record.payload) for record in artifacts]
    assert {row["name"] for row in told["rows"]} == {"eager", "default"}
    assert told["winner"] in ("eager", "default")


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
