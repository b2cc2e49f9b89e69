"""Linear with an activation as one call: what matches, what must not match, and the results."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.rewrites.lowering import Rewriting, agrees, matched

SETTINGS = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))


class Feed(nn.Module):
    """A linear layer and an activation."""

    def __init__(self, width, inner, act):
        super().__init__()
        self.linear = nn.Linear(width, inner)
        self.act = act

    def forward(self, x):
        return self.act(self.linear(x))


def tanh_gelu(x):
    return F.gelu(x, approximate="tanh")


def by_power(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def by_products(x):
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


ACTIVATIONS = {
    "ReLU": F.relu,
    "ReLU in place": F.relu_,
    "tanh-GELU": tanh_gelu,
    "module": nn.GELU(approximate="tanh"),
    "by a power": by_power,
    "by products": by_products,
}


SHAPES = {
    "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
    "sizes": st.lists(st.integers(1, 5), min_size=0, max_size=3),
    "width": st.integers(1, 17),
    "inner": st.integers(1, 17),
    "cut": st.booleans(),
    "scale": st.sampled_from([0.1, 1.0, 100.0]),
    "seed": st.integers(0, 9),
}


@SETTINGS
@given(act=st.sampled_from(sorted(ACTIVATIONS)), **SHAPES)
def test_computes_the_same(dtype, act, sizes, width, inner, cut, scale, seed):
    """Whatever the sizes and strides, one call gives float64's result up to rounding.

    For non-contiguous rows with several dimensions torch uses another product and adds the bias later: this stays.
    """
    torch.manual_seed(seed)
    model = Feed(width, inner, ACTIVATIONS[act]).to(dtype).eval()
    x = (torch.randn(2, *sizes, 2 * width if cut else width) * scale).to(dtype)[..., :width]
    assert matched(model, (x,), "linear_activation") == 1 or (cut and sizes)


def test_exact_gelu_by_consent():
    """Exact GELU stays unless the user names the rewrite, and then differs slightly."""
    model, x = Feed(8, 8, F.gelu), torch.randn(4, 8)
    left, taken = Rewriting(model, "linear_activation"), Rewriting(model, "approximate_gelu")
    with torch.no_grad():
        assert torch.equal(left(x), model(x)) or left(x).allclose(model(x), atol=1e-6)
        taken(x)
        assert (taken(x) - model(x)).abs().max() < 1e-3
    assert left.counts["linear_activation"] == 0
    assert taken.operators() == ["linear_approximated_gelu"]


@SETTINGS
@given(**SHAPES)
def test_exact_gelu_becomes_tanh_gelu(dtype, sizes, width, inner, cut, scale, seed):
    """The call that replaces exact GELU agrees with tanh-GELU in float64, whatever the sizes, strides and scale."""
    torch.manual_seed(seed)
    model = Feed(width, inner, F.gelu).to(dtype).eval()
    wanted = Feed(width, inner, tanh_gelu).to(dtype).eval()
    wanted.load_state_dict(model.state_dict())
    x = (torch.randn(2, *sizes, 2 * width if cut else width) * scale).to(dtype)[..., :width]
    rewriting = Rewriting(model, "approximate_gelu")
    with torch.no_grad():
        got = rewriting(x)
        taken = rewriting.counts["approximate_gelu"] == 1
        agrees(got, wanted if taken else model, (x,))
    assert taken or (cut and sizes)  # as in `test_computes_the_same`


def test_how_far_tanh_gelu_is_from_exact_gelu():
    """As documented, results differ by up to 5e-4, and by nearly as much where the two functions differ most."""
    model, x = Feed(2, 2, F.gelu), torch.linspace(-6, 6, 6001).unsqueeze(1).expand(-1, 2).contiguous()
    with torch.no_grad():
        model.linear.weight.copy_(torch.eye(2))
        model.linear.bias.zero_()
        far = (Rewriting(model, "approximate_gelu")(x) - F.gelu(x.double())).abs().max()
    assert 4e-4 < far < 5e-4


LINEAR = nn.Linear(6, 6)
NEAR = {
    "no bias": lambda x: F.relu(F.linear(x, LINEAR.weight)),
    "a bias that is computed for each row": lambda x: F.relu(torch.addmm(x, x, LINEAR.weight)),
    "a bias of one value": lambda x: F.relu(torch.addmm(LINEAR.bias[:1], x, LINEAR.weight)),
    "scaled bias": lambda x: F.relu(torch.addmm(LINEAR.bias, x, LINEAR.weight, beta=2)),
    "scaled product": lambda x: F.relu(torch.addmm(LINEAR.bias, x, LINEAR.weight, alpha=2)),
    "a sum of nothing": lambda x: F.relu(torch.addmm(LINEAR.bias, x[:, :0], LINEAR.weight[:0])),
    "another user": lambda x: (y := LINEAR(x)) * F.relu(y),
    "another user before": lambda x: ((y := LINEAR(x)).sum(-1), tanh_gelu(y)),
    "the product is returned": lambda x: (y := LINEAR(x), tanh_gelu(y)),
    "ReLU6": lambda x: F.relu6(LINEAR(x)),
    "SiLU": lambda x: F.silu(LINEAR(x)),
    "exact GELU": lambda x: F.gelu(LINEAR(x)),
    "another tanh": lambda x: 0.5 * (y := LINEAR(x)) * (1 + torch.tanh(0.8 * (y + 0.044715 * y**3))),
    "another dtype after": lambda x: F.relu(LINEAR(x).double()),
    "something between": lambda x: F.relu(LINEAR(x) + 1),
    "a view that is returned": lambda x: (y := LINEAR(x.view(2, 3, 6)), F.relu(y)),
    "a view with another user": lambda x: (y := LINEAR(x.view(2, 3, 6)), tanh_gelu(y), y.sum())[1:],
    "the product before a view": lambda x: (y := LINEAR(x), F.relu(y.view(2, 3, 6))),
    "a bias of a column": lambda x: F.relu(torch.addmm(x[:, :1], x, LINEAR.weight)),
    "a bias of one number": lambda x: F.relu(torch.addmm(LINEAR.bias[0], x, LINEAR.weight)),
    "float64": lambda x: F.relu(F.linear(x.double(), LINEAR.weight.double(), LINEAR.bias.double())),
}


def test_a_weight_that_is_not_transposed():
    """A permutation that changes nothing is no transposition."""
    b, w = torch.randn(6), torch.randn(6, 6)
    fn = lambda x: F.relu(torch.addmm(b.to(x), x, w.to(x).permute(0, 1)))  # noqa: E731
    matched(fn, (torch.randn(4, 6),), "linear_activation")


COMPUTED = {
    "from the rows": lambda x, b: x.sum(0),
    "from a parameter": lambda x, b: b * 2 + 1,
    "by a product": lambda x, b: torch.mv(LINEAR.weight, b),
    "changed in place": lambda x, b: b.clone().add_(x[0]),
}


@pytest.mark.parametrize(("name", "act"), [("linear_activation", F.relu), ("onednn", F.silu)], ids=["ReLU", "SiLU"])
@pytest.mark.parametrize("bias", COMPUTED.values(), ids=COMPUTED)
def test_a_bias_that_the_graph_computes(bias, name, act):
    """A bias with one dimension may be computed in the graph: the call reads it as one more input, at each call.

    This is safe: the call stands after the product, which needed the bias already, and one dimension has the columns'
    size, so that it is added as the product added it.
    """
    fn = lambda x, b: act(torch.addmm(bias(x, b), x, LINEAR.weight.t()))  # noqa: E731
    rewriting, b = Rewriting(fn, name), torch.randn(6)
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(4, 6)
            torch.testing.assert_close(rewriting(x, b), fn(x, b))
            b.mul_(3)
    assert (rewriting.counts[name], len(rewriting.graphs)) == (1, 1)


@pytest.mark.parametrize("name", ["linear_activation", "onednn", "approximate_gelu"])
@pytest.mark.parametrize("rows", [(0,), (2, 0)], ids=str)
def test_without_rows(name, rows):
    """An input without rows gives a result without rows."""
    act = {"linear_activation": F.relu, "onednn": F.silu, "approximate_gelu": F.gelu}[name]
    rewriting, x = Rewriting(fn := lambda x: act(LINEAR(x)), name), torch.randn(*rows, 6)
    with torch.no_grad():
        torch.testing.assert_close(rewriting(x), fn(x))


@pytest.mark.parametrize("fn", NEAR.values(), ids=NEAR)
def test_near_miss(fn):
    """Similar graphs stay unchanged."""
    rewriting = Rewriting(fn, "linear_activation")
    x = torch.randn(6, 6)
    with torch.no_grad():
        got, want = rewriting(x), fn(x)
    assert rewriting.counts["linear_activation"] == 0
    torch.testing.assert_close(got, want)


def test_half_stays_on_a_cpu():
    """On a CPU float16 stays unchanged, since oneDNN does not fuse it on every CPU."""
    rewriting = Rewriting(Feed(8, 8, F.relu).half(), "linear_activation")
    with torch.no_grad():
        rewriting(torch.randn(4, 8).half())
    assert rewriting.counts["linear_activation"] == 0


def test_training():
    """In training gradients equal eager's: a product that the backward pass needs stays."""
    for act, count in ((F.relu, 1), (tanh_gelu, 0)):
        model, x = Feed(8, 8, act), torch.randn(4, 8, requires_grad=True)
        rewriting = Rewriting(model, "linear_activation")
        rewriting(x).square().sum().backward()
        got = [x.grad, *(parameter.grad for parameter in model.parameters())]
        x.grad = None
        model.zero_grad()
        model(x).square().sum().backward()
        torch.testing.assert_close(got, [x.grad, *(parameter.grad for parameter in model.parameters())])
        assert rewriting.counts["linear_activation"] == count


def test_dynamic_sizes():
    """A graph with symbolic sizes matches, also with a reshaped product."""
    model = Feed(8, 12, tanh_gelu)
    rewriting = Rewriting(model, "linear_activation")
    with torch.no_grad():
        for rows in (3, 5, 7):
            x = torch.randn(2, rows, 8)
            torch.testing.assert_close(rewriting(x), model(x))
    assert rewriting.counts["linear_activation"] == len(rewriting.graphs) == 2
