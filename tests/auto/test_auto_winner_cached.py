"""After a race the winner is not compiled again, and the next process finds it in AOTAutograd's cache."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.testing import assert_close

import backend_kwargs
from backend_kwargs.auto import decide, process_memory
from backend_kwargs.graphs.writes import copy_of_graph


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


@pytest.fixture
def decided(monkeypatch):
    """Return the list of AOTAutograd's hits and misses at each decision."""
    seen, tell = [], decide.tell

    def noting(decision, told):
        seen.append((decision.winner, dict(counters["aot_autograd"])))
        tell(decision, told)

    monkeypatch.setattr(decide, "tell", noting)
    return seen


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_the_winner_is_a_hit(store, decided, default_wins, training):
    """Nothing is compiled after the decision; with it a compile is a hit, and results and gradients are right."""
    made, x = model(), torch.randn(3, 8)
    counters.clear()
    outcomes = []
    with fresh_cache(), torch.set_grad_enabled(training):
        for _ in range(2):
            torch._dynamo.reset()
            process_memory.forget_process()
            raced = torch.compile(made, backend=backend_kwargs.make_backend("tmpl-inductor:auto", candidates=[]))
            found = raced(x)
            expected = made(x)
            if training:
                parameters = list(made.parameters())
                gradients = torch.autograd.grad(found.square().sum(), parameters)
                assert_close(gradients, torch.autograd.grad(expected.square().sum(), parameters), atol=1e-4, rtol=1e-3)
            assert_close(found, expected)
            outcomes.append(dict(counters["aot_autograd"]))
    assert [winner for winner, _ in decided] == ["default"] * 2
    (_, at_decision), _ = decided
    raced, later = outcomes
    for name in ("autograd_cache_hit", "autograd_cache_miss"):
        assert raced.get(name, 0) == at_decision.get(name, 0)
    assert later["autograd_cache_hit"] == raced.get("autograd_cache_hit", 0) + 1
    assert later["autograd_cache_miss"] == raced["autograd_cache_miss"]


def test_a_copied_graph_has_the_attributes_in_their_order(fresh_dynamo):
    """AOTAutograd's key contains the pickled attributes of a graph, so a copy has them in the same order."""
    kept = []

    def backend(gm, example_inputs):
        kept.append(([*vars(gm)], [*vars(copy_of_graph(gm))]))
        return gm.forward

    torch.compile(model(), backend=backend)(torch.randn(3, 8))
    ((names, copied),) = kept
    assert [name for name in copied if name in names] == names
