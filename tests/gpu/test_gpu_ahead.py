"""Rewrites of dynamo's graph that workers lower on a GPU, with Triton kernels of ours among them."""

import pytest
import torch
from torch import nn

from backend_kwargs import make_backend
from backend_kwargs.auto import ahead, decide, race
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.auto.workers.pool import Workers
from backend_kwargs.torch_internals.caches import fresh_cache
from backend_kwargs.torch_internals.dynamo import counters


@pytest.fixture
def store(tmp_path, monkeypatch):
    path = tmp_path / "decisions"
    monkeypatch.setenv("BACKEND_KWARGS_STORE", str(path))
    decide.forget_process()
    yield path
    decide.forget_process()


@pytest.fixture
def workers(monkeypatch):
    """Let races use two workers, and wait for them; nothing beats eager, so that each extends default."""
    made = Workers(2)
    monkeypatch.setattr(ahead, "workers", lambda: made)
    monkeypatch.setattr(race, "workers", lambda: made)
    waiting = ahead.Ahead.wait
    monkeypatch.setattr(ahead.Ahead, "wait", lambda self, job, seconds: waiting(self, job, 300.0))
    monkeypatch.setattr(race, "better", lambda challenger, champion, objective: champion.candidate.name == "eager")
    with fresh_cache():
        yield made
    made.stop()


class Turned(nn.Module):
    """Products round a rotary embedding, as a decoder has them."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, x, cos, sin):
        heads = self.into(x).unflatten(-1, (4, 64)).transpose(1, 2)
        first, second = heads.chunk(2, -1)
        turned = heads * cos + torch.cat((-second, first), -1) * sin
        return self.out(turned.transpose(1, 2).flatten(2))


class Loss(nn.Module):
    """A layer and its mean cross-entropy."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(256, 4096, bias=False)

    def forward(self, x, target):
        return nn.functional.cross_entropy(self.layer(x).float(), target)


def normal(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


CASES = {
    "rotary": (Turned, lambda: (normal(2, 128, 256), normal(128, 64), normal(128, 64))),
    "cross_entropy": (Loss, lambda: (normal(512, 256), torch.randint(4096, (512,), device="cuda"))),
    "layer_norm_backward": (
        lambda: nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU()),
        lambda: (normal(2048, 256),),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_workers_lower_a_rewrite_of_dynamos_graph(name, store, workers):
    """The racing process finds what workers have lowered for a rewrite, forward and backward, and it is right."""
    make, inputs = CASES[name]
    model, given = make().to("cuda", torch.bfloat16), inputs()
    counters.clear()
    backend = make_backend("tmpl-inductor:auto", candidates=[name], race="always", budget_s=300.0)
    torch.compile(model, backend=backend)(*given).float().sum().backward()
    (decision,) = Catalogue(store).all()
    row = next(row for row in decision.rows if row.name == name)
    assert "lowered without workers" not in decision.facts
    assert (row.status, row.reason) == ("pass", "")
    assert (counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]) == (2, 2)
