"""Apply rewrites as one of Inductor's passes, after the user's own, and count what they find in a graph.

Patterns match after AOTAutograd's partition. A value that the backward pass needs is an output there, and so has
another user, and a pattern that would remove it does not match. What must be differentiated is replaced in dynamo's
graph. Reports count a rewrite by its operators in the code: this pass does not run on a graph from a cache.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache

from torch.fx import Graph, GraphModule, Node

from backend_kwargs.backends import Inputs
from backend_kwargs.backends.inductor.allowed_attention import allowed_attention
from backend_kwargs.options.machine import machine, unmet
from backend_kwargs.options.option import Options
from backend_kwargs.rewrites.folding import fold_together
from backend_kwargs.rewrites.table import Rewrite, chosen_places, find_rewrite, fingerprint, name_of, resolved
from backend_kwargs.rewrites.traced import Place, change_by, counted, place_of
from backend_kwargs.torch_internals import inductor_config
from backend_kwargs.torch_internals.pattern_matcher import (
    InferenceAwarePass,
    Match,
    PatternMatcherPass,
    is_match,
    only_where,
    takes_is_inference,
)

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
