"""Where torch's compilers put the random generators of torch back, for all threads."""

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch._dynamo import utils

from backend_kwargs.torch_internals.guards import compile_id
from backend_kwargs.torch_internals.replacing import replaced, undone

USERS = ("_dynamo.utils", "_functorch.aot_autograd", "_inductor.select_algorithm", "_inductor.codegen.triton")
_preserve_rng_state = utils.preserve_rng_state
_thread = threading.local()


@contextmanager
def left_to_dynamo() -> Iterator[None]:
    """Let compiles in this thread not put the generators back, since dynamo does so when its own compile ends.

    Otherwise other threads would draw again in each compile what they drew in the last one.
    """
    with undone() as stack:
        if compile_id() is not None:
            stack.enter_context(replaced(_thread, "in_dynamos", True))
            for module in filter(None, (sys.modules.get(f"torch.{name}") for name in USERS)):
                stack.enter_context(replaced(module, "preserve_rng_state", _preserved))
        yield


def _preserved() -> AbstractContextManager[None]:
    # What is imported meanwhile keeps this function.
    return nullcontext() if getattr(_thread, "in_dynamos", False) else _preserve_rng_state()
