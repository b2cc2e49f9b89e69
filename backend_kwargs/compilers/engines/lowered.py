"""A graph on an engine in a lower precision: its error is measured, and beyond the bound it is compiled in float32."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch.fx import GraphModule

from backend_kwargs.compilers.fell_back import left_to_eager, summary_of
from backend_kwargs.compilers.graphs import copy_of_graph, keep_inputs
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
    made: list[Callable[..., Any]] = []

    def compile_copy(written: Collection[int]) -> Callable[..., Any]:
        copied = copy_of_graph(gm)
        placeholders = copied.graph.find_nodes(op="placeholder")
        keep_inputs(placeholders[at] for at in written)
        compiled = compile_gm(copied)
        made.append(compiled)
        used.reason = left_to_eager(compiled)
        # The engine may compute in another precision than it was asked for, without an error.
        if not used.reason and (summary := summary_of(compiled)) and (notes := summary.notes):
            raise UnfitPrecisionError("; ".join(notes))
        return compiled

    try:
        served = serving(gm, example_inputs, used, compile_copy)
    except UnfitPrecisionError as unfit:
        used.reason = str(unfit)
        warn_once(f"A graph is compiled without precision {precision!r}: {used.reason}.")
        return compile_in_float32(gm)
    used.reason = used.reason or left_to_eager(made[-1])  # a part may have failed at the calls that measure
    return served
