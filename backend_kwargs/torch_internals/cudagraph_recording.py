"""CUDA graphs as torch adds them to compiled code: a wrapper, which can be left out, removed, and put there again."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch._inductor import output_code
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.utils import BoxedBool

from backend_kwargs.torch_internals.replacing import replaced, undone

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
        plain = stand_in(self.graph)
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


def stand_in(graph: CompiledFxGraph) -> CompiledFxGraph:
    """Return another object with the contents of `graph`."""
    other: CompiledFxGraph = object.__new__(type(graph))
    vars(other).update(vars(graph))
    return other


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
