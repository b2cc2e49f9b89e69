"""Rewrites in a race: which are tried, how they combine, what is stored, and what a file may contain."""

import dataclasses
import logging

import pytest
import torch
from torch import nn

import backend_kwargs
from backend_kwargs import make_backend
from backend_kwargs.auto import candidates, process_memory, race
from backend_kwargs.auto.candidates import RaceCandidate, merged, rewriting
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.auto.verdicts import Verdict
from backend_kwargs.facts.decision import Decision, RaceRow
from backend_kwargs.interval import Interval
from backend_kwargs.rewrites import Rewrite, register_rewrite, table
from backend_kwargs.rewrites.table import chosen_places, name_of
from tests.auto.graphs import rows_of


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch, fresh_dynamo):
    """Give each test its own store, and races that try every matching rewrite and nothing else."""
    path = tmp_path / "decisions"
    monkeypatch.setenv("BACKEND_KWARGS_STORE", str(path))
    monkeypatch.setattr(candidates, "STEPS", ())
    process_memory.forget_process()
    yield path
    process_memory.forget_process()


class Net(nn.Module):
    """A convolution with ReLU, and two linear layers that share an input, with GELU."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3)
        self.one, self.other = nn.Linear(8 * 36, 16), nn.Linear(8 * 36, 16)

    def forward(self, x):
        x = torch.relu(self.conv(x)).flatten(1)
        return nn.functional.gelu(self.one(x)) + nn.functional.gelu(self.other(x), approximate="tanh")


def raced(model=None, *, no_grad=True, x=None, **options):
    model = model or Net().eval()
    x = torch.randn(2, 3, 8, 8) if x is None else x
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=make_backend("tmpl-inductor:auto", {"budget_s": 300.0, **options}))
    with torch.set_grad_enabled(not no_grad):
        torch.testing.assert_close(compiled(x), model(x), atol=2e-3, rtol=2e-3)
    return compiled


ASKED = {
    "nothing named": ({}, {"convolution", "linear_activation", "onednn"}),
    "consent": ({"rewrites": ("packed",)}, {"convolution", "linear_activation", "onednn", "packed"}),
    "another function": (
        {"rewrites": ["approximate_gelu"]},
        {"convolution", "linear_activation", "onednn", "approximate_gelu"},
    ),
    "none": ({"rewrites": ()}, set()),
    "a candidate": ({"candidates": ["packed"]}, {"packed"}),
}


@pytest.mark.parametrize(("options", "wanted"), ASKED.values(), ids=ASKED)
def test_what_is_raced(store, options, wanted):
    """Rewrites that compute the same function and named ones are raced; an empty list allows none."""
    raced(**options)
    rows = rows_of(store)
    assert set(rows) - {"eager", "default"} == wanted
    for name in wanted:
        # Where oneDNN's exact GELU is the fastest so far, nothing is left to approximate.
        may_find_nothing = "onednn" in chosen_places(rows[name].options["rewrites"])
        assert rows[name].status in (("pass", "same code") if may_find_nothing else ("pass",)), rows[name].reason
        assert rows[name].rewritten.get(name) == 1 or may_find_nothing


def test_what_does_not_match_is_not_compiled(store):
    """A rewrite that does not match costs no compile."""
    raced(nn.Sequential(nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 8), nn.Softplus()), x=torch.randn(4, 8))
    assert set(rows_of(store)) == {"eager", "default"}


class Scores(nn.Module):
    """Products that are written out, with a depthwise convolution before."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(16, 16, 3, groups=16)

    def forward(self, x):
        x = self.conv(x).mT
        return (x[:, :, None] * x[:, None]).sum(-1)


@pytest.mark.parametrize(
    ("low", "first"), [pytest.param(5.0, "contraction", id="faster"), pytest.param(0.9, "default", id="noise")]
)
def test_products_that_are_written_out_are_raced_by_themselves_on_a_cpu(store, monkeypatch, default_wins, low, first):
    """What is compiled first has them replaced if that is faster, so that the budget may end then."""
    asked = []

    def verdict_of(request, sandbox, standing):
        asked.append(standing.place.rewrite)
        return Verdict(6e-3, 1e-3, Interval(6.0, low, 7.0))

    monkeypatch.setattr(race, "verdict_of", verdict_of)
    raced(Scores().eval(), x=torch.randn(2, 16, 66))
    assert asked == ["contraction"]
    _, second, *_ = rows_of(store).values()
    assert (second.name, second.rewritten) == (first, {"contraction": 1} if first == "contraction" else {})


def test_training_leaves_relu_alone(store):
    """In training rewrites with a library's ReLU are not raced, since it may lose a nan."""
    raced(no_grad=False)
    assert set(rows_of(store)) == {"eager", "default"}


def test_rewrites_join():
    """A rewrite is combined with the current best's rewrites and options, unless it stands alone."""
    under = {"rewrites": ["convolution"], "triton.cudagraphs": True}
    assert merged(under, rewriting("attention")) == {
        "rewrites": ["convolution", "attention"],
        "triton.cudagraphs": True,
    }
    assert merged({}, rewriting("attention")) == {"rewrites": ["attention"]}
    assert merged(under, RaceCandidate("cudagraphs", {"triton.cudagraphs": True})) == under


def test_the_winner_is_remembered(store, default_wins):
    """The winner's rewrites are compiled, reported, stored, and found by the next process without a race."""
    model = Net().eval()
    (graph,) = backend_kwargs.report(raced(model)).graphs
    assert sorted(map(name_of, graph.race.options["rewrites"])) == ["convolution", "linear_activation", "onednn"]
    assert all(table.PLACE.fullmatch(entry) for entry in graph.race.options["rewrites"])
    assert graph.rewritten == {"convolution": 1, "linear_activation": 1, "onednn": 1}
    assert "rewrote convolution 1x, linear_activation 1x, onednn 1x" in graph.race.table
    assert "rewritten: convolution once, linear_activation once, onednn once" in str(
        backend_kwargs.report(raced(model))
    )
    process_memory.forget_process()
    (again,) = backend_kwargs.report(raced(model, race="never")).graphs
    assert again.rewritten == {"convolution": 1, "linear_activation": 1, "onednn": 1}


def test_a_raised_version_is_raced_anew(store, monkeypatch):
    """What was decided with an earlier version of a rewrite is raced again, and no other decision."""
    model, x = nn.Sequential(nn.Linear(8, 8), *[nn.ReLU()] * 8).eval(), torch.randn(4096, 8)
    raced(x=x, model=model)
    (before,) = Catalogue(store).all()
    for name, anew in (("attention", False), ("linear_activation", True)):
        rows = {**table.BUILT_IN, name: dataclasses.replace(table.BUILT_IN[name], version=2)}
        with monkeypatch.context() as patch:
            patch.setattr(table, "_REWRITES", dataclasses.replace(table._REWRITES, built_in=rows))
            patch.setattr(table, "find_rewrite", table._REWRITES.find)
            patch.setattr("backend_kwargs.rewrites.traced.find_rewrite", table._REWRITES.find)
            process_memory.forget_process()
            raced(x=x, model=model)
            (after,) = Catalogue(store).all()
            assert (after.made > before.made) is anew
            assert any("linear_activation@2:" in str(row.options) for row in after.rows) is anew


SAID = {
    "what may be raced": ("convolution", ["convolution"], {}, True),
    "another function without consent": ("approximate_gelu", ["approximate_gelu"], {}, False),
    "with it": ("approximate_gelu", ["approximate_gelu"], {"rewrites": ("approximate_gelu",)}, True),
    "no rewrite": ("convolution", ["somewhere:function"], {}, False),
    "no list": ("convolution", "convolution", {}, False),
}


@pytest.mark.parametrize(("winner", "expected", "options", "followed"), SAID.values(), ids=SAID)
def test_a_stored_decision_is_followed(store, races, winner, expected, options, followed):
    """A stored decision is used only if this request would race its rewrites."""
    raced(**options)
    (decision,) = Catalogue(store).all()
    Catalogue(store).add(
        dataclasses.replace(decision, winner=winner, options={"rewrites": expected}, made=decision.made + 1)
    )
    process_memory.forget_process()
    (graph,) = backend_kwargs.report(raced(race="never", **options)).graphs
    assert (graph.race.winner == winner) is followed


def raising(stats):
    raise ZeroDivisionError("no reason")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"patterns": "nowhere:function"}, "ModuleNotFoundError: No module named 'nowhere'"),
        ({"patterns": "nowhere:function", "fitting": raising}, "ZeroDivisionError: no reason"),
        (
            {"patterns": "nowhere:function", "needs": ("cudnn_pgu",)},
            "BackendKwargsError: Unknown requirement 'cudnn_pgu'. Requirements are ",
        ),
        (
            {"traced": lambda gm, inputs: 42},
            "BackendKwargsError: The result of rewrite 'broken' must be a Change or None, got 42 (int).",
        ),
    ],
    ids=["import", "fitting", "needs", "result"],
)
def test_one_that_fails_is_not_tried(store, caplog, options, error):
    """A user's rewrite that raises, or returns nothing of use, is skipped with a line in the log."""
    register_rewrite("broken", Rewrite("broken", **options))
    try:
        with caplog.at_level(logging.INFO, "backend_kwargs.auto"):
            raced(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval())
    finally:
        backend_kwargs.rewrites.table._registered.pop("broken")
    assert any(line.startswith(f"Rewrite broken is not tried: {error}") for line in caplog.messages)
    assert "convolution" in rows_of(store)


def test_memory(store):
    """With objective="memory" a linear layer and its loss are raced in chunks."""
    layer = nn.Linear(16, 64, bias=False)
    target = torch.randint(64, (32,))

    def loss(x):
        return nn.functional.cross_entropy(layer(x), target)

    x = torch.randn(32, 16)
    raced(loss, x=x, objective="memory", no_grad=False)
    assert rows_of(store)["linear_cross_entropy"].rewritten == {"linear_cross_entropy": 1}


def test_a_decision_as_it_was_before():
    """Decisions stored before rewrites existed have no counts."""
    row = RaceRow("default")
    assert row.rewritten == {}
    assert Decision("k", "g", "default", rows=(row,)).rows == (row,)
