"""Lower a graph of ATen operators to TVM's Relax, node by node, each checked against its fake tensor.

All converters are our own, since too many of those in TVM's importers are silently wrong. Each is written in TVM's
tensor expressions over the output's fake tensor, whose shape and dtype are known to be right.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
import tvm
from torch import fx
from torch.utils._pytree import tree_flatten, tree_unflatten
from tvm import relax, tirx

from backend_kwargs.compilers.part_compiler import Unsupported
from backend_kwargs.compilers.parts import expression, names_of, symbols_of
from backend_kwargs.compilers.tvm.lowering.linear import join_transposed
from backend_kwargs.compilers.tvm.lowering.node import Node, dtype, is_float
from backend_kwargs.compilers.tvm.lowering.table import RESHAPED, SAME, converter
from backend_kwargs.compilers.tvm.opaque import hide
from backend_kwargs.compilers.tvm.shapes import ShapeSource, UnknownSize, to_tvm, unread
from backend_kwargs.errors import error_text


@dataclass(frozen=True)
class Lowered:
    """A module whose "main" takes the placeholders `inputs`, then one shape for `shape_sources` if there are any."""

    mod: tvm.IRModule
    inputs: tuple[str, ...]
    shape_sources: tuple[ShapeSource, ...]
    outputs: int


def lower(gm: fx.GraphModule) -> Lowered:
    """Lower a graph whose nodes have fake tensors as meta["val"]; its attributes are constants.

    Raises Unsupported for the first node that TVM cannot have.
    """
    join_transposed(gm)
    return _Lowering(gm).lowered()


class _Lowering:
    """The state of a lowering: the builder, TVM's variable for each symbol, and each node's value."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm, self.bb = gm, relax.BlockBuilder()
        values = [node.meta.get("val") for node in gm.graph.nodes]
        self.variables = {symbol: tirx.Var(str(symbol), "int64") for symbol in sorted(symbols_of(values), key=str)}
        self.values: dict[Any, Any] = {}

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
        count = self._main([*(self.values[node] for node in tensors), *([sizes] if sources else [])])
        return Lowered(hide(self.bb.get()), tuple(node.name for node in tensors), tuple(sources), count)

    def _main(self, parameters: list[Any]) -> int:
        """Build the function "main", and return its number of outputs."""
        results: list[Any] = []
        failure: Exception | None = None
        with self.bb.function("main", parameters):
            with self.bb.dataflow():
                try:
                    results = self._results()
                except Exception as error:  # noqa: BLE001 - raised below, since TVM warns about an unfinished function
                    failure = error
                whole = self.bb.emit_output(relax.Tuple(results))
            self.bb.emit_func_output(whole)
        if failure:
            raise failure
        return len(results)

    def _sources(self, tensors: list[fx.Node]) -> list[ShapeSource]:
        inputs = self.gm.graph.find_nodes(op="placeholder")
        known = [node for node in inputs if node in tensors or not isinstance(node.meta["val"], torch.Tensor)]
        try:
            return unread([node.name for node in known], [node.meta["val"] for node in known], self.variables)
        except UnknownSize as error:
            raise Unsupported("sizes", str(error)) from error

    def _shape(self, fake: torch.Tensor) -> list[Any]:
        return [to_tvm(size, self.variables) for size in fake.shape]

    def _results(self) -> list[Any]:
        for node in self.gm.graph.nodes:
            self._step(node)
        (outputs,) = self.gm.graph.output_node().args
        return [self._result(node) for node in (outputs if isinstance(outputs, list | tuple) else [outputs])]

    def _result(self, node: Any) -> Any:
        if node not in self.values or not isinstance(node.meta["val"], torch.Tensor):
            raise Unsupported("output", f"{node} is not a tensor")
        return self.values[node]

    def _step(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            self.values[node] = constant(operator.attrgetter(str(node.target))(self.gm))
        elif node.target is operator.getitem:
            self.values[node] = self.values[node.args[0]][node.args[1]]
        elif node.op == "call_function" and isinstance(node.meta["val"], torch.Tensor | list | tuple):
            self.values[node] = self._fitted(node, self._converted(node), node.meta["val"])

    def _converted(self, node: fx.Node) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self.values.get(n, n.meta["val"]))
        try:
            if RESHAPED.intersection(names_of(node)):
                return self.bb.emit(relax.op.reshape(args[0], relax.ShapeExpr(self._shape(node.meta["val"]))))
            return args[0] if SAME.intersection(names_of(node)) else self._emitted(node, args, kwargs)
        except Unsupported:
            raise
        except Exception as error:  # whatever TVM raises, the node runs in eager
            raise Unsupported(node, error_text(error)) from error

    def _emitted(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Emit the result of the node's converter: a list for several outputs, with None for unused ones."""
        convert = converter(node)
        leaves, spec = tree_flatten((args, kwargs))
        sizes = [node.meta["val"], *leaves, *(each.meta["val"] for each in node.all_input_nodes)]
        symbols = sorted(symbols_of(sizes), key=str)
        made: list[Any] = []

        def body(tensors: list[Any], variables: list[Any]) -> Any:
            # TVM passes variables of the function's own in place of the graph's.
            here, given = Node(node, dict(zip(symbols, variables, strict=True))), iter(tensors)
            args, kwargs = tree_unflatten([next(given) if is_tensor(x) else here.size(x) for x in leaves], spec)
            result = convert(here, *args, **kwargs)
            made[:] = result if isinstance(result, list) else [result]
            return [each for each in made if each is not None]

        tensors, variables = [x for x in leaves if is_tensor(x)], [self.variables[symbol] for symbol in symbols]
        call = self.bb.emit(self.bb.call_te(body, tensors, variables, primfunc_name_hint=names_of(node)[1]))
        if isinstance(node.meta["val"], torch.Tensor):
            return call
        count = sum(each is not None for each in made)
        parts = iter([call] if count == 1 else [self.bb.emit(relax.TupleGetItem(call, i)) for i in range(count)])
        return [None if each is None else next(parts) for each in made]

    def _fitted(self, node: fx.Node, result: Any, fake: Any) -> Any:
        """Return the result in the fake tensor's dtype. Raises Unsupported if it is not what torch would return."""
        if not isinstance(fake, torch.Tensor):
            return [self._fitted(node, *pair) for pair in zip(result, fake, strict=True)]
        if result is None:
            return None
        wanted, given, sizes = dtype(fake), str(result.ty.dtype), list(result.ty.shape.values)
        if len(sizes) != fake.dim() or not all(map(may_equal, sizes, fake.shape)):
            raise Unsupported(node, f"TVM gives shape {sizes}, torch {tuple(fake.shape)}")
        if wanted == given:
            return result
        if "bool" in (wanted, given) or is_float(wanted) != is_float(given):
            raise Unsupported(node, f"TVM gives {given}, torch {wanted}")
        return self.bb.emit(relax.op.astype(result, wanted))


def is_tensor(value: Any) -> bool:
    """Return whether an argument is a tensor of the module."""
    return isinstance(value, relax.Expr)


def may_equal(size: Any, fake: Any) -> bool:
    """Return whether a size of TVM's may equal torch's: numbers are compared, expressions are trusted."""
    known = isinstance(size, tirx.IntImm) and expression(fake).is_Integer
    return not known or int(size) == int(fake)


def constant(tensor: Any) -> Any:
    """Return a tensor as a constant of the module."""
    if not isinstance(tensor, torch.Tensor):
        raise Unsupported("constant", f"{tensor!r} is not a tensor")
    return relax.const(tvm.runtime.from_dlpack(tensor.detach().cpu().contiguous().clone()))
