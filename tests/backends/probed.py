"""Run probes on a compiler of parts: many operators in one graph, each alone or between two others.

    python -m tests.backends.probed onnxruntime|openvino-native|tvm [float32,int64,...] [operator,...]

prints what differs from eager; a test runs a few calls of each operator.
"""

# ruff: noqa: T201 - a command prints

import logging
import operator
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from backend_kwargs.backends.partitioned import PartCompiler, why_not
from backend_kwargs.graphs.parts import finished
from tests.backends.probes import EPS, NEVER_ON_A_CPU, Call, calls, difference, names_of

aten = torch.ops.aten
# What docs/other-backends.md and docs/tvm.md name as different, by operator or for all others (""), as a mask of the
# elements that are not compared.
Mask = Callable[[Call, torch.Tensor, torch.Tensor], torch.Tensor]


def zeros(_: Call, given: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Zeros may have the other sign."""
    return (given == 0) & (wanted == 0)


def nan_in_eager(_: Call, given: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return wanted.isnan() | zeros(_, given, wanted)


def vanishes(_: Call, given: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (given == 0) & (wanted.abs() < 2**-118)


def rounded_before(call: Call, given: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Eager's own gelu is x times a difference that cancels."""
    return (given - wanted).abs() <= EPS[wanted.dtype] * torch.finfo(wanted.dtype).eps * call.args[0].abs()


DOCUMENTED: dict[str, dict[str, Mask]] = {
    "onnxruntime": {"gelu": rounded_before, "where": zeros, "add": zeros},
    "openvino-native": dict.fromkeys(
        ("_log_softmax", "_softmax", "clamp", "hardsigmoid", "hardtanh", "relu"), nan_in_eager
    )
    | dict.fromkeys(("sigmoid", "silu"), vanishes)
    | {"": zeros},
    "tvm": {"gelu": rounded_before} | dict.fromkeys(("clamp", "fmax", "fmin"), zeros),
}


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
        self.results = [
            self._result(item) for call, each in zip(made, args, strict=True) for item in self._items(call, *each)
        ]
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
            return self._call(
                torch.ops.aten.add.Tensor, self._call(torch.ops.aten._to_copy.default, node, dtype=torch.float32), 1
            )
        return self._call(torch.ops.aten.neg.default, node) if self._is_fused(node.meta["val"]) else node


def after(wanted: torch.Tensor) -> torch.Tensor:
    """Return a result in eager as `Traced` returns it if it is fused."""
    return wanted.float() + 1 if wanted.dtype == torch.bool else -wanted if wanted.is_floating_point() else wanted


def part_compiler(name: str) -> PartCompiler:
    """Return a compiler of parts with its default options."""
    if name == "tvm":
        from backend_kwargs.backends.tvm.part_compiler import TVM
        from backend_kwargs.backends.tvm.settings import TVMOptions as OfTVM

        return TVM(OfTVM())
    if name == "onnxruntime":
        from backend_kwargs.backends.onnxruntime.compiler import ONNXRuntimeOptions as OfONNXRuntime
        from backend_kwargs.backends.onnxruntime.session import ONNXRuntime

        return ONNXRuntime(OfONNXRuntime())
    from backend_kwargs.backends.openvino.compiler import OpenVINOOptions as OfOpenVINO
    from backend_kwargs.backends.openvino.model import OpenVINO

    return OpenVINO(OfOpenVINO())


class Compiler:
    """What of an engine or of TVM the probes need."""

    # Decomposed for some arguments only; others are tested where they are not.
    partly: ClassVar[frozenset[Any]] = frozenset(
        {aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.pow.Tensor_Scalar}
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.compiler = part_compiler(name)
        self.dtypes, self.table = tuple(self.compiler.dtypes), self.compiler.decompositions(trains=False)

    def has(self, op: Any) -> bool:
        """Return whether an operator may reach the compiler and is translated."""
        if op in self.table and op not in self.partly:
            return False
        if self.name == "tvm":
            from backend_kwargs.backends.tvm.lowering.graph import CONVERTERS

            return bool(CONVERTERS.keys() & set(names_of(op)))
        if self.name == "onnxruntime":
            from backend_kwargs.backends.onnxruntime.session import _registry

            return _registry().is_registered(op)
        from backend_kwargs.backends.openvino.model import _translated

        return str(op) in _translated()

    def never_takes(self, op: Any) -> bool:
        """Return whether all calls of an operator are left to eager by its name or its tags."""
        names = set(names_of(op))
        if names & NEVER_ON_A_CPU:
            return True
        return bool(names & self.compiler.denied.keys()) or any(tag in op.tags for tag in self.compiler.tags)

    def operators(self) -> list[Any]:
        """Return the operators that it may take."""
        return [op for op in overloads() if self.has(op) and not self.never_takes(op)]

    def taken(self, dtype: torch.dtype, most: int | None = None, only: set[str] | None = None) -> list[Call]:
        """Return the probes of a dtype that it takes, at most so many of an operator."""
        kept = []
        for op in self.operators():
            if only and not only & set(names_of(op)):
                continue
            made = list(calls(op, dtype))
            step = max(1, len(made) // most) if most else 1
            kept += [
                call for call in made[::step] if not (self.decomposes(call) or self.why_not(Traced([call]).nodes[0]))
            ]
        return kept

    def decomposes(self, call: Call) -> bool:
        """Return whether a call is decomposed before it reaches the compiler."""
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            args = tree_map_only(torch.Tensor, mode.from_tensor, call.args)
            return call.op in self.table and self.table[call.op](*args, **call.kwargs) is not NotImplemented

    def why_not(self, node: fx.Node) -> str:
        try:
            return why_not(node, self.compiler)
        except Exception as error:  # noqa: BLE001 - such a node runs in eager
            return str(error)

    def built(self, part: fx.GraphModule) -> Callable[..., Any]:
        every = range(len(part.graph.output_node().args[0]))
        if self.name != "onnxruntime":
            return finished(self.compiler.compile(part).run, part, every)
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        from backend_kwargs.backends.onnxruntime.session import _registry

        # Made anew at each export, the exporter's registry would take most of the time.
        with patch.object(ONNXRegistry, "from_torchlib", staticmethod(lambda **_: _registry())):
            return finished(self.compiler.compile(part).run, part, every)


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
        for i, alone in enumerate(call.wanted):
            given, wanted = next(results), after(alone) if fused else alone
            documented = DOCUMENTED[compiler.name]
            if mask := documented.get(names_of(call.op)[1]) or documented.get(""):
                given = torch.where(mask(call, given, wanted), wanted, given)
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


def groups(made: Sequence[Call], size: int = 80) -> Iterator[Sequence[Call]]:
    """Yield the calls of one graph after the other."""
    return (made[i : i + size] for i in range(0, len(made), size))


def main() -> int:
    compiler, dtypes, only = Compiler(sys.argv[1]), sys.argv[2:3], set(",".join(sys.argv[3:4]).split(",")) - {""}
    warnings.simplefilter("ignore")
    logging.disable()
    failed = 0
    for dtype in compiler.dtypes:
        if dtypes and str(dtype).removeprefix("torch.") not in dtypes[0].split(","):
            continue
        made = compiler.taken(dtype, only=only)
        for fused in (False, True):
            for group in groups(made):
                for call, why in differences(compiler, group, fused).items():
                    failed += 1
                    print(dtype, "between others" if fused else "alone", call, why, flush=True)
        print(f"{dtype}: {len(made)} calls", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
