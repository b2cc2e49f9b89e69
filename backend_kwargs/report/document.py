"""A report as a page: its graphs with options, kernels and code, what broke them, and the races behind them."""

import re
from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from backend_kwargs.backend import find_backend
from backend_kwargs.facts.decision import Unraced
from backend_kwargs.options.option import same, sources
from backend_kwargs.page import document as page
from backend_kwargs.page.figures import count_of, file_of, seconds_of
from backend_kwargs.report.advice import advice_on
from backend_kwargs.report.decisions import parts_of, verdict_of
from backend_kwargs.report.graphs import Graph, engine_lines

PLACE = re.compile(r"# (?P<file>[^\s:]+):(?P<line>\d+) in ")  # of a guard in dynamo's reason to compile again
MOST = 1000  # graphs on a page
# What kept the ranks from one decision of a race, and what became of it.
APART = {Unraced.LEFT: " by all ranks", Unraced.ALONE: "; other ranks may have compiled something else"}


def document_of(graphs: Sequence[Graph], counted: str, summary: str = "", remarks: Iterable[str] = ()) -> page.Document:
    """Return the page of a report; with the verdict of the race if it has one graph, which was raced, else a count."""
    shown = [graph_of(graph) for graph in graphs[:MOST]]
    decisions = [(part.name, graph.race) for graph, part in zip(graphs, shown, strict=False) if graph.race]
    parts = parts_of([(name, decision) for name, decision in decisions if decision.rows])
    raced = len(graphs) == 1 and parts.races
    return replace(
        parts,
        title="Report",
        subtitle=summary,
        by="bk.report",
        verdict=verdict_of(decisions[0][1]) if raced else page.Verdict(text=counted),
        warnings=(*warnings_on(graphs), *parts.warnings),
        tradeoffs=parts.tradeoffs if raced else None,
        graphs=tuple(shown),
        notes=(*remarks, *parts.notes),
    )


def warnings_on(graphs: Iterable[Graph], where: str = "") -> Iterator[page.Warned]:
    """Yield what a reader must know of compiled graphs: breaks, fallbacks, and what to change."""
    graphs = list(graphs)
    for graph in graphs:
        if graph.ran:
            yield page.Warned(text=graph.ran.what, kind="fell back", where=where or _name(graph))
        if (race := graph.race) and race.unraced in APART:
            why = f"{race.facts}, so that {race.winner} was compiled{APART[race.unraced]}"
            yield page.Warned(text=why, kind="ranks", where=where or _name(graph))
    for each in dict.fromkeys(graph.ended_by for graph in graphs if graph.ended_by):
        yield page.Warned(text=f"graph break at {file_of(each.place)}: {each.reason}", kind="break", where=where)
    for advice in advice_on(graphs):
        if not advice.startswith("graph break at"):
            yield page.Warned(text=advice, kind="advice", where=where)


def _name(graph: Graph) -> str:
    return f"graph {graph.compile_id}"


def graph_of(graph: Graph) -> page.Graph:
    """Return a graph as part of a page."""
    kernels = [(name, kind) for code in graph.codes for kind, names in code.kernels.items() for name in names]
    costs = graph.rewrite_costs
    return page.Graph(
        name=_name(graph),
        function=graph.function,
        backend=graph.backend,
        winner=graph.race.winner if graph.race else "",
        seconds=seconds_of(graph.seconds),
        cache=graph.cache,
        ran=graph.ran.what if graph.ran else "",
        options=tuple(_options(graph)),
        rewrites=tuple(
            page.Rewrite(name=name, count=count_of(count) or 0, costs=costs.get(name, ""))
            for name, count in graph.rewritten.items()
        ),
        kernels=tuple(page.Kernel(name=name, kind=kind) for name, kind in kernels),
        causes=tuple(_causes(graph)),
        notes=tuple(_notes(graph)),
    )


def _options(graph: Graph) -> Iterator[page.Option]:
    """Yield the options that differ from their defaults, with what set them."""
    backend = find_backend(graph.backend)
    of_templates, layers = backend.options, sources(backend.layers)
    given = {
        name: (value, layers[name] if name in layers and same(of_templates[name], value) else "user")
        for name, value in graph.options.items()
    }
    chosen = {name: (value, "auto") for name, value in (graph.race.options if graph.race else {}).items()}
    for name, (value, source) in {**given, **chosen}.items():
        default = backend.option(name).default
        if not same(default, value):
            values = {"value": repr(value), "default": repr(default)}
            yield page.Option(name=name, source=source, **values)


def _causes(graph: Graph) -> Iterator[page.Cause]:
    if graph.recompiled:
        found = PLACE.search(graph.recompiled)
        source = page.Source(f"{file_of(found['file'])}:{found['line']}", int(found["line"])) if found else None
        yield page.Cause(kind="recompile", reason=graph.recompiled.splitlines()[0].partition("  #")[0], source=source)
    if ended_by := graph.ended_by:
        file, _, line = ended_by.place.rpartition(":")
        source = page.Source(f"{file_of(file)}:{line}", int(line)) if line.isdecimal() else None
        yield page.Cause(kind="break", reason=ended_by.reason, hint=ended_by.hint, source=source)


def _notes(graph: Graph) -> Iterator[str]:
    """Yield the lines of the report's text that no other part of a page has."""
    if graph.race and not graph.race.rows and graph.race.facts:
        yield f"auto: {graph.race.winner} for {graph.race.subject}"
    if graph.precision:
        yield str(graph.precision)
    yield from (f"{code.direction}: CUDA graphs {code.cudagraphs}" for code in graph.codes if code.cudagraphs != "off")
    for share in filter(None, (graph.relax, graph.engine)):
        yield from engine_lines(share)
