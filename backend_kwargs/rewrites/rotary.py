"""The rotary embedding as one kernel, forward and backward, which reads and writes both halves of a head once.

It acts on dynamo's graph; the derivative is the same kernel with negative angles.
"""

import operator
from collections.abc import Collection
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Node

from backend_kwargs.backends import Inputs
from backend_kwargs.rewrites.matching import (
    ADD,
    MUL,
    Arguments,
    arguments_of,
    have_one_dtype,
    known_true,
    same_sizes,
    used_once,
)
from backend_kwargs.rewrites.operators import Context, Gradients, define
from backend_kwargs.rewrites.table import Rewrite, ran
from backend_kwargs.rewrites.traced import changes_meanwhile, example, examples, replacing

REWRITE = Rewrite(
    "The rotary embedding, forward and backward, by a kernel that reads each half of a head once",
    traced=f"{__name__}:fuse_rotary",
    applies="float32 or half precision",
    costs="what comes before and after is no longer part of its kernel",
    fitting=lambda stats: stats.gpu and ran(stats, "cat"),
    order=140,
)

SUB = (operator.sub, torch.sub, "sub")
NEG = (operator.neg, torch.neg, "neg")
CAT = (torch.cat, torch.concat, torch.concatenate)
CHUNK = (torch.chunk, "chunk")

# ---- the operator


def _halves(angles: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Return the angles of both halves of a head, which may be the same."""
    return (angles, angles) if angles.shape[-1] == half else (angles[..., :half], angles[..., half:])


def _like(x: Tensor, contiguous: bool) -> Tensor:
    """Return an empty tensor like `x`, contiguous or in the layout of `x`."""
    contiguous = contiguous or not known_true(x.stride(-1) == 1)  # the kernel writes rows
    return torch.empty_like(x, memory_format=torch.contiguous_format if contiguous else torch.preserve_format)


def _rotary(x: Tensor, cos: Tensor, sin: Tensor, contiguous: bool, back: bool) -> Tensor:
    half = x.shape[-1] // 2
    wide = torch.promote_types(x.dtype, torch.float32)
    (first, second), (cos_1, cos_2), (sin_1, sin_2) = (_halves(each.to(wide), half) for each in (x, cos, sin))
    if back:
        turned = torch.cat((first * cos_1 + second * sin_2, second * cos_2 - first * sin_1), -1)
    else:
        turned = torch.cat((first * cos_1 - second * sin_1, second * cos_2 + first * sin_2), -1)
    return _like(x, contiguous).copy_(turned)


def _rotary_cuda(x: Tensor, cos: Tensor, sin: Tensor, contiguous: bool, back: bool, **options: Any) -> Tensor:
    from backend_kwargs.rewrites.kernels.rotary import turn

    return turn(x, cos, sin, _like(x, contiguous), back=back, **options)


def _keep_angles(ctx: Context, inputs: Inputs, output: Tensor) -> None:
    _, cos, sin, ctx.contiguous, ctx.back = inputs
    ctx.save_for_backward(cos, sin)


def _turn_back(ctx: Context, grad: Tensor) -> Gradients:
    return rotary(grad, *ctx.saved_tensors, ctx.contiguous, not ctx.back), None, None, None, None


rotary = define(
    "rotary(Tensor x, Tensor cos, Tensor sin, bool contiguous, bool back) -> Tensor",
    _rotary,
    fake=lambda x, cos, sin, contiguous, back: _like(x, contiguous),
    cuda=_rotary_cuda,
    inlined=True,
    keep=_keep_angles,
    backward=_turn_back,
)


# ---- dynamo's graph

Operands: TypeAlias = tuple[Any, ...]  # of a call: nodes and numbers


def _embedding(node: Node, args: Arguments) -> Node | None:
    """Insert the operator for a rotary embedding that ends in this call."""
    parts = _sum_of_products(node) or _joined_halves(node)
    values = examples(*parts, node) if parts else None
    if parts is None or values is None or not _has_kernel(*values) or changes_meanwhile(node, parts):
        return None
    x, result = values[0], values[-1]
    # A view that needs eager's strides may follow.
    layouts = [contiguous for contiguous in (True, False) if same_sizes(_like(x, contiguous).stride(), result.stride())]
    if not layouts:
        return None
    return node.graph.call_function(rotary, (*parts, layouts[0], False))


def _has_kernel(x: Tensor, cos: Tensor, sin: Tensor, result: Tensor) -> bool:
    """Return whether the kernel can compute this result; the angles must not need gradients."""
    width = x.shape[-1]
    if x.dim() != 4 or not isinstance(width, int) or width % 2 or not same_sizes(x.shape, result.shape):
        return False
    if not have_one_dtype((x, cos, sin, result)):
        return False
    trained = result.requires_grad and (cos.requires_grad or sin.requires_grad)
    if trained or not cos.dim() or not sin.dim() or not known_true(x.numel() > 0):
        return False
    return cos.shape[-1] == sin.shape[-1] and cos.shape[-1] in (width, width // 2)


def _sum_of_products(node: Node) -> tuple[Node, Node, Node] | None:
    """Return x, cos and sin of x * cos + cat((-second, first)) * sin, or None."""
    for plain, swapped in _both_orders(_operands(node, ADD)):
        for x, cos in _both_orders(_operands(plain, MUL, once=True)):
            for joined, sin in _both_orders(_operands(swapped, MUL, once=True)):
                negated, first = _parts(joined, once=True) or (None, None)
                second = _operands(negated, NEG, once=True)
                if second and _half(second[0]) == (x, 1) and _half(first) == (x, 0):
                    return x, cos, sin
    return None


def _joined_halves(node: Node) -> tuple[Node, Node, Node] | None:
    """Return x, cos and sin of cat((first * cos - second * sin, second * cos + first * sin)), or None."""
    less, more = _parts(node) or (None, None)
    left, right = _operands(less, SUB, once=True) or (None, None)
    for first, cos in _both_orders(_operands(left, MUL, once=True)):
        for second, sin in _both_orders(_operands(right, MUL, once=True)):
            one, other = _half(first), _half(second)
            if one is None or other is None or one[0] is not other[0] or (one[1], other[1]) != (0, 1):
                continue
            for a, b in _both_orders(_operands(more, ADD, once=True)):
                if _are(a, second, cos) and _are(b, first, sin) and _has_angles_of_a_half(one[0], cos, sin):
                    return one[0], cos, sin
    return None


def _has_angles_of_a_half(x: Node, *angles: Node) -> bool:
    values = examples(x, *angles)
    return values is not None and all(each.shape[-1] == values[0].shape[-1] // 2 for each in values[1:])


def _are(product: object, half: object, angles: object) -> bool:
    """Return whether `product` multiplies `half`, in any form, by `angles`."""
    return any(
        _half(one) == _half(half) and other is angles for one, other in _both_orders(_operands(product, MUL, once=True))
    )


def _operands(node: object, targets: Collection[object], *, once: bool = False) -> Operands | None:
    """Return the operands of a `node` that calls one of `targets` without a factor; `once`: and has one user."""
    if not isinstance(node, Node) or node.target not in targets or (once and not used_once(node)):
        return None
    args = arguments_of(node) or {}
    return tuple(args[name] for name in ("input", "other") if name in args) if args.get("alpha", 1) == 1 else None


def _both_orders(operands: Operands | None) -> tuple[Operands, ...]:
    """Return the two operands of a call in both orders, or none where there are not two."""
    return (operands, operands[::-1]) if operands and len(operands) == 2 else ()


def _parts(node: object, *, once: bool = False) -> tuple[Node, Node] | None:
    """Return the two tensors that `node` joins along its last dimension, or None."""
    if not isinstance(node, Node) or node.target not in CAT or (once and not used_once(node)):
        return None
    args, value = arguments_of(node), example(node)
    if args is None or value is None or args["dim"] not in (-1, value.dim() - 1) or len(args["tensors"]) != 2:
        return None
    first, second = args["tensors"]
    return first, second


def _half(node: object) -> tuple[Node, int] | None:
    """Return the tensor and the half of its last dimension, first (0) or second (1), that `node` is, or None."""
    if not isinstance(node, Node) or node.target is not operator.getitem:
        return None
    source: Any
    index: Any
    source, index = node.args
    if source.target in CHUNK:
        args = arguments_of(source) or {}
        value = example(args.get("input"))
        last = value is not None and args["dim"] in (-1, value.dim() - 1)
        return (args["input"], index) if last and args["chunks"] == 2 else None
    value = example(source)
    if value is None or not isinstance(index, tuple) or not isinstance(value.shape[-1], int):
        return None
    return (source, which) if (which := _half_of(index, value.dim(), value.shape[-1])) is not None else None


def _half_of(index: Operands, dims: int, width: int) -> int | None:
    """Return the half of the last dimension that an index selects, with all other dimensions whole, or None."""
    *others, last = index
    whole = len(index) == dims or others == [Ellipsis]
    if not whole or any(each not in (Ellipsis, slice(None)) for each in others) or not isinstance(last, slice):
        return None
    numbers = (last.start, last.stop, last.step)
    if last.step not in (None, 1) or not all(each is None or isinstance(each, int) for each in numbers):
        return None
    return {(0, width // 2): 0, (width // 2, width): 1}.get(last.indices(width)[:2])


fuse_rotary = replacing((*ADD, *CAT), _embedding)
