"""auto under DistributedDataParallel with several buckets: dynamo splits the graph, and each part has a decision."""

import copy
import gc
import itertools
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

import backend_kwargs as bk
from backend_kwargs.auto import race
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.graphs import ddp_buckets
from tests.auto.graphs import backend_of


class Masked(nn.Module):
    """A model whose buckets get tokens, a mask and positions from earlier ones, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(50, 512), nn.BatchNorm1d(512)
        self.first, self.last = nn.Linear(512, 512), nn.Linear(512, 512)

    def forward(self, tokens):
        mask = tokens > 3
        hidden = self.norm(self.embed(tokens).transpose(1, 2)).transpose(1, 2)
        hidden = nn.functional.gelu(self.first(hidden)) * mask[..., None]
        return self.last(hidden) + hidden[:, torch.arange(tokens.shape[1])]


@pytest.fixture
def wrapped(tmp_path):
    """Return a function that makes a model with several buckets, in a process group of one."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'init'}", rank=0, world_size=1)
    yield lambda model: DistributedDataParallel(model, bucket_cap_mb=1)
    dist.destroy_process_group()


def models():
    torch.manual_seed(0)
    model = Masked()
    return model, copy.deepcopy(model), torch.randint(0, 50, (4, 8))


def trained(model, tokens):
    """Return the loss of a step, with the model's gradients and running means after it."""
    loss = model(tokens).square().mean()
    loss.backward()
    return loss, [each.grad for each in model.parameters()], [each.clone() for each in model.buffers()]


@pytest.mark.parametrize("winner", ["default", "eager"])
def test_each_bucket_is_decided(wrapped, races, winner):
    """Each bucket has its own race, and training gives eager's results whichever candidate wins."""
    races.winner = winner
    model, reference, tokens = models()
    expected = trained(wrapped(reference), tokens)
    compiled = torch.compile(wrapped(model), backend=backend_of())
    torch.testing.assert_close(trained(compiled, tokens), expected)
    graphs = bk.report(compiled).graphs
    assert races.count == len(graphs) > 2
    assert {graph.race.winner for graph in graphs} == {winner}


class Two(nn.Module):
    """A model of two buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(512, 512), nn.Linear(512, 512)

    def forward(self, x):
        return self.last(self.first(x).relu())


@torch.no_grad()
def test_every_candidate_of_a_bucket_passes(wrapped, store):
    """A candidate's first call returns real tensors, although the bucket's own first call returns fake ones."""
    torch.compile(wrapped(Two()), backend=backend_of())(torch.randn(4, 512))
    decisions = Catalogue(store).all()
    assert len(decisions) == 2
    assert [(row.name, row.status) for each in decisions for row in each.rows] == 2 * [
        ("eager", "pass"),
        ("default", "pass"),
    ]


def test_a_race_gets_what_a_bucket_gets(wrapped, monkeypatch):
    """A bucket's race gets the real inputs of its call, although dynamo has fake ones, and keeps none alive."""
    raced, activations = [], []

    def watched(request, tick):
        raced.append([each.detach().clone() for each in request.example_inputs])
        activations.extend(weakref.ref(each) for each in request.example_inputs if type(each) is torch.Tensor)
        raise race.NotRaceableError("only watched")

    monkeypatch.setattr(race, "race", watched)
    model, reference, tokens = models()
    model.eval(), reference.eval()
    ddp = wrapped(model)
    before = [each.clone() for each in model.buffers()]
    compiled = torch.compile(ddp, backend=backend_of())
    torch.testing.assert_close(compiled(tokens), reference(tokens))
    torch.testing.assert_close([*model.buffers()], before)
    assert len(raced) > 2
    hidden = reference.norm(reference.embed(tokens).transpose(1, 2)).transpose(1, 2)
    seen = [each for inputs in raced[1:] for each in inputs if each.shape == hidden.shape]
    assert any(torch.allclose(each, hidden) for each in seen)
    assert any(each.dtype == torch.bool and torch.equal(each, tokens > 3) for inputs in raced[1:] for each in inputs)
    known = {id(each) for each in (tokens, *model.buffers())}
    gc.collect()
    alive = [each() for each in activations if each() is not None]
    assert not [each for each in alive if id(each) not in known]


def test_report_tells_each_buckets_own_decision(wrapped, races, monkeypatch):
    """Buckets share dynamo's compile id, but each graph of a report shows its own race."""
    count = itertools.count()
    monkeypatch.setattr(race, "race", lambda *given: replace(races(*given), stats=f"graph {next(count)}"))
    model, _, tokens = models()
    compiled = torch.compile(wrapped(model), backend=backend_of())
    compiled(tokens)
    heads = [graph.race.table.splitlines()[0] for graph in bk.report(compiled).graphs]
    assert heads == [f"auto: eager for graph {at} (0.1 s)" for at in range(len(heads))]


def test_a_size_is_passed_on_as_it_is():
    """Inputs of a bucket that are no tensors are those of the call."""
    assert ddp_buckets.Bucket(torch.fx.symbolic_trace(nn.Identity()), [7]).inputs() == [7]
