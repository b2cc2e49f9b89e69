"""Compiles the candidates of a race: the model is traced once, and its lowered graphs are compiled for each candidate.

Where an option acts before lowering, the model is traced again. Code that is compiled for CUDA graphs is a candidate
with them and without. The winner of a race is what was raced, if nothing of it depends on the race.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from backend_kwargs.auto.alternating import AS_RACED, WITH, WITHOUT, Ways
from backend_kwargs.auto.candidates import toggled, with_recording
from backend_kwargs.auto.question import Request
from backend_kwargs.backends import CapturedGraph
from backend_kwargs.backends.inductor.lowered import IncompatibleVersionError, Lowered, LoweredGraph, Version
from backend_kwargs.facts import EAGER, Call, Compiled, RaceRow
from backend_kwargs.graphs.replay import Task
from backend_kwargs.graphs.writes import in_eager
from backend_kwargs.options.option import Options
from backend_kwargs.rewrites.table import find_rewrite, name_of
from backend_kwargs.torch_internals import functorch
from backend_kwargs.torch_internals.caches import record_artifacts
from backend_kwargs.torch_internals.dynamo import compile_id, compiling_as
from backend_kwargs.trial.trees import tensors_of

# Options that Inductor reads only when it lowers a graph, and later; test_auto_compiling compares the graphs before.
OF_LOWERING = frozenset(
    {
        "triton.cudagraphs",
        "record_cudagraphs",
        "clone_outputs",
        "max_autotune_pointwise",
        "max_autotune_gemm",
        "triton.mix_order_reduction_autotune_split_size",
        "triton.mix_order_reduction_allow_multi_stages",
        "triton.multi_kernel",
        "online_softmax",
        "combo_kernels",
        "benchmark_combo_kernel",
        "cpp.threads",
        "cpp.simdlen",
        "size_asserts",
    }
)


def differ_in_lowering(these: Options, those: Options) -> bool:
    """Return whether a model traced under `these` options can be lowered under `those`."""
    names = {name for name in {*these, *those} if these.get(name) != those.get(name)}
    return names <= OF_LOWERING | {"rewrites"} and before_autograd(these) == before_autograd(those)


def before_autograd(options: Options) -> list[str]:
    """Return the rewrites of dynamo's graph, which another trace follows."""
    return [entry for entry in options.get("rewrites") or () if find_rewrite(name_of(entry)).traced]


# Options under which each candidate is compiled by itself: they change what is lowered, or need the inputs' values.
ALONE = ("freezing", "precision", "cpp_wrapper", "use_aoti")


@dataclass(slots=True)
class Candidate:
    """What a candidate was compiled to: perhaps one of the versions of `lowered` graphs.

    `whole` is the version with all CUDA-graph wrappers. `artifacts` are those of torch's caches.
    """

    compiled: Compiled
    options: Options
    lowered: Lowered | None = None
    version: Version | None = None
    whole: Version | None = None
    artifacts: list[Any] = field(default_factory=list)
    serving: Compiled | None = None  # what serves once its version is kept

    @property
    def has_other(self) -> bool:
        """Whether the same code is a candidate with CUDA graphs and without."""
        return self.whole is not None and bool(self.whole.recordings)


@dataclass
class Compiles:
    """The compiles of one race; `lowered` are the graphs that the first candidate was lowered from."""

    request: Request
    task: Task
    traces: list[Lowered] = field(default_factory=list)
    lowered: list[LoweredGraph] = field(default_factory=list)

    def compile(self, options: Options, compiler: str = "") -> Candidate:
        """Return a candidate that is compiled under these options, without tracing the model if that is possible."""
        if compiler or not self.may_share(options):
            # The error under a lower precision is measured by the race, on what the compiled graph returns.
            unbounded = {"max_error": None} if "precision" in options else {}
            return Candidate(self.request.compile(self._graph(), {**options, **unbounded}, compiler), options)
        whole = with_recording(options)
        for lowered in self.traces:
            if differ_in_lowering(lowered.options, whole):
                try:
                    return self._lowered_again(lowered, whole, options)
                except IncompatibleVersionError:
                    break
        return self._traced(whole, options)

    def trace(self, options: Options) -> None:
        """Trace the model as for these options, and keep the graphs that Inductor would lower; raise in training."""
        lowered = Lowered(with_recording(options))
        self.lowered = lowered.graphs
        with lowered.context.entered(), functorch.patched(enable_autograd_cache=False):
            self.request.compile(self._graph(lowered.trace), lowered.options, "")
        if self.may_share(options) and lowered.shareable:
            self.traces.append(lowered)

    def other(self, candidate: Candidate) -> Candidate:
        """Return the same code with CUDA graphs if the candidate has none, otherwise without."""
        assert candidate.lowered is not None
        assert candidate.whole is not None
        other = self._version(candidate.lowered, candidate.whole, toggled(candidate.options))
        other.artifacts += candidate.artifacts
        return other

    def kept(self, candidate: Candidate) -> Compiled | None:
        """Return the candidate as the result of the compile, after the race; None if it must be compiled again."""
        lowered, version = candidate.lowered, candidate.version
        if lowered is None or version is None or not self._adopt(candidate):
            return None
        version.record_again()
        lowered.keep(version)
        return candidate.serving

    def ways(self, candidate: Candidate, rows: Mapping[str, RaceRow], *, is_clear: bool) -> Ways | None:
        """Return the candidate's code as it was raced, after the race; None if it must be compiled again."""
        lowered, whole = candidate.lowered, candidate.whole
        if lowered is None or whole is None or not self._adopt(candidate):
            return None
        whole.record_again()
        number = compile_id()
        named = {rows[way].name: self._version(lowered, whole, rows[way].options) for way in (WITHOUT, WITH)}
        if rows[AS_RACED].name == EAGER:
            named[EAGER] = Candidate(Compiled(in_eager(self.request.gm)), {})
        made = {way: named[row.name] for way, row in rows.items()}

        def keep(way: str) -> Call:
            if way == AS_RACED and (version := made[WITH].version):  # what others have recorded in its trees goes
                with compiling_as(number):
                    version.record_again()
            kept = made[way]
            made.clear()
            lowered.keep(kept.version)
            return (kept.serving or kept.compiled).call

        calls = {way: each.compiled.call for way, each in made.items()}
        facts = made[AS_RACED].compiled.facts
        devices = {each.device for each in tensors_of(self.request.example_inputs)}
        passes = lowered.forward_passes() if self.task.training else None
        return Ways(calls, keep, rows, devices, is_clear, not self.task.inputs.written, passes, facts=facts)

    # ---- the ways to a candidate

    def _traced(self, whole: Options, options: Options) -> Candidate:
        lowered, version, compiled = self._first(whole)
        if not lowered.graphs:  # out of AOTAutograd's cache, which has no lowered graphs
            with functorch.patched(enable_autograd_cache=False):
                lowered, version, compiled = self._first(whole)
        if not lowered.shareable:
            if whole != options:
                compiled = self.request.compile(self._graph(), options, "")
            return Candidate(compiled, options)
        self.traces.append(lowered)
        return self._version(lowered, version, options)

    def _first(self, whole: Options) -> tuple[Lowered, Version, Compiled]:
        lowered, version = Lowered(whole), Version()
        self.lowered = self.lowered or lowered.graphs
        with lowered.context.entered():
            compiled = self.request.compile(self._graph(lowered.first(version)), whole, "")
        return lowered, version, compiled

    def _lowered_again(self, lowered: Lowered, whole: Options, options: Options) -> Candidate:
        version = Version()
        with lowered.context.entered():
            self.request.compile(self._graph(lowered.again(version)), whole, "")
        return self._version(lowered, version, options)

    def _version(self, lowered: Lowered, whole: Version, options: Options) -> Candidate:
        """Return a version as a candidate, with what the stages put round it under `options`."""
        version = whole if options == with_recording(options) else whole.unrecorded()
        compiled = self.request.compile(self._graph(lowered.unchanged), options, "")
        lowered.assembled(version)

        shared = compiled.call

        def call(*inputs: object) -> object:
            lowered.activate(version)
            return shared(*inputs)

        return Candidate(compiled.called_by(call), options, lowered, version, whole, serving=compiled)

    def _graph(self, compile_fx: Callable[..., Call] | None = None) -> CapturedGraph:
        graph = self.request.graph
        return replace(graph, gm=self.task.copy(), compile_fx=compile_fx or graph.compile_fx)

    def _adopt(self, candidate: Candidate) -> bool:
        """Make a candidate's context that of dynamo's trace; return False where it cannot outlast the race."""
        lowered = candidate.lowered
        # Sizes that are symbols any candidate may have guarded.
        dynamic = any(isinstance(value, torch.SymInt) for value in self.request.example_inputs)
        if lowered is None or lowered.context.changed or dynamic:
            return False
        lowered.context.adopt()
        record_artifacts(candidate.artifacts)
        return True

    def may_share(self, options: Options) -> bool:
        """Return whether the lowered graphs may be kept: nothing else stands in place of Inductor's `compile_fx`."""
        fixed = self.request.fixed
        return self.request.graph.compile_fx is None and not any(options.get(name, fixed.get(name)) for name in ALONE)
