"""Which nodes TVM can have, and the reasons for the others."""

import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from backend_kwargs.compilers.parts import symbols_of
from backend_kwargs.compilers.tvm.lowering import Unsupported, lower
from backend_kwargs.compilers.tvm.lowering.node import DTYPES
from backend_kwargs.compilers.tvm.lowering.table import names_of
from backend_kwargs.compilers.tvm.settings import Settings

REASONS: dict[str, tuple[str, ...]] = {
    "reads memory by strides": ("as_strided", "as_strided_copy", "as_strided_scatter", "view.dtype", "view_copy.dtype"),
    "its memory is uninitialised": (
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
    ),
    "several sources may meet in one element": (
        "embedding_dense_backward",
        "index_add",
        "index_put",
        "index_reduce",
        "masked_scatter",
        "scatter",
        "scatter_add",
        "scatter_reduce",
    ),
    "TVM's sort orders equal elements and nan differently": (
        "kthvalue",
        "median",
        "mode",
        "nanmedian",
        "sort",
        "topk",
        "unique_consecutive",
    ),
    "a running result has no parallel loop": ("cummax", "cummin", "cumprod", "cumsum", "logcumsumexp"),
    "eager raises if an index is out of bounds": ("embedding", "gather", "index", "index_select"),
    "ATen's algorithm is far better than a plain loop": ("convolution_backward",),
}
DENIED = {op: reason for reason, ops in REASONS.items() for op in ops}
TAGS = {
    torch.Tag.nondeterministic_seeded: "draws random numbers",
    torch.Tag.data_dependent_output: "its result is a number on the host",
}
DEVICES = ("cpu", "cuda")
PRODUCTS = ("mm", "addmm", "bmm", "convolution")
# If 'aten_ops' is None: TVM has no library for these, and a vendor's is much faster than generated loops.
ATEN_OPS: Mapping[str, tuple[str, ...]] = {
    "cpu": ("_scaled_dot_product_flash_attention_for_cpu",),
    "cuda": (
        *PRODUCTS,
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention",
    ),
}
# Of a product on a CPU, beyond which oneDNN is better; a smaller one is fused with its neighbours.
MOST_FLOPS, MOST_CONVOLUTION_FLOPS = 4e6, 2.5e5
LEFT_TO_ATEN = "left to ATen by aten_ops"
_trials: dict[tuple[str, ...], str] = {}


def why_not(node: fx.Node, settings: Settings) -> str:
    """Return why TVM cannot have a node, "" if it can."""
    if node.target is operator.getitem:
        return why_not(node.args[0], settings)  # type: ignore[arg-type]
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace not in ("aten", "prims"):
        return "not an ATen operator"
    outputs = tree_leaves(node.meta["val"])
    inputs = tree_leaves(fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"]))
    if not any(isinstance(value, torch.Tensor) for value in outputs):
        return "no tensor comes out"
    return _denied(node, settings) or _unsupported_value([*inputs, *outputs]) or _tried(node)


def _denied(node: fx.Node, settings: Settings) -> str:
    op, names = node.target, names_of(node)
    if set(names) & set(_aten_ops(node, settings)):
        return LEFT_TO_ATEN
    if op._schema.is_mutable:  # type: ignore[union-attr]
        return "writes in place"
    tagged = (reason for tag, reason in TAGS.items() if tag in op.tags)  # type: ignore[union-attr]
    return next((DENIED[name] for name in names if name in DENIED), None) or next(tagged, "")


def _aten_ops(node: fx.Node, settings: Settings) -> tuple[str, ...]:
    if settings.aten_ops is not None:
        return settings.aten_ops
    result = next(value for value in tree_leaves(node.meta["val"]) if isinstance(value, torch.Tensor))
    left = ATEN_OPS.get(result.device.type, ())
    most = MOST_CONVOLUTION_FLOPS if "convolution" in names_of(node) else MOST_FLOPS
    return (*left, *PRODUCTS) if result.device.type == "cpu" and _flops(node, result) > most else left


def _flops(node: fx.Node, result: torch.Tensor) -> float:
    """Return the operations of a product or a convolution, and 0 for other nodes."""
    name = next((name for name in names_of(node) if name in PRODUCTS), None)
    if name is None:
        return 0.0
    shapes = [each.meta["val"].shape for each in node.all_input_nodes]
    if name == "convolution":
        return 2.0 * _size(result.shape) * _size(shapes[1][1:])
    return 2.0 * _size(result.shape) * _size(shapes[-2 if len(shapes) > 1 else -1][-1:])


def _size(shape: Iterable[Any]) -> int:
    # The hint of a symbol, since a comparison of the symbol would guard, and recompile for other sizes.
    return math.prod(size if isinstance(size, int) else int(size.node.hint or 1) for size in shape)


def _unsupported_value(values: list[Any]) -> str:
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    sizes = [size for tensor in tensors for size in tensor.shape] + [v for v in values if isinstance(v, torch.SymInt)]
    if unknown := {str(tensor.dtype) for tensor in tensors} - {str(dtype) for dtype in DTYPES}:
        return f"TVM is not used for {', '.join(sorted(unknown))}"
    if any(isinstance(value, torch.SymFloat | torch.SymBool) for value in values):
        return "a symbolic float or bool"
    if not all(size.node.has_hint() for size in sizes if isinstance(size, torch.SymInt)):
        return "its size is known only at run time"
    if any(isinstance(size, int) and size == 0 for tensor in tensors for size in tensor.shape):
        return "an empty tensor"
    return _misplaced(tensors)


def _misplaced(tensors: list[torch.Tensor]) -> str:
    devices = {tensor.device for tensor in tensors}
    if any(tensor.layout != torch.strided or tensor.is_quantized for tensor in tensors):
        return "not a dense tensor"
    if any(device.type not in DEVICES for device in devices):
        return f"TVM has no device {', '.join(sorted(map(str, devices)))} here"
    return "on several devices" if len(devices) > 1 else ""


def _tried(node: fx.Node) -> str:
    """Return why the node alone cannot be lowered; cached for all nodes with its operator, dtypes and sizes."""
    described = fx.node.map_arg((node.args, node.kwargs), lambda n: _described(n.meta["val"]))
    key = (str(node.target), repr(described), repr(_described(node.meta["val"])))
    if key not in _trials:
        _trials[key] = _trial(node)
    return _trials[key]


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return tuple(map(_described, value)) if isinstance(value, list | tuple) else value


def _trial(node: fx.Node) -> str:
    try:
        lower(_alone(node))
    except Unsupported as unsupported:
        return unsupported.reason
    return ""


def _alone(node: fx.Node) -> fx.GraphModule:
    """Return a graph of one node, with its inputs, and an output for each of its own."""
    graph = fx.Graph()
    inputs = {each: _placeholder(graph, each) for each in node.all_input_nodes}
    _add_sizes(graph, [each.meta["val"] for each in (node, *inputs)])
    alone = graph.node_copy(node, inputs.__getitem__)
    values = node.meta["val"]
    graph.output((alone,) if isinstance(values, torch.Tensor) else tuple(_items(graph, alone, values)))
    return fx.GraphModule({}, graph)


def _placeholder(graph: fx.Graph, node: fx.Node) -> fx.Node:
    placeholder = graph.placeholder(node.name)
    placeholder.meta["val"] = node.meta["val"]
    return placeholder


def _add_sizes(graph: fx.Graph, values: list[Any]) -> None:
    """Add an input for each symbol in sizes, as for a part: not all of them are sizes of its tensors."""
    leaves = tree_leaves(values)
    sizes = [size for value in leaves for size in (value.shape if isinstance(value, torch.Tensor) else [value])]
    env = next((size.node.shape_env for size in sizes if isinstance(size, torch.SymInt)), None)
    for symbol in sorted(symbols_of(leaves), key=str):
        graph.placeholder(f"size_{symbol}").meta["val"] = env.create_symintnode(symbol, hint=None)  # type: ignore[union-attr]


def _items(graph: fx.Graph, node: fx.Node, values: Iterable[Any]) -> Iterable[fx.Node]:
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            item = graph.call_function(operator.getitem, (node, i))
            item.meta["val"] = value
            yield item
