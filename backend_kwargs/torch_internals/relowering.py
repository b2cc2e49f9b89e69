"""A lowered graph that is kept to be compiled by Inductor again: a copy, and what surrounds such a compile."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import compiled_autograd
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor.cudagraph_utils import BoxedDeviceIndex
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.utils import BoxedBool
from torch._inductor.virtualized import V
from torch.fx import GraphModule

from backend_kwargs.torch_internals import inductor_config


def spare_of(gm: GraphModule) -> GraphModule:
    """Return a copy of a lowered graph, which shares its attributes: packed weights cannot be copied."""
    spare = GraphModule(gm, copy.deepcopy(gm.graph))
    spare.meta = dict(gm.meta)
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
