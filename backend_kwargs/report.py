"""After compiling: what was really generated, why, and what to change."""

import functools
import inspect
import re
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from backend_kwargs.errors import BackendKwargsError, wrong_value
from backend_kwargs.records import WRAPPER, Record, records

SLOW_S = 30.0
# How generated code makes a kernel, or calls one: what follows `async_compile.`, and what we call it.
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
# Comments tell lines of the model and a running number of the graph, which differ where the code is one.
COMMENT = re.compile(r"^\s*(?:#(?!include|define|pragma|if|endif|else)|//).*\n", re.MULTILINE)
COMPILE_ID = re.compile(r"^\d+/\d+(?:_\d+)?: ")

# A cause found in the guard that failed, as a pattern, and what would change it.
RECOMPILES: tuple[tuple[re.Pattern[str], str, str], ...] = (
    (
        re.compile(r"tensor '(?P<name>.+)' size mismatch at index (?P<dim>\d+)"),
        "{name}.size({dim}) changed {times}",
        "torch.compile(..., dynamic=True), or torch._dynamo.mark_dynamic({name}, {dim}) before the first call",
    ),
    (
        re.compile(r"tensor '(?P<name>.+)' (?P<what>dtype|rank|stride|requires_grad|dispatch key set) mismatch"),
        "the {what} of {name} changed {times}",
        "hand in tensors of one {what}",
    ),
    (
        re.compile(r"GLOBAL_STATE changed: *(?P<what>\w+)"),
        "{what} changed {times}",
        "call it under one such state, as with torch.no_grad() round every call",
    ),
    (
        re.compile(r"^(?P<name>[\w.\[\]'\"]+) == (?P<value>[^ ]+)"),
        "{name} was {value} and changed {times}",
        "hand it in as a tensor, or torch.compile(..., dynamic=True)",
    ),
)
SKIPS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile("mutat"), "write to no input in place: return the new value, or keep it in a buffer of the module"),
    (re.compile("no tensor"), "run on a GPU"),
    (re.compile("cpu|multiple devices"), "put every tensor of the graph on one GPU"),
    (re.compile("dynamic|symbolic"), "torch.compile(..., dynamic=False) where the shapes are few"),
)
FORWARD_SKIPPED = "skipped with the forward graph's"
OTHER_SKIP = "TORCH_LOGS=cudagraphs tells more"
TUNING = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning")


@dataclass(frozen=True, slots=True)
class Code:
    """What Inductor generated for one direction of a graph.

    `kernels` has their names by kind: "Triton", "C++", "CUTLASS", and "extern" for calls into libraries. `cudagraphs`
    is "off", "skipped: why", "recorded N times", or what is not known. `differs` tells whether the code is other than
    that of the callable reported `against`, None where there was none to compare.
    """

    direction: str
    kernels: Mapping[str, tuple[str, ...]]
    cudagraphs: str
    seconds: float | None
    cache: str
    source: str = field(repr=False)
    differs: bool | None = None


@dataclass(frozen=True, slots=True)
class Break:
    """Where a graph ended early, and why."""

    place: str
    reason: str
    hint: str


@dataclass(frozen=True, slots=True)
class Graph:
    """One compiled graph; `recompiled` is the guard that failed, "" on a first compile. No `codes` without Inductor."""

    compile_id: str
    function: str
    backend: str
    options: Mapping[str, Any]
    seconds: float
    cache: str
    recompiled: str
    ended_by: Break | None
    codes: tuple[Code, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What torch.compile made of one callable; `advice` has each trouble's cause and what to change."""

    graphs: tuple[Graph, ...]
    advice: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def breaks(self) -> tuple[Break, ...]:
        """Where graphs end early, each once."""
        return tuple(dict.fromkeys(graph.ended_by for graph in self.graphs if graph.ended_by))

    @property
    def recompiles(self) -> tuple[str, ...]:
        """The guard that failed, for each graph compiled again."""
        return tuple(graph.recompiled for graph in self.graphs if graph.recompiled)

    @property
    def seconds(self) -> float:
        """What the backend took, backward included where torch still knows."""
        return _seconds(self.graphs)

    def __str__(self) -> str:
        counts = ((len(self.graphs), "graph"), (len(self.breaks), "break"), (len(self.recompiles), "recompile"))
        head = f"{', '.join(_number(count, what) for count, what in counts)}, {self.seconds:.1f} s in the backend"
        told = [head, *(line for graph in self.graphs for line in _graph_lines(graph)), *self.notes]
        return "\n".join([*told, *(f"advice: {advice}" for advice in self.advice)])

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, without the generated code; a value that JSON has no form for is left to the writer."""
        data = asdict(self) | {"breaks": [asdict(each) for each in self.breaks], "seconds": self.seconds}
        for code in (code for graph in data["graphs"] for code in graph["codes"]):
            del code["source"]
        return data


def report(compiled: Callable[..., Any], *, against: Callable[..., Any] | None = None) -> Report:
    """Report what became of `compiled`, as torch.compile returned it, once it has been called.

    `against` is another one, such as the same model under the default: each code then tells whether it differs.

    Raises:
        BackendKwargsError: where `compiled` is no such callable, or no backend of this package compiled for it.

    """
    found, notes = _records_of(compiled)
    graphs = tuple(_graph(record, other) for record, other in zip(found, _others(against, len(found)), strict=True))
    return Report(graphs, tuple(_advice(graphs)), (*notes, *_unseen_breaks(graphs)))


def _others(against: Callable[..., Any] | None, count: int) -> Sequence[Sequence[Code] | None]:
    if against is None:
        return [None] * count
    codes = [_codes(record) for record in _records_of(against)[0]]
    return (codes + [[]] * count)[:count]


def _records_of(compiled: Any) -> tuple[list[Record], tuple[str, ...]]:
    owner = _owner(compiled)
    everything = records()
    own = [record for record in everything if record.owner() is owner]
    if own:
        return own, ()
    code = _code(owner)
    shared = [record for record in everything if code is not None and _code(record.owner()) is code]
    if shared:
        return shared, ("Compiled for another torch.compile of the same code, whose graphs serve this one too.",)
    raise BackendKwargsError(
        "Nothing to report: call it first, and compile it by a backend of this package, "
        'such as torch.compile(model, backend=make_backend("inductor")).'
    )


def _owner(compiled: Any) -> Any:
    """Return what torch.compile was given, as its own wrapper holds it."""
    import torch

    call = compiled
    if isinstance(compiled, torch.nn.Module):
        call = compiled._compiled_call_impl or compiled.forward  # by Module.compile(), or torch.compile(module)
    if not isinstance(call, types.FunctionType) or call.__code__.co_name != WRAPPER:
        raise wrong_value("report", "what torch.compile returned", compiled)
    return inspect.getclosurevars(call).nonlocals["fn"]


def _code(owner: Any) -> Any:
    """Return the code that dynamo compiles for `owner`."""
    import torch

    given = getattr(owner, "__wrapped__", owner)  # torch's own modules are all called through one function
    module = getattr(given, "__self__", given)
    return getattr(module.forward if isinstance(module, torch.nn.Module) else given, "__code__", None)


def _graph(record: Record, other: Sequence[Code] | None) -> Graph:
    codes = _codes(record)
    if other is not None:
        codes = [replace(code, differs=_differs(code, other[at : at + 1])) for at, code in enumerate(codes)]
    return Graph(
        record.compile_id,
        record.function,
        record.spec,
        record.options,
        record.seconds,
        record.cache,
        _unknown() if record.recompiled is None else record.recompiled,
        _break(record),
        tuple(codes),
    )


def _differs(code: Code, other: Sequence[Code]) -> bool:
    return [_comparable(code.source)] != [_comparable(each.source) for each in other]


def _comparable(source: str) -> str:
    return COMMENT.sub("", source)


def _break(record: Record) -> Break | None:
    if not record.break_reason:
        return None
    lines = [line.strip() for line in record.break_reason.splitlines()]
    hints = [line.removeprefix("Hint:").strip() for line in lines if line.startswith("Hint:")]
    return Break(record.place, lines[0], hints[0] if hints else "")


def _unseen_breaks(graphs: Sequence[Graph]) -> Iterator[str]:
    """Tell of breaks before the first operation of a frame: no graph was handed to a backend there."""
    seen = {graph.ended_by.place.rpartition(":")[2] for graph in graphs if graph.ended_by}
    for function in dict.fromkeys(graph.function for graph in graphs):
        resumed = re.fullmatch(r"torch_dynamo_resume_in_(.+)_at_(\d+)", function)
        if resumed and resumed[2] not in seen:
            yield (
                f"A graph break in {resumed[1]} at line {resumed[2]} comes before any operation; "
                "TORCH_LOGS=graph_breaks tells why."
            )


# ---- what Inductor generated


def _codes(record: Record) -> list[Code]:
    from torch._inductor.output_code import CompiledFxGraph

    graphs = [each for each in _held(record.compiled()) if isinstance(each, CompiledFxGraph)]
    return sorted((_direction(record, graph) for graph in graphs), key=lambda code: code.direction, reverse=True)


def _direction(record: Record, graph: Any) -> Code:
    backward = bool(graph.fx_kwargs.get("is_backward"))
    seconds, cache = _backward_metrics(record) if backward else (record.seconds, record.cache)
    return Code(
        "backward" if backward else "forward",
        _kernels(graph.source_code),
        _cudagraphs(record, graph, "BACKWARD" if backward else ""),
        seconds,
        cache,
        graph.source_code,
    )


def _held(root: Any) -> Iterator[Any]:
    """Walk the callables that make up a compiled one: closures, attributes, bound and partial arguments.

    A backward graph that was compiled later is found where autograd finds it.
    """
    seen: dict[int, Any] = {}
    waiting = [root]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or not callable(each):
            continue
        seen[id(each)] = each
        yield each
        waiting.extend(reversed([*_parts(each)]))


def _parts(each: Any) -> Iterable[Any]:
    import torch

    if isinstance(each, functools.partial):
        return [each.func, *each.args]
    if isinstance(each, types.MethodType | types.BuiltinMethodType):  # such as the apply() of an autograd function
        return [each.__self__, getattr(each, "__func__", None)]
    if isinstance(each, torch.fx.GraphModule):  # where regions are compiled, or nothing is
        return [node.target for node in each.graph.nodes if isinstance(node.target, types.FunctionType)]
    if isinstance(each, torch.nn.Module | torch.Tensor | types.ModuleType):
        return []
    if isinstance(each, types.FunctionType):
        return [*map(_content, each.__closure__ or ()), *vars(each).values()]
    of_torch = type(each).__module__.startswith("torch.") and hasattr(each, "__dict__")
    return list(vars(each).values()) if of_torch else []


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a cell still empty
        return None


def _kernels(source: str) -> dict[str, tuple[str, ...]]:
    """Return the names of the kernels that `source` makes and of the library functions it calls, by kind."""
    source = _comparable(source)
    made = [(MADE.get(how, how), name) for name, how in MADE_HERE.findall(source)]
    named = [(kind, name) for kind, pattern in KERNELS for name in pattern.findall(source)]
    kinds = dict.fromkeys(kind for kind, _ in (*made, *named))
    return {kind: tuple(dict.fromkeys(n for k, n in (*made, *named) if k == kind)) for kind in kinds}


def _backward_metrics(record: Record) -> tuple[float | None, str]:
    """Return the seconds and the cache's outcome of a backward graph, which is compiled after its forward one."""
    from torch._dynamo.utils import get_compilation_metrics

    kept = get_compilation_metrics()
    later = [m for m in kept if (m.start_time_us or 0) > record.at]
    found = next((m for m in later if m.compile_id == record.compile_id and not m.is_forward), None)
    if found is None:  # compiled or loaded along with its forward graph, where torch would still know of another time
        return None, record.cache if len(later) < len(kept) else "unknown: torch keeps its last compiles only"
    counts = (("hit", found.inductor_fx_local_cache_hit_count), ("miss", found.inductor_fx_local_cache_miss_count))
    return (found.duration_us or 0) / 1e6, next((word for word, count in counts if count), record.cache)


# ---- CUDA graphs


def _cudagraphs(record: Record, graph: Any, mode: str) -> str:
    """Tell what became of CUDA graphs: torch decides at compile time, and again at the first calls."""
    why = graph.disabled_cudagraphs_reason or _failed(graph.cudagraph_info)
    if graph.cudagraph_info is None and not why:
        return FORWARD_SKIPPED if mode and record.options.get("triton.cudagraphs") else "off"
    if "cuda" not in graph.device_types:
        return "skipped: no tensor is on a GPU"
    if why:
        return f"skipped: {why.strip().removeprefix('skipping cudagraphs due to ').rstrip(': ')}"
    return _recordings(record.compile_id, mode, next(iter(graph.device_idxs)))


def _failed(info: Any) -> str:
    return "; ".join(getattr(info, "cudagraph_fail_reasons", ()) or ())


def _recordings(compile_id: str, mode: str, device: int) -> str:
    from torch._inductor import cudagraph_trees

    try:
        manager: Any = cudagraph_trees.get_manager(device, create_if_none_exists=False)
        if manager is None:
            return "not recorded: not called yet"
        functions = {
            key
            for key, value in manager.id_to_compile_id.items()
            if str(value) == compile_id and (manager.id_to_mode[key].name == "BACKWARD") == bool(mode)
        }
        count = sum(node.wrapped_function.id in functions for node in _nodes(manager.get_roots()))
        if functions & set(manager.warned_mutation):
            return "skipped: mutated inputs"
    except AttributeError:
        return _unknown()
    return f"recorded {_times(count)}" if count else "not recorded so far: the first call warms up, the next records"


def _nodes(roots: Iterable[Any]) -> Iterator[Any]:
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(child for children in node.children.values() for child in children)


def _unknown() -> str:
    import torch

    return f"unknown on torch {torch.__version__}"


# ---- advice: the four troubles


def _advice(graphs: Sequence[Graph]) -> Iterator[str]:
    yield from _breaks_advice(graphs)
    yield from _recompiles_advice(graphs)
    yield from _cudagraphs_advice(graphs)
    yield from _slow_advice(graphs)


def _breaks_advice(graphs: Sequence[Graph]) -> Iterator[str]:
    for each in dict.fromkeys(graph.ended_by for graph in graphs if graph.ended_by):
        change = each.hint or "take it out of the compiled code"
        yield f"graph break at {each.place}: {each.reason} -> {change}"


def _recompiles_advice(graphs: Sequence[Graph]) -> Iterator[str]:
    guards = Counter(COMPILE_ID.sub("", graph.recompiled).partition("\n")[0] for graph in graphs if graph.recompiled)
    causes = Counter[tuple[str, str, tuple[tuple[str, str], ...]]]()
    for guard, count in guards.items():
        causes[_cause(guard)] += count
    for (seen, change, words), count in causes.items():
        yield f"{seen.format_map({**dict(words), 'times': _times(count)})} -> {change.format_map(dict(words))}"
    from torch._dynamo import config

    frames = Counter(graph.compile_id.partition("/")[0] for graph in graphs)
    for frame, count in frames.items():
        if count >= config.recompile_limit:
            yield (
                f"{count} variants of frame {frame}: the limit; further ones run in eager -> make it vary less, "
                "or raise torch._dynamo.config.recompile_limit"
            )


def _cause(guard: str) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    for pattern, seen, change in RECOMPILES:
        if match := pattern.search(guard):
            # The value that was expected differs from one recompile to the next; the cause is one.
            return seen, change, tuple(match.groupdict().items())
    return "{guard} failed {times}", "keep it as it was at the first call", (("guard", guard),)


def _cudagraphs_advice(graphs: Sequence[Graph]) -> Iterator[str]:
    states = (code.cudagraphs for graph in graphs for code in graph.codes)
    for why in dict.fromkeys(state.removeprefix("skipped: ") for state in states if state.startswith("skipped: ")):
        change = next((change for pattern, change in SKIPS if pattern.search(why)), OTHER_SKIP)
        yield f"CUDA graphs skipped: {why} -> {change}"


def _slow_advice(graphs: Sequence[Graph]) -> Iterator[str]:
    for why in dict.fromkeys(graph.cache for graph in graphs if graph.cache.startswith("bypass")):
        yield f"cache {why}: each process compiles anew -> leave out what cannot be cached"
    seconds = _seconds(graphs)
    if seconds < SLOW_S:
        return
    tuning = [name for name in TUNING if any(graph.options.get(name) for graph in graphs)]
    if tuning:
        yield f"{seconds:.0f} s of compiling under {', '.join(tuning)} -> 'tmpl-inductor:fast_compile' while developing"
    else:
        yield f"{seconds:.0f} s of compiling -> torch.compiler.nested_compile_region on a block that repeats"


def _seconds(graphs: Iterable[Graph]) -> float:
    backward = (code.seconds or 0.0 for graph in graphs for code in graph.codes if code.direction == "backward")
    return sum(graph.seconds for graph in graphs) + sum(backward)


# ---- in words


def _graph_lines(graph: Graph) -> Iterator[str]:
    yield f"graph {graph.compile_id} {graph.function}: {graph.backend}, {graph.seconds:.1f} s, cache {graph.cache}"
    if graph.options:
        yield f"  options: {', '.join(f'{name}={value!r}' for name, value in graph.options.items())}"
    if graph.recompiled:
        yield f"  recompiled: {graph.recompiled.splitlines()[0]}"
    yield from (f"  {line}" for line in map(_code_line, graph.codes))
    if graph.ended_by:
        yield f"  ended at {graph.ended_by.place}: {graph.ended_by.reason}"


def _code_line(code: Code) -> str:
    kernels = "; ".join(f"{len(names)} {kind} ({', '.join(names)})" for kind, names in code.kernels.items())
    cost = "" if code.direction == "forward" else _cost(code)
    differs = {True: "; differs from the other", False: "; same as the other", None: ""}[code.differs]
    return f"{code.direction}: {kernels or 'no kernels'}; CUDA graphs {code.cudagraphs}{cost}{differs}"


def _cost(code: Code) -> str:
    seconds = "" if code.seconds is None else f"{code.seconds:.1f} s, "
    return f"; {seconds}cache {code.cache}"


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
