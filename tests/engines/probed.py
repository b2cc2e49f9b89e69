"""Run probes on a compiler of parts: ONNX Runtime, OpenVINO or TVM, each operator alone or many in one graph."""

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from probes import Call, difference
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


class Traced:
    """A graph of some calls, each on inputs of its own; between two other operators if `fused`, as in a model."""

    def __init__(self, made: Sequence[Call], fused: bool = False) -> None:
        self.graph, self.mode, self.fused = fx.Graph(), FakeTensorMode(allow_non_fake_inputs=True), fused
        self.inputs: list[torch.Tensor] = []
        self.nodes: list[fx.Node] = []
        args = [tree_map_only(torch.Tensor, self._placed, (call.args, call.kwargs)) for call in made]
        self.results = [self._result(item) for call, each in zip(made, args, strict=True) for item in self._items(call, *each)]
        self.graph.output(tuple(self.results))
        self.part = fx.GraphModule({}, self.graph)

    def _placed(self, x: torch.Tensor) -> fx.Node:
        node = self.graph.placeholder(f"x{len(self.inputs)}")
        node.meta["val"] = self.mode.from_tensor(x, static_shapes=True)
        self.inputs.append(-x if self._is_fused(x) else x)
        return node

    def _is_fused(self, x: torch.Tensor) -> bool:
        return self.fused and x.is_floating_point()

    def _call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(op, args, kwargs)
        fakes = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = op(*fakes[0], **fakes[1])
        return node

    def _items(self, call: Call, args: Any, kwargs: Any) -> list[fx.Node]:
        if self.fused:
            args, kwargs = fx.node.map_arg((args, kwargs), self._negated)
        node = self._call(call.op, *args, **kwargs)
        self.nodes.append(node)
        if isinstance(node.meta["val"], torch.Tensor):
            return [node]
        return [self._call(operator.getitem, node, i) for i in range(len(node.meta["val"]))]

    def _negated(self, node: fx.Node) -> fx.Node:
        return self._call(torch.ops.aten.neg.default, node) if self._is_fused(node.meta["val"]) else node

    def _result(self, node: fx.Node) -> fx.Node:
        if not self.fused:
            return node
        if node.meta["val"].dtype == torch.bool:
            return self._call(torch.ops.aten.add.Tensor, self._call(torch.ops.aten._to_copy.default, node, dtype=torch.float32), 1)
        return self._call(torch.ops.aten.neg.default, node) if self._is_fused(node.meta["val"]) else node


def after(wanted: torch.Tensor) -> torch.Tensor:
    """Return a result in eager as `Traced` returns it if it is fused."""
    return wanted.float() + 1 if wanted.dtype == torch.bool else -wanted if wanted.is_floating_point() else wanted


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


def differences(compiler: Compiler, made: Sequence[Call], fused: bool = False) -> dict[str, str]:
    """Return, by call, how the compiler's results differ from eager's; a graph that fails is run in halves."""
    if not made:
        return {}
    traced = Traced(made, fused)
    try:
        results = iter(compiler.built(traced.part)(*[x.clone() for x in traced.inputs]))
    except Exception as error:  # noqa: BLE001
        if len(made) == 1:
            return {str(made[0]): f"FAILS {type(error).__name__}: {' '.join(str(error).split())[:150]}"}
        half = len(made) // 2
        return differences(compiler, made[:half], fused) | differences(compiler, made[half:], fused)
    found: dict[str, str] = {}
    for call in made:
        for i, wanted in enumerate(call.wanted):
            given = next(results)
            if fused:
                wanted = after(wanted)
            if difference(given, wanted, call) and (why := difference(given, wanted, call, in_double(call, fused)[i])):
                found[str(call)] = found.get(str(call), "") + f" [{i}] {why}"
    return found


def in_double(call: Call, fused: bool) -> list[torch.Tensor | None]:
    """Return the results of a call in float64, or None for each if eager refuses it."""

    def widened(x: torch.Tensor) -> torch.Tensor:
        return x.double() if x.is_floating_point() else x

    try:
        args, kw = tree_map_only(torch.Tensor, widened, (call.args, call.kwargs))
        made = [x for x in tree_leaves(call.op(*args, **kw)) if isinstance(x, torch.Tensor)]
        return [after(x) for x in made] if fused else made
    except (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError):
        return [None] * len(call.wanted)
