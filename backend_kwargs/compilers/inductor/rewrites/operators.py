"""The operators that replace patterns, each with a fake kernel, a composite one for any device, and a library's.

A library may have no kernel for some sizes or layouts: it then raises before it launches anything. The composite kernel
runs instead, and from then on without another attempt. Operators that are `inlined` have no such choice on a GPU, where
Inductor compiles their kernels with its own.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx import Node

from backend_kwargs.compilers.inductor.rewrites.matching import bytes_of, hint, known_true

LIBRARY: Any = torch.library.Library("backend_kwargs", "DEF")  # type: ignore[no-untyped-call]  # alive for as long as its operators
# Inductor must pass the strides of the matched graph: another layout would cost a copy or another kernel.
TAGS = tuple(filter(None, (getattr(torch.Tag, name, None) for name in ("needs_exact_strides", "pt2_compliant_tag"))))
PLAIN = frozenset((Tensor, FakeTensor, FunctionalTensor))  # without a subclass of the user's

_saved: dict[Any, Callable[[Node], float]] = {}
_without_kernel: set[tuple[Any, ...]] = set()  # layouts for which the library raised


def define(
    signature: str,
    composite: Callable[..., Any],
    *,
    fake: Callable[..., Any] | None = None,
    cpu: Callable[..., Any] | None = None,
    cuda: Callable[..., Any] | None = None,
    inlined: bool = False,
    saved: Callable[[Node], float] | None = None,
) -> Any:
    """Define an operator; `saved` returns the bytes of memory traffic that a node saves over the matched ones.

    `inlined`: on a GPU, AOTAutograd traces into `cuda`, which takes `wrap` for its kernels; so Inductor launches them,
    and fuses what is around them. A launch from Python took about 85 µs. Patterns insert operators too late for that.
    """
    name = LIBRARY.define(signature, tags=TAGS)
    for key, kernel in (("CPU", cpu), ("CUDA", cuda)):
        LIBRARY.impl(name, with_fallback(kernel, composite) if kernel else composite, key)
    torch.library.register_fake(f"backend_kwargs::{name}", fake or composite, lib=LIBRARY)
    if inlined and cuda:
        rule = _inlining(cuda)
        torch.library.register_torch_dispatch(f"backend_kwargs::{name}", FunctionalTensorMode, rule, lib=LIBRARY)
    operator = getattr(torch.ops.backend_kwargs, name).default
    _saved[operator] = saved or _written_and_read
    return operator


def _inlining(cuda: Callable[..., Any]) -> Callable[..., Any]:
    def rule(mode: Any, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A subclass, such as DTensor, first passes the operator on to the tensors inside.
        if not args[0].is_cuda or not PLAIN.issuperset(types):
            return mode.__torch_dispatch__(op, types, args, kwargs)
        with mode:
            return cuda(*args, wrap=torch.library.wrap_triton)

    return rule


def saved_bytes(node: Node) -> float:
    """Return the bytes of memory traffic that a node saves over those it replaces; 0 for other operators."""
    return _saved[node.target](node) if node.target in _saved else 0.0


def with_fallback(kernel: Callable[..., Any], composite: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `kernel`, or `composite` for layouts for which `kernel` raises."""

    @wraps(kernel)
    def call(*args: Any) -> Any:
        if _without_kernel and _layout(kernel, args) in _without_kernel:
            return composite(*args)
        try:
            return kernel(*args)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # noqa: BLE001 - Triton is missing or fails to compile, or the library has no kernel
            result = composite(*args)  # raises if the arguments are wrong
            _without_kernel.add(_layout(kernel, args))
            return result

    return call


def _layout(kernel: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (kernel, *((t.shape, t.stride(), t.dtype) if isinstance(t, Tensor) else str(t) for t in args))


def _written_and_read(node: Node) -> float:
    """Return the traffic of an intermediate that is no longer written by one kernel and read by the next."""
    return 2.0 * nbytes(node)


def nbytes(node: Any) -> float:
    """Return the bytes of a node's value in this call."""
    return bytes_of(node.meta["val"])


# ---- convolutions


def convolution(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    """Return a convolution by ATen."""
    made: Tensor = torch.ops.aten.convolution(x, w, bias, stride, padding, dilation, False, [0] * len(stride), groups)
    return made


def _conv_relu(x: Tensor, w: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    return convolution(x, w, bias, stride, padding, dilation, groups).relu()


def _conv_relu_cpu(x: Tensor, w: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    pointwise = torch.ops.mkldnn._convolution_pointwise
    return pointwise(x, w, dense(bias), padding, stride, dilation, groups, "relu", [], "")  # type: ignore[no-any-return]


def _conv_relu_cuda(x: Tensor, w: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    return torch.ops.aten.cudnn_convolution_relu(x, w, dense(bias), stride, padding, dilation, groups)  # type: ignore[no-any-return]


def _conv_add_relu(
    x: Tensor, w: Tensor, z: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    return (convolution(x, w, bias, stride, padding, dilation, groups) + z).relu()


def _conv_add_relu_cpu(
    x: Tensor, w: Tensor, z: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    pointwise = torch.ops.mkldnn._convolution_pointwise.binary
    return pointwise(x, z, w, dense(bias), padding, stride, dilation, groups, "add", 1.0, "relu", [], "")  # type: ignore[no-any-return]


def _conv_add_relu_cuda(
    x: Tensor, w: Tensor, z: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    fused = torch.ops.aten.cudnn_convolution_add_relu
    return fused(x, w, z, 1.0, dense(bias), stride, padding, dilation, groups)  # type: ignore[no-any-return]


def dense(bias: Tensor | None) -> Tensor | None:
    """Return a bias as the libraries need it: oneDNN ignores its stride."""
    return None if bias is None else bias.contiguous()


GEOMETRY = "Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups) -> Tensor"

conv_relu = define(f"conv_relu(Tensor x, Tensor w, {GEOMETRY}", _conv_relu, cpu=_conv_relu_cpu, cuda=_conv_relu_cuda)
conv_add_relu = define(
    f"conv_add_relu(Tensor x, Tensor w, Tensor z, {GEOMETRY}",
    _conv_add_relu,
    cpu=_conv_add_relu_cpu,
    cuda=_conv_add_relu_cuda,
)


# ---- linear


def _linear_relu(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, x, w.t()).relu()


def _linear_gelu(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(torch.addmm(bias, x, w.t()), approximate="tanh")


def _linear_relu_cpu(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, w, dense(bias), "relu", [], "")  # type: ignore[no-any-return]


def _linear_gelu_cpu(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, w, dense(bias), "gelu", [], "tanh")  # type: ignore[no-any-return]


def _linear_relu_cuda(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return torch.ops.aten._addmm_activation(bias, x, w.t(), use_gelu=False)  # type: ignore[no-any-return]


def _linear_gelu_cuda(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return torch.ops.aten._addmm_activation(bias, x, w.t(), use_gelu=True)  # type: ignore[no-any-return]


linear_relu = define(
    "linear_relu(Tensor x, Tensor w, Tensor bias) -> Tensor", _linear_relu, cpu=_linear_relu_cpu, cuda=_linear_relu_cuda
)
# The same kernels under another name, so that generated code shows which rewrite inserted the call.
linear_approximated_gelu = define(
    "linear_approximated_gelu(Tensor x, Tensor w, Tensor bias) -> Tensor",
    _linear_gelu,
    cpu=_linear_gelu_cpu,
    cuda=_linear_gelu_cuda,
)
linear_gelu = define(
    "linear_gelu(Tensor x, Tensor w, Tensor bias) -> Tensor", _linear_gelu, cpu=_linear_gelu_cpu, cuda=_linear_gelu_cuda
)


# ---- attention


MOST_KEYS, MOST_WIDTH = 256, 128  # the limits of one tile of our kernel


def _attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    if bias is not None:
        if bias.dim() == 4 and bias.shape[0] not in (1, q.shape[0]):  # such as masks for the windows of one image
            bias = bias.repeat(q.shape[0] // bias.shape[0], 1, 1, 1)
        bias = bias.expand(*q.shape[:-1], k.shape[-2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale).transpose(1, 2).contiguous()


def _attention_cuda(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    from backend_kwargs.compilers.inductor.rewrites.kernels.attention import attention_over_few_keys

    fits = has_few_keys(q, k, v) and q.numel() > 0 and k.numel() > 0
    return (attention_over_few_keys if fits else _attention)(q, k, v, bias, scale)


def has_few_keys(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether our kernel has tiles for these sizes, for all values of their symbols."""
    return known_true(k.shape[2] <= MOST_KEYS) and known_true(max(q.shape[3], v.shape[3]) <= MOST_WIDTH)


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    batch, heads, queries, _ = q.shape
    return q.new_empty(batch, queries, heads, v.shape[-1])


def _saved_by_attention(node: Node) -> float:
    """Return the traffic of the scores and the weights, each written once and read once."""
    q, k = (each.meta["val"] for each in node.all_input_nodes[:2])
    batch, heads, queries, _ = map(hint, q.shape)
    return float(4 * batch * heads * queries * hint(k.shape[-2]) * q.element_size())


# The result is [batch, queries, heads, width]: the kernels write this layout, and the next layer reads it. The
# bias may have fewer batches, which repeat.
attention = define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? bias, float scale) -> Tensor",
    _attention,
    fake=_attention_fake,
    cuda=_attention_cuda,
    saved=_saved_by_attention,
)


def _any_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=is_causal, scale=scale)
    return attended.transpose(1, 2).contiguous()


def _cudnn_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    by = torch.ops.aten._scaled_dot_product_cudnn_attention
    result: Tensor = by(q, k, v, bias, False, 0.0, is_causal, False, scale=scale)[0]
    return result.transpose(1, 2).contiguous()


cudnn_attention = define(
    "cudnn_attention(Tensor q, Tensor k, Tensor v, Tensor? bias, bool is_causal, float scale) -> Tensor",
    _any_attention,
    fake=lambda q, k, v, bias, is_causal, scale: _attention_fake(q, k, v, bias, scale),
    cuda=_cudnn_attention,
    saved=lambda node: 0.0,  # a faster kernel for the same traffic
)


# ---- losses

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
    from backend_kwargs.compilers.inductor.rewrites.kernels.cross_entropy import loss_of_rows

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
    from backend_kwargs.compilers.inductor.rewrites.kernels.cross_entropy import gradient_of_rows

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
