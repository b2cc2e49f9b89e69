"""Cross-entropy as one operator, alone or in chunks together with the linear layer before it, which saves memory.

Both act on dynamo's graph, in which a loss is one call; autograd then differentiates the operator.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.fx import GraphModule, Node

from backend_kwargs.compilers.graphs import copy_of_graph
from backend_kwargs.compilers.inductor.rewrites import operators
from backend_kwargs.compilers.inductor.rewrites.matching import AnyNode, known_true, used_once
from backend_kwargs.compilers.inductor.rewrites.packed import LINEAR
from backend_kwargs.compilers.inductor.rewrites.traced import Change

LOSS = (F.cross_entropy, torch._C._nn.cross_entropy_loss)
NAMES = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
NAMES_IN_C = ("self", "target", "weight", "reduction", "ignore_index", "label_smoothing")
MEAN = (1, "mean")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def fuse_cross_entropy(gm: GraphModule, example_inputs: Sequence[Any]) -> Change | None:
    """Return the graph with each mean cross-entropy as one operator, or None if it has none."""
    return _changed(gm, example_inputs, _replace_loss)


def fuse_linear_cross_entropy(gm: GraphModule, example_inputs: Sequence[Any]) -> Change | None:
    """Return the graph with each linear layer and its cross-entropy in chunks, or None if it has none."""
    return _changed(gm, example_inputs, _replace_linear_and_loss)


def _changed(
    gm: GraphModule, example_inputs: Sequence[Any], replace: Callable[[AnyNode], float | None]
) -> Change | None:
    if not any(node.target in LOSS for node in gm.graph.nodes if node.op == "call_function"):
        return None
    changed = copy_of_graph(gm)
    losses = [node for node in changed.graph.nodes if node.op == "call_function" and node.target in LOSS]
    saved = [found for node in losses if (found := replace(node)) is not None]
    if not saved:
        return None
    changed.graph.lint()
    changed.recompile()
    return Change(changed, example_inputs, len(saved), sum(saved))


def _arguments(node: AnyNode) -> dict[str, Any] | None:
    """Return the arguments of a mean cross-entropy of logits [rows, classes] and class indices, or None."""
    names = NAMES if node.target is F.cross_entropy else NAMES_IN_C
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    given["input"] = given.get("input", given.get("self"))
    plain = not given.get("label_smoothing") and given.get("weight") is None
    old = given.get("size_average") is None and given.get("reduce") is None
    if not plain or not old or given.get("reduction", "mean") not in MEAN:
        return None
    logits, target = (_example(given[name]) for name in ("input", "target"))
    if logits is None or target is None or logits.dim() != 2 or target.dim() != 1:
        return None
    return given if target.dtype == torch.int64 and logits.dtype in DTYPES else None


def _example(node: Any) -> torch.Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _replace_loss(node: AnyNode) -> float | None:
    given = _arguments(node)
    if given is None:
        return None
    logits = _narrow(given["input"])
    value = _example(logits)
    if value is None or not known_true(value.stride(1) == 1):
        return None
    with node.graph.inserting_before(node):
        call = node.graph.call_function(
            operators.cross_entropy, (logits, given["target"], given.get("ignore_index", -100))
        )
    _put(node, call)
    wide = 2.0 if value.requires_grad else 1.0
    return wide * float(int(value.numel()) * value.element_size())


def _replace_linear_and_loss(node: AnyNode) -> float | None:
    given = _arguments(node)
    if given is None:
        return None
    logits = _flattened(_narrow(given["input"]))
    if not isinstance(logits, Node) or logits.target not in LINEAR or not used_once(logits):
        return None
    x, weight, *bias = (*logits.args, *logits.kwargs.values())
    value, held = _example(x), _example(weight)
    if value is None or held is None or any(each is not None for each in bias) or value.dtype != held.dtype:
        return None
    trains = torch.is_grad_enabled() and (value.requires_grad or held.requires_grad)
    with node.graph.inserting_before(node):
        rows = node.graph.call_function(torch.reshape, (x, (-1, held.shape[1])))
        call = node.graph.call_function(
            operators.linear_cross_entropy, (rows, weight, given["target"], given.get("ignore_index", -100), trains)
        )
    _put(node, call)
    return 0.0


def _put(node: AnyNode, call: AnyNode) -> None:
    """Replace the loss `node` by the first result of `call`, in the dtype of `node`."""
    graph = node.graph
    value = _example(node)
    assert value is not None
    with graph.inserting_before(node):
        loss = graph.call_function(operator.getitem, (call, 0))
        if value.dtype != torch.float32:
            loss = graph.call_method("to", (loss, value.dtype))
    loss.meta = dict(node.meta)
    node.replace_all_uses_with(loss)
    graph.erase_node(node)
    graph.eliminate_dead_code()


def _narrow(node: AnyNode) -> AnyNode:
    """Return the logits before their conversion to float32, since the operator converts them itself."""
    value = _example(node)
    widened = node.op == "call_method" and node.target in ("float", "to") and used_once(node)
    if not widened or value is None or value.dtype != torch.float32 or not isinstance(node.args[0], Node):
        return node
    source = _example(node.args[0])
    same = source is not None and source.dtype in DTYPES and source.device == value.device
    return node.args[0] if same else node


def _flattened(node: Any) -> Any:
    """Return the node before reshapes that keep the last dimension, or None if one changes it."""
    while (
        isinstance(node, Node) and node.op == "call_method" and node.target in ("view", "reshape") and used_once(node)
    ):
        given, made = _example(node.args[0]), _example(node)
        if given is None or made is None or not known_true(given.shape[-1] == made.shape[-1]):
            return None
        node = _narrow(node.args[0])
    return node
