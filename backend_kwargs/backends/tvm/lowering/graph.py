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


# Of a node: an expression, or a list of several results with None for unused ones.
Value: TypeAlias = Any


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
    return _Lowering(gm, kernels or Kernels()).lowered()


class _Lowering:
    """The state of a lowering: the builder, TVM's variable for each symbol, and each node's value."""

    def __init__(self, gm: fx.GraphModule, kernels: Kernels) -> None:
        self.gm, self.kernels, self.bb = gm, kernels, relax.BlockBuilder()
        values = [node.meta.get("val") for node in gm.graph.nodes]
        self.variables = {symbol: tirx.Var(str(symbol), "int64") for symbol in sorted(symbols_of(values), key=str)}
        self.values: dict[fx.Node, Value] = {}

    def lowered(self) -> Lowered:
        inputs = self.gm.graph.find_nodes(op="placeholder")
        tensors = [node for node in inputs if node.users and isinstance(node.meta["val"], torch.Tensor)]
        known = [node for node in inputs if node in tensors or not isinstance(node.meta["val"], torch.Tensor)]
        sources = unread([node.name for node in known], [node.meta["val"] for node in known], self.variables)
        for node in tensors:
            fake = node.meta["val"]
            self.values[node] = relax.Var(node.name, relax.TensorType(self._shape(fake), dtype(fake)))
        sizes = relax.Var("sizes", relax.ShapeType([self.variables[source.symbol] for source in sources]))
        self._main([*(self.values[node] for node in tensors), *([sizes] if sources else [])])
        return Lowered(hide(self.bb.get()), tuple(node.name for node in tensors), tuple(sources))

    def _main(self, parameters: list[relax.Var]) -> None:
        """Build the function "main"."""
        with self.bb.function("main", parameters):
            with self.bb.dataflow():
                for node in self.gm.graph.nodes:
                    self._step(node)
                (outputs,) = self.gm.graph.output_node().args
                results = map(self._result, outputs if isinstance(outputs, list | tuple) else [outputs])
                whole = self.bb.emit_output(relax.Tuple([*results]))
            self.bb.emit_func_output(whole)

    def _shape(self, fake: torch.Tensor) -> list[tirx.Expr]:
        """Return a fake tensor's shape in TVM's form."""
        return [to_tvm(size, self.variables) for size in fake.shape]

    def _result(self, node: object) -> relax.Expr:
        """Return the value of an output. Raises Unsupported if it is no tensor."""
        if not isinstance(node, fx.Node) or node not in self.values or not isinstance(node.meta["val"], torch.Tensor):
            raise Unsupported("output", f"{node} is not a tensor")
        return self.values[node]

    def _step(self, node: fx.Node) -> None:
        """Lower one node: a constant, an item of several results, or a call."""
        if node.op == "get_attr":
            self.values[node] = constant(operator.attrgetter(str(node.target))(self.gm))
        elif node.target is operator.getitem:
            self.values[node] = self.values[node.all_input_nodes[0]][node.args[1]]
        elif node.op == "call_function" and isinstance(node.meta["val"], torch.Tensor | list | tuple):
            self.values[node] = self._converted(node)

    def _converted(self, node: fx.Node) -> Value:
        """Emit a call of the node's kernel: a list for several results, with None for unused ones."""
        kernel, fakes = self.kernels.of(node), node.meta["val"]
        read = [each for each in tree_leaves((node.args, node.kwargs)) if isinstance(each, fx.Node)]
        tensors = [self.values[each] for each in read if isinstance(each.meta["val"], torch.Tensor)]
        if RESHAPED.intersection(names_of(node)):
            return self.bb.emit(relax.op.reshape(tensors[0], relax.ShapeExpr(self._shape(fakes))))
        if SAME.intersection(names_of(node)):
            return tensors[0]
        leaves = [fakes] if isinstance(fakes, torch.Tensor) else fakes
        used = [(fake, kind) for fake, kind in zip(leaves, kernel.dtypes, strict=True) if kind]
        types = [relax.TensorType(self._shape(fake), kind) for fake, kind in used]
        sizes = [self.variables[symbol] for symbol in kernel.symbols]
        function = self.bb.add_func(kernel.func, names_of(node)[1])
        call = self.bb.emit(relax.call_tir(function, [*tensors, *sizes], types))
        items = [call] if len(used) == 1 else [self.bb.emit(relax.TupleGetItem(call, i)) for i in range(len(used))]
        results = iter([(item, dtype(fake)) for item, (fake, _) in zip(items, used, strict=True)])
        cast = (item if str(item.ty.dtype) == to else self.bb.emit(relax.op.astype(item, to)) for item, to in results)
        every = [next(cast) if kind else None for kind in kernel.dtypes]
        return every[0] if isinstance(fakes, torch.Tensor) else every


def constant(tensor: object) -> relax.Expr:
    """Return a tensor as a constant of the module."""
    if not isinstance(tensor, torch.Tensor):
        raise Unsupported("constant", f"{tensor!r} is not a tensor")
    return relax.const(tvm.runtime.from_dlpack(tensor.detach().cpu().contiguous().clone()))
