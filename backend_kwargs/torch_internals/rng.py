"""Where torch's compilers put the random generators of torch back, for all threads."""

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch._dynamo import utils

from backend_kwargs.torch_internals.dynamo import compile_id
from backend_kwargs.torch_internals.replacing import replaced, undone

# Of torch, compiling or recording CUDA graphs.
INDUCTORS = ("select_algorithm", "codegen.triton", "cudagraph_trees")
USERS = ("_dynamo.utils", "_functorch.aot_autograd", *(f"_inductor.{name}" for name in INDUCTORS))
_preserve_rng_state = utils.preserve_rng_state
_threads: dict[int, bool] = {}  # those that leave the generators to dynamo


@contextmanager
def left_to_dynamo() -> Iterator[None]:
    """Keep compiles and recordings in this thread from putting the generators back: dynamo does so at its own end.

    The same holds in backward passes, which run in autograd's threads. Otherwise other threads would draw the same
    numbers again after each of them.
    """
    with undone() as stack:
        if compile_id() is not None:
            stack.enter_context(replaced(_threads, threading.get_ident(), True))
            for module in filter(None, (sys.modules.get(f"torch.{name}") for name in USERS)):
                stack.enter_context(replaced(module, "preserve_rng_state", _preserved))
        yield


def _preserved() -> AbstractContextManager[None]:
    # What is imported meanwhile keeps this function.
    backward = bool(_threads) and torch._C._current_graph_task_id() >= 0
    return nullcontext() if backward or threading.get_ident() in _threads else _preserve_rng_state()
