"""What a report holds: the compiled graphs, the code of each, and how they are printed."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from backend_kwargs.backend import find_backend
from backend_kwargs.compilers.auto import settings as auto
from backend_kwargs.compilers.precision.bounds import Used
from backend_kwargs.compilers.tvm.summary import Partition
from backend_kwargs.registry import decided

if TYPE_CHECKING:
    from backend_kwargs.compilers.auto.decision import RaceRow


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
class Relax:
    """What TVM has of a graph, and why eager has the rest, by operator."""

    partitions: tuple[Partition, ...]
    fallbacks: Mapping[str, str]

    @property
    def tuned(self) -> int:
        """How many kernels run as a search left them."""
        return sum(each.tuned for each in self.partitions)


@dataclass(frozen=True, slots=True)
class OpenVINO:
    """What OpenVINO has of a graph so far.

    Of its `partitions` those that `failed` run in eager, as the operators `in_eager` do; `by_inductor` counts graphs,
    forward and backward, that Inductor compiled since OpenVINO failed to.
    """

    partitions: int
    failed: int
    by_inductor: int
    in_eager: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ran:
    """What ran a graph in place of its backend ("fell_back"), or that nobody can tell ("unknown")."""

    status: Literal["fell_back", "unknown"]
    what: str


@dataclass(frozen=True, slots=True)
class Race:
    """What auto chose for a graph: the winner, its options beside the user's; the race's seconds, rows, and table."""

    winner: str
    options: Mapping[str, Any]
    seconds: float
    rows: tuple["RaceRow", ...]
    table: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Break:
    """Where a graph ended early, and why."""

    place: str
    reason: str
    hint: str


@dataclass(frozen=True, slots=True)
class Graph:
    """One compiled graph; `recompiled` is the guard that failed, "" on a first compile.

    `codes` are Inductor's, `relax` is TVM's, and `openvino` is OpenVINO's: another backend leaves none. `race` tells
    why auto chose as it did; `ran` is None where the graph runs by its own backend. `rewritten` counts what each rewrite
    replaced.
    """

    compile_id: str
    function: str
    backend: str
    options: Mapping[str, Any]
    seconds: float
    cache: str
    recompiled: str
    ended_by: Break | None
    codes: tuple[Code, ...]
    relax: Relax | None = None
    race: Race | None = None
    openvino: OpenVINO | None = None
    ran: Ran | None = None
    rewritten: Mapping[str, int] = field(default_factory=dict)
    precision: Used | None = None

    def inductor_config(self) -> dict[str, Any]:
        """Return `Backend.inductor_config()` of what compiled this graph: under auto, of what was decided for it."""
        if self.race is None:
            return find_backend(self.backend).bind("report", self.options).inductor_config()
        fixed = {name: value for name, value in self.options.items() if name not in auto.OPTIONS}
        return decided(self.race.winner, self.race.options, fixed).inductor_config()


def seconds_of(graphs: Iterable[Graph]) -> float:
    """Return what compiling took, backward included where it is known."""
    backward = (code.seconds or 0.0 for graph in graphs for code in graph.codes if code.direction == "backward")
    return sum(graph.seconds for graph in graphs) + sum(backward)


def lines_of(graph: Graph) -> Iterator[str]:
    """Tell a graph in lines."""
    yield f"graph {graph.compile_id} {graph.function}: {graph.backend}, {graph.seconds:.1f} s, cache {graph.cache}"
    if graph.options:
        yield f"  options: {', '.join(f'{name}={value!r}' for name, value in graph.options.items())}"
    if graph.recompiled:
        yield f"  recompiled: {graph.recompiled.splitlines()[0]}"
    if graph.precision:
        yield f"  {graph.precision}"
    race = graph.race.table.splitlines() if graph.race else []
    yield from (f"  {line}" for line in (*race, *map(_code_line, graph.codes)))
    if graph.rewritten:
        yield f"  rewritten: {', '.join(f'{name} {times(count)}' for name, count in graph.rewritten.items())}"
    if graph.relax:
        yield from (f"  {line}" for line in _relax_lines(graph.relax))
    if graph.openvino:
        in_eager = f"; in eager: {', '.join(graph.openvino.in_eager)}" if graph.openvino.in_eager else ""
        yield f"  {number(graph.openvino.partitions, 'partition')} of OpenVINO{in_eager}"
    if graph.ran:
        yield f"  {graph.ran.what}"
    if graph.ended_by:
        yield f"  ended at {graph.ended_by.place}: {graph.ended_by.reason}"


def _relax_lines(relax: Relax) -> Iterator[str]:
    for graph in dict.fromkeys(each.graph for each in relax.partitions):
        own = [each for each in relax.partitions if each.graph == graph]
        tuned, seconds = sum(each.tuned for each in own), sum(each.seconds for each in own)
        how = f"{number(tuned, 'kernel')} tuned" if tuned else "untuned"
        where = f"{number(sum(each.operators for each in own), 'operator')} in {number(len(own), 'partition')}"
        yield f"{graph}: {where} of TVM, {how}; {seconds:.1f} s"
        yield from (f"  {note}" for each in own for note in each.notes)
    if not relax.partitions:
        yield "no partition of TVM"
    yield from (f"in eager: {op}, because {reason}" for op, reason in relax.fallbacks.items())


def _code_line(code: Code) -> str:
    kernels = "; ".join(f"{len(names)} {kind} ({', '.join(names)})" for kind, names in code.kernels.items())
    seconds = "" if code.seconds is None else f"{code.seconds:.1f} s, "
    cost = "" if code.direction == "forward" else f"; {seconds}cache {code.cache}"
    differs = {True: "; differs from the other", False: "; same as the other", None: ""}[code.differs]
    return f"{code.direction}: {kernels or 'no kernels'}; CUDA graphs {code.cudagraphs}{cost}{differs}"


def number(count: int, what: str) -> str:
    """Return "1 graph" or "2 graphs"."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def times(count: int) -> str:
    """Return "once", "twice" or "3 times"."""
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
