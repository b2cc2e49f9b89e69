"""Options for a part of a graph: the operations of a decorated function are compiled with options of their own."""

from collections.abc import Callable
from importlib import import_module
from itertools import count
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from backend_kwargs.backend import Backend
from backend_kwargs.backends import Inputs
from backend_kwargs.errors import BackendKwargsError, shown
from backend_kwargs.facts import Call
from backend_kwargs.options.option import Options
from backend_kwargs.pipeline import OWN
from backend_kwargs.registry import make_backend

if TYPE_CHECKING:
    from torch.fx import GraphModule

KEY = "compile_with_inductor"
OWN_REGION = "inductor_region"
# Options that this package handles itself, or that apply only to a whole graph.
WHOLE_GRAPHS_ONLY = (*OWN, "freezing")

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

_regions = count()


def region_options(
    spec: str | Backend, options: Options | None = None, /, **kwargs: object
) -> Callable[[Decorated], Decorated]:
    """Return a decorator for a function or a `forward` whose operations are compiled with these options.

    It takes the arguments of `make_backend` for Inductor, and works with `torch.compile(..., backend=compile_regions)`;
    operations outside of all regions run as in eager. With other backends the decorator has no effect.

    Raises:
        BackendKwargsError: as for `make_backend`; for options of whole graphs; if this torch has no regions.

    """
    backend = make_backend(spec, options, **kwargs)
    if not backend.takes_inductor_options:
        raise BackendKwargsError(f"A region is compiled by Inductor, got {shown(backend.spec)}.")
    if inapt := [name for name in WHOLE_GRAPHS_ONLY if backend.options.get(name)]:
        raise BackendKwargsError(f"Option {inapt[0]!r} is for whole graphs, not for a region.")
    _torch_regions()
    annotate_fn = import_module("torch.fx.traceback").annotate_fn
    region = {"inductor_configs": dict(backend.options), OWN_REGION: f"backend_kwargs_{next(_regions)}"}
    return annotate_fn({KEY: region})  # type: ignore[no-any-return]


def compile_regions(gm: "GraphModule", example_inputs: Inputs) -> Call:
    """Compile each region of `gm` with its `region_options`, and run the rest as in eager; a dynamo backend."""
    from backend_kwargs.torch_internals.functorch import aot_autograd
    from backend_kwargs.torch_internals.regions import compile_marked

    def compile_lowered(gm: "GraphModule", example_inputs: Inputs) -> Call:
        return compile_marked(_torch_regions(), gm)

    return aot_autograd(fw_compiler=compile_lowered, bw_compiler=compile_lowered)(gm, example_inputs)


def _torch_regions() -> ModuleType:
    """Return torch's module for regions, or raise."""
    import torch

    from backend_kwargs.torch_internals.regions import regional_inductor

    # Without the argument for the region's name, adjacent regions are compiled as one, with the options of one.
    if (regional := regional_inductor(OWN_REGION)) is None:
        raise BackendKwargsError(
            f"torch {torch.__version__} has no options for each region; compile the parts by torch.compile of their "
            "own."
        )
    return regional
