"""TVM on a GPU: results, the caller's stream, CUDA graphs, gradients."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import backend_kwargs
from backend_kwargs.backends.tvm.settings import unfit
from tests.backends import composition
from tests.backends.composition import same, wrong
from tests.backends.tvm.exact_examples import EXAMPLES

pytestmark = pytest.mark.skipif(bool(unfit()), reason=f"no TVM: {unfit()}")

OPTIONS = [
    pytest.param({}, id="defaults"),
    pytest.param({"aten_ops": ()}, id="products in TVM"),
    pytest.param({"cuda_graph": True}, id="cuda_graph"),
]
SLEEP = 100_000_000  # clock cycles, some 50 ms


def mlp():
    return nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64)), (32, 256)


def cnn():
    parts = (nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*parts, nn.Linear(16 * 16 * 16, 10)), (4, 3, 32, 32)


def block():
    return nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True), (2, 64, 128)


class Pointwise(nn.Module):
    def forward(self, x):
        return torch.sigmoid(x) * torch.tanh(x) + torch.clamp(x, -1, 1) * torch.nn.functional.gelu(x)


def pointwise():
    return Pointwise(), (64, 1023)


MODELS = [mlp, cnn, block, pointwise]


def made(model, *, training=False):
    torch.manual_seed(0)
    module, shape = model()
    return module.to("cuda").train(training), torch.randn(shape, device="cuda")


def by_tvm(module, **options):
    return torch.compile(module, backend=backend_kwargs.make_backend("tvm", **options))


@torch.no_grad()
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_numbers_are_eagers(model, options, fresh_dynamo):
    """Three calls with different data give eager's results, with recorded graphs too."""
    module, x = made(model)
    compiled = by_tvm(module, **options)
    for _ in range(3):
        given = torch.randn_like(x)
        torch.testing.assert_close(compiled(given), module(given), rtol=1e-3, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("options", OPTIONS)
def test_the_callers_stream_is_respected(options, fresh_dynamo):
    """Work queued on a side stream before the call is visible, and only that stream needs a wait."""
    module, x = made(mlp)
    compiled, wanted, buffer, side = by_tvm(module, **options), module(x), torch.zeros_like(x), torch.cuda.Stream()
    for _ in range(3):
        compiled(buffer)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP)
        buffer.copy_(x)
        seen = compiled(buffer) * 1
    side.synchronize()
    torch.testing.assert_close(seen, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("model", [mlp, cnn, block], ids=lambda model: model.__name__)
def test_gradients_are_eagers(model, fresh_dynamo):
    """Forward and backward parts on the GPU give eager's gradients."""
    module, x = made(model, training=True)
    wanted = torch.autograd.grad(module(x).square().mean(), list(module.parameters()))
    seen = torch.autograd.grad(by_tvm(module)(x).square().mean(), list(module.parameters()))
    torch.testing.assert_close(seen, wanted, rtol=1e-3, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(
    ("function", "scale"),
    [
        pytest.param(lambda x: x * 1e-3, 1e-38, id="below the least normal number"),
        pytest.param(torch.sin, 1e4, id="sin of large numbers"),
        pytest.param(torch.tan, 1e4, id="tan of large numbers"),
        pytest.param(lambda x: x.abs().log(), 1, id="log, also near 1"),
        pytest.param(lambda x: x.abs() ** 7.3, 10, id="pow"),
        pytest.param(lambda x: x / (x * x + 1e-3), 1, id="division"),
        pytest.param(lambda x: x.abs().sqrt(), 1e-38, id="sqrt"),
        pytest.param(torch.exp, 10, id="exp"),
        pytest.param(torch.sigmoid, 20, id="sigmoid"),
    ],
)
def test_mathematics_is_exact(function, scale, fresh_dynamo):
    """TVM's kernels are compiled without CUDA's fast math, like eager's."""
    x = torch.linspace(-3, 3, 4096, device="cuda") * scale
    compiled, wanted = by_tvm(function), function(x)
    torch.testing.assert_close(compiled(x), wanted, rtol=1e-6, atol=0)
    (graph,) = backend_kwargs.report(compiled).graphs
    assert sum(part.operators for part in graph.relax.partitions) > 0


@torch.no_grad()
@pytest.mark.parametrize(("function", "args", "code"), EXAMPLES.values(), ids=EXAMPLES)
def test_fused_code_is_eagers(function, args, code, fresh_dynamo):
    """Fused code equals eager bit for bit: no real arithmetic, wrapping integers, products rounded before sums."""
    args = [each.to("cuda") for each in args]
    assert same(by_tvm(function, fallback="error")(*args), function(*args))


@settings(
    max_examples=5, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(composition.GRAPH, st.sampled_from(composition.SHAPES))
def test_compositions_are_eagers(expressions, shape):
    """Twenty expressions in one graph equal eager's, bit for bit or by their distance to float64."""
    torch._dynamo.reset()
    tensors = {name: each.to("cuda") for name, each in composition.inputs(shape).items()}
    # CUDA's max takes 0.0 for larger than -0.0; C's comparisons, and so TVM's code, for equal.
    expressions = [each for each in expressions if not any(name in str(each) for name in ("maximum", "minimum"))]
    with torch.no_grad():
        found = wrong(expressions, tensors, by_tvm(composition.graph_of(expressions))(**tensors))
    assert [str(expressions[at]) for at in found] == []


@torch.no_grad()
def test_tvm_runs_a_part(fresh_dynamo):
    """On a GPU TVM runs a chain of pointwise operators, not eager."""
    module, x = made(pointwise)
    compiled = by_tvm(module)
    compiled(x)
    (graph,) = backend_kwargs.report(compiled).graphs
    assert sum(part.operators for part in graph.relax.partitions) > 0


@torch.no_grad()
def test_the_users_own_capture_is_served(fresh_dynamo):
    """Within torch.cuda.graph a part runs in eager, so the graph owns its memory."""
    module, x = made(pointwise)
    compiled = by_tvm(module)
    compiled(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compiled(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    compiled(torch.randn_like(x))
    torch.testing.assert_close(out, module(x), rtol=1e-3, atol=1e-4)
