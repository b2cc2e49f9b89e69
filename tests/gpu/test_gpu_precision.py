"""Float8 by torchao and half-precision casts on a GPU: generated code, CUDA graphs, and error bounds."""

import copy

import pytest
import torch
from torch import nn

import backend_kwargs as bk
from backend_kwargs import BackendKwargsWarning

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytest.importorskip("torchao", reason="torchao quantises")
needs_fp8 = pytest.mark.skipif(not HOPPER, reason="float8 products need compute capability 8.9")


def mlp(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)).to("cuda", dtype).eval()


def rows(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(256, 512, device="cuda", dtype=dtype)


def error(result: torch.Tensor, model: nn.Module, x: torch.Tensor) -> float:
    precise = copy.deepcopy(model).double()(x.double())
    return ((result.double() - precise).square().mean() / precise.square().mean()).sqrt().item()


def kernels(compiled: object) -> str:
    return "".join(code.source for graph in bk.report(compiled).graphs for code in graph.codes)


@needs_fp8
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("template", ["default", "cudagraphs"])
def test_float8_products_follow_their_weights(dtype, template):
    """Linear layers use float8 products, also in a CUDA graph, and a changed weight is quantised again."""
    model, x = mlp(dtype), rows(dtype)
    backend = bk.make_backend(f"tmpl-inductor:{template}", precision="fp8-dynamic", max_error=0.1)
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        for _ in range(3):
            result = compiled(x).clone()
        assert result.dtype == dtype
        assert error(result, model, x) < 0.1
        assert "_scaled_mm" in kernels(compiled)
        model[0].weight.mul_(-1.5)
        assert error(compiled(x).clone(), model, x) < 0.1


@needs_fp8
def test_float8_beyond_its_bound_is_never_chosen():
    """A race shows float8's error and keeps a candidate within the bound."""
    backend = bk.make_backend("tmpl-inductor:auto", precision="fp8-dynamic", max_error=0.005, race="always")
    compiled = torch.compile(mlp(), backend=backend)
    with torch.no_grad():
        compiled(rows())
    race = bk.report(compiled).graphs[0].race
    (row,) = [row for row in race.rows if row.name == "fp8-dynamic"]
    assert row.status == "fail_accuracy"
    assert row.error > row.max_error == 0.005
    assert "precision" not in race.options


# cuBLAS says so where the thread of the backward pass is the first to use it.
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
def test_casts_of_a_float32_model_train(fresh_dynamo):
    """Forward and backward products run in bfloat16; parameters and gradients stay float32."""
    model, x = mlp(torch.float32).train(), rows(torch.float32)
    compiled = torch.compile(model, backend=bk.make_backend("tmpl-inductor", precision="bf16", max_error=0.02))
    compiled(x).sum().backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    assert "torch.bfloat16" in kernels(compiled)


@pytest.mark.parametrize("template", ["default", "cudagraphs"])
def test_casts_follow_their_weights(template):
    """A weight is cast at each call, so every change takes effect, also in a CUDA graph."""
    model, x = mlp(torch.float32), rows(torch.float32)
    backend = bk.make_backend(f"tmpl-inductor:{template}", precision="bf16", max_error=0.02)
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        for change in (
            lambda weight: weight.mul_(-2),
            lambda weight: weight.data.add_(0.5),
            lambda weight: weight.data.copy_(torch.randn_like(weight)),
            lambda weight: setattr(weight, "data", torch.randn_like(weight)),
        ):
            for _ in range(3):
                compiled(x)
            change(model[2].weight)
            assert error(compiled(x).clone(), model, x) < 0.02
    assert bk.report(compiled).graphs[-1].precision.reason == ""


@pytest.mark.parametrize("template", ["default", "cudagraphs"])
def test_new_sizes_are_held_to_the_bound(template):
    """A dynamic graph is measured in each bucket of sizes, and runs in eager where its error exceeds the bound."""

    def spread(x):
        y = x @ torch.ones(512, 64, device="cuda")
        return y - y.mean()

    backend = bk.make_backend(f"tmpl-inductor:{template}", precision="bf16", max_error=0.02)
    compiled = torch.compile(spread, backend=backend, dynamic=True)
    x = rows(torch.float32)
    with torch.no_grad():
        assert (compiled(x[:8]) - spread(x[:8])).norm() < 0.02 * spread(x[:8]).norm()
        # In eager in that bucket, or compiled again, since Inductor has other code for some sizes.
        with pytest.warns(BackendKwargsWarning, match="without precision 'bf16'"):
            result = compiled(x[:104] + 1000)
        torch.testing.assert_close(result, spread(x[:104] + 1000))
        assert (compiled(x[:8]) - spread(x[:8])).norm() < 0.02 * spread(x[:8]).norm()
    used = [graph.precision for graph in bk.report(compiled).graphs]
    assert "above max_error=0.02" in f"{used[0].refused} {used[-1].reason}"


# cuBLAS says so where the thread of the backward pass is the first to use it.
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
def test_the_bound_in_training(fresh_dynamo):
    """The compiled forward and backward graphs are measured, and leave no gradient and no change of a statistic."""
    model, x = mlp(torch.float32).train(), rows(torch.float32)
    model.append(nn.BatchNorm1d(512, device="cuda"))
    compiled = torch.compile(model, backend=bk.make_backend("tmpl-inductor", precision="bf16", max_error=0.02))
    result = compiled(x)
    assert {parameter.grad for parameter in model.parameters()} == {None}
    assert model[3].num_batches_tracked == 1
    result.square().mean().backward()
    used = bk.report(compiled).graphs[0].precision
    assert 0 < used.error <= used.max_error


@needs_fp8
@pytest.mark.filterwarnings("ignore:A graph is compiled without precision")
def test_float8_of_one_row():
    """A product of one row is within the bound, in whichever precision."""
    model, x = mlp(), rows()[:1, None]
    backend = bk.make_backend("tmpl-inductor", precision="fp8-dynamic", max_error=0.1)
    with torch.no_grad():
        assert error(torch.compile(model, backend=backend)(x), model, x) < 0.1
