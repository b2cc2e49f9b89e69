"""Results that no later call changes: copies of what lies in a CUDA graph's pool, or is a frozen graph's constant."""

import weakref
from collections.abc import Callable, Container, Sequence
from functools import wraps
from typing import Any, NoReturn

import torch
from torch._inductor import cudagraph_trees
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from backend_kwargs.compilers.generated import autograd_functions
from backend_kwargs.errors import BackendKwargsError


def with_independent_outputs(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return `compiled` with those outputs and gradients copied that live in a CUDA graph's memory pool, and no others.

    Dynamo rebuilds the user's structure from a flat sequence, so any pytree is served. Outputs that share memory still
    share it where no gradient is recorded. The cost is a copy of each output at each call, and some microseconds.
    """
    for function in autograd_functions(compiled):
        # `.grad` may keep the very memory that a captured backward graph writes.
        function.backward = staticmethod(_with_copied_results(function.backward))
    call = _with_copied_results(compiled)
    if hasattr(call, "serialize"):
        call.serialize = _refuse_to_serialize
    return call


def with_copies_of(compiled: Callable[..., Any], constants: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Return `compiled` with those outputs copied that share memory with one of `constants`."""
    held = list(constants)  # while they live, nothing else has their addresses
    addresses = frozenset(tensor.untyped_storage().data_ptr() for tensor in held)

    @wraps(compiled)
    def call(*inputs: Any) -> Any:
        outputs = compiled(*inputs)
        return _copied(outputs, [_address(out) for out in outputs], addresses)

    return call


def _with_copied_results(fn: Callable[..., Any]) -> Callable[..., Any]:
    copies = _PooledCopies()

    @wraps(fn)
    def call(*inputs: Any) -> Any:
        return copies(fn(*inputs))

    return call


def _refuse_to_serialize(*_: Any, **__: Any) -> NoReturn:
    raise BackendKwargsError("Option 'clone_outputs' does not survive aot_compile(); clone the outputs in the model.")


class _PooledCopies:
    """Copies a function's results; remembers which ones lie in the pool for the CUDA graph that was replayed last.

    What is remembered holds only while that graph is the current one of the calling thread. Warm-up runs, results of
    several graphs (`graph_partition`) and results that share memory are looked up at each call.
    """

    def __init__(self) -> None:
        self._last: tuple[Callable[[], Any], int, tuple[int, ...]] = (_no_graph, 0, ())

    def __call__(self, results: Sequence[Any]) -> Sequence[Any]:
        graph, device, positions = self._last
        node = graph()
        if node is None or node is not _current_node(device):
            return self._looked_up(results)
        copies = list(results)
        for at in positions:
            copies[at] = _copy(results[at])
        return copies

    def _looked_up(self, results: Sequence[Any]) -> Sequence[Any]:
        on_gpu = [out if isinstance(out, torch.Tensor) and out.is_cuda else None for out in results]
        addresses = [_address(out) for out in on_gpu]
        devices = {out.device.index for out in on_gpu if out is not None}
        nodes = {device: node for device in devices if (node := _current_node(device)) is not None}
        pooled = {ref.data_ptr() for node in nodes.values() for ref in node.path_live_weakrefs()}
        if not pooled:
            return results
        positions = tuple(at for at, address in enumerate(addresses) if address in pooled)
        if len(devices) == 1 and not any(map(_is_opaque, results)):
            (device,) = devices
            found = {addresses[at] for at in positions}
            if found and len(found) == len(positions) and found <= _recorded(nodes[device]):
                self._last = weakref.ref(nodes[device]), device, positions
        return _copied(results, addresses, pooled)


def _recorded(node: Any) -> set[int]:
    """Return the addresses that a replay of this graph writes its results to; a warm-up run has none."""
    if not isinstance(node, cudagraph_trees.CUDAGraphNode):
        return set()
    return {ref.data_ptr() for ref in node.outputs_weakrefs if ref is not None}


def _no_graph() -> None:
    return None


def _current_node(device: int) -> Any:
    """Return the node of CUDA-graph trees that ran last in this thread, None where there is none."""
    containers = cudagraph_trees.get_obj(cudagraph_trees.local, "tree_manager_containers")
    container = containers.get(device)
    manager = container.tree_manager if container else None
    return manager.current_node if manager else None


def _copied(results: Sequence[Any], addresses: Sequence[int | None], wanted: Container[int]) -> list[Any]:
    """Return `results` with a copy of each whose address is `wanted`, and of each that hides its address."""
    copies: dict[int, torch.UntypedStorage] = {}

    def copied(out: Any, address: int | None) -> Any:
        if address is None:
            return _copy(out) if _is_opaque(out) else out
        if address not in wanted:
            return out
        if out.requires_grad or addresses.count(address) == 1:
            return _copy(out)
        if address not in copies:
            copies[address] = out.untyped_storage().clone()
        return out.new_empty(0).set_(copies[address], out.storage_offset(), out.size(), out.stride())

    return [copied(out, address) for out, address in zip(results, addresses, strict=True)]


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


def _is_opaque(out: Any) -> bool:
    # A wrapper subclass (DTensor, quantized) has no memory of its own.
    return isinstance(out, torch.Tensor) and is_traceable_wrapper_subclass(out)


def _address(out: Any) -> int | None:
    plain = isinstance(out, torch.Tensor) and out.layout == torch.strided and not _is_opaque(out)
    return out.untyped_storage().data_ptr() if plain else None
