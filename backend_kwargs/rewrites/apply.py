"""Apply rewrites as one of Inductor's passes, after the user's own, and count what they find in a graph.

Patterns match after AOTAutograd's partition. A value that the backward pass needs is an output there, and so has
another user, and a pattern that would remove it does not match. What must be differentiated is replaced in dynamo's
graph. Reports count a rewrite by its operators in the code: this pass does not run on a graph from a cache.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from torch.fx import Graph, GraphModule

from backend_kwargs.backends import Inputs
from backend_kwargs.backends.inductor.allowed_attention import allowed_attention
from backend_kwargs.options.layers import Options
from backend_kwargs.options.requirements import machine, unmet
from backend_kwargs.rewrites import operators
from backend_kwargs.rewrites.folding import fold_together
from backend_kwargs.rewrites.table import Rewrite, find_rewrite, fingerprint, resolved
from backend_kwargs.rewrites.traced import change_by
from backend_kwargs.torch_internals import inductor_config
from backend_kwargs.torch_internals.pattern_matcher import (
    InferenceAwarePass,
    PatternMatcherPass,
    is_match,
    takes_is_inference,
)

PLACE = "post_grad_custom_pre_pass"  # here a linear layer is one addmm, and nothing is fused yet


@dataclass(frozen=True, slots=True)
class Found:
    """The matches of a rewrite in a graph: their number, and the bytes of memory traffic that they save."""

    count: int
    bytes: float


class RewritePass(InferenceAwarePass):  # type: ignore[misc]
    """Inductor's pass `PLACE`: the user's passes, then those of the rewrites `names` that have patterns.

    The others have changed dynamo's graph already; their sources are part of the key too.
    """

    def __init__(self, names: Iterable[str], users: Sequence[Callable[..., object]]) -> None:
        self.names = tuple(names)
        self.users = tuple(users)

    def __call__(self, graph: Graph, is_inference: bool = True) -> None:
        """Rewrite `graph` in place."""
        for each in self.users:
            if takes_is_inference(each):
                each(graph, is_inference)
            else:
                each(graph)
        for name in self.names:
            if find_rewrite(name).patterns:
                rewrite_graph(graph, name)

    def uuid(self) -> object:
        """Return the pass's part of Inductor's cache key, or None if a pass of the user has none."""
        users = [each.uuid() if hasattr(each, "uuid") else None for each in self.users]
        known = fingerprint(self.names), allowed_attention()
        return None if None in users else ("backend_kwargs.rewrites", *known, tuple(users))


def with_rewrites(patches: Options, names: Sequence[str]) -> Options:
    """Return Inductor's options with a pass for those of the rewrites `names` that work here."""
    working = [name for name in names if not unmet(find_rewrite(name).needs, machine())]
    if not working:
        return patches
    for each in map(find_rewrite, working):
        resolved(each.patterns or each.traced)  # defines operators, which code out of a cache calls without the pass
    users = patches.get(PLACE, inductor_config.value(PLACE))
    users = list(users) if isinstance(users, list | tuple) else [users] if users is not None else []
    return {**patches, PLACE: RewritePass(working, users)}


def rewrite_graph(graph: Graph, name: str) -> int:
    """Apply one rewrite to a lowered graph and return the number of matches."""
    count = _pass_of(find_rewrite(name)).apply(graph)
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


# ---- matches, without changing the graph


def find_in(gms: Sequence[GraphModule], name: str) -> Found:
    """Return the matches of the rewrite `name` in lowered graphs, which stay unchanged."""
    count, saved = 0, 0.0
    for gm in gms:
        if not _matches(gm.graph, name):
            continue
        spare = GraphModule(gm, copy.deepcopy(gm.graph))
        if number := rewrite_graph(spare.graph, name):
            count += number
            saved += sum(map(operators.saved_bytes, spare.graph.nodes))
    return Found(count, saved)


def find_in_traced(gm: GraphModule, example_inputs: Inputs, name: str) -> Found:
    """Return the matches of the rewrite `name` in dynamo's graph, which stays unchanged."""
    change = change_by(name, gm, example_inputs)
    return Found(change.count, change.bytes) if change else Found(0, 0.0)
