"""Races with a separate store, and templates planted to be wrong, slow or broken."""

import logging
import time

import pytest
import torch

import backend_kwargs
from backend_kwargs.auto import process_memory, race
from backend_kwargs.facts.decision import RaceRow

PASS = "post_grad_custom_post_pass"  # Inductor calls it with the lowered graph


@torch.library.custom_op("backend_kwargs_tests::nap", mutates_args=())
def nap(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.02)
    return x.clone()


@nap.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("backend_kwargs_tests::burst", mutates_args=())
def burst(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("planted in a call")


@burst.register_fake
def _(x):
    return torch.empty_like(x)


def doubled(graph):
    """Make every output twice as large as it should be."""
    (output,) = graph.find_nodes(op="output")
    with graph.inserting_before(output):
        output.args = ([graph.call_function(torch.ops.aten.mul.Tensor, (each, 2)) for each in output.args[0]],)


def through(op):
    """Return a pass that applies `op` to each output."""

    def change(graph):
        (output,) = graph.find_nodes(op="output")
        with graph.inserting_before(output):
            output.args = ([graph.call_function(op, (each,)) for each in output.args[0]],)

    return change


slowed = through(torch.ops.backend_kwargs_tests.nap.default)  # by 20 ms a call
bursting = through(torch.ops.backend_kwargs_tests.burst.default)


def broken(graph):
    raise RuntimeError("planted")


@pytest.fixture
def planted():
    """Register templates "wrong", "slow" and two that crash, at compile time and at call time."""
    for name, change in (("wrong", doubled), ("slow", slowed), ("crash", broken), ("burst", bursting)):
        backend_kwargs.register_template(name, {PASS: change, "fx_graph_cache": False})


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch, fresh_dynamo):
    path = tmp_path / "decisions"
    monkeypatch.setenv("BACKEND_KWARGS_STORE", str(path))
    process_memory.forget_process()
    yield path
    process_memory.forget_process()


@pytest.fixture
def default_wins(monkeypatch):
    """Let the last candidate that passes the check win, however fast eager is on this machine."""
    monkeypatch.setattr(race, "better", lambda challenger, champion, objective: True)


class Races:
    """Counted fake races that eager, or `winner`, wins at once."""

    winner, options, cut, count = "eager", {}, False, 0

    def __call__(self, request, tick):
        self.count += 1
        row = RaceRow(self.winner, self.options, seconds=1e-4, won=True)
        others = [RaceRow(name, seconds=1.0) for name in ("eager", "default") if name != self.winner]
        return race.RaceResult(row, (*others, row), "3 ops", 0.1, self.cut)


@pytest.fixture
def races(monkeypatch):
    """Replace races, so that the code around them is tested quickly."""
    stand_in = Races()
    monkeypatch.setattr(race, "race", stand_in)
    return stand_in


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="backend_kwargs.auto")
    return caplog


@pytest.fixture
def auto():
    """Return a function that compiles a model by auto with the given candidates and options."""

    def compiled(model, candidates=(), **options):
        options = {"budget_s": 300.0} | options  # large, so that other tests are not cut short on a slow machine
        backend = backend_kwargs.make_backend("tmpl-inductor:auto", candidates=list(candidates), **options)
        return torch.compile(model, backend=backend)

    return compiled


WITH_VECTORS = ("test_auto_precision", "test_auto_pinned_and_sealed")  # they are about a processor's instructions


@pytest.fixture(autouse=True)
def _scalar_code(request):
    """Compile without vector instructions, which takes two thirds of the time: what is raced and kept is the same."""
    with torch._inductor.config.patch({} if request.path.stem in WITH_VECTORS else {"cpp.simdlen": 1}):
        yield
