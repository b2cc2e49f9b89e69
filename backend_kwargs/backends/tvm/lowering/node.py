"""One node during lowering: its fake output and inputs, its sizes and dtypes in TVM's form."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx
from tvm import te, tirx
from tvm.te import Tensor
from tvm.tirx import Expr, Var

from backend_kwargs.backends.part_compiler import Unsupported
from backend_kwargs.backends.tvm import opaque
from backend_kwargs.backends.tvm.shapes import to_tvm

DTYPES = {
    getattr(torch, name): name
    for name in ("bool", "uint8", *(f"int{n}" for n in (8, 16, 32, 64)), "float16", "bfloat16", "float32", "float64")
}
# The dtypes in which half precision is computed, as in ATen; and bool, for which + and * have another meaning.
COMPUTED_IN = {"float16": "float32", "bfloat16": "float32", "bool": "int32"}

Index: TypeAlias = Sequence[Expr]  # of an element of a tensor
Converter: TypeAlias = Callable[..., Tensor | list[Tensor | None]]  # of a Node, and of its arguments in TVM's form


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
