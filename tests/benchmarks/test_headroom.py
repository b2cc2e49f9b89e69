"""`benchmarks headroom`: a place as a graph of its own, on the inputs that it has, and the table of what was timed."""

import pytest
import torch
from torch import nn

import backend_kwargs as bk
from backend_kwargs.auto.places import Standing, standing
from backend_kwargs.auto.race import begun
from backend_kwargs.auto.sandbox import sandboxed
from backend_kwargs.auto.verdicts import Verdict
from backend_kwargs.backends import CapturedGraph
from backend_kwargs.interval import Interval
from backend_kwargs.rewrites.traced import Place
from benchmarks.studies.headroom import Timed, headroom, table, timed_places

PLACE = Place("linear_activation", 1, (), (), (), training=False, count=3)


class Net(nn.Module):
    """Two linear layers with ReLU, an operator before and two after them, and a buffer that counts calls."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(16, 32), nn.Linear(32, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return (torch.relu(self.other(torch.relu(self.one(x.sin())))) * 2).sum(-1)


@pytest.fixture(scope="module")
def graph():
    """Return a model, its input, and dynamo's graph of it with its inputs."""
    model, x, found = Net().eval(), torch.randn(4, 16), []

    def keep(gm, example_inputs):
        found.append((gm, example_inputs))
        return gm.forward

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(model, backend=keep, dynamic=False)(x)
    return model, x, *found[-1]


@torch.no_grad()
def test_a_place_stands_alone_with_its_neighbours(graph):
    """It has the inputs of the call, and returns what the model does there; what would fuse with it is in it."""
    model, x, gm, inputs = graph
    before = model.calls.clone()
    with sandboxed(gm) as sandbox:
        request = bk.make_backend("tmpl-inductor:auto").request(CapturedGraph(gm, inputs))
        race = begun(request, sandbox)
        found = standing(race.lowered, race.task.inputs.fresh, race.device)
    assert torch.equal(model.calls, before)  # the run that notes values writes to copies
    several = [each for each in found if each.place.rewrite == "linear_activation"]
    first, second = sorted(several, key=lambda each: len(each.fused.gm.graph.nodes))
    assert all(each.eager_s > 0 for each in found)
    inner = torch.relu(model.one(x.sin()))
    (given,) = (each for each in first.fused.example_inputs if each.shape == x.shape)
    assert torch.equal(given, x)  # the sine is in the graph
    torch.testing.assert_close(first.fused.gm(*first.fused.example_inputs)[-1], inner)
    (read,) = (each for each in second.fused.example_inputs if each.shape == inner.shape)
    torch.testing.assert_close(torch.relu(read), inner)  # the ReLU before it is in the graph too
    torch.testing.assert_close(second.fused.gm(*second.fused.example_inputs)[-1], model(x))


def test_the_places_of_a_model_are_timed():
    """Each is compiled twice, checked and timed; at most so many are."""
    backend, told = bk.make_backend("tmpl-inductor:auto"), []
    (timed,) = headroom(Net().eval(), (torch.randn(4, 16),), backend, 1, told.append)
    assert told == [f"{timed.standing.place}, 1 times"]
    assert timed.found.why == ""
    assert timed.found.default_s > 0
    assert timed.found.rewritten_s > 0
    assert timed.found.speedup.low <= timed.found.speedup.median <= timed.found.speedup.high


@torch.no_grad()
def test_only_what_is_permitted_has_places(graph):
    """A backend that permits no rewrite has none."""
    *_, gm, inputs = graph
    backend = bk.make_backend("tmpl-inductor:auto", rewrites=())
    assert [*timed_places(backend, gm, inputs, 8, lambda line: None)] == []


@pytest.mark.parametrize(
    ("speedup", "verdict", "wins"),
    [
        pytest.param(Interval(1.5, 1.4, 1.6), "faster", True, id="faster"),
        pytest.param(Interval(1.03, 1.015, 1.05), "no faster", False, id="not clearly"),
        pytest.param(Interval(0.9, 0.88, 0.93), "slower", False, id="slower"),
    ],
)
def test_a_verdict(speedup, verdict, wins):
    """A rewrite is faster in a place if its interval is clear of what two runs of one callable differ by."""
    timed = Timed(Standing(PLACE, None, None, 1e-3, 0.5), Verdict(2e-5, 1e-5, speedup, limit_s=5e-6))
    assert (timed.verdict, timed.wins) == (verdict, wins)
    said = table({"Net": [timed]})
    row = ["Net", str(PLACE), "3", "1000.0", "20.0", "10.0", "4.0", f"{speedup.median:.2f}x", *verdict.split()]
    assert [*row, *PLACE.what.split()] in [line.split() for line in said.splitlines()]
    assert (f"Net: rewrites=['{PLACE}']" in said) is wins


def test_a_model_without_places(fresh_dynamo):
    """A model in which no rewrite matches has none."""
    found = headroom(nn.Softplus(), (torch.randn(4, 16),), bk.make_backend("tmpl-inductor:auto"), 8, print)
    assert found == []
