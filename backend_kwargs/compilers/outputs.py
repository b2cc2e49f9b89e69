"""Outputs that the next replay of a CUDA graph does not overwrite."""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, NoReturn

import torch
from torch._inductor.cudagraph_trees import get_manager
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from backend_kwargs.errors import BackendKwargsError


def with_independent_outputs(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return `compiled` with those of its outputs copied that live in a CUDA graph's memory pool, and no others.

    Dynamo rebuilds the user's structure from a flat sequence, so any pytree is served. Outputs that share memory still
    share it where no gradient is recorded. The cost is a copy of each output at each call, and some microseconds.
    """

    @wraps(compiled)
    def call(*inputs: Any) -> Any:
        outputs = compiled(*inputs)
        addresses = [_address(out) for out in outputs]
        pooled = _pooled(outputs)
        return _independent(outputs, addresses, pooled) if pooled else outputs

    if hasattr(call, "serialize"):
        call.serialize = _refuse_to_serialize
    return call


def _refuse_to_serialize(*_: Any, **__: Any) -> NoReturn:
    raise BackendKwargsError("Option 'clone_outputs' does not survive aot_compile(); clone the outputs in the model.")


def _pooled(outputs: Sequence[Any]) -> frozenset[int]:
    """Return the addresses of the storages that graphs of the outputs' devices hold in their pools."""
    devices = {out.device.index for out in outputs if isinstance(out, torch.Tensor) and out.is_cuda}
    return frozenset(address for device in devices for address in _live_addresses(device))


def _live_addresses(device: int) -> Iterable[int]:
    manager = get_manager(device, create_if_none_exists=False)
    node = manager.current_node if manager else None
    return (ref.data_ptr() for ref in node.path_live_weakrefs()) if node else ()


def _independent(outputs: Sequence[Any], addresses: list[int | None], pooled: frozenset[int]) -> list[Any]:
    copies: dict[int, torch.UntypedStorage] = {}

    def copied(out: Any, address: int | None) -> Any:
        if address is None:
            return _copy(out) if isinstance(out, torch.Tensor) and out.is_cuda else out
        if address not in pooled:
            return out
        if out.requires_grad or addresses.count(address) == 1:
            return _copy(out)
        if address not in copies:
            copies[address] = out.untyped_storage().clone()
        return out.new_empty(0).set_(copies[address], out.storage_offset(), out.size(), out.stride())

    return [copied(out, address) for out, address in zip(outputs, addresses, strict=True)]


def _copy(out: torch.Tensor) -> torch.Tensor:
    return _Copy.apply(out) if out.requires_grad else out.clone()  # type: ignore[no-untyped-call]


class _Copy(torch.autograd.Function):
    """A copy that keeps the original until the backward pass.

    CUDA-graph trees may replay a graph once its outputs are dead, though its backward pass is pending: the next call
    then overwrote what this one had saved, and gradients were wrong without a word (torch 2.11).
    """

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor) -> torch.Tensor:
        """Copy."""
        ctx.save_for_backward(out)
        return out.clone()

    @staticmethod
    def backward(_ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """Hand the gradient on."""
        return grads[0]


def _address(out: Any) -> int | None:
    # A wrapper subclass (DTensor, quantized) has no memory of its own.
    plain = isinstance(out, torch.Tensor) and out.is_cuda and not is_traceable_wrapper_subclass(out)
    return out.untyped_storage().data_ptr() if plain else None
