"""A function of tensors, lowered as one graph without dynamo, and run."""

from collections.abc import Callable
from typing import Any

import torch
import tvm
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from tvm import relax
from tvm.target import Target

from backend_kwargs.backends.tvm.lowering.graph import Lowered, lower
from backend_kwargs.backends.tvm.part_compiler import decompositions
from backend_kwargs.graphs.parts import attach


def traced(function: Callable[..., Any], *args: Any, mode: str = "fake") -> fx.GraphModule:
    """Return the graph of a function's operators; with `mode` "symbolic" its sizes are symbols."""
    return make_fx(function, decompositions(), tracing_mode=mode)(*args)


def node_of(gm: fx.GraphModule, name: str) -> fx.Node:
    """Return the only call of an operator in the graph."""
    (node,) = (n for n in gm.graph.nodes if n.op == "call_function" and str(n.target) == f"aten.{name}")
    return node


def with_constants(part: fx.GraphModule, constants: dict[str, torch.Tensor]) -> fx.GraphModule:
    """Return a graph in which the placeholders in `constants` are attributes."""
    outer = fx.Graph()
    names = [node.name for node in part.graph.find_nodes(op="placeholder")]
    attach(part, outer.call_module("part", tuple(map(outer.placeholder, names))), constants)
    return part


def runs(lowered: Lowered, names: list[str]) -> Callable[..., list[torch.Tensor]]:
    """Return a callable that runs a lowered graph with its placeholders, called `names`, as arguments."""
    executable = relax.build(lowered.mod, Target({"kind": "llvm"}))
    main = relax.VirtualMachine(executable, tvm.cpu())["main"]

    def call(*args: Any) -> list[torch.Tensor]:
        given = dict(zip(names, args, strict=True))
        sizes = [tvm.runtime.ShapeTuple([source.read(given) for source in lowered.shape_sources])]
        inputs = [given[name].contiguous() for name in lowered.inputs]
        return [torch.from_dlpack(each) for each in main(*inputs, *(sizes if lowered.shape_sources else []))]

    return call


def by_tvm(function: Callable[..., Any], *args: Any, mode: str = "fake") -> list[torch.Tensor]:
    """Return the outputs of a function, computed by TVM."""
    gm = traced(function, *args, mode=mode)
    return runs(lower(gm), [node.name for node in gm.graph.find_nodes(op="placeholder")])(*args)
