"""Convolutions in wide groups as batched products over their windows: cuDNN computes many of them without tensor cores.

The operator keeps its input for the backward pass, never windows. Large windows are there for a few groups at a time.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.fx import Node

from backend_kwargs.backends import Inputs
from backend_kwargs.rewrites.grouped_convolution import have_kernel
from backend_kwargs.rewrites.matching import (
    HALF,
    Arguments,
    Context,
    Gradients,
    aten,
    bytes_of,
    define,
    hint,
    known_true,
    require,
    value_of,
    values_of,
)
from backend_kwargs.rewrites.patches import geometry_of, has_channels_last
from backend_kwargs.rewrites.table import Rewrite
from backend_kwargs.rewrites.traced import method, replacing
from backend_kwargs.torch_internals.tensors import decompose_in_inductor

REWRITE = Rewrite(
    "Convolutions in wide groups as batched products over windows",
    traced=f"{__name__}:multiply_windows",
    needs=("gpu",),
    applies="half precision, groups of a multiple of 8 channels; in inference not what `grouped_convolution` takes",
    costs="memory for windows: at most that of input and result, or 256 MiB",
    fitting=lambda stats: stats.gpu and stats.convolutions > 0,
    order=35,
)

CONVOLUTIONS = {torch.conv1d: 1, torch.conv2d: 2}  # with their dimensions
ALIGNED = 8  # numbers: fast products need rows of multiples of 16 bytes
MOST_BYTES = 256 << 20  # of windows at once, unless input and result have more
# What the memory of an H200 moves while cuDNN computes: 1.5e12 operations a second in one dimension, 17e12 in two.
BYTES_PER_FLOP = {1: 4.5 / 1.5, 2: 4.5 / 17}

# ---- the operator


def _product(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    pads: list[int],
    stride: list[int],
    dilation: list[int],
    groups: int,
    last: bool,
) -> Tensor:
    """Return the convolution of `x`, padded by `pads` in the order of `F.pad`, with channels last in memory or not."""
    geometry = w.shape[2:], pads, stride, dilation
    parts = []
    for part in _parts_of(x, w, geometry, groups):
        weights = torch.unflatten(_taps(w, x), 0, (groups, -1))[part].flatten(2).mT
        rows = _rows(x, geometry, groups, part)
        if bias is None:
            parts.append(torch.bmm(rows, weights))
        else:
            parts.append(torch.baddbmm(bias.view(groups, 1, -1)[part], rows, weights))
    dims = len(stride)
    result = torch.unflatten(torch.cat(parts), 1, (x.shape[0], *_positions(x, geometry)))
    if last:
        return result.movedim(0, -2).flatten(-2).movedim(-1, 1)
    return result.permute(1, 0, -1, *range(2, 2 + dims)).flatten(1, 2).contiguous()


def _rows(x: Tensor, geometry: Any, groups: int, part: slice, *, backward: bool = False) -> Tensor:
    """Return the windows of some groups, [groups, batch * positions, channels * taps], in the order of `_taps`.

    AOTAutograd would keep windows that both passes compute in the same way: they permute their input differently.
    """
    size, pads, stride, dilation = geometry
    dims = len(size)
    batch, channels = (2, 1) if backward else (1, 2)
    windows = torch.unflatten(x, 1, (groups, -1))[:, part].movedim((0, 1, 2), (batch, 0, channels))
    windows = F.pad(windows, pads)
    for at in range(dims):
        windows = windows.unfold(3 + at, dilation[at] * (size[at] - 1) + 1, stride[at])[..., :: dilation[at]]
    taps = range(3 + dims, 3 + 2 * dims)
    columns = (*taps, channels) if _is_last(x) else (channels, *taps)
    return windows.permute(0, batch, *range(3, 3 + dims), *columns).flatten(1, 1 + dims).flatten(2)


def _is_last(x: Tensor) -> bool:
    """Return whether channels lie beside each other."""
    return known_true(x.stride(1) == 1)


def _taps(w: Tensor, x: Tensor) -> Tensor:
    """Return weights with the channels of a tap beside each other if those of `x` are, which is how rows are read."""
    return w.movedim(1, -1) if _is_last(x) else w


def _positions(x: Tensor, geometry: Any) -> list[int]:
    """Return the sizes of the result."""
    size, pads, stride, dilation = geometry
    around = [before + after for before, after in zip(pads[::2], pads[1::2], strict=True)][::-1]
    each = zip(x.shape[2:], around, dilation, size, stride, strict=True)
    return [(length + pad - apart * (taps - 1) - 1) // step + 1 for length, pad, apart, taps, step in each]


def _parts_of(x: Tensor, w: Tensor, geometry: Any, groups: int) -> Iterator[slice]:
    """Yield the groups whose windows are in memory at a time."""
    at_once = max(_groups_at_once(x, w, _positions(x, geometry)), 1)
    return (slice(start, start + at_once) for start in range(0, groups, at_once))


def _groups_at_once(x: Tensor, w: Tensor, positions: list[int]) -> int:
    """Return how many groups' windows may be in memory at a time; 0 if those of one are too many."""
    count = x.element_size() * hint(x.shape[0])
    for each in positions:
        count *= hint(each)
    most = max(MOST_BYTES, bytes_of(x) + count * w.shape[0])
    return int(most // max(count * w[0].numel(), 1))


def _keep(ctx: Context, inputs: Inputs, output: Tensor) -> None:
    x, w, _, *ctx.options = inputs
    ctx.save_for_backward(x, w)


def _gradients(ctx: Context, grad: Tensor) -> Gradients:
    (x, w), (pads, stride, dilation, groups, _) = ctx.saved_tensors, ctx.options
    of_x, of_w, of_bias = ctx.needs_input_grad[:3]
    return (
        _of_input(grad, x, w, *ctx.options) if of_x else None,
        _of_weight(grad, x, w, (w.shape[2:], pads, stride, dilation), groups) if of_w else None,
        grad.sum([0, *range(2, grad.dim())]) if of_bias else None,
        *[None] * len(ctx.options),
    )


def _of_input(
    grad: Tensor, x: Tensor, w: Tensor, pads: list[int], stride: list[int], dilation: list[int], groups: int, _: bool
) -> Any:
    dims = len(stride)
    if set(stride) != {1}:  # the products would be with zeros between the gradients
        whole = None, stride, pads[::-2], dilation, False, [0] * dims, groups, [True, False, False]
        return aten.convolution_backward(grad, x, w, *whole)[0]
    reach = [apart * (taps - 1) for apart, taps in zip(dilation, w.shape[2:], strict=True)]
    back = [reach[-1 - at // 2] - pad for at, pad in enumerate(pads)]
    turned = torch.unflatten(w, 0, (groups, -1)).transpose(1, 2).flatten(0, 1).flip([*range(2, 2 + dims)])
    return convolution_as_product(grad, turned, None, back, stride, dilation, groups, _is_last(x))


def _of_weight(grad: Tensor, x: Tensor, w: Tensor, geometry: Any, groups: int) -> Tensor:
    dims = len(geometry[0])
    grad = torch.unflatten(grad, 1, (groups, -1)).permute(1, 2, 0, *range(3, 3 + dims)).flatten(2)
    parts = _parts_of(x, w, geometry, groups)
    products = [torch.bmm(grad[part], _rows(x, geometry, groups, part, backward=True)) for part in parts]
    of_w = torch.cat(products).view(_taps(w, x).shape)
    return (of_w.movedim(-1, 1) if _is_last(x) else of_w).contiguous()


convolution_as_product = define(
    "convolution_as_product(Tensor x, Tensor w, Tensor? bias, SymInt[] pads, SymInt[] stride, SymInt[] dilation,"
    " SymInt groups, bool last) -> Tensor",
    _product,
    keep=_keep,
    backward=_gradients,
)
decompose_in_inductor(convolution_as_product, _product)


# ---- dynamo's graph


def _convolution(node: Node, args: Arguments) -> Node:
    """Insert the operator for a convolution in groups, in the dtype and the layout of its result."""
    x, w, result = values = values_of(args["input"], args["weight"], node)
    dims, groups = CONVOLUTIONS[node.target], args["groups"]  # type: ignore[index]  # replaced are calls of these
    geometry, last = geometry_of(args, tuple(w.shape)), has_channels_last(result)
    require(groups != 1 and x.dim() == dims + 2 and result.dtype in HALF)
    require(not have_kernel(values, groups, geometry[2]))
    require(w.shape[1] % ALIGNED == 0 and w.shape[0] // groups % ALIGNED == 0)
    require(_groups_at_once(x.to(result.dtype), w, [*result.shape[2:]]) > 0)
    windows = bytes_of(result) / w.shape[0] * groups * w[0].numel()
    require(2 * hint(result.numel()) * w[0].numel() * BYTES_PER_FLOP[dims] > 2 * windows)
    operands = [args["input"], args["weight"], args["bias"]]
    # Under autocast they have other dtypes.
    if any(each is not None and each.dtype != result.dtype for each in map(value_of, operands)):
        operands = [each and method(each, "to", result.dtype) for each in operands]
    return node.graph.call_function(convolution_as_product, (*operands, *geometry, groups, last))


multiply_windows = replacing(CONVOLUTIONS, _convolution)
