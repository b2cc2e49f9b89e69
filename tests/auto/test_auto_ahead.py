"""Candidates whose graphs workers have lowered while default compiled."""

import pytest
import torch

import backend_kwargs
from backend_kwargs.auto import ahead, race
from backend_kwargs.auto.workers.pool import Workers
from backend_kwargs.torch_internals.caches import fresh_cache
from backend_kwargs.torch_internals.dynamo import counters
from tests.auto.graphs import rows_of


@pytest.fixture
def workers(monkeypatch):
    """Let races use two workers, however many cores there are, and wait for them."""
    made = Workers(2)
    monkeypatch.setattr(ahead, "workers", lambda: made)
    waiting = ahead.Ahead.wait
    monkeypatch.setattr(ahead.Ahead, "wait", lambda self, job, seconds: waiting(self, job, 300.0))
    with fresh_cache():
        yield made
    made.stop()


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


def test_what_cannot_be_sent_is_lowered_here(auto, store, workers):
    """A graph with an operator of this script's is raced without the workers."""

    @torch.library.custom_op("backend_kwargs_tests::here", mutates_args=())
    def here(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    here.register_fake(torch.empty_like)
    x = torch.randn(8, 64)
    fn = auto(lambda x: here(x) * 2, candidates=["no_size_asserts", "one_thread"], race="always")
    torch.testing.assert_close(fn(x), (x + 1) * 2)
    assert {row.status for row in rows_of(store).values()} <= {"pass", "same code"}


def test_workers_that_die_cost_no_race(auto, store, workers):
    """Where the workers are gone, each candidate is lowered in this process."""
    workers.start()
    workers.stop()
    x = torch.randn(8, 64)
    fn = auto(torch.nn.GELU(), candidates=["no_size_asserts"], race="always")
    torch.testing.assert_close(fn(x), torch.nn.functional.gelu(x))
    assert rows_of(store)["no_size_asserts"].status in ("pass", "same code")


def test_without_spare_cores_there_are_no_workers():
    """On two cores a race lowers all candidates by itself, as before."""
    assert backend_kwargs.auto.workers.cores.spare_workers(2, {}) == 0
