"""The operators that replace patterns: fake kernels with strides, composite ones for any device, the libraries' own.

A library may have no kernel for some sizes or layouts, which it says by an error before it launches anything: there
the composite one runs, from then on at once.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

LIBRARY = torch.library.Library("backend_kwargs", "DEF")  # alive for as long as its operators
# Inductor must hand over the strides that a pattern saw: another layout would cost a copy or another kernel.
TAGS = tuple(filter(None, (getattr(torch.Tag, name, None) for name in ("needs_exact_strides", "pt2_compliant_tag"))))

_saved: dict[Any, Callable[[Node], float]] = {}
_without_kernel: set[tuple[Any, ...]] = set()  # layouts for which the library has said that it has none


def define(
    signature: str,
    composite: Callable[..., Any],
    *,
    fake: Callable[..., Any] | None = None,
    cpu: Callable[..., Any] | None = None,
    cuda: Callable[..., Any] | None = None,
    saved: Callable[[Node], float] | None = None,
) -> Any:
    """Define an operator; `saved` gives the bytes of memory traffic that one node saves, beside what it replaces."""
    name = LIBRARY.define(signature, tags=TAGS)
    for key, kernel in (("CPU", cpu), ("CUDA", cuda)):
        LIBRARY.impl(name, with_fallback(kernel, composite) if kernel else composite, key)
    torch.library.register_fake(f"backend_kwargs::{name}", fake or composite, lib=LIBRARY)
    operator = getattr(torch.ops.backend_kwargs, name).default
    _saved[operator] = saved or _written_and_read
    return operator


def saved_bytes(node: Node) -> float:
    """Return the bytes of memory traffic that a node saves beside what it replaces; 0 for what is no operator here."""
    return _saved[node.target](node) if node.target in _saved else 0.0


def with_fallback(kernel: Callable[..., Any], composite: Callable[..., Any]) -> Callable[..., Any]:
    """Return `kernel`, and `composite` for the layouts that it raises for."""

    @wraps(kernel)
    def call(*args: Any) -> Any:
        if _without_kernel and _layout(kernel, args) in _without_kernel:
            return composite(*args)
        try:
            return kernel(*args)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            result = composite(*args)  # which raises where the arguments are wrong
            _without_kernel.add(_layout(kernel, args))
            return result

    return call


def _layout(kernel: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (kernel, *((t.shape, t.stride(), t.dtype) if isinstance(t, Tensor) else str(t) for t in args))


def _written_and_read(node: Node) -> float:
    """Return the traffic of a result that is no longer written by one kernel to be read by the next."""
    return 2.0 * nbytes(node)


def nbytes(node: Any) -> float:
    """Return the bytes of a node's value by its sizes, hints where they vary."""
    value = node.meta["val"]
    return float(int(value.numel()) * value.element_size())


# ---- convolutions


def _conv(x: Tensor, w: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    return torch.ops.aten.convolution(x, w, bias, stride, padding, dilation, False, [0] * len(stride), groups)


def _conv_relu(x: Tensor, w: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    return _conv(x, w, bias, stride, padding, dilation, groups).relu()


def _conv_relu_cpu(x: Tensor, w: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    pointwise = torch.ops.mkldnn._convolution_pointwise
    return pointwise(x, w, bias, padding, stride, dilation, groups, "relu", [], "")  # type: ignore[no-any-return]


def _conv_relu_cuda(x: Tensor, w: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    return torch.ops.aten.cudnn_convolution_relu(x, w, bias, stride, padding, dilation, groups)  # type: ignore[no-any-return]


def _conv_add_relu(
    x: Tensor, w: Tensor, z: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    return (_conv(x, w, bias, stride, padding, dilation, groups) + z).relu()


def _conv_add_relu_cpu(
    x: Tensor, w: Tensor, z: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    pointwise = torch.ops.mkldnn._convolution_pointwise.binary
    return pointwise(x, z, w, bias, padding, stride, dilation, groups, "add", 1.0, "relu", [], "")  # type: ignore[no-any-return]


def _conv_add_relu_cuda(
    x: Tensor, w: Tensor, z: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    fused = torch.ops.aten.cudnn_convolution_add_relu
    return fused(x, w, z, 1.0, bias, stride, padding, dilation, groups)  # type: ignore[no-any-return]


_GEOMETRY = "Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups) -> Tensor"

conv_relu = define(
    f"conv_relu(Tensor x, Tensor w, {_GEOMETRY}", _conv_relu, cpu=_conv_relu_cpu, cuda=_conv_relu_cuda
)
conv_add_relu = define(
    f"conv_add_relu(Tensor x, Tensor w, Tensor z, {_GEOMETRY}",
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
    return torch.ops.mkldnn._linear_pointwise(x, w, bias, "relu", [], "")  # type: ignore[no-any-return]


def _linear_gelu_cpu(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, w, bias, "gelu", [], "tanh")  # type: ignore[no-any-return]


def _linear_relu_cuda(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return torch.ops.aten._addmm_activation(bias, x, w.t(), use_gelu=False)  # type: ignore[no-any-return]


def _linear_gelu_cuda(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return torch.ops.aten._addmm_activation(bias, x, w.t(), use_gelu=True)  # type: ignore[no-any-return]


linear_relu = define(
    "linear_relu(Tensor x, Tensor w, Tensor bias) -> Tensor", _linear_relu, cpu=_linear_relu_cpu, cuda=_linear_relu_cuda
)
# The same under another name, so that code tells which rewrite put it there.
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


def _attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    if bias is not None:
        bias = bias.expand(*q.shape[:-1], k.shape[-2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale).transpose(1, 2).contiguous()


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    batch, heads, queries, _ = q.shape
    return q.new_empty(batch, queries, heads, v.shape[-1])


def _saved_by_attention(node: Node) -> float:
    """Return the traffic of scores and weights, each written and read."""
    q, k = (each.meta["val"] for each in node.all_input_nodes[:2])
    batch, heads, queries, _ = map(int, q.shape)
    return 4.0 * batch * heads * queries * int(k.shape[-2]) * q.element_size()


# With heads beside their widths, [batch, queries, heads, width]: as the kernels write and the next layer reads it.
attention = define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? bias, float scale) -> Tensor",
    _attention,
    fake=_attention_fake,
    saved=_saved_by_attention,
)
