"""Products of a graph in half precision: their operands are cast down, and their results back to the captured dtype.

So every value keeps the dtype that dynamo captured. Code around the graph may branch on it, and constants of the graph
such as `finfo(dtype).min` were made from it; autocast would change both.

Weights are cast at each call, unless they are frozen: nothing tells of a write through `.data`. The casts are in
dynamo's graph, so AOTAutograd derives the backward pass with them.
"""

import copy
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument, Target, map_aggregate
from torch.nn import functional

from backend_kwargs.graphs.writes import storages_of, written_storages

# The position and keyword of the argument that is added to the product: a mask may contain finfo(float32).min.
SDPA, ADDED = (3, "attn_mask"), (0, "input")
PRODUCTS: Mapping[Target, tuple[int, str] | None] = {
    **dict.fromkeys(
        (
            functional.linear,
            torch.matmul,
            operator.matmul,
            torch.mm,
            torch.bmm,
            torch.mv,
            torch.einsum,
            torch.functional.einsum,
            *(getattr(functional, f"conv{d}d") for d in (1, 2, 3)),
            *(getattr(torch, f"conv{d}d") for d in (1, 2, 3)),
            *(getattr(functional, f"conv_transpose{d}d") for d in (1, 2, 3)),
            *(getattr(torch, f"conv_transpose{d}d") for d in (1, 2, 3)),
            *(getattr(torch.ops.aten, name).default for name in ("linear", "matmul", "mm", "bmm", "convolution")),
            *("matmul", "__matmul__", "mm", "bmm", "mv"),
        )
    ),
    **dict.fromkeys((torch.addmm, torch.baddbmm, torch.addbmm, "addmm", "baddbmm", "addbmm"), ADDED),
    functional.scaled_dot_product_attention: SDPA,
}
# Operations that only move or select values, so that they can be done before or after widening.
SELECTING = frozenset(
    {
        *("view", "reshape", "transpose", "permute", "contiguous", "flatten", "unsqueeze", "squeeze", "expand", "t"),
        *("unflatten", "chunk", "split", "unbind", "movedim", "swapaxes", "relu", "clone"),
        *(torch.reshape, torch.transpose, torch.permute, torch.flatten, torch.unsqueeze, torch.squeeze, torch.relu),
        *(torch.chunk, torch.split, torch.unbind, torch.movedim, functional.relu, operator.getitem),
        *(functional.max_pool2d, torch.max_pool2d, functional.max_pool1d, functional.max_pool3d),
    }
)
# Operations that autocast also computes in half precision for half inputs: one more rounding, half the bytes.
FOLLOWING = frozenset({functional.batch_norm, torch.batch_norm, operator.add, torch.add})
# In-place operators and their out-of-place versions, which are used if nothing else reads the overwritten value.
OUT_OF_PLACE: Mapping[Target, Target] = {operator.iadd: operator.add, "relu_": "relu", torch.relu_: torch.relu}
# Not the method: AOTAutograd caches no graph with a method of a value that dynamo has not seen.
CAST = torch.ops.aten.to.dtype
Narrow = dict[Node, Node]


def cast_products(gm: GraphModule, dtype: torch.dtype) -> int:
    """Make the float32 products of `gm` compute in `dtype`, in place; return their number.

    Nested graphs, such as those of activation checkpointing, are replaced by changed copies.
    """
    count = _Cast(gm, dtype).run()
    for node in gm.graph.find_nodes(op="get_attr"):
        held = getattr(gm, str(node.target), None)
        if isinstance(held, GraphModule):
            within = GraphModule(held, copy.deepcopy(held.graph))
            within.meta = dict(held.meta)
            count += cast_products(within, dtype)
            setattr(gm, str(node.target), within)
    gm.recompile()
    return count


class _Cast:
    """One graph while its products are cast.

    `narrow` maps a widened value to the equal value in half precision. `detached` are operations that were in place
    before.
    """

    def __init__(self, gm: GraphModule, dtype: torch.dtype) -> None:
        self.gm, self.graph, self.dtype = gm, gm.graph, dtype
        self.narrow: Narrow = {}
        self.detached: set[Node] = set()
        self.overwritten = _overwritten(self.graph, self.detached)

    def run(self) -> int:
        count = 0
        for node in list(self.graph.nodes):
            if node.op not in ("call_function", "call_method"):
                continue
            if node.target in PRODUCTS and self._is_single(node):
                added = PRODUCTS[node.target]
                with self.graph.inserting_before(node):
                    args = tuple(
                        map_aggregate(arg, self._clamped if added and at == added[0] else self._narrowed)
                        for at, arg in enumerate(node.args)
                    )
                    kwargs = {
                        name: map_aggregate(arg, self._clamped if added and name == added[1] else self._narrowed)
                        for name, arg in node.kwargs.items()
                    }
                self._replace(node, args, kwargs)
                count += 1
            elif node.target in SELECTING or node.target in FOLLOWING:
                self._follow(node)
        return count

    def _is_single(self, node: Node) -> bool:
        """Return whether the product's result and all its floating inputs are float32, and it has no out=."""
        floats = [
            dtype for each in node.all_input_nodes if (dtype := _dtype(self.gm, each)) and dtype.is_floating_point
        ]
        return _dtype(self.gm, node) == torch.float32 and set(floats) == {torch.float32} and "out" not in node.kwargs

    def _replace(self, node: Node, args: tuple[Argument, ...], kwargs: dict[str, Argument]) -> None:
        """Replace `node` by the same operation on narrow values, with its result widened."""
        with self.graph.inserting_before(node):
            product = self.graph.create_node(node.op, node.target, args, kwargs)
            wide = self.graph.call_function(CAST, (product, torch.float32))
        product.meta = {name: value for name, value in node.meta.items() if name != "example_value"}
        wide.meta = dict(node.meta)
        node.replace_all_uses_with(wide)
        self.graph.erase_node(node)
        if not self._may_change(wide):
            self.narrow[wide] = product

    def _narrowed(self, leaf: Argument) -> Argument:
        if not isinstance(leaf, Node) or _dtype(self.gm, leaf) != torch.float32:
            return leaf
        if leaf in self.narrow:
            return self.narrow[leaf]
        return self.graph.call_function(CAST, (leaf, self.dtype))

    def _clamped(self, leaf: Argument) -> Argument:
        """Cast an added value without making finite numbers infinite: a row of -inf is nan after softmax."""
        if not isinstance(leaf, Node) or _dtype(self.gm, leaf) != torch.float32:
            return leaf
        constant = leaf.op == "get_attr" or isinstance(leaf.meta.get("example_value"), torch.nn.Parameter)
        if constant or leaf in self.narrow:
            return self._narrowed(leaf)
        limits = torch.finfo(self.dtype)
        infinite = self.graph.call_method("isinf", (leaf,))
        within = self.graph.call_method("clamp", (leaf, limits.min, limits.max))
        chosen = self.graph.call_function(torch.where, (infinite, leaf, within))
        return self.graph.call_function(CAST, (chosen, self.dtype))

    # ---- operations after a product

    def _follow(self, node: Node) -> None:
        """Replace an operation on a widened value by the same operation on the narrow value, widened afterwards."""
        first = node.args[0] if node.args else None
        if not isinstance(first, Node) or first not in self.narrow or node.kwargs.get("out") is not None:
            return
        if any(isinstance(arg, torch.dtype) for arg in (*node.args, *node.kwargs.values())):  # view(dtype)
            return
        if node.target in (operator.add, torch.add):
            if len(node.args) != 2 or node.kwargs or not all(arg in self.narrow for arg in node.args):
                return
            args: tuple[Argument, ...] = tuple(self.narrow[arg] for arg in node.args)  # type: ignore[index]
        elif any(isinstance(arg, Node) and arg in self.narrow for arg in node.args[1:]):
            return
        else:
            args = (self.narrow[first], *node.args[1:])
        kwargs = {name: False if name == "inplace" else value for name, value in node.kwargs.items()}
        if isinstance(node.meta.get("example_value"), torch.Tensor) and not self._is_view(node, first):
            if _dtype(self.gm, node) == torch.float32:
                self._replace(node, args, kwargs)
        elif not self._may_change(node):
            # The operation on the widened value stays, since another may be a view of it; dead nodes are dropped later.
            with self.graph.inserting_after(node):
                self.narrow[node] = self.graph.create_node(node.op, node.target, args, kwargs)

    def _is_view(self, node: Node, of: Node) -> bool:
        shared = storages_of(node.meta.get("example_value")) & storages_of(of.meta.get("example_value"))
        return bool(shared) and node not in self.detached

    def _may_change(self, node: Node) -> bool:
        return bool(storages_of(node.meta.get("example_value")) & self.overwritten)


def _overwritten(graph: torch.fx.Graph, detached: set[Node]) -> set[int]:
    """Return the storages that the graph still overwrites after operations were made out of place where possible.

    Those operations are added to `detached`.
    """
    readers: dict[int, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        for storage in storages_of(node.meta.get("example_value")):
            readers[storage].append(node)
    order = {node: at for at, node in enumerate(graph.nodes)}
    overwritten: set[int] = set()
    for node in graph.nodes:
        storages = written_storages(node)
        earlier = [each for storage in storages for each in readers[storage] if order[each] < order[node]]
        if storages and _dead_after(earlier, node, order) and _out_of_place(node):
            detached.add(node)
        else:
            overwritten |= storages
    return overwritten


def _dead_after(earlier: Iterable[Node], node: Node, order: Mapping[Node, int]) -> bool:
    """Return whether nothing after `node` reads any of `earlier`, and none of them is an input of the graph."""
    return all(
        each.op.startswith("call") and all(user is node or order[user] < order[node] for user in each.users)
        for each in earlier
    )


def _out_of_place(node: Node) -> bool:
    """Change an operation to its out-of-place version; return whether it has one."""
    if node.kwargs.get("inplace") is True:
        node.kwargs = {**node.kwargs, "inplace": False}
    elif node.target is functional.relu:
        node.args = node.args[:1]
    else:
        values = [each.meta.get("example_value") for each in node.all_input_nodes]
        dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor)}
        if node.target not in OUT_OF_PLACE or len(dtypes) != 1:  # else its result may have the other dtype
            return False
        node.target = OUT_OF_PLACE[node.target]
    return True


def _dtype(gm: GraphModule, node: Node) -> torch.dtype | None:
    value = node.meta.get("example_value")
    if value is None and node.op == "get_attr":
        value = getattr(gm, str(node.target), None)
    return value.dtype if isinstance(value, torch.Tensor) else None
