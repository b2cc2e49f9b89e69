"""One node during lowering: its fake output and inputs, its sizes and dtypes in TVM's form; pointwise operators.

Sizes, sympy expressions in torch, become TVM's; `ShapeSource` says which input gives each symbol its value.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx
from tvm import te, tirx
from tvm.te import Tensor
from tvm.tirx import Expr, Var

from backend_kwargs.backends import Inputs
from backend_kwargs.backends.partitioned import Unsupported
from backend_kwargs.backends.tvm import opaque
from backend_kwargs.backends.tvm.opaque import number, value_of
from backend_kwargs.graphs.parts import expression
from backend_kwargs.torch_internals.symbols import CleanDiv, FloorDiv, Max, Min, Mod, PythonMod
from backend_kwargs.torch_internals.tensors import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND
from backend_kwargs.torch_internals.tensors import elementwise_dtypes

DTYPES = {
    getattr(torch, name): name
    for name in ("bool", "uint8", *(f"int{n}" for n in (8, 16, 32, 64)), "float16", "bfloat16", "float32", "float64")
}
# The dtypes in which half precision is computed, as in ATen; and bool, for which + and * have another meaning.
COMPUTED_IN = {"float16": "float32", "bfloat16": "float32", "bool": "int32"}

Index: TypeAlias = Sequence[Expr]  # of an element of a tensor
Converter: TypeAlias = Callable[..., Tensor | list[Tensor | None]]  # of a Node, and of its arguments in TVM's form


# torch's sizes are never negative, so floor and truncation agree.
OPERATORS: dict[type[sympy.Expr], Callable[[list[tirx.Expr]], tirx.Expr]] = {
    sympy.Add: functools.partial(functools.reduce, operator.add),
    sympy.Mul: functools.partial(functools.reduce, operator.mul),
    Max: functools.partial(functools.reduce, tirx.max),
    Min: functools.partial(functools.reduce, tirx.min),
    **dict.fromkeys((FloorDiv, CleanDiv), lambda args: tirx.floordiv(*args)),
    **dict.fromkeys((Mod, PythonMod), lambda args: tirx.floormod(*args)),
}


@dataclass(frozen=True)
class ShapeSource:
    """The source of one symbol's value at run time: an int input, or a tensor's size solved for the symbol."""

    symbol: sympy.Symbol
    placeholder: str
    dim: int | None
    solution: sympy.Expr

    def read(self, inputs: Mapping[str, Any]) -> int:
        """Return the symbol's value for these inputs, by the placeholders' names."""
        value = inputs[self.placeholder]
        size = int(value) if self.dim is None else value.shape[self.dim]
        return size if self.solution == self.symbol else int(self.solution.subs(self.symbol, size))


def to_tvm(size: int | torch.SymInt | sympy.Expr, variables: Mapping[sympy.Symbol, tirx.Var]) -> tirx.Expr:
    """Return a size as a TVM expression over `variables`, an int if it is constant. Raises Unsupported."""
    expr = expression(size)
    if expr.is_Integer:
        return int(expr)
    if expr in variables:
        return variables[expr]
    if expr.is_Pow and expr.exp.is_Integer and expr.exp > 0:
        return functools.reduce(operator.mul, [to_tvm(expr.base, variables)] * int(expr.exp))
    if expr.func not in OPERATORS:
        raise Unsupported("sizes", f"TVM cannot represent the size {expr}")
    sizes = (to_tvm(arg, variables) for arg in expr.args)
    return OPERATORS[expr.func]([tirx.const(each, "int64") if isinstance(each, int) else each for each in sizes])


def unread(names: Sequence[str], values: Inputs, symbols: Iterable[sympy.Symbol]) -> list[ShapeSource]:
    """Return a source for each symbol that is not itself a size of a tensor. Raises Unsupported."""
    sizes: list[tuple[str, int | None, Any]] = []
    for name, value in zip(names, values, strict=True):
        of_tensor = isinstance(value, torch.Tensor)
        sizes += [(name, dim, size) for dim, size in enumerate(value.shape)] if of_tensor else [(name, None, value)]
    read = {expression(size) for _, dim, size in sizes if dim is not None}
    sources = []
    for symbol in sorted(set(symbols) - read, key=str):
        solved = ((name, dim, _solved(size, symbol)) for name, dim, size in sizes)
        found = next((ShapeSource(symbol, *each) for each in solved if each[-1] is not None), None)
        if found is None:
            raise Unsupported("sizes", f"no input determines the value of {symbol}")
        sources.append(found)
    return sources


def _solved(size: object, symbol: sympy.Symbol) -> sympy.Expr | None:
    """Return the symbol as a function of a size's value (written as the symbol), None if it is not determined."""
    if not isinstance(size, torch.SymInt) or expression(size).free_symbols != {symbol}:
        return None
    if not expression(size).is_polynomial(symbol) or sympy.degree(expression(size), symbol) != 1:
        return None
    factor, offset = expression(size).coeff(symbol, 1), expression(size).coeff(symbol, 0)
    return (symbol - offset) / factor


@dataclass(frozen=True)
class Node:
    """The properties of a node that its converter uses."""

    fx: fx.Node
    variables: Mapping[sympy.Symbol, Var]

    @property
    def out(self) -> Any:
        """The fake output, or a tuple of them."""
        return self.fx.meta["val"]

    @property
    def fakes(self) -> tuple[Any, ...]:
        """The positional arguments with fake tensors in place of nodes."""
        return fx.node.map_arg(self.fx.args, lambda node: node.meta["val"])

    @property
    def dtype(self) -> str:
        """The output's dtype in TVM's notation."""
        return dtype(self.out)

    @property
    def shape(self) -> list[Expr]:
        """The output's shape."""
        return self.sizes(self.out.shape)

    def size(self, size: object) -> Expr:
        """Return one size for TVM."""
        return to_tvm(size, self.variables) if isinstance(size, torch.SymInt) else size

    def sizes(self, sizes: Sequence[int | torch.SymInt]) -> list[Expr]:
        """Return sizes for TVM."""
        return [int64(s) if isinstance(s, int) else self.size(s) for s in sizes]

    def used(self, output: int) -> bool:
        """Return whether anything in the graph uses one of several outputs."""
        return any(user.target is not operator.getitem or user.args[1] == output for user in self.fx.users)


def dtype(of: torch.Tensor | torch.dtype) -> str:
    """Return a dtype, or a tensor's, in TVM's notation. Raises Unsupported."""
    given = of if isinstance(of, torch.dtype) else of.dtype
    if given not in DTYPES:
        raise Unsupported("dtype", f"TVM is not used for {str(given).removeprefix('torch.')}")
    return DTYPES[given]


def computed_in(name: str) -> str:
    """Return the dtype in which values of a dtype are computed."""
    return COMPUTED_IN.get(name, name)


def is_float(name: object) -> bool:
    """Return whether a type is a floating one."""
    return "float" in str(name)


def cast(x: Expr | float, to: str) -> Expr:
    """Return a value in another dtype; as bool, anything but zero is true."""
    if isinstance(x, bool | int | float):
        return opaque.number(x, to)
    if x.ty.dtype == to:
        return x
    if to == "bool":
        x = cast(x, computed_in(str(x.ty.dtype)))
        return unequal(x, tirx.const(0, x.ty.dtype))
    if str(x.ty.dtype) == "bool" and is_float(to):
        return x.astype("int32").astype(to)
    return x.astype(to)


def isnan(x: Expr) -> Expr:
    """Return whether a number is nan; an int never is."""
    return opaque.isnan(x) if is_float(x.ty.dtype) else tirx.const(False, "bool")


def unequal(x: Expr, y: Expr) -> Expr:
    """Return whether two numbers differ: TVM's own operator is wrong for nan, and fails for bool."""
    if str(x.ty.dtype) == "bool":
        return tirx.any(tirx.all(x, tirx.Not(y)), tirx.all(y, tirx.Not(x)))
    return tirx.any(x < y, x > y, isnan(x), isnan(y)) if is_float(x.ty.dtype) else tirx.NE(x, y)


def load(x: Expr | float, index: Index) -> Expr:
    """Return an element of a tensor, broadcast as in torch, or the number itself."""
    if not isinstance(x, Tensor):
        return x
    index = index[len(index) - len(x.shape) :]
    return x(*(0 if is_one(size) else i for i, size in zip(index, x.shape, strict=True)))


def is_one(size: object) -> bool:
    """Return whether a size is known to be 1."""
    return isinstance(size, int | tirx.IntImm) and int(size) == 1


def compute(shape: Sequence[Expr], value: Callable[[tuple[Expr, ...]], Expr], name: str = "T") -> Tensor:
    """Return the tensor whose element at an index is `value(index)`."""
    return te.compute(tuple(shape), lambda *index: value(index), name=name)


def cast_to(x: Tensor, dtype: str) -> Tensor:
    """Return a tensor in another dtype, or itself if it has that dtype."""
    return x if x.dtype == dtype else compute(x.shape, lambda i: cast(x(*i), dtype))


def int64(number: int) -> Expr:
    """Return a number in the dtype of TVM's sizes and indices."""
    return tirx.const(number, "int64")


def replaced(index: Index, at: int, value: Expr) -> list[Expr]:
    """Return an index with one element replaced."""
    return [*index[:at], value, *index[at + 1 :]]


# ---- pointwise operators: each as a function of numbers, with torch's type promotion

LOG2E, LN2_HIGH, LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4  # Cephes' expf
EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
# Eigen's rational forms of tanh and erf for float32.
TANH = (
    (-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08, 1.48572235717979e-05,
     6.37261928875436e-04, 4.89352455891786e-03),
    (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03),
)  # fmt: skip
ERF = (
    (-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05, -7.34990630326855e-04,
     -2.95459980854025e-03, -1.60960333262415e-02),
    (-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03, -1.42647390514189e-02),
)  # fmt: skip
FALSE = tirx.const(False, "bool")
SAME, FLOAT, BOOL, LONG = KIND.DEFAULT, KIND.INT_TO_FLOAT, KIND.ALWAYS_BOOL, KIND.BOOL_TO_LONG


@dataclass(frozen=True)
class Pointwise:
    """A function of numbers, its type promotion, and the arguments that are tensors or take part in promotion."""

    value: Callable[..., Expr]
    kind: KIND = SAME
    operands: int | None = None

    def __call__(self, node: Node, *args: Any, **kwargs: Any) -> Tensor:
        """Lower a node: load, cast to the dtype of the computation, compute, cast to the output's dtype."""
        count = len(args) if self.operands is None else self.operands
        args = (*args, *[None] * (count - len(args)))
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
    return tirx.Select(is_opposite(rest, y), rest + y, rest)


def is_opposite(rest: Expr, y: Expr) -> Expr:
    """Return whether a remainder is not zero and has another sign than the divisor."""
    zero = const(0, y)
    return tirx.all(unequal(rest, zero), unequal(rest < zero, y < zero))


def fmod(x: Expr, y: Expr) -> Expr:
    """Return the remainder with the dividend's sign."""
    return modulo(x, y) if is_float(x.ty.dtype) else tirx.truncmod(x, nonzero(y))


def floor_divide(x: Expr, y: Expr) -> Expr:
    """Return the quotient rounded down; for floats from the remainder, as in ATen."""
    if not is_float(x.ty.dtype):
        return tirx.floordiv(x, nonzero(y))
    rest, zero = modulo(x, y), const(0, x)
    quotient = (x - rest) / y - cast(is_opposite(rest, y), x.ty.dtype)
    down = tirx.floor(quotient)
    down = tirx.Select(quotient - down > const(0.5, x), down + const(1, x), down)
    down = tirx.Select(tirx.EQ(quotient, zero), tirx.copysign(zero, x / y), down)
    return tirx.Select(tirx.EQ(y, zero), x / y, down)


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
    near = tanh(x * const(0.5, x)) * (exp(x) + const(1, x))
    return tirx.Select(tirx.abs(x) < const(0.5, x), near, exp(x) - const(1, x))


def power(x: Expr, y: Expr) -> Expr:
    """Return x to the y; small whole powers by multiplication."""
    exponent = value_of(y)
    floats = is_float(x.ty.dtype)
    if exponent in range(4 if floats else 65):
        return math.prod([x] * int(exponent), start=const(1, x))
    if floats:
        return POWERS[exponent](x) if exponent in POWERS else tirx.pow(x, y)
    raise Unsupported("pow", "an int to a power that is no small number")


POWERS = {
    0.5: tirx.sqrt,
    -0.5: lambda x: const(1, x) / tirx.sqrt(x),
    -1.0: lambda x: const(1, x) / x,
    -2.0: lambda x: const(1, x) / (x * x),
}


def truth(function: Callable[..., Expr]) -> Pointwise:
    """Return a function of bools."""
    return Pointwise(lambda *xs: function(*(unequal(x, const(0, x)) for x in xs)), BOOL)


# ---- forms that LLVM vectorizes: a call to libm for each element would dominate the time


def const(value: float, like: Expr) -> Expr:
    """Return a constant of an expression's dtype."""
    return number(value, str(like.ty.dtype))


def horner(x: Expr, coefficients: Sequence[float]) -> Expr:
    """Return the polynomial with these coefficients, from the highest power down."""
    first, *others = (const(c, x) for c in coefficients)
    return functools.reduce(lambda total, c: total * x + c, others, first)


def clamped(x: Expr, low: float, high: float) -> Expr:
    """Return x within bounds, any value there for nan. Each argument is used once, since TVM's trees share nothing."""
    return tirx.min(tirx.max(x, const(low, x)), const(high, x))


def unless_nan(x: Expr, value: Expr) -> Expr:
    """Return a value computed from x, nan if x is nan."""
    return tirx.Select(isnan(x), x, value)


def exp(x: Expr) -> Expr:
    """Return e to the x, within 2 ulp for float32."""
    if x.ty.dtype != "float32":
        return tirx.exp(x)
    within = clamped(x, -105.0, 89.0)
    n = tirx.floor(within * const(LOG2E, x) + const(0.5, x))
    r = within - n * const(LN2_HIGH, x) - n * const(LN2_LOW, x)
    small = horner(r, EXP) * r * r + r + const(1.0, r)
    # In two steps, since 2 to the n may be out of float32's range when the product is not.
    half = tirx.floor(n * const(0.5, n))
    return unless_nan(x, small * power_of_two(half) * power_of_two(n - half))


def power_of_two(n: Expr) -> Expr:
    """Return 2 to the n, for whole n in the range of float32's exponents."""
    return tirx.reinterpret("float32", (n.astype("int32") + 127) << 23)


def rational(x: Expr, bound: float, forms: tuple[Sequence[float], Sequence[float]]) -> Expr:
    """Return x times one polynomial of its square over another, with x within bounds, and the result within 1."""
    within = clamped(x, -bound, bound)
    square = within * within
    return unless_nan(x, clamped(within * horner(square, forms[0]) / horner(square, forms[1]), -1.0, 1.0))


def tanh(x: Expr) -> Expr:
    """Return the hyperbolic tangent; TVM's own cancels near zero."""
    return rational(x, 9.0, TANH) if x.ty.dtype == "float32" else libm("tanh")(x)


def erf(x: Expr) -> Expr:
    """Return the error function."""
    return rational(x, 4.0, ERF) if x.ty.dtype == "float32" else tirx.erf(x)


# ---- the operators

INTRINSICS = ("exp2", "log", "log2", "log10", "sqrt", "sin", "cos", "copysign")
LIBM = ("erfc", "hypot", "log1p", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh", "acosh", "atanh")
POINTWISE: dict[str, Converter] = {
    **{name: Pointwise(getattr(tirx, name), FLOAT) for name in INTRINSICS},
    **{function.__name__: Pointwise(function, FLOAT) for function in (tanh, erf, exp)},
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
    "clamp": Pointwise(clamp, operands=3),
    "relu": Pointwise(lambda x: tirx.Select(x < const(0, x), const(0, x), x)),
    "sigmoid": Pointwise(lambda x: const(1, x) / (const(1, x) + exp(-x)), FLOAT),
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

    def element(index: Index) -> Expr:
        values = (cast(load(each, index), node.dtype) for each in (x, y))
        return tirx.Select(cast(load(condition, index), "bool"), *values)

    return compute(node.shape, element)


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
