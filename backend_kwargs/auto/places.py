"""The places of a graph where a rewrite matches, each as a graph of its own with the inputs that it has in a call.

So a race of two small graphs tells what a rewrite is worth there, and no whole graph is compiled to learn it.
"""

import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node

from backend_kwargs import trial
from backend_kwargs.auto.graph_stats import GraphStats, calls_a_library
from backend_kwargs.auto.verdicts import UNKNOWN, Verdict
from backend_kwargs.backends import CapturedGraph, Inputs
from backend_kwargs.errors import error_text
from backend_kwargs.graphs.writes import copy_of_graph
from backend_kwargs.options.machine import machine
from backend_kwargs.options.requirements import unmet
from backend_kwargs.rewrites.places import Place
from backend_kwargs.rewrites.table import find_rewrite
from backend_kwargs.torch_internals.modes import enter_autocast
from backend_kwargs.torch_internals.operators import OpOverload
from backend_kwargs.trial.served import copied

logger = logging.getLogger("backend_kwargs.auto")

LEAST_SHARE = 0.02  # of a call: what takes less is not worth two compiles
PRODUCTS = {"linear", "matmul", "einsum", "mm", "bmm", "addmm", "baddbmm", "mv", "scaled_dot_product_attention"}
MOST_NEIGHBOURS = 8
REDUCTIONS = frozenset(
    getattr(torch.ops.aten, name) for name in ("sum", "mean", "amax", "amin", "var_mean", "var", "_softmax")
)


@dataclass(frozen=True, slots=True)
class Standing:
    """A place as a graph of its own, with its inputs, and how long its nodes take in eager.

    `bare` is the place alone; the graph `fused` has what Inductor would fuse with it too. `share` is the part of a call
    that all places like it take.
    """

    place: Place
    bare: CapturedGraph
    fused: CapturedGraph
    eager_s: float
    share: float


# ---- what matches


def matching(
    names: Iterable[str],
    stats: GraphStats,
    objective: str,
    lowered: Callable[[], Sequence[GraphModule]],
    traced: tuple[GraphModule, Inputs],
) -> dict[str, list[Place]]:
    """Return the places of those of the rewrites `names` that match, by name.

    `lowered` returns graphs that Inductor lowers; `traced` is dynamo's graph with its inputs. All stay unchanged.
    """
    from backend_kwargs.rewrites.apply import places_in, places_in_traced

    found: dict[str, list[Place]] = {}
    for name in names:
        rewrite = find_rewrite(name)
        try:
            fits = rewrite.fitting(stats) and rewrite.objective in ("latency", objective)
            if not fits or unmet(rewrite.needs, machine()):
                continue
            places = places_in(lowered(), name) if rewrite.patterns else places_in_traced(*traced, name)
        except Exception as error:  # noqa: BLE001 - a user's rewrite may raise anything: it is not tried
            logger.info("Rewrite %s is not tried: %s", name, error_text(error))
            continue
        if places:
            logger.info("%s matches %d times", name, sum(each.count for each in places))
            found[name] = places
    return found


# ---- a place as a graph


def standing(places: Iterable[Place], fresh: Callable[[], Inputs], device: torch.device) -> list[Standing]:
    """Return places as graphs of their own, the dearest of each rewrite first; `fresh` returns inputs of a call.

    So each rewrite is known before time is spent on other places of one, which may follow without being raced.

    Left out are those of a lowered graph that is called otherwise than dynamo's, as with a seed, and of one of dynamo's
    that enters autocast: alone they would compute in other dtypes.
    """
    by_graph: dict[Graph, list[Place]] = defaultdict(list)
    for each in places:
        by_graph[each.nodes[0].graph].append(each)
    alone = [found for graph, several in by_graph.items() for found in _standing_in(graph, several, fresh(), device)]
    ranks, ordered = Counter[str](), list[tuple[int, Standing]]()
    for found in sorted(alone, key=lambda found: -found.share):
        ordered.append((ranks[found.place.rewrite], found))
        ranks[found.place.rewrite] += 1
    return [found for _, found in sorted(ordered, key=lambda pair: pair[0])]


def _standing_in(graph: Graph, places: Sequence[Place], inputs: Inputs, device: torch.device) -> Iterator[Standing]:
    casts = graph.find_nodes(op="call_function", target=enter_autocast)
    if casts or len(graph.find_nodes(op="placeholder")) != len(inputs) or graph.owning_module is None:
        return
    alone = [(standing_alone(place.nodes), standing_alone(with_neighbours(place.nodes))) for place in places]
    wanted = {node for forms in alone for _, reads in forms for node in reads}
    watched = _Watched(graph.owning_module, wanted, device)
    watched.run(*inputs)
    whole_s = _whole_seconds(watched.seconds)
    for place, forms in zip(places, alone, strict=True):
        seconds = sum(watched.seconds.get(node, 0.0) for node in place.nodes)
        bare, fused = (CapturedGraph(gm, [watched.values[node] for node in reads]) for gm, reads in forms)
        yield Standing(place, bare, fused, seconds, place.count * seconds / whole_s)


def _whole_seconds(seconds: Mapping[Node, float]) -> float:
    """Return about how long a compiled graph takes: between eager and what its libraries alone take, by their ratio.

    Of a scan that is written out, eager's time says nothing: a convolution of 0.4 % of it took a tenth of what was
    compiled.
    """
    whole_s = sum(seconds.values())
    libraries_s = sum(each for node, each in seconds.items() if _is_product(node))
    return math.sqrt(whole_s * libraries_s) if libraries_s else whole_s


def _is_product(node: Node) -> bool:
    if isinstance(node.target, OpOverload):
        return calls_a_library(node.target)
    name = node.target if isinstance(node.target, str) else node.target.__name__
    return name in PRODUCTS or name.startswith("conv")


@dataclass
class _Watched(Interpreter):
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
        trial.synchronize(self.device)
        if n.op.startswith("call"):
            self.seconds[n] = time.perf_counter() - began
        if n in self.wanted:
            self.values[n] = _kept(result, given=n.op in ("placeholder", "get_attr"))
        return result


def _kept(value: Any, *, given: bool) -> Any:
    """Return what a node returned as an input of another graph: a leaf, apart from what is written later."""
    if not isinstance(value, torch.Tensor):
        return value
    leaf = value.detach() if given else copied(value.detach())
    return leaf.requires_grad_() if value.requires_grad and torch.is_grad_enabled() else leaf


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


def rewritten_alone(graph: CapturedGraph, name: str) -> GraphModule | None:
    """Return the graph of a place as the rewrite makes it, to be called as it is; None if it takes other inputs."""
    from backend_kwargs.rewrites.apply import rewrite_graph
    from backend_kwargs.rewrites.traced import change_by

    gm = copy_of_graph(graph.gm)
    if find_rewrite(name).patterns:
        count = rewrite_graph(gm.graph, name)
        gm.recompile()
        return gm if count else None
    change = change_by(name, gm, graph.example_inputs)
    return change.gm if change and change.example_inputs is graph.example_inputs else None


# ---- which are chosen

OF = " of "  # between an operator and the layouts of what it reads
DEARER = 1.1  # times as long as alone, from where a place is looked at in the whole graph
CLEAR = 1.2  # a speedup that other sizes, which were not timed, are taken to have in part


def worth_it(places: Iterable[Place], verdicts: Mapping[Place, Verdict], margin: float) -> list[Place]:
    """Return the places that are faster rewritten, beyond the margin, one for each operator: what saves most first.

    Those that were not raced follow the others of their rewrite, where all of these are clearly faster.
    """
    saved: dict[Place, float] = {}
    for place in places:
        if (found := verdicts.get(place, UNKNOWN)).speedup:
            if found.speedup.low > 1 + margin:
                saved[place] = place.count * (found.default_s - found.rewritten_s)
        elif found.is_little or not found.why:
            known = [each.speedup for of, each in verdicts.items() if of.rewrite == place.rewrite and each.speedup]
            if known and all(speedup.low > CLEAR for speedup in known):
                saved[place] = 0.0
    chosen: list[Place] = []
    for place in sorted(saved, key=lambda each: -saved[each]):
        if all({*place.nodes}.isdisjoint(each.nodes) for each in chosen):
            chosen.append(place)
    return chosen


# ---- what they are in the whole graph


def why_not_made(places: Iterable[Place], made: Mapping[str, int]) -> str:
    """Return which rewrite was `made` in fewer places of the graph than these, "" if none was."""
    wanted = Counter[str]()
    for place in places:
        wanted[place.rewrite] += place.count
    fewer = (
        f"{name} shows {made.get(name, 0)}x in the code, for {n} places"
        for name, n in wanted.items()
        if made.get(name, 0) < n
    )
    return next(fewer, "")


def why_unlike_alone(
    places: Iterable[Place], verdicts: Mapping[Place, Verdict], whole: Mapping[str, tuple[int, float]]
) -> str:
    """Return what a call of the `whole` graph has otherwise than the places that it has rewritten had alone, or "".

    That is an operator on operands of other layouts, or one that takes longer, as where a kernel was added to it. What
    Inductor has written out itself is none that the graph calls.
    """
    called = {name.partition(OF)[0] for name in whole}

    def calls_of(place: Place) -> dict[str, tuple[int, float]]:
        found = verdicts.get(place, UNKNOWN).calls
        return {name: each for name, each in found.items() if name.partition(OF)[0] in called}

    alone = [(place, calls_of(place)) for place in places]
    expected = Counter[str]()
    for place, calls in alone:
        expected.update({name: place.count * count for name, (count, _) in calls.items()})
    for place, calls in alone:
        for name in calls:
            if (count := whole.get(name, (0, 0.0))[0]) < expected[name]:
                return (
                    f"{place.rewrite} calls {name} {expected[name]}x by what was timed alone, and {count}x in the graph"
                )
        alone_s = sum(seconds for _, seconds in calls.values())
        seconds = sum(count * whole[name][1] / whole[name][0] for name, (count, _) in calls.items())
        if seconds > DEARER * alone_s:
            return f"{place.rewrite}'s kernels take {seconds / alone_s:.1f} times as long in the graph as alone"
    return ""
