"""Run probes on a compiler of parts: ONNX Runtime, OpenVINO or TVM, each operator alone or many in one graph."""

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from probes import Call, calls, difference
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only


def overloads() -> Iterator[Any]:
    """Yield each overload of ATen's operators that writes nothing and is not made of others."""
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
            op = getattr(packet, overload)
            try:
                composite = op._can_decompose()
            except RuntimeError:  # TorchScript's own
                continue
            if not (op._schema.is_mutable or composite):
                yield op


def graph_of(made: Sequence[Call]) -> tuple[fx.GraphModule, list[torch.Tensor], dict[fx.Node, Call]]:
    """Return a graph of some calls, each on inputs of its own, with these inputs."""
    graph, mode, given, nodes = fx.Graph(), FakeTensorMode(allow_non_fake_inputs=True), [], {}
    placed = []
    for call in made:
        def place(x: torch.Tensor) -> fx.Node:
            node = graph.placeholder(f"x{len(given)}")
            node.meta["val"] = mode.from_tensor(x, static_shapes=True)
            given.append(x)
            return node
        placed.append(tree_map_only(torch.Tensor, place, (call.args, call.kwargs)))
    results = []
    for call, (args, kwargs) in zip(made, placed, strict=True):
        node = graph.call_function(call.op, args, kwargs)
        fakes = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with mode:
            node.meta["val"] = call.op(*fakes[0], **fakes[1])
        nodes[node] = call
        if isinstance(node.meta["val"], torch.Tensor):
            results.append(node)
            continue
        for i, value in enumerate(node.meta["val"]):
            item = graph.call_function(operator.getitem, (node, i))
            item.meta["val"] = value
            results.append(item)
    graph.output(tuple(results))
    return fx.GraphModule({}, graph), given, nodes


class Compiler:
    """What of an engine or of TVM the probes need."""

    def __init__(self, name: str) -> None:
        self.name = name
        if name == "tvm":
            from backend_kwargs.compilers.tvm.capture import decompositions
            from backend_kwargs.compilers.tvm.lowering.node import DTYPES

            self.dtypes, self.decomposed = tuple(DTYPES), set(decompositions())
            return
        if name == "onnxruntime":
            from backend_kwargs.compilers.engines.onnx_session import ONNXRuntime as Engine
            from backend_kwargs.compilers.engines.onnx_settings import Settings
        else:
            from backend_kwargs.compilers.engines.openvino_model import OpenVINO as Engine
            from backend_kwargs.compilers.engines.openvino_settings import Settings
        self.engine = Engine(Settings())
        self.dtypes, self.decomposed = tuple(self.engine.dtypes), set(self.engine.decompositions())

    def has(self, op: Any) -> bool:
        """Return whether an operator may reach the compiler and is translated."""
        if op in self.decomposed:
            return False
        if self.name == "tvm":
            from backend_kwargs.compilers.tvm.lowering.table import CONVERTERS
            from probes import names_of

            return bool(CONVERTERS.keys() & set(names_of(op)))
        if self.name == "onnxruntime":
            from backend_kwargs.compilers.engines.onnx_session import _registry

            return _registry().is_registered(op)
        from backend_kwargs.compilers.engines.openvino_model import _translated

        return str(op) in _translated()

    def why_not(self, node: fx.Node) -> str:
        if self.name == "tvm":
            from backend_kwargs.compilers.tvm.partition import _why_not
            from backend_kwargs.compilers.tvm.settings import Settings

            return _why_not(node, Settings())
        from backend_kwargs.compilers.engines.engine import why_not

        return why_not(node, self.engine, ())

    def built(self, part: fx.GraphModule) -> Callable[..., Any]:
        every = range(len(part.graph.output_node().args[0]))
        if self.name == "tvm":
            from backend_kwargs.compilers.tvm.build import build
            from backend_kwargs.compilers.tvm.lowering import lower
            from backend_kwargs.compilers.tvm.runtime import runner
            from backend_kwargs.compilers.tvm.settings import Settings

            lowered = lower(part)
            made = build(lowered.mod, Settings(), torch.device("cpu"))
            return runner(part, lowered, made.executable, torch.device("cpu"), every)
        from backend_kwargs.compilers.engines.outputs import finished

        return finished(self.engine.build(part), part, every)


def taken(compiler: Compiler, made: Sequence[Call]) -> list[Call]:
    """Return the calls that the compiler takes."""
    kept = []
    for call in made:
        _, _, nodes = graph_of([call])
        (node,) = nodes
        if not compiler.why_not(node):
            kept.append(call)
    return kept


def differences(compiler: Compiler, made: Sequence[Call]) -> dict[str, str]:
    """Return, by call, how the compiler's results differ from eager's; a graph that fails is run in halves."""
    if not made:
        return {}
    part, given, _ = graph_of(made)
    try:
        results = iter(compiler.built(part)(*[x.clone() for x in given]))
    except Exception as error:  # noqa: BLE001
        if len(made) == 1:
            return {str(made[0]): f"FAILS {type(error).__name__}: {' '.join(str(error).split())[:150]}"}
        half = len(made) // 2
        return differences(compiler, made[:half]) | differences(compiler, made[half:])
    found = {}
    for call in made:
        for wanted in call.wanted:
            if why := difference(next(results), wanted, call.args):
                found[str(call)] = why
    return found
