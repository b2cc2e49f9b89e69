"""Pointwise operators: each as a function of numbers, with torch's type promotion."""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.te import Tensor
from tvm.tirx import Expr

from backend_kwargs.backends.part_compiler import Unsupported
from backend_kwargs.backends.tvm.lowering import vector
from backend_kwargs.backends.tvm.lowering.node import (
    Converter,
    Node,
    cast,
    compute,
    computed_in,
    dtype,
    is_float,
    isnan,
    load,
    unequal,
)
from backend_kwargs.backends.tvm.lowering.vector import const
from backend_kwargs.backends.tvm.opaque import value_of
from backend_kwargs.torch_internals.decompositions import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND
from backend_kwargs.torch_internals.decompositions import elementwise_dtypes

FALSE = tirx.const(False, "bool")
SAME, FLOAT, BOOL, LONG = KIND.DEFAULT, KIND.INT_TO_FLOAT, KIND.ALWAYS_BOOL, KIND.BOOL_TO_LONG


@dataclass(frozen=True)
class Pointwise:
    """A function of numbers, its type promotion, and the arguments that are tensors or take part in promotion."""

    value: Callable[..., Expr]
    kind: KIND = SAME
    operands: int | None = None
    defaults: tuple[float | None, ...] = ()

    def __call__(self, node: Node, *args: Any, **kwargs: Any) -> Tensor:
        """Lower a node: load, cast to the dtype of the computation, compute, cast to the output's dtype."""
        args = (*args, *self.defaults[len(args) :]) if self.defaults else args
        count = len(args) if self.operands is None else self.operands
        promoted = [fake for fake in node.fakes[:count] if fake is not None]
        within = computed_in(dtype(elementwise_dtypes(*promoted, type_promotion_kind=self.kind)[0]))

        def element(index: tuple[Expr, ...]) -> Expr:
            numbers = [x if x is None else cast(load(x, index), within) for x in args[:count]]
            return cast(self.value(*numbers, *args[count:], **kwargs), node.dtype)

        return compute(node.shape, element)


def libm(name: str) -> Callable[..., Expr]:
    """Return a function of C's math library, where TVM has no intrinsic or an inaccurate one."""
    return lambda *xs: tirx.call_pure_extern(xs[0].ty.dtype, name + "f" * (xs[0].ty.dtype == "float32"), *xs)


modulo = libm("fmod")


def maximum(x: Expr, y: Expr) -> Expr:
    """Return the larger number, nan if one is nan."""
    return tirx.Select(first_wins(x, x > y), x, y) if is_float(x.ty.dtype) else tirx.max(x, y)


def minimum(x: Expr, y: Expr) -> Expr:
    """Return the smaller number, nan if one is nan."""
    return tirx.Select(first_wins(x, x < y), x, y) if is_float(x.ty.dtype) else tirx.min(x, y)


def first_wins(x: Expr, beyond: Expr) -> Expr:
    """Return the condition for x to win, such that nan wins: a comparison with nan is false."""
    value = value_of(x)
    return beyond if value is not None and not math.isnan(value) else tirx.any(isnan(x), beyond)


def clamp(x: Expr, low: Expr | None, high: Expr | None) -> Expr:
    """Return x clamped to bounds, either of which may be None."""
    x = x if low is None else maximum(low, x)
    return x if high is None else minimum(high, x)


def add(x: Expr, y: Expr, alpha: float = 1) -> Expr:
    """Return x + alpha y."""
    return x + (y if alpha == 1 else y * const(alpha, y))


def nonzero(x: Expr) -> Expr:
    """Return the divisor of an int, which must be a nonzero constant: eager raises for zeros, and TVM cannot."""
    if not value_of(x):
        raise Unsupported("division", "an int divided by what may be zero")
    return x


def remainder(x: Expr, y: Expr) -> Expr:
    """Return the remainder with the divisor's sign."""
    if not is_float(x.ty.dtype):
        return tirx.floormod(x, nonzero(y))
    rest = modulo(x, y)
    return tirx.Select(
        tirx.all(unequal(rest, const(0, x)), unequal(rest < const(0, x), y < const(0, x))), rest + y, rest
    )


def fmod(x: Expr, y: Expr) -> Expr:
    """Return the remainder with the dividend's sign."""
    return modulo(x, y) if is_float(x.ty.dtype) else tirx.truncmod(x, nonzero(y))


def floor_divide(x: Expr, y: Expr) -> Expr:
    """Return the quotient rounded down; for floats from the remainder, as in ATen."""
    if not is_float(x.ty.dtype):
        return tirx.floordiv(x, nonzero(y))
    rest = modulo(x, y)
    quotient = (x - rest) / y
    quotient = quotient - cast(
        tirx.all(unequal(rest, const(0, x)), unequal(rest < const(0, x), y < const(0, x))), x.ty.dtype
    )
    down = tirx.floor(quotient)
    down = tirx.Select(quotient - down > const(0.5, x), down + const(1, x), down)
    return tirx.Select(
        tirx.EQ(y, const(0, y)),
        x / y,
        tirx.Select(tirx.EQ(quotient, const(0, x)), tirx.copysign(const(0, x), x / y), down),
    )


def divide(x: Expr, y: Expr, rounding_mode: str | None = None) -> Expr:
    """Return the quotient in the given rounding mode."""
    if rounding_mode == "floor":
        return floor_divide(x, y)
    if rounding_mode == "trunc" and not is_float(x.ty.dtype):
        return tirx.truncdiv(x, nonzero(y))
    return tirx.trunc(x / y) if rounding_mode else x / y


def rounded(function: Callable[[Expr], Expr]) -> Callable[[Expr], Expr]:
    """Return a rounding function that does not change ints."""
    return lambda x: function(x) if is_float(x.ty.dtype) else x


def expm1(x: Expr) -> Expr:
    """Return exp(x) - 1 without cancellation: tanh(x/2) * (exp(x) + 1) near zero."""
    near = vector.tanh(x * const(0.5, x)) * (vector.exp(x) + const(1, x))
    return tirx.Select(tirx.abs(x) < const(0.5, x), near, vector.exp(x) - const(1, x))


def power(x: Expr, y: Expr) -> Expr:
    """Return x to the y; small whole powers by multiplication."""
    exponent = value_of(y)
    if exponent in POWERS and is_float(x.ty.dtype):
        return POWERS[exponent](x)
    if is_float(x.ty.dtype):
        return tirx.pow(x, y)
    if exponent is not None and 0 <= exponent <= 64:
        return math.prod([x] * exponent, start=const(1, x))
    raise Unsupported("pow", "an int to a power that is no small number")


POWERS = {
    0.0: lambda x: const(1, x),
    1.0: lambda x: x,
    2.0: lambda x: x * x,
    3.0: lambda x: x * x * x,
    0.5: tirx.sqrt,
    -0.5: lambda x: const(1, x) / tirx.sqrt(x),
    -1.0: lambda x: const(1, x) / x,
    -2.0: lambda x: const(1, x) / (x * x),
}


def truth(function: Callable[..., Expr]) -> Pointwise:
    """Return a function of bools."""
    return Pointwise(lambda *xs: function(*(unequal(x, const(0, x)) for x in xs)), BOOL)


INTRINSICS = ("exp2", "log", "log2", "log10", "sqrt", "sin", "cos", "copysign")
LIBM = ("erfc", "hypot", "log1p", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh", "acosh", "atanh")
POINTWISE: dict[str, Converter] = {
    **{name: Pointwise(getattr(tirx, name), FLOAT) for name in INTRINSICS},
    **{name: Pointwise(getattr(vector, name), FLOAT) for name in ("tanh", "erf", "exp")},
    **{name: Pointwise(libm(name), FLOAT) for name in LIBM},
    **{name: Pointwise(rounded(getattr(tirx, name))) for name in ("floor", "ceil", "trunc")},
    **{name: Pointwise(getattr(operator, name), BOOL) for name in ("lt", "le", "gt", "ge")},
    **{name: Pointwise(getattr(tirx, name)) for name in ("bitwise_and", "bitwise_or", "bitwise_xor")},
    "add": Pointwise(add, operands=2),
    "sub": Pointwise(lambda x, y, alpha=1: add(x, y, -alpha) if alpha != 1 else x - y, operands=2),
    "mul": Pointwise(operator.mul),
    "div.Tensor": Pointwise(divide, FLOAT),
    "div.Scalar": Pointwise(divide, FLOAT),
    "remainder": Pointwise(remainder),
    "fmod": Pointwise(fmod),
    "pow": Pointwise(power, LONG),
    "maximum": Pointwise(maximum),
    "fmax": Pointwise(lambda x, y: tirx.Select(isnan(x), y, tirx.Select(isnan(y), x, maximum(x, y)))),
    "fmin": Pointwise(lambda x, y: tirx.Select(isnan(x), y, tirx.Select(isnan(y), x, minimum(x, y)))),
    "minimum": Pointwise(minimum),
    "clamp": Pointwise(clamp, operands=3, defaults=(None, None, None)),
    "relu": Pointwise(lambda x: tirx.Select(x < const(0, x), const(0, x), x)),
    "sigmoid": Pointwise(lambda x: const(1, x) / (const(1, x) + vector.exp(-x)), FLOAT),
    "expm1": Pointwise(expm1, FLOAT),
    "rsqrt": Pointwise(lambda x: const(1, x) / tirx.sqrt(x), FLOAT),
    "reciprocal": Pointwise(lambda x: const(1, x) / x, FLOAT),
    "neg": Pointwise(lambda x: -x if is_float(x.ty.dtype) else const(0, x) - x),
    "abs": Pointwise(lambda x: x if str(x.ty.dtype).startswith("uint") else tirx.abs(x)),
    "sign": Pointwise(lambda x: cast(x > const(0, x), x.ty.dtype) - cast(x < const(0, x), x.ty.dtype)),  # 0 for nan
    "round.default": Pointwise(rounded(tirx.nearbyint)),
    "isnan": Pointwise(isnan, BOOL),
    "isinf": Pointwise(lambda x: tirx.EQ(tirx.abs(x), const(math.inf, x)) if is_float(x.ty.dtype) else FALSE, BOOL),
    "eq": Pointwise(tirx.EQ, BOOL),
    "ne": Pointwise(unequal, BOOL),
    "logical_and": truth(tirx.all),
    "logical_or": truth(tirx.any),
    "logical_not": truth(tirx.Not),
    "logical_xor": truth(unequal),
}


def invert(node: Node, x: Tensor) -> Tensor:
    """Lower bitwise_not, which is logical for bools."""
    turned = tirx.Not if node.dtype == "bool" else tirx.bitwise_not
    return compute(node.shape, lambda index: turned(load(x, index)))


def divide_in_mode(node: Node, *args: Any, rounding_mode: str | None = None) -> Tensor:
    """Lower div with a rounding mode, without which ints become floats."""
    return Pointwise(divide, SAME if rounding_mode else FLOAT)(node, *args, rounding_mode=rounding_mode)


def convert(node: Node, x: Tensor, *_: object, **__: object) -> Tensor:
    """Lower a copy with another dtype or another shape."""
    return compute(node.shape, lambda index: cast(load(x, index), node.dtype))


def select(node: Node, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Lower where."""
    return compute(
        node.shape,
        lambda index: tirx.Select(
            cast(load(condition, index), "bool"), cast(load(x, index), node.dtype), cast(load(y, index), node.dtype)
        ),
    )


def filled(node: Node, *size_and_value: Any, **_: object) -> Tensor:
    """Lower a tensor filled with one number, the last argument."""
    return compute(node.shape, lambda _: cast(size_and_value[-1], node.dtype))


POINTWISE |= {
    "bitwise_not": invert,
    "div": divide_in_mode,
    "_to_copy": convert,
    "convert_element_type": convert,
    "expand": convert,
    "copy": lambda node, _, source, *__: convert(node, source),
    "where.self": select,
    **dict.fromkeys(("full", "full_like", "scalar_tensor"), filled),
}
