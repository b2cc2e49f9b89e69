"""The code that Inductor generated for a graph, read on demand, and what ran the graph if it was not its backend."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from backend_kwargs.backends.generated_code import comparable, compiled_graphs
from backend_kwargs.compile_records import Record
from backend_kwargs.facts import why_fell_back
from backend_kwargs.report.graphs import Code, EngineShare, Ran, times

if TYPE_CHECKING:
    from backend_kwargs.torch_internals.inductor_code import CompiledFxGraph

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
    ranked = sorted(filter(None, all_ran), key=lambda ran: ran.status != "fell_back")
    return ranked[0] if ranked else None
