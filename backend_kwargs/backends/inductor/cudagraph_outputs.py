"""Results that no later call changes: copies of outputs in a CUDA graph's pool, and of a frozen graph's constants."""

import contextlib
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from functools import wraps
from operator import attrgetter
from typing import Any, NoReturn, TypeAlias

import torch

from backend_kwargs.backends.generated_code import autograd_functions
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.facts import Call
from backend_kwargs.torch_internals.cudagraphs import (
    CUDAGraphNode,
    CUDAGraphTreeManager,
    current_raw_stream,
    empty_each,
    recorded_addresses,
    trees_of_thread,
)
from backend_kwargs.torch_internals.tensors import (
    copy_each,
    in_storage,
    is_traceable_wrapper_subclass,
    same_layouts,
)
from backend_kwargs.trial.trees import map_tensors

# One launch for several outputs reads 64 Ki numbers in each block, which takes 8 µs on an H200. In a loop with a CUDA
# graph, 2 outputs of 4 KiB, 1 MiB and 16 MiB add 12, 18 and 45 µs, and a clone of each 13, 14 and 40; 8 of 1, 8 and 16
# MiB 19, 71 and 126, and 27, 75 and 108.
LARGE = 12 << 20  # bytes of an output that is copied by itself
SMALL = 256 << 10  # of two outputs that are copied together
ORIGINALS = "results in the memory of a CUDA graph"  # what the autograd node of a copy keeps

_requires_grad = attrgetter("requires_grad")
Outputs: TypeAlias = Sequence[Any]  # of a graph: tensors, numbers and None


def with_independent_outputs(compiled: Call, *, by_torch: bool = False) -> Call:
    """Return `compiled` with copies of the outputs and gradients that are in a CUDA graph's memory pool, and no others.

    Of outputs that are copied `by_torch` there are no further copies; gradients it never copies.

    Outputs are a flat sequence, since dynamo rebuilds the user's structure from it, so any pytree works. Outputs that
    share memory still share it when no gradient is recorded. The cost is a copy of each such output per call, and some
    microseconds.
    """
    for function in autograd_functions(compiled):
        # `.grad` may be the memory that a captured backward graph writes.
        function.backward = staticmethod(_with_copied_results(function.backward))
    call = one_at_a_time(compiled if by_torch else _with_copied_results(compiled))
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


def one_at_a_time(fn: Call, devices: Collection[int] | None = None) -> Call:
    """Return `fn` made safe for any thread and stream: a replay and its copies end before the next replay begins.

    Each graph has one set of inputs and one pool for all threads and streams. Without `devices` it is on the current
    one.
    """

    @wraps(fn)
    def call(*args: object, **kwargs: object) -> object:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return fn(*args, **kwargs)  # a CPU records no graphs, and may be the only device
        make_thread_ready()
        with _replaying:
            _follow_last_streams(devices)
            return fn(*args, **kwargs)

    return call


@contextlib.contextmanager
def no_other_replays(devices: Collection[int]) -> Iterator[None]:
    """Let functions that are called one at a time on these devices wait in other threads."""
    make_thread_ready()
    with _replaying:
        _follow_last_streams(devices)
        yield


def _follow_last_streams(devices: Collection[int] | None) -> None:
    for device in (torch.cuda.current_device(),) if devices is None else devices:
        stream = current_raw_stream(device)
        last = _last_stream.get(device)
        if last is None or last[0] != stream:
            current = torch.cuda.current_stream(device)
            if last is not None:
                current.wait_stream(last[1])
            _last_stream[device] = stream, current


def with_copies_of_managed(fn: Call, managers: Iterable[CUDAGraphTreeManager]) -> Call:
    """Return `fn`, which any thread may call, with copies of the results in the memory of these managers' trees."""
    copies = _PooledCopies(managers)

    @wraps(fn)
    def call(*args: object, **kwargs: object) -> object:
        result = fn(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        map_tensors(lambda each: tensors.append(each) or each, result)  # type: ignore[func-returns-value]
        copied = iter(copies(tensors))
        return map_tensors(lambda _: next(copied), result)  # type: ignore[arg-type,return-value]

    return call


def make_thread_ready() -> None:
    """Initialize what libraries keep per thread, since that cannot be done during the capture of a graph."""
    if hasattr(_ready, "done"):
        return
    _ready.done = True
    trees_of_thread()
    x = torch.ones(1, 1, 4, 4, device="cuda")  # a kernel makes the CUDA context current, without which cuBLAS warns
    torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
    with contextlib.suppress(RuntimeError), torch.no_grad():
        torch.conv2d(x, x)


def _refuse_to_serialize(*_: object, **__: object) -> NoReturn:
    raise BackendKwargsError("Option 'clone_outputs' does not survive aot_compile(); clone the outputs in the model.")


class _PooledCopies:
    """Copies a function's results; keeps a plan of the copies for each CUDA graph, of which each size has one.

    Results of warm-up runs are looked up at each call.
    """

    def __init__(self, managers: Iterable[CUDAGraphTreeManager] = ()) -> None:
        # Trees belong to a thread; for each size, a function records in those of the thread that calls it first.
        self._trees: list[dict[int, Any]] = []
        self._managers = [weakref.ref(each) for each in managers]
        self._last: Callable[[], Any] = lambda: None  # the trees of the graph that was replayed last
        self._plans: weakref.WeakKeyDictionary[CUDAGraphNode, _Plan] = weakref.WeakKeyDictionary()

    def __call__(self, results: Outputs) -> tuple[object, ...]:
        trees = self._last()
        node = None if trees is None else trees.current_node
        plan = None if node is None else self._plans.get(node)
        copies = None if plan is None else plan.copies(results, moved=bool(self._managers))
        return self._looked_up(results) if copies is None else tuple(copies)

    def _looked_up(self, results: Outputs) -> tuple[object, ...]:
        mine = trees_of_thread()
        if mine and not any(trees is mine for trees in self._trees):
            self._trees.append(mine)
        on_gpu = [out if isinstance(out, torch.Tensor) and out.is_cuda else None for out in results]
        addresses = [_address(out) for out in on_gpu]
        managers = [each.tree_manager for trees in self._trees for each in trees.values() if each.tree_manager]
        managers += [manager for each in self._managers if (manager := each()) is not None]
        nodes = {manager.current_node: manager for manager in managers if manager.current_node is not None}
        pooled = {ref.data_ptr() for node in nodes for ref in node.path_live_weakrefs()}
        if not pooled:
            return tuple(results)
        copied = {address for address in addresses if address in pooled}
        if copied and not any(map(_is_opaque, results)):
            for node, manager in nodes.items():
                if copied <= recorded_addresses(node):
                    plan = _Plan(results, [address if address in pooled else None for address in addresses])
                    self._last, self._plans[node] = weakref.ref(manager), plan
        return tuple(_copied(results, addresses, pooled))


class _Plan:
    """How results of one graph are copied: small ones of one dtype by one launch, without Python code for each.

    It holds no tensor, since the trees would count that as a use.
    """

    def __init__(self, results: Outputs, addresses: Sequence[int | None]) -> None:
        sharing: defaultdict[int, list[int]] = defaultdict(list)
        for at, address in enumerate(addresses):
            if address is not None:
                sharing[address].append(at)
        self._positions = sorted(at for group in sharing.values() for at in group)
        self._addresses = [addresses[at] for at in self._positions]
        self._same = same_layouts([results[at] for at in self._positions])
        self._shared = [group for group in sharing.values() if len(group) > 1]
        together: defaultdict[object, list[int]] = defaultdict(list)
        for at in (group[0] for group in sharing.values() if len(group) == 1):
            out = results[at]
            together[(out.device, out.dtype) if _is_simple(out) else at].append(at)
        self._alone, groups = list[int](), list[list[int]]()
        for group in together.values():
            if len(group) == 1 or (len(group) == 2 and any(results[at].nbytes > SMALL for at in group)):
                self._alone += group
            else:
                groups.append(group)
        self._together = [
            (
                results[group[0]].device,
                group,
                [(tuple(out.size()), out.stride(), out.dtype) for out in (results[at] for at in group)],
            )
            for group in groups
        ]

    def copies(self, results: Outputs, *, moved: bool = False) -> list[Any] | None:
        """Return `results` with copies, or None if they are not those that the plan was made for.

        They may be `moved` where code other than the graph's orders them.
        """
        originals = [results[at] for at in self._positions]
        if not self._same.check(*originals) or (moved and [*map(_address, originals)] != self._addresses):
            return None
        copies = list(results)
        if not any(map(_requires_grad, originals)):
            self._copy_in(copies)
        elif self._shared:
            return None
        else:
            for at in self._positions:
                copies[at] = results[at].clone()
            _keeping(copies, results)
        return copies

    def _copy_in(self, results: list[Any]) -> None:
        for at in self._alone:
            results[at] = results[at].clone()
        for group in self._shared:
            storage = results[group[0]].untyped_storage().clone()
            for at in group:
                results[at] = in_storage(storage, results[at])
        for device, group, layouts in self._together:
            copies = empty_each(device, layouts)
            copy_each(copies, [results[at] for at in group])
            for at, copy in zip(group, copies, strict=True):
                results[at] = copy


def _is_simple(out: torch.Tensor) -> bool:
    """Return whether a copy has the strides of `out`, and is small enough to be copied together with others."""
    plain = not out.is_conj() and not out.is_neg() and not out.requires_grad
    return plain and out.nbytes < LARGE and torch.empty_like(out).stride() == out.stride()


def _copied(results: Outputs, addresses: Sequence[int | None], wanted: Container[int]) -> list[Any]:
    """Return `results` with copies of those whose address is in `wanted` or cannot be read."""
    copies: dict[int, torch.UntypedStorage] = {}

    def copied(out: Any, address: int | None) -> Any:
        if address is None:
            return out.clone() if _is_opaque(out) else out
        if address not in wanted:
            return out
        if out.requires_grad or addresses.count(address) == 1:
            return out.clone()
        if address not in copies:
            copies[address] = out.untyped_storage().clone()
        return in_storage(copies[address], out)

    return _keeping([copied(out, address) for out, address in zip(results, addresses, strict=True)], results)


def _keeping(copies: list[Any], results: Outputs) -> list[Any]:
    """Return `copies`; the autograd node of each keeps all copied results alive.

    CUDA-graph trees may replay a graph once its outputs are freed, even if its backward pass is pending: the next call
    then overwrote what this call had saved, and gradients were silently wrong. Outputs that are freed before their
    backward pass has ended are no better: where two calls precede a backward pass, trees refuse to record it, since
    they find memory that they do not track (torch 2.11).
    """
    originals = [out for out, copy in zip(results, copies, strict=True) if copy is not out]
    for out, copy in zip(results, copies, strict=True):
        if copy is not out and copy.grad_fn is not None:
            copy.grad_fn.metadata[ORIGINALS] = originals
    return copies


def _is_opaque(out: object) -> bool:
    # A wrapper subclass (DTensor, quantized) has no memory of its own.
    return isinstance(out, torch.Tensor) and is_traceable_wrapper_subclass(out)


def _address(out: object) -> int | None:
    if not isinstance(out, torch.Tensor) or out.layout != torch.strided or _is_opaque(out):
        return None
    return out.untyped_storage().data_ptr()
