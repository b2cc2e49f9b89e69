"""Lower a graph of ATen operators to TVM's Relax, node by node, each checked against its fake tensor.

All converters are our own, since too many of those in TVM's importers are silently wrong. Each is written in TVM's
tensor expressions over the output's fake tensor, whose shape and dtype are known to be right. Each distinct node of a
compile is converted once, whether or not TVM then gets it.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
import tvm
from torch import fx
from tvm import relax, tirx
from tvm.relax.utils import gen_call_tir_inputs
from tvm.te import Tensor

from backend_kwargs.backends.partitioned import Unsupported
from backend_kwargs.backends.tvm.lowering.node import (
    POINTWISE,
    Converter,
    Node,
    ShapeSource,
    dtype,
    is_float,
    to_tvm,
    unread,
)
from backend_kwargs.backends.tvm.lowering.reductions import REDUCTIONS, RESHAPED, SAME, VIEWS, WINDOWS
from backend_kwargs.backends.tvm.opaque import hide
from backend_kwargs.errors import error_text
from backend_kwargs.graphs.parts import expression, names_of, returned_by, symbols_of
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
            try:
                self._made[key] = _kernel(node)
            except Unsupported as unsupported:
                self._made[key] = unsupported.reason
            except Exception as error:  # noqa: BLE001 - whatever TVM raises, the node runs in eager
                self._made[key] = error_text(error)
        if isinstance(kernel := self._made[key], str):
            raise Unsupported(node, kernel)
        return kernel


def _described(value: object) -> Any:
    """Return dtype and shape in place of a tensor, as a part of a key."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return tuple(map(_described, value)) if isinstance(value, list | tuple) else value


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
    """Raise Unsupported if a result is not what torch would return, but for a cast; symbolic sizes are trusted."""
    if result is None:
        return
    wanted, kind, sizes = dtype(fake), str(result.dtype), list(result.shape.values)
    numbers = [
        (int(size), int(own))
        for size, own in zip(sizes, fake.shape, strict=False)
        if isinstance(size, tirx.IntImm) and expression(own).is_Integer
    ]
    if len(sizes) != fake.dim() or any(size != own for size, own in numbers):
        raise Unsupported(node, f"TVM gives shape {sizes}, torch {tuple(fake.shape)}")
    if wanted != kind and ("bool" in (wanted, kind) or is_float(wanted) != is_float(kind)):
        raise Unsupported(node, f"TVM gives {kind}, torch {wanted}")


# Of a node: an expression, or a list of several results with None for unused ones.
Value: TypeAlias = Any
Variables: TypeAlias = Mapping[sympy.Symbol, tirx.Var]


@dataclass(frozen=True)
class Lowered:
    """A module whose "main" takes the placeholders `inputs`, then one shape for `shape_sources` if there are any."""

    mod: tvm.IRModule
    inputs: tuple[str, ...]
    shape_sources: tuple[ShapeSource, ...]


def lower(gm: fx.GraphModule, kernels: Kernels | None = None) -> Lowered:
    """Lower a graph whose nodes have fake tensors as meta["val"]; its attributes are constants.

    Raises Unsupported for the first node that TVM cannot have.
    """
    kernels, bb = kernels or Kernels(), relax.BlockBuilder()
    symbols = symbols_of([node.meta.get("val") for node in gm.graph.nodes])
    variables = {symbol: tirx.Var(str(symbol), "int64") for symbol in sorted(symbols, key=str)}
    inputs = gm.graph.find_nodes(op="placeholder")
    tensors = [node for node in inputs if node.users and isinstance(node.meta["val"], torch.Tensor)]
    known = [node for node in inputs if node in tensors or not isinstance(node.meta["val"], torch.Tensor)]
    sources = unread([node.name for node in known], [node.meta["val"] for node in known], variables)
    values: dict[fx.Node, Value] = {node: relax.Var(node.name, typed(node.meta["val"], variables)) for node in tensors}
    sizes = relax.Var("sizes", relax.ShapeType([variables[source.symbol] for source in sources]))
    with bb.function("main", [*values.values(), *([sizes] if sources else [])]):
        with bb.dataflow():
            for node in gm.graph.nodes:
                if node.op == "get_attr":
                    values[node] = constant(operator.attrgetter(str(node.target))(gm))
                elif node.target is operator.getitem:
                    values[node] = values[node.all_input_nodes[0]][node.args[1]]
                elif node.op == "call_function" and isinstance(node.meta["val"], torch.Tensor | list | tuple):
                    values[node] = _called(bb, node, kernels.of(node), values, variables)
            results = returned_by(gm)
            for node in results:
                if node not in values or not isinstance(node.meta["val"], torch.Tensor):
                    raise Unsupported("output", f"{node} is not a tensor")
            whole = bb.emit_output(relax.Tuple([values[node] for node in results]))
        bb.emit_func_output(whole)
    return Lowered(hide(bb.get()), tuple(node.name for node in tensors), tuple(sources))


def _called(
    bb: relax.BlockBuilder, node: fx.Node, kernel: Kernel, values: Mapping[fx.Node, Value], variables: Variables
) -> Value:
    """Emit a call of the node's kernel: a list for several results, with None for unused ones."""
    fakes, names = node.meta["val"], names_of(node)
    read = [each for each in tree_leaves((node.args, node.kwargs)) if isinstance(each, fx.Node)]
    tensors = [values[each] for each in read if isinstance(each.meta["val"], torch.Tensor)]
    if RESHAPED.intersection(names):
        return bb.emit(relax.op.reshape(tensors[0], typed(fakes, variables).shape))
    if SAME.intersection(names):
        return tensors[0]
    leaves = [fakes] if isinstance(fakes, torch.Tensor) else fakes
    used = [(fake, kind) for fake, kind in zip(leaves, kernel.dtypes, strict=True) if kind]
    types = [relax.TensorType(typed(fake, variables).shape, kind) for fake, kind in used]
    sizes = [variables[symbol] for symbol in kernel.symbols]
    call = bb.emit(relax.call_tir(bb.add_func(kernel.func, names[1]), [*tensors, *sizes], types))
    items = iter([call] if len(used) == 1 else [bb.emit(relax.TupleGetItem(call, i)) for i in range(len(used))])
    every: list[Value] = [None if kind is None else next(items) for kind in kernel.dtypes]
    for at, (fake, kind) in enumerate(zip(leaves, kernel.dtypes, strict=True)):
        if kind and kind != dtype(fake):
            every[at] = bb.emit(relax.op.astype(every[at], dtype(fake)))
    return every[0] if isinstance(fakes, torch.Tensor) else every


def constant(tensor: object) -> relax.Expr:
    """Return a tensor as a constant of the module."""
    if not isinstance(tensor, torch.Tensor):
        raise Unsupported("constant", f"{tensor!r} is not a tensor")
    return relax.const(tvm.runtime.from_dlpack(tensor.detach().cpu().contiguous().clone()))
