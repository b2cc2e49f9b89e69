"""Each operator on values where implementations differ: nan, infinities, signs, halves, ties, bounds."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("tvm")

from torch.nn import functional
from torch.testing import assert_close

from backend_kwargs.backends.partitioned import Unsupported
from backend_kwargs.backends.tvm.lowering import graph as kernels
from backend_kwargs.backends.tvm.lowering.graph import lower
from tests.backends.tvm.lowered import by_tvm, node_of, runs, traced, with_constants

aten = torch.ops.aten
STRANGE = [
    0.0,
    -0.0,
    math.nan,
    math.inf,
    -math.inf,
    1e-40,
    1e-6,
    0.3,
    0.5,
    1.5,
    2.5,
    3.0,
    20.0,
    88.0,
    95.0,
    104.0,
    1e30,
]
VALUES = torch.tensor([sign * value for value in STRANGE for sign in (1, -1)])
UNARY = [
    *(torch.abs, torch.acos, torch.acosh, torch.asin, torch.asinh, torch.atan, torch.atanh, torch.ceil, torch.cos),
    *(torch.cosh, torch.erf, torch.exp, torch.exp2, torch.expm1, torch.floor, torch.log, torch.log10, torch.log1p),
    *(
        torch.log2,
        torch.neg,
        torch.reciprocal,
        torch.relu,
        torch.round,
        torch.rsqrt,
        torch.sigmoid,
        torch.sign,
        torch.sin,
    ),
    *(torch.sinh, torch.sqrt, torch.tan, torch.tanh, torch.trunc, torch.isnan, torch.isinf, torch.logical_not),
    *(functional.elu, functional.selu, functional.hardtanh, functional.leaky_relu, torch.bool),
]
PAIRS = [
    *(torch.maximum, torch.minimum, torch.fmod, torch.remainder, torch.atan2, torch.pow, torch.copysign),
    *(torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge, torch.add, torch.sub, torch.mul, torch.div),
    *(torch.floor_divide, torch.logical_and, torch.logical_or, torch.logical_xor),
]


def name_of(function: Any) -> str:
    return getattr(function, "__name__", str(function))


def unlike(functions: list[Any], given: list[torch.Tensor], wanted: tuple[torch.Tensor, ...]) -> dict[str, str]:
    """Return the differences by function."""
    found = {}
    for function, one, other in zip(functions, given, wanted, strict=True):
        try:
            assert_close(one, other, equal_nan=True)
        except AssertionError as error:
            where = ~torch.isclose(one.double(), other.double(), equal_nan=True)
            found[name_of(function)] = f"{one[where][:3].tolist()}, eager {other[where][:3].tolist()}: {error}"
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=name_of)
def test_unary_functions_of_strange_values(dtype):
    """nan is propagated, infinities and signed zeros equal eager's, and halves are rounded once."""
    values = VALUES.to(dtype)

    def all_of(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.to(each) if isinstance(each, torch.dtype) else each(x) for each in UNARY)

    assert unlike(UNARY, by_tvm(all_of, values), all_of(values)) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
def test_binary_functions_of_strange_values(dtype):
    values = VALUES[(VALUES.abs() < 1e-30).logical_not() & ~(VALUES.abs() == 1e30)].to(
        dtype
    )  # eager's fmod fails there
    x, y = values[:, None], values

    def all_of(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(function(x, y) for function in PAIRS)

    assert unlike(PAIRS, by_tvm(all_of, x, y), all_of(x, y)) == {}


@pytest.mark.parametrize(
    "function", [torch.exp, torch.exp2, torch.tanh, torch.erf, torch.sigmoid, torch.expm1], ids=name_of
)
def test_polynomials_are_close_to_the_exact_value(function):
    """Results are within 8 ulp of float32 where they are normal: eager's tolerance is 22."""
    x = torch.cat([torch.linspace(-87, 87, 20001), torch.linspace(-1, 1, 20001)])
    (given,), exact = by_tvm(function, x), function(x.double())
    assert ((given - exact).abs() <= 8 * torch.finfo(torch.float32).eps * exact.abs() + 1e-37).all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8], ids=name_of)
def test_int_division_and_remainder_have_the_signs_of_eager(dtype):
    x = torch.tensor([7, 8, 0, 1, -7, -8, -1] if dtype.is_signed else [7, 8, 0, 1, 200, 255], dtype=dtype)

    def all_of(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(
            result
            for y in ([2, 3, 5, -2, -3] if dtype.is_signed else [2, 3, 5, 100, 255])
            for result in (
                *(torch.div(x, y, rounding_mode=mode) for mode in ("floor", "trunc")),
                *(x // y, x % y, torch.fmod(x, y), x / y, x == y, x + y * 1, x * y, ~x),
            )
        )

    assert_close(by_tvm(all_of, x), list(all_of(x)))


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x, y: x // y, id="floor_divide"),
        pytest.param(lambda x, y: torch.div(x, y, rounding_mode="trunc"), id="div"),
        pytest.param(lambda x, y: x % y, id="remainder"),
        pytest.param(torch.fmod, id="fmod"),
        pytest.param(lambda x, y: x % 0, id="a zero that is known"),
    ],
)
def test_an_int_divided_by_what_may_be_zero_is_eagers(function):
    """Integer division by zero raises in eager; a float's gives inf or nan in both."""
    x, y = torch.tensor([4, 7]), torch.tensor([2, 3])
    with pytest.raises(Unsupported, match="an int divided by what may be zero"):
        lower(traced(function, x, y))
    assert_close(by_tvm(function, x / 1, y), [function(x / 1, y)], equal_nan=True)


CASES: dict[str, tuple[Callable[..., Any], ...]] = {
    "add(alpha)": (lambda x, y: torch.add(x, y, alpha=3),),
    "int + float": (lambda x, y: torch.arange(4) + x,),
    "int == float": (lambda x, y: torch.arange(4) == x,),
    "int / int": (lambda x, y: torch.arange(4) / torch.tensor([2, 3, 5, 7]),),
    "sum of bools": (lambda x, y: (x > 0).sum(),),
    "sum of int32": (lambda x, y: torch.arange(4, dtype=torch.int32).sum(),),
    "mean of all": (lambda x, y: x.mean(),),
    "bool + bool": (lambda x, y: (x > 0) + (y > 0),),
    "bool * bool": (lambda x, y: (x > 0) * (y > 0),),
    "not": (lambda x, y: ~(x > 0),),
    "var": (lambda x, y: x.var(1, correction=0),),
    "var_mean": (
        lambda x, y: torch.var_mean(x, [0, 1], correction=2, keepdim=True),
        lambda x, y: torch.var_mean(x, 1),
        lambda x, y: torch.var_mean(x.view(2, 3, 2), 1),
        lambda x, y: torch.var_mean(x.bfloat16(), 1, keepdim=True),
    ),
    "hardtanh": (lambda x, y: aten.hardtanh(3 * x), lambda x, y: aten.hardtanh(3 * x, -2, 0.5)),
    "amax with nan": (lambda x, y: (x / x).amax(1),),
    "max with nan": (lambda x, y: torch.where(x > 0.5, math.nan, x).max(1),),
    "argmax of equals": (lambda x, y: torch.ones_like(x).argmax(1),),
    "negative index": (lambda x, y: aten._unsafe_index(x, [torch.tensor([-1, 0, -3])]),),
    "index between": (
        lambda x, y: aten._unsafe_index(x.view(3, 2, 2), [torch.tensor([0, -1]), None, torch.tensor([1, 0])]),
        lambda x, y: aten._unsafe_index(x.view(2, 3, 2, 1), [None, torch.tensor([0, -1]), None, torch.tensor([0, 0])]),
    ),
    "transposes": (
        lambda x, y: x.t(),
        lambda x, y: x.view(3, 2, 2).transpose(0, -1),
        lambda x, y: x.view(1, 3, 4).transpose(1, 2),
    ),
    "the last of a dimension": (lambda x, y: x.select(1, -1), lambda x, y: x[-2]),
    "pad of the last dimension": (lambda x, y: functional.pad(x[None], (1, 2)),),
    "arange": (
        lambda x, y: torch.arange(3, device=x.device) + x[0, 0],
        lambda x, y: torch.arange(7, -1, -3, device=x.device) + x[0, 0],
        lambda x, y: torch.arange(0.5, 2, 0.25, device=x.device) + x[0, 0],
    ),
    "powers": (*(partial(lambda exponent, x, y: x.abs() ** exponent, e) for e in (-2, -1, -0.5, 0, 0.5, 1, 2, 3)),),
    "isinf of integers": (lambda x, y: torch.isinf(torch.arange(4)) | (x > 0),),
    "arguments of extremes": (lambda x, y: x.argmin(1), lambda x, y: x.argmin(), lambda x, y: x.argmax(0)),
    "linear of three dimensions": (lambda x, y: functional.linear(x.view(2, 2, 3), y.view(4, 3)),),
    "half": (lambda x, y: x.half().sum(1), lambda x, y: x.half().amax(1), lambda x, y: x.half().mean()),
    "upsampled": (lambda x, y: functional.interpolate(x[None, None], scale_factor=1.7),),
    "roll": (lambda x, y: x.roll((1, -6, 9), (0, 1, 1)), lambda x, y: x[0].roll(-1)),
    "negative step": (lambda x, y: x.flip(0, 1),),
    "slice": (lambda x, y: x[-2:, 1::2],),
    "cat": (lambda x, y: torch.cat([x, y, torch.arange(4).expand(1, 4)]),),
    "split": (lambda x, y: x.split([1, 3], 1),),
    "full": (lambda x, y: torch.full((2, 2), -math.inf) + x[0, 0],),
    "masked softmax": (lambda x, y: torch.softmax(torch.where(x > 0, x, -math.inf), -1),),
    "softmax in half": (lambda x, y: torch.softmax(x.half() * 100, 0),),
    "log_softmax": (lambda x, y: torch.log_softmax(x * 1000, -1),),
    "gelu": (lambda x, y: functional.gelu(9 * x), lambda x, y: functional.gelu(9 * x, approximate="tanh")),
    "clamp": (lambda x, y: x.clamp(-0.1, None), lambda x, y: x.clamp(None, 0.1), lambda x, y: x.clamp(y, y + 1)),
    "matmul in bfloat16": (lambda x, y: x.bfloat16() @ y.bfloat16().T,),
    "addmm(alpha, beta)": (lambda x, y: torch.addmm(torch.full((3,), math.nan), x, y.T, beta=0, alpha=2),),
    "round to even": (lambda x, y: torch.round(torch.tensor([0.5, 1.5, 2.5, -0.5]) + 0 * x),),
    "pad": (lambda x, y: functional.pad(x, (1, -1, 0, 2), value=-math.inf),),
    "scatter of slices": (lambda x, y: torch.slice_scatter(x, y[:2], 0, -2, None),),
    "every second of a slice": (lambda x, y: torch.slice_scatter(x, y[:, :2] * 2, 1, 0, None, 2) + x,),
    "diagonal": (lambda x, y: x.diagonal(1), lambda x, y: (x + y).diagonal(-1).exp()),
    "smallest magnitude": (lambda x, y: torch.linalg.vector_norm(x - y, -math.inf, 1).exp(),),
}


def test_a_size_that_only_an_integer_input_holds():
    """An integer input gives a symbol its value if no tensor has that size."""
    x = torch.randn(3)
    (made,) = by_tvm(lambda x, n: torch.full((n,), 2.0) + x.sum(), x, 5, mode="symbolic")
    assert_close(made, torch.full((5,), 2.0) + x.sum())


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    """Corner cases, some of which TVM's own importers get wrong."""
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    for function in CASES[name]:
        wanted = function(x, y)
        assert_close(by_tvm(function, x, y), [*wanted] if isinstance(wanted, tuple) else [wanted], equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_relu_keeps_a_negative_zero_and_nan(dtype):
    x = torch.tensor([-0.0, 0.0, -1.0, 2.0, math.nan], dtype=dtype)
    (made,) = by_tvm(lambda x: x.relu(), x)
    assert_close(made, x.relu(), equal_nan=True)
    assert made[0].signbit() == x.relu()[0].signbit()


@pytest.mark.parametrize("length", [2, 5], ids=["short", "long"])
def test_a_slice_from_the_end_of_a_symbolic_size(length):
    """A slice that starts three from the end takes what there is."""
    x = torch.randn(length, 4)
    (made,) = by_tvm(lambda x: x[-3:] * 2, x, mode="symbolic")
    assert_close(made, x[-3:] * 2)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0:UserWarning")
def test_a_variance_without_degrees_of_freedom_is_infinite():
    """If the correction exceeds the count the divisor is zero, as in eager, and not negative."""

    def scaled(x):
        return (x * 2).var(1, correction=9)

    x = torch.randn(3, 4)
    assert_close(by_tvm(scaled, x, mode="symbolic"), [scaled(x)])


WINDOWS = {
    "conv1d": lambda x: functional.conv1d(x[:, :, 0], torch.ones(4, 2, 3), torch.ones(4), 2, 1, groups=2),
    "conv2d": lambda x: functional.conv2d(x, torch.ones(6, 4, 3, 2), None, (2, 1), (1, 0), (1, 2)),
    "conv2d in half": lambda x: functional.conv2d(x.half(), torch.ones(6, 4, 3, 3).half()),
    "avg_pool2d": lambda x: functional.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    "avg_pool2d, padding counted": lambda x: functional.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "avg_pool2d, divisor given": lambda x: functional.avg_pool2d(x, 3, 2, 1, divisor_override=5),
    "pools of one element": lambda x: (
        functional.avg_pool2d(x, 1, 2),
        *functional.max_pool2d(x, 1, return_indices=True),
    ),
    "max_pool2d": lambda x: functional.max_pool2d(x, 3, 2, 1, 2, return_indices=True),
    "max_pool2d without indices": lambda x: functional.max_pool2d(x, 2, ceil_mode=True),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name):
    x = torch.randn(2, 4, 9, 8).round(decimals=1)  # with equals
    wanted = WINDOWS[name](x)
    given = by_tvm(WINDOWS[name], x)
    assert_close(given, [*wanted] if isinstance(wanted, tuple) else [wanted], rtol=1e-3, atol=1e-3)


def test_long_float32_sums_keep_their_digits():
    """A sum of ten million float32 terms is as accurate as eager's, unlike a single running total."""
    x = torch.full((1 << 22,), 1.1)
    (total, mean), wanted = by_tvm(lambda x: (x.sum(), x.mean()), x), x.double().sum()
    assert_close(total.double(), wanted, rtol=1e-6, atol=0)
    assert_close(mean, torch.tensor(1.1))


def test_an_index_out_of_bounds_reads_no_other_memory():
    """An index that torch asserts to be in bounds is clamped in TVM's code."""
    x, index = torch.tensor([10.0, 20.0, 30.0]), torch.tensor([5, -7])
    gm = traced(lambda x, index: aten._unsafe_index(x, [index]), x, torch.tensor([0, 1]))
    (given,) = runs(lower(gm), ["x_1", "index_1"])(x, index)
    assert given.tolist() == [30.0, 10.0]


def test_one_module_serves_all_sizes():
    gm = traced(
        lambda x, w: functional.softmax(x @ w, -1).reshape(-1), torch.randn(6, 4), torch.randn(4, 5), mode="symbolic"
    )
    run = runs(lower(gm), ["x_1", "w_1"])
    for rows in (2, 7):
        x, w = torch.randn(rows, 4), torch.randn(4, 5)
        assert_close(run(x, w)[0], functional.softmax(x @ w, -1).reshape(-1))


def test_constants_are_bound():
    """An attribute of the graph is a constant, and no input of the module."""
    x, w = torch.randn(3, 4), torch.randn(4, 5)
    lowered = lower(with_constants(traced(torch.mm, x, w), {"arg1_1": w}))
    assert lowered.inputs == ("arg0_1",)
    assert_close(runs(lowered, ["arg0_1"])(x)[0], x @ w)


def test_unsupported_says_which_node_and_why():
    gm = traced(lambda x: torch.sort(x)[0], torch.randn(3))
    with pytest.raises(Unsupported) as e:
        lower(gm)
    assert str(e.value) == "sort: no converter"
    assert e.value.node is node_of(gm, "sort.default")


def test_a_result_of_another_type_or_shape_is_unsupported(monkeypatch):
    """A converter's wrong dtype or shape is found before anything runs."""
    from backend_kwargs.backends.tvm.lowering.graph import CONVERTERS
    from backend_kwargs.backends.tvm.lowering.node import compute

    gm = traced(torch.relu, torch.randn(3, 4))
    monkeypatch.setitem(CONVERTERS, "relu", lambda node, x: compute((3, 4), lambda i: x(*i).astype("int32")))
    with pytest.raises(Unsupported, match="TVM gives int32, torch float32"):
        lower(gm)
    monkeypatch.setitem(CONVERTERS, "relu", lambda node, x: compute((3, 1), lambda i: x(*i)))
    with pytest.raises(Unsupported, match=r"TVM gives shape .*, torch \(3, 4\)"):
        lower(gm)


def test_each_distinct_node_is_converted_once(monkeypatch, fresh_dynamo):
    """A node that is asked about and then lowered is converted once, and so are all nodes that are alike."""
    converted = []

    def counting(converter):
        def convert(node, *args, **kwargs):
            converted.append(str(node.fx.target))
            return converter(node, *args, **kwargs)

        return convert

    counted = {name: counting(converter) for name, converter in kernels.CONVERTERS.items()}
    monkeypatch.setattr(kernels, "CONVERTERS", counted)
    model = torch.nn.Sequential(*(layer for _ in range(3) for layer in (torch.nn.Tanh(), torch.nn.LayerNorm(16))))
    with torch.no_grad():
        torch.compile(model, backend="tmpl-tvm")(torch.randn(4, 16))
    assert sorted(converted) == [
        "aten.add.Tensor",
        "aten.add.Tensor",
        "aten.mul.Tensor",
        "aten.mul.Tensor",
        "aten.rsqrt.default",
        "aten.sub.Tensor",
        "aten.tanh.default",
        "aten.var_mean.correction",
    ]
