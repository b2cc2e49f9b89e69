"""kind="aoti": an ahead-of-time package, which runs without dynamo and without generated Python code."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from backend_kwargs.compiled.running import Built, entry
from backend_kwargs.compiled.samples import Sample
from backend_kwargs.compilers.inductor.compiler import OWN
from backend_kwargs.errors import BackendKwargsError, error_text, warn_once

PACKAGE = "model.pt2"
UNTRIED = (
    "Ahead-of-time packages on CUDA are not verified: torch 2.11 crashed when it loaded one. "
    "Save your work first, or use kind='inductor'."
)


class _Entry(torch.nn.Module):
    """The module with autocast and the casts of its outputs, as torch.compile would get it."""

    def __init__(self, module: torch.nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self.module, *args, **kwargs)


def compile_package(built: Built, module: torch.nn.Module, sample: Sample) -> Path:
    """Export `module` on the sample and compile it; return the package's path."""
    if built.device.type == "cuda":
        warn_once(UNTRIED)
    call = entry(built.config, built.device, built.output_dtypes, type(module).__name__)
    options = {name: value for name, value in built.config.resolved.options.items() if name not in OWN}
    if options.pop("triton.cudagraphs", False):
        built.notes.append("CUDA graphs: an ahead-of-time package records none")
    path = built.folder / PACKAGE
    try:
        program = torch.export.export(
            _Entry(module, call), sample.args, sample.kwargs, dynamic_shapes=_dynamic_shapes(built, sample)
        )
        with torch.no_grad():
            made = torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)
    except Exception as error:
        raise BackendKwargsError(f"The module cannot be compiled ahead of time: {error_text(error)}.") from error
    return Path(made)


def _dynamic_shapes(built: Built, sample: Sample) -> Any:
    """Return which sizes of each argument may vary: those that differ between samples; all sizes of a single sample."""
    if not built.dynamic:
        return None
    each = [pytree.tree_leaves(metadata, is_leaf=_is_tensor) for metadata in built.samples]
    sizes = [[leaf["tensor"][0] for leaf in leaves if _is_tensor(leaf)] for leaves in each]
    tensors = iter(zip(*sizes, strict=True))
    auto = torch.export.Dim.AUTO

    def varied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return None
        shapes = next(tensors)
        return {at: auto for at in range(leaf.ndim) if len(shapes) == 1 or len({shape[at] for shape in shapes}) > 1}

    return {
        "args": pytree.tree_map(varied, sample.args),
        "kwargs": pytree.tree_map(varied, sample.kwargs),
    }


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and len(value) == 1 and "tensor" in value
