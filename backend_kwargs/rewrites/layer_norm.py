"""Layer norm in training, whose gradients come from one kernel that reads input and incoming gradient once.

It acts on dynamo's graph. The operator's forward pass is decomposed like ATen's, so Inductor fuses it with its
neighbours. Calls of ATen's own gradients, as compiled autograd has them, are replaced too.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.fx import GraphModule

from backend_kwargs.rewrites.matching import (
    DTYPES,
    AnyNode,
    arguments_of,
    bytes_of,
    replace,
    same_sizes,
)
from backend_kwargs.rewrites.operators import LIBRARY, define
from backend_kwargs.rewrites.traced import Change, changed, example, replace_by_first
from backend_kwargs.torch_internals.decompositions import decompose_in_inductor

NORMS = (F.layer_norm, torch.layer_norm)
OF_GRADIENTS = ("grad_out", "input", "mean", "rstd", "weight", "bias", "output_mask")
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


def _gradients_fake(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    contiguous = torch.contiguous_format
    one, other = (torch.empty_like(weight, memory_format=contiguous) for _ in range(2))
    return torch.empty_like(x, memory_format=contiguous), one, other


def _gradients_cuda(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    from backend_kwargs.rewrites.kernels.layer_norm import gradients_of_layer_norm

    return gradients_of_layer_norm(grad, x, mean, rstd, weight)


layer_norm = define(
    "layer_norm(Tensor x, Tensor weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
    _layer_norm,
)
layer_norm_backward = define(
    "layer_norm_backward(Tensor grad, Tensor x, Tensor mean, Tensor rstd, Tensor weight) -> (Tensor, Tensor, Tensor)",
    _gradients,
    fake=_gradients_fake,
    cuda=_gradients_cuda,
)


def _keep_for_gradients(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, _ = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, *output[1:], weight)
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    of_x, of_weight, of_bias = layer_norm_backward(grad, *ctx.saved_tensors)
    return of_x, of_weight, of_bias if ctx.has_bias else None, None


torch.library.register_autograd("backend_kwargs::layer_norm", _backward, setup_context=_keep_for_gradients, lib=LIBRARY)
decompose_in_inductor(layer_norm, _layer_norm)


# ---- dynamo's graph


def fuse_gradients(gm: GraphModule, example_inputs: Sequence[Any]) -> Change | None:
    """Return the graph with layer norms whose gradients are one kernel, or None if it has none."""
    return changed(gm, example_inputs, lambda node: node.target in (*NORMS, *GRADIENTS), _replace)


def _replace(node: AnyNode) -> float | None:
    return _replace_gradients(node) if node.target in GRADIENTS else _replace_norm(node)


def _replace_norm(node: AnyNode) -> float | None:
    given = arguments_of(node)
    if given is None:
        return None
    x, weight, bias, made = (example(each) for each in (given["input"], given["weight"], given["bias"], node))
    if x is None or weight is None or made is None or (bias is None) != (given["bias"] is None):
        return None
    # Without a gradient of the weight, the gradient is one kernel anyway.
    trains = made.requires_grad and x.requires_grad and weight.requires_grad
    if not trains or not _fits(x, weight, bias, made):
        return None
    with node.graph.inserting_before(node):
        args = tuple(given[name] for name in ("input", "weight", "bias", "eps"))
        call = node.graph.call_function(layer_norm, args)
    replace_by_first(node, call, x.dtype)
    return 2.0 * bytes_of(x)


def _replace_gradients(node: AnyNode) -> float | None:
    given = arguments_of(node)
    if given is None:
        return None
    grad, x, mean, rstd, weight, bias, wanted = (given[name] for name in OF_GRADIENTS)
    above, value, held, *of_rows = map(example, (grad, x, weight, mean, rstd))
    if above is None or value is None or held is None or not _fits(value, held, example(bias), above):
        return None
    # ATen's operator can be differentiated, and ours cannot.
    if torch.is_grad_enabled() and any(each.requires_grad for each in (above, value, held)):
        return None
    if not all(each is not None and same_sizes(each.shape, (*value.shape[:-1], 1)) for each in of_rows):
        return None
    results = 3 if bias is not None and wanted[2] else 2
    read = [user.args[1] if user.target is operator.getitem else None for user in node.users]
    if not all(wanted[:results]) or any(at not in range(results) for at in read):
        return None
    with node.graph.inserting_before(node):
        replace(node, node.graph.call_function(layer_norm_backward, (grad, x, mean, rstd, weight)))
    return 2.0 * bytes_of(value)


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None, alike: Tensor) -> bool:
    """Return whether the kernel takes a norm of the rows of `x`; `alike` is the result or its gradient."""
    columns = x.shape[-1] if x.dim() else 0
    if not isinstance(columns, int) or not 0 < columns <= MOST_COLUMNS or not same_sizes(alike.shape, x.shape):
        return False
    if any(not same_sizes(each.shape, (columns,)) for each in (weight, bias) if each is not None):
        return False
    dtypes = {each.dtype for each in (x, weight, bias, alike) if each is not None}
    return len(dtypes) == 1 and x.dtype in DTYPES and x.is_contiguous()
