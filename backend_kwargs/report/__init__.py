"""Report after compiling: what was generated, why, and what to change."""

import gc
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend_kwargs.backends.generated_code import comparable, rewrites_made
from backend_kwargs.compile_records import RACED, Record, called_by, records
from backend_kwargs.errors import BackendKwargsError, counted, printable, removed
from backend_kwargs.facts import Decision, Partition
from backend_kwargs.files import write_whole
from backend_kwargs.report.advice import advice_on, reason_and_hint
from backend_kwargs.report.found import found_in, methods_in_eager, why_no_graph
from backend_kwargs.report.graphs import (
    TVM,
    Break,
    Code,
    EngineShare,
    Graph,
    Race,
    Ran,
    codes_of,
    lines_of,
    ran_of,
    seconds_of,
    served_lines,
    share_of,
    unknown_here,
    unraced,
    worst,
)
from backend_kwargs.rewrites.table import chosen_places, find_rewrite

if TYPE_CHECKING:
    from backend_kwargs.page import Document

__all__ = ["Break", "Code", "EngineShare", "Graph", "Partition", "Race", "Ran", "Report", "report"]


@dataclass(frozen=True, slots=True)
class Report:
    """The compiled graphs of one callable; `advice` has the cause of each problem and what to change."""

    graphs: tuple[Graph, ...]
    advice: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def breaks(self) -> tuple[Break, ...]:
        """The places where graphs end early, each once."""
        return tuple(dict.fromkeys(graph.ended_by for graph in self.graphs if graph.ended_by))

    @property
    def recompiles(self) -> tuple[str, ...]:
        """The guard that failed, for each recompiled graph."""
        return tuple(graph.recompiled for graph in self.graphs if graph.recompiled)

    @property
    def seconds(self) -> float:
        """The time spent in the backend, with backward graphs if torch still knows it."""
        return seconds_of(self.graphs)

    @property
    def undecided(self) -> dict[str, str]:
        """Why a graph under `race="never"` had no stored decision, for each that had none."""
        return {name: why for name, why in unraced(self.graphs).items() if why}

    @property
    def tuning(self) -> str:
        """Whether TVM's kernels are "tuned" or "untuned"; "" if there are none."""
        parts = [graph.relax for graph in self.graphs if graph.relax and graph.relax.partitions]
        return ("tuned" if any(part.tuned for part in parts) else "untuned") if parts else ""

    @property
    def ran(self) -> Ran | None:
        """What ran a graph in place of its backend, or that this is unknown; None if each ran on its own backend."""
        return worst(graph.ran for graph in self.graphs)

    def __str__(self) -> str:
        graphs = (line for graph in self.graphs for line in lines_of(graph))
        advice = (f"advice: {each}" for each in self.advice)
        return "\n".join([self._summary(), *graphs, *self.notes, *advice])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def _repr_html_(self) -> str:
        from backend_kwargs.page import fragment

        return fragment(self._document())

    def to_html(self, path: str | Path, *, with_code: bool = False) -> None:
        """Write the report as one HTML file that opens anywhere.

        `with_code` was removed. Raises BackendKwargsError if the file cannot be written.
        """
        if with_code:
            raise removed("to_html(with_code=True)", "the code is in `bk.report(compiled).graphs[0].codes[0].source`")
        from backend_kwargs.page import to_html

        write_whole(Path(path), to_html(self._document()))

    def _document(self) -> "Document":
        from backend_kwargs.report.document import document_of

        counts = ", ".join(counted(count, what) for what, count in self._counts().items() if count)
        return document_of(self.graphs, f"{counts or 'No graphs'}.", self._summary(), self.notes)

    def _counts(self) -> dict[str, int]:
        return {"graph": len(self.graphs), "break": len(self.breaks), "recompile": len(self.recompiles)}

    def _summary(self) -> str:
        numbers = "; graph F/N is variant N of dynamo's function F" if self.graphs else ""
        counts = ", ".join(counted(count, what) for what, count in self._counts().items())
        return f"{counts}, {self.seconds:.1f} s in the backend{numbers}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, without the generated code; values that JSON cannot represent are kept as they are."""
        data = asdict(self) | {"breaks": [asdict(each) for each in self.breaks], "seconds": self.seconds}
        data["race_never"] = {"graphs": len(unraced(self.graphs)), "without_decision": self.undecided}
        for code in (code for graph in data["graphs"] for code in graph["codes"]):
            del code["source"]
        return data


def report(compiled: object = None, *, against: object = None) -> Report:
    """Return a report on the graphs of `compiled`, after it has been called; without it, on all of this process.

    `compiled` is the result of torch.compile, or what holds it: a module whose parts were compiled, a wrapper of DDP,
    FSDP, Fabric or accelerate, a Trainer, a model that `generate` compiled. `against` is another such value, such as
    the same model under default: each code then shows whether it differs.

    Raises:
        BackendKwargsError: if `compiled` is no such value, or no backend of this package compiled for it. If
            dynamo captured no graph for one, the report has none either, and `advice` has the reason.

    """
    gc.collect()  # a graph in eager is part of a reference cycle, so it would outlive torch.compiler.reset()
    owners, own, notes = ([], records(), ()) if compiled is None else found_in(compiled)
    if not own:
        return Report((), tuple(f"no graph reached a backend: {why}" for why in _why_no_graphs(owners)))
    return report_of(own, notes, None if against is None else found_in(against)[1])


def report_of(own: Iterable[Record], notes: Iterable[str] = (), against: Sequence[Record] | None = None) -> Report:
    """Return a report on the graphs of some records that are alive, beside those of others: of one callable, say."""
    alive = [record for record in own if record.compiled() is not None]
    others: list[Sequence[Code] | None] = [None] * len(alive)
    if against is not None:
        others = [*map(codes_of, against), *[()] * len(alive)]
    graphs = tuple(_graph(record, other) for record, other in zip(alive, others, strict=False))
    advice = advice_on(graphs, [id(record.owner()) for record in alive])
    return Report(graphs, tuple(advice), (*served_lines(graphs), *notes, *_unseen_breaks(graphs)))


def _why_no_graphs(owners: Sequence[object]) -> list[str]:
    """Return why no graph of these callables reached a backend; raise if dynamo does not know it of any."""
    if whys := list(dict.fromkeys(filter(None, map(why_no_graph, owners)))):
        return whys
    methods = next(filter(None, (methods_in_eager(called_by(owner).value) for owner in owners)), "")
    raise BackendKwargsError(
        "Nothing to report: call it first, and compile it by a backend of this package, "
        f'such as torch.compile(model, backend=backend_kwargs.make_backend("inductor")).{methods}'
    )


def _graph(record: Record, other: Sequence[Code] | None) -> Graph:
    codes = codes_of(record)
    if other is not None:
        theirs = [comparable(each.source) for each in other]
        codes = [
            replace(code, differs=[comparable(code.source)] != theirs[at : at + 1]) for at, code in enumerate(codes)
        ]
    share = share_of(record)
    is_tvm = share is not None and share.engine == TVM
    decision = record.facts.decided  # or what was requested
    rewrites = (record.options if decision is None else decision.options).get("rewrites") or ()
    operators = {name: find_rewrite(name).operators for name in chosen_places(rewrites)}
    return Graph(
        record.compile_id,
        record.function,
        record.spec,
        record.options,
        record.facts.seconds,
        record.facts.cache,
        unknown_here() if record.recompiled is None else record.recompiled,
        Break(record.place, *reason_and_hint(record.break_reason)) if record.break_reason else None,
        tuple(codes),
        share if is_tvm else None,
        None if decision is None else Race.of(decision),
        ran_of(record, codes, share),
        rewrites_made(record.compiled(), record.facts, operators),
        record.facts.precision,
        None if is_tvm else share,
        {name: each.costs for name, each in record.facts.rewrites.items() if each.costs},
        origin(decision) if decision and decision.rows and record.facts.cache != RACED else "",
    )


def origin(decision: Decision) -> str:
    """Return when, where and by which versions a decision was made, for a graph that was not raced now."""
    made = datetime.fromtimestamp(decision.made).astimezone().strftime("%Y-%m-%d %H:%M")
    here = decision.machine
    place = here.get("gpu") or f"a CPU with {here.get('cpu')}, {here.get('threads')} threads"
    versions = ", ".join(f"{name} {here.get(name)}" for name in ("torch", "backend-kwargs"))
    differs = f"; {decision.differs}" if decision.differs else ""
    return printable(f"decided {made} for these sizes, on {place}, by {versions}; not raced again{differs}")


def _unseen_breaks(graphs: Sequence[Graph]) -> Iterator[str]:
    """Yield a line for each break before the first operation of a frame: no graph reached a backend there."""
    seen = {graph.ended_by.place.rpartition(":")[2] for graph in graphs if graph.ended_by}
    for function in dict.fromkeys(graph.function for graph in graphs):
        resumed = re.fullmatch(r"torch_dynamo_resume_in_(.+)_at_(\d+)", function)
        if resumed and resumed[2] not in seen:
            yield (
                f"A graph break in {resumed[1]} at line {resumed[2]} comes before any operation; "
                "TORCH_LOGS=graph_breaks shows why."
            )
