"""Linear layers that share an input as one product, with their weights packed into one buffer.

Weights are inputs of the graph, so the caller may change them. Each call compares the identity, address and version of
every weight with those of the packed one, and packs again into the same buffer if any differs. Writes through `.data`
change no version, so they go unnoticed. A guard compiles the graph again for other weights: if two modules shared the
buffer, a thread that calls one would pack while another thread runs the other.
"""

import logging
import threading
import timeit
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.fx import GraphModule, Node

from backend_kwargs.backends import Inputs
from backend_kwargs.errors import warn_once
from backend_kwargs.facts import Call
from backend_kwargs.graphs.freezing import CopyOfParameters, by_source, guard_parameters
from backend_kwargs.graphs.writes import (
    copy_of_graph,
    has_memory,
    has_transforms,
    may_be_written,
    written_between,
    written_memory,
)
from backend_kwargs.rewrites.matching import arguments_of, same_sizes, value_of
from backend_kwargs.rewrites.table import Rewrite
from backend_kwargs.rewrites.traced import Change, Wanted, every
from backend_kwargs.torch_internals.dynamo import ConstantSource, compile_id, is_tracing, sources_of_attributes
from backend_kwargs.torch_internals.tensors import WithoutDispatch, linear, set_grad_enabled, version_of

REWRITE = Rewrite(
    "Linear layers that share an input as one product of packed weights (q, k and v, or gate and up)",
    traced=f"{__name__}:pack",
    applies="while no gradients are recorded; weights of one dtype",
    same_function=False,
    costs="a copy of each packed weight, checked at each call; writes through `.data` go unnoticed",
    fitting=lambda stats: stats.gemms > 1 and not stats.training,
    order=170,
)

logger = logging.getLogger("backend_kwargs.rewrites")

MODULES = 4  # dynamo compiles eight graphs of a function, then none: one graph without packed weights serves all others
LINEAR = (F.linear, linear)
_lock = threading.Lock()


class Pack(CopyOfParameters):
    """Tensors concatenated along their first dimension in `buffer`, whose address never changes."""

    def __init__(self, positions: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        self.positions = tuple(positions)
        with torch.no_grad(), WithoutDispatch():
            known = self._state(tensors)
            self.buffer = torch.cat([tensor.detach() for tensor in tensors])
        self.known = known

    def _state(self, tensors: Sequence[torch.Tensor]) -> list[tuple[int, int, int, int]]:
        """Return what identifies the values of `tensors`; ask before reading them, since a thread may change them."""
        self.watch(tensors)
        # Kept alive, since new memory could get the old address. Not the tensors: torch swaps none that has a weak
        # reference, and others would keep replaced parameters alive.
        self.storages = [tensor.untyped_storage() for tensor in tensors]
        return [
            (position, id(tensor), tensor.data_ptr(), version_of(tensor))
            for position, tensor in zip(self.positions, tensors, strict=True)
        ]

    def refresh(self, inputs: Sequence[torch.Tensor]) -> None:
        """Pack again if a tensor was replaced or written to."""
        for position, identity, address, version in self.known:
            tensor = inputs[position]
            if id(tensor) != identity or tensor.data_ptr() != address or version_of(tensor) != version:
                break
        else:
            if not self.stale:
                return
        tensors = [inputs[position] for position in self.positions]
        with _lock, torch.no_grad():
            known = self._state(tensors)
            torch.cat([tensor.detach() for tensor in tensors], out=self.buffer)
            self.known = known


@dataclass(frozen=True, slots=True)
class _Linear:
    """A linear layer of dynamo's graph."""

    node: Node
    x: Node
    weight: Node
    bias: Node | None

    @property
    def parameters(self) -> tuple[Node, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


def pack(gm: GraphModule, example_inputs: Inputs, wanted: Wanted = every) -> Change | None:
    """Return the graph with each group of linear layers as one, or None if no layers share an input.

    Applies only without gradients, and to parameters that the graph does not change.
    """
    modes = gm.graph.find_nodes(op="call_function", target=set_grad_enabled)
    records = torch.is_grad_enabled() or any(mode.args[0] for mode in modes)
    if records or has_transforms(gm) or not _groups(gm, example_inputs):
        return None
    if _compiled_before() >= MODULES:
        warn_once(f"Rewrite 'packed' packs the weights of up to {MODULES} modules that share code; others stay apart.")
        return None
    packed = copy_of_graph(gm)
    placeholders = packed.graph.find_nodes(op="placeholder")
    groups = [each for each in _groups(packed, example_inputs) if wanted([layer.node for layer in each])]
    if not groups:
        return None
    positions = {node: at for at, node in enumerate(placeholders)}
    packs = []
    for group in groups:
        packs += _pack_group(packed, group, positions, example_inputs)
    guarded = by_source(gm, {at: example_inputs[at] for each in packs for at in each.positions})
    if guarded and is_tracing():  # else the graph was not captured by dynamo, which checks no guards for it
        guard_parameters(guarded)
    kept = [at for at, node in enumerate(placeholders) if node.users]
    for node in placeholders:
        if not node.users:
            packed.graph.erase_node(node)
    packed.graph.lint()
    packed.recompile()
    costs = _costs(packs, example_inputs)
    logger.info("Packed %d groups of linear layers: %s", len(groups), costs)
    return Change(packed, [example_inputs[at] for at in kept], len(groups), wrap=_checking(packs, kept), costs=costs)


def _compiled_before() -> int:
    """Return how many graphs dynamo has compiled of this code: each other module needs one of its own."""
    current = compile_id()
    return current.frame_compile_id or 0 if current else 0


def _costs(packs: Sequence[Pack], inputs: Inputs) -> str:
    """Return the memory of `packs`, and how long a call takes to check their weights."""
    memory = sum(each.buffer.nbytes for each in packs)
    runs = 20

    def check() -> None:
        for each in packs:
            each.refresh(inputs)

    seconds = min(timeit.repeat(check, number=runs, repeat=3)) / runs
    return f"{memory / 2**20:.2f} MiB of packed weights, {seconds * 1e6:.1f} µs of checks per call"


def _checking(packs: Sequence[Pack], kept: Sequence[int]) -> Callable[[Call], Call]:
    """Return what wraps a compiled graph: a call that packs weights again that have changed."""

    def wrap(compiled: Call) -> Call:
        def call(*inputs: Any) -> object:
            for each in packs:
                each.refresh(inputs)
            return compiled(*[inputs[at] for at in kept])

        return call

    return wrap


def _groups(gm: GraphModule, example_inputs: Inputs) -> list[list[_Linear]]:
    """Return the groups of two or more linear layers that share an input that stays the same, in the graph's order."""
    values = dict(zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True))
    written = written_memory(gm.graph)
    sharing: dict[Hashable, list[_Linear]] = defaultdict(list)
    for node in gm.graph.nodes:
        args = arguments_of(node) if node.target in LINEAR else None
        if args is None or not isinstance(args["input"], Node):
            continue
        layer = _Linear(node, args["input"], args["weight"], args["bias"])
        if all(_may_pack(each, values, written) for each in layer.parameters):
            # Under autocast layers of one dtype may give results of another, and a bias may have its own.
            result, parameters = value_of(node), [values[each] for each in layer.parameters]
            if result is not None and _is_plain(*parameters):
                kinds = [(each.dtype, each.device, each.shape[1:]) for each in parameters]
                sharing[layer.x, result.dtype, *kinds].append(layer)
    return [
        group
        for group in sharing.values()
        if len(group) > 1 and not written_between(group[0].node, group[-1].node, [group[0].x])
    ]


def _is_plain(weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Return whether the layer has a matrix, and a number for each of its rows: F.linear broadcasts a bias."""
    return weight.dim() == 2 and (bias is None or same_sizes(bias.shape, weight.shape[:1]))


def _may_pack(node: Node, values: dict[Node, object], written: set[int]) -> bool:
    """Return whether `node` is a parameter whose version counts its changes, and that the graph does not change."""
    value = values.get(node)
    if not isinstance(value, torch.nn.Parameter) or not has_memory(value) or value.is_inference():
        return False
    return not may_be_written(node, written)


def _pack_group(
    gm: GraphModule, group: list[_Linear], positions: dict[Node, int], example_inputs: Inputs
) -> list[Pack]:
    packs, attributes = [], []
    with gm.graph.inserting_before(group[0].node):
        for nodes in zip(*(each.parameters for each in group), strict=True):
            at = [positions[node] for node in nodes]
            pack = Pack(at, [example_inputs[position] for position in at])
            packs.append(pack)
            attributes.append(_attribute(gm, pack.buffer))
        whole = gm.graph.call_function(F.linear, (group[0].x, *attributes))
        start = 0
        for each in group:
            end = start + example_inputs[positions[each.weight]].shape[0]
            # A copy, of one row too: the following code may need memory of its own with contiguous strides. The next
            # kernel contains it.
            part = gm.graph.call_function(torch.narrow, (whole, -1, start, end - start))
            part = gm.graph.call_method("clone", (part,), {"memory_format": torch.contiguous_format})
            part.meta = dict(each.node.meta)
            each.node.replace_all_uses_with(part)
            start = end
    for each in group:
        gm.graph.erase_node(each.node)
    return packs


def _attribute(gm: GraphModule, buffer: torch.Tensor) -> Node:
    """Register `buffer` on the graph and return its node; CUDA graphs then treat its address as static."""
    count = 0
    while hasattr(gm, f"packed_{count}"):
        count += 1
    name = f"packed_{count}"
    gm.register_buffer(name, buffer)
    # AOTAutograd needs a different source for each attribute.
    sources_of_attributes(gm)[name] = ConstantSource(f"backend_kwargs_{name}")
    return gm.graph.get_attr(name)
