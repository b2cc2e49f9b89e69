"""What a sealed call reads of its arguments, the inputs that are made for a warm-up, and which results are right."""

import inspect
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch

import backend_kwargs as bk
from backend_kwargs.bundles.samples import Sample
from backend_kwargs.sealing.calls import Checks, Result, leaves_of, resized, with_leaves
from backend_kwargs.sealing.declared import Declared, Reader, UndeclaredError, places_of

# ---- sizes of a call


def called(x, *rest, scale=1, named=None, **others):
    return x


def places(example, dims, **given):
    sizes = {name: [2, 3, 4] for each in dims.values() for name in each.values()}
    declared = Declared.read(dims, sizes | given.pop("sizes", {}), given.pop("buckets", None), None)
    return declared, places_of(declared, leaves_of(inspect.signature(called), Sample(*example)))


ONES = {size: torch.ones(size, 5) for size in (2, 3, 4)}
Pair = namedtuple("Pair", "x y")


@dataclass
class Holder:
    inner: torch.Tensor


torch.export.register_dataclass(Holder)
CALLS = {
    "argument": ("x", lambda x: ((x,), {})),
    "argument by its name": ("x", lambda x: ((), {"x": x})),
    "list": ("x.1", lambda x: (([0, x],), {})),
    "tuple": ("x.1", lambda x: (((0, x, 2),), {})),
    "namedtuple": ("x.x", lambda x: ((Pair(x, 1),), {})),
    "dict": ("x.inner.0", lambda x: (({"inner": [x], "also": 1},), {})),
    "object": ("x.inner", lambda x: ((Holder(x),), {})),
    "further argument": ("rest.1", lambda x: ((0, 1, x), {})),
    "keyword alone": ("named", lambda x: ((0,), {"named": x})),
    "further keyword": ("others.mask", lambda x: ((0,), {"mask": x})),
}


@pytest.mark.parametrize(("name", "call"), CALLS.values(), ids=CALLS)
def test_where_a_tensor_is(name, call):
    """Its size is read there, and another tensor is put there in copies of what holds it."""
    declared, (place,) = places(call(ONES[2]), {name: {0: "n"}})
    args, kwargs = call(ONES[3])
    assert Reader(declared, [place])(args, kwargs) == ({"n": 3}, {})
    own, named = with_leaves(Sample(args, kwargs), [(place, ONES[4])])
    assert place.get(own, named) is ONES[4]
    assert place.get(args, kwargs) is ONES[3]
    assert [type(each) for each in own] == [type(each) for each in args]


def undeclared(dims, args, kwargs=None, **given):
    """Return why a call was not declared, with what it had."""
    declared, found = places(((), {name: torch.ones(2, 5) for name in ("x", *dims)}), dims, **given)
    with pytest.raises(UndeclaredError) as raised:
        Reader(declared, found)(args, kwargs or {})
    return str(raised.value), raised.value.got


X, BOTH = {"x": {0: "n"}}, {"x": {0: "n"}, "named": {0: "n"}}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        pytest.param((X, (torch.ones(9, 5),)), ("'n' has a size that was not declared", "9"), id="size"),
        pytest.param((X, (torch.ones(2),)), ("input 'x' has 1 dimensions, declared with 2", ""), id="fewer dimensions"),
        pytest.param((X, (torch.ones(2, 5, 1),)), ("input 'x' has 3 dimensions, declared with 2", ""), id="more"),
        pytest.param((X, ([2, 5],)), ("input 'x' must be a tensor", ""), id="a list"),
        pytest.param((X, ()), ("input 'x' must be a tensor", ""), id="none"),
        pytest.param(
            (BOTH, (ONES[2],), {"named": ONES[3]}), ("'n' has two sizes in one call", "2 and 3"), id="two sizes"
        ),
        pytest.param(({"x": {-2: "n"}}, (torch.ones(9, 2),)), ("'n' has a size that was not declared", "9"), id="end"),
    ],
)
def test_calls_that_were_not_declared(given, why):
    """The input and what it had are said."""
    assert undeclared(*given) == why


def test_buckets_of_a_call():
    """What is a bucket's size is not padded, and what is below it is."""
    declared, found = places(((ONES[2],), {}), X, buckets={"n": [2, 4]}, sizes={"n": range(1, 5)})
    assert [Reader(declared, found)((torch.ones(n, 5),), {})[1] for n in (1, 2, 3, 4)] == [{"n": 2}, {}, {"n": 4}, {}]


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        pytest.param(
            {"scale": {0: "n"}}, "Input 'scale', which `dims` names, must be a tensor, got 1 (int).", id="a number"
        ),
        pytest.param({"x": {-3: "n"}}, "Input 'x' has 2 dimensions, but `dims` names dimension -3.", id="before"),
        pytest.param({"x": {2: "n"}}, "Input 'x' has 2 dimensions, but `dims` names dimension 2.", id="behind"),
    ],
)
def test_dimensions_that_are_not_there(dims, message):
    """The input is named, with how many dimensions it has."""
    with pytest.raises(bk.BackendKwargsError) as wrong:
        places(((ONES[2],), {"scale": 1}), dims)
    assert str(wrong.value) == message


# ---- inputs of other sizes

BASE = torch.arange(24.0).view(4, 6)
LAYOUTS = {
    "contiguous": BASE,
    "transposed": BASE.T,
    "double": BASE.double(),
    "integers": BASE.long(),
    "gradient": BASE.clone().requires_grad_(),
    "permuted": BASE.view(2, 3, 4).permute(2, 0, 1),
    "conjugate": torch.complex(BASE, BASE + 1).conj(),
    "minus": torch.complex(BASE, BASE + 1).conj().imag,
    "view": BASE[1:],
}


@pytest.mark.parametrize("size", [1, 2, 9])
@pytest.mark.parametrize("tensor", LAYOUTS.values(), ids=LAYOUTS)
def test_other_sizes(tensor, size):
    """Rows are repeated or left out; dtype, gradient and the order of strides stay, and the result is no view."""
    made = resized(tensor, {0: size})
    rows = [at % tensor.shape[0] for at in range(size)]
    torch.testing.assert_close(made.detach(), tensor.detach()[rows].resolve_conj().resolve_neg(), rtol=0, atol=0)
    assert (made.dtype, made.requires_grad, made._is_view()) == (tensor.dtype, tensor.requires_grad, False)
    if size > 1:
        by_stride = [sorted(range(each.ndim), key=each.stride().__getitem__) for each in (made, tensor)]
        assert by_stride[0] == by_stride[1]
    empty = resized(tensor, {0: size}, values=False)
    assert (empty.shape, empty.stride(), empty.dtype) == (made.shape, made.stride(), made.dtype)
    if tensor.dtype == torch.int64:
        assert not empty.any()


def test_inference_tensors_stay_such():
    """dynamo guards on it."""
    with torch.inference_mode():
        tensor = torch.ones(3)
    assert resized(tensor, {0: 2}).is_inference()
    assert not resized(torch.ones(3), {0: 2}).is_inference()


# ---- which results are right


def difference(one, other, tol=None, gradients=({}, {})):
    return Checks("f", None, tol).difference(Result(one, gradients[0], {}), Result(other, gradients[1], {}))


INF, NAN = float("inf"), float("nan")
NOT_FINITE = "output: NaN or infinity where eager has none, or vice versa"
ONE = torch.tensor([1.0, -1.0])
HALF = torch.ones(2, dtype=torch.float16)
BFLOAT = torch.ones(2, dtype=torch.bfloat16)
RESULTS = {
    "equal": (ONE, ONE.clone(), ""),
    "rounding": (ONE * 1.0005, ONE, ""),
    "wrong": (ONE * 1.002, ONE, "output: error 0.002, above tol=0.001"),
    "rounding in half": (HALF * 1.02, HALF, ""),
    "rounding in bfloat16": (BFLOAT * 1.02, BFLOAT, ""),
    "wrong in half": (HALF * 1.05, HALF, "output: error 0.05, above tol=0.03"),
    "integers": (torch.tensor([1, 1000]), torch.tensor([1, 1001]), "output: the values differ from eager's"),
    "dtype": (ONE.double(), ONE, "output: eager's dtype is torch.float32, this one's torch.float64"),
    "shape": (ONE[:1], ONE, "output: eager's shape is (2,), this one's (1,)"),
    "no tensor": (1.0, ONE, "output: eager gives Tensor, this one float"),
    "number": ([ONE, 2], [ONE, 3], "output[1]: the values differ from eager's"),
    "structure": ([ONE], (ONE,), "the output has another structure"),
    "second": ([ONE, -ONE], [ONE, ONE], "output[1]: error 2, above tol=0.001"),
    "the same infinity": (torch.tensor([INF, -INF, 1]), torch.tensor([INF, -INF, 1]), ""),
    "the other infinity": (
        torch.tensor([INF, 1]),
        torch.tensor([-INF, 1]),
        NOT_FINITE,
    ),
    "both NaN": (torch.tensor([NAN, 1]), torch.tensor([NAN, 1]), ""),
    "NaN": (
        torch.tensor([NAN, 1]),
        torch.tensor([1.0, 1]),
        NOT_FINITE,
    ),
    "NaN for infinity": (
        torch.tensor([NAN, 1]),
        torch.tensor([INF, 1]),
        NOT_FINITE,
    ),
    "nearly zero beside others": ([torch.zeros(2), ONE], [torch.full((2,), 1e-6), ONE], ""),
    "small beside others": (
        [torch.zeros(2), ONE],
        [torch.full((2,), 1e-3), ONE],
        "output[0]: error 0.1, above tol=0.001",
    ),
    "nearly zero": (torch.full((2,), 1e-6), torch.zeros(2), ""),
    "empty": (torch.zeros(0), torch.zeros(0), ""),
}


@pytest.mark.parametrize(("one", "other", "why"), RESULTS.values(), ids=RESULTS)
def test_which_results_are_right(one, other, why):
    """Each leaf of a result is compared with eager's; the first that differs is named, with how much."""
    assert difference(one, other) == why


def test_a_bound_of_the_user():
    """`tol` is the bound for all types."""
    assert difference(ONE * 1.05, ONE, 0.1) == ""
    assert difference(HALF * 1.02, HALF, 0.01).endswith("above tol=0.01")


def test_results_under_autocast():
    """Their inputs were rounded, though they are float32."""
    with torch.autocast("cpu"):
        assert difference(ONE * 1.02, ONE) == ""


@pytest.mark.parametrize(
    ("mine", "theirs", "why"),
    [
        pytest.param({}, {"w": torch.zeros(2)}, "", id="zero in eager"),
        pytest.param({"w": torch.zeros(2)}, {}, "", id="zero where compiled"),
        pytest.param({}, {"w": ONE}, "gradient[0]: error 1, above tol=0.001", id="missing"),
        pytest.param({"w": ONE}, {}, "gradient[0]: error 1, above tol=0.001", id="too many"),
        pytest.param({"w": ONE, "v": -ONE}, {"v": -ONE, "w": ONE}, "", id="another order"),
    ],
)
def test_which_gradients_are_right(mine, theirs, why):
    """A gradient that one of them lacks counts as zero."""
    assert difference(ONE, ONE, gradients=(mine, theirs)) == why


def test_what_draws_is_found_without_a_seed():
    """Other threads draw from the same generators meanwhile."""
    seeds = []

    def run(_):
        seeds.append(torch.initial_seed())
        return Result(torch.rand(2), {}, {})

    torch.manual_seed(7)
    assert Checks("f", run, None).eager(tuple) is None
    assert {*seeds} == {7}
