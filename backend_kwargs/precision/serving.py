"""The compiled graph that serves in a lower precision: its error is measured where it is compiled and for new sizes."""

import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from threading import Lock
from typing import Any

import torch
from torch.fx import GraphModule

from backend_kwargs.backends import Inputs
from backend_kwargs.errors import warn_once
from backend_kwargs.facts import Call, Compiled, PrecisionUse
from backend_kwargs.graphs.writes import copy_of_graph
from backend_kwargs.precision.error import Truth
from backend_kwargs.precision.errors import UnfitPrecisionError, UnmeasuredError
from backend_kwargs.torch_internals import functorch
from backend_kwargs.torch_internals.guards import tracing

Compile = Callable[[Collection[int]], Compiled]
_lock = Lock()  # a measurement seeds the random generators, and restores them


def serving(gm: GraphModule, example_inputs: Inputs, used: PrecisionUse, compile_copy: Compile) -> Compiled:
    """Return what `compile_copy` makes of a copy of `gm`, measured on these inputs; note its error in `used`.

    It is called with the positions of the inputs that must stay inputs, also where others become constants: a
    measurement calls the graph with copies of what it writes, and frozen code would write to the user's own memory.

    If sizes of `gm` are dynamic, the result measures again at the first call in each bucket of sizes, and runs `gm` in
    eager where the error exceeds the bound. If it cannot be measured, the call runs in eager, and the next one
    measures again. Raise UnfitPrecisionError if the error exceeds the bound here.
    """
    if used.max_error is None:
        return compile_copy(())
    with tracing(None):  # as in the user's calls: dynamo's context is that of a compile
        truth = Truth.of(gm, example_inputs)
    # Compiled by the first backward pass, a backward graph would wait in autograd's thread for this thread's lock.
    with functorch.patched(force_non_lazy_backward_lowering=True) if truth.task.training else nullcontext():
        compiled = compile_copy(truth.task.inputs.written)
    with tracing(None):
        used.error = truth.error_of(compiled.call, used.max_error)
    sizes = [at for at, value in enumerate(example_inputs) if isinstance(value, torch.SymInt)]
    if not sizes:  # a new size compiles again
        return compiled
    kept = copy_of_graph(gm)
    given = [example_inputs[at].node.hint for at in sizes]
    return compiled.called_by(_in_buckets(kept, compiled.call, sizes, {_bucket(given): compiled.call}, used))


def _in_buckets(
    gm: GraphModule,
    compiled: Call,
    sizes: Sequence[int],
    known: dict[tuple[int, ...], Call],
    used: PrecisionUse,
) -> Call:
    def decided(given: list[int], inputs: Inputs) -> Call:
        with _lock:
            if (found := known.get(_bucket(given))) is None:
                what = f"sizes {_ranges(given)}"
                try:
                    error = Truth.of(gm, inputs).error_of(compiled, used.max_error or 0.0)
                    found, used.error = compiled, max(used.error or 0.0, error)
                    used.refused.pop(what, None)
                except UnfitPrecisionError as unfit:
                    found = gm.forward
                    used.refused[what] = str(unfit)
                    warn_once(f"A graph runs in eager for {what}, without precision {used.precision!r}: {unfit}.")
                    if isinstance(unfit, UnmeasuredError):
                        return found
                known[_bucket(given)] = found
            return found

    # A wrapper in the hot path: dynamo does not compile again for a new size of a dynamic dimension. A guard on buckets
    # would, and dynamo stops after eight.
    @functools.wraps(compiled)
    def call(*inputs: Any) -> object:
        found = known.get(tuple([inputs[at].bit_length() for at in sizes]))
        return (found or decided([inputs[at] for at in sizes], inputs))(*inputs)

    call.__dict__.pop("serialize", None)  # aot_compile() would save it without the measurements
    return call


def _bucket(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the bucket of some sizes: each is 0, 1, or between a power of two and the next."""
    return tuple(map(int.bit_length, sizes))


def _ranges(sizes: Sequence[int]) -> str:
    bits = [abs(size).bit_length() for size in sizes]
    return ", ".join(f"{1 << (each - 1)} to {(1 << each) - 1}" if each > 1 else f"{each}" for each in bits)
