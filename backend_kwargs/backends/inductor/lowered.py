"""A compile whose lowered graphs are kept, to be lowered again under other options without tracing the model again.

AOTAutograd traces a graph and splits it, which options of lowering do not change. Its result calls each lowered graph
by an object, the place, and every version of the graph can take that place.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any
from weakref import WeakSet

from torch.fx import GraphModule

from backend_kwargs.backends import CompileInner, Inputs
from backend_kwargs.backends.generated_code import autograd_functions
from backend_kwargs.facts import Call
from backend_kwargs.options.option import Options
from backend_kwargs.torch_internals.dynamo import TracingApart
from backend_kwargs.torch_internals.inductor_code import CompiledFxGraph
from backend_kwargs.torch_internals.relowering import (
    Recording,
    around_lowering,
    fill,
    fresh_boxes,
    is_partitioned,
    noting_recordings,
    spare_of,
    take_place,
    uncompiled,
)


class IncompatibleVersionError(Exception):
    """A version cannot take the place of the others; the message says why."""


@dataclass(slots=True)
class LoweredGraph:
    """A graph as AOTAutograd handed it to Inductor, forward or backward, and the place of its compiled versions."""

    gm: GraphModule
    example_inputs: Inputs
    kwargs: Mapping[str, Any]
    place: Any


@dataclass(slots=True, eq=False)
class Version:
    """Compiled graphs, one for each place, their CUDA-graph wrappers, and what the stages put round backward passes."""

    graphs: list[CompiledFxGraph] = field(default_factory=list)
    recordings: list[Recording] = field(default_factory=list)
    backwards: list[Any] = field(default_factory=list)

    def unrecorded(self) -> "Version":
        """Return the version of the same code without CUDA graphs."""
        plain = {id(each.graph): each.unrecorded() for each in self.recordings}
        return Version([plain.get(id(graph), graph) for graph in self.graphs])

    def record_again(self) -> None:
        """Let its CUDA graphs be recorded anew, in the trees of the next call."""
        for each in self.recordings:
            each.record_again()


@dataclass(eq=False, slots=True)
class ForwardPasses:
    """The living autograd nodes of forward passes, and whether a backward pass has failed."""

    nodes: WeakSet[Any] = field(default_factory=WeakSet)
    has_failed: bool = False

    def forward(self, function: Call, node: Any, *inputs: object) -> object:
        """Call the forward function of a node."""
        self.nodes.add(node)
        return function(node, *inputs)

    def backward(self, function: Call, node: Any, *gradients: object) -> object:
        """Call its backward function."""
        try:
            return function(node, *gradients)
        except Exception:
            self.has_failed = True
            raise


@dataclass
class Lowered:
    """The lowered graphs of one trace, in a context of its own, and which of their versions is in place."""

    options: Options
    context: TracingApart = field(default_factory=TracingApart)
    graphs: list[LoweredGraph] = field(default_factory=list)
    call: Call | None = None
    in_place: Version | None = None
    backwards: list[object] = field(default_factory=list)  # as AOTAutograd made them
    forwards: dict[Any, object] = field(default_factory=dict)  # these too, while `forward_passes` replaces them
    passes: "ForwardPasses | None" = None

    # ---- in place of Inductor's compile_fx, whose arguments these take

    def first(self, version: Version) -> Callable[..., Call]:
        """Return the function that compiles the model, and keeps the graphs that it lowers; they are `version`."""

        def compile_fx(step: Callable[..., Call], gm: object, inputs: Inputs, inner: CompileInner, **kw: Any) -> Call:
            with noting_recordings() as recordings:
                self.call = step(gm, inputs, self._keeping(inner), **kw)
            self.backwards = [vars(each)["backward"] for each in self._functions]
            if self.shareable:
                stands = {id(each.place): copy(each.place) for each in self.graphs}
                version.graphs = list(stands.values())
                for each in self.graphs:
                    each.place.compiled_fn_runner = None
                for recording in recordings:
                    recording.graph = stands[id(recording.graph)]
                version.recordings = recordings
            return self.call

        return compile_fx

    def trace(self, step: Callable[..., Call], gm: object, inputs: Inputs, inner: object, **kw: Any) -> Call:
        """Trace the model, and keep the graph that it lowers: in inference a version is compiled later.

        A backward graph depends on the code of its forward graph, so that tracing ends in an error there.
        """

        def compile_nothing(*_: object, is_inference: bool = False, **__: object) -> Any:
            if not is_inference:
                raise IncompatibleVersionError("it has a backward graph")
            return uncompiled()

        self.call = step(gm, inputs, self._keeping(compile_nothing), **kw)
        return self.call

    def again(self, version: Version) -> Callable[..., Call]:
        """Return the function that lowers the kept graphs again, as `version`."""

        def compile_fx(
            step: object, gm: object, inputs: Inputs, inner: CompileInner, *, config_patches: Options, **kw: Any
        ) -> Call:
            boxes = fresh_boxes(self.graphs[0].kwargs, cudagraphs=bool(config_patches.get("triton.cudagraphs")))
            with noting_recordings() as version.recordings:
                for each in self.graphs:
                    with around_lowering(each.example_inputs, config_patches):
                        graph: Any = inner(spare_of(each.gm), each.example_inputs, **{**each.kwargs, **boxes})
                    version.graphs.append(graph)
            self._check(version)
            return self._shared()

        return compile_fx

    def unchanged(self, step: object, gm: object, inputs: Inputs, inner: object, **kw: Any) -> Call:
        """Compile nothing: return the shared callable."""
        return self._shared()

    # ---- versions

    @cached_property
    def shareable(self) -> bool:
        """Whether other versions can take the places: all graphs are there, and all are Inductor's."""
        backward = sum(bool(each.kwargs.get("is_backward")) for each in self.graphs)
        whole = len(self.graphs) == 1 + backward and backward == bool(self._functions)
        return whole and all(isinstance(each.place, CompiledFxGraph) for each in self.graphs)

    def activate(self, version: Version) -> None:
        """Put a version in place, if another one is."""
        if version is not self.in_place:
            self._put(version, for_good=False)

    def forward_passes(self) -> "ForwardPasses":
        """Return what is noted of forward passes, and of their backward passes, until a version is kept."""
        self.passes, self.in_place = ForwardPasses(), None  # so that the next one is put with what notes
        for function in self._functions:
            self.forwards[function] = vars(function)["forward"]
            function.forward = staticmethod(partial(self.passes.forward, function.forward))
        return self.passes

    def keep(self, version: Version | None) -> None:
        """Put a version in place for good; without one, nothing is called any more."""
        for function, forward in self.forwards.items():
            function.forward = forward
        if version is not None:
            self._put(version, for_good=True)
        # AOTAutograd's function may hold the function that compiled its backward graph, and that this object.
        self.graphs, self.in_place = [], None
        del self.context

    def assembled(self, version: Version) -> None:
        """Note what the stages have put round the backward passes of a version."""
        version.backwards = [vars(each)["backward"] for each in self._functions]
        self.in_place = None

    def _put(self, version: Version, *, for_good: bool) -> None:

        for each, graph in zip(self.graphs, version.graphs, strict=True):
            take_place(each.place, graph, for_good=for_good)
        for function, backward in zip(self._functions, version.backwards, strict=True):
            noting = self.passes and not for_good and staticmethod(partial(self.passes.backward, backward))
            function.backward = noting or backward
        self.in_place = version

    def _check(self, version: Version) -> None:

        for each, graph in zip(self.graphs, version.graphs, strict=True):
            fill(each.place, graph)
            if not isinstance(graph, CompiledFxGraph) or graph.output_strides != each.place.output_strides:
                raise IncompatibleVersionError("its results have other strides")
            if is_partitioned(graph) != is_partitioned(each.place):
                raise IncompatibleVersionError("CUDA graphs record other parts of it")

    def _keeping(self, inner: CompileInner) -> CompileInner:

        def compile_one(gm: GraphModule, example_inputs: Inputs, **kwargs: Any) -> Call:
            kept = LoweredGraph(spare_of(gm), example_inputs, kwargs, None)
            self.graphs.append(kept)
            kept.place = inner(gm, example_inputs, **kwargs)
            return kept.place  # type: ignore[no-any-return]

        return compile_one

    def _shared(self) -> Call:
        """Return the callable that all versions share, as AOTAutograd made it."""
        assert self.call is not None
        for function, backward in zip(self._functions, self.backwards, strict=True):
            function.backward = backward
        return self.call

    @cached_property
    def _functions(self) -> Sequence[type[Any]]:
        return autograd_functions(self.call) if self.call is not None else ()
