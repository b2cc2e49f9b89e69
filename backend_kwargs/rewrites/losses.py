"""Cross-entropy as one operator, alone or in chunks together with the linear layer before it, which saves memory.

Both act on dynamo's graph, in which a loss is one call; autograd then differentiates the operator.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from backend_kwargs.rewrites.matching import (
    DTYPES,
    AnyNode,
    arguments_of,
    bytes_of,
    known_true,
    same_sizes,
    used_once,
)
from backend_kwargs.rewrites.operators import LIBRARY, define
from backend_kwargs.rewrites.packed import LINEAR
from backend_kwargs.rewrites.traced import (
    Change,
    changed,
    changes_meanwhile,
    example,
    replace_by_first,
)
from backend_kwargs.torch_internals.modes import set_grad_enabled
from backend_kwargs.torch_internals.modules import cross_entropy_loss

LOSS = (F.cross_entropy, cross_entropy_loss)
MEAN = (1, "mean")


# ---- the operators

# A row's logsumexp is kept as two parts, its largest logit and the rest: their sum would lose digits of the rest.
Loss = tuple[Tensor, Tensor, Tensor, Tensor]


def _cross_entropy(logits: Tensor, target: Tensor, ignore_index: int) -> Loss:
    kept = target != ignore_index
    wide = logits.float()
    tops = wide.amax(1)
    below = wide - tops.unsqueeze(1)
    logs = below.exp().sum(1).log()
    at = below.gather(1, torch.where(kept, target, 0).unsqueeze(1)).squeeze(1)
    count = kept.sum().float()
    return torch.where(kept, logs - at, 0.0).sum() / count, tops, logs, count


def _cross_entropy_fake(logits: Tensor, target: Tensor, ignore_index: int) -> Loss:
    rows = logits.shape[:1]
    one, tops, logs, count = (logits.new_empty(size, dtype=torch.float32) for size in ((), rows, rows, ()))
    return one, tops, logs, count


def _cross_entropy_cuda(logits: Tensor, target: Tensor, ignore_index: int, **options: Any) -> Loss:
    from backend_kwargs.rewrites.kernels.cross_entropy import loss_of_rows

    losses, tops, logs = loss_of_rows(logits, target, ignore_index, **options)
    count = (target != ignore_index).sum().float()
    return losses.sum() / count, tops, logs, count


def _cross_entropy_backward(
    grad: Tensor, logits: Tensor, target: Tensor, tops: Tensor, logs: Tensor, count: Tensor, ignore_index: int
) -> Tensor:
    kept = target != ignore_index
    share = torch.where(kept, grad.float() / count, 0.0).unsqueeze(1)
    gradient = ((logits.float() - tops.unsqueeze(1)) - logs.unsqueeze(1)).exp() * share
    gradient.scatter_add_(1, torch.where(kept, target, 0).unsqueeze(1), -share)
    return gradient.to(logits.dtype)


def _cross_entropy_backward_cuda(
    grad: Tensor, logits: Tensor, target: Tensor, tops: Tensor, logs: Tensor, count: Tensor, ignore_index: int,
    **options: Any,
) -> Tensor:  # fmt: skip
    from backend_kwargs.rewrites.kernels.cross_entropy import gradient_of_rows

    return gradient_of_rows(grad.float() / count, logits, target, tops, logs, ignore_index, **options)


cross_entropy = define(
    "cross_entropy(Tensor logits, Tensor target, int ignore_index) -> (Tensor, Tensor, Tensor, Tensor)",
    _cross_entropy,
    fake=_cross_entropy_fake,
    cuda=_cross_entropy_cuda,
    inlined=True,
)
cross_entropy_backward = define(
    "cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, Tensor tops, Tensor logs, Tensor count,"
    " int ignore_index) -> Tensor",
    _cross_entropy_backward,
    fake=lambda grad, logits, *_: torch.empty_like(logits, memory_format=torch.contiguous_format),
    cuda=_cross_entropy_backward_cuda,
    inlined=True,
)


def _keep_for_loss(ctx: Any, inputs: Any, output: Any) -> None:
    logits, target, ctx.ignore_index = inputs
    ctx.save_for_backward(logits, target, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _loss_backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    return cross_entropy_backward(grad, *ctx.saved_tensors, ctx.ignore_index), None, None


torch.library.register_autograd(
    "backend_kwargs::cross_entropy", _loss_backward, setup_context=_keep_for_loss, lib=LIBRARY
)

CHUNKS = 8  # of rows: more make the products small, fewer save little memory


def _linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    ignore_index: int,
    with_gradients: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss and the gradients of `x` and `weight`, with the logits of one chunk of rows at a time."""
    count = (target != ignore_index).sum().float()
    loss = torch.zeros((), dtype=torch.float32, device=x.device)
    of_x = torch.empty_like(x, memory_format=torch.contiguous_format) if with_gradients else x.new_empty(0)
    of_weight = torch.zeros_like(weight, memory_format=torch.contiguous_format) if with_gradients else x.new_empty(0)
    one = torch.ones((), dtype=torch.float32, device=x.device)
    rows = max(-(-x.shape[0] // CHUNKS), 1)
    for start in range(0, x.shape[0], rows):
        part, wanted = x[start : start + rows], target[start : start + rows]
        logits = part @ weight.t()
        mean, tops, logs, number = cross_entropy(logits, wanted, ignore_index)
        loss += torch.where(number > 0, mean * number, 0.0)  # all rows of a chunk may be ignored
        if with_gradients:
            gradient = cross_entropy_backward(one, logits, wanted, tops, logs, count, ignore_index)
            torch.mm(gradient, weight, out=of_x[start : start + rows])
            of_weight.addmm_(gradient.t(), part)
    return loss / count, of_x, of_weight


def _linear_cross_entropy_fake(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    ignore_index: int,
    with_gradients: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    loss = torch.empty((), dtype=torch.float32, device=x.device)
    if not with_gradients:
        return loss, x.new_empty(0), x.new_empty(0)
    whole = torch.contiguous_format
    return loss, torch.empty_like(x, memory_format=whole), torch.empty_like(weight, memory_format=whole)


linear_cross_entropy = define(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor target, int ignore_index, bool with_gradients)"
    " -> (Tensor, Tensor, Tensor)",
    _linear_cross_entropy,
    fake=_linear_cross_entropy_fake,
)


def _keep_gradients(ctx: Any, inputs: Any, output: Any) -> None:
    _, of_x, of_weight = output
    ctx.save_for_backward(of_x, of_weight)
    ctx.mark_non_differentiable(of_x, of_weight)


def _scaled_gradients(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    of_x, of_weight = ctx.saved_tensors
    return of_x * grad.to(of_x.dtype), of_weight * grad.to(of_weight.dtype), None, None, None


torch.library.register_autograd(
    "backend_kwargs::linear_cross_entropy", _scaled_gradients, setup_context=_keep_gradients, lib=LIBRARY
)


# ---- dynamo's graph


def fuse_cross_entropy(gm: GraphModule, example_inputs: Sequence[Any]) -> Change | None:
    """Return the graph with each mean cross-entropy as one operator, or None if it has none."""
    return changed(gm, example_inputs, lambda node: node.target in LOSS, _replace_loss)


def fuse_linear_cross_entropy(gm: GraphModule, example_inputs: Sequence[Any]) -> Change | None:
    """Return the graph with each linear layer and its cross-entropy in chunks, or None if it has none."""
    return changed(gm, example_inputs, lambda node: node.target in LOSS, _replace_linear_and_loss)


def _arguments(node: AnyNode) -> dict[str, Any] | None:
    """Return the arguments of a mean cross-entropy of logits [rows, classes] and class indices, or None."""
    given = arguments_of(node)
    if given is None or given["weight"] is not None or given["label_smoothing"] != 0.0:
        return None
    old = given.get("size_average") is None and given.get("reduce") is None
    if not old or given["reduction"] not in MEAN or not isinstance(given["ignore_index"], int):
        return None
    logits, target = (example(given[name]) for name in ("input", "target"))
    if logits is None or target is None or logits.dim() != 2 or not same_sizes(target.shape, logits.shape[:1]):
        return None
    fitting = target.dtype == torch.int64 and logits.dtype in DTYPES and known_true(logits.shape[1] > 0)
    return given if fitting else None


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
        call = node.graph.call_function(cross_entropy, (logits, given["target"], given["ignore_index"]))
    replace_by_first(node, call, torch.float32)
    wide = 2.0 if value.requires_grad else 1.0
    return wide * bytes_of(value)


def _replace_linear_and_loss(node: AnyNode) -> float | None:
    given = _arguments(node)
    if given is None:
        return None
    logits = _flattened(_narrow(given["input"]))
    layer = arguments_of(logits) if isinstance(logits, Node) and logits.target in LINEAR else None
    if layer is None or layer["bias"] is not None or not used_once(logits):
        return None
    x, weight, target = layer["input"], layer["weight"], given["target"]
    value, held, made = example(x), example(weight), example(logits)
    if value is None or held is None or made is None or held.dim() != 2 or not known_true(held.shape[1] > 0):
        return None
    if not value.dtype == held.dtype == made.dtype:  # autocast computes the product in another
        return None
    if value.dtype == torch.float16:  # gradients are stored before a scaler's factor reaches them, and underflow
        return None
    trains = given["input"].meta["example_value"].requires_grad  # the graph may enter or leave `no_grad`
    if trains != (value.requires_grad or held.requires_grad) and (trains or _may_record(node.graph)):
        return None
    if changes_meanwhile(node, [x, weight, target]):
        return None
    with node.graph.inserting_before(node):
        columns = node.graph.call_method("size", (weight, 1))
        rows = node.graph.call_method("reshape", (x, -1, columns))
        call = node.graph.call_function(linear_cross_entropy, (rows, weight, target, given["ignore_index"], trains))
    replace_by_first(node, call, torch.float32)
    return 0.0


def _may_record(graph: Graph) -> bool:
    """Return whether a graph records gradients anywhere."""
    return torch.is_grad_enabled() or bool(graph.find_nodes(op="call_function", target=set_grad_enabled))


def _narrow(node: AnyNode) -> AnyNode:
    """Return the logits before their conversion to float32, since the operator converts them itself."""
    value = example(node)
    widened = node.op == "call_method" and node.target in ("float", "to") and used_once(node)
    source = example(node.args[0]) if widened else None
    if value is None or source is None or value.dtype != torch.float32 or source.dtype not in DTYPES:
        return node
    same = source.device == value.device and source.requires_grad == value.requires_grad
    return node.args[0] if same else node


def _flattened(node: Any) -> Any:
    """Return the node before reshapes that keep the last dimension, or None if one changes it."""
    while (
        isinstance(node, Node) and node.op == "call_method" and node.target in ("view", "reshape") and used_once(node)
    ):
        given, made = example(node.args[0]), example(node)
        if given is None or made is None or given.dtype != made.dtype:  # `view` also takes a dtype
            return None
        if not same_sizes(given.shape[-1:], made.shape[-1:]):
            return None
        node = _narrow(node.args[0])
    return node
