"""Compile and run candidates without lasting effects on torch's state, the inputs, or the random generators."""

import copy
import gc
import math
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.metrics_context import MetricsContext
from torch._dynamo.utils import _metrics_context_tls, counters, get_metrics_context
from torch._functorch import config as functorch_config
from torch._guards import GuardsContext, TracingContext, tracing
from torch.compiler._cache import CacheArtifactManager
from torch.fx import GraphModule

from backend_kwargs.auto.deadline import restored_by
from backend_kwargs.graphs.replay import cuda_devices, unpacked

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

LIBDEVICE = "TRITON_LIBDEVICE_PATH"


@contextmanager
def sandboxed(gm: GraphModule) -> Iterator[Callable[[], None]]:
    """Restore what compiling and running other versions of `gm` changes in torch.

    That is AOTAutograd's entries in the tracing context, guards, the shape environment, random generators, and the
    CUDA-graph trees: candidates have trees of their own, and other models' trees stay unchanged. Yields the function to
    call before each call of a candidate, in place of dynamo's.
    """
    context = TracingContext.try_get()
    fake_mode = context.fake_mode if context else None
    devices = cuda_devices()
    with ExitStack() as stack, stack:  # entered twice: the outer exit completes the undoing if a Ctrl-C stops the inner
        _keep_garbage(stack)
        # Otherwise torch.compiler.save_cache_artifacts() would save the losers' artifacts.
        stack.enter_context(CacheArtifactManager.with_fresh_cache())
        # dynamo records metrics of one compile at a time; a backward graph compiled in a candidate's run would be a
        # second.
        stack.callback(setattr, _metrics_context_tls, "metrics_context", get_metrics_context())
        _metrics_context_tls.metrics_context = MetricsContext(on_exit=lambda *_: None)
        stack.enter_context(unpacked())
        # Compiled lazily, a backward graph would wait in autograd's thread for the lock that this thread holds.
        stack.enter_context(functorch_config.patch(force_non_lazy_backward_lowering=True))
        _keep_shape_env(stack, getattr(fake_mode, "shape_env", None))
        stack.enter_context(tracing(_twin(context)) if context else nullcontext())
        stack.enter_context(torch.random.fork_rng(devices=devices))
        # DDPOptimizer reads this counter to see whether AOTAutograd compiled a bucket.
        stack.callback(counters["aot_autograd"].__setitem__, "total", counters["aot_autograd"]["total"])
        stack.callback(random.setstate, random.getstate())
        if numpy := sys.modules.get("numpy"):
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        yield _own_cudagraph_trees(stack, devices) if devices else lambda: None


def _keep_garbage(stack: ExitStack) -> None:
    """Keep the collector from visiting the objects that exist now, until `stack` is left."""
    # Collecting losers would visit every object of the process, a quarter of a second or more: freeze these first.
    if gc.get_freeze_count():  # the user's own freeze, which unfreeze() would undo
        return
    gc.collect()
    count = math.inf

    def unfreeze() -> None:
        if gc.get_freeze_count() <= count:  # otherwise another thread froze objects meanwhile, for instance to fork
            gc.unfreeze()

    restored_by(stack, unfreeze)
    gc.freeze()
    count = gc.get_freeze_count()


@contextmanager
def own_libdevice() -> Iterator[None]:
    """Restore Triton's choice of math library: Inductor changes it for good for a graph with eager's rounding."""
    with ExitStack() as stack, stack:
        if LIBDEVICE not in os.environ:
            restored_by(stack, _forget_libdevice)
        yield


def _forget_libdevice() -> None:
    """Let Triton choose its math library anew."""
    if os.environ.pop(LIBDEVICE, None) is not None:
        from triton import knobs  # type: ignore[import-untyped]

        vars(knobs.nvidia).pop("libdevice_path", None)


def _twin(context: TracingContext) -> TracingContext:
    """Return a copy of dynamo's context for candidates."""
    # It maps the same inputs to the same fakes, while AOTAutograd's entries and guards are its own.
    twin = copy.copy(context)
    twin.guards_context = GuardsContext()
    twin.fakify_first_call = False  # as DDPOptimizer sets for a graph it compiles again
    return twin


def _keep_shape_env(stack: ExitStack, shape_env: "ShapeEnv | None") -> None:
    """Put back the symbols, their hints and guards when `stack` is left."""
    if shape_env is None:
        return
    plain = {name: value for name, value in vars(shape_env).items() if isinstance(value, dict | list | set | int)}
    before = {name: copy.copy(value) for name, value in plain.items()}

    def put_back() -> None:
        # Its caches belong to one version: a simplification under a loser's guards must not be found again.
        vars(shape_env).update({**before, "_version_counter": shape_env._version_counter + 1})

    restored_by(stack, put_back)


def _own_cudagraph_trees(stack: ExitStack, devices: Iterable[int]) -> Callable[[], None]:
    """Let candidates record CUDA graphs in trees of their own, with generations counted here.

    Returns the function that begins a generation. torch's own counters would keep a race's increments: after one
    `cudagraph_mark_step_begin()` anywhere, each call of a compiled function records again while an earlier result is
    alive.
    """
    from torch._inductor import cudagraph_trees

    from backend_kwargs.backends.inductor.cudagraph_outputs import trees_of_thread

    generation = 0

    class OwnTrees(cudagraph_trees.TreeManagerContainer):
        def get_tree_manager(self) -> Any:
            manager: Any = super().get_tree_manager()
            manager.get_curr_generation = lambda: generation
            manager.user_invoked_mark_step = lambda: False
            return manager

    containers = trees_of_thread()
    others, own = dict(containers), {device: OwnTrees(device) for device in devices}

    def put_back() -> None:
        gc.collect()  # compiled graphs are reference cycles, which keep their pools alive
        # Not reset_cudagraph_trees(), which would also end the allocator's caching that other models' trees rely on.
        for container in own.values():
            if manager := container.tree_manager:
                container.tree_manager = None
                manager.shutdown()
        torch._C._set_cached_tensors_enabled(any(container.tree_manager for container in others.values()))
        # Changed in place, since autograd's threads hold this dict.
        containers.clear()
        containers.update(others)
        torch.cuda.empty_cache()

    def begin() -> None:
        nonlocal generation
        generation += 1
        for container in own.values():
            if container.tree_manager:
                # The state after a candidate that failed before its backward pass.
                container.tree_manager.running_forwards_with_pending_backwards = False

    restored_by(stack, put_back)
    containers.clear()
    containers.update(own)
    return begin
