"""What torch keeps of a tensor: version, memory, views, bits; of a module: what it has registered; and fake tensors."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx import _lazy_graph_module
from torch.nn.modules.dropout import _DropoutNd as Dropout

# Functions of C, since they are called for each parameter at each call of a frozen graph.
version_of = attrgetter("_version")  # counts changes in place; inference tensors have none, and raise
copy_each = torch._foreach_copy_  # one call for all, so a Ctrl-C comes before it or after it
negative_view = torch._neg_view  # a view with the negative bit flipped
base_of = attrgetter("_base")  # the tensor of which autograd knows this one to be a view, or None


def counted_writes(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place, 0 for an inference tensor, which does not count."""
    return 0 if tensor.is_inference() else version_of(tensor)


def memory_id(tensor: torch.Tensor) -> int:
    """Return a number that tensors have in common that share memory; once they are freed, it may be used again."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


def with_bits_of(like: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a view of `value` whose conjugate and negative bits are flipped where those of `like` are set."""
    value = value.conj() if like.is_conj() else value
    return negative_view(value) if like.is_neg() else value


def in_storage(storage: torch.UntypedStorage, like: torch.Tensor, offset: int | None = None) -> torch.Tensor:
    """Return the tensor in other memory that is laid out like this one; no view, which dynamo traces in another way.

    It begins where this one does, or at `offset`.
    """
    begin = like.storage_offset() if offset is None else offset
    there = torch.empty(0, dtype=like.dtype, device=storage.device).set_(storage, begin, like.size(), like.stride())
    return with_bits_of(like, there)


def may_overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors whose addresses intersect may have an element in common, as AOTAutograd asks it."""
    if memory_id(one) != memory_id(other) or one is other:
        return True
    return bool(torch._C._dynamo.guards.compute_overlapping_tensors([one, other], symbolic=False))


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether autograd knows a tensor to be a view of another."""
    return tensor._is_view()


def has_static_address(value: object) -> bool:
    """Return whether dynamo marks a tensor to stay where it is, so that CUDA graphs need not copy it."""
    return bool(getattr(value, "_dynamo_static_input_type", None))


def has_plain_dispatch(value: torch.Tensor) -> bool:
    """Return whether a tensor's class leaves dispatch as it is, so that AOTAutograd does not unwrap it."""
    plain: object = torch._C._disabled_torch_dispatch_impl
    return type(value).__torch_dispatch__ is plain


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Return whether one of `torch.func`'s transforms has wrapped a tensor."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that `torch.func`'s transforms have wrapped, which has the memory."""
    while is_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def same_layouts(tensors: Sequence[torch.Tensor]) -> torch._C._dynamo.guards.TensorGuards:
    """Return dynamo's guards, called by `check(*tensors)`: class, dtype, device, sizes, strides and bits of tensors.

    They also fail if one tensor is given twice and in another mode, such as inference_mode, and cost a fifth of the
    same in Python. Without gradient mode they ignore `requires_grad`.
    """
    sizes: Any = [[*tensor.size()] for tensor in tensors]
    strides: Any = [[*tensor.stride()] for tensor in tensors]
    return torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


def keep_device_busy(cycles: int) -> None:
    """Queue a kernel on the current CUDA stream that does nothing for so many cycles."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def attention_order() -> list[int]:
    """Return the order in which scaled_dot_product_attention tries its kernels."""
    return torch._C._get_sdp_priority_order()


# The functions of C behind torch.nn.functional's, which dynamo puts into graphs.
cross_entropy_loss, linear = torch._C._nn.cross_entropy_loss, torch._C._nn.linear

# The same, and `torch.func`'s transforms: functions that write only into what their names, signatures and schemas say.
WRITES_AS_DECLARED = frozenset({"torch._functorch.predispatch", "torch._functorch.eager_transforms"}) | {
    f"torch._C._{name}" for name in ("nn", "autograd", "fft", "functorch", "linalg", "special")
}


def replace_tensors(module: torch.nn.Module, made_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace each parameter and buffer: `Module.to` would make complex ones real."""
    module._apply(made_of)  # type: ignore[no-untyped-call]


def dynamos_graph_class() -> AbstractContextManager[None]:
    """Make graphs of the class that dynamo makes, whose code is generated when they are called."""
    return _lazy_graph_module._use_lazy_graph_module(True)
