"""Lower a graph of ATen operators to TVM's Relax, node by node, each checked against its fake tensor.

All converters are our own, since too many of those in TVM's importers are silently wrong. Each is written in TVM's
tensor expressions over the output's fake tensor, whose shape and dtype are known to be right.
"""

import operator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import tvm
from torch import fx
from tvm import relax, tirx

from backend_kwargs.backends.part_compiler import Unsupported
from backend_kwargs.backends.tvm.lowering.kernels import Kernels
from backend_kwargs.backends.tvm.lowering.node import dtype
from backend_kwargs.backends.tvm.lowering.views import RESHAPED, SAME
from backend_kwargs.backends.tvm.opaque import hide
from backend_kwargs.backends.tvm.shapes import ShapeSource, to_tvm, unread
from backend_kwargs.graphs.parts import names_of, symbols_of
from backend_kwargs.torch_internals.pytree import tree_leaves

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
        tensors = [
            node
            for node in self.gm.graph.find_nodes(op="placeholder")
            if bool(node.users) and isinstance(node.meta["val"], torch.Tensor)
        ]
        sources = self._sources(tensors)
        for node in tensors:
            fake = node.meta["val"]
            self.values[node] = relax.Var(node.name, relax.TensorType(self._shape(fake), dtype(fake)))
        sizes = relax.Var("sizes", relax.ShapeType([self.variables[source.symbol] for source in sources]))
        self._main([*(self.values[node] for node in tensors), *([sizes] if sources else [])])
        return Lowered(hide(self.bb.get()), tuple(node.name for node in tensors), tuple(sources))

    def _main(self, parameters: list[relax.Var]) -> None:
        """Build the function "main"."""
        results: list[relax.Expr] = []
        failure: Exception | None = None
        with self.bb.function("main", parameters):
            with self.bb.dataflow():
                try:
                    for node in self.gm.graph.nodes:
                        self._step(node)
                    (outputs,) = self.gm.graph.output_node().args
                    results = [*map(self._result, outputs if isinstance(outputs, list | tuple) else [outputs])]
                except Exception as error:  # noqa: BLE001 - raised below, since TVM warns about an unfinished function
                    failure = error
                whole = self.bb.emit_output(relax.Tuple(results))
            self.bb.emit_func_output(whole)
        if failure:
            raise failure

    def _sources(self, tensors: list[fx.Node]) -> list[ShapeSource]:
        """Return where the values of symbols that are no input's size come from. Raises Unsupported."""
        inputs = self.gm.graph.find_nodes(op="placeholder")
        known = [node for node in inputs if node in tensors or not isinstance(node.meta["val"], torch.Tensor)]
        return unread([node.name for node in known], [node.meta["val"] for node in known], self.variables)

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
