"""Advice of a report on slow compiles: only what can be followed."""

from dataclasses import replace

import pytest

from backend_kwargs.facts.decision import RaceRow
from backend_kwargs.report.advice import INSTEAD_OF_CACHE, advice_on
from backend_kwargs.report.graphs import Code, Graph, Race

ONCE, OFTEN = "cpp_fused_add_0(x)\n", "cpp_fused_add_0(x)\ncpp_fused_add_0(y)\n" * 2


def graph(source: str, **fields) -> Graph:
    code = Code(
        "forward", {"C++": ("cpp_fused_add_0",), "extern": ("mm",)}, "off", None, "miss", source + "mm(x)\n" * 9
    )
    return replace(Graph("0/0", "f", "tmpl-inductor", {}, 40.0, "miss", "", None, (code,)), **fields)


RACES = Race("", "", "a", {}, (RaceRow("eager"), RaceRow("a", won=True, compile_s=7.0)), seconds=30.0)


@pytest.mark.parametrize(
    ("compiled", "advice"),
    [
        pytest.param(graph(ONCE), [], id="nothing repeats"),
        pytest.param(
            graph(OFTEN),
            ["40 s of compiling -> torch.compiler.nested_compile_region on the block that repeats"],
            id="a block repeats",
        ),
        pytest.param(graph(OFTEN, seconds=20.0), [], id="not slow"),
        pytest.param(
            graph(OFTEN, cache="raced", race=RACES),
            ["40 s of compiling, 30 s of them races -> a smaller budget_s, or tune ahead"],
            id="the budget",
        ),
        pytest.param(graph(ONCE, cache="hit", race=RACES), [], id="a race of another process"),
        pytest.param(
            graph(ONCE, options={"max_autotune": True}),
            ["40 s of compiling under max_autotune -> 'tmpl-inductor:fast_compile' while developing"],
            id="tuning",
        ),
        pytest.param(
            graph(ONCE, seconds=12.0, cache="bypass: frozen"),
            [f"cache bypass: frozen: each later process compiles again, 12.0 s -> {INSTEAD_OF_CACHE}"],
            id="no cache",
        ),
        pytest.param(
            graph(ONCE, cache="bypass: frozen", seconds=12.0, race=RACES),
            [f"cache bypass: frozen: each later process compiles again, 7.0 s -> {INSTEAD_OF_CACHE}"],
            id="no cache after a race",
        ),
    ],
)
def test_slow_compiles(compiled, advice):
    """It names the cause: the race, tuning, a block that repeats, no cache; and nothing where none is known."""
    assert [*advice_on([compiled])] == advice


def test_threads_that_compile_at_once():
    """What dynamo calls a bug of its own is mostly that another thread has compiled the function meanwhile."""
    guard = "Unexpected recompilation: runtime guards failed even though they passed. Please open an issue"
    graphs = [graph(ONCE, seconds=1.0, compile_id=f"0/{n}", recompiled=n * guard) for n in (0, 1)]
    seen = "it was compiled again once though its guards hold, as where several threads make the first call"
    assert [*advice_on(graphs)] == [f"{seen} -> make the first call in one thread"]


@pytest.mark.parametrize(
    "guard", ["GLOBAL_STATE changed: grad_mode ", "self._modules['d'].training == True  # return F.dropout(input)"]
)
def test_what_training_and_evaluation_differ_in_gives_no_advice(guard):
    """A model that was trained needs a graph for its evaluation too; one that never was may be called in one state."""
    first, again = (graph(ONCE, seconds=1.0, compile_id=f"0/{n}", recompiled=n * guard) for n in (0, 1))
    trained = replace(first, codes=(replace(first.codes[0], direction="backward"),))
    assert [len([*advice_on([each, again])]) for each in (first, trained)] == [1, 0]
