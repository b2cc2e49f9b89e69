"""What the launches of all kernels share."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import triton.language as tl  # type: ignore[import-untyped,unused-ignore]

from backend_kwargs.torch_internals.tensors import FunctionalTensor

LOG2_E = tl.constexpr(1.4426950408889634)
LEAST = 16  # the smallest size of a tile for tensor cores

T = TypeVar("T")
Wrap = Callable[[Any], Any]  # `as_it_is`, to launch a kernel, or `torch.library.wrap_triton`, to trace the launch


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Return a context in which kernels run on the tensor's GPU; Inductor has its own for a launch that is traced."""
    launched = tensor.is_cuda and not isinstance(tensor, FunctionalTensor)
    return torch.cuda.device(tensor.device) if launched else nullcontext()


def processors(device: torch.device) -> int:
    """Return the number of a GPU's multiprocessors; 2 for another device, and where no GPU is seen."""
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if on_gpu else 2


def as_it_is(kernel: T) -> T:
    """Return the kernel."""
    return kernel
