"""A graph computed in float64, operation by operation, without a wide copy of all weights."""

import copy
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import Argument, Target, map_aggregate

from backend_kwargs.torch_internals import pytree
from backend_kwargs.torch_internals.tensors import enter_autocast, is_view

WIDENED = frozenset({"float", "half", "bfloat16"})
LOWER = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2})
BITS = "view"  # with a dtype, it reinterprets the bits
LARGEST = 8 << 30  # bytes of values in float64 at the same time


class InFloat64(Interpreter):
    """Runs a graph with each floating value widened where it is read, so only one layer's weights are wide at a time.

    The dtypes in the graph are widened too, so a model that rounds to bfloat16 between its layers does not round here.
    Inputs that the graph writes to, and inputs that need gradients, must be in float64 already. Raise MemoryError if
    its values exceed LARGEST bytes: those that are read later, or all if it `keeps` them for a backward pass.
    """

    def __init__(self, gm: GraphModule, *, keeps: bool = False) -> None:
        self.keeps, self.bytes, self.live = keeps, dict[Node, int](), 0
        within = GraphModule(gm, gm.graph)
        for node in gm.graph.nodes:
            check_bits(node)
        for node in gm.graph.find_nodes(op="get_attr"):
            nested = getattr(gm, str(node.target), None)
            if isinstance(nested, GraphModule):
                setattr(within, str(node.target), widened(nested))
        super().__init__(within)
        self.extra_traceback = False  # an error is the reason why there is no reference, in one line

    def fetch_args_kwargs_from_env(self, n: Node) -> tuple[tuple[Argument, ...], dict[str, Argument]]:
        """Return a node's arguments with tensors and dtypes widened."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        if n.op == "output":
            return args, kwargs
        args, kwargs = map_aggregate(args, _wide), map_aggregate(kwargs, _wide)
        return (_without_autocast(args) if n.target is enter_autocast else args), kwargs

    def run_node(self, n: Node) -> object:
        """Run a node; a tensor that it creates in the default dtype is widened, since the graph may write into it."""
        result = super().run_node(n)
        if not n.op.startswith("call"):
            return result
        result = map_aggregate(result, _wide_tensor)
        self._count(n, result)
        return result

    def _count(self, n: Node, result: object) -> None:
        own = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and not is_view(leaf)]
        self.bytes[n] = sum(leaf.nbytes for leaf in own)
        self.live += self.bytes[n]
        check_room(self.live)
        if not self.keeps:
            self.live -= sum(self.bytes.get(each, 0) for each in self.user_to_last_uses.get(n, ()))

    def call_method(self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, Any]) -> object:
        """Call a method; `.half()`, `.float()` and `.bfloat16()` become `.double()`."""
        return super().call_method("double" if target in WIDENED else target, args, kwargs)


def check_room(size: int) -> None:
    """Raise MemoryError if values of `size` bytes are too many to keep in float64."""
    if size > LARGEST:
        raise MemoryError(f"its values in float64 exceed {LARGEST >> 30} GiB")


def widened(gm: GraphModule) -> GraphModule:
    """Return a copy of a nested graph with all its dtypes widened; its inputs are wide already."""
    graph = copy.deepcopy(gm.graph)
    for node in graph.nodes:
        check_bits(node)
        if node.op == "call_method" and node.target in WIDENED:
            node.target = "double"
        node.args, node.kwargs = map_aggregate(node.args, _wide_dtype), map_aggregate(node.kwargs, _wide_dtype)
        if node.target is enter_autocast:
            node.args = _without_autocast(node.args)
    twin = GraphModule(gm, graph)
    for node in graph.find_nodes(op="get_attr"):
        attribute = getattr(twin, str(node.target), None)
        if isinstance(attribute, GraphModule):
            setattr(twin, str(node.target), widened(attribute))
        elif isinstance(attribute, torch.Tensor):
            setattr(twin, str(node.target), _wide(attribute))
    return twin


def check_bits(node: Node) -> None:
    """Raise if a node reads the bits of numbers, which differ in float64."""
    if node.target == BITS and any(isinstance(arg, torch.dtype) for arg in (*node.args, *node.kwargs.values())):
        raise TypeError("it reads the bits of numbers, which differ in float64")


def _wide(leaf: Argument) -> Argument:
    return _wide_dtype(_wide_tensor(leaf))


def _wide_tensor(leaf: Argument) -> Argument:
    return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.dtype in LOWER else leaf


def _wide_dtype(leaf: Argument) -> Argument:
    return torch.float64 if isinstance(leaf, torch.dtype) and leaf in LOWER else leaf


def _without_autocast(args: tuple[Argument, ...]) -> tuple[Argument, ...]:
    device, dtype, _, *rest = args
    return (device, torch.bfloat16 if dtype == torch.float64 else dtype, False, *rest)
