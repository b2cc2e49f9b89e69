"""Candidates whose graphs workers have lowered while default compiled."""

import operator

import pytest
import torch

import backend_kwargs
from backend_kwargs.auto import ahead, race, selection
from backend_kwargs.auto.compiling import Compiles
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.auto.workers.pool import Workers
from backend_kwargs.graphs.writes import copy_of_graph
from backend_kwargs.rewrites.table import Rewrite, register_rewrite
from backend_kwargs.rewrites.traced import Change
from backend_kwargs.torch_internals.caches import fresh_cache
from backend_kwargs.torch_internals.dynamo import counters
from tests.auto.graphs import rows_of


@torch.library.custom_op("backend_kwargs_tests::here", mutates_args=())
def here(x: torch.Tensor) -> torch.Tensor:
    return x + 1


here.register_fake(torch.empty_like)


def change_to(op, gm, example_inputs):
    """Return dynamo's graph with `op`, which adds 1, after a layer norm; 1 is then subtracted."""
    copied = copy_of_graph(gm)
    (node,) = copied.graph.find_nodes(op="call_function", target=torch.nn.functional.layer_norm)
    with copied.graph.inserting_after(node):
        call = copied.graph.call_function(op._opoverload, (node,))
        call.meta.update(node.meta)
    with copied.graph.inserting_after(call):
        back = copied.graph.call_function(operator.sub, (call, 1))
        back.meta.update(node.meta)
    node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not call)
    copied.recompile()
    return Change(copied, example_inputs, 1)


@pytest.fixture(scope="module")
def two():
    """Two workers, which tests that run beside these leave time."""
    made = Workers(2, nice=0)
    yield made
    made.stop()


@pytest.fixture
def workers(two, monkeypatch):
    """Let races use two workers, however many cores there are, and wait for them."""
    monkeypatch.setattr(ahead, "workers", lambda: two)
    waiting = ahead.Ahead.wait
    monkeypatch.setattr(ahead.Ahead, "wait", lambda self, job, seconds: waiting(self, job, 300.0))
    with fresh_cache():
        yield two


@pytest.fixture
def default_is_kept(monkeypatch):
    """Let no candidate win, so that each extends default's options."""
    monkeypatch.setattr(race, "better", lambda challenger, champion, objective: champion.candidate.name == "eager")


@pytest.mark.parametrize("training", [pytest.param(False, id="inference"), pytest.param(True, id="training")])
def test_the_race_finds_what_workers_lowered(auto, store, workers, default_is_kept, training):
    """Each candidate but default comes out of Inductor's cache, forward and backward."""
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64)), torch.randn(8, 64)
    counters.clear()
    with torch.set_grad_enabled(training):
        found = auto(model, candidates=["no_size_asserts", "one_thread"], race="always")(x)
    assert {row.status for row in rows_of(store).values()} <= {"pass", "same code"}
    assert counters["inductor"]["fxgraph_cache_miss"] == 1 + training
    assert counters["inductor"]["fxgraph_cache_hit"] == 2 * (1 + training)
    torch.testing.assert_close(found, model(x))


def normed():
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.GELU())


def gradients(model, fn, x):
    """Return what a step returns, and the gradients that it leaves."""
    result = fn(x)
    result.square().sum().backward()
    found = [result.detach(), *(each.grad for each in model.parameters())]
    model.zero_grad(set_to_none=True)
    return found


def test_a_rewrite_of_dynamos_graph_is_traced_and_lowered_ahead(auto, store, workers, default_is_kept):
    """The racing process traces it before default, and finds what workers have lowered, forward and backward."""
    model, x = normed(), torch.randn(512, 64)
    fn = auto(model, candidates=["layer_norm_backward"], race="always")
    counters.clear()
    fn(x)
    rows = rows_of(store)
    assert (rows["layer_norm_backward"].status, rows["layer_norm_backward"].rewritten) == (
        "pass",
        {"layer_norm_backward": 1},
    )
    assert (counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]) == (2, 2)


@pytest.mark.parametrize(
    ("seconds", "order"),
    [
        pytest.param(0.0, ["trace", "compile", "compile"], id="time is left"),
        pytest.param(1e9, ["compile", "trace", "compile"], id="none is left"),
    ],
)
def test_a_rewrite_is_traced_before_default_if_there_will_be_time_for_it(
    auto, store, workers, default_is_kept, monkeypatch, seconds, order
):
    """Where default will take the whole budget, nothing delays it; what is left is decided after it."""
    monkeypatch.setattr(selection, "OP_S", seconds)
    seen = []

    def noting(name, doing):
        def note(self, *args):
            seen.append(name)
            return doing(self, *args)

        monkeypatch.setattr(Compiles, name, note)

    noting("trace", Compiles.trace)
    noting("compile", Compiles.compile)
    with torch.no_grad():
        auto(torch.nn.LayerNorm(64), candidates=["layer_norm_backward"], race="always")(torch.randn(8, 64))
    assert seen == order


def test_what_extends_a_rewrite_is_lowered_ahead(auto, store, workers, monkeypatch):
    """Once a rewrite of dynamo's graph leads, workers lower its graphs for the candidates that extend it."""
    monkeypatch.setattr(race, "better", lambda challenger, champion, objective: True)
    model, x = normed(), torch.randn(512, 64)
    fn = auto(model, candidates=["layer_norm_backward", "no_size_asserts"], race="always")
    expected = gradients(model, model, x)
    counters.clear()
    torch.testing.assert_close(gradients(model, fn, x), expected, rtol=1e-3, atol=1e-3)
    (decision,) = Catalogue(store).all()
    assert decision.winner == "no_size_asserts"
    assert decision.options == {"rewrites": ["layer_norm_backward"], "size_asserts": False}
    assert (counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]) == (2, 4)


def test_a_forward_graph_that_is_laid_out_anew(auto, store, workers, monkeypatch):
    """Where lowering changes the strides of saved tensors, the backward graph is lowered for those."""
    monkeypatch.setattr(race, "better", lambda challenger, champion, objective: True)
    model = torch.nn.Sequential(torch.nn.Conv2d(8, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 8, 3))
    x = torch.randn(2, 8, 16, 16)
    fn = auto(model, candidates=["eager_numerics"], race="always", budget_s=300.0)
    expected = gradients(model, model, x)
    torch.testing.assert_close(gradients(model, fn, x), expected, rtol=1e-3, atol=1e-3)
    row = rows_of(store)["eager_numerics"]
    assert (row.status, row.reason) in (("pass", ""), ("same code", "as default"))


def test_a_rewrite_that_cannot_be_sent_is_named(auto, store, workers, default_is_kept):
    """The table says which rewritten graph was lowered without workers, and why."""

    def through_here(gm, example_inputs):
        return change_to(here, gm, example_inputs)

    register_rewrite("through_here", Rewrite("of this test", traced=through_here))
    model, x = normed(), torch.randn(8, 64)
    with torch.no_grad():
        torch.testing.assert_close(auto(model, candidates=["through_here"], race="always")(x), model(x))
    (decision,) = Catalogue(store).all()
    why = "through_here: it calls backend_kwargs_tests::here, which a worker does not have"
    assert decision.facts.endswith(f", lowered without workers: {why}")
    assert rows_of(store)["through_here"].status == "pass"


@pytest.mark.parametrize(
    ("cores", "why"), [pytest.param(16, "no worker is wanted", id="many"), pytest.param(2, "", id="two")]
)
def test_a_process_without_workers_says_why(monkeypatch, cores, why):
    """A process that has none of those that its cores allow says so; where they allow none, nothing is to be said."""
    monkeypatch.setattr(ahead, "allowed_cores", lambda: cores)
    assert ahead.Ahead(pool=Workers(0)).refused == why


def test_a_trace_that_fails_ends_no_race(auto, store, workers, default_is_kept):
    """A rewrite that raises fails when its turn comes, after default."""

    def raising(gm, example_inputs):
        raise RuntimeError("planted")

    register_rewrite("raising", Rewrite("of this test", traced=raising))
    model, x = normed(), torch.randn(8, 64)
    with torch.no_grad():
        torch.testing.assert_close(auto(model, candidates=["raising"], race="always")(x), model(x))
    row = rows_of(store)["raising"]
    assert (row.status, row.reason) == ("fail_to_run", "RuntimeError: planted")


def test_what_cannot_be_sent_is_lowered_here(auto, store, workers):
    """A graph with an operator of this script's is raced without the workers."""
    x = torch.randn(8, 64)
    fn = auto(lambda x: here(x) * 2, candidates=["no_size_asserts", "one_thread"], race="always")
    torch.testing.assert_close(fn(x), (x + 1) * 2)
    (decision,) = Catalogue(store).all()
    assert "lowered without workers: " in decision.facts
    assert {row.status for row in rows_of(store).values()} <= {"pass", "same code"}


def test_workers_that_die_cost_no_race(auto, store, workers, monkeypatch):
    """Where the workers are gone, each candidate is lowered in this process."""
    gone = Workers(1)
    gone.start()
    gone.stop()
    monkeypatch.setattr(ahead, "workers", lambda: gone)
    x = torch.randn(8, 64)
    fn = auto(torch.nn.GELU(), candidates=["no_size_asserts"], race="always")
    torch.testing.assert_close(fn(x), torch.nn.functional.gelu(x))
    assert rows_of(store)["no_size_asserts"].status in ("pass", "same code")


def test_without_spare_cores_there_are_no_workers():
    """On two cores a race lowers all candidates by itself, as before."""
    assert backend_kwargs.auto.workers.cores.spare_workers(2) == 0
