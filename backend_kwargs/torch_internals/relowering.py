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
def around_lowering(example_inputs: Any, options: Mapping[str, object]) -> Iterator[list[Any]]:
    """Set what torch has set when it calls the function that compiles a lowered graph, and options of Inductor.

    The list that it yields gets the strides with which the compiled graph returns its outputs.
    """
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
        reported = stack.enter_context(TracingContext.report_output_strides())
        assert reported is not None  # there is a context
        yield reported


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


def saved_as(strides: Sequence[Sequence[int] | None] | None, example_inputs: Sequence[Any]) -> Sequence[Any]:
    """Return a backward graph's inputs with the strides in which the lowered forward graph returns what it saves.

    As AOTAutograd does when it has the forward graph lowered before it compiles the backward graph.
    """
    context = TracingContext.try_get()
    if not strides or context is None or (metadata := context.fw_metadata) is None:
        return example_inputs
    saved, inputs = strides[metadata.tensors_saved_for_backwards_slice], list(example_inputs)
    for at, stride in enumerate(saved, metadata.num_symints_saved_for_bw or 0):
        value = inputs[at]
        if stride is None or not isinstance(value, torch.Tensor) or not all(isinstance(s, int) for s in value.stride()):
            continue  # with symbols for sizes, Inductor leaves the layouts
        if value.stride() != tuple(stride):
            inputs[at] = value.as_strided(value.size(), stride)
    return inputs


# ---- the place of a graph that is not lowered yet


def empty_place() -> CompiledFxGraph:
    """Return what AOTAutograd takes for a compiled graph, until one takes its place."""
    place: CompiledFxGraph = object.__new__(CompiledFxGraph)
    place._boxed_call, place.compiled_fn_runner, place.current_callable = True, None, None
    place.partition_maps = None  # read to tell the compile of the backward graph
    return place


def is_empty(place: CompiledFxGraph) -> bool:
    """Return whether no compiled graph has taken this place yet."""
    return not hasattr(place, "output_strides")
