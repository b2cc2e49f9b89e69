"""Layer norm in training, whose gradients come from one kernel that reads input and incoming gradient once.

It acts on dynamo's graph. The operator's forward pass is decomposed like ATen's, so Inductor fuses it with its
neighbours. Calls of ATen's own gradients, as compiled autograd has them, are replaced too.
"""

import operator

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.fx import Node

from backend_kwargs.backends import Inputs
from backend_kwargs.rewrites.matching import (
    Arguments,
    Context,
    Gradients,
    define,
    have_one_dtype,
    require,
    same_sizes,
    value_if_any,
    values_of,
)
from backend_kwargs.rewrites.table import Rewrite, ran
from backend_kwargs.rewrites.traced import first_result, replacing
from backend_kwargs.torch_internals.tensors import decompose_in_inductor

REWRITE = Rewrite(
    "Layer norm's gradients by one kernel, which reads its input and the incoming gradient once",
    traced=f"{__name__}:fuse_gradients",
    operators=("backend_kwargs::layer_norm_backward",),
    applies="layer norms in training, or calls of ATen's gradients of them, in float32 or half precision; "
    "contiguous rows of at most 8192",
    costs="what follows the gradient of the input is no longer part of its kernel",
    fitting=lambda stats: stats.gpu and ran(stats, "native_layer_norm_backward"),
    order=130,
)

NORMS = (F.layer_norm, torch.layer_norm)
GRADIENTS = (torch.ops.aten.native_layer_norm_backward, torch.ops.aten.native_layer_norm_backward.default)
MOST_COLUMNS = 8192  # of a row that fits into one program

# ---- operators


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    wide = x.float()
    variance, mean = torch.var_mean(wide, -1, correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    out = (wide - mean) * rstd * weight
    return (out if bias is None else out + bias).to(x.dtype), mean, rstd


def _gradients(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide, normal = grad.float(), (x.float() - mean) * rstd
    scaled = wide * weight
    along = (scaled * normal).mean(-1, keepdim=True)
    of_x = (scaled - scaled.mean(-1, keepdim=True) - normal * along) * rstd
    rows = [*range(x.dim() - 1)]
    of_weight, of_bias = ((wide * by).sum(rows) if rows else wide * by for by in (normal, torch.ones_like(rstd)))
    return of_x.to(x.dtype).contiguous(), of_weight.to(weight.dtype), of_bias.to(weight.dtype)


def _gradients_fake(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(each, memory_format=torch.contiguous_format) for each in (x, weight, weight))


def _gradients_cuda(*args: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from backend_kwargs.rewrites.kernels.layer_norm import gradients_of_layer_norm

    return gradients_of_layer_norm(*args)


def _keep_for_gradients(ctx: Context, inputs: Inputs, output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _ = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, *output[1:], weight)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Context, grad: Tensor, *_: object) -> Gradients:
    of_x, of_weight, of_bias = layer_norm_backward(grad, *ctx.saved_tensors)
    return of_x, of_weight, of_bias if ctx.has_bias else None, None


layer_norm = define(
    "layer_norm(Tensor x, Tensor weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
    _layer_norm,
    keep=_keep_for_gradients,
    backward=_backward,
)
layer_norm_backward = define(
    "layer_norm_backward(Tensor grad, Tensor x, Tensor mean, Tensor rstd, Tensor weight) -> (Tensor, Tensor, Tensor)",
    _gradients,
    fake=_gradients_fake,
    cuda=_gradients_cuda,
)
decompose_in_inductor(layer_norm, _layer_norm)


# ---- dynamo's graph


def _norm(node: Node, args: Arguments) -> Node:
    """Insert the operator for a layer norm that is trained."""
    x, weight, result = values = values_of(args["input"], args["weight"], node)
    # Without a gradient of the weight, the gradient is one kernel anyway.
    require(all(each.requires_grad for each in values))
    _require_kernel(x, weight, value_if_any(args["bias"]), result)
    call = node.graph.call_function(layer_norm, tuple(args[name] for name in ("input", "weight", "bias", "eps")))
    return first_result(node, call, x.dtype)


def _gradients_of_norm(node: Node, args: Arguments) -> Node:
    """Insert the operator for a call of ATen's gradients."""
    operands = tuple(args[name] for name in ("grad_out", "input", "mean", "rstd", "weight"))
    grad, x, mean, rstd, weight = values_of(*operands)
    _require_kernel(x, weight, value_if_any(args["bias"]), grad)
    # ATen's operator can be differentiated, and ours cannot.
    require(not (torch.is_grad_enabled() and any(each.requires_grad for each in (grad, x, weight))))
    require(all(same_sizes(each.shape, (*x.shape[:-1], 1)) for each in (mean, rstd)))
    results = 3 if args["bias"] is not None and args["output_mask"][2] else 2
    used = [user.args[1] if user.target is operator.getitem else None for user in node.users]
    require(all(args["output_mask"][:results]) and all(at in range(results) for at in used))
    return node.graph.call_function(layer_norm_backward, operands)


def _require_kernel(x: Tensor, weight: Tensor, bias: Tensor | None, alike: Tensor) -> None:
    """Raise unless the kernel takes a norm of the rows of `x`; `alike` is the result or its gradient."""
    columns = x.shape[-1] if x.dim() else 0
    require(isinstance(columns, int) and 0 < columns <= MOST_COLUMNS and same_sizes(alike.shape, x.shape))
    parameters = [weight] if bias is None else [weight, bias]
    require(all(same_sizes(each.shape, (columns,)) for each in parameters))
    require(x.is_contiguous() and have_one_dtype((x, alike, *parameters)))


fuse_gradients = replacing(
    (*NORMS, *GRADIENTS),
    lambda node, args: (_gradients_of_norm if node.target in GRADIENTS else _norm)(node, args),
)
