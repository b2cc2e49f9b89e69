"""Report after compiling: what was generated, why, and what to change."""

import gc
import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from backend_kwargs.backends.generated_code import comparable, rewrites_made
from backend_kwargs.compile_records import Record, records
from backend_kwargs.errors import BackendKwargsError, wrong_value
from backend_kwargs.facts.parts import Partition
from backend_kwargs.files.atomic_write import write_whole
from backend_kwargs.report.advice import advice_on, reason_and_hint
from backend_kwargs.report.generated import codes_of, unknown_here
from backend_kwargs.report.graphs import (
    Break,
    Code,
    EngineShare,
    Graph,
    Race,
    Ran,
    Relax,
    lines_of,
    number,
    seconds_of,
)
from backend_kwargs.report.ran import engine_of, ran_of, relax_of, worst
from backend_kwargs.report.uncaptured import why_no_graph
from backend_kwargs.rewrites.table import find_rewrite

if TYPE_CHECKING:
    from backend_kwargs.page import Document

__all__ = ["Break", "Code", "EngineShare", "Graph", "Partition", "Race", "Ran", "Relax", "Report", "report"]

SHARED = (
    "Compiled for another torch.compile of the same code: these graphs serve this one too where their guards "
    "hold. Elsewhere it runs in eager, if the recompile limit is reached."
)


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
        return "\n".join([self._summary(), *graphs, *self._remarks()])

    def _repr_html_(self) -> str:
        from backend_kwargs.page import fragment

        return fragment(self._document())

    def to_html(self, path: str | Path, *, with_code: bool = False) -> None:
        """Write the report as one HTML file that opens anywhere; `with_code` adds the generated code.

        Raises BackendKwargsError if the file cannot be written.
        """
        from backend_kwargs.page import to_html

        write_whole(Path(path), to_html(self._document(), with_code=with_code))

    def _document(self) -> "Document":
        from backend_kwargs.report.document import document_of

        return document_of(self.graphs, self._summary(), self.notes)

    def _summary(self) -> str:
        counts = ((len(self.graphs), "graph"), (len(self.breaks), "break"), (len(self.recompiles), "recompile"))
        return f"{', '.join(number(count, what) for count, what in counts)}, {self.seconds:.1f} s in the backend"

    def _remarks(self) -> list[str]:
        return [*self.notes, *(f"advice: {advice}" for advice in self.advice)]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, without the generated code; values that JSON cannot represent are kept as they are."""
        data = asdict(self) | {"breaks": [asdict(each) for each in self.breaks], "seconds": self.seconds}
        for code in (code for graph in data["graphs"] for code in graph["codes"]):
            del code["source"]
        return data


def report(compiled: Callable[..., object], *, against: Callable[..., object] | None = None) -> Report:
    """Return a report on `compiled`, the result of torch.compile, after it has been called.

    `against` is another such callable, such as the same model under default: each code then shows whether it differs.

    Raises:
        BackendKwargsError: if `compiled` is not such a callable, or no backend of this package compiled for it. If
        dynamo captured no graph for one, the report has none either, and `advice` has the reason.

    """
    owner = _owner(compiled)
    gc.collect()  # a graph in eager is part of a reference cycle, so it would outlive torch.compiler.reset()
    own, notes = _records_of(owner)
    if not own:
        return Report((), (f"no graph reached a backend: {_why_no_graph(owner)}",))
    graphs = tuple(_graph(record, other) for record, other in zip(own, _others(against, len(own)), strict=True))
    return Report(graphs, tuple(advice_on(graphs)), (*notes, *_unseen_breaks(graphs)))


def report_of(own: Iterable[Record]) -> Report:
    """Return a report on the graphs of some records that are alive: those of one of several callables, say."""
    graphs = tuple(_graph(record, None) for record in own if record.compiled() is not None)
    return Report(graphs, tuple(advice_on(graphs)), tuple(_unseen_breaks(graphs)))


def _others(against: Callable[..., object] | None, count: int) -> Sequence[Sequence[Code] | None]:
    if against is None:
        return [None] * count
    codes = [codes_of(record) for record in _records_of(_owner(against))[0]]
    return (codes + [[]] * count)[:count]


def _records_of(owner: object) -> tuple[list[Record], tuple[str, ...]]:
    everything = records()
    own = [record for record in everything if record.owner() is owner]
    if own:
        return own, ()
    code = _code(owner)
    shared = [record for record in everything if code is not None and _code(record.owner()) is code]
    if shared:
        return shared, (SHARED,)
    return [], ()


def _why_no_graph(owner: object) -> str:
    if why := why_no_graph(owner, _called(owner), _code(owner)):
        return why
    raise BackendKwargsError(
        "Nothing to report: call it first, and compile it by a backend of this package, "
        'such as torch.compile(model, backend=backend_kwargs.make_backend("inductor")).'
    )


def _owner(compiled: object) -> Any:
    """Return the argument of torch.compile, which its wrapper keeps."""
    import torch

    from backend_kwargs.torch_internals.dynamo import WRAPPER
    from backend_kwargs.torch_internals.modules import compiled_call

    call = compiled
    if isinstance(compiled, torch.nn.Module):
        call = compiled_call(compiled) or compiled.forward  # by Module.compile(), or torch.compile(module)
    if not isinstance(call, types.FunctionType) or call.__code__.co_name != WRAPPER:
        raise wrong_value("report's argument", "what torch.compile returned", compiled)
    return inspect.getclosurevars(call).nonlocals["fn"]


def _code(owner: object) -> CodeType | None:
    """Return the code object that dynamo compiles for `owner`."""
    import torch

    module = _called(owner)
    return getattr(module.forward if isinstance(module, torch.nn.Module) else _given(owner), "__code__", None)


def _called(owner: object) -> object:
    """Return the module that `owner` calls, or `owner` itself."""
    return getattr(_given(owner), "__self__", _given(owner))


def _given(owner: object) -> Any:
    return getattr(owner, "__wrapped__", owner)  # torch calls all of its own modules through one function


def _graph(record: Record, other: Sequence[Code] | None) -> Graph:
    codes = codes_of(record)
    if other is not None:
        codes = [replace(code, differs=_differs(code, other[at : at + 1])) for at, code in enumerate(codes)]
    relax, engine = relax_of(record), engine_of(record)
    operators = {name: find_rewrite(name).operators for name in _rewrites(record)}
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
        relax,
        _race(record),
        ran_of(record, codes, relax, engine),
        rewrites_made(record.compiled(), record.facts, operators),
        record.facts.precision,
        engine,
        {name: each.costs for name, each in record.facts.rewrites.items() if each.costs},
    )


def _rewrites(record: Record) -> Sequence[str]:
    """Return the rewrites that a graph was compiled with: requested or decided."""
    decision = record.facts.decision
    options = record.options if decision is None else decision.options
    return options.get("rewrites") or ()


def _race(record: Record) -> Race | None:
    if (found := record.facts.decision) is None:
        return None
    from backend_kwargs.auto.reporting import table

    raced = found.seconds, found.rows, table(found)
    return Race(found.winner, found.options, *raced, found.compiler, found.cut_s, found.facts)


def _differs(code: Code, other: Sequence[Code]) -> bool:
    return [comparable(code.source)] != [comparable(each.source) for each in other]


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
