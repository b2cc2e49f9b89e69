"""The cost of a stored decision: compiling with it compared with compiling with the winner's options, caches empty."""

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache

from backend_kwargs import make_backend
from backend_kwargs.auto import process_memory

WINNER = {"cpp.simdlen": 256}


@pytest.fixture
def won(races):
    """Make a candidate with options win, without a race."""
    races.winner, races.options = "simd_256", WINNER
    return races


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(make_backend("tmpl-inductor:auto"), id="stored"),
        pytest.param(make_backend("tmpl-inductor", WINNER), id="alone"),
    ],
)
@pytest.mark.benchmark(group="compiling the winner")
@torch.no_grad()
def test_compiling_under_a_stored_decision(benchmark, won, backend):
    """Compiling with a stored decision runs no race; the time is recorded."""
    model = nn.Sequential(*[part for _ in range(2) for part in (nn.Linear(64, 64), nn.GELU())])
    x = torch.randn(8, 64)

    def compile_once():
        with fresh_cache():
            return torch.compile(model, backend=backend)(x)

    def forget():
        torch._dynamo.reset()
        process_memory.forget_process()

    compile_once()
    result = benchmark.pedantic(compile_once, setup=forget, rounds=5)
    assert torch.allclose(result, model(x), atol=1e-5)
    assert won.count <= 1
