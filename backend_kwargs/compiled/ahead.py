"""`kind="aoti"`: an ahead-of-time package, which runs without dynamo and without generated Python code."""

import inspect
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from backend_kwargs.compiled.running import Built, entry
from backend_kwargs.compiled.samples import Sample, shapes_of
from backend_kwargs.compilers.inductor.compiler import OWN
from backend_kwargs.errors import BackendKwargsError, error_text
from backend_kwargs.measure.failures import without_compiler
from backend_kwargs.requirements import check_answers, cxx_of

PACKAGE = "model.pt2"
LOAD = "import sys, torch; torch._inductor.aoti_load_package(sys.argv[1])"


class _Entry(torch.nn.Module):
    """The module with autocast and the casts of its outputs, as under torch.compile."""

    def __init__(self, module: torch.nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module

        def forward(*args: Any, **kwargs: Any) -> Any:
            return call(module, *args, **kwargs)

        # torch.export does not find the dynamic sizes of arguments that it sees as **kwargs.
        forward.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]
        self.forward = forward


def compile_package(built: Built, module: torch.nn.Module, sample: Sample) -> Path:
    """Export `module` on the sample and compile it; return the package's path."""
    call = entry(built.config, built.device, built.output_dtypes, type(module).__name__)
    options = {name: value for name, value in built.config.resolved.options.items() if name not in OWN}
    if options.pop("triton.cudagraphs", False):
        built.notes.append("CUDA graphs: an ahead-of-time package does not record any")
    path = built.folder / PACKAGE
    if built.device.type == "cpu":
        check_answers(cxx_of(options))
    try:
        program = torch.export.export(
            _Entry(module, call), sample.args, sample.kwargs, dynamic_shapes=_dynamic_shapes(built, module, sample)
        )
        with torch.no_grad():
            made = torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)
    except Exception as error:
        message = f"The module cannot be compiled ahead of time: {error_text(error)}."
        raise without_compiler(error) or BackendKwargsError(message) from error
    if built.device.type == "cuda":
        load_elsewhere(Path(made))
    return Path(made)


def load_elsewhere(package: Path) -> None:
    """Load the package in another process, and raise if that process crashes.

    torch's code for CUDA devices uses std::regex. A linker that finds only the static libstdc++ puts a second copy of
    it into the package, and that copy does not know the locale of the first.
    """
    loading = subprocess.run([sys.executable, "-c", LOAD, str(package)], capture_output=True, check=False)
    if loading.returncode < 0:
        raise BackendKwargsError(
            f"The ahead-of-time package crashes when torch loads it ({signal.Signals(-loading.returncode).name}): a "
            "likely cause is a C++ compiler that links libstdc++ statically; give it libstdc++.so, or use "
            "kind='inductor'."
        )


def _dynamic_shapes(built: Built, module: torch.nn.Module, sample: Sample) -> Any:
    """Return the sizes of each argument that may vary: those that differ between samples, or all of a single sample."""
    if not built.dynamic:
        return None
    tensors = iter(zip(*map(shapes_of, built.samples), strict=True))
    auto = torch.export.Dim.AUTO

    def varied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return None
        shapes = next(tensors)
        return {at: auto for at in range(leaf.ndim) if len(shapes) == 1 or len({shape[at] for shape in shapes}) > 1}

    args, kwargs = pytree.tree_map(varied, tuple(sample))
    return dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
