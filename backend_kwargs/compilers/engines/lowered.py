"""A graph on an engine in a lower precision: its error is measured, and beyond the bound it is compiled in float32."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from backend_kwargs.compilers.fell_back import ENGINE_SUMMARY, left_to_eager
from backend_kwargs.compilers.graphs import copy_of_graph
from backend_kwargs.compilers.precision.bounds import Used, is_measured_elsewhere, note_used
from backend_kwargs.compilers.precision.error import measured_error
from backend_kwargs.errors import warn_once

CompileGm = Callable[[GraphModule], Callable[..., Any]]


def compile_lowered(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    precision: str,
    max_error: float | None,
    compile_gm: CompileGm,
    compile_in_float32: CompileGm,
) -> Callable[..., Any]:
    """Return `compile_gm` of a copy of `gm` if its error is within the bound, else `compile_in_float32` of `gm`.

    Without a bound the caller, a race or a comparison, measures the error.
    """
    note_used(None)
    if is_measured_elsewhere():
        max_error = None
    compiled = compile_gm(copy_of_graph(gm))
    if why := left_to_eager(compiled):
        note_used(Used(precision, None, max_error, reason=why))
        return compiled
    # The engine may compute in another precision than it was asked for, without an error.
    why, error = "; ".join(getattr(compiled, ENGINE_SUMMARY).notes), None
    if not why and max_error is not None:
        accuracy = measured_error(gm, compiled, example_inputs, max_error)
        if failed := left_to_eager(compiled):  # at that call
            note_used(Used(precision, None, max_error, reason=failed))
            return compiled
        why, error = "" if accuracy.passed else accuracy.reason, accuracy.error
    if why:
        warn_once(f"A graph is compiled without precision {precision!r}: {why}.")
        note_used(Used(precision, None, max_error, reason=why))
        return compile_in_float32(gm)
    note_used(Used(precision, error, max_error))
    return compiled
