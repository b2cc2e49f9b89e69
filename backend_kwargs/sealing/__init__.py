"""`seal`: compile, call and check a function ahead of service, so that nothing compiles while it serves.

`declared` is what a user declares: names of sizes, their values, buckets. `calls` are those of what can be sealed,
`warming` compiles, calls and checks them ahead; its `Sealed` serves the calls.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from backend_kwargs.errors import wrong_value
from backend_kwargs.progress import progress
from backend_kwargs.sealing.declared import Declared

if TYPE_CHECKING:
    from backend_kwargs.sealing.warming import Sealed

ON_MISS = ("eager", "raise")


def seal(
    compiled: object,
    example_inputs: object = None,
    *,
    dims: Mapping[str, Mapping[int, str]] | None = None,
    sizes: Mapping[str, int | Iterable[int]] | None = None,
    buckets: Mapping[str, Iterable[int]] | None = None,
    fill: Mapping[str, float] | None = None,
    on_miss: str = "eager",
    check: bool = True,
    tol: float | None = None,
) -> "Sealed":
    """Compile, call and check a compiled function for all declared sizes, and return a callable that compiles nothing.

    A call that was not declared (another size, dtype, device or mode; a guard that fails) runs in eager, is counted,
    and is logged once. Other compiled functions still compile. Gradient mode, autocast and the like are declared by the
    state in which `seal` is called; with gradients, backward passes are compiled ahead too.

    Args:
        compiled: what torch.compile returned, a module after `.compile()`, or a CompiledModule that is ready.
        example_inputs: the arguments of one call: a tensor, a tuple, a dict of keywords, or (args, kwargs), with as
            keywords what is one in service. None: the sample of a CompiledModule.
        dims: names of the sizes that vary, by input and dimension: {"x": {0: "batch", 1: "sequence"}}. Tensors in
            dicts, lists and tuples are called "x.key" and "x.0".
        sizes: the values of each name. A list gets code for each size, a range code for any of them.
        buckets: sizes to which inputs may be padded: {"sequence": [64, 128]}. Results are cut to the size again, and a
            model whose results change by that is refused.
        fill: the values to pad with, by input; 0 where none is given.
        on_miss: "eager", or "raise" an error instead.
        check: whether results are compared with eager's, and padding is tried on values that the example does not have.
        tol: the largest relative error, a root mean square; None: 1e-3, in half precision and autocast 3e-2.

    Raises:
        BackendKwargsError: wrong arguments; results that differ; sizes for which no code can be kept.

    """
    if on_miss not in ON_MISS:
        raise wrong_value("seal's `on_miss`", "'eager' or 'raise'", on_miss)
    if tol is not None and not (isinstance(tol, int | float) and tol > 0):
        raise wrong_value("seal's `tol`", "a positive number or None", tol)
    declared = Declared.read(dims, sizes, buckets, fill)
    from backend_kwargs.sealing.calls import example_of, target_of
    from backend_kwargs.sealing.warming import warmed

    target = target_of(compiled)
    example = example_of(compiled, example_inputs)
    with progress("seal", "compiling") as tell:
        return warmed(target, declared, example, tell, on_miss=on_miss, check=check, tol=tol)
