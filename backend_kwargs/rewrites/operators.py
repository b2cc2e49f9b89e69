"""How operators that replace patterns are defined: with a fake kernel, a composite one for any device, a library's.

A library may have no kernel for some sizes or layouts: it then raises before it launches anything. The composite kernel
runs instead, and from then on without another attempt. Operators that are `inlined` have no such choice on a GPU, where
Inductor compiles their kernels with its own.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import wraps
from typing import Any, TypeAlias

import torch
from torch import Tensor

from backend_kwargs.backends import Inputs
from backend_kwargs.rewrites.matching import Arguments
from backend_kwargs.torch_internals.decompositions import store_in_inductor
from backend_kwargs.torch_internals.fake_tensors import FakeTensor, FunctionalTensor, FunctionalTensorMode
from backend_kwargs.torch_internals.operators import OpOverload

Kernel: TypeAlias = Callable[..., Any]  # takes what the operator's schema says, and returns its results
Context: TypeAlias = Any  # autograd's `ctx`, which holds what the functions of an operator set on it
Gradients: TypeAlias = tuple[Tensor | None, ...]

LIBRARY: Any = torch.library.Library("backend_kwargs", "DEF")  # type: ignore[no-untyped-call]  # alive for as long as its operators
# Inductor must pass the strides of dynamo's graph, where another layout would cost a copy or another kernel. To
# operators that patterns insert it passes any.
TAGS = tuple(filter(None, (getattr(torch.Tag, name, None) for name in ("needs_exact_strides", "pt2_compliant_tag"))))
PLAIN = frozenset((Tensor, FakeTensor, FunctionalTensor))  # without a subclass of the user's

_without_kernel: set[Hashable] = set()  # layouts for which the library raised


def define(
    signature: str,
    composite: Kernel,
    *,
    fake: Kernel | None = None,
    cpu: Kernel | None = None,
    cuda: Kernel | None = None,
    inlined: bool = False,
    keep: Callable[..., None] | None = None,
    backward: Kernel | None = None,
    tags: tuple[torch.Tag, ...] = TAGS,
) -> "OpOverload[..., Any]":
    """Define an operator.

    `keep(ctx, inputs, output)` and `backward(ctx, *gradients)` are those of `torch.library.register_autograd`.
    `inlined`: AOTAutograd traces into `composite`, or on a GPU into `cuda`, which takes `wrap` for its kernels; so
    Inductor launches them, and fuses what is around them. A launch from Python took about 85 µs. Patterns insert
    operators too late for that.
    """
    name = LIBRARY.define(signature, tags=tags)
    for key, kernel in (("CPU", cpu), ("CUDA", cuda)):
        LIBRARY.impl(name, with_fallback(kernel, composite) if kernel else composite, key)
    torch.library.register_fake(f"backend_kwargs::{name}", fake or composite, lib=LIBRARY)
    if inlined:
        rule = _inlining(composite, cuda)
        torch.library.register_torch_dispatch(f"backend_kwargs::{name}", FunctionalTensorMode, rule, lib=LIBRARY)
    if backward:
        torch.library.register_autograd(f"backend_kwargs::{name}", backward, setup_context=keep, lib=LIBRARY)
    return getattr(torch.ops.backend_kwargs, name).default  # type: ignore[no-any-return]


def _inlining(composite: Kernel, cuda: Kernel | None) -> Kernel:
    """Return AOTAutograd's rule for an operator: trace into `composite`, or into `cuda` on a GPU alone."""

    def rule(
        mode: FunctionalTensorMode,
        op: "OpOverload[..., Any]",
        types: Sequence[type],
        args: tuple[Any, ...],
        kwargs: Arguments,
    ) -> object:
        # A subclass, such as DTensor, first passes the operator on to the tensors inside.
        if (cuda and not args[0].is_cuda) or not PLAIN.issuperset(types):
            return mode.__torch_dispatch__(op, types, args, kwargs)
        with mode:
            return cuda(*args, wrap=torch.library.wrap_triton) if cuda else composite(*args)

    return rule


def with_fallback(kernel: Kernel, composite: Kernel) -> Kernel:
    """Return a function that calls `kernel`, or `composite` for layouts for which `kernel` raises."""

    @wraps(kernel)
    def call(*args: object) -> object:
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


def _layout(kernel: Kernel, args: Inputs) -> Hashable:
    """Return what decides whether a library has a kernel for a call: sizes, strides, dtypes, and other arguments."""
    return (kernel, *((t.shape, t.stride(), t.dtype) if isinstance(t, Tensor) else str(t) for t in args))


def dense(bias: Tensor | None) -> Tensor | None:
    """Return a bias as the libraries need it: oneDNN ignores its stride."""
    return None if bias is None else bias.contiguous()


# In any layout: a tag would make it that of dynamo's graph, and a copy.
stored: "OpOverload[..., Tensor]" = define(
    "stored(Tensor x) -> Tensor",
    torch.clone,
    backward=lambda _, grad: stored(grad),
    tags=(torch.Tag.pt2_compliant_tag,),
)
store_in_inductor(stored)
