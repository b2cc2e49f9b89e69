"""Places: where a rewrite would replace something in a graph, each known by what decides how long it takes.

A rewrite is named alone, for all of its places in a graph, or with some: "attention@1:0f3c...". What stands for a place
is the same in any graph that has it, so that what is learnt of it holds there too.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from backend_kwargs.graphs.spelling import layout_of, line_of, numbered_symbols
from backend_kwargs.rewrites.table import DIGITS, find_rewrite

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
    return [replace(place, count=count) for place, count in Counter(places).items()]


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


def traced_value(node: Node) -> Any:
    """Return the fake value with which a graph was traced."""
    return node.meta.get("val", node.meta.get("example_value"))


def _described(value: object, *, training: bool) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    recorded = f" {value.requires_grad}" if training else ""
    return f"{value.dtype} {value.device.type} {layout_of(value)}{recorded}"
