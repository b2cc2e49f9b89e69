"""A comparison as a page: the verdict over the best mode of torch and over eager, warnings, and each checked tensor."""

import pytest

from backend_kwargs.compare import Comparison, Row
from backend_kwargs.compare.comparison import best_mode, document_of, is_mode
from backend_kwargs.interval import Interval
from backend_kwargs.page import parse, to_html, to_json
from backend_kwargs.report import Break, Graph
from backend_kwargs.trial import GENERATED, Accuracy, KernelTime, LeafError

WHERE = {"device_name": "a CPU", "torch": "2.13.0"}


def row(label, seconds, *, backend="other", compile_s=1.0, **more):
    speedup = Interval(1.0 / seconds, 1.0 / seconds, 1.0 / seconds)
    about = {"latency": Interval(seconds, seconds, seconds), "samples": [seconds] * 5, "speedup": speedup}
    return Row(label, backend, compile_s=compile_s, **(about | more))


QUIET = Interval(1.0, 0.99, 1.01)


def compared(*rows, noise=QUIET):
    eager = row("eager", 1.0, backend="eager", compile_s=None, verdict="baseline", peak_bytes=2000)
    return Comparison([eager, *rows], WHERE, noise, "eager", "inference", ["a note"])


def test_the_verdict_is_over_the_best_mode_and_over_eager():
    """Both speedups, the error, the memory, the compile and the calls that pay it back."""
    accuracy = Accuracy(error=1e-4, allowed=1e-3)
    best = row("tmpl-inductor:freezing", 0.25, compile_s=3.0, accuracy=accuracy, peak_bytes=1000)
    verdict = document_of(compared(row("inductor", 0.5), best), "model", ["a", "b"], ["judged"]).verdict
    assert [(each.over, each.ratio.median) for each in verdict.speedups] == [("inductor", 2.0), ("eager", 4.0)]
    assert (verdict.winner, verdict.paste, verdict.clear) == ("tmpl-inductor:freezing", "a\nb", True)
    assert (verdict.error, verdict.error_bound, verdict.compile_s) == (1e-4, 1e-3, 3.0)
    assert (verdict.pays_back_calls, verdict.pays_back_over) == (4, "eager")
    assert (verdict.peak_bytes, verdict.other_peak_bytes, verdict.other_peak_of) == (1000, 2000, "eager")


def test_a_mode_that_wins_is_not_compared_with_itself():
    verdict = document_of(compared(row("inductor", 0.5)), "model").verdict
    assert [each.over for each in verdict.speedups] == ["eager"]


LOUD = Interval(1.0, 0.8, 1.2)
FAILED = Row("a", "a", "fail_to_run", "why")
TIED = row("inductor", 0.99, verdict="within noise")


@pytest.mark.parametrize(
    ("comparison", "text"),
    [
        pytest.param(
            compared(row("slow", 4.0), TIED),
            "Call the model itself: nothing is faster beyond the noise; "
            "the next, inductor, is 1.01x as fast (1.01 to 1.01).",
            id="within noise",
        ),
        pytest.param(
            compared(TIED, noise=LOUD),
            "Call the model itself: nothing is faster beyond the noise; "
            "the next, inductor, is 1.01x as fast (1.01 to 1.01).\n"
            "Not clear: eager differs from itself by 0.80 to 1.20. Time it again on an idle machine.",
            id="noisy machine",
        ),
        pytest.param(
            compared(row("slow", 4.0), row("slower", 5.0)),
            "Call the model itself, which is the fastest: the next, slow, is 0.25x as fast (0.25 to 0.25).",
            id="loses",
        ),
        pytest.param(
            compared(FAILED),
            "Call the model itself: no other candidate passed, for the reasons in the table.",
            id="failures only",
        ),
        pytest.param(compared(), "Call the model itself: no other candidate was given.", id="one candidate"),
    ],
)
def test_without_a_winner_the_baseline_is_kept(comparison, text):
    """The sentence says what to keep, and how far the next candidate is."""
    document = document_of(comparison, "model")
    assert (document.verdict.text, document.verdict.winner) == (text.replace("x ", "\N{MULTIPLICATION SIGN} "), "")
    assert not any(each.won for each in document.speedups[0].rows)


def test_a_winner_that_is_no_faster_than_a_mode_is_not_clear():
    """The fastest candidate wins over eager; what is not clear is whether it is faster than default."""
    default = row("inductor", 0.5, compile_s=9.0)
    best = row("tmpl-inductor:freezing", 0.5)
    verdict = document_of(compared(default, best), "model").verdict
    assert (verdict.winner, verdict.clear) == ("tmpl-inductor:freezing", False)
    assert verdict.text == "Of the candidates whose intervals overlap the fastest one's, it compiled in the least time."


def test_a_speedup_over_a_mode_within_the_noise_is_not_clear():
    """The machine's noise counts for the speedup over the best mode too, as it does for that over the baseline."""
    comparison = compared(row("inductor", 0.3), row("tmpl-inductor:freezing", 0.2), noise=Interval(1.0, 0.5, 2.0))
    verdict = document_of(comparison, "model").verdict
    assert (verdict.winner, verdict.clear, verdict.text) == ("tmpl-inductor:freezing", False, "")


def test_nothing_ran():
    failed = Comparison([Row("a", "a", "fail_to_run", "why")], WHERE, None, None, "training", [])
    document = document_of(failed, "model")
    assert document.verdict.text == "Nothing to use yet: no candidate ran, for the reasons in the table."
    assert document.speedups[0].rows[0].reason == "why"
    assert document.subtitle == "training on a CPU, torch 2.13.0"


@pytest.mark.parametrize(
    ("label", "backend", "expected"),
    [
        ("inductor", "make_backend('inductor')", True),
        ("mine", "inductor", True),
        ("tmpl-inductor:max_autotune", "", True),
        ("inductor[mode=max-autotune]", "", True),
        ("tmpl-inductor[mode=default,freezing=true]", "", False),
        ("tmpl-inductor:freezing", "", False),
        ("eager", "eager", False),
    ],
)
def test_what_is_a_mode_of_torch(label, backend, expected):
    """What a user has without this package, by whichever name."""
    assert is_mode(Row(label, backend)) is expected


def test_a_mode_with_wrong_results_is_not_the_best():
    rows = compared(row("inductor", 0.5), row("tmpl-inductor:max_autotune", 0.1, status="fail_accuracy"))
    assert best_mode(rows).label == "inductor"


def test_what_to_know_before_trusting_it():
    """A noisy machine, wrong results, fallbacks and breaks; what several candidates share is said once."""
    made = (Graph("0/0", "forward", "tmpl-inductor", {}, 1.0, "hit", "", Break("m.py:3", "print", "drop it"), ()),)
    rows = (
        row("a", 0.5, status="fail_accuracy", reason="output: far"),
        row("b", 0.5, status="fell_back", reason="ran in eager"),
        row("c", 0.5, made=made, graphs=2),
        row("d", 0.5, made=made, graphs=2),
        row("e", 0.5, graphs=2),
    )
    document = document_of(compared(*rows, noise=Interval(1.0, 0.9, 1.11)), "model")
    assert [(warned.kind, warned.where, warned.text) for warned in document.warnings] == [
        ("noise", "", "A noisy machine: timed against itself, eager is at 0.90x to 1.11x."),
        ("failed", "a", "wrong results: output: far"),
        ("fell back", "b", "ran in eager"),
        ("break", "c", "graph break at m.py:3: print"),
        ("break", "e", "It compiled 2 graphs: the model is broken into parts, or was compiled again."),
    ]


def test_kernels_stand_by_time():
    """A call's kernels are those of its graph, if it has one; with two they cannot be told apart."""
    made = Graph("0/0", "forward", "tmpl-inductor", {}, 1.0, "hit", "", None, ())
    kernels = (KernelTime("aten::addmm", 2, 3e-3), KernelTime(GENERATED, 1, 1e-3))
    (graph,) = document_of(compared(row("a", 0.5, made=(made,), kernels=kernels)), "model").graphs
    assert [(each.name, each.kind, each.seconds, each.calls) for each in graph.kernels] == [
        ("aten::addmm", "library", 3e-3, 2),
        (GENERATED, "with its wrapper", 1e-3, 1),
    ]
    both = document_of(compared(row("a", 0.5, made=(made, made), kernels=kernels)), "model").graphs
    assert [graph.kernels for graph in both] == [(), ()]


def test_a_shared_device_is_a_warning():
    """What other processes did when the comparison began is said before any figure."""
    comparison = compared(row("a", 0.5))
    comparison.environment = WHERE | {"others": "other processes used 80% of the CPUs when it began"}
    (warned,) = document_of(comparison, "model").warnings
    assert warned.text == "The device is shared: other processes used 80% of the CPUs when it began."
    assert warned.kind == "shared device"


def test_each_tensor_stands_beside_its_bound():
    """Outputs, gradients and buffers, the one that failed first, then by how near their bounds they are."""
    leaves = (
        LeafError("output", 1e-5, 1e-3, True),
        LeafError("gradients['w']", 5e-4, 1e-3, True),
        LeafError("state['running_mean']", 1.0, 1e-3, False),
    )
    failed = row("a", 0.5, status="fail_accuracy", reason="far", accuracy=Accuracy("fail_accuracy", leaves=leaves))
    found = [(each.kind, each.name, each.passed, each.reason) for each in document_of(compared(failed), "m").accuracy]
    assert found == [
        ("buffer", "state['running_mean']", False, "far"),
        ("gradient", "gradients['w']", True, ""),
        ("output", "output", True, ""),
    ]


def test_figures_that_are_none_are_left_out():
    """An infinite interval, as of a call that took no time, makes no page impossible."""
    odd = row("a", 0.5, speedup=Interval(float("inf"), 0.0, float("inf")), accuracy=Accuracy(error=float("nan")))
    read = parse(to_json(document_of(compared(odd), "model")))
    assert (read.speedups[0].rows[1].speedup, read.speedups[0].rows[1].error) == (None, None)


def test_the_graph_is_that_of_the_fastest_where_nothing_wins():
    """A mode of torch that is slower is only what its code is compared with."""
    made = (Graph("0/0", "forward", "tmpl-inductor", {}, 1.0, "hit", "", None, ()),)
    slow = row("inductor", 2.0, verdict="within noise", made=made)
    fast = row("own", 1.0, verdict="within noise", made=made)
    document = document_of(compared(slow, fast), "model")
    assert [graph.backend for graph in document.graphs] == ["own"]
    assert "The graph of own" in to_html(document)
