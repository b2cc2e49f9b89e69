"""CUTLASS for Inductor: the directory that Inductor expects, built from PyPI's nvidia-cutlass packages.

It consists of links to the installed packages, below the user's cache directory. Each torch from 2.11 to 2.15 reads
`cutlass.cutlass_dir` for CUDA.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock

from backend_kwargs.errors import BackendKwargsError, pip_install
from backend_kwargs.keys import digest
from backend_kwargs.options import CUTLASS_GEMM, Options, generators, unmet
from backend_kwargs.options.machine import CUTLASS_PACKAGES, CUTLASS_VARIABLE, Machine, installed_version, places_of

INSTALL = pip_install("cutlass")
SOURCES = ("include", "tools", "examples")  # below cutlass_library/source

_one_at_a_time = RLock()


def cutlass_dir() -> Path:
    """Return a directory laid out like a CUTLASS checkout, built from the installed packages if it does not exist.

    Raises:
        BackendKwargsError: if a package is missing, or the user's cache directory cannot be written.

    """
    from platformdirs import user_cache_path

    packages = {name: _location(name) for name in CUTLASS_PACKAGES}
    sources = packages["cutlass_library"] / "source"
    parts = {f"python/{name}": path for name, path in packages.items()} | {name: sources / name for name in SOURCES}
    release = installed_version("nvidia-cutlass") or "unversioned"  # installed from a checkout
    places = "\n".join(map(str, parts.values()))
    target = user_cache_path("backend-kwargs") / "cutlass" / f"{release}-{digest(places.encode(), 12)}"
    for name, path in parts.items():
        if not path.is_dir():
            raise BackendKwargsError(f"The installed CUTLASS has no directory {str(path)!r}: {INSTALL}.")
        try:
            if not (target / name).is_dir():
                _link(target / name, path)
        except OSError as error:
            raise BackendKwargsError(
                f"Cannot lay out CUTLASS in {str(target)!r}: {error.strerror or error}. "
                f"Set XDG_CACHE_HOME to a writable folder, or {CUTLASS_VARIABLE} to a CUTLASS checkout."
            ) from None
    return target


def asks_for_cutlass(options: Options, machine: Machine) -> bool:
    """Return whether Inductor under `options` would try CUTLASS kernels on `machine`."""
    autotunes = options.get("max_autotune") or options.get("max_autotune_gemm")
    asked = "CUTLASS" in generators(options.get("max_autotune_gemm_backends", ""))
    return bool(autotunes) and asked and not unmet(CUTLASS_GEMM, machine)


@contextmanager
def found_by_inductor(nvcc: str | None) -> Iterator[None]:
    """Let Inductor find CUTLASS and `nvcc` while it compiles, in each of its threads.

    They are set as defaults, since a path is no part of a portable backend, and from torch 2.12 the threads that run
    nvcc do not see options, and would compile against a missing directory and record the failure on disk. An option or
    variable that the user has set takes precedence over what is installed, and reaches those threads as well.
    """
    from backend_kwargs.torch_internals.inductor_config import defaults_replaced, patched, value

    with _one_at_a_time:
        theirs = os.environ.get(CUTLASS_VARIABLE) or (Path(value("cutlass.cutlass_dir")) / "python").is_dir()
        directory = value("cutlass.cutlass_dir") if theirs else str(cutlass_dir())
        _relink(Path(directory) / "python")
        places = {"cutlass.cutlass_dir": directory, "cuda.cuda_cxx": value("cuda.cuda_cxx") or nvcc}
        # And as options: a config patch that ends leaves the default at its time behind as an option.
        with patched(places), defaults_replaced(places):
            yield


def _relink(python: Path) -> None:
    """Replace links of another environment in Inductor's cache, at which Inductor would raise."""
    from backend_kwargs.torch_internals.inductor_code import CUTLASS_MOCKS, cutlass_links

    shared = cutlass_links()
    for path in (*(python / name for name in CUTLASS_PACKAGES), *CUTLASS_MOCKS.glob("*")):
        link = shared / path.name
        if link.is_symlink() and link.resolve() != path.resolve():
            _link(link, path)


def _link(link: Path, path: Path) -> None:
    """Make or replace a link in one step: another process may do the same, or use it."""
    link.parent.mkdir(parents=True, exist_ok=True)
    beside = link.with_name(f".{link.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    beside.symlink_to(path, target_is_directory=True)
    beside.replace(link)


def _location(package: str) -> Path:
    if not (places := places_of(package)):
        raise BackendKwargsError(f"CUTLASS 4 is not installed ({package} is not importable): {INSTALL}.")
    return places[0].resolve()
