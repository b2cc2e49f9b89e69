"""`kind="aoti"`: an ahead-of-time package, which runs without dynamo and without generated Python code."""

import hashlib
import inspect
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from backend_kwargs.bundles.identity.walk import identity_of
from backend_kwargs.bundles.packages.exported import Exported, HiddenReads, with_buffers
from backend_kwargs.bundles.packages.package import Package
from backend_kwargs.bundles.running import Built, entry
from backend_kwargs.bundles.samples import Sample, shapes_of
from backend_kwargs.errors import BackendKwargsError, error_text
from backend_kwargs.facts import Call
from backend_kwargs.measure.failures import without_compiler
from backend_kwargs.options.layers import Options
from backend_kwargs.options.requirements import check_answers, cxx_of
from backend_kwargs.pipeline import OWN
from backend_kwargs.torch_internals import pytree
from backend_kwargs.torch_internals.inductor_code import LOAD_PACKAGE, compile_ahead, load_package

# Weights stay inputs of the code, also small ones, which Inductor would write into it.
ALWAYS = {"always_keep_tensor_constants": True}


class _Entry(torch.nn.Module):
    """The module with autocast and the casts of its outputs, as under torch.compile."""

    def __init__(self, module: torch.nn.Module, call: Call) -> None:
        super().__init__()
        self.module = module
        self.hidden = HiddenReads()

        def forward(*args: object, **kwargs: object) -> object:
            with self.hidden:
                return call(module, *args, **kwargs)

        # torch.export does not find the dynamic sizes of arguments that it sees as **kwargs.
        forward.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]
        self.forward = forward


def export_module(built: Built, module: torch.nn.Module, sample: Sample) -> Exported:
    """Export `module` on the sample, without compiling it."""
    call = entry(built.config, built.device, built.output_dtypes, type(module).__name__)
    identity = identity_of(built.module) or ""
    with _errors():
        traced = _Entry(with_buffers(module), call)
        dynamic_shapes = _dynamic_shapes(built, module, sample)
        program = torch.export.export(traced, sample.args, sample.kwargs, dynamic_shapes=dynamic_shapes)
        traced.hidden.refuse(traced.module)
        return Exported(program, module, identity)


def compile_package(built: Built, exported: Exported) -> Package:
    """Compile an exported module; return the package, whose file is named by its hash."""
    options = {name: value for name, value in built.config.resolved.options.items() if name not in OWN} | ALWAYS
    if options.pop("triton.cudagraphs", False):
        built.notes.append("CUDA graphs: an ahead-of-time package does not record any")
    if built.device.type == "cpu":
        check_answers(cxx_of(options))
    compiled = partial(_compiled, exported.program, options=options, on=built.device)
    # Not at its final name, where another build with the same folder could meet it.
    with tempfile.TemporaryDirectory(dir=built.folder, prefix=".build_") as folder, _errors():
        file, constants = compiled(Path(folder), embedded=exported.contains_constants)
        if not exported.contains_constants and not constants <= exported.targets:
            file, constants = compiled(Path(folder), embedded=True)
        with file.open("rb") as content:
            sha256 = hashlib.file_digest(content, "sha256").hexdigest()
        # After compiling, since Inductor adds conditions on sizes.
        package = Package(built.folder / f"{sha256}.pt2", sha256, exported.guards(constants))
        file.replace(package.path)
    return package


@contextmanager
def _errors() -> Iterator[None]:
    """Raise errors of torch.export and Inductor as one line."""
    try:
        yield
    except BackendKwargsError:
        raise
    except Exception as error:
        message = f"The module cannot be compiled ahead of time: {error_text(error)}."
        raise without_compiler(error) or BackendKwargsError(message) from error


def _compiled(
    program: torch.export.ExportedProgram, folder: Path, *, options: Options, on: torch.device, embedded: bool
) -> tuple[Path, set[str]]:
    """Return a package, and the names of the tensors that it reads; it contains their values if `embedded`."""
    configs = {**options, "aot_inductor.package_constants_in_so": embedded}
    with torch.no_grad():
        file = compile_ahead(program, folder / f"{embedded}.pt2", configs)
    if on.type == "cuda":
        load_elsewhere(file)
    return file, set(load_package(file).get_constant_fqns())


def load_elsewhere(package: Path) -> None:
    """Load the package in another process, and raise if that process crashes.

    torch's code for CUDA devices uses std::regex. A linker that finds only the static libstdc++ puts a second copy of
    it into the package, and that copy does not know the locale of the first.
    """
    loading = subprocess.run([sys.executable, "-c", LOAD_PACKAGE, str(package)], capture_output=True, check=False)
    if loading.returncode < 0:
        raise BackendKwargsError(
            f"The ahead-of-time package crashes when torch loads it ({signal.Signals(-loading.returncode).name}): a "
            "likely cause is a C++ compiler that links libstdc++ statically; give it libstdc++.so, or use "
            "kind='inductor'."
        )


def _dynamic_shapes(built: Built, module: torch.nn.Module, sample: Sample) -> dict[str, object] | None:
    """Return the sizes of each argument that may vary: those that differ between samples, or all of a single sample."""
    if not built.dynamic:
        return None
    tensors = iter(zip(*map(shapes_of, built.samples), strict=True))
    auto = torch.export.Dim.AUTO

    def varied(leaf: object) -> dict[int, object] | None:
        if not isinstance(leaf, torch.Tensor):
            return None
        shapes = next(tensors)
        return {at: auto for at in range(leaf.ndim) if len(shapes) == 1 or len({shape[at] for shape in shapes}) > 1}

    args, kwargs = pytree.tree_map(varied, tuple(sample))
    return dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
