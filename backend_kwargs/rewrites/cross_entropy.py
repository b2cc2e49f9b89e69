"""Cross-entropy as one operator, forward and backward.

It acts on dynamo's graph, in which a loss is one call; autograd then differentiates the operator.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.fx import Node

from backend_kwargs.backends import Inputs
from backend_kwargs.rewrites.matching import (
    DTYPES,
    Arguments,
    Context,
    Gradients,
    calls,
    define,
    input_of,
    known_true,
    require,
    same_sizes,
    used_once,
    values_of,
)
from backend_kwargs.rewrites.table import Rewrite
from backend_kwargs.rewrites.traced import changes_meanwhile, first_result, replacing
from backend_kwargs.torch_internals.tensors import cross_entropy_loss

REWRITE = Rewrite(
    "Cross-entropy, forward and backward, by kernels that read the logits once each",
    traced=f"{__name__}:fuse_cross_entropy",
    applies="float32 or half precision; the mean over class indices (int64)",
    fitting=lambda stats: stats.gpu and stats.softmaxes > 0,
    order=110,
)

LOSS = (F.cross_entropy, cross_entropy_loss)
MEAN = (1, "mean")

# ---- the operators

# A row's logsumexp is kept as two parts, its largest logit and the rest: their sum would lose digits of the rest.
Loss = tuple[Tensor, Tensor, Tensor, Tensor]


def _cross_entropy(logits: Tensor, target: Tensor, ignore_index: int) -> Loss:
    counts = target != ignore_index
    wide = logits.float()
    tops = wide.amax(1)
    below = wide - tops.unsqueeze(1)
    logs = below.exp().sum(1).log()
    at = below.gather(1, torch.where(counts, target, 0).unsqueeze(1)).squeeze(1)
    count = counts.sum().float()
    return torch.where(counts, logs - at, 0.0).sum() / count, tops, logs, count


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
    counts = target != ignore_index
    share = torch.where(counts, grad.float() / count, 0.0).unsqueeze(1)
    gradient = ((logits.float() - tops.unsqueeze(1)) - logs.unsqueeze(1)).exp() * share
    gradient.scatter_add_(1, torch.where(counts, target, 0).unsqueeze(1), -share)
    return gradient.to(logits.dtype)


def _cross_entropy_backward_cuda(
    grad: Tensor, logits: Tensor, target: Tensor, tops: Tensor, logs: Tensor, count: Tensor, ignore_index: int,
    **options: Any,
) -> Tensor:  # fmt: skip
    from backend_kwargs.rewrites.kernels.cross_entropy import gradient_of_rows

    return gradient_of_rows(grad.float() / count, logits, target, tops, logs, ignore_index, **options)


def _keep_for_loss(ctx: Context, inputs: Inputs, output: Loss) -> None:
    logits, target, ctx.ignore_index = inputs
    ctx.save_for_backward(logits, target, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _loss_backward(ctx: Context, grad: Tensor, *_: object) -> Gradients:
    return cross_entropy_backward(grad, *ctx.saved_tensors, ctx.ignore_index), None, None


cross_entropy = define(
    "cross_entropy(Tensor logits, Tensor target, int ignore_index) -> (Tensor, Tensor, Tensor, Tensor)",
    _cross_entropy,
    fake=_cross_entropy_fake,
    cuda=_cross_entropy_cuda,
    inlined=True,
    keep=_keep_for_loss,
    backward=_loss_backward,
)
cross_entropy_backward = define(
    "cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, Tensor tops, Tensor logs, Tensor count,"
    " int ignore_index) -> Tensor",
    _cross_entropy_backward,
    fake=lambda grad, logits, *_: torch.empty_like(logits, memory_format=torch.contiguous_format),
    cuda=_cross_entropy_backward_cuda,
    inlined=True,
)


# ---- dynamo's graph


def require_mean_over_classes(args: Arguments) -> None:
    """Raise unless a loss with these arguments is the mean for logits [rows, classes] and class indices."""
    require(args["weight"] is None and args["label_smoothing"] == 0.0)
    require(args.get("size_average") is None and args.get("reduce") is None)
    require(args["reduction"] in MEAN and isinstance(args["ignore_index"], int))
    logits, target = values_of(args["input"], args["target"])
    require(logits.dim() == 2 and same_sizes(target.shape, logits.shape[:1]))
    require(target.dtype == torch.int64 and logits.dtype in DTYPES and known_true(logits.shape[1] > 0))


def before_widening(node: Node) -> Node:
    """Return the logits before their conversion to float32, since the operators convert them."""
    if not calls(node, "float", "to") or not used_once(node):
        return node
    before: Node = input_of(node)
    value, source = values_of(node, before)
    same = source.device == value.device and source.requires_grad == value.requires_grad
    return before if same and value.dtype == torch.float32 and source.dtype in DTYPES else node


def _loss(node: Node, args: Arguments) -> Node:
    """Insert the operator for a mean cross-entropy."""
    require_mean_over_classes(args)
    logits, target = before_widening(args["input"]), args["target"]
    (value,) = values_of(logits)
    require(known_true(value.stride(1) == 1) and known_true(value.shape[0] > 0))
    require(not changes_meanwhile(node, [logits, target]))
    call = node.graph.call_function(cross_entropy, (logits, target, args["ignore_index"]))
    return first_result(node, call, torch.float32)


fuse_cross_entropy = replacing(LOSS, _loss)
