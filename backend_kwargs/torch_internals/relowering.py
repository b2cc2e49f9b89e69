"""A lowered graph that is kept to be compiled by Inductor again: a copy, and what surrounds such a compile.

CUDA graphs are added by torch to compiled code as a wrapper, which can be left out, removed, and put there again.
"""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import compiled_autograd
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import compile_fx, output_code
from torch._inductor.cudagraph_utils import BoxedDeviceIndex
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.utils import BoxedBool
from torch._inductor.virtualized import V
from torch.fx import GraphModule

from backend_kwargs.torch_internals import inductor_config
from backend_kwargs.torch_internals.replacing import replaced, undone


def spare_of(gm: GraphModule, copies: dict[int, GraphModule] | None = None) -> GraphModule:
    """Return a copy of a lowered graph and of those in it, which have the same key in Inductor's cache.

    They may be changed. Tensors are shared, since packed weights cannot be copied. `copies` are those made before.
    """
    copies = {} if copies is None else copies
    if id(gm) in copies:
        return copies[id(gm)]
    # In the order of the original's attributes, in which the key has them. Inductor removes weights that it packs.
    spare = copies[id(gm)] = GraphModule.__new__(GraphModule)
    kept = {name: value for name, value in vars(gm).items() if name != "_graph"}
    spare.__dict__ = {name: copy.copy(value) if isinstance(value, dict) else value for name, value in kept.items()}
    modules = vars(gm)["_modules"].items()
    spare.__dict__["_modules"] = {n: spare_of(m, copies) if isinstance(m, GraphModule) else m for n, m in modules}
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


def is_partitioned(graph: CompiledFxGraph) -> bool:
    """Return whether CUDA graphs record parts of a graph, which the compile of its backward graph depends on."""
    return len(getattr(graph, "partition_maps", None) or ()) > 1


# The functions that wrap a graph that is just compiled or out of a cache: as a whole, or each of its partitions.
WRAPPERS = ("cudagraph_post_compile", "cudagraph_partition_post_compile")
UNRECORDED = "it is run without"


@dataclass(slots=True)
class Recording:
    """The wrapper of one compiled graph, and the code in it.

    `code` is what the graph called before, and `partitions` what that calls, None if it has none. `wrap` puts a wrapper
    round a graph, which records at its first call, in the trees of that time.
    """

    graph: CompiledFxGraph
    code: Callable[..., Any]
    partitions: list[Callable[..., Any]] | None
    wrap: Callable[[CompiledFxGraph], None]

    def record_again(self) -> None:
        """Replace the wrapper by a new one, which has recorded nothing."""
        self.graph.current_callable = self.code
        if self.partitions is not None:
            self.graph.compiled_fn_runner.partitions = list(self.partitions)  # type: ignore[union-attr]
        self.wrap(self.graph)

    def unrecorded(self) -> CompiledFxGraph:
        """Return the same graph without the wrapper, with its inputs aligned, as where torch records nothing."""
        plain = copy.copy(self.graph)
        plain.current_callable, runner = self.code, self.graph.compiled_fn_runner
        if runner is not None and self.partitions is not None:
            plain.compiled_fn_runner = copy.copy(runner)
            plain.compiled_fn_runner.partitions = list(self.partitions)
            plain.recursively_apply_fns = plain.compiled_fn_runner.recursively_apply_fns
            plain.current_callable = plain.compiled_fn_runner.call
        _align(plain)
        return plain


@contextmanager
def noting_recordings() -> Iterator[list[Recording]]:
    """Yield a list that gets the wrapper of each graph that is compiled meanwhile, if torch puts one there."""
    noted: list[Recording] = []

    def noting(wrapper: Callable[..., None]) -> Callable[..., None]:
        def note(inputs: Any, graph: CompiledFxGraph, cudagraphs: Any, constants: Any, device: Any) -> None:
            runner, code = graph.compiled_fn_runner, graph.current_callable
            assert code is not None
            partitions = None if runner is None else list(runner.partitions)
            wrapper(inputs, graph, cudagraphs, constants, device)
            if graph.current_callable is not code or (runner is not None and runner.partitions != partitions):
                noted.append(
                    Recording(
                        graph, code, partitions, lambda again: wrapper(inputs, again, cudagraphs, constants, device)
                    )
                )

        return note

    with undone() as stack:
        for name in WRAPPERS:
            stack.enter_context(replaced(output_code, name, noting(getattr(output_code, name))))
        yield noted


@contextmanager
def recording_nothing() -> Iterator[None]:
    """Leave the wrappers out: what is compiled for CUDA graphs meanwhile, or comes out of a cache, runs without."""

    def leave_out(_inputs: Any, graph: CompiledFxGraph, cudagraphs: Any, _constants: Any, _device: Any) -> None:
        # `cudagraphs` stays as it is: it is part of the key of the backward graph, whose code depends on it.
        _align(graph)

    with undone() as stack:
        for name in WRAPPERS:
            stack.enter_context(replaced(output_code, name, leave_out))
        yield


def _align(graph: CompiledFxGraph) -> None:
    """Copy inputs that are not aligned as the code expects; a recorded graph has inputs of its own instead."""
    output_code.maybe_realign_inputs(BoxedBool(False), graph, graph.inputs_to_check, graph.mutated_input_idxs)
    graph.disabled_cudagraphs_reason = UNRECORDED


# ---- one graph in the place of another


def uncompiled() -> CompiledFxGraph:
    """Return a place for graphs that nothing has been compiled for; it is not saved in AOTAutograd's cache."""
    place = object.__new__(CompiledFxGraph)
    place._boxed_call, place.compiled_fn_runner = True, None
    return place


def fill(place: CompiledFxGraph, graph: CompiledFxGraph) -> None:
    """Let a place that is still empty do what its first graph does."""
    if not hasattr(place, "current_callable"):
        take_place(place, graph, for_good=False)


def take_place(place: CompiledFxGraph, of: CompiledFxGraph, *, for_good: bool) -> None:
    """Let `place`, which a callable of AOTAutograd's holds, do what another graph does.

    Each graph empties its runner when it is freed: the place has the runner only `for_good`.
    """
    vars(place).update(vars(of))
    (of if for_good else place).compiled_fn_runner = None
