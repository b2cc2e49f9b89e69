"""Apply rewrites, to dynamo's graph before autograd and by a pass of Inductor's, and find the places where they match.

A place is where a rewrite would replace something in a graph, known by what decides how long it takes. A rewrite is
named alone, for all of its places in a graph, or with some: "attention@1:0f3c...". What stands for a place is the same
in any graph that has it, so that what was measured for one holds for every equal one.

Patterns are applied by one of Inductor's passes, after the user's own. They match after AOTAutograd's partition. A
value that the backward pass needs is an output there, and so has another user, and a pattern that would remove it does
not match. What must be differentiated is replaced in dynamo's graph. Reports count a rewrite by its operators in the
code: this pass does not run on a graph from a cache.
"""

import copy
import dataclasses
import hashlib
import inspect
import json
import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument

from backend_kwargs.backends import CapturedGraph, Inputs
from backend_kwargs.errors import wrong_value
from backend_kwargs.facts import Call, Compiled, Replacements
from backend_kwargs.graphs.spelling import layout_of, line_of, numbered_symbols
from backend_kwargs.graphs.writes import copy_of_graph, has_transforms, is_unknown, storages_of, written_between
from backend_kwargs.options.machine import machine, unmet
from backend_kwargs.options.option import Options
from backend_kwargs.rewrites.folding import fold_together
from backend_kwargs.rewrites.matching import (
    Arguments,
    arguments_of,
    dying_with,
    erase_dead,
    matched,
    replace,
    traced_value,
    value_of,
)
from backend_kwargs.rewrites.table import DIGITS, Rewrite, chosen_places, find_rewrite, fingerprint, name_of, resolved
from backend_kwargs.torch_internals import inductor_config
from backend_kwargs.torch_internals.pattern_matcher import (
    InferenceAwarePass,
    Match,
    PatternMatcherPass,
    is_match,
    only_where,
    takes_is_inference,
)
from backend_kwargs.torch_internals.tensors import (
    OpOverload,
    OpOverloadPacket,
    allowed_attention,
    is_traceable_wrapper_subclass,
)
from backend_kwargs.trial.trees import tensors_of

# Methods after which a tensor has other sizes or strides.
CHANGE_SIZES = (
    "squeeze_", "unsqueeze_", "transpose_", "t_", "swapaxes_", "swapdims_", "resize_", "resize_as_", "as_strided_",
)  # fmt: skip

# What returns a view of some tensors and a copy of others, by their strides.
BY_STRIDES = ("contiguous", "reshape", "reshape_as", "flatten", "ravel", "to")


OPERATOR = re.compile(r" call_\w+ (?:aten\.|torch[\w.]*\.|(?!_operator\.getitem)_operator\.)?(?!_operator)(\w+)")
TENSOR = re.compile(r": torch\.(\w+) \w+ \((.*?),?\)")  # its dtype and sizes
Wanted: TypeAlias = Callable[[Sequence[Node]], bool]  # whether these nodes, which are still there, are replaced


def every(nodes: Sequence[Node]) -> bool:
    """Replace whatever matches."""
    return True


@dataclass(frozen=True)
class Place:
    """What a rewrite would replace: the operators with their attributes, and what they read and return.

    `inputs` and `results` have dtypes, sizes, strides and devices, and in training whether gradients are recorded.
    `count` is how often it is in the graph. `nodes` are those of the first, in the graph that they were found in, and
    `around` these with what Inductor would fuse with them there.
    """

    rewrite: str
    version: int
    operators: tuple[str, ...]
    inputs: tuple[str, ...]
    results: tuple[str, ...]
    training: bool
    count: int = field(default=1, compare=False)
    nodes: tuple[Node, ...] = field(default=(), compare=False, repr=False)
    around: tuple[Node, ...] = field(default=(), compare=False, repr=False)

    @cached_property
    def signature(self) -> str:
        """Hexadecimal digits that stand for all of it."""
        parts = self.rewrite, self.version, self.operators, self.inputs, self.results, self.training
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:DIGITS]

    @cached_property
    def situation(self) -> str:
        """Hexadecimal digits that stand for it with what is around it."""
        return place_of(self.rewrite, self.around).signature

    @property
    def what(self) -> str:
        """The operators and what they read, for people: "mul, sum of float32 8x128x1x64, float32 8x1x128x64"."""
        names = (match[1] for line in self.operators if (match := OPERATOR.search(line)))
        read = (f"{match[1]} {match[2].replace(', ', 'x')}" for line in self.inputs if (match := TENSOR.search(line)))
        return f"{', '.join(dict.fromkeys(names))} of {', '.join(read)}"

    def __str__(self) -> str:
        return f"{self.rewrite}@{self.version}:{self.signature}"


def place_of(rewrite: str, nodes: Sequence[Node], dead: Set[Node] = frozenset()) -> Place:
    """Return the place of `rewrite` that these nodes are, of dynamo's graph or of one that Inductor lowers.

    Nothing uses what `dead` nodes of the graph return.
    """
    inside, numbers = {node for node in nodes if node.op.startswith("call")}, dict[Node, str]()
    # What has no users writes.
    ends = [node for node in nodes if node in inside and not (node.users and (inside | dead).issuperset(node.users))]
    inner: list[Node] = []
    # Not in the graph's order, which Inductor changes before it calls its passes.
    for node in _leading_to(ends, inside):
        numbers[node] = f"%{len(inner)}" if node in inside else f"x{len(numbers) - len(inner)}"
        inner += [node] if node in inside else []
    values = map(traced_value, numbers)
    training = torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in values)
    outer = [node for node in numbers if node not in inside]
    lines = [line_of(node.graph.owning_module, node, numbers) for node in inner]
    lines = [each.replace("aten.view.default", "aten.reshape.default") for each in lines]  # as Inductor makes of views
    kinds = [f"{numbers[node]}: {_described(traced_value(node), training=training)}" for node in (*outer, *ends)]
    texts = tuple(numbered_symbols([*lines, *kinds]))
    inputs, results = texts[len(lines) : len(lines) + len(outer)], texts[len(lines) + len(outer) :]
    version = find_rewrite(rewrite).version
    return Place(rewrite, version, texts[: len(lines)], inputs, results, training, nodes=tuple(inner))


def counted(places: Iterable[Place]) -> list[Place]:
    """Return each place once, with how often it is there."""
    return [dataclasses.replace(place, count=count) for place, count in Counter(places).items()]


def _leading_to(ends: Sequence[Node], inside: set[Node]) -> Iterator[Node]:
    """Yield the nodes that lead to `ends`, each after what it reads, and what those read that is not `inside`."""
    seen: set[Node] = set()
    waiting = [(node, False) for node in reversed(ends)]
    while waiting:
        node, is_ready = waiting.pop()
        if is_ready:
            yield node
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            if node in inside:
                waiting += [(each, False) for each in reversed(node.all_input_nodes)]


def _described(value: object, *, training: bool) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    recorded = f" {value.requires_grad}" if training else ""
    return f"{value.dtype} {value.device.type} {layout_of(value)}{recorded}"


@dataclass(frozen=True, slots=True)
class Change:
    """A graph that replaces dynamo's, with its inputs.

    `count` is the number of replacements. `wrap` turns the compiled graph into a callable that takes the inputs of
    dynamo's graph; `costs` says in words what it adds to each call.
    """

    gm: GraphModule
    example_inputs: Inputs
    count: int
    wrap: Callable[[Call], Call] = field(default=lambda compiled: compiled)
    costs: str = ""


def compile_rewritten(
    graph: CapturedGraph, entries: Sequence[str], following: Callable[[CapturedGraph], Compiled]
) -> Compiled:
    """Compile a graph by `following`, after the rewrites of dynamo's graphs, each in the places chosen for it."""
    changes: list[Change] = []
    counted: dict[str, Replacements] = {}
    for name, chosen in chosen_places(entries).items():
        rewrite = find_rewrite(name)
        if not _works(rewrite, graph.example_inputs):
            continue
        wanted = None if chosen is None else lambda place, chosen=chosen: place.signature in chosen
        if change := change_by(name, graph.gm, graph.example_inputs, wanted):
            graph = dataclasses.replace(graph, gm=change.gm, example_inputs=change.example_inputs)
            changes.append(change)
            if not rewrite.operators:  # nothing in the generated code shows them
                counted[name] = Replacements(change.count, change.costs)
    compiled = following(graph)
    call = compiled.call
    for change in reversed(changes):
        call = change.wrap(call)
    return compiled.called_by(call).with_facts(rewrites=counted)


def change_by(
    name: str, gm: GraphModule, example_inputs: Inputs, wanted: Callable[[Place], bool] | None = None
) -> Change | None:
    """Return what the rewrite `name` makes of dynamo's graph, where a place is `wanted`; None if it changes nothing.

    To a function that takes no `wanted`, as those of users may not, all of the graph is one place.
    """
    function = resolved(find_rewrite(name).traced)
    chooses: dict[str, Wanted] = {}
    if wanted is not None and "wanted" in inspect.signature(function).parameters:
        chooses["wanted"] = lambda nodes: wanted(place_of(name, nodes))
    change = function(gm, example_inputs, **chooses)
    if change is not None and not isinstance(change, Change):
        raise wrong_value(f"The result of rewrite {name!r}", "a Change or None", change)
    if change is None or wanted is None or chooses:
        return change
    return change if wanted(place_of(name, [*gm.graph.nodes])) else None


def _works(rewrite: Rewrite, example_inputs: Inputs) -> bool:
    on_gpu = any(getattr(value, "is_cuda", False) for value in example_inputs)
    return bool(rewrite.traced) and not unmet(rewrite.needs, machine()) and (on_gpu or "gpu" not in rewrite.needs)


# ---- shared by these rewrites


def replacing(
    targets: Collection[object],
    new_node: Callable[[Node, Arguments], Node | None],
    placed: Callable[[Node], Sequence[Node]] = dying_with,
) -> Callable[..., Change | None]:
    """Return a rewrite of dynamo's graph that replaces calls of `targets`: functions, or names of methods.

    `new_node(node, arguments)`, with the arguments by their names in the schema, inserts what replaces `node` before it
    and returns that; it raises `NoMatchError`, or returns None, where `node` stays. `placed` returns the nodes of a
    place. Operators of ours have no rules for `torch.func`'s transforms.
    """

    def calls(gm: GraphModule) -> list[Node]:
        named = [node for node in gm.graph.nodes if node.op in ("call_function", "call_method")]
        return [each for each in named if each.target in targets and all(map(is_plain, (each, *each.all_input_nodes)))]

    def rewrite(gm: GraphModule, example_inputs: Inputs, wanted: Wanted = every) -> Change | None:
        if not calls(gm) or has_transforms(gm):
            return None
        copied, count = copy_of_graph(gm), 0
        for node in calls(copied):
            args, before = arguments_of(node), node.prev
            with copied.graph.inserting_before(node):
                new = matched(new_node, node, args) if args is not None else None
            if new is None:
                continue
            if not _saves_what_changes(before, node) and wanted(placed(node)):
                replace(node, new)
                count += 1
            else:
                erase_dead(new)
        if not count:
            return None
        # Not eliminate_dead_code: it takes an in-place method whose result is unused, as a cache's update, for dead.
        copied.graph.lint()
        copied.recompile()
        return Change(copied, example_inputs, count)

    return rewrite


def _saves_what_changes(before: Node, node: Node) -> bool:
    """Return whether the nodes inserted after `before` may save for gradients what the graph changes in place later.

    What is replaced may save something else, as a loss its probabilities, and lets its input change.
    """
    nodes = [*node.graph.nodes]
    inserted = nodes[nodes.index(before) + 1 : nodes.index(node)]
    return changes_later(node, {each for new in inserted for each in new.all_input_nodes})


def changes_later(node: Node, saved: Iterable[Node]) -> bool:
    """Return whether a function of torch's changes what was `saved` for the gradients of `node`, if it has any."""
    if not any(each.requires_grad for each in tensors_of(node.meta.get("example_value"))):
        return False
    *nodes, output = node.graph.nodes
    return written_between(node, output, saved, {*filter(is_unknown, nodes)})


def is_plain(node: Node) -> bool:
    """Return whether the example of a node tells what it is: a tensor of torch's, whose sizes nobody changes.

    A method such as `squeeze_` changes the fake tensor too, which then shows what is after it.
    """
    value = value_of(node)
    if value is None:
        return True
    changes = (user.op == "call_method" and user.target in CHANGE_SIZES for user in node.users)
    return not (is_traceable_wrapper_subclass(value) or any(changes))


def is_only_computed_with(node: Node) -> bool:
    """Return whether nobody sees the strides of a tensor: neither it nor a view of it is returned, or read by them.

    Operators may read them, and functions that are neither torch's nor ours, as kernels.
    """
    storages = storages_of(value_of(node))
    return all(
        each.op in ("call_function", "call_method")
        and not (name := getattr(each.target, "__name__", str(each.target))).startswith("as_strided")
        and name not in BY_STRIDES
        and (
            "backend_kwargs" in getattr(each.target, "__module__", "")
            or not (is_unknown(each) or isinstance(each.target, OpOverload | OpOverloadPacket))
        )
        and (storages.isdisjoint(storages_of(value_of(each))) or is_only_computed_with(each))
        for each in node.users
    )


def changes_meanwhile(node: Node, read: Sequence[Node | None]) -> bool:
    """Return whether the pattern that ends with `node` may have read other values in `read` than `node` would."""
    pattern: set[Node] = set()
    following = [node]
    while following:
        each = following.pop()
        if each not in pattern and each not in read and storages_of(each.meta.get("example_value")):  # not for sizes
            pattern.add(each)
            following += each.all_input_nodes
    first, left = node, {*pattern}
    while left:
        left.discard(first)
        first = first.prev
    made = pattern - {node}
    return written_between(first, node, [each for each in read if each is not None]) or written_between(
        first, node, made, but=made
    )


def method(node: Node, name: str, *args: Argument, **kwargs: Argument) -> Node:
    """Insert a call of a tensor's method."""
    return node.graph.call_method(name, (node, *args), kwargs)


def first_result(node: Node, call: Node, dtype: torch.dtype) -> Node:
    """Insert the first result of `call`, which has `dtype`, cast to the dtype of `node`."""
    first = node.graph.call_function(operator.getitem, (call, 0))
    wanted = node.meta["example_value"].dtype
    return first if wanted == dtype else method(first, "to", wanted)


PLACE = "post_grad_custom_pre_pass"  # here a linear layer is one addmm, and nothing is fused yet


class RewritePass(InferenceAwarePass):  # type: ignore[misc]
    """Inductor's pass `PLACE`: the user's passes, then those rewrites of `entries` that have patterns, in their places.

    The others have changed dynamo's graph already; their places and sources are part of the key too.
    """

    def __init__(self, entries: Iterable[str], users: Sequence[Callable[..., object]]) -> None:
        self.entries = tuple(entries)
        self.users = tuple(users)

    def __call__(self, graph: Graph, is_inference: bool = True) -> None:
        """Rewrite `graph` in place."""
        for each in self.users:
            if takes_is_inference(each):
                each(graph, is_inference)
            else:
                each(graph)
        for name, chosen in chosen_places(self.entries).items():
            if find_rewrite(name).patterns:
                rewrite_graph(graph, name, chosen)

    def uuid(self) -> object:
        """Return the pass's part of Inductor's cache key, or None if a pass of the user has none."""
        users = [each.uuid() if hasattr(each, "uuid") else None for each in self.users]
        known = fingerprint(self.entries), allowed_attention()
        return None if None in users else ("backend_kwargs.rewrites", *known, tuple(users))


def with_rewrites(patches: Options, entries: Sequence[str]) -> Options:
    """Return Inductor's options with a pass for those rewrites of the option that work here."""
    working = [entry for entry in entries if not unmet(find_rewrite(name_of(entry)).needs, machine())]
    if not working:
        return patches
    for each in map(find_rewrite, chosen_places(working)):
        resolved(each.patterns or each.traced)  # defines operators, which code out of a cache calls without the pass
    users = patches.get(PLACE, inductor_config.value(PLACE))
    users = list(users) if isinstance(users, list | tuple) else [users] if users is not None else []
    return {**patches, PLACE: RewritePass(working, users)}


def rewrite_graph(graph: Graph, name: str, chosen: Collection[str] | None = None) -> int:
    """Apply one rewrite to a lowered graph, in the places that were chosen or in all; return the number of matches."""
    passes = _pass_of(find_rewrite(name))
    if chosen is not None:
        ends = {end for end, place in _located(graph, name) if place.signature in chosen} if chosen else set()
        passes = only_where(passes, lambda match: match.output_node() in ends)
    count = passes.apply(graph)
    if count:
        fold_together(graph)
        graph.eliminate_dead_code()
        graph.lint()
    return count


def _matches(graph: Graph, name: str) -> bool:
    """Return whether a rewrite matches anywhere; a copy of the graph, to apply it to, takes far longer to make."""
    return any(
        is_match(match := entry.pattern.match(node)) and entry.extra_check(match)
        for (op, target), entries in _pass_of(find_rewrite(name)).patterns.items()
        for node in graph.find_nodes(op=op, target=target)
        for entry in entries
    )


@cache
def _pass_of(rewrite: Rewrite) -> PatternMatcherPass:
    """Return the pass with the patterns of a rewrite."""
    passes = PatternMatcherPass("backend_kwargs")
    resolved(rewrite.patterns)(passes)
    return passes


# ---- places, without changing the graph


def places_in(gms: Sequence[GraphModule], name: str) -> list[Place]:
    """Return the places of the rewrite `name` in lowered graphs, which stay unchanged."""
    return counted(place for gm in gms for _, place in _located(gm.graph, name))


def places_in_traced(gm: GraphModule, example_inputs: Inputs, name: str) -> list[Place]:
    """Return the places of the rewrite `name` in dynamo's graph, which stays unchanged."""
    found: list[Place] = []

    def note(place: Place) -> bool:
        found.append(place)
        return False  # so that its nodes stay

    change_by(name, gm, example_inputs, note)
    return counted(found)


def _located(graph: Graph, name: str) -> list[tuple[Node, Place]]:
    """Return the last node of each match of a rewrite, as it applies them to a copy, with the place that it is."""
    if not _matches(graph, name):
        return []
    spare = copy.deepcopy(graph)
    GraphModule(graph.owning_module or {}, spare)
    originals = dict(zip(spare.nodes, graph.nodes, strict=True))
    located: list[tuple[Node, Place]] = []
    _erase_unused(spare)  # as Inductor does before it calls its passes
    before, end = {*spare.nodes}, None
    dead = {original for node, original in originals.items() if node not in before}

    def close() -> None:
        """Note the place of the match before, which has been replaced by now."""
        nonlocal before
        if end is not None:
            _erase_unused(spare)
            gone = before.difference(spare.nodes)
            located.append((end, place_of(name, [each for node, each in originals.items() if node in gone], dead)))
            before = {*spare.nodes}

    def begin(match: Match) -> bool:
        nonlocal end
        close()
        end = originals.get(match.output_node())
        return end is not None

    only_where(_pass_of(find_rewrite(name)), begin).apply(spare)
    close()
    return located


def _erase_unused(graph: Graph) -> None:
    """Do what `eliminate_dead_code` does, which lints the graph too, and asks of each node whether it has effects."""
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure():
            graph.erase_node(node)
