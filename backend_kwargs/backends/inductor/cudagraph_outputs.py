"""Results that no later call changes: copies of outputs in a CUDA graph's pool, and of a frozen graph's constants."""

import contextlib
import threading
import weakref
from collections.abc import Callable, Container, Sequence
from functools import wraps
from typing import Any, NoReturn, TypeAlias

import torch
from torch.autograd.function import FunctionCtx

from backend_kwargs.backends.generated_code import autograd_functions
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.facts import Call
from backend_kwargs.torch_internals.cudagraphs import CUDAGraphNode, current_raw_stream, trees_of_thread
from backend_kwargs.torch_internals.modes import is_traceable_wrapper_subclass
from backend_kwargs.torch_internals.tensors import copy_each

# Bytes of an output that is copied by itself. With two outputs on an H200, one launch took 17, 21 and 55 µs where
# the larger had 4, 16 and 64 MiB; a clone of each took 23, 23 and 40 µs.
LARGE = 20 << 20

Outputs: TypeAlias = Sequence[Any]  # of a graph: tensors, numbers and None


def with_independent_outputs(compiled: Call) -> Call:
    """Return `compiled` with copies of the outputs and gradients that are in a CUDA graph's memory pool, and no others.

    Outputs are a flat sequence, since dynamo rebuilds the user's structure from it, so any pytree works. Outputs that
    share memory still share it when no gradient is recorded. The cost is a copy of each such output per call, and some
    microseconds.
    """
    for function in autograd_functions(compiled):
        # `.grad` may be the memory that a captured backward graph writes.
        function.backward = staticmethod(_with_copied_results(function.backward))
    call = _one_at_a_time(_with_copied_results(compiled))
    if hasattr(call, "serialize"):
        call.serialize = _refuse_to_serialize
    return call


def with_copies_of(compiled: Call, constants: Sequence[torch.Tensor]) -> Call:
    """Return `compiled` with copies of the outputs that share memory with one of `constants`."""
    # The code keeps those that it returns. Where another was freed, an output at its address is only copied needlessly.
    addresses = frozenset(address for each in constants if (address := _address(each)) is not None)

    @wraps(compiled)
    def call(*inputs: object) -> object:
        outputs = compiled(*inputs)
        return _copied(outputs, [_address(out) for out in outputs], addresses)

    return call


def _with_copied_results(fn: Call) -> Call:
    copies = _PooledCopies()

    @wraps(fn)
    def call(*inputs: object) -> object:
        return copies(fn(*inputs))

    return call


_replaying = threading.RLock()
_ready = threading.local()
_last_stream: dict[int, tuple[int, torch.cuda.Stream]] = {}


def _one_at_a_time(fn: Call) -> Call:
    """Return `fn` made safe for any thread and stream: a replay and its copies end before the next replay begins.

    Each graph has one set of inputs and one pool for all threads and streams.
    """

    @wraps(fn)
    def call(*inputs: object) -> object:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return fn(*inputs)  # a CPU records no graphs, and may be the only device
        if not hasattr(_ready, "done"):
            _make_ready()
        with _replaying:
            device = torch.cuda.current_device()
            stream = current_raw_stream(device)
            last = _last_stream.get(device)
            if last is None or last[0] != stream:
                current = torch.cuda.current_stream(device)
                if last is not None:
                    current.wait_stream(last[1])
                _last_stream[device] = stream, current
            return fn(*inputs)

    return call


def _make_ready() -> None:
    """Initialize what libraries keep per thread, since that cannot be done during the capture of a graph."""
    _ready.done = True
    trees_of_thread()
    x = torch.ones(1, 1, 4, 4, device="cuda")  # a kernel makes the CUDA context current, without which cuBLAS warns
    torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
    with contextlib.suppress(RuntimeError), torch.no_grad():
        torch.conv2d(x, x)


def _refuse_to_serialize(*_: object, **__: object) -> NoReturn:
    raise BackendKwargsError("Option 'clone_outputs' does not survive aot_compile(); clone the outputs in the model.")


class _PooledCopies:
    """Copies a function's results; caches which ones are in the pool for each CUDA graph, of which each size has one.

    Warm-up runs, results of several graphs (`graph_partition`) and results that share memory are looked up at each
    call.
    """

    def __init__(self) -> None:
        # Trees belong to a thread; for each size, a function records in those of the thread that calls it first.
        self._trees: list[dict[int, Any]] = []
        self._last: Callable[[], Any] = _gone  # the trees of the graph that was replayed last
        self._positions: weakref.WeakKeyDictionary[CUDAGraphNode, tuple[int, ...]] = weakref.WeakKeyDictionary()

    def __call__(self, results: Outputs) -> tuple[object, ...]:
        trees = self._last()
        node = None if trees is None else trees.current_node
        positions = None if node is None else self._positions.get(node)
        if positions is None:
            return self._looked_up(results)
        copies = list(results)
        for at, copy in zip(positions, _copies([results[at] for at in positions]), strict=True):
            copies[at] = copy
        return tuple(copies)

    def _looked_up(self, results: Outputs) -> tuple[object, ...]:
        mine = trees_of_thread()
        if not any(trees is mine for trees in self._trees):
            self._trees.append(mine)
        on_gpu = [out if isinstance(out, torch.Tensor) and out.is_cuda else None for out in results]
        addresses = [_address(out) for out in on_gpu]
        managers = [each.tree_manager for trees in self._trees for each in trees.values() if each.tree_manager]
        nodes = {manager.current_node: manager for manager in managers if manager.current_node is not None}
        pooled = {ref.data_ptr() for node in nodes for ref in node.path_live_weakrefs()}
        if not pooled:
            return tuple(results)
        positions = tuple(at for at, address in enumerate(addresses) if address in pooled)
        copied = {addresses[at] for at in positions}
        if copied and len(copied) == len(positions) and not any(map(_is_opaque, results)):
            for node, manager in nodes.items():
                if copied <= _recorded(node):
                    self._last, self._positions[node] = weakref.ref(manager), positions
        return tuple(_copied(results, addresses, pooled))


def _recorded(node: object) -> set[int]:
    """Return the addresses of the results of a replay of this graph; a warm-up run has none."""
    if not isinstance(node, CUDAGraphNode):
        return set()
    return {ref.data_ptr() for ref in node.outputs_weakrefs if ref is not None}


def _gone() -> None:
    return None


def _copied(results: Outputs, addresses: Sequence[int | None], wanted: Container[int]) -> list[object]:
    """Return `results` with copies of those whose address is in `wanted` or cannot be read."""
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


def _copies(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    if len(outputs) == 1 or any(out.requires_grad for out in outputs):
        return [_copy(out) for out in outputs]
    copies = [out.clone() if out.nbytes >= LARGE else torch.empty_like(out) for out in outputs]
    small = [at for at, out in enumerate(outputs) if out.nbytes < LARGE]
    if small:  # one launch for all of one layout
        copy_each([copies[at] for at in small], [outputs[at] for at in small])
    return copies


def _copy(out: torch.Tensor) -> torch.Tensor:
    return _Copy.apply(out) if out.requires_grad else out.clone()  # type: ignore[no-untyped-call]


class _Copy(torch.autograd.Function):
    """A copy that keeps the original until the backward pass.

    CUDA-graph trees may replay a graph once its outputs are freed, even if its backward pass is pending: the next call
    then overwrote what this call had saved, and gradients were silently wrong (torch 2.11).
    """

    @staticmethod
    def forward(ctx: FunctionCtx, out: torch.Tensor) -> torch.Tensor:
        """Copy."""
        ctx.save_for_backward(out)
        return out.clone()

    @staticmethod
    def backward(_ctx: object, *grads: torch.Tensor) -> torch.Tensor:
        """Return the gradient."""
        return grads[0]


def _is_opaque(out: object) -> bool:
    # A wrapper subclass (DTensor, quantized) has no memory of its own.
    return isinstance(out, torch.Tensor) and is_traceable_wrapper_subclass(out)


def _address(out: object) -> int | None:
    if not isinstance(out, torch.Tensor) or out.layout != torch.strided or _is_opaque(out):
        return None
    return out.untyped_storage().data_ptr()
