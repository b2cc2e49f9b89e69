"""One node during lowering: its fake output and inputs, its sizes and dtypes in TVM's form.

Sizes, sympy expressions in torch, become TVM's; `ShapeSource` says which input gives each symbol its value.
"""

import functools
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
from backend_kwargs.graphs.parts import expression
from backend_kwargs.torch_internals.symbols import CleanDiv, FloorDiv, Max, Min, Mod, PythonMod

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
    read = {expression(size) for value in values if isinstance(value, torch.Tensor) for size in value.shape}
    return [_source(symbol, names, values) for symbol in sorted(symbols, key=str) if symbol not in read]


def _source(symbol: sympy.Symbol, names: Sequence[str], values: Inputs) -> ShapeSource:
    """Return where a symbol's value is read. Raises Unsupported."""
    for name, value in zip(names, values, strict=True):
        sizes = enumerate(value.shape) if isinstance(value, torch.Tensor) else [(None, value)]
        for dim, size in sizes:
            solved = _solved(size, symbol)
            if solved is not None:
                return ShapeSource(symbol, name, dim, solved)
    raise Unsupported("sizes", f"no input determines the value of {symbol}")


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
        args: tuple[Any, ...] = fx.node.map_arg(self.fx.args, lambda node: node.meta["val"])
        return args

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

    def deny(self, reason: str) -> Unsupported:
        """Return the exception with the reason why the node must run in eager."""
        return Unsupported(self.fx, reason)


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


def axis(dim: int, rank: int) -> int:
    """Return a dimension counted from the front."""
    return dim + rank if dim < 0 else dim


def replaced(index: Index, at: int, value: Expr) -> list[Expr]:
    """Return an index with one element replaced."""
    return [*index[:at], value, *index[at + 1 :]]
