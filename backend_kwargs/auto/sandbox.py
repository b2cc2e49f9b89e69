"""Compile and run candidates without lasting effects on torch's state, the inputs, or the random generators."""

import gc
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.fx import GraphModule

from backend_kwargs.graphs.replay import Task, unpacked
from backend_kwargs.torch_internals import functorch
from backend_kwargs.torch_internals.caches import artifacts_apart
from backend_kwargs.torch_internals.dynamo import TracingApart, bucket_count_kept, metrics_apart
from backend_kwargs.torch_internals.replacing import replaced, restored_by, undone
from backend_kwargs.torch_internals.rng import left_to_dynamo
from backend_kwargs.torch_internals.triton import start_compile_processes
from backend_kwargs.trial.generators import cuda_devices

LIBDEVICE = "TRITON_LIBDEVICE_PATH"


@dataclass(frozen=True)
class Sandbox:
    """Restores what a race changes. `begin` is called before each call of a candidate, in place of dynamo's."""

    stack: ExitStack
    begin: Callable[[], None]

    def keep_generators(self, task: Task) -> None:
        """Put the random generators back at the end if the graph of the race may draw, and otherwise never."""
        self.stack.enter_context(task.generators_kept() if task.inputs.draws else left_to_dynamo())


@contextmanager
def sandboxed(gm: GraphModule, *, collects: bool = True) -> Iterator[Sandbox]:
    """Restore what compiling and running other versions of `gm` changes in torch.

    That is AOTAutograd's entries in the tracing context, guards, the shape environment, and the CUDA-graph trees:
    candidates have trees of their own, and other models' trees stay unchanged. `collects`: losers are collected as
    garbage meanwhile.
    """
    with undone() as stack:
        if collects:
            _keep_garbage(stack)
        showing = partial(_show_once, warnings.showwarning, set[tuple[str, object]]())
        stack.enter_context(replaced(warnings, "showwarning", showing))
        # Otherwise torch.compiler.save_cache_artifacts() would save the losers' artifacts.
        stack.enter_context(artifacts_apart())
        # A backward graph compiled in a candidate's run would be a second compile within dynamo's.
        stack.enter_context(metrics_apart())
        stack.enter_context(unpacked())
        # Compiled lazily, a backward graph would wait in autograd's thread for the lock that this thread holds.
        stack.enter_context(functorch.patched(force_non_lazy_backward_lowering=True))
        stack.enter_context(TracingApart().entered())
        stack.enter_context(bucket_count_kept())
        begin: Callable[[], None] = lambda: None  # noqa: E731
        if devices := cuda_devices():
            start_compile_processes()
            from backend_kwargs.torch_internals.cudagraphs import own_trees

            begin = stack.enter_context(own_trees(devices))
        yield Sandbox(stack, begin)


def _show_once(
    show: Callable[..., None],
    shown: set[tuple[str, object]],
    message: object,
    category: object,
    filename: str,
    *at: Any,
) -> None:
    """Show a warning of a graph's code once: each copy has its own file name, and would warn again."""
    if not filename.startswith("<eval_with_key>") or (str(message), category) not in shown:
        shown.add((str(message), category))
        show(message, category, filename, *at)


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
    with undone() as stack:
        if LIBDEVICE not in os.environ:
            restored_by(stack, _forget_libdevice)
        yield


def _forget_libdevice() -> None:
    """Let Triton choose its math library anew."""
    if os.environ.pop(LIBDEVICE, None) is not None:
        from triton import knobs  # type: ignore[import-untyped]

        vars(knobs.nvidia).pop("libdevice_path", None)
