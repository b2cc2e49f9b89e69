"""Calls of several graphs on a GPU choose between CUDA graphs and none, by the calls that are made."""

import pytest
import torch
from torch import nn

import backend_kwargs
from backend_kwargs.auto import alternating, process_memory, race
from backend_kwargs.auto.alternating import AS_RACED, WITH, WITHOUT
from backend_kwargs.auto.candidates import records
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.facts import EAGER
from backend_kwargs.torch_internals.cudagraphs import managers, recorded_count

CALLS = 80  # in which each way is warmed up, timed, and one has been chosen

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo reads it


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch, fresh_dynamo):
    monkeypatch.setattr(race, "CLEAR", 1e9)  # no race leaves no doubt
    path = tmp_path / "decisions"
    monkeypatch.setenv("BACKEND_KWARGS_STORE", str(path))
    process_memory.forget_process()
    yield path
    process_memory.forget_process()


@pytest.fixture
def chosen(monkeypatch):
    """Return a function that lets a way serve after few calls, whatever they take."""

    def choose(way):
        monkeypatch.setattr(alternating, "MOST_CALLS", 2)
        monkeypatch.setattr(alternating, "LONGEST_S", 1e9)
        monkeypatch.setattr(alternating, "fastest", lambda samples: (way if way in samples else WITHOUT, True))

    return choose


class Broken(nn.Module):
    """A model and its loss, in a graph each; many launches, and a large result between them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(256, 256), nn.GELU())))
        self.head = nn.Linear(256, 4096)

    def forward(self, x):
        y = self.head(self.layers(x))
        torch._dynamo.graph_break()
        return y.log_softmax(-1)[:, 0].mean()


def auto(model):
    return torch.compile(model, backend=backend_kwargs.make_backend("tmpl-inductor:auto", budget_s=20))


def step(model, call, x, *, more=False):
    """Return a loss and its gradients; of two calls the first one's loss, and the gradients of both with `more`."""
    model.zero_grad()
    loss = call(x)
    (loss + call(x) if more else loss).backward()
    return loss.detach(), *(p.grad for p in model.parameters())


@pytest.mark.parametrize("way", [WITHOUT, WITH])
@pytest.mark.parametrize("every", [pytest.param(CALLS, id="one"), pytest.param(3, id="two now and then")])
def test_each_call_of_a_training_loop_is_right(store, chosen, way, every):
    """Losses and gradients that are kept are eager's, of all steps, whichever way their graphs run."""
    chosen(way)
    torch.manual_seed(0)
    model, x = Broken().cuda(), torch.randn(64, 256, device="cuda")
    want = [[each.clone() for each in step(model, model, x, more=more)] for more in (False, True)]
    fn = auto(model)
    kept = [step(model, fn, x, more=at % every == 2) for at in range(CALLS)]
    torch.cuda.synchronize()
    for at, each in enumerate(kept):
        torch.testing.assert_close([*each], want[at % every == 2], rtol=1e-2, atol=1e-4)
    assert not process_memory.memory().alternations
    found = [each for each in Catalogue(store).all() if each.winner != EAGER]
    assert {records(each.options) for each in found} == {way == WITH}
    assert all(each.calls for each in found)


@pytest.mark.parametrize("way", [WITHOUT, AS_RACED, WITH])
@torch.no_grad()
def test_each_call_of_a_loop_is_right(store, chosen, way):
    """Results that are kept are eager's, of all calls: while ways alternate, and of what serves."""
    chosen(way)
    torch.manual_seed(0)
    model, x = Broken().cuda(), torch.randn(64, 256, device="cuda")
    want, fn = model(x), auto(model)
    kept = [fn(x) for _ in range(CALLS)]
    torch.cuda.synchronize()
    for each in kept:
        torch.testing.assert_close(each, want, rtol=1e-2, atol=1e-4)
    assert not process_memory.memory().alternations
    found = Catalogue(store).all()
    assert len(found) == 2
    assert all(each.calls for each in found), [*map(str, found)]
    if way != AS_RACED:
        assert {records(each.options) for each in found} == {way == WITH}
    assert "chosen by the calls that were made: without CUDA graphs" in str(backend_kwargs.report(fn))


@pytest.mark.parametrize("way", [WITHOUT, AS_RACED, WITH])
@torch.no_grad()
def test_what_serves_records_nothing_more(chosen, way):
    """Some calls after the end no CUDA graph is recorded, and without them no tree is left."""
    chosen(way)
    model, x = Broken().cuda(), torch.randn(64, 256, device="cuda")
    fn = auto(model)
    for _ in range(CALLS):
        fn(x)
    recorded = recorded_count(managers())
    for _ in range(10):
        fn(x)
    assert recorded_count(managers()) == recorded
    assert bool(recorded) == (way == WITH) or way == AS_RACED


@torch.no_grad()
def test_memory_of_what_lost_is_freed(chosen):
    """Once code serves without CUDA graphs, their pool is given back, which has at least what a call keeps at once."""
    chosen(WITHOUT)
    model, x = Broken().cuda(), torch.randn(65536, 256, device="cuda")  # its results have 1 GiB
    fn, most = auto(model), 0
    for _ in range(CALLS):
        fn(x)
        if process_memory.memory().alternations:
            most = max(most, torch.cuda.memory_reserved())
    torch.cuda.synchronize()
    assert not process_memory.memory().alternations
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < most - (1 << 30)


@torch.no_grad()
def test_many_small_graphs_run_with_cudagraphs_throughout(store):
    """Where each graph of a call takes microseconds, the faster way for the whole call serves; eager is one of them."""
    layers = [nn.Linear(64, 64).cuda() for _ in range(4)]

    def small(y, layer):
        return nn.functional.gelu(layer(y)).softmax(-1) + y

    def run(y):  # without a loop: a frame with a break in one is not compiled
        y = small(y, layers[0])
        torch._dynamo.graph_break()
        y = small(y, layers[1])
        torch._dynamo.graph_break()
        y = small(y, layers[2])
        torch._dynamo.graph_break()
        return small(y, layers[3])

    x = torch.randn(64, 64, device="cuda")
    fn, want = auto(run), run(x)
    for _ in range(3000):
        found = fn(x)
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)
    assert not process_memory.memory().alternations
    found = Catalogue(store).all()
    assert found
    assert any(each.calls for each in found) or len({records(each.options) for each in found}) == 1


@torch.no_grad()
def test_a_sealed_function_stops_alternating(store):
    """`seal` leaves what the races chose, and settles."""
    model, x = Broken().cuda(), torch.randn(64, 256, device="cuda")
    fn = auto(model)
    for _ in range(4):
        fn(x)
    sealed = backend_kwargs.seal(fn, x)
    torch.testing.assert_close(sealed(x), model(x), rtol=1e-3, atol=1e-3)
    assert not process_memory.memory().alternations
