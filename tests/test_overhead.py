"""The cost of a call after compiling: ours compared with plain torch.compile, with equal options."""

import pytest
import torch

import backend_kwargs as bk

OPTIONS = {"max_fusion_size": 32}


@pytest.mark.parametrize(
    "kwargs",
    [
        pytest.param({"backend": "inductor", "options": OPTIONS}, id="inductor"),
        pytest.param({"backend": "tmpl-inductor", "options": OPTIONS}, id="named"),
        pytest.param({"backend": bk.make_backend("tmpl-inductor", OPTIONS)}, id="made"),
    ],
)
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.benchmark(group="steady state")
@torch.no_grad()
def test_steady_state_call(benchmark, kwargs):
    """A call compiles nothing more and gives eager's results; its time is recorded."""
    compiled, x = torch.compile(lambda x: x @ x, fullgraph=True, **kwargs), torch.eye(4)
    compiled(x)
    with torch.compiler.set_stance("fail_on_recompile"):
        result = benchmark(compiled, x)
    assert torch.equal(result, x)
