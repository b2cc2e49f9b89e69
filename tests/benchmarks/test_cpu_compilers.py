"""The study of compilers on one CPU thread: its records, its goals, and a model that it measures."""

import json
import os

import pytest

from backend_kwargs.errors import BackendKwargsError
from benchmarks.analysis.compilers import AUTO, AUTO_BF16, EAGER, TUNED, UNTUNED, Measured, page, picked_for_all
from benchmarks.execution.process import Outcome
from benchmarks.studies import compilers
from benchmarks.studies.compilers import MODELS, Allowance, Asked, TooLongError, measure

ENVIRONMENT = {"cpu": "a CPU", "torch": "2.13", "python": "3.11"}


def row(label, speedup, status="pass", reason="", accuracy=None):
    seconds = 0.01 / speedup
    samples = [seconds] * 30 if status in ("pass", "fell_back") else []
    return {
        "label": label,
        "status": status,
        "reason": reason,
        "samples": samples,
        "latency": {"median": seconds},
        "accuracy": accuracy,
        "report": f"report of {label}",
    }


def raced(model, rows, kind="race", **fields):
    comparison = {"environment": ENVIRONMENT, "candidates": [row(EAGER, 1.0), *rows]}
    record = {"model": model, "kind": kind, "reason": "", "command": "python -m benchmarks compilers", **fields}
    return Measured({**record, "comparison": comparison})


@pytest.fixture
def races():
    """ONNX Runtime wins the first model; OpenVINO wins the second, on which ONNX Runtime fails."""
    first = [
        row("openvino-native", 1.5),
        row("onnxruntime", 2.0),
        row(UNTUNED, 0.95),
        row(AUTO, 1.98),
        row(AUTO_BF16, 4.0, accuracy={"error": 3e-3, "bound": 1e-2}),
    ]
    second = [
        row("openvino-native", 3.0),
        row("onnxruntime", 1.0, "fail_to_run", "no kernel"),
        row(UNTUNED, 0.8),
        row(AUTO, 3.0),
        row(AUTO_BF16, 3.0, accuracy={"error": 1e-7, "bound": None}),
    ]
    return [raced("one", first), raced("two", second)]


def test_the_best_single_compiler_is_found_by_model_and_for_all(races):
    """If a compiler fails, eager counts instead: so ONNX Runtime's mean is 1.41x."""
    assert [race.best for race in races] == ["onnxruntime", "openvino-native"]
    assert races[0].over(AUTO, "onnxruntime").median == pytest.approx(0.99)
    assert picked_for_all(races) == ("openvino-native", pytest.approx(4.5**0.5))


@pytest.mark.parametrize(
    "line",
    [
        "- `auto` over the best single one, least of all models: 0.99x over 2 models; the goal of 0.97x is met.",
        "- `auto` over eager: 2.44x; the best single one picked for all, `openvino-native`: 2.12x. "  # noqa: ISC004
        "So `auto` gains 1.15x (geometric means).",
        "- `auto, bf16` over the best single one, geometric mean: 1.41x over 2 models; the goal of 1.4x is met.",
        "- TVM untuned over eager, least of all models: 0.80x over 2 models; the goal of 0.9x is not met.",
        "- TVM tuned over eager, least of all models: 1.10x over 2 models; the goal of 1x is met.",
        "| two | 400 s | 0.80x [0.80, 0.80] | 1.10x [1.10, 1.10] | TVM |",
        "| one | 400 s | 0.90x [0.90, 0.90] | 1.20x [1.20, 1.20] | eager |",
        "| error of `auto, bf16` | 3.0e-03 | 1.0e-07 |",
        "- two, `onnxruntime`: fail_to_run: no kernel",
        "- two, `max_autotune+freezing`: not measured",
    ],
)
def test_the_page_has(races, line):
    """The page has each goal with its figure, and each compiler that failed with its reason."""
    tuned = raced("two", [row(UNTUNED, 0.8), row(TUNED, 1.1)], "tuned", tune_s=400.0)
    left = raced("one", [row(UNTUNED, 0.9), row(TUNED, 1.2, "fell_back")], "tuned", tune_s=400.0)
    assert line in page(races, [tuned, left]).splitlines()


def test_an_error_that_only_the_bound_of_bf16_allows_counts_for_bf16_alone(races):
    """The bound of a run is that of bf16, but other candidates must pass the usual check."""
    less_precise = {"error": 4e-3, "bound": 1e-2}
    race = raced("one", [row("onnxruntime", 2.0, accuracy=less_precise), row(AUTO_BF16, 3.0, accuracy=less_precise)])
    assert race.why_not("onnxruntime") == "fail_accuracy: error 4.0e-03"
    assert race.over(AUTO_BF16).median == pytest.approx(3.0)


def test_a_process_that_failed_is_a_record(tmp_path):
    """A process that fails is a record with the step that it had reached, and the page names it."""
    asked = Asked(("bert",), 10.0, 0.0, 3, tmp_path)
    outcome = Outcome(None, "compile auto", "timeout", "longer than 10 s")
    compilers._write(asked, "bert", "race", 0.0, outcome, {"budget_s": 10.0})
    record = json.loads((tmp_path / "bert.json").read_text())
    assert (record["spec"], record["reason"]) == (MODELS["bert"], "longer than 10 s (at: compile auto)")
    assert "- bert, `auto`: longer than 10 s (at: compile auto)" in page([Measured(record)], []).splitlines()


def test_a_compile_ends_when_its_share_of_the_seconds_is_over():
    """When its share of the time ends, only the running candidate gets the error."""
    from backend_kwargs.harness.trial import Trial

    class Endless(Trial):
        def build(self):
            while True:
                pass

    allowance = Allowance(2.0)
    trial = Endless(None)
    allowance.start("onnxruntime")
    try:
        with pytest.raises(TooLongError, match="compiling took longer than the 1 s that its share of the budget left"):
            trial.start()
    finally:
        allowance.stop()


TINY = '''"""A tiny model."""

import torch


def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)), torch.randn(16, 64)
'''


def test_a_model_is_measured_in_a_process_of_its_own(tmp_path):
    """Every candidate has a row, and the page is written."""
    (tmp_path / "tiny.py").write_text(TINY)
    name = f"{tmp_path / 'tiny.py'}:build"
    recorded, cores = [], os.sched_getaffinity(0)
    measure(Asked((name,), 240.0, 0.0, 3, tmp_path / "out"), recorded.append)
    (record,) = [json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")]
    assert (record["model"], record["status"]) == (name, "pass")
    labels = [each["label"] for each in record["comparison"]["candidates"]]
    assert {EAGER, "default", AUTO, AUTO_BF16} <= {*labels} | {*record["lacking"]}
    assert record["comparison"]["environment"]["threads"] == 1
    assert Measured(record).over(AUTO) is not None
    assert f"{name}: timing" in recorded
    assert f"| over eager | {name} |" in (tmp_path / "out" / "compilers.md").read_text().splitlines()
    assert os.sched_getaffinity(0) == cores  # the process that measures is pinned, this one is not


def test_a_model_that_does_not_exist_is_a_record(tmp_path):
    """A model that does not exist is a record, and the others are still measured."""
    measure(Asked((f"{tmp_path}/none.py:build",), 60.0, 0.0, 3, tmp_path), lambda step: None)
    (record,) = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert record["status"] == "fail_to_run"
    assert BackendKwargsError.__name__ in record["reason"]
