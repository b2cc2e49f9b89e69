"""Races in the background on a GPU: CUDA graphs that are recorded between calls, in trees of their own."""

import pytest
import torch
from torch import nn

from backend_kwargs.auto import decide, race
from backend_kwargs.auto.background import serving
from backend_kwargs.auto.background.pacing import Pacer
from backend_kwargs.auto.store import Catalogue
from tests.auto.background_loop import backend, timeline, until_ended, words


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch, fresh_dynamo):
    path = tmp_path / "decisions"
    monkeypatch.setenv("BACKEND_KWARGS_STORE", str(path))
    own = Pacer()
    monkeypatch.setattr(serving, "pacer", lambda: own)
    decide.forget_process()
    yield path
    decide.forget_process()


@pytest.fixture
def last_wins(monkeypatch):
    """Let the last candidate that passes the check win."""
    monkeypatch.setattr(race, "better", lambda challenger, champion, objective: True)
    monkeypatch.setattr(race.Race, "not_slower", lambda self, champion, eager: champion)


def mlp(layers=8, width=256):
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*parts).cuda()


def test_cuda_graphs_take_over(store, last_wins):
    """CUDA graphs serve in the end if they win; all results stay as they were."""
    model, x = mlp(), torch.randn(16, 256, device="cuda")
    fn, kept = torch.compile(model, backend=backend("cudagraphs")), []
    with torch.no_grad():
        expected = model(x)
        fn(x)
        until_ended(lambda: kept.append(fn(x)))
        for each in (*kept, *(fn(x) for _ in range(5))):
            torch.testing.assert_close(each, expected, rtol=1e-2, atol=1e-2)
    assert " takes over" in words()
    assert Catalogue(store).all()[0].cut_s == 0


@pytest.mark.parametrize("candidates", [pytest.param([], id="default"), pytest.param(["cudagraphs"], id="cudagraphs")])
def test_training(last_wins, candidates):
    """Gradients are eager's in each step, whichever candidate serves."""
    model, x = mlp(), torch.randn(16, 256, device="cuda")
    fn = torch.compile(model, backend=backend(*candidates))

    def gradients(output):
        return torch.autograd.grad(output.square().sum(), list(model.parameters()))

    expected = gradients(model(x))
    early = fn(x)
    until_ended(lambda: torch.testing.assert_close(gradients(fn(x)), expected, rtol=1e-2, atol=1e-2))
    torch.testing.assert_close(gradients(early), expected, rtol=1e-2, atol=1e-2)
    del early
    for _ in range(4):
        torch.testing.assert_close(gradients(fn(x)), expected, rtol=1e-2, atol=1e-2)


class Cache(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(64, 256, device="cuda"))
        self.register_buffer("position", torch.zeros((), dtype=torch.long, device="cuda"))
        self.net = mlp(4)

    def forward(self, x):
        self.cache[self.position] = x
        self.position.add_(1).remainder_(64)
        return self.net(self.cache).sum(0)


def test_a_cache_is_written_once_a_call(last_wins):
    """Timed calls do not advance the position, with CUDA graphs or without."""
    model = Cache()
    fn, calls = torch.compile(model, backend=backend("cudagraphs")), 0

    def call():
        nonlocal calls
        calls += 1
        fn(torch.full((256,), float(calls), device="cuda"))
        assert model.position == calls % 64
        assert model.cache[(calls - 1) % 64].eq(calls).all()

    with torch.no_grad():
        call()
        until_ended(call)


def test_no_memory_of_the_race_remains(last_wins):
    """The pools of its trees are freed with the race."""
    model, x = mlp(), torch.randn(16, 256, device="cuda")
    fn = torch.compile(model, backend=backend())
    with torch.no_grad():
        fn(x)
        until_ended(lambda: fn(x))
        assert timeline().ended
        for _ in range(3):
            fn(x)
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            fn(x)
    assert torch.cuda.memory_allocated() <= before


def test_another_models_graphs_go_on(last_wins):
    """CUDA graphs of another model are replayed while races go on, with right results."""
    other, model, x = mlp(2), mlp(), torch.randn(16, 256, device="cuda")
    replayed = torch.compile(other, mode="reduce-overhead")
    fn = torch.compile(model, backend=backend("cudagraphs"))

    def call():
        fn(x)
        torch.testing.assert_close(replayed(x), other(x), rtol=1e-2, atol=1e-2)

    with torch.no_grad():
        for _ in range(3):
            replayed(x)
        fn(x)
        until_ended(call)
