"""Tensors that broadcast, multiplied and summed, become products of matrices."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import backend_kwargs as bk
from backend_kwargs.rewrites.contraction import contract_products
from backend_kwargs.rewrites.matrix_vector import multiply_and_sum
from tests.rewrites.on_a_cpu import compiled_by

A, B, D = torch.randn(2, 16, 8), torch.randn(2, 24, 8), torch.randn(2, 16, 24)  # rows, columns and a number for each
V, S = torch.randn(2, 8), torch.rand(())
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def product(a, b):
    """Return all products of rows of `a` and `b`: [batch, rows, columns, width]."""
    return a[:, :, None] * b[:, None]


FORMS = {
    "method": lambda a, b: product(a, b).sum(-1),
    "function": lambda a, b: torch.sum(product(a, b), dim=3),
    "keepdim": lambda a, b: product(a, b).sum(-1, keepdim=True),
    "NumPy's names": lambda a, b: product(a, b).sum(axis=-1, keepdims=True),
    "dtype": lambda a, b: product(a, b).sum(-1, dtype=torch.float64),
    "mean": lambda a, b: product(a, b).mean(-1),
    "several dims": lambda a, b: (a.unflatten(2, (2, 4))[:, :, None] * b.unflatten(2, (2, 4))[:, None]).mean((-1, 3)),
    "the batch too": lambda a, b: torch.mean(product(a, b), (0, -1), keepdim=True),
    "all of size 1 too": lambda a, b: (a[:1, :, None] * b[:1, None]).sum((0, 3)),
    "torch.mul": lambda a, b: torch.mul(other=a.unsqueeze(2), input=b.unsqueeze(1)).sum(-1),
    "torch.multiply": lambda a, b: torch.multiply(a.unsqueeze(2), b.unsqueeze(1)).sum(-1),
    "method mul": lambda a, b: a.unsqueeze(2).mul(b.unsqueeze(1)).sum(-1),
    "__mul__": lambda a, b: a.unsqueeze(2).__mul__(b.unsqueeze(1)).sum(-1),
    "in the middle": lambda a, b: (a.mT[..., None] * b.permute(0, 2, 1)[:, :, None]).sum(1),
    "expanded": lambda a, b: (a[:, :, None].expand(-1, -1, 24, -1) * b[:, None]).sum(-1),
    "expanded and permuted": lambda a, b: (a[:, None].expand(2, 24, 16, 8).transpose(1, 2) * b[:, None]).sum(-1),
    "permuted after": lambda a, b: product(a, b).permute(0, 3, 2, 1).sum(1),
    "unsqueezed after": lambda a, b: product(a, b)[None, ..., None].sum(-2),
    "joined by a view": lambda a, b: product(a, b).view(2, 16 * 24, 8).sum(-1),
    "joined twice": lambda a, b: product(a, b).flatten(1, 2).flatten(0, 1).sum(-1),
    "joined and summed": lambda a, b: (a.view(2, 16, 2, 4)[:, :, None] * b.view(2, 1, 24, 2, 4)).flatten(3).sum(-1),
    "three factors": lambda a, b: (product(a, b) * D[..., None]).sum(-1),
    "three factors, one of the sum": lambda a, b: (V[:, None, None] * product(a, b)).sum(-1),
    "three factors, one of rows": lambda a, b: (product(a, b) * V[:, None, None, :1]).sum(-1),
    "a number": lambda a, b: (0.5 * product(a, b) * 2 * S).sum(-1),
    "layers written out": lambda a, b: (a[0][:, None] * b[0]).sum(-1),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form(form):
    """It has eager's numbers, dtype, sizes and strides."""
    fn, counts = compiled_by(contract_products, FORMS[form])
    got, want = fn(A, B), FORMS[form](A, B)
    assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert [s for s, n in zip(got.stride(), got.shape, strict=True) if n > 1] == [
        s for s, n in zip(want.stride(), want.shape, strict=True) if n > 1
    ]
    assert counts == [1]


@pytest.mark.parametrize("form", FORMS)
def test_gradients(form):
    """Gradients of gradients too are those of eager, in float64 up to its rounding."""
    given = [each.double().requires_grad_() for each in (A, B)]
    fn, counts = compiled_by(contract_products, FORMS[form])

    def gradients(fn):
        first = torch.autograd.grad(fn(*given).square().sum(), given, create_graph=True)
        return first, torch.autograd.grad(sum(each.square().sum() for each in first), given)

    assert_close(gradients(fn), gradients(FORMS[form]), rtol=1e-12, atol=1e-12)
    assert counts == [1]


def squares(a, b):
    made = product(a, b)
    return (made * made).sum(-1)


def other_user(a, b):
    made = product(a, b)
    return made.sum(-1), made.amax(-1)


def shared_view(a, b):
    repeated = a[:, None].expand(2, 24, 16, 8)
    return (repeated.transpose(1, 2) * b[:, None]).sum(-1), repeated


def written_operand(a, b):
    copy = a.clone()
    made = product(copy, b)
    copy.zero_()
    return made.sum(-1)


def written_view(a, b):
    made = product(a, b)
    made[0].zero_()
    return made.sum(-1)


NEAR = {
    "the same sizes": lambda a, b: (a * b[:, :16]).sum(-1),
    "a matrix and a vector": lambda a, b: (a * V[:, None]).sum(-1),
    "one operand": lambda a, b: (a[:, :, None] * 2).sum(-1),
    "no product": lambda a, b: (a[:, :, None] + b[:, None]).sum(-1),
    "three times larger": lambda a, b: product(a[:, :6], b[:, :6]).sum(-1),
    "three summands": lambda a, b: product(a[..., :3], b[..., :3]).sum(-1),
    "sum of one operand's": lambda a, b: product(a, b).sum(1),
    "sum of everything": lambda a, b: product(a, b).sum(),
    "a number": lambda a, b: (a[0, 0, 0] * b[0, 0, 0]).sum(),
    "no elements": lambda a, b: product(a, b[:, :0]).sum(-1),
    "nothing to sum": lambda a, b: product(a[..., :0], b[..., :0]).sum(-1),
    "a repeated view that is used twice": shared_view,
    "a square": squares,
    "another user": other_user,
    "a user of a view": lambda a, b: [v := product(a, b)[None], v.sum(-1)],
    "integers": lambda a, b: product(a.long(), b.long()).sum(-1),
    "integers and floats": lambda a, b: product(a.long(), b).sum(-1),
    "bools": lambda a, b: product(a > 0, b > 0).sum(-1),
    "a sum of integers": lambda a, b: product(a, b).sum(-1, dtype=torch.long),
    "complex": lambda a, b: product(a + 1j, b).sum(-1),
    "three operands of a sum": lambda a, b: (a[0][:, None, None] * a[1][:, None] * b[0]).sum(-1),
    "a slice of the product": lambda a, b: product(a, b)[:, 1:].sum(-1),
    "the product as other numbers": lambda a, b: product(a, b).view(torch.float64).sum(-1),
    "out=": lambda a, b: torch.mul(a[:, :, None], b[:, None], out=torch.empty(2, 16, 24, 8)).sum(-1),
    "an operand that changes": written_operand,
    "a product that changes": written_view,
}


@pytest.mark.parametrize("form", NEAR)
def test_others_stay(form):
    """What is no product of matrices, not several times larger, not of floats, or used otherwise, stays as it is."""
    fn, counts = compiled_by(contract_products, NEAR[form])
    assert_close(fn(A, B), NEAR[form](A, B), rtol=0, atol=0, equal_nan=True)
    assert not any(counts)


@pytest.mark.parametrize(("rows", "count"), [(7, 0), (8, 1)])
def test_how_much_larger_a_product_must_be(rows, count):
    """It must be four times as large as its operands together."""
    fn, counts = compiled_by(contract_products, FORMS["method"])
    fn(A[:, :rows], B[:, :8])
    assert counts == [count]


@pytest.mark.parametrize(
    ("dtype", "scaled", "inductor"),
    [
        *((dtype, scaled, False) for dtype in DTYPES for scaled in (False, True)),
        (torch.float32, True, True),
        (torch.bfloat16, False, True),
    ],
    ids=str,
)
def test_error_is_at_most_inductors(dtype, scaled, inductor):
    """The distance to float64, of results and gradients, is that of Inductor's code."""
    given = [torch.randn(each.shape).to(dtype).requires_grad_() for each in (A, B, D)]

    def fn(a, b, d):
        return (product(a, b) * d[..., None] if scaled else product(a, b)).sum(-1)

    def errors(fn):
        ways = [(fn, given), (twin, [each.detach().double().requires_grad_() for each in given])]
        made = [call(*args) for call, args in ways]
        wanted = [args[: 2 + scaled] for _, args in ways]
        factor = torch.linspace(-1, 1, made[0].numel()).view(made[0].shape)
        got, exact = ([y, *torch.autograd.grad(y, w, factor.to(y.dtype))] for y, w in zip(made, wanted, strict=True))
        return [(one.double() - other).square().mean().sqrt() for one, other in zip(got, exact, strict=True)]

    twin = fn
    rewritten, counts = compiled_by(contract_products, fn, inductor=inductor)
    ours = errors(rewritten)
    assert counts == [1]
    torch._dynamo.reset()
    default = errors(torch.compile(fn))
    assert all(our <= 1.05 * its + 1e-7 for our, its in zip(ours, default, strict=True)), (ours, default)


@pytest.mark.parametrize(
    ("one", "other", "options", "dtype"),
    [
        (torch.bfloat16, torch.float32, {}, torch.float32),
        (torch.bfloat16, torch.float16, {}, torch.float32),
        (torch.float64, torch.bfloat16, {}, torch.float64),
        (torch.bfloat16, torch.bfloat16, {"dtype": torch.float32}, torch.float32),
        (torch.float32, torch.float32, {"dtype": torch.float16}, torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_dtypes_promote_as_of_mul(one, other, options, dtype, reduction):
    """Operands of two dtypes give what `mul` makes of them, and the sum has its `dtype`."""

    def fn(a, b):
        return getattr(product(a, b), reduction)(-1, **options)

    a, b = A.to(one), B.to(other)
    compiled, counts = compiled_by(contract_products, fn)
    got, exact = compiled(a, b), getattr(product(a.double(), b.double()), reduction)(-1)
    assert got.dtype == dtype
    assert (got - exact).abs().max() <= (fn(a, b) - exact).abs().max() + 1e-6
    assert counts == [1]


def test_halves_are_summed_in_float32():
    """Partial sums that float16 could not hold, and a mean of numbers whose sum is infinite in it."""
    a = torch.full((16, 2048), 16.0, dtype=torch.float16)

    def fn(a, b):
        made = a[:, None] * b
        return made.sum(-1), (a[:, None] * (b * 16)).mean(-1)

    compiled, counts = compiled_by(contract_products, fn, inductor=True)
    total, mean = compiled(a, a / 16)
    assert (total == 2048 * 16).all()
    assert (mean == 256).all()
    assert counts == [2]


@pytest.mark.parametrize("inside", [False, True], ids=["around the call", "in the function"])
@pytest.mark.parametrize("inductor", [False, True], ids=["as it is", "Inductor"])
def test_under_autocast_nothing_is_rounded(inside, inductor):
    """Autocast leaves `mul` and `sum` as they are, and so the product that replaces them, and its gradients."""
    given = [each.clone().requires_grad_() for each in (A, B)]

    def cast(fn):
        with torch.autocast("cpu", torch.bfloat16):
            return fn(*given)

    fn, counts = compiled_by(contract_products, lambda a, b: cast(FORMS["method"]) if inside else FORMS["method"](a, b),
                             inductor=inductor)  # fmt: skip
    got = fn(*given) if inside else cast(fn)
    want = FORMS["method"](*given)
    assert_close(got, want, rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad(each.square().sum(), given) for each in (got, want)]
    assert_close(*gradients, rtol=1e-5, atol=1e-5)
    assert counts == [1]


@pytest.mark.parametrize("recorded", [[], [0], [1], [2], [0, 1], [0, 2], [1, 2]], ids=str)
def test_parts_without_gradients(recorded):
    """Gradients are recorded where they were: of a view of an operand, the product, a view of it and the sum."""

    def fn(a, b):
        with torch.set_grad_enabled(0 in recorded):
            made = b[:, None]
        made = a[:, :, None] * made
        with torch.set_grad_enabled(1 in recorded):
            made = made[..., None, :]
        with torch.set_grad_enabled(2 in recorded):
            made = made.sum(-1)
        return made * a[:, :, :1, None]

    given = [each.clone().requires_grad_() for each in (A, B)]
    compiled, counts = compiled_by(contract_products, fn)
    made = [(y, *torch.autograd.grad(y.sum(), given, materialize_grads=True)) for y in (compiled(*given), fn(*given))]
    assert_close(*made, rtol=1e-4, atol=1e-4)
    assert counts == [1 in recorded]  # a view under `no_grad` says that it has a gradient, and has none


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_not_finite_among_three_factors(value, at):
    """The results are eager's; gradients may be infinite where eager's, a sum of infinities of both signs, is nan."""
    given = [each.clone() for each in (A, B, V)]
    given[at][0, 0] = float(value)
    given = [each.requires_grad_() for each in given]

    def fn(a, b, v):
        return (product(a, b) * v[:, None, None]).sum(-1)

    compiled, counts = compiled_by(contract_products, fn)
    (got, ours), (want, theirs) = (
        (y, torch.autograd.grad(y, given, torch.ones_like(y))) for y in (compiled(*given), fn(*given))
    )
    assert_close(got, want, equal_nan=True, rtol=1e-4, atol=1e-4)
    for one, other in zip(ours, theirs, strict=True):
        infinite = other.isnan() & one.isinf() & (value != "nan")
        assert_close(torch.where(infinite, other, one), other, equal_nan=True, rtol=1e-4, atol=1e-4)
    assert counts == [1]


@pytest.mark.parametrize(
    ("form", "vary", "count"),
    [
        pytest.param("method", {0: 0, 1: 0}, 1, id="batch"),
        pytest.param("joined twice", {0: 0, 1: 0}, 1, id="batch of a view"),
        pytest.param("mean", {0: 2, 1: 2}, 1, id="summands"),
        pytest.param("method", {0: 1, 1: 1}, 0, id="rows and columns"),
    ],
)
def test_sizes_that_vary(form, vary, count):
    """One graph serves all sizes, where the product is large enough whatever they are."""
    fn, counts = compiled_by(contract_products, FORMS[form], inductor=True)
    for size in (9, 10, 12):
        args = [torch.randn(32, 32, 32) for _ in range(2)]
        for at, dim in vary.items():
            args[at] = args[at].narrow(dim, 0, size).contiguous()
            torch._dynamo.mark_dynamic(args[at], dim)
        assert_close(fn(*args), FORMS[form](*args), rtol=1e-4, atol=1e-4)
    assert counts == [count]


def test_bounds_of_sizes_are_known():
    """Sizes that vary are large enough where the user has said so."""
    fn, counts = compiled_by(contract_products, FORMS["method"], inductor=True)
    for size in (9, 17):
        args = [torch.randn(2, size, 8) for _ in range(2)]
        for each in args:
            torch._dynamo.mark_dynamic(each, 1, min=8, max=64)
        assert_close(fn(*args), FORMS["method"](*args), rtol=1e-5, atol=1e-5)
    assert counts == [1]


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_sum_may_become_empty(reduction):
    """Where dynamo assumes nothing of the number of summands, none of them sum to 0, and their mean is nan."""
    fn, counts = compiled_by(contract_products, lambda a, b: getattr(product(a, b), reduction)(-1))
    for size in (5, 0):
        args = [torch.randn(2, 16, size), torch.randn(2, 16, size)]
        for each in args:
            torch._dynamo.decorators.mark_unbacked(each, 2, shape_id="summands")
        want = getattr(product(*args), reduction)(-1)
        assert_close(fn(*args), want, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert set(counts) == {1}


# ---- beside other rewrites


def vectors(a, b):
    """Return products of a matrix, shared by a batch, with a vector each, as a library's call and written out."""
    return torch.matmul(a[:1], b.mT.transpose(0, 2).reshape(8, 2, 24).permute(2, 0, 1)[..., :1]), product(a, b).sum(-1)


@pytest.mark.parametrize("first", [contract_products, multiply_and_sum], ids=["first", "last"])
def test_beside_matrix_vector(first):
    """Neither undoes what the other has made, in either order."""
    rewrites = [first, *{contract_products, multiply_and_sum}.difference([first])]
    counts = []

    def both(gm, example_inputs):
        for rewrite in (*rewrites, *rewrites):
            change = rewrite(gm, example_inputs)
            counts.append(change.count if change else 0)
            gm = change.gm if change else gm
        return gm.forward

    assert_close(torch.compile(vectors, backend=both)(A, B), vectors(A, B), rtol=1e-5, atol=1e-5)
    assert counts == [1, 1, 0, 0]


# ---- a model


class StateSpace(nn.Module):
    """A state-space layer as Mamba-2's chunks are computed where no kernel is: with multiplications and sums."""

    def __init__(self, heads=4, width=16, state=16, chunk=32):
        super().__init__()
        self.sizes = heads, width, state, chunk
        self.into = nn.Linear(heads * width, heads * (width + 2 * state + 1))
        self.out = nn.Linear(heads * width, heads * width)

    def forward(self, x):
        heads, width, state, chunk = self.sizes
        parts = self.into(x).unflatten(1, (-1, chunk)).unflatten(3, (heads, -1))
        x_, b, c, dt = parts.split((width, state, state, 1), -1)
        decay = -nn.functional.softplus(dt[..., 0]).permute(0, 3, 1, 2).cumsum(-1)  # batch, heads, chunks, chunk
        segments = (decay[..., :, None] - decay[..., None, :]).tril()
        weights = torch.exp(segments).tril()
        g = (c[:, :, :, None] * b[:, :, None]).sum(dim=-1)  # batch, chunks, l, s, heads
        m = (g[..., None] * weights.permute(0, 2, 3, 4, 1)[..., None]).sum(dim=-1)
        diagonal = (m[..., None] * x_[:, :, None]).sum(3)
        b_decay = b * torch.exp(decay[..., -1:] - decay).permute(0, 2, 3, 1)[..., None]
        states = (b_decay[..., None, :] * x_[..., None]).sum(dim=2)  # batch, chunks, heads, width, state
        before = torch.cat((torch.zeros_like(states[:, :1]), states.cumsum(1)[:, :-1]), 1)
        others = (c[..., None, :] * before[:, :, None]).sum(-1) * torch.exp(decay).permute(0, 2, 3, 1)[..., None]
        return self.out((diagonal + others).flatten(3).flatten(1, 2)) + x


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_state_space_decoder(training, fresh_dynamo):
    """Its scan is four products of matrices in each layer, with gradients, and a report counts them."""
    torch.manual_seed(0)
    model, x = nn.Sequential(StateSpace(), StateSpace()), torch.randn(2, 64, 64)
    compiled = torch.compile(model, backend=bk.make_backend("tmpl-inductor", rewrites=("contraction",)))
    with torch.set_grad_enabled(training):
        got, want = compiled(x), model(x)
    assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert bk.report(compiled).graphs[0].rewritten == {"contraction": 8}
    if training:
        gradients = [torch.autograd.grad(each.square().sum(), [*model.parameters()]) for each in (got, want)]
        assert_close(*gradients, rtol=1e-3, atol=1e-3)
