"""CUDA-graph trees: the managers of a thread, and trees of one's own for a while."""

import ctypes
import gc
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import starmap
from typing import Any

import torch
from torch._inductor import cudagraph_trees
from torch._inductor.cudagraph_trees import CUDAGraphNode, CUDAGraphTreeManager

from backend_kwargs.torch_internals.replacing import replaced, restored_by, undone

CONTAINERS = "tree_manager_containers"
OF_LOCAL = 3  # references: of the thread's variable, of a local one, and of the call that counts
_guards: Any = torch._C._dynamo.guards


def trees_of_thread() -> dict[int, cudagraph_trees.TreeManagerContainer]:
    """Return the containers of this thread's CUDA-graph trees, by device.

    torch 2.11 creates them only for the thread that imports it and for autograd's; CUDA graphs fail in other threads.
    """
    local = cudagraph_trees.local
    if not hasattr(local, CONTAINERS) and not torch._C._is_key_in_tls(CONTAINERS):
        local.tree_manager_containers, local.tree_manager_locks = {}, defaultdict(threading.Lock)
        _give_to_threads_of_autograd(CONTAINERS, local.tree_manager_containers)
        _give_to_threads_of_autograd("tree_manager_locks", local.tree_manager_locks)
    return cudagraph_trees.get_obj(local, CONTAINERS)  # type: ignore[no-any-return]


def _give_to_threads_of_autograd(name: str, value: object) -> None:
    """Let the threads that autograd starts for this one have a value.

    torch 2.11 takes no reference, but gives one back as this thread ends.
    """
    before = sys.getrefcount(value)
    torch._C._stash_obj_in_tls(name, value)
    if sys.getrefcount(value) == before:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def _keep_those_of_the_importing_thread() -> None:
    """Add the references that torch 2.11 lacks where this import was the first of its trees; the thread may end."""
    for name in (CONTAINERS, "tree_manager_locks"):
        value = getattr(cudagraph_trees.local, name, None)
        if value is not None and sys.getrefcount(value) == OF_LOCAL:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


_keep_those_of_the_importing_thread()


def current_raw_stream(device: int) -> int:
    """Return the handle of the device's current stream."""
    return torch._C._cuda_getCurrentRawStream(device)


def empty_each(device: torch.device, layouts: Iterable[tuple[object, ...]]) -> list[torch.Tensor]:
    """Return uninitialized tensors of these sizes, strides and dtypes, by the functions that Inductor's code calls."""
    if device.type == "cpu":
        return [*starmap(_guards._empty_strided_cpu, layouts)]
    with torch.cuda.device(device):  # they allocate on the current device
        return [*starmap(_guards._empty_strided_cuda, layouts)]


def recorded_addresses(node: object) -> set[int]:
    """Return the addresses of all results of a recorded graph and of those before it in its tree.

    A warm-up run has none.
    """
    if not isinstance(node, CUDAGraphNode):
        return set()
    return {ref.data_ptr() for results in node.path_weakrefs for ref in results if ref is not None}


def _container(device: int, generation: Callable[[], int]) -> cudagraph_trees.TreeManagerContainer:
    class OwnTrees(cudagraph_trees.TreeManagerContainer):
        def get_tree_manager(self, *args: Any, **kwargs: Any) -> Any:  # torch 2.15 asks with the size of the pool
            manager: Any = super().get_tree_manager(*args, **kwargs)
            manager.get_curr_generation = generation
            manager.user_invoked_mark_step = lambda: False
            return manager

    return OwnTrees(device)


@contextmanager
def own_trees(devices: Iterable[int]) -> Iterator[Callable[[], None]]:
    """Record CUDA graphs in trees of their own, which are freed with the context; other trees stay unchanged.

    Yields the function that begins a generation. torch's own counters would keep the increments: after one
    `cudagraph_mark_step_begin()` anywhere, each call of a compiled function records again while an earlier result is
    alive.
    """
    generation = 0
    own = {device: _container(device, lambda: generation) for device in devices}

    def begin() -> None:
        nonlocal generation
        generation += 1
        for container in own.values():
            if container.tree_manager:
                # The state after a candidate that failed before its backward pass.
                container.tree_manager.running_forwards_with_pending_backwards = False

    if not own:
        yield begin
        return
    containers = trees_of_thread()
    theirs = dict(containers)

    def put_back() -> None:
        _free([*own.values()])
        torch._C._set_cached_tensors_enabled(any(container.tree_manager for container in theirs.values()))
        # Changed in place, since autograd's threads hold this dict.
        containers.clear()
        containers.update(theirs)
        torch.cuda.empty_cache()

    with undone() as stack:
        restored_by(stack, put_back)
        containers.clear()
        containers.update(own)
        yield begin


def _free(containers: Collection[cudagraph_trees.TreeManagerContainer]) -> None:
    """Free trees and their pools."""
    if not any(each.tree_manager for each in containers):
        return
    gc.collect()  # compiled graphs are reference cycles, which keep their pools alive
    # Not reset_cudagraph_trees(), which would also end the allocator's caching that other models' trees rely on.
    for container in containers:
        if manager := container.tree_manager:
            container.tree_manager = None
            # Other trees may not need it, or be another thread's: it stays enabled, which only costs look-ups.
            torch._C._set_cached_tensors_enabled(True)
            manager.shutdown()


def recordings(compile_id: str, device: int, *, backward: bool) -> tuple[int, bool] | None:
    """Return how often a compiled graph was recorded as a CUDA graph, and whether torch refused since inputs change.

    None if nothing was called on the device. Raise AttributeError where this torch keeps its trees otherwise.
    """
    manager = cudagraph_trees.get_manager(device, create_if_none_exists=False)
    if manager is None:
        return None
    functions = {
        key
        for key, value in manager.id_to_compile_id.items()
        if str(value) == compile_id and (manager.id_to_mode[key].name == "BACKWARD") == backward
    }
    count = sum(node.wrapped_function.id in functions for node in _recorded(manager))
    return count, bool(functions & set(manager.warned_mutation))


def _recorded(manager: CUDAGraphTreeManager) -> Iterator[CUDAGraphNode]:
    """Yield the CUDA graphs recorded in the trees of a manager, none once those were freed, as a reset does."""
    waiting = [] if manager.roots is None else list(manager.get_roots())
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(child for children in node.children.values() for child in children)


@contextmanager
def noting_managers() -> Iterator[set[CUDAGraphTreeManager]]:
    """Yield a set that has, once the context is left, the managers of the trees whose graphs this thread called.

    Code that is called in several threads records in the trees of the one that calls it first, and replays those.
    """
    here, before, called = threading.get_ident(), managers(), set[CUDAGraphTreeManager]()

    def noting(manager: CUDAGraphTreeManager) -> Callable[..., Any]:
        run = manager._run

        def note(*args: Any) -> Any:
            if threading.get_ident() == here:
                called.add(manager)
            return run(*args)

        return note

    with undone() as stack:
        for manager in before:
            stack.enter_context(replaced(manager, "_run", noting(manager)))
        yield called
        called |= managers() - before


def managers() -> set[CUDAGraphTreeManager]:
    """Return the managers of all threads' trees; of another thread's only those that a collection of garbage visits."""
    if not torch.cuda.is_available():
        return set()
    own = {each.tree_manager for each in trees_of_thread().values() if each.tree_manager is not None}
    return own | {each for each in gc.get_objects() if type(each) is CUDAGraphTreeManager}


def recorded_count(of: Iterable[CUDAGraphTreeManager]) -> int:
    """Return how many CUDA graphs are recorded in the trees of these managers."""
    return sum(1 for manager in of for _ in _recorded(manager))
