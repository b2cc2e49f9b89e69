"""The output of a comparison: progress, JSON, a plot, the fastest."""

import dataclasses
import json

import pytest
import torch
from torch import nn

from backend_kwargs import trial
from backend_kwargs.cli import measured
from backend_kwargs.cli.commands import BACKENDS, _quickly
from backend_kwargs.cli.measured import print_comparison
from backend_kwargs.compare import (
    Candidate,
    Comparison,
    Row,
    _judge_speed,
    compare,
    fastest,
    to_json,
)
from backend_kwargs.compare.comparison import cells, document_of
from backend_kwargs.registry import make_backend
from backend_kwargs.trial import Interval

EAGER = Candidate("eager")


def refusing(gm, example_inputs):
    raise ValueError("this one")


def test_progress_tells_each_stage():
    """Progress reports each compile's start and end, then the rounds, and never decreases."""
    heard = []
    candidates = [EAGER, Candidate("c", "eager")]
    compare(nn.Linear(16, 4), torch.randn(2, 16), candidates, rounds=2, progress=lambda *found: heard.append(found))
    assert [(label, stage) for label, stage, _ in heard] == [
        ("eager", "reference"),
        ("eager", "compile"),
        ("eager", "compiled"),
        ("c", "compile"),
        ("c", "compiled"),
        *[("", "timing")] * 3,
    ]
    fractions = [fraction for *_, fraction in heard]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


@pytest.fixture
def made() -> Comparison:
    """A comparison without timing: one row faster, one slower, one within noise, one failed."""
    rows = [
        Row("eager", "eager", speedup=Interval(1, 1, 1), latency=Interval(2, 2, 2), verdict="baseline", samples=[2.0]),
        Row("inductor", "inductor", graphs=1, compile_s=8.1, speedup=Interval(1.3, 1.2, 1.4)),
        Row("aot", "aot_eager", graphs=1, compile_s=0.3, speedup=Interval(0.8, 0.7, 0.9)),
        Row("same", "eager", graphs=1, compile_s=0.2, speedup=Interval(1.01, 0.99, 1.03), verdict="within noise"),
        Row("nope", "nope", status="unavailable", reason="InvalidBackend: nope"),
    ]
    where = {"device_name": "a CPU", "torch": "2.13.0"}
    return Comparison(rows, where, Interval(1.0, 0.98, 1 / 0.98), "eager", "inference", ["a note"])


def test_json_is_plain_and_whole(made):
    """The JSON contains each row's figures, raw samples, the environment and a version, and no NaN."""
    found = json.loads(json.dumps(to_json(made), allow_nan=False))
    assert set(found) == {"version", "environment", "mode", "baseline", "noise", "notes", "candidates"}
    assert found["candidates"][0] == {
        "label": "eager",
        "backend": "eager",
        "status": "pass",
        "reason": "",
        "graphs": 0,
        "compile_s": None,
        "cache": "",
        "latency": {"median": 2, "low": 2, "high": 2, "p20": 2.0, "p80": 2.0},
        "speedup": {"median": 1, "low": 1, "high": 1},
        "peak_bytes": None,
        "accuracy": None,
        "verdict": "baseline",
        "samples": [2.0],
        "report": "",
        "tuning": "",
    }
    assert found["candidates"][4]["status"] == "unavailable"


def test_json_of_a_real_comparison():
    """The result of compare is written as JSON, including a failed row."""
    found = compare(nn.Linear(16, 4), torch.randn(2, 16), [EAGER, Candidate("bad", refusing)], rounds=2)
    written = json.loads(json.dumps(to_json(found), allow_nan=False))
    assert written["environment"]["torch"] == torch.__version__
    assert written["candidates"][1]["reason"] == "ValueError: this one"


def test_what_the_speedups_are_over(made):
    """The lines below the table name what rows were timed against, if there was something."""
    over = "Speedup is over eager, with the 95 % interval of its median; latency is that of eager divided by it."
    assert made.reading() == ["inference on a CPU, torch 2.13.0", over, "a note"]
    alone = dataclasses.replace(made, baseline=None)
    assert alone.reading() == ["inference on a CPU, torch 2.13.0", "a note"]


def test_cells_of_a_row(made):
    """A row's remark is the reason of its failure or its verdict; memory is in MiB of 2^20 bytes."""
    failed = cells(dataclasses.replace(made.rows[4], peak_bytes=3 * 2**19))
    assert failed == ("nope", "", "", "", "", "1.5 MiB", "", "unavailable", "InvalidBackend: nope")
    assert cells(made.rows[3])[-1] == "within noise"
    assert cells(dataclasses.replace(made.rows[3], tuning="tuned 3 s"))[-1] == "within noise, tuned 3 s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12.3 ms"), (1e-3, "1 ms"), (9.99e-4, "999 µs"), (1.5e-6, "1.5 µs")],
)
def test_cell_of_a_latency(seconds, text):
    """The median in milliseconds, below one in microseconds."""
    assert cells(Row("a", "a", latency=Interval(seconds, 0.0, 1.0)))[3] == text


@pytest.mark.parametrize(
    ("status", "latency", "right"),
    [
        pytest.param("pass", Interval(1, 1, 1), True, id="pass"),
        pytest.param("fell_back", Interval(1, 1, 1), True, id="fell back"),
        pytest.param("fail_accuracy", Interval(1, 1, 1), False, id="wrong"),
        pytest.param("eager_two_runs_differ", Interval(1, 1, 1), True, id="eager is not repeatable"),
        pytest.param("pass", None, False, id="not timed"),
    ],
)
def test_which_rows_are_right(status, latency, right):
    """A row that was timed, on its backend or on a fallback, has right results unless the check failed."""
    found = Row("a", "a", status=status, latency=latency)
    assert (found.right, found.passed) == (right, status == "pass")


BEYOND = "error 5.0e-01, above the limit 1.0e-02: raise --max-error to accept it"


@pytest.mark.parametrize(
    ("accuracy", "remark"),
    [
        pytest.param(trial.Accuracy(error=0.5, bound=0.01), BEYOND, id="beyond"),
        pytest.param(trial.Accuracy(error=0.51, bound=0.01), "why", id="meaningless"),
        pytest.param(trial.Accuracy(error=0.5), "why", id="no bound"),
        pytest.param(trial.Accuracy(bound=0.01), "why", id="no error"),
        pytest.param(None, "why", id="nothing measured"),
    ],
)
def test_remark_of_a_wrong_result(accuracy, remark):
    """A result that is only less precise has its error and its limit in place of the reason."""
    wrong = Row("a", "a", status="fail_accuracy", reason="why", accuracy=accuracy)
    assert cells(wrong)[-1] == remark
    assert cells(dataclasses.replace(wrong, status="pass"))[-1] == "why"


def test_json_holds_noise_and_spread():
    """The JSON contains the noise band and the 20th and 80th percentile of the samples, or null."""
    row = Row("a", "a", latency=Interval(3.0, 1.0, 5.0), samples=[1.0, 2.0, 3.0, 4.0, 5.0])
    written = to_json(Comparison([row], {}, Interval(1.0, 0.9, 1.1), "a", "inference", []))
    assert written["noise"] == {"median": 1.0, "low": 0.9, "high": 1.1}
    latency = written["candidates"][0]["latency"]
    assert (latency["p20"], latency["p80"]) == pytest.approx((1.8, 4.2))
    assert to_json(Comparison([], {}, None, None, "inference", []))["noise"] is None


def compiled_row(label: str, median: float, compile_s: float) -> Row:
    return Row(label, label, speedup=Interval(median, median - 0.1, median + 0.1), compile_s=compile_s)


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        pytest.param([compiled_row("a", 1.7, 6.6), compiled_row("b", 1.3, 1.0)], "a", id="fastest"),
        pytest.param(
            [dataclasses.replace(compiled_row("a", 1.7, 6.6), status="fell_back"), compiled_row("b", 1.3, 1.0)],
            "b",
            id="one that fell back",
        ),
        pytest.param(
            [dataclasses.replace(compiled_row("a", 1.7, 6.6), status="fail_accuracy")], None, id="one that is wrong"
        ),
        pytest.param([dataclasses.replace(compiled_row("a", 1.7, 6.6), status="unknown")], "a", id="one unknown"),
        pytest.param([compiled_row("a", 1.42, 6.6), compiled_row("b", 1.3, 1.0)], "b", id="intervals meet"),
        pytest.param([compiled_row("a", 1.72, 6.6), compiled_row("b", 1.7, 1.9)], "b", id="tie"),
        pytest.param([compiled_row("a", 1.05, 1.0), compiled_row("b", 0.5, 1.0)], None, id="none"),
        pytest.param([dataclasses.replace(compiled_row("a", 1.7, 6.6), verdict="within noise")], None, id="noise"),
        pytest.param([Row("a", "a", speedup=Interval(1.25, 1.0, 1.5))], None, id="an interval that begins at 1"),
        pytest.param(
            [
                Row("a", "a", speedup=Interval(2.0, 1.5, 2.5), compile_s=6.0),
                Row("b", "b", speedup=Interval(1.25, 1.125, 1.5), compile_s=1.0),
            ],
            "b",
            id="intervals touch",
        ),
    ],
)
def test_fastest(rows, wanted):
    """The fastest row beyond the noise is named; among ties, the one with the shortest compile."""
    found = fastest(Comparison(rows, {}, None, "eager", "inference", []))
    assert (found and found.label) == wanted


def test_where_nothing_is_faster(capsys):
    """The last line says what to keep, as the page does."""
    environment = {"mode": "inference", "device_name": "CPU", "torch": "2.13.0"}
    comparison = Comparison([Row("eager", None)], environment, Interval(1.0, 0.25, 4.5), "eager", "inference", [])
    print_comparison(comparison, [])
    assert capsys.readouterr().out.splitlines()[-1] == "Call the model itself: no other candidate was given."


@pytest.mark.parametrize(
    ("itself_s", "advice"),
    [
        pytest.param(0.5, "Call the model itself: fast is 0.50\u00d7 as fast (0.50 to 0.50).", id="slower"),
        pytest.param(1.01, 'torch.compile(model, backend="inductor")', id="as fast"),
    ],
)
def test_the_model_itself_is_compared_where_eager_is_no_candidate(capsys, itself_s, advice):
    """What beats the other candidates is nothing to paste if the model without torch.compile is faster."""
    environment = {"mode": "inference", "device_name": "CPU", "torch": "2.13.0"}
    fast = Row("fast", "inductor", samples=[1.0] * 10, latency=Interval(1.0, 1.0, 1.0), speedup=Interval(2.0, 1.9, 2.1))
    rows, noise = [Row("slow", "aot_eager"), fast], Interval(1.0, 0.98, 1.02)
    comparison = Comparison(rows, environment, noise, "slow", "inference", [], [itself_s] * 10)
    print_comparison(comparison, ['torch.compile(model, backend="inductor")'])
    assert capsys.readouterr().out.splitlines()[-1] == advice


def test_where_another_is_kept_there_is_nothing_to_paste(capsys):
    """Where the verdict is to keep another candidate, no lines for the fastest are printed."""
    environment = {"mode": "inference", "device_name": "CPU", "torch": "2.13.0"}
    rows = [
        Row(name, backend, samples=[s] * 10, latency=Interval(s, s, s), speedup=speedup, compile_s=compile_s)
        for name, backend, s, speedup, compile_s in (
            ("eager", "eager", 2.0, None, None),
            ("soon", "x", 1.0, Interval(2.0, 1.5, 2.5), 1.0),
            ("inductor", "inductor", 0.9, Interval(2.2, 1.9, 2.6), 10.0),
        )
    ]
    print_comparison(Comparison(rows, environment, None, "eager", "inference", []), ["to paste"])
    *_, verdict, remark = capsys.readouterr().out.splitlines()
    assert verdict == "Keep inductor: soon is 0.90\u00d7 as fast (0.90 to 0.90)."
    assert remark != "to paste"


@pytest.mark.parametrize(
    ("itself_s", "last"),
    [
        pytest.param(0.5, "Call the model itself: fast is 0.50\u00d7 as fast (0.50 to 0.50).", id="slower"),
        pytest.param(1.01, "make_backend('aot_eager') cannot be written as text.", id="as fast"),
    ],
)
def test_a_winner_that_cannot_be_written_as_text(capsys, monkeypatch, itself_s, last):
    """That it cannot is said where the winner is to be used, in place of the lines to paste."""
    fast = Row("fast", "x", samples=[1.0] * 10, latency=Interval(1.0, 1.0, 1.0), speedup=Interval(2.0, 1.9, 2.1))
    environment = {"mode": "inference", "device_name": "CPU", "torch": "2.13.0"}
    made = Comparison([Row("slow", "y"), fast], environment, None, "slow", "inference", [], [itself_s] * 10)
    monkeypatch.setattr(measured, "model_of", lambda factory: (torch.relu, torch.ones(1)))
    monkeypatch.setattr(measured, "compare", lambda *args, **kwargs: made)
    monkeypatch.setattr(measured, "lines_to_paste", lambda *args: [])
    rest = {"mode": "inference", "device": None, "rounds": 1, "tolerance": None, "max_error": None, "quick": False}
    measured.compared("m.py:f", [("fast", make_backend("aot_eager"))], measured.Outputs(), None, **rest)
    assert capsys.readouterr().out.splitlines()[-1] == last


def test_latency_and_speedup_agree():
    """Where other work slows some calls, medians say another speedup: the table has one, and the other is a warning."""
    slowed = [1.0] * 30 + [10.0] * 71
    samples = [4 / 3] * 30 + [40 / 3] * 40 + [4 / 3] * 31
    made = [
        Row(name, name, samples=each, latency=Interval(1.0, 1.0, 1.0)) for name, each in (("a", slowed), ("b", samples))
    ]
    noise, disturbed = _judge_speed(made[0], made, slowed)
    _, b = made
    assert (b.speedup.median, b.latency.median) == pytest.approx((0.75, 10 / 0.75))
    assert disturbed == (
        "Other work has disturbed the timing (b 0.75x, by medians 7.50x): time it again on an idle machine."
    )
    comparison = Comparison(
        made, {"device_name": "a CPU", "torch": "2.13.0"}, noise, "a", "inference", [], [], disturbed
    )
    assert disturbed in comparison.reading()
    assert [each.text for each in document_of(comparison, "").warnings] == [disturbed]


def test_steady_timings_are_not_said_to_be_disturbed():
    """Nor are those of which whole rounds are slow."""
    slowed = [1.0, 10.0] * 20
    made = [
        Row(name, name, samples=each, latency=Interval(1.0, 1.0, 1.0))
        for name, each in (("a", slowed), ("b", [2 * each for each in slowed]))
    ]
    assert _judge_speed(made[0], made, slowed)[1] == ""
    assert made[1].latency.median == pytest.approx(2 * 5.5)


def test_what_would_compile_too_long_is_left_out():
    """Under `limit_s` the first candidate compiles; a later one for which time is lacking is a row and a note."""
    candidates = [EAGER, Candidate("first", "eager"), Candidate("second", "eager")]
    made = compare(nn.Linear(4, 4), torch.randn(2, 4), candidates, rounds=2, limit_s=0.0)
    assert [row.latency is not None for row in made.rows] == [True, True, False]
    assert (made.rows[2].status, made.rows[2].reason) == ("timeout", "left out: 0 s were left")
    assert "Left out for lack of time: second." in made.notes


@pytest.mark.parametrize(
    ("spec", "options", "label"),
    [
        pytest.param("tmpl-inductor:auto", {}, "a[budget_s=10]", id="a race"),
        pytest.param("tmpl-inductor:auto", {"budget_s": 3.0}, "a", id="its own budget"),
        pytest.param("inductor", {}, "a", id="no race"),
    ],
)
def test_quick_races(spec, options, label):
    """`--quick` gives races ten seconds, unless they have a budget of their own, and says so."""
    found, backend = _quickly("a", make_backend(spec, options))
    assert found == label
    assert backend.options.get("budget_s") == (10.0 if found != "a" else options.get("budget_s"))


def test_auto_is_compared_by_default():
    """Without `--backends`, in the middle of what anyone may use."""
    assert BACKENDS.split(",")[:3] == ["eager", "inductor", "tmpl-inductor:auto"]
