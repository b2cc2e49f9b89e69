"""The places of a model, each timed by itself: what a rewrite would replace, as it is and rewritten.

    python -m benchmarks headroom "transformers:BertModel?num_hidden_layers=2" --device cpu

No whole graph is compiled. A place is the graph of what a rewrite would replace, with the pointwise operators and
reductions around it that Inductor would fuse with it, on the inputs that it has in a call of the model in eager. It is
compiled under default and with the rewrite, checked and timed as an audit does: a race's check against float64, rounds
in turn, and the same code twice as the measure of noise. The places that take longest in eager come first.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node

import backend_kwargs as bk
from backend_kwargs import measure
from backend_kwargs.auto.audit import Effort, measured
from backend_kwargs.auto.head_to_head import MARGIN
from backend_kwargs.auto.rewritten import lowered_anew
from backend_kwargs.backend import Backend
from backend_kwargs.backends import CapturedGraph
from backend_kwargs.errors import error_text
from backend_kwargs.facts.decision import Decision
from backend_kwargs.graphs.replay import Inputs
from backend_kwargs.graphs.writes import copy_of_graph
from backend_kwargs.interval import Interval
from backend_kwargs.measure.served import copied
from backend_kwargs.options.requirements import machine, unmet
from backend_kwargs.rewrites.apply import places_in, places_in_traced
from backend_kwargs.rewrites.places import Place
from backend_kwargs.rewrites.table import find_rewrite
from backend_kwargs.tables import as_text

MOST_NEIGHBOURS = 8
REDUCTIONS = frozenset(
    getattr(torch.ops.aten, name) for name in ("sum", "mean", "amax", "amin", "var_mean", "var", "_softmax")
)
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Timed:
    """A place, its seconds in eager, in default's code and rewritten, the speedup, and why there is none."""

    place: Place
    eager_s: float
    default_s: float | None = None
    rewritten_s: float | None = None
    speedup: Interval | None = None
    why: str = ""

    @property
    def wins(self) -> bool:
        """Whether the rewrite is faster beyond what two runs of one callable differ by."""
        return self.speedup is not None and self.speedup.low > 1 + MARGIN

    @property
    def verdict(self) -> str:
        """What is known of the rewrite here, in words."""
        if self.speedup is None:
            return self.why
        return "faster" if self.wins else "slower" if self.speedup.high < 1 - MARGIN else "no faster"


@dataclass
class Watched(Interpreter):
    """A run of a graph in eager: the seconds of each node, and what those that are `wanted` return."""

    module: GraphModule
    wanted: set[Node]
    device: torch.device
    values: dict[Node, Any] = field(default_factory=dict)
    seconds: dict[Node, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.module)

    def run_node(self, n: Node) -> Any:
        began = time.perf_counter()
        result = super().run_node(n)
        measure.synchronize(self.device)
        self.seconds[n] = time.perf_counter() - began
        if n in self.wanted:
            is_copied = isinstance(result, torch.Tensor) and n.op not in ("placeholder", "get_attr")
            self.values[n] = copied(result) if is_copied else result
        return result


def headroom(
    model: Callable[..., object], inputs: Sequence[Any], backend: Backend, effort: Effort, most: int, say: Say
) -> list[Timed]:
    """Time the places of a model in inference that take longest in eager, at most so many."""
    graphs: list[tuple[GraphModule, Sequence[Any]]] = []

    def capture(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append((gm, example_inputs))
        return gm.forward

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(model, backend=capture, dynamic=False)(*inputs)
        found = [each for gm, values in graphs for each in standing(backend, gm, values)]
        found.sort(key=lambda each: -each.eager_s * each.place.count)
        return [_timed(backend, each, effort, say) for each in found[:most]]


@dataclass(frozen=True, slots=True)
class Standing:
    """A place as a graph of its own, with its inputs, and how long its nodes take in eager."""

    place: Place
    gm: GraphModule
    values: Sequence[Any]
    eager_s: float


def standing(backend: Backend, gm: GraphModule, inputs: Sequence[Any]) -> Iterator[Standing]:
    """Yield the places of a graph of dynamo's, and of the one that Inductor lowers it to."""
    request = backend.request(CapturedGraph(gm, inputs))
    # Another input, such as a seed, means that the lowered graph is called otherwise than dynamo's.
    called = len(gm.graph.find_nodes(op="placeholder"))
    lowered = [each for each in lowered_anew(request) if len(each.graph.find_nodes(op="placeholder")) == called]
    by_graph: dict[Graph, list[Place]] = defaultdict(list)
    for name in request.context.rewrites:
        rewrite = find_rewrite(name)
        if unmet(rewrite.needs, machine()):
            continue
        for place in places_in(lowered, name) if rewrite.patterns else places_in_traced(gm, inputs, name):
            by_graph[place.nodes[0].graph].append(place)
    device = next((each.device for each in inputs if isinstance(each, torch.Tensor)), torch.device("cpu"))
    for graph, places in by_graph.items():
        alone = [standing_alone(with_neighbours(place.nodes)) for place in places]
        owner = graph.owning_module
        assert owner is not None
        watched = Watched(owner, {node for _, reads in alone for node in reads}, device)
        watched.run(*Inputs.of(copy_of_graph(gm), inputs).fresh())
        for place, (small, reads) in zip(places, alone, strict=True):
            seconds = sum(watched.seconds.get(node, 0.0) for node in place.nodes)
            yield Standing(place, small, [watched.values[node] for node in reads], seconds)


def _timed(backend: Backend, standing: Standing, effort: Effort, say: Say) -> Timed:
    place, unknown = standing.place, partial(Timed, standing.place, standing.eager_s)
    if any(isinstance(each, torch.SymInt) for each in standing.values):
        return unknown(why="its sizes vary")
    decision = Decision("", "", place.rewrite, {"rewrites": [place.rewrite]})
    request = backend.request(CapturedGraph(standing.gm, standing.values))
    say(f"{place}, {place.count} times")
    try:
        found = measured(request, decision, effort, lambda doing: None)
    except Exception as error:  # noqa: BLE001 - whatever a race of it meets, the other places are timed
        return unknown(why=error_text(error))
    rewritten, default = found.contenders[:2]
    if failed := next((each.row for each in (default, rewritten) if not found.of(each)), None):
        return unknown(why=f"{failed.name}: {failed.status}: {failed.reason}")
    if rewritten.code_of == default.code_of:
        return unknown(why="alone it has default's code")
    one, other = found.of(default), found.of(rewritten)
    seconds = (measure.percentile(each, 0.5) for each in (one, other))
    return unknown(*seconds, speedup=measure.ratio_interval(one, other))


# ---- a place as a graph


def standing_alone(nodes: Sequence[Node]) -> tuple[GraphModule, list[Node]]:
    """Return the graph of these nodes alone, and the nodes of the graph around them that it reads, in order."""
    inside = sorted({node for node in nodes if node.op.startswith("call")})
    reads = [*dict.fromkeys(each for node in inside for each in node.all_input_nodes if each not in inside)]
    graph, copies = Graph(), dict[Node, Node]()
    for node in reads:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in inside:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in inside if not {*inside}.issuperset(node.users)))
    return GraphModule(torch.nn.Module(), graph), reads


def with_neighbours(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes with those around them that Inductor would fuse with what takes their place."""
    inside = dict.fromkeys(nodes)
    for _ in range(MOST_NEIGHBOURS):
        after = (user for node in inside for user in node.users)
        before = (each for node in inside for each in node.all_input_nodes if inside.keys() >= each.users.keys())
        near = next((each for each in (*after, *before) if each not in inside and _is_fused(each)), None)
        if near is None:
            break
        inside[near] = None
    return [*inside]


def _is_fused(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    packet = getattr(node.target, "overloadpacket", None)
    return node.op == "call_function" and (torch.Tag.pointwise in tags or packet in REDUCTIONS)


# ---- the table


def table(found: Mapping[str, Sequence[Timed]]) -> str:
    """Return the places of some models as text, dearest first, and for each model what applies those that win."""
    rows = [
        (name, str(each.place), str(each.place.count), *map(_us, (each.eager_s, each.default_s, each.rewritten_s)),
         f"{each.speedup.median:.2f}x" if each.speedup else "", each.verdict)
        for name, several in found.items() for each in several
    ]  # fmt: skip
    header = ("model", "place", "times", "eager µs", "default µs", "rewritten µs", "speedup", "verdict")
    winners = {name: [str(each.place) for each in several if each.wins] for name, several in found.items()}
    pasted = [f"{name}: rewrites={places}" for name, places in winners.items() if places]
    return "\n".join([as_text(header, rows), *pasted])


def _us(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.1f}"


def measure_headroom(specs: Sequence[str], device: str, most: int, effort: Effort, say: Say) -> str:
    """Return the table of models in inference, which `model_case` names."""
    from benchmarks.workloads.user_models import model_case

    found = {}
    for spec in specs:
        where = torch.device(device)
        problem = model_case(spec).build(where, torch.float32 if device == "cpu" else torch.bfloat16, "full")
        found[spec] = headroom(problem.fn, problem.args, bk.make_backend("tmpl-inductor:auto"), effort, most, say)
    return table(found)
