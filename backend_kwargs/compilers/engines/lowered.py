"""A graph on an engine in a lower precision: its error is measured, and beyond the bound it is compiled in float32."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from backend_kwargs.compilers.fell_back import ENGINE_SUMMARY, left_to_eager
from backend_kwargs.compilers.graphs import copy_of_graph
from backend_kwargs.compilers.precision.bounds import UnfitPrecisionError, Used, is_measured_elsewhere, note_used
from backend_kwargs.compilers.precision.serving import serving
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
    used = Used(precision, None, None if is_measured_elsewhere() else max_error)
    note_used(used)
    compiled = compile_gm(copy_of_graph(gm))
    if why := left_to_eager(compiled):
        used.reason = why
        return compiled
    # The engine may compute in another precision than it was asked for, without an error.
    if not (why := "; ".join(getattr(compiled, ENGINE_SUMMARY).notes)):
        try:
            return serving(gm, example_inputs, compiled, used)
        except UnfitPrecisionError as unfit:
            why = str(unfit)
    warn_once(f"A graph is compiled without precision {precision!r}: {why}.")
    used.reason = why
    return compile_in_float32(gm)
