"""Parts of a report: the compiled graphs, the code of each, what ran it, and their text."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from backend_kwargs.auto import settings as auto
from backend_kwargs.backend import find_backend
from backend_kwargs.backends.generated_code import comparable, compiled_graphs
from backend_kwargs.compile_records import RACED, Record
from backend_kwargs.errors import counted
from backend_kwargs.facts import Decision, Partition, PrecisionUse, why_fell_back
from backend_kwargs.options.option import Options
from backend_kwargs.registry import decided

if TYPE_CHECKING:
    from backend_kwargs.torch_internals.inductor_code import CompiledFxGraph

MOST = 20  # names of graphs in one line
TVM = "TVM"  # among the compilers of parts
NOT_TOLD = {"key", "graph", "machine", "fixed", "inputs", "model", "budget_s", "differs"}  # of a decision, by a report


@dataclass(frozen=True, slots=True)
class Code:
    """Inductor's code for one direction of a graph.

    `kernels` has their names by kind: "Triton", "C++", "CUTLASS", and "extern" for library calls. `cudagraphs` is
    "off", "skipped: why", "recorded N times", or a note that it is unknown. `differs` is whether the code differs
    from that of the callable passed as `against`, None if there was none.
    """

    direction: str
    kernels: Mapping[str, tuple[str, ...]]
    cudagraphs: str
    seconds: float | None
    cache: str
    source: str = field(repr=False)
    differs: bool | None = None


@dataclass(frozen=True, slots=True)
class EngineShare:
    """What a compiler of parts has of a graph, such as TVM, and the reasons why operators run in eager.

    `failed` counts the parts that failed at a call, and run in eager since.
    """

    engine: str
    partitions: tuple[Partition, ...]
    fallbacks: Mapping[str, str]
    notes: tuple[str, ...] = ()
    failed: int = 0

    @property
    def tuned(self) -> int:
        """The number of kernels with a schedule from a search, of TVM."""
        return sum(each.tuned for each in self.partitions)


@dataclass(frozen=True, slots=True)
class Ran:
    """What ran a graph in place of its backend ("fell_back"), or that this is unknown ("unknown")."""

    status: Literal["fell_back", "unknown"]
    what: str


@dataclass(frozen=True, slots=True)
class Race(Decision):
    """The choice of auto for a graph, without what identifies the graph and its machine."""

    @classmethod
    def of(cls, found: Decision) -> "Race":
        """Return what a report has of a decision."""
        told = {each.name: getattr(found, each.name) for each in fields(Decision) if each.name not in NOT_TOLD}
        return cls(key="", graph="", **told)

    @property
    def table(self) -> str:
        """The race as lines: each candidate with its time, and why it won or lost."""
        from backend_kwargs.auto.reporting import table

        return table(self)


@dataclass(frozen=True, slots=True)
class Break:
    """The place where a graph ended early, and the reason."""

    place: str
    reason: str
    hint: str


@dataclass(frozen=True, slots=True)
class Graph:
    """One compiled graph; `recompiled` is the guard that failed, "" for a first compile.

    `codes` are Inductor's, `relax` is TVM's, and `engine` is ONNX Runtime's or OpenVINO's; other backends report none.
    `race` has the reasons of auto's choice; `ran` is None if the graph runs on its own backend. `rewritten` counts the
    replacements of each rewrite, and `rewrite_costs` has the memory and time that some take; `precision` is what was
    used of the lower precision that was requested, or that won. `cache` is "raced" if `auto` raced the graph in this
    compile; `decided` says when and where it was raced before.
    """

    compile_id: str
    function: str
    backend: str
    options: Options
    seconds: float
    cache: str
    recompiled: str
    ended_by: Break | None
    codes: tuple[Code, ...]
    relax: EngineShare | None = None
    race: Race | None = None
    ran: Ran | None = None
    rewritten: Mapping[str, int] = field(default_factory=dict)
    precision: PrecisionUse | None = None
    engine: EngineShare | None = None
    rewrite_costs: Mapping[str, str] = field(default_factory=dict)
    decided: str = ""

    def inductor_config(self, *, ahead_of_time: bool = False) -> dict[str, Any]:
        """Return `Backend.inductor_config()` of this graph's backend; under auto, with the winner's options."""
        if self.race is None:
            backend = find_backend(self.backend).bind("report", self.options)
        else:
            fixed = {name: value for name, value in self.options.items() if name not in auto.OPTIONS}
            backend = decided(self.race.winner, self.race.options, fixed, self.race.compiler)
        return backend.inductor_config(ahead_of_time=ahead_of_time)


def seconds_of(graphs: Iterable[Graph]) -> float:
    """Return the total compile time, with backward graphs if it is known."""
    backward = (code.seconds or 0.0 for graph in graphs for code in graph.codes if code.direction == "backward")
    return sum(graph.seconds for graph in graphs) + sum(backward)


def unraced(graphs: Iterable[Graph]) -> dict[str, str]:
    """Return of each graph under `race="never"` why it had no stored decision, "" if it had one."""
    return {
        f"graph {graph.compile_id}": graph.race.facts if graph.race.unraced else ""
        for graph in graphs
        if graph.race and graph.options.get("race") == "never"
    }


def served_lines(graphs: Iterable[Graph]) -> Iterator[str]:
    """Yield how many graphs under `race="never"` had a stored decision, which had none, and why."""
    if not (found := unraced(graphs)):
        return
    without = [name for name, why in found.items() if why]
    yield f"race='never': {len(found) - len(without)} of {counted(len(found), 'graph')} had a decision"
    for why in dict.fromkeys(filter(None, found.values())):
        names = [name for name in without if found[name] == why]
        yield f"no decision for {', '.join(names[:MOST])}{', ...' if names[MOST:] else ''}: {why}"


def lines_of(graph: Graph) -> Iterator[str]:
    """Yield the lines that describe a graph."""
    cache = RACED if graph.cache == RACED else f"cache {graph.cache}"
    yield f"graph {graph.compile_id} {graph.function}: {graph.backend}, {graph.seconds:.1f} s, {cache}"
    if graph.options:
        yield f"  options: {', '.join(f'{name}={value!r}' for name, value in graph.options.items())}"
    if graph.recompiled:
        yield f"  recompiled: {graph.recompiled.splitlines()[0]}"
    if graph.precision:
        yield f"  {graph.precision}"
    race = graph.race.table.splitlines() if graph.race else []
    decided = [graph.decided] if graph.decided else []
    codes = (_code_line(code, raced=graph.cache == RACED) for code in graph.codes)
    yield from (f"  {line}" for line in (*race, *decided, *codes))
    if graph.rewritten:
        costs = {name: f" ({of})" if (of := graph.rewrite_costs.get(name)) else "" for name in graph.rewritten}
        made = (f"{name} {times(count)}{costs[name]}" for name, count in graph.rewritten.items())
        yield f"  rewritten: {', '.join(made)}"
    for share in filter(None, (graph.relax, graph.engine)):
        yield from (f"  {line}" for line in engine_lines(share))
    if graph.ran:
        yield f"  {graph.ran.what}"
    if graph.ended_by:
        yield f"  ended at {graph.ended_by.place}: {graph.ended_by.reason}"


def engine_lines(share: EngineShare) -> Iterator[str]:
    """Yield the lines on what a compiler of parts has of a graph."""
    for graph in dict.fromkeys(each.graph for each in share.partitions):
        own = [each for each in share.partitions if each.graph == graph]
        tuned, seconds = sum(each.tuned for each in own), sum(each.seconds for each in own)
        tunes = share.engine == TVM
        how = "" if not tunes else f", {counted(tuned, 'kernel')} tuned" if tuned else ", untuned"
        where = f"{counted(sum(each.operators for each in own), 'operator')} in {counted(len(own), 'partition')}"
        yield f"{graph}: {where} of {share.engine}{how}; {seconds:.1f} s"
        yield from (f"  {note}" for note in dict.fromkeys(note for each in own for note in each.notes))
    if not share.partitions:
        yield f"no partition of {share.engine}"
    yield from (f"in eager: {op}, because {reason}" for op, reason in share.fallbacks.items())


def _code_line(code: Code, *, raced: bool) -> str:
    kernels = "; ".join(f"{len(names)} {kind} ({', '.join(names)})" for kind, names in code.kernels.items())
    seconds = "" if code.seconds is None else f"{code.seconds:.1f} s, "
    cost = "" if code.direction == "forward" else f"; {seconds}{RACED if raced else f'cache {code.cache}'}"
    differs = {True: "; differs from the other", False: "; same as the other", None: ""}[code.differs]
    return f"{code.direction}: {kernels or 'no kernels'}; CUDA graphs {code.cudagraphs}{cost}{differs}"


def times(count: int) -> str:
    """Return "once", "twice" or "3 times"."""
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


# ---- the code that Inductor generated for a graph, read on demand

# How generated code makes or calls a kernel: the name after `async_compile.`, and our word for its kind.
MADE: Mapping[str, str] = {
    "triton": "Triton",
    "multi_kernel": "Triton multi-kernel",
    "cpp": "C++",
    "cpp_pybinding": "C++",
    "cuda": "CUTLASS",
    "cutlass": "CUTLASS",
    "cutedsl": "CuTeDSL",
}
KERNELS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("C++", re.compile(r'^extern "C" +void +(?!kernel\b)(\w+)\(', re.MULTILINE)),
    ("Triton", re.compile(r"^ *(?:static )?(?:CUfunction|LazyKernel\w*) +(?:kernels\.)?(triton_\w+)", re.MULTILINE)),
    ("extern", re.compile(r"\bextern_kernels\.(\w+)\(")),
    ("extern", re.compile(r"(?<!\.)\b(?:torch\.ops\.)?aten\.(\w+(?:\.\w+)?)\(")),
    ("extern", re.compile(r"\baoti_torch_(?:cpu|cuda)_(\w+)\(")),
    ("extern", re.compile(r'\baoti_torch_call_dispatcher\("([\w:]+)"')),
)
MADE_HERE = re.compile(r"^(\w+) = async_compile\.(\w+)\(", re.MULTILINE)
FORWARD_SKIPPED = "skipped with the forward graph's"


def codes_of(record: Record) -> list[Code]:
    """Return Inductor's code for a graph, forward before backward; nothing if another compiler made it."""
    return sorted(
        (_direction(record, graph) for graph in compiled_graphs(record.compiled())),
        key=lambda code: code.direction,
        reverse=True,
    )


def unknown_here() -> str:
    """Return the text for what this torch does not report."""
    import torch

    return f"unknown on torch {torch.__version__}"


def _direction(record: Record, graph: "CompiledFxGraph") -> Code:
    backward = bool(graph.fx_kwargs.get("is_backward"))
    seconds, cache = _backward_metrics(record) if backward else (record.facts.seconds, record.facts.cache)
    return Code(
        "backward" if backward else "forward",
        _kernels(graph.source_code),
        _cudagraphs(record, graph, "BACKWARD" if backward else ""),
        seconds,
        cache,
        graph.source_code,
    )


def _kernels(source: str) -> dict[str, tuple[str, ...]]:
    """Return the names of the kernels that `source` defines and of the library functions it calls, by kind."""
    source = comparable(source)
    made = [(MADE.get(how, how), name) for name, how in MADE_HERE.findall(source)]
    named = [(kind, name) for kind, pattern in KERNELS for name in pattern.findall(source)]
    kinds = dict.fromkeys(kind for kind, _ in (*made, *named))
    return {kind: tuple(dict.fromkeys(n for k, n in (*made, *named) if k == kind)) for kind in kinds}


def _backward_metrics(record: Record) -> tuple[float | None, str]:
    """Return the seconds and the cache status of a backward graph, which is compiled after its forward graph."""
    from backend_kwargs.torch_internals.dynamo import recent_compiles

    kept = recent_compiles()
    later = [m for m in kept if (m.start_time_us or 0) > record.at]
    metrics = next((m for m in later if m.compile_id == record.compile_id and not m.is_forward), None)
    if metrics is None:  # compiled or loaded with its forward graph, or dropped from torch's list of recent compiles
        return None, record.facts.cache if len(later) < len(kept) else "unknown: torch keeps its last compiles only"
    counts = (("hit", metrics.inductor_fx_local_cache_hit_count), ("miss", metrics.inductor_fx_local_cache_miss_count))
    return (metrics.duration_us or 0) / 1e6, next((word for word, count in counts if count), record.facts.cache)


def _cudagraphs(record: Record, graph: "CompiledFxGraph", mode: str) -> str:
    """Return the status of CUDA graphs: torch decides at compile time, and again at the first calls."""
    why = graph.disabled_cudagraphs_reason or "; ".join(
        getattr(graph.cudagraph_info, "cudagraph_fail_reasons", ()) or ()
    )
    if record.facts.options.get("record_cudagraphs") is False:
        return "off"
    if graph.cudagraph_info is None and not why:
        return FORWARD_SKIPPED if mode and record.options.get("triton.cudagraphs") else "off"
    if "cuda" not in graph.device_types:
        return "skipped: no tensor is on a GPU"
    if why:
        return f"skipped: {why.strip().removeprefix('skipping cudagraphs due to ').rstrip(': ')}"
    return _recordings(record.compile_id, mode, next(iter(graph.device_idxs)))


def _recordings(compile_id: str, mode: str, device: int) -> str:
    from backend_kwargs.torch_internals.cudagraphs import recordings

    try:
        found = recordings(compile_id, device, backward=bool(mode))
    except AttributeError:
        return unknown_here()
    if found is None:
        return "not recorded: not called yet"
    count, mutates = found
    if mutates:
        return "skipped: mutated inputs"
    return f"recorded {times(count)}" if count else "not recorded yet: the first call warms up, the next records"


# ---- what ran a graph

RETURNED = Ran("fell_back", "ran in eager: the backend returned the graph unchanged")
UNKNOWN = Ran("unknown", "unknown what runs it: this backend does not report whether it fell back")


def share_of(record: Record) -> EngineShare | None:
    """Return what a compiler of parts has of a graph, with what it has of the backward graph once compiled."""
    if (summary := record.facts.parts) is None:
        return None
    partitions = tuple(summary.partitions)
    return EngineShare(summary.compiler, partitions, dict(summary.fallbacks), summary.notes, summary.failed)


def ran_of(record: Record, codes: Sequence[Code], share: EngineShare | None) -> Ran | None:
    """Return what ran a graph, None if it was its own backend."""
    if share:
        why = why_fell_back(share.engine, len(share.partitions), share.failed)
        return Ran("fell_back", f"ran in eager: {why}") if why else None
    if record.backend.takes_inductor_options or record.spec == "dynamo:inductor":
        return None
    if codes:
        return Ran("unknown", "ran by Inductor, which this backend is built on or falls back to")
    return RETURNED if record.facts.unchanged else UNKNOWN


def worst(all_ran: Iterable[Ran | None]) -> Ran | None:
    """Return the first that fell back, else the first that is unknown, else None."""
    return min(filter(None, all_ran), key=lambda ran: ran.status != "fell_back", default=None)
