"""Four problems, with their causes and remedies: graph breaks, recompiles, no CUDA graphs, slow compiles."""

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import zip_longest

from backend_kwargs.auto.reporting import calls_itself
from backend_kwargs.compile_records import RACED
from backend_kwargs.errors import counted
from backend_kwargs.report.graphs import Code, Graph, seconds_of, times

SLOW_S = 30.0
INSTEAD_OF_CACHE = "accept that, or ship a package made by torch's aoti_compile_and_package"
ALIKE = 4  # calls of one fused kernel in a graph
COMPILE_ID = re.compile(r"^\d+/\d+(?:_\d+)?: ")
SIZE_CHANGED = "{name}.size({dim}) changed {times}"
# Not dynamic=True: a dynamic size is at least 2.
ZERO_OR_ONE = (
    f"{SIZE_CHANGED}, and 0 and 1 have graphs of their own",
    "avoid these sizes, or torch._dynamo.decorators.mark_unbacked({name}, {dim}) before the first call",
)
# What differs between a step of training and an evaluation, which need a graph each.
EVALUATES = re.compile(r"^GLOBAL_STATE changed: *grad_mode|\.training == ")
# A pattern for a guard that failed, the cause, and the remedy.
RECOMPILES: tuple[tuple[re.Pattern[str], str, str], ...] = (
    (
        re.compile(r"tensor '(?P<name>.+)' size mismatch at index (?P<dim>\d+)\. expected (?:[01],|\d+, actual [01]$)"),
        *ZERO_OR_ONE,
    ),
    (re.compile(r"^2 <= (?P<name>[^ ]+)\.size\(\)\[(?P<dim>\d+)\]"), *ZERO_OR_ONE),
    (
        re.compile(r"tensor '(?P<name>.+)' size mismatch at index (?P<dim>\d+)"),
        SIZE_CHANGED,
        "torch.compile(..., dynamic=True), or torch._dynamo.mark_dynamic({name}, {dim}) before the first call",
    ),
    (
        re.compile(r"tensor '(?P<name>.+)' dispatch key set mismatch\. .*Autograd"),
        "the dispatch key set of {name} changed {times}, as in torch.inference_mode()",
        "call it always in torch.inference_mode(), or never",
    ),
    (
        re.compile(r"tensor '(?P<name>.+)' dispatch key set mismatch\. .*ADInplaceOrView"),
        "whether {name} was made in torch.inference_mode() changed {times}",
        "make it always in torch.inference_mode(), or never",
    ),
    (
        re.compile(r"tensor '(?P<name>.+)' (?P<what>dtype|rank|stride|requires_grad|dispatch key set) mismatch"),
        "the {what} of {name} changed {times}",
        "pass tensors of one {what}",
    ),
    (
        re.compile(r"^Unexpected recompilation: "),
        "it was compiled again {times} though its guards hold, as where several threads make the first call",
        "make the first call in one thread",
    ),
    (
        re.compile(r"GLOBAL_STATE changed: *grad_mode"),
        "grad_mode changed {times}",
        "call it in one such state, for instance always under torch.no_grad()",
    ),
    (
        re.compile(r"GLOBAL_STATE changed: *(?P<what>\w+)"),
        "{what} changed {times}",
        "call it in one such state",
    ),
    (
        re.compile(r"^(?P<name>[\w.\[\]'\"]+) (?:==|is) (?P<value>True|False|None|'.*?'|\".*?\")(?: |$)"),
        "{name} was {value} and changed {times}",
        "keep it at one value: each value has a graph of its own",
    ),
    (
        re.compile(r"^(?P<name>[\w.\[\]'\"]+) == (?P<value>[^ ]+)"),
        "{name} was {value} and changed {times}",
        "pass it as a tensor, or torch.compile(..., dynamic=True)",
    ),
)
SKIPS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile("mutat"), "write to no input in place: return the new value, or store it in a buffer of the module"),
    (re.compile("no tensor"), "leave them out here: they replay work of a GPU alone"),
    (re.compile("cpu|multiple devices"), "put every tensor of the graph on one GPU"),
    (re.compile("dynamic|symbolic"), "torch.compile(..., dynamic=False) if there are few shapes"),
)
OTHER_SKIP = "TORCH_LOGS=cudagraphs shows more"
TUNING = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning")


def reason_and_hint(text: str, otherwise: str = "") -> tuple[str, str]:
    """Return the first line of dynamo's reason for a break, and its first hint."""
    lines = [line.strip() for line in text.splitlines()]
    hints = [line.removeprefix("Hint:").strip() for line in lines if line.startswith("Hint:")]
    return lines[0], hints[0] if hints else otherwise


def advice_on(graphs: Sequence[Graph], owners: Sequence[Hashable] = ()) -> Iterator[str]:
    """Yield each problem of `graphs`, with its cause and the change that solves it.

    `owners` tells graphs of one code apart that were compiled for several callables, such as torch's own modules.
    """
    for each in dict.fromkeys(graph.ended_by for graph in graphs if graph.ended_by):
        change = each.hint or "take it out of the compiled code"
        yield f"graph break at {each.place}: {each.reason} -> {change}"
    reasons = [calls_itself(graph.race) if graph.race else "" for graph in graphs]
    if reasons and all(reasons):  # no graph gains by being compiled
        yield f"{'; '.join(dict.fromkeys(reasons))} -> call the model itself"
    yield from _recompiles_advice(graphs, owners)
    states = (code.cudagraphs for graph in graphs for code in graph.codes)
    for why in dict.fromkeys(state.removeprefix("skipped: ") for state in states if state.startswith("skipped: ")):
        change = next((change for pattern, change in SKIPS if pattern.search(why)), OTHER_SKIP)
        yield f"CUDA graphs skipped: {why} -> {change}"
    yield from _slow_advice(graphs)
    lost = sum(graph.relax.tuned for graph in graphs if graph.relax and not graph.options.get("work_dir"))
    if lost:
        yield f"{counted(lost, 'kernel')} tuned, for this process only -> work_dir='tuning/' keeps the results"


def _recompiles_advice(graphs: Sequence[Graph], owners: Sequence[Hashable]) -> Iterator[str]:
    # The first graph of a frame can be a recompile only after a graph of another torch.compile of the same code.
    keys = [(_frame(graph), owner) for graph, owner in zip_longest(graphs, owners)]
    firsts = [keys.index(key) == at for at, key in enumerate(keys)]
    own = [graph for graph, first in zip(graphs, firsts, strict=True) if graph.recompiled and not first]
    guards = Counter(COMPILE_ID.sub("", graph.recompiled).partition("\n")[0] for graph in own)
    trains = any(code.direction == "backward" for graph in graphs for code in graph.codes)
    causes = Counter[tuple[str, str, tuple[tuple[str, str], ...]]]()
    for guard, count in guards.items():
        if not (trains and EVALUATES.search(guard)):
            causes[_cause(guard)] += count
    for (seen, change, words), count in causes.items():
        yield f"{seen.format_map({**dict(words), 'times': times(count)})} -> {change.format_map(dict(words))}"
    from backend_kwargs.torch_internals.dynamo import config

    for frame, count in Counter(map(_frame, own)).items():
        if count + 1 >= config.recompile_limit:
            yield (
                f"{count + 1} variants of frame {frame}: the limit; further ones run in eager -> make it vary less, "
                "or raise torch._dynamo.config.recompile_limit"
            )


def _frame(graph: Graph) -> str:
    return graph.compile_id.partition("/")[0]


def _cause(guard: str) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    for pattern, seen, change in RECOMPILES:
        if match := pattern.search(guard):
            # Recompiles with one cause differ only in the expected value.
            return seen, change, tuple(match.groupdict().items())
    code, _, _ = guard.partition("  #")  # a comment with the line of the user's code follows
    return "{guard} failed {times}", "keep it as it was at the first call", (("guard", code.rstrip()),)


def _slow_advice(graphs: Sequence[Graph]) -> Iterator[str]:
    cacheable = [graph for graph in graphs if "reproducible" not in graph.options]  # what is pinned never is
    for why in dict.fromkeys(graph.cache for graph in cacheable if graph.cache.startswith("bypass")):
        later_s = sum(map(_later_s, (graph for graph in cacheable if graph.cache == why)))
        yield f"cache {why}: each later process compiles again, {later_s:.1f} s -> {INSTEAD_OF_CACHE}"
    seconds, races = seconds_of(graphs), (graph.race for graph in graphs if graph.cache == RACED)
    raced = sum(race.seconds for race in races if race)
    if seconds < SLOW_S:
        return
    if raced > seconds / 2:
        yield f"{seconds:.0f} s of compiling, {raced:.0f} s of them races -> a smaller budget_s, or tune ahead"
        return
    tuning = [name for name in TUNING if any(graph.options.get(name) for graph in graphs)]
    if tuning:
        yield f"{seconds:.0f} s of compiling under {', '.join(tuning)} -> 'tmpl-inductor:fast_compile' while developing"
    elif any(_repeats(code) for graph in graphs for code in graph.codes):
        yield f"{seconds:.0f} s of compiling -> torch.compiler.nested_compile_region on the block that repeats"


def _later_s(graph: Graph) -> float:
    """Return what another process pays to compile a graph that is in no cache: of a race, for the winner alone."""
    won = next((row for row in graph.race.rows if row.won), None) if graph.race else None
    return won.compile_s if won else graph.seconds


def _repeats(code: Code) -> bool:
    """Return whether generated code calls a fused kernel so often that blocks of the model are alike."""
    names = (name for kind, names in code.kernels.items() if kind != "extern" for name in names)
    return any(len(re.findall(rf"\b{re.escape(name)}(?:\.run)?\(", code.source)) >= ALIKE for name in names)
