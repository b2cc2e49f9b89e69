"""Products with zeros up to aligned sides: their forms, gradients, and what stays."""

import operator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.testing import assert_close

from backend_kwargs.rewrites.aligned_products import pad_products
from tests.rewrites.lowering import agrees
from tests.rewrites.on_a_cpu import compiled_by


def random(*sizes, dtype=torch.bfloat16):
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes))).to(dtype)


X, W, B = random(3, 5, 49), random(30, 49), random(30)
IMAGES = random(2, 49, 3, 4).contiguous(memory_format=torch.channels_last)
FORMS = {
    "linear": (F.linear, (X, W, B)),
    "linear by names": (lambda x, w, b: F.linear(bias=b, weight=w, input=x), (X, W, B)),
    "without a bias": (F.linear, (X, W)),
    "the sum alone": (F.linear, (X, random(32, 49), random(32))),
    "the columns alone": (F.linear, (random(3, 5, 48), random(30, 48), B)),
    "transposed": (lambda x, w: F.linear(x.mT, w), (random(3, 49, 5), W)),
    "matmul": (torch.matmul, (X, random(49, 30))),
    "operator": (operator.matmul, (X, random(3, 49, 30))),
    "method": (lambda x, y: x.matmul(y.mT), (X, random(3, 30, 49))),
    "more batches": (torch.matmul, (X, random(2, 1, 49, 30))),
    "bmm": (torch.bmm, (X, random(3, 49, 30))),
    "method bmm": (lambda x, y: x.bmm(mat2=y), (X, random(3, 49, 30))),
    "viewed": (lambda x, w: F.linear(x, w).view(15, 30), (X, W)),
    "pixels": (torch.conv2d, (IMAGES, random(30, 49, 1, 1), B)),
    "pixels by names": (
        lambda x, w: F.conv2d(input=x, weight=w, padding="same", dilation=2),
        (IMAGES, random(30, 49, 1, 1)),
    ),
    "pixels, the sum alone": (torch.conv2d, (IMAGES, random(32, 49, 1, 1))),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_each_form(form, dtype):
    """Each spelling of a product has float64's result, in eager's layout."""
    fn, args = FORMS[form]
    args = [each.to(dtype) for each in args]
    compiled, counts = compiled_by(pad_products, fn)
    agrees(compiled(*args), fn, args)
    assert counts == [1]


@pytest.mark.parametrize("form", ["linear", "matmul", "bmm", "more batches", "the columns alone", "pixels"])
def test_gradients(form):
    """So do the gradients of all operands."""
    fn, args = FORMS[form]
    args = [each.detach().requires_grad_() for each in args]
    wide = [each.detach().double().requires_grad_() for each in args]
    compiled, counts = compiled_by(pad_products, fn)
    got, exact = compiled(*args), fn(*wide)
    grad = random(*exact.shape)
    found, want = torch.autograd.grad(got, args, grad), torch.autograd.grad(exact, wide, grad.double())
    for one, other in zip(found, want, strict=True):
        assert (one.double() - other).abs().max() <= 2**-7 * other.abs().max()
    assert counts == [1]


@pytest.mark.parametrize(
    ("size", "missing"), [(49, 7), (196, 60), (197, 59), (129, 7), (1022, 2), (50257, 47), (24, 0), (23, 1)], ids=str
)
def test_zeros(size, missing):
    """Sides of 128 numbers or more get whole tiles, if at most a third larger, and others rows of 16 bytes."""
    graphs = []

    def backend(gm, inputs):
        graphs.append(pad_products(gm, inputs).gm.graph)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(F.linear, backend=backend)(random(2, 31), random(size, 31))
    pads = [node.args[1] for node in graphs[0].nodes if node.target is F.pad]
    assert pads == [(0, 1), (0, 1, 0, missing) if missing else (0, 1)]


def test_autocast():
    """Under autocast float32 operands give a product in half precision."""

    def fn(x, w, b):
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, w, b)

    args = [each.float() for each in (X, W, B)]
    compiled, counts = compiled_by(pad_products, fn)
    got = compiled(*args)
    assert got.dtype == torch.bfloat16
    assert_close(got, fn(*args), atol=0.1, rtol=2e-2)
    assert counts == [1]


def test_rows_that_vary():
    """The number of rows may vary."""
    compiled, counts = compiled_by(pad_products, F.linear)
    for rows in (3, 4, 6):
        x = random(rows, 5, 49)
        agrees(compiled(x, W, B), F.linear, (x, W, B))
    assert counts == [1, 1]


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_values_that_are_not_finite(at, value):
    """Numbers that are not finite reach the results that they reach in eager, and no others."""
    args = [each.clone() for each in (X, W, B)]
    args[at].view(-1)[7] = value
    compiled, counts = compiled_by(pad_products, F.linear)
    got, want = compiled(*args), F.linear(*args)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())
    assert counts == [1]


NEAR = {
    "aligned": (F.linear, (random(5, 48), random(32, 48))),
    "few numbers": (F.linear, (random(5, 3), random(32, 3))),
    "few columns": (F.linear, (random(5, 49), random(2, 49))),
    "a vector": (F.linear, (X, random(49))),
    "a vector on the left": (torch.matmul, (random(49), random(49, 30))),
    "a bias for all": (F.linear, (X, W, random(1)[0])),
    "a bias of one number": (F.linear, (X, W, random(1))),
    "float32": (F.linear, (X.float(), W.float())),
    "float64": (torch.matmul, (X.double(), W.double().mT)),
    "scores of a softmax": (lambda q, k: (q @ k.mT).softmax(-1), (X, random(3, 30, 49))),
    "images in float32": (torch.conv2d, (IMAGES.float(), random(30, 49, 1, 1).float())),
    "images with channels first": (torch.conv2d, (IMAGES.contiguous(), random(30, 49, 1, 1))),
    "aligned channels": (
        torch.conv2d,
        (IMAGES[:, :48].contiguous(memory_format=torch.channels_last), random(32, 48, 1, 1)),
    ),
    "windows": (torch.conv2d, (IMAGES, random(30, 49, 3, 3).contiguous(memory_format=torch.channels_last))),
    "every second pixel": (lambda x, w: torch.conv2d(x, w, stride=2), (IMAGES, random(30, 49, 1, 1))),
    "a border": (lambda x, w: torch.conv2d(x, w, padding=(0, 1)), (IMAGES, random(30, 49, 1, 1))),
    "groups": (lambda x, w: torch.conv2d(x, w, groups=7), (IMAGES, random(35, 7, 1, 1))),
    "one image": (torch.conv2d, (IMAGES[0], random(30, 49, 1, 1))),
    "weights of a softmax": (lambda w, v: w.softmax(-1) @ v, (X, random(3, 49, 32))),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_miss(name):
    """Similar products stay as they are."""
    fn, args = NEAR[name]
    compiled, counts = compiled_by(pad_products, fn)
    assert_close(compiled(*args), fn(*args))
    assert counts == [0]


def test_columns_that_vary_stay():
    """A product whose columns vary stays, so that the graph for all of them does."""
    compiled, counts = compiled_by(pad_products, F.linear)
    for columns in (30, 33, 35):
        compiled(X, random(columns, 49))
    assert counts == [1, 0]


def test_a_mixer():
    """Both layers over the tokens of a mixer get zeros, in training, and the loss and gradients are near eager's."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(49, 40), nn.GELU(), nn.Linear(40, 49)).bfloat16()
    norm, x = nn.LayerNorm(16).bfloat16(), random(2, 49, 16)

    def fn(x):
        return (x + layers(norm(x).mT).mT).float().square().mean()

    compiled, counts = compiled_by(pad_products, fn, inductor=True)
    got, want = (torch.autograd.grad(call(x), [*layers.parameters()]) for call in (compiled, fn))
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, atol=0.02 * float(other.abs().max()), rtol=0.02)
    assert counts == [2]


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        pytest.param(lambda x, w: F.linear(x, w).squeeze_(-1), (random(30, 49), random(1, 49)), id="squeezed in place"),
        pytest.param(torch.matmul, (random(1, 49), random(49, 30)), id="one row"),
    ],
)
def test_the_result_has_eagers_strides(fn, args):
    """Also where the zeros' columns could be left out without a copy, or a method changes the result's sizes."""
    compiled, _ = compiled_by(pad_products, fn)
    found, wanted = compiled(*args), fn(*args)
    assert_close(found, wanted)
    assert found.stride() == wanted.stride()


class Packed(torch.Tensor):
    """A weight that only a linear layer can read."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.bfloat16)

    def __init__(self, values):
        self.values = values

    def __tensor_flatten__(self):
        return ["values"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Packed(inner["values"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Packed(args[0].values)
        if func is torch.ops.aten.t.default:
            return args[0].values.to(torch.bfloat16).t()
        raise NotImplementedError(f"Packed: {func}")


def test_a_weight_of_another_class_stays():
    """It need not have what would pad it."""
    weight = Packed(torch.randint(-9, 9, (30, 49), dtype=torch.int8))
    compiled, counts = compiled_by(pad_products, F.linear)
    with torch.no_grad():
        assert_close(compiled(X, weight), F.linear(X, weight))
    assert counts == [0]
