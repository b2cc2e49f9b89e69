"""The places of a graph where a rewrite matches, each as a graph of its own with the inputs that it has in a call.

So a race of two small graphs tells what a rewrite is worth there, and no whole graph is compiled to learn it.
"""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node

from backend_kwargs import trial
from backend_kwargs.auto.graph_stats import GEMMS, calls_a_library
from backend_kwargs.auto.verdicts import HALF, UNKNOWN, Verdict
from backend_kwargs.backends import CapturedGraph, Inputs
from backend_kwargs.graphs.writes import copy_of_graph, is_unknown, storages_of, written_memory
from backend_kwargs.rewrites.matching import traced_value
from backend_kwargs.rewrites.table import find_rewrite
from backend_kwargs.rewrites.traced import Place
from backend_kwargs.torch_internals.tensors import OperatorMode, OpOverload, enter_autocast, schema_of

Read: TypeAlias = tuple[Node, Node]  # a node outside of a place, and the first node of it that reads it

LEAST_SHARE = 0.02  # of a call: what takes less is not worth two compiles
PRODUCTS = {"linear", "matmul", "einsum", "mv", "scaled_dot_product_attention"} | GEMMS
MOST_NEIGHBOURS = 8
# What Inductor fuses though torch has no tag for it: gathers and other moves of elements, reductions, casts and views.
FUSED = frozenset(
    {"index", "index_select", "gather", "embedding", "constant_pad_nd", "flip", "roll", "repeat", "tril", "triu"}
    | {"_softmax", "native_layer_norm", "native_group_norm", "_fused_rms_norm", "_to_copy", "_unsafe_view"}
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


# ---- a place as a graph


def standing(places: Iterable[Place], fresh: Callable[[], Inputs], device: torch.device) -> list[Standing]:
    """Return places as graphs of their own, the dearest of each rewrite first; `fresh` returns inputs of a call.

    So each rewrite is known before time is spent on other places of one, which may follow without being raced.

    Left out are those of a lowered graph that is called otherwise than dynamo's, as with a seed, and of one of dynamo's
    that enters autocast: alone they would compute in other dtypes.
    """
    by_graph = defaultdict[Graph, list[Place]](list)
    for place in places:
        by_graph[place.nodes[0].graph].append(place)
    alone = [found for graph, several in by_graph.items() for found in _standing_in(graph, several, fresh, device)]
    alone.sort(key=lambda found: -found.share)
    of = [found.place.rewrite for found in alone]
    return [alone[at] for at in sorted(range(len(of)), key=lambda at: of[:at].count(of[at]))]


def _standing_in(
    graph: Graph, places: Sequence[Place], fresh: Callable[[], Inputs], device: torch.device
) -> Iterator[Standing]:
    inputs = fresh()
    if (
        graph.find_nodes(op="call_function", target=enter_autocast)
        or len(graph.find_nodes(op="placeholder")) != len(inputs)
        or graph.owning_module is None
    ):
        return
    alone = [(standing_alone(place.nodes), standing_alone(place.around)) for place in places]
    written = written_memory(graph)

    def seen(read: Read) -> Read:
        return (read[0], read[0]) if written.isdisjoint(storages_of(traced_value(read[0]))) else read

    wanted = {seen(read) for forms in alone for _, reads in forms for read in reads}
    watched = _Watched(graph.owning_module, wanted, device)
    watched.run(*inputs)
    if device.type == "cuda":  # the first run of an operator also loads its kernels, which takes longer than the call
        watched.run(*fresh())
    whole_s = _whole_seconds(watched.seconds)
    for place, forms in zip(places, alone, strict=True):
        seconds = sum(watched.seconds.get(node, 0.0) for node in place.nodes)
        bare, fused = (CapturedGraph(gm, [watched.values[seen(read)] for read in reads]) for gm, reads in forms)
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
    """A run of a graph in eager: the seconds of each node, and the value of each `wanted` pair when it is read.

    It may be written to before that, and afterwards; one to which nothing writes is paired with itself.
    """

    module: GraphModule
    wanted: set[Read]
    device: torch.device
    values: dict[Read, Any] = field(default_factory=dict)
    seconds: dict[Node, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.module)

    def run_node(self, n: Node) -> Any:
        for each in n.all_input_nodes:
            if (each, n) in self.wanted:
                self.values[each, n] = _kept(self.env[each], stays=False)
        began = time.perf_counter()
        result = super().run_node(n)
        trial.synchronize(self.device)
        if n.op.startswith("call"):
            self.seconds[n] = time.perf_counter() - began
        if (n, n) in self.wanted:
            self.values[n, n] = _kept(result, stays=n.op in ("placeholder", "get_attr"))
        return result


def _kept(value: Any, *, stays: bool) -> Any:
    """Return a value as an input of another graph: a leaf, copied unless it `stays` as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    leaf = value.detach() if stays else trial.copied(value.detach())
    return leaf.requires_grad_() if value.requires_grad and torch.is_grad_enabled() else leaf


def standing_alone(nodes: Sequence[Node]) -> tuple[GraphModule, list[Read]]:
    """Return the graph of these nodes alone, and what it reads of the graph around them, in the order of its inputs."""
    inside = sorted({node for node in nodes if node.op.startswith("call")})
    reads = dict[Node, Node]()
    for node in inside:
        for each in node.all_input_nodes:
            if each not in inside:
                reads.setdefault(each, node)
    graph, copies = Graph(), dict[Node, Node]()
    for node in reads:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in inside:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in inside if not {*inside}.issuperset(node.users)))
    return GraphModule(torch.nn.Module(), graph), [*reads.items()]


def with_neighbours(place: Place) -> Place:
    """Return the place with those nodes around it that Inductor would fuse with what takes its place.

    A user follows if what it reads beside was there before the place: else it may be computed from that, by a product.
    """
    inside, is_fused = dict.fromkeys(place.nodes), cache(_is_fused)

    def beside(node: Node) -> Iterator[Node]:
        yield from (
            each for each in node.users if all(r in inside or r < min(place.nodes) for r in each.all_input_nodes)
        )
        yield from (each for each in node.all_input_nodes if inside.keys() >= each.users.keys())

    for _ in range(MOST_NEIGHBOURS):
        near = (each for node in inside for each in beside(node) if each not in inside and is_fused(each))
        inside |= dict.fromkeys(islice(near, 1))
    return replace(place, around=(*inside,))


def _is_fused(node: Node) -> bool:
    """Return whether Inductor fuses all operators that a node calls, none of which writes or draws."""
    made = traced_value(node)
    # Nor does a graph return tuples within its own, or fuse a copy to another device.
    read = [each for each in map(traced_value, node.all_input_nodes) if isinstance(each, torch.Tensor)]
    if not isinstance(made, torch.Tensor) or is_unknown(node):
        return False
    if any(each.dim() and each.device != made.device for each in read):  # numbers in tensors may be elsewhere
        return False
    # A lowered graph has so many views that they would be all there is around a place.
    if isinstance(node.target, OpOverload):
        return _is_pointwise(node.target) and not node.target.is_view

    def called(func: Any, args: Any, kwargs: Any) -> object:
        if not _is_pointwise(func):
            raise NotImplementedError  # before it writes into the values of the graph
        return func(*args, **kwargs)

    interpreter = Interpreter(GraphModule({}, Graph()))
    interpreter.env = {each: traced_value(each) for each in node.all_input_nodes}
    try:
        with torch.no_grad(), OperatorMode(called):
            interpreter.run_node(node)
    except Exception:  # noqa: BLE001 - whatever a function meets that is run apart from its graph, it is not fused
        return False
    return True


def _is_pointwise(func: OpOverload) -> bool:
    if schema_of(func).is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    is_tagged = not {torch.Tag.pointwise, torch.Tag.reduction}.isdisjoint(func.tags)
    return is_tagged or func.is_view or func.overloadpacket.__name__ in FUSED


def rewritten_alone(graph: CapturedGraph, name: str) -> GraphModule | None:
    """Return the graph of a place as the rewrite makes it, to be called as it is; None if it takes other inputs."""
    from backend_kwargs.rewrites.traced import change_by, rewrite_graph

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
    for name in wanted - Counter(made):
        return f"{name} shows {made.get(name, 0)}x in the code, for {wanted[name]} places"
    return ""


def why_unlike_alone(
    places: Iterable[Place], verdicts: Mapping[Place, Verdict], whole: Mapping[str, tuple[int, float]]
) -> str:
    """Return what a call of the `whole` graph has otherwise than the places that it has rewritten had alone, or "".

    That is an operator on operands of other layouts, or one that takes so much longer, as where a kernel was added to
    it, that half of what was saved alone is gone. What Inductor has written out itself is none that the graph calls.
    """
    called = {name.partition(OF)[0] for name in whole}
    known = [(place, verdicts.get(place, UNKNOWN)) for place in places]
    alone = [
        (place, it, {name: each for name, each in it.calls.items() if name.partition(OF)[0] in called})
        for place, it in known
    ]
    expected = Counter[str]()
    for place, _, calls in alone:
        expected.update({name: place.count * count for name, (count, _) in calls.items()})
    for place, it, calls in alone:
        for name in calls:
            if (count := whole.get(name, (0, 0.0))[0]) < expected[name]:
                return (
                    f"{place.rewrite} calls {name} {expected[name]}x by what was timed alone, and {count}x in the graph"
                )
        alone_s = sum(seconds for _, seconds in calls.values())
        seconds = sum(count * whole[name][1] / whole[name][0] for name, (count, _) in calls.items())
        if seconds - alone_s > max((DEARER - 1) * alone_s, HALF * (it.default_s - it.rewritten_s)):
            return f"{place.rewrite}'s kernels take {seconds / alone_s:.1f} times as long in the graph as alone"
    return ""
