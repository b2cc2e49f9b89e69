"""Graphs that a worker lowers first, and this process afterwards."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.runtime.benchmarking import benchmarker

from backend_kwargs.auto.workers.graphs import PackedGraph, packed
from backend_kwargs.rewrites.traced import change_by
from backend_kwargs.torch_internals.lowered_graphs import again, with_changed
from backend_kwargs.torch_internals.relowering import spare_of

LONG_S = 300  # no test waits so long, unless something hangs


class Measuring(CustomGraphPass):
    """A pass that any process can import, and that measures."""

    def __call__(self, graph):
        benchmarker.benchmark_cpu(lambda: None)

    def uuid(self):
        return "measuring"


@dataclass
class Lowered:
    """A graph that Inductor lowers, as bytes and as a copy."""

    graph: PackedGraph
    gm: torch.fx.GraphModule
    inputs: list[Any]
    kwargs: dict[str, Any]
    context: TracingContext
    name: str

    def key(self, options=MappingProxyType({}), **changed):
        """Lower it here under `options`, and return its key, and whether Inductor's cache had it."""
        code, hit = self.code(options, **changed)
        return code._fx_graph_cache_key, hit

    def code(self, options=MappingProxyType({}), **changed):
        counters["inductor"].clear()
        self.context.aot_graph_name = self.name  # a comment in the code
        with tracing(self.context), config.patch(dict(options)), again():
            code = compile_fx_inner(spare_of(self.gm), self.inputs, **with_changed(self.kwargs, changed, self.gm))
        return code, counters["inductor"]["fxgraph_cache_hit"] == 1


def lowered(function, *inputs, backward=False, dynamic=None, rewrites=()):
    """Compile a function and return the graphs that Inductor lowered, the forward graph first."""
    found = []

    def inner(gm, example_inputs, **kwargs):
        graph = packed(gm, example_inputs, kwargs, rewrites)
        context = TracingContext.get()
        spare = spare_of(gm)
        found.append(Lowered(graph, spare, list(example_inputs), kwargs, context, context.aot_graph_name))
        return compile_fx_inner(gm, example_inputs, **kwargs)

    def backend(gm, example_inputs):
        for name in rewrites:
            change = change_by(name, gm, example_inputs)
            gm, example_inputs = change.gm, change.example_inputs
        return compile_fx(gm, example_inputs, inner_compile=inner)

    with torch._functorch.config.patch(enable_autograd_cache=False), torch.set_grad_enabled(backward):
        result = torch.compile(function, backend=backend, dynamic=dynamic)(*inputs)
        if backward:
            result.sum().backward()
    return found
