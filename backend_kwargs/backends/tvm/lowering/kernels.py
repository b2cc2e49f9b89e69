"""Nodes as functions of TVM's: each distinct one of a compile is converted once, whether or not TVM then gets it."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from tvm import relax, tirx
from tvm.relax.utils import gen_call_tir_inputs
from tvm.te import Tensor

from backend_kwargs.backends.part_compiler import Unsupported
from backend_kwargs.backends.tvm.lowering.node import Converter, Node, dtype, is_float
from backend_kwargs.backends.tvm.lowering.pointwise import POINTWISE
from backend_kwargs.backends.tvm.lowering.reductions import REDUCTIONS
from backend_kwargs.backends.tvm.lowering.views import RESHAPED, SAME, VIEWS
from backend_kwargs.backends.tvm.lowering.windows import WINDOWS
from backend_kwargs.backends.tvm.shapes import to_tvm
from backend_kwargs.errors import error_text
from backend_kwargs.graphs.parts import expression, names_of, symbols_of
from backend_kwargs.torch_internals.pytree import tree_flatten, tree_leaves, tree_unflatten

# By overload, or by operator.
CONVERTERS: dict[str, Converter] = {**POINTWISE, **REDUCTIONS, **VIEWS, **WINDOWS}


@dataclass(frozen=True)
class Kernel:
    """A function of a node's tensors and the values of `symbols`, with the dtype of each result, None if it is unused.

    There is no function for a node that only reshapes, or that returns its argument.
    """

    func: tirx.PrimFunc | None = None
    symbols: tuple[sympy.Symbol, ...] = ()
    dtypes: tuple[str | None, ...] = ()


class Kernels:
    """The kernels of one compile; those of another may have other facts about symbols of the same name."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, ...], Kernel | str] = {}

    def of(self, node: fx.Node) -> Kernel:
        """Return the kernel of a node, made once for its operator, arguments, and used results. Raises Unsupported."""
        args = fx.node.map_arg((node.args, node.kwargs), lambda each: _described(each.meta["val"]))
        used = {repr(user.args[1]) for user in node.users if user.target is operator.getitem}
        key = (str(node.target), repr(args), repr(_described(node.meta["val"])), *sorted(used))
        if key not in self._made:
            self._made[key] = _kernel_or_reason(node)
        if isinstance(kernel := self._made[key], str):
            raise Unsupported(node, kernel)
        return kernel


def _described(value: object) -> Any:
    """Return dtype and shape in place of a tensor, as a part of a key."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return tuple(map(_described, value)) if isinstance(value, list | tuple) else value


def _kernel_or_reason(node: fx.Node) -> Kernel | str:
    """Return the kernel of a node, or why TVM cannot have the node."""
    try:
        return _kernel(node)
    except Unsupported as unsupported:
        return unsupported.reason
    except Exception as error:  # noqa: BLE001 - whatever TVM raises, the node runs in eager
        return error_text(error)


def _kernel(node: fx.Node) -> Kernel:
    """Convert a node, and check the result against its fake tensor. Raises Unsupported."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    leaves, spec = tree_flatten((args, kwargs))
    symbols = sorted(symbols_of([node.meta["val"], *leaves]), key=str)
    variables = {symbol: tirx.Var(str(symbol), "int64") for symbol in symbols}
    inputs = [relax.Var(f"x{at}", typed(x, variables)) for at, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    if (RESHAPED | SAME).intersection(names_of(node)):
        typed(node.meta["val"], variables)
        return Kernel()
    convert = next((CONVERTERS[name] for name in names_of(node) if name in CONVERTERS), None)
    if convert is None:
        raise Unsupported(node, "no converter")
    outputs: list[Tensor | None] = []

    def body(tensors: list[Tensor], sizes: list[tirx.Expr]) -> list[Tensor]:
        # TVM passes variables of the function's own in place of these.
        here, operands = Node(node, dict(zip(symbols, sizes, strict=True))), iter(tensors)
        args, kwargs = tree_unflatten(
            [next(operands) if isinstance(x, torch.Tensor) else here.size(x) for x in leaves], spec
        )
        result = convert(here, *args, **kwargs)
        outputs[:] = result if isinstance(result, list) else [result]
        return [each for each in outputs if each is not None]

    func, passed, types = gen_call_tir_inputs(body, inputs, [*variables.values()])
    types_left = iter(types)
    results = [None if each is None else next(types_left) for each in outputs]
    for result, fake in zip(results, tree_leaves(node.meta["val"]), strict=True):
        _check(node, result, fake)
    known = [symbol for value in passed[len(inputs) :] for symbol in symbols if value.same_as(variables[symbol])]
    return Kernel(func, tuple(known), tuple(None if each is None else str(each.dtype) for each in results))


def typed(fake: torch.Tensor, variables: Mapping[sympy.Symbol, tirx.Var]) -> relax.TensorType:
    """Return a tensor's type. Raises Unsupported."""
    return relax.TensorType([to_tvm(size, variables) for size in fake.shape], dtype(fake))


def _check(node: fx.Node, result: relax.TensorType | None, fake: torch.Tensor) -> None:
    """Raise Unsupported if a result is not what torch would return, but for a cast."""
    if result is None:
        return
    wanted, kind, sizes = dtype(fake), str(result.dtype), list(result.shape.values)
    if len(sizes) != fake.dim() or not all(map(may_equal, sizes, fake.shape)):
        raise Unsupported(node, f"TVM gives shape {sizes}, torch {tuple(fake.shape)}")
    if wanted != kind and ("bool" in (wanted, kind) or is_float(wanted) != is_float(kind)):
        raise Unsupported(node, f"TVM gives {kind}, torch {wanted}")


def may_equal(size: tirx.Expr, fake: int | torch.SymInt) -> bool:
    """Return whether a size of TVM's may equal torch's: numbers are compared, expressions are trusted."""
    known = isinstance(size, tirx.IntImm) and expression(fake).is_Integer
    return not known or int(size) == int(fake)
