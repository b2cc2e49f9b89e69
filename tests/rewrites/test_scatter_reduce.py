"""Rows that are reduced into the rows of their indices, in the order of the indices."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from backend_kwargs.rewrites.scatter_reduce import reduce_in_segments, rows_in_order
from backend_kwargs.rewrites.traced import place_of
from tests.rewrites.lowering import agrees
from tests.rewrites.on_a_cpu import compiled_by

ROWS, WIDTH = 9, 6
INDEX = torch.randint(ROWS - 1, (40,), generator=torch.Generator().manual_seed(0))  # none is in the last row
SRC = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(1))
TARGET = torch.linspace(-2, 2, ROWS * WIDTH).view(ROWS, WIDTH)

# Rows in the host's memory match only there.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


def wide(i, s):
    """Return an index for each number, as torch_geometric makes it."""
    return i.view(-1, *[1] * (s.dim() - 1)).expand_as(s)


def zeros(s):
    return s.new_zeros((ROWS, *s.shape[1:]))


# Each of rows and their indices.
FORMS = {
    "largest": lambda s, i: zeros(s).scatter_reduce_(0, wide(i, s), s, reduce="amax", include_self=False),
    "smallest of own": lambda s, i: TARGET.to(s).scatter_reduce(-2, wide(i, s), s, "amin"),
    "mean": lambda s, i: torch.scatter_reduce(TARGET.to(s), 0, wide(i, s), src=s, reduce="mean", include_self=False),
    "mean of own": lambda s, i: TARGET.to(s).scatter_reduce(0, wide(i, s), s, reduce="mean"),
    "sum": lambda s, i: zeros(s).scatter_add_(0, wide(i, s), s),
    "added": lambda s, i: torch.scatter_add(TARGET.to(s), dim=0, index=wide(i, s), src=s),
    "index_add": lambda s, i: TARGET.to(s).index_add(0, i, s),
    "index_add in place": lambda s, i: (
        torch.zeros_like(TARGET).to(s.dtype).new_full((ROWS, WIDTH), 2).index_add_(0, i, s)
    ),
    "index_add by keywords": lambda s, i: torch.index_add(TARGET.to(s), dim=-2, index=i, source=s, alpha=1),
    "index_reduce": lambda s, i: torch.index_reduce(TARGET.to(s), 0, i, s, "amax", include_self=False),
    "int32": lambda s, i: TARGET.to(s).index_add(0, i.int(), s),
    "strided": lambda s, i: TARGET.to(s).index_add(0, i.repeat_interleave(2)[::2], torch.cat((s, s), 1)[:, :WIDTH]),
    "heads": lambda s, i: zeros(s.view(-1, 2, 3)).scatter_add_(0, wide(i, s.view(-1, 2, 3)), s.view(-1, 2, 3)),
}


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
@pytest.mark.parametrize("inductor", [False, True], ids=["as it is", "Inductor"])
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_each_form(form, inductor):
    """Each spelling of a sum, a mean, the largest or the smallest, also in rows that nothing is reduced into."""
    fn, counts = compiled_by(reduce_in_segments, FORMS[form], inductor=inductor)
    got, want = fn(SRC, INDEX), FORMS[form](SRC, INDEX)
    assert_close(got, want)
    assert got.stride() == want.stride()
    assert counts == [1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["largest", "sum", "mean of own"])
@torch.no_grad()
def test_half_precision(form, dtype):
    """A half is rounded once: the error to float64 is at most that of ATen, which adds in the dtype."""
    fn, counts = compiled_by(reduce_in_segments, FORMS[form])
    many = SRC.repeat(9, 1).to(dtype), INDEX.repeat(9)
    agrees(fn(*many), FORMS[form], many)
    exact = FORMS[form](many[0].double(), many[1])
    errors = [float((each.double() - exact).abs().max()) for each in (fn(*many), FORMS[form](*many))]
    assert errors[0] <= errors[1]
    assert counts == [1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("form", ["largest", "smallest of own", "sum", "mean"])
@torch.no_grad()
def test_not_finite(form, value):
    """Nan or an infinity comes out as in eager."""
    fn, counts = compiled_by(reduce_in_segments, FORMS[form])
    src = SRC.index_fill(0, torch.tensor(3), value)
    assert_close(fn(src, INDEX), FORMS[form](src, INDEX), equal_nan=True)
    assert counts == [1]


def orders_of(fn, *args):
    """Return how many orders the rewritten graph makes, after checking its result."""
    found = []

    def backend(gm, example_inputs):
        change = reduce_in_segments(gm, example_inputs)
        found.append(sum(node.target is rows_in_order for node in change.gm.graph.nodes))
        return change.gm.forward

    with torch.no_grad():
        want = fn(*(each.clone() for each in args))
        assert_close(torch.compile(fn, backend=backend)(*(each.clone() for each in args)), want)
    return found


def test_layers_share_an_order(fresh_dynamo):
    """Calls that read the same indices, each by its own views, sort them once."""
    edges = torch.stack((INDEX.flip(0), INDEX))

    def layers(s, edges):
        one = zeros(s).scatter_reduce_(0, wide(edges[1], s), s, "amax", include_self=False)
        s = one[edges[0]]
        return zeros(s).index_add_(0, edges[1], s), zeros(s).index_add_(0, edges[0], s)

    assert orders_of(layers, SRC, edges) == [2]


def test_indices_that_change_are_sorted_again(fresh_dynamo):
    """A write into the indices between two calls is seen by the second."""

    def fn(s, i):
        one = zeros(s).index_add_(0, i, s)
        i.add_(1)
        return one, zeros(s).index_add_(0, i, s)

    assert orders_of(fn, SRC, INDEX) == [2]


@torch.no_grad()
def test_sizes_may_vary():
    """One graph serves other numbers of rows, on both sides."""

    def fn(s, i, t):
        return t.index_add(0, i, s)

    compiled, counts = compiled_by(reduce_in_segments, fn)
    for rows, targets in ((40, 9), (70, 20), (90, 30)):
        args = torch.randn(rows, WIDTH), torch.randint(targets, (rows,)), torch.randn(targets, WIDTH)
        assert_close(compiled(*args), fn(*args))
    assert counts == [1, 1]  # the second graph has symbols


OTHERS = {
    "a product": lambda s, i: zeros(s).scatter_reduce(0, wide(i, s), s, "prod"),
    "columns": lambda s, i: s.new_zeros(40, WIDTH).scatter_add(1, wide(i, s) % WIDTH, s),
    "an index for each number": lambda s, i: zeros(s).scatter_add(0, wide(i, s).contiguous(), s),
    "fewer columns": lambda s, i: zeros(s).scatter_add(0, wide(i, s)[:, :4], s),
    "a factor": lambda s, i: zeros(s).index_add(0, i, s, alpha=2),
    "numbers": lambda s, i: s.new_zeros(ROWS).index_add(0, i, s[:, 0]),
    "integers": lambda s, i: TARGET.long().index_add(0, i, s.long()),
    "float64": lambda s, i: TARGET.double().index_add(0, i, s.double()),
    "a transposed target": lambda s, i: s.new_zeros(WIDTH, ROWS).t().index_add(0, i, s),
    "no rows": lambda s, i: zeros(s).index_add(0, i[:0], s[:0]),
}


@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_others_stay(name):
    """Other reductions, indices and dtypes stay as they are."""
    fn, counts = compiled_by(reduce_in_segments, OTHERS[name])
    assert_close(fn(SRC.clone(), INDEX), OTHERS[name](SRC.clone(), INDEX))
    assert counts == [0]


@torch.no_grad()
def test_calls_that_share_an_order_are_one_place():
    """Those that are chosen are replaced, whichever comes first."""
    found = []

    def wanted(nodes):
        found.append(place_of("scatter_reduce", nodes).signature)
        return True

    def backend(gm, inputs):
        assert reduce_in_segments(gm, inputs, wanted).count == 3
        return gm.forward

    def fn(s, i):
        for _ in range(3):
            s = zeros(s).scatter_add_(0, wide(i, s), s)[i]
        return s

    torch._dynamo.reset()
    torch.compile(fn, backend=backend)(SRC, INDEX)
    assert len(set(found)) == 1


WRITES = {
    "an argument": lambda s, i: s.index_add_(0, i, s.clone()),
    "what is read too": lambda s, i: (own := zeros(s)) + own.index_add_(0, i, s),
    "a view": lambda s, i: (own := s.new_ones(2, ROWS, WIDTH), own[1].index_add_(0, i, s))[0],
    "heads of an argument": lambda s, i: (heads := s.view(-1, 2, 3)).scatter_add_(0, wide(i, heads), heads.clone()),
}


@pytest.mark.parametrize("inductor", [False, True], ids=["as it is", "Inductor"])
@pytest.mark.parametrize("name", WRITES)
@torch.no_grad()
def test_what_is_written_in_place(name, inductor):
    """Whoever reads that memory sees what eager writes, in arguments too."""
    fn, counts = compiled_by(reduce_in_segments, WRITES[name], inductor=inductor)
    args, others = (SRC.clone(), INDEX), (SRC.clone(), INDEX)
    assert_close(fn(*args), WRITES[name](*others))
    assert_close(args[0], others[0])
    assert counts == [1]


def test_gradients_stay():
    """Rows that need gradients are left to torch; under no_grad they match."""
    src = nn.Parameter(SRC)
    fn, counts = compiled_by(reduce_in_segments, FORMS["sum"])
    fn(src, INDEX).sum().backward()
    assert_close(src.grad, torch.ones_like(SRC))
    with torch.no_grad():
        assert not fn(src, INDEX).requires_grad
    assert counts == [0, 1]


@torch.no_grad()
def test_deterministic_algorithms_stay():
    """Rows of one index are added in any order, so nothing matches where results must be the same each time."""
    fn, counts = compiled_by(reduce_in_segments, FORMS["sum"])
    torch.use_deterministic_algorithms(True)
    try:
        assert_close(fn(SRC, INDEX), FORMS["sum"](SRC, INDEX))
    finally:
        torch.use_deterministic_algorithms(False)
    assert counts == [0]
