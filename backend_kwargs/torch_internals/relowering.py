"""A lowered graph that is kept to be compiled by Inductor again: a copy, and what surrounds such a compile."""

import copy
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import compiled_autograd
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import compile_fx
from torch._inductor.cudagraph_utils import BoxedDeviceIndex
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.utils import BoxedBool
from torch._inductor.virtualized import V
from torch.fx import GraphModule

from backend_kwargs.torch_internals import inductor_config
from backend_kwargs.torch_internals.replacing import replaced


def spare_of(gm: GraphModule) -> GraphModule:
    """Return a copy of a lowered graph and of those in it, which have the same key in Inductor's cache.

    They may be changed. Tensors are shared, since packed weights cannot be copied.
    """
    return _spare_of(gm, {})


def _spare_of(gm: GraphModule, copies: dict[int, GraphModule]) -> GraphModule:
    if id(gm) in copies:
        return copies[id(gm)]
    # In the order of the original's attributes, in which the key has them. Inductor removes weights that it packs.
    spare = copies[id(gm)] = GraphModule.__new__(GraphModule)
    kept = {name: value for name, value in vars(gm).items() if name != "_graph"}
    spare.__dict__ = {name: copy.copy(value) if isinstance(value, dict) else value for name, value in kept.items()}
    modules = vars(gm)["_modules"].items()
    spare.__dict__["_modules"] = {n: _spare_of(m, copies) if isinstance(m, GraphModule) else m for n, m in modules}
    spare.meta = dict(gm.meta)
    graph = copy.deepcopy(gm.graph)
    graph.owning_module = spare
    spare.__dict__["_graph"] = graph
    spare.recompile()  # the key holds the code as it was made before, stale or none
    return spare


@contextmanager
def around_lowering(example_inputs: Any, options: Mapping[str, object]) -> Iterator[None]:
    """Set what torch has set when it calls the function that compiles a lowered graph, and options of Inductor."""
    fake_mode = detect_fake_mode(example_inputs)
    with ExitStack() as stack:
        if torch._C._is_any_autocast_enabled():
            stack.enter_context(torch._C._DisableAutocast())
        for each in (
            V.set_fake_mode(fake_mode),
            tracing(TracingContext.try_get() or TracingContext(fake_mode)),
            compiled_autograd._disable(),
            functorch_config.patch(unlift_effect_tokens=True),
            enable_python_dispatcher(),
            inductor_config.patched(options),
            TracingContext.report_output_strides(),
        ):
            stack.enter_context(each)
        yield


def fresh_boxes(kwargs: Mapping[str, Any], *, cudagraphs: bool) -> dict[str, Any]:
    """Return the arguments in which the compile of a forward graph tells that of its backward graph something."""
    names = {"cudagraphs": BoxedBool(cudagraphs), "boxed_forward_device_index": BoxedDeviceIndex(None)}
    return {name: box for name, box in names.items() if name in kwargs}


def output_strides(graph: CompiledFxGraph) -> object:
    """Return the strides with which a graph returns its outputs."""
    return graph.output_strides


def is_partitioned(graph: CompiledFxGraph) -> bool:
    """Return whether CUDA graphs record parts of a graph, which the compile of its backward graph depends on."""
    return len(getattr(graph, "partition_maps", None) or ()) > 1
