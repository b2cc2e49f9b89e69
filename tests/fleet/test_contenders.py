"""What an audit measures: the decision, default, the runner-up and what fresh races chose, each code once."""

import pytest

from backend_kwargs.facts.decision import Decision, RaceRow
from backend_kwargs.fleet.audit import _wanted


def everything(name, of):
    return True


def labels(decision, fresh=(), trusts=everything):
    """Return the options and compiler of each candidate by its label, and the labels of the fresh winners."""
    wanted, chosen = _wanted(decision, fresh, trusts)
    assert all(label == each.name for label, (_, each) in wanted.items())
    return {label: (dict(each.options), each.compiler) for label, (_, each) in wanted.items()}, chosen


def decided(*rows, winner="a", options=None, compiler=""):
    return Decision("key", "graph", winner, {"x": 1} if options is None else options, rows, compiler=compiler)


def row(name, seconds=1.0, *, won=False, status="pass", options=None, compiler=""):
    return RaceRow(name, {name: 1} if options is None else options, status, seconds=seconds, won=won, compiler=compiler)


def test_the_decision_comes_first_and_default_second():
    """A decision without rows is measured beside default."""
    assert labels(decided()) == ({"a": ({"x": 1}, ""), "default": ({}, "")}, ())


def test_default_is_as_it_was_raced():
    """Default with CUDA graphs is measured with them, if the request permits it."""
    raced = decided(row("default", options={"triton.cudagraphs": True}))
    assert labels(raced)[0]["default"] == ({"triton.cudagraphs": True}, "")
    assert labels(raced, trusts=lambda name, of: name != "default")[0]["default"] == ({}, "")


@pytest.mark.parametrize(
    ("rows", "runner_up"),
    [
        pytest.param([row("b", 3.0), row("c", 2.0)], "c", id="the fastest"),
        pytest.param([row("b", 3.0), row("c", 2.0, status="fail_accuracy")], "b", id="that is right"),
        pytest.param([row("b", 3.0), row("a", 2.0, won=True)], "b", id="not the winner"),
        pytest.param([row("b", 3.0), row("default", 2.0)], "b", id="not default"),
        pytest.param([row("b", 3.0), row("c", None)], "b", id="that was timed"),
        pytest.param([row("b", 3.0), row("forbidden", 2.0)], "b", id="that is permitted"),
        pytest.param([row("forbidden", 2.0)], None, id="none"),
    ],
)
def test_the_runner_up(rows, runner_up):
    """It is the fastest other candidate that passed, was timed and is permitted."""
    found, _ = labels(decided(*rows), trusts=lambda name, of: name != "forbidden")
    assert [*found] == ["a", "default", *([runner_up] if runner_up else [])]


def test_each_code_is_measured_once():
    """The same options under the same compiler are one candidate, whatever their order and name."""
    decision = decided(winner="a", options={"x": 1, "y": 2})
    fresh = [row("a", options={"y": 2, "x": 1}), row("other", options={"x": 1, "y": 2}), row("default", options={})]
    assert labels(decision, fresh) == (
        {"a": ({"x": 1, "y": 2}, ""), "default": ({}, "")},
        ("a", "a", "default"),
    )


def test_what_differs_has_another_label():
    """Another compiler, or other options under the same name, is another candidate with a number."""
    fresh = [row("a", options={"x": 2}), row("a", options={"x": 1}, compiler="tvm"), row("a", options={"x": 2})]
    found, chosen = labels(decided(), fresh)
    assert found == {
        "a": ({"x": 1}, ""),
        "default": ({}, ""),
        "a (2)": ({"x": 2}, ""),
        "a (3)": ({"x": 1}, "tvm"),
    }
    assert chosen == ("a (2)", "a (3)", "a (2)")


@pytest.mark.parametrize("name", ["default", "eager"])
def test_default_and_eager_are_one_whatever_their_options(name):
    """Default compiled for CUDA graphs, and recorded without them, is default."""
    found, chosen = labels(decided(winner=name, options={}), [row(name, options={"triton.cudagraphs": False})])
    assert chosen == (name,)
    assert found[name] == ({}, "")


def test_eager_is_not_default():
    """Both have no options."""
    assert [*labels(decided(winner="eager", options={}))[0]] == ["eager", "default"]
