"""Products cast in the graph: outputs, masks, branches and training see the captured dtypes."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import backend_kwargs as bk
from backend_kwargs import BackendKwargsWarning
from tests.precision.precision_nets import BOUND, CASTS, MARKS, error, in_precision, net, rows, used

pytestmark = MARKS


@pytest.mark.parametrize("precision", CASTS)
@pytest.mark.parametrize("freezing", [False, True], ids=["", "freezing"])
def test_products_are_cast(precision, freezing):
    """Products are computed in the requested precision; the output has the model's dtype."""
    model, x = net(), rows()
    compiled = in_precision(model, precision, freezing=freezing)
    with torch.no_grad():
        result = compiled(x)
    assert result.dtype == torch.float32
    assert 1e-4 < error(result, model, x) < 1e-2
    found = used(compiled)
    assert (found.precision, found.products, found.reason) == (precision, 2, "")
    assert found.error == pytest.approx(error(result, model, x), rel=0.5)


@pytest.mark.parametrize("precision", CASTS)
def test_training(precision):
    """In training gradients are float32, like parameters, and close to those of float32."""
    model, x = net().train(), rows()
    in_precision(model, precision)(x).square().sum().backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(x).square().sum().backward()
    for grad, parameter in zip(found, model.parameters(), strict=True):
        assert grad.dtype == torch.float32
        assert (grad - parameter.grad).norm() < 0.02 * parameter.grad.norm()
        assert not torch.equal(grad, parameter.grad)


def test_a_break_sees_the_captured_dtype():
    """Code after a graph break that checks a dtype takes the branch of the original model."""
    seen = []

    def branching(x, w):
        y = x @ w
        torch._dynamo.graph_break()
        seen.append(y.dtype)
        return (y * 2 if y.dtype == torch.float32 else y * 100) @ w

    x, w = rows(64), torch.randn(64, 64)
    with torch.no_grad():
        result = in_precision(branching, "bf16")(x, w)
    assert seen == [torch.float32]
    assert (result - (x @ w) * 2 @ w).norm() < 0.02 * result.norm()


def test_branches_on_dtype_within_a_graph():
    """Within a graph the captured branch is kept, and the result is computed from float32 values."""

    def branching(x, w):
        y = x @ w
        return y + 1e-3 if y.dtype == torch.float32 else y - 1

    x, w = rows(64), torch.randn(64, 64)
    with torch.no_grad():
        result = in_precision(branching, "bf16")(x, w)
    assert (result - branching(x, w)).norm() < 0.02 * result.norm()


@pytest.mark.parametrize("fused", [False, True], ids=["written out", "sdpa"])
def test_masks_of_the_least_float(fused):
    """A mask of finfo(float32).min, which bfloat16 cannot represent, masks; a fully masked row stays finite."""

    def attend(q, k, v, keep):
        mask = torch.where(keep, 0.0, torch.finfo(q.dtype).min)
        if fused:
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return (q @ k.transpose(-1, -2) / 4 + mask).softmax(-1) @ v

    q, k, v = (torch.randn(2, 8, 16) for _ in range(3))
    keep = torch.ones(8, 8, dtype=torch.bool).tril()
    keep[3] = False
    with torch.no_grad():
        compiled = in_precision(attend, "bf16")
        result = compiled(q, k, v, keep)
    assert used(compiled).reason == ""
    assert (result - attend(q, k, v, keep)).norm() < 0.02 * result.norm()


def test_outputs_that_alias_and_integers():
    """Outputs that share memory, integers and booleans equal eager's."""

    def several(x, w):
        y = x @ w
        return y, y.view(-1), (x > 0).sum(1), torch.arange(3), y.shape[0]

    x, w = rows(), torch.randn(64, 16)
    with torch.no_grad():
        y, flat, counts, three, size = in_precision(several, "bf16")(x, w)
    assert flat.untyped_storage()._cdata == y.untyped_storage()._cdata
    assert torch.equal(counts, (x > 0).sum(1))
    assert torch.equal(three, torch.arange(3))
    assert size == 8


@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
def test_convolutions(inplace):
    """A convolution's result stays narrow through batch norm, ReLU and pooling, also if these are in place."""
    torch.manual_seed(0)
    block = (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=inplace), nn.MaxPool2d(2))
    model, x = nn.Sequential(*block, nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4)).eval(), torch.randn(2, 8, 12, 12)
    compiled = in_precision(model, "bf16", freezing=True)
    with torch.no_grad():
        assert error(compiled(x), model, x) < 0.02
    assert used(compiled).products == 2


def test_what_is_overwritten_stays_wide():
    """A view of a product that is overwritten later is not replaced by the narrow product."""

    def overwriting(x, w):
        y = x @ w
        first = y[:2]
        y.mul_(3)
        return first @ w.T, y

    x, w = rows(), torch.randn(64, 16)
    with torch.no_grad():
        first, y = in_precision(overwriting, "bf16")(x, w)
        wanted, whole = overwriting(x, w)
    assert (first - wanted).norm() < 0.02 * wanted.norm()
    assert (y - whole).norm() < 0.02 * whole.norm()


def test_dynamic_shapes():
    """One graph serves several sizes, and the error is measured for each size that is compiled."""
    model = net()
    compiled = torch.compile(
        model, backend=bk.make_backend("tmpl-inductor", precision="bf16", max_error=BOUND), dynamic=True
    )
    with torch.no_grad():
        for count in (4, 7, 13):
            assert error(compiled(rows(count)), model, rows(count)) < BOUND
    assert len(bk.report(compiled).graphs) == 1


def test_a_model_in_bfloat16_has_nothing_to_cast():
    """If nothing is computed in float32 the option says so, and the graph is compiled unchanged."""
    model, x = net().bfloat16(), rows().bfloat16()
    compiled = in_precision(model, "fp16")
    with torch.no_grad(), pytest.warns(BackendKwargsWarning) as warned:
        compiled(x)
    assert str(warned[-1].message) == (
        "A graph is compiled without precision 'fp16': no product or convolution computes in float32."
    )
    assert used(compiled).reason == "no product or convolution computes in float32"


def test_the_users_autocast_is_left_alone():
    """Products that the user's autocast has cast are not cast again."""
    model, x = net(), rows()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), pytest.warns(BackendKwargsWarning):
        assert in_precision(model, "fp16")(x).dtype == torch.bfloat16


def test_checkpointed_parts_are_cast():
    """A checkpointed part is computed in the precision too, forward and backward."""
    model, x = net().train(), rows()

    def checkpointed(x):
        return checkpoint(model, x, use_reentrant=False)

    compiled = in_precision(checkpointed, "bf16")
    compiled(x).sum().backward()
    assert (used(compiled).products, used(compiled).reason) == (2, "")
    found = model[0].weight.grad.clone()
    model.zero_grad()
    model(x).sum().backward()
    assert 0 < (found - model[0].weight.grad).norm() < 0.02 * found.norm()


@pytest.mark.parametrize("precision", CASTS)
def test_transforms_of_torch_func_are_refused(precision):
    """A graph that contains a transform of torch.func is compiled in its own precision, with the reason."""
    model, x = net(), rows()
    compiled = in_precision(lambda x: torch.func.vmap(model)(x), precision)  # noqa: PLW0108 - vmap inside the graph
    why = f"A graph is compiled without precision {precision!r}: it has a transform of torch.func, such as vmap."
    with torch.no_grad(), pytest.warns(BackendKwargsWarning, match=re.escape(why)):
        torch.testing.assert_close(compiled(x), model(x))
