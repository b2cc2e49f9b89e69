"""Batched products of a matrix and a vector become multiply and sum."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import backend_kwargs as bk
from backend_kwargs.backends.generated_code import rewrites_made
from backend_kwargs.facts import CompileFacts
from backend_kwargs.rewrites import traced
from backend_kwargs.rewrites.matrix_vector import multiply_and_sum
from tests.rewrites.on_a_cpu import compiled_by

FORMS = {
    "matmul": torch.matmul,
    "@": lambda a, b: a @ b,
    "method": lambda a, b: a.matmul(b),
    "bmm": torch.bmm,
    "method bmm": lambda a, b: a.bmm(b),
}
SHAPES = [((4, 6, 5), (4, 5, 1)), ((4, 1, 5), (4, 5, 6)), ((4, 1, 5), (4, 5, 1)), ((4, 1, 5), (4, 5, 0))]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("inductor", [False, True], ids=["as it is", "Inductor"])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_each_form(form, shapes, inductor):
    """Products with a column, with a row, of two vectors, and of nothing, in each form that dynamo captures."""
    torch.manual_seed(0)
    a, b = (torch.randn(shape) for shape in shapes)
    fn, counts = compiled_by(multiply_and_sum, FORMS[form], inductor=inductor)
    assert_close(fn(a, b), FORMS[form](a, b))
    assert counts == [1]


@settings(max_examples=25, deadline=None)
@given(
    batch=st.sampled_from([(3,), (2, 3), (1, 3), (2, 1)]),
    other=st.sampled_from([(3,), (1,), (2, 3)]),
    rows=st.integers(1, 5),
    summands=st.integers(2, 40),
    column=st.booleans(),
    strided=st.booleans(),
    dtype=st.sampled_from([*TOLERANCE]),
)
def test_against_float64(batch, other, rows, summands, column, strided, dtype):
    """Whatever broadcasts, in each dtype and layout, the result is within rounding of float64, and has eager's form."""
    torch.manual_seed(rows)
    matrix = torch.randn(*batch, rows, summands).to(dtype)
    if strided:
        matrix = matrix.transpose(-1, -2).contiguous().transpose(-1, -2)
    vector = torch.randn(*other, summands, 1).to(dtype)
    args = (matrix, vector) if column else (vector.mT, matrix.mT)
    expected = torch.matmul(*(each.double() for each in args))
    fn, counts = compiled_by(multiply_and_sum, torch.matmul)
    found = fn(*args)
    assert found.dtype == dtype
    assert found.shape == expected.shape
    assert_close(found.double(), expected, atol=TOLERANCE[dtype] * summands**0.5, rtol=TOLERANCE[dtype])
    assert counts == [1]


@pytest.mark.parametrize(
    ("dtype", "row", "column"),
    [
        pytest.param(torch.float16, (300.0, 300.0, 1.0), (300.0, -300.0, 1.0), id="products beyond float16"),
        pytest.param(torch.float16, (1 + 2**-10, 1.0), (1 - 2**-10, -1.0), id="products between float16's"),
        pytest.param(torch.bfloat16, (1 + 2**-7, 1.0), (1 - 2**-7, -1.0), id="products between bfloat16's"),
    ],
)
def test_products_of_halves_are_those_of_float32(dtype, row, column):
    """A product that a half cannot hold is not rounded before it is summed, whichever operand is the vector."""
    matrix = torch.tensor(row, dtype=dtype).repeat(2, 3, 1)
    vector = torch.tensor(column, dtype=dtype)[:, None].repeat(2, 1, 1)
    fn, counts = compiled_by(multiply_and_sum, torch.matmul)
    for args in ((matrix, vector), (vector.mT, matrix.mT)):
        found = fn(*args)
        assert found.dtype == dtype
        assert torch.equal(found.double(), torch.matmul(*(each.double() for each in args)))
    assert counts == [1, 1]


def test_halves_are_summed_in_float32():
    """A sum whose partial sums float16 could not hold exactly is rounded once."""
    a = torch.full((2, 3, 256), 16.0, dtype=torch.float16)
    b = torch.full((2, 256, 1), 15.9, dtype=torch.float16)
    fn, _ = compiled_by(multiply_and_sum, torch.matmul, inductor=True)
    assert_close(fn(a, b), (a.double() @ b.double()).half())


def test_gradients_are_the_same():
    """Both operands have the gradients of a product."""
    torch.manual_seed(0)
    given = torch.randn(3, 4, 5, requires_grad=True), torch.randn(3, 5, 1, requires_grad=True)
    fn, counts = compiled_by(multiply_and_sum, lambda a, b: (a @ b).square(), inductor=True)
    found = torch.autograd.grad(fn(*given).sum(), given)
    assert_close(found, torch.autograd.grad((given[0] @ given[1]).square().sum(), given))
    assert counts == [1]


def attends(q, k, v):
    scores = torch.matmul(q, k.transpose(-1, -2)) / 8
    return torch.matmul(torch.softmax(scores.float(), -1).to(q.dtype), v)


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        pytest.param(torch.matmul, ((4, 6, 5), (4, 5, 2)), id="two matrices"),
        pytest.param(torch.matmul, ((6, 5), (5, 1)), id="no batch"),
        pytest.param(torch.matmul, ((4, 6, 5), (5, 1)), id="a linear layer with one feature"),
        pytest.param(torch.matmul, ((4, 6, 5), (5,)), id="a vector"),
        pytest.param(torch.matmul, ((4, 6, 1), (4, 1, 1)), id="nothing to sum"),
        pytest.param(torch.matmul, ((2, 3, 257), (2, 257, 1)), id="a long sum"),
        pytest.param(attends, ((2, 3, 1, 8), (2, 3, 5, 8), (2, 3, 5, 8)), id="attention of one query"),
    ],
)
def test_others_stay(fn, shapes):
    """Products of matrices, of long vectors, without a batch, and those of attention stay as they are."""
    args = [torch.randn(shape) for shape in shapes]
    compiled, counts = compiled_by(multiply_and_sum, fn)
    assert_close(compiled(*args), fn(*args))
    assert counts == [0]


def change_of(fn, *args):
    """Return what the rewrite makes of a function's graph."""
    changes = []

    def backend(gm, example_inputs):
        changes.append(multiply_and_sum(gm, example_inputs))
        return gm.forward

    torch.compile(fn, backend=backend)(*args)
    return changes[0]


def steps(count):
    """Return a product and a softmax with so many calls between them, before it or after it."""

    def after(a, b):
        scores = a @ b
        for _ in range(count):
            scores = scores + 1
        return torch.softmax(scores, -2)

    def before(a, b):
        scores = torch.softmax(a, -1)
        for _ in range(count):
            scores = scores + 1
        return scores @ b

    return after, before


@pytest.mark.parametrize(("count", "stays"), [(7, True), (8, False)])
@pytest.mark.parametrize("at", [0, 1], ids=["after", "before"])
def test_how_far_a_softmax_may_be(at, count, stays):
    """Attention that is spelt out has a softmax within eight calls of its products."""
    fn, counts = compiled_by(multiply_and_sum, steps(count)[at])
    a, b = torch.randn(2, 3, 4), torch.randn(2, 4, 1)
    assert_close(fn(a, b), steps(count)[at](a, b))
    assert counts == [not stays]


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(lambda a, b: torch.softmax(((a @ b) @ b.mT) @ b, -2), id="behind another product"),
        pytest.param(lambda softmax, b: softmax @ b, id="the name of an input"),
    ],
)
def test_a_softmax_of_others(fn):
    """Only the product next to a softmax is attention's, and a user's name of an input is no softmax."""
    a, b = torch.randn(2, 3, 4), torch.randn(2, 4, 1)
    compiled, counts = compiled_by(multiply_and_sum, fn)
    assert_close(compiled(a, b), fn(a, b))
    assert counts == [1]


def test_a_sum_of_varying_length_stays():
    """How many summands there will be is not known."""
    fn, counts = compiled_by(multiply_and_sum, torch.matmul)
    a, b = torch.randn(2, 3, 16), torch.randn(2, 16, 1)
    torch._dynamo.mark_dynamic(a, 2)
    torch._dynamo.mark_dynamic(b, 1)
    assert_close(fn(a, b), a @ b)
    assert counts == [0]


@pytest.mark.parametrize("summands", [2, 256])
def test_the_shortest_and_the_longest_sum(summands):
    """Two summands are worth it, and 256 still fit."""
    a, b = torch.randn(2, 3, summands), torch.randn(2, summands, 1)
    fn, counts = compiled_by(multiply_and_sum, torch.matmul)
    assert_close(fn(a, b), a @ b, atol=1e-4, rtol=1e-4)
    assert counts == [1]


def test_integers_and_doubles_stay():
    """Only dtypes of a GPU's products are rewritten."""
    fn, counts = compiled_by(multiply_and_sum, torch.matmul)
    for dtype in (torch.int64, torch.float64):
        fn(torch.ones(2, 3, 4, dtype=dtype), torch.ones(2, 4, 1, dtype=dtype))
    assert counts == [0, 0]


def test_under_autocast_products_stay():
    """Autocast decides the dtype of a product, and not that of a sum."""
    a, b = torch.randn(2, 3, 4), torch.randn(2, 4, 1)

    def fn(a, b):
        with torch.autocast("cpu", torch.bfloat16):
            return a @ b

    compiled, counts = compiled_by(multiply_and_sum, fn)
    assert compiled(a, b).dtype == torch.bfloat16
    assert counts == [0]


def test_rows_may_vary():
    """With symbolic sizes one graph serves other batches and rows."""
    fn, counts = compiled_by(multiply_and_sum, torch.matmul, inductor=True)
    for batch, rows in ((2, 3), (4, 7), (5, 9)):
        a, b = torch.randn(batch, rows, 16), torch.randn(batch, 16, 1)
        torch._dynamo.mark_dynamic(a, (0, 1))
        torch._dynamo.mark_dynamic(b, 0)
        assert_close(fn(a, b), a @ b)
    assert counts == [1]


@pytest.mark.filterwarnings("ignore:Rewrite 'matrix_vector' cannot act")
def test_a_report_counts_them(monkeypatch, fresh_dynamo):
    """The generated code does not show these rewrites, so the compiled graph has their counts."""
    monkeypatch.setattr(traced, "_works", lambda rewrite, inputs: True)
    backend = bk.make_backend("tmpl-inductor", rewrites=("matrix_vector",))
    a, b = torch.randn(2, 3, 4), torch.randn(2, 4, 1)
    compiled = torch.compile(lambda a, b: (a @ b) * (b.mT @ a.mT), backend=backend)
    assert_close(compiled(a, b), (a @ b) * (b.mT @ a.mT))
    (graph,) = bk.report(compiled).graphs
    assert graph.rewritten == {"matrix_vector": 2}
    assert rewrites_made(None, CompileFacts(), {}) == {}
