"""The compiled graph that serves in a lower precision: its error is measured where it is compiled and for new sizes."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._guards import tracing
from torch.fx import GraphModule

from backend_kwargs.compilers.graphs import copy_of_graph
from backend_kwargs.compilers.precision.bounds import UnfitPrecisionError, Used
from backend_kwargs.compilers.precision.error import measured_error
from backend_kwargs.errors import warn_once

_lock = Lock()  # a measurement seeds the random generators, and restores them


def backward_at_once() -> AbstractContextManager[None]:
    """Let AOTAutograd compile backward graphs with their forward ones, since both are measured.

    Compiled by the first backward pass, one would wait in autograd's thread for the lock that this thread holds.
    """
    if not torch.is_grad_enabled():
        return nullcontext()
    return functorch_config.patch(force_non_lazy_backward_lowering=True)  # type: ignore[no-any-return]


def serving(
    gm: GraphModule, example_inputs: Sequence[Any], compiled: Callable[..., Any], used: Used
) -> Callable[..., Any]:
    """Return `compiled`, measured on these inputs, and note its error in `used`.

    If sizes of `gm` are dynamic, the result measures again at the first call in each bucket of sizes, and runs `gm` in
    eager where the error exceeds the bound. Raise UnfitPrecisionError if it exceeds the bound here.
    """
    if used.max_error is None:
        return compiled
    with tracing(None):  # as in the user's calls: dynamo's context is that of a compile
        if why := _why_beyond(gm, example_inputs, compiled, used):
            raise UnfitPrecisionError(why)
    sizes = [at for at, value in enumerate(example_inputs) if isinstance(value, torch.SymInt)]
    if not sizes:  # a new size compiles again
        return compiled
    kept = copy_of_graph(gm)
    for node in kept.graph.nodes:
        node.meta.pop("grapharg", None)  # it would keep the inputs of this call alive
    given = [example_inputs[at].node.hint for at in sizes]
    return _in_buckets(kept, compiled, sizes, {_bucket(given): compiled}, used)


def _in_buckets(
    gm: GraphModule,
    compiled: Callable[..., Any],
    sizes: Sequence[int],
    known: dict[tuple[int, ...], Callable[..., Any]],
    used: Used,
) -> Callable[..., Any]:
    def decided(given: list[int], inputs: Sequence[Any]) -> Callable[..., Any]:
        with _lock:
            if (found := known.get(_bucket(given))) is None:
                found = compiled
                if why := _why_beyond(gm, inputs, compiled, used):
                    what = f"sizes {_ranges(given)}"
                    used.refused[what] = why
                    warn_once(f"A graph runs in eager for {what}, without precision {used.precision!r}: {why}.")
                    found = gm.forward
                known[_bucket(given)] = found
            return found

    # A wrapper in the hot path: dynamo does not compile again for a new size of a dynamic dimension.
    @functools.wraps(compiled)
    def call(*inputs: Any) -> Any:
        given = [inputs[at] for at in sizes]
        return (known.get(_bucket(given)) or decided(given, inputs))(*inputs)

    call.__dict__.pop("serialize", None)  # aot_compile() would save it without the measurements
    return call


def _bucket(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the bucket of some sizes: each is 0, 1, or between a power of two and the next."""
    return tuple(map(int.bit_length, sizes))


def _ranges(sizes: Sequence[int]) -> str:
    bits = [abs(size).bit_length() for size in sizes]
    return ", ".join(f"{1 << (each - 1)} to {(1 << each) - 1}" if each > 1 else f"{each}" for each in bits)


def _why_beyond(gm: GraphModule, inputs: Sequence[Any], compiled: Callable[..., Any], used: Used) -> str:
    """Measure the error on `inputs`, and return why the precision is not used for them, or ""."""
    assert used.max_error is not None
    accuracy = measured_error(gm, compiled, inputs, used.max_error)
    if not accuracy.passed:
        return accuracy.reason
    used.error = max(used.error or 0.0, accuracy.error or 0.0)
    return ""
