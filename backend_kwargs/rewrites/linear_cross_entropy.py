"""A linear layer and its cross-entropy in chunks of rows, which saves the memory of the logits.

It acts on dynamo's graph, and computes the gradients in the forward pass, where the logits of a chunk are at hand.
"""

import torch
from torch import Tensor
from torch.fx import Node

from backend_kwargs.backends import Inputs
from backend_kwargs.rewrites.cross_entropy import (
    LOSS,
    before_widening,
    cross_entropy,
    cross_entropy_backward,
    require_mean_over_classes,
)
from backend_kwargs.rewrites.matching import (
    Arguments,
    Context,
    Gradients,
    calls,
    define,
    have_one_dtype,
    input_of,
    known_true,
    read,
    require,
    same_sizes,
    used_once,
    values_of,
)
from backend_kwargs.rewrites.packed import LINEAR
from backend_kwargs.rewrites.table import Rewrite
from backend_kwargs.rewrites.traced import changes_meanwhile, first_result, method, replacing
from backend_kwargs.torch_internals.tensors import set_grad_enabled

REWRITE = Rewrite(
    "A linear layer and cross-entropy in chunks of rows, so that few logits are in memory at a time",
    traced=f"{__name__}:fuse_linear_cross_entropy",
    operators=("backend_kwargs::linear_cross_entropy",),
    applies="float32 or bfloat16; the mean over class indices (int64), without a bias",
    costs="about a tenth slower; gradients are computed in the forward pass and rounded once for each chunk",
    fitting=lambda stats: stats.softmaxes > 0 and stats.gemms > 0,
    objective="memory",
    order=120,
)

CHUNKS = 8  # of rows: more make the products small, fewer save little memory

# ---- the operator


def _linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, ignore_index: int, with_gradients: bool
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
    x: Tensor, weight: Tensor, target: Tensor, ignore_index: int, with_gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    loss = torch.empty((), dtype=torch.float32, device=x.device)
    if not with_gradients:
        return loss, x.new_empty(0), x.new_empty(0)
    of_x, of_weight = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in (x, weight))
    return loss, of_x, of_weight


def _keep_gradients(ctx: Context, inputs: Inputs, output: tuple[Tensor, ...]) -> None:
    _, of_x, of_weight = output
    ctx.save_for_backward(of_x, of_weight)
    ctx.mark_non_differentiable(of_x, of_weight)


def _scaled_gradients(ctx: Context, grad: Tensor, *_: object) -> Gradients:
    of_x, of_weight = ctx.saved_tensors
    return of_x * grad.to(of_x.dtype), of_weight * grad.to(of_weight.dtype), None, None, None


linear_cross_entropy = define(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor target, int ignore_index, bool with_gradients)"
    " -> (Tensor, Tensor, Tensor)",
    _linear_cross_entropy,
    fake=_linear_cross_entropy_fake,
    keep=_keep_gradients,
    backward=_scaled_gradients,
)


# ---- dynamo's graph


def _linear_and_loss(node: Node, args: Arguments) -> Node:
    """Insert the operator for a mean cross-entropy of the results of a linear layer."""
    require_mean_over_classes(args)
    logits = _flattened(before_widening(args["input"]))
    require(calls(logits, *LINEAR) and used_once(logits))
    layer = read(logits)
    x, weight, target = layer["input"], layer["weight"], args["target"]
    values = values_of(x, weight, logits)
    require(layer["bias"] is None and values[1].dim() == 2 and known_true(values[1].shape[1] > 0))
    # Autocast computes the product in another dtype. In float16 gradients are stored before a scaler's factor reaches
    # them, and underflow.
    require(have_one_dtype(values, (torch.float32, torch.bfloat16)))
    trains = args["input"].meta["example_value"].requires_grad  # the graph may enter or leave `no_grad`
    if trains != any(each.requires_grad for each in values[:2]):
        require(not (trains or torch.is_grad_enabled()))
        require(not node.graph.find_nodes(op="call_function", target=set_grad_enabled))
    require(not changes_meanwhile(node, [x, weight, target]))
    rows = method(x, "reshape", -1, method(weight, "size", 1))
    call = node.graph.call_function(linear_cross_entropy, (rows, weight, target, args["ignore_index"], trains))
    return first_result(node, call, torch.float32)


def _flattened(node: Node) -> Node:
    """Return the node before reshapes, which must keep the last dimension."""
    while calls(node, "view", "reshape") and used_once(node):
        source = input_of(node)
        one, other = values_of(source, node)
        # `view` also takes a dtype
        require(one.dtype == other.dtype and same_sizes(one.shape[-1:], other.shape[-1:]))
        node = before_widening(source)
    return node


fuse_linear_cross_entropy = replacing(LOSS, _linear_and_loss)
