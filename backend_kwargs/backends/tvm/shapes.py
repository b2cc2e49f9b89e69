"""Sizes: torch's sympy expressions as TVM's, and the source of each symbol's value."""

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from tvm import tirx

from backend_kwargs.backends import Inputs
from backend_kwargs.backends.part_compiler import Unsupported
from backend_kwargs.graphs.parts import expression
from backend_kwargs.torch_internals.symbols import CleanDiv, FloorDiv, Max, Min, Mod, PythonMod

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
