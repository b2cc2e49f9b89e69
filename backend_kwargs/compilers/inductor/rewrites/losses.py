"""Cross-entropy as one operator, alone or in chunks together with the linear layer before it, which saves memory.

Both act on dynamo's graph, in which a loss is one call; autograd then differentiates the operator.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.fx import GraphModule, Node

from backend_kwargs.compilers.inductor.rewrites import operators
from backend_kwargs.compilers.inductor.rewrites.matching import AnyNode, bytes_of, known_true, used_once
from backend_kwargs.compilers.inductor.rewrites.packed import LINEAR
from backend_kwargs.compilers.inductor.rewrites.traced import Change, changed, changes_meanwhile, example, put_first

LOSS = (F.cross_entropy, torch._C._nn.cross_entropy_loss)
NAMES = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
NAMES_IN_C = ("self", "target", "weight", "reduction", "ignore_index", "label_smoothing")
MEAN = (1, "mean")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def fuse_cross_entropy(gm: GraphModule, example_inputs: Sequence[Any]) -> Change | None:
    """Return the graph with each mean cross-entropy as one operator, or None if it has none."""
    return changed(gm, example_inputs, lambda node: node.target in LOSS, _replace_loss)


def fuse_linear_cross_entropy(gm: GraphModule, example_inputs: Sequence[Any]) -> Change | None:
    """Return the graph with each linear layer and its cross-entropy in chunks, or None if it has none."""
    return changed(gm, example_inputs, lambda node: node.target in LOSS, _replace_linear_and_loss)


def _arguments(node: AnyNode) -> dict[str, Any] | None:
    """Return the arguments of a mean cross-entropy of logits [rows, classes] and class indices, or None."""
    names = NAMES if node.target is F.cross_entropy else NAMES_IN_C
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    given["input"] = given.get("input", given.get("self"))
    plain = not given.get("label_smoothing") and given.get("weight") is None
    old = given.get("size_average") is None and given.get("reduce") is None
    if not plain or not old or given.get("reduction", "mean") not in MEAN:
        return None
    logits, target = (example(given[name]) for name in ("input", "target"))
    if logits is None or target is None or logits.dim() != 2 or target.dim() != 1:
        return None
    return given if target.dtype == torch.int64 and logits.dtype in DTYPES else None


def _replace_loss(node: AnyNode) -> float | None:
    given = _arguments(node)
    if given is None:
        return None
    logits = _narrow(given["input"])
    value = example(logits)
    if value is None or not known_true(value.stride(1) == 1) or not known_true(value.shape[0] > 0):
        return None
    if changes_meanwhile(node, [logits, given["target"]]):
        return None
    with node.graph.inserting_before(node):
        call = node.graph.call_function(
            operators.cross_entropy, (logits, given["target"], given.get("ignore_index", -100))
        )
    put_first(node, call, torch.float32)
    wide = 2.0 if value.requires_grad else 1.0
    return wide * bytes_of(value)


def _replace_linear_and_loss(node: AnyNode) -> float | None:
    given = _arguments(node)
    if given is None:
        return None
    logits = _flattened(_narrow(given["input"]))
    if not isinstance(logits, Node) or logits.target not in LINEAR or not used_once(logits):
        return None
    x, weight, *bias = (*logits.args, *logits.kwargs.values())
    value, held, made = example(x), example(weight), example(logits)
    if value is None or held is None or made is None or any(each is not None for each in bias):
        return None
    if not value.dtype == held.dtype == made.dtype:  # autocast computes the product in another
        return None
    if value.dtype == torch.float16:  # gradients are stored before a scaler's factor reaches them, and underflow
        return None
    if changes_meanwhile(node, [x, weight, given["target"]]):
        return None
    trains = made.requires_grad  # not of the mode at the start of the graph, which may change it
    with node.graph.inserting_before(node):
        rows = node.graph.call_function(torch.reshape, (x, (-1, held.shape[1])))
        call = node.graph.call_function(
            operators.linear_cross_entropy, (rows, weight, given["target"], given.get("ignore_index", -100), trains)
        )
    put_first(node, call, torch.float32)
    return 0.0


def _narrow(node: AnyNode) -> AnyNode:
    """Return the logits before their conversion to float32, since the operator converts them itself."""
    value = example(node)
    widened = node.op == "call_method" and node.target in ("float", "to") and used_once(node)
    if not widened or value is None or value.dtype != torch.float32 or not isinstance(node.args[0], Node):
        return node
    source = example(node.args[0])
    same = source is not None and source.dtype in DTYPES and source.device == value.device
    return node.args[0] if same else node


def _flattened(node: Any) -> Any:
    """Return the node before reshapes that keep the last dimension, or None if one changes it."""
    while (
        isinstance(node, Node) and node.op == "call_method" and node.target in ("view", "reshape") and used_once(node)
    ):
        given, made = example(node.args[0]), example(node)
        if given is None or made is None or not known_true(given.shape[-1] == made.shape[-1]):
            return None
        node = _narrow(node.args[0])
    return node
