"""Named, configured torch.compile backends that are values. Imports no torch until a backend is made."""

from importlib.metadata import version as _version
from typing import TYPE_CHECKING as _TYPE_CHECKING

from backend_kwargs.backend import Backend
from backend_kwargs.bundles.config import CompileConfig
from backend_kwargs.bundles.module import CompiledModule
from backend_kwargs.errors import BackendKwargsError, BackendKwargsWarning
from backend_kwargs.explain import explain
from backend_kwargs.pinning import pin
from backend_kwargs.regions import compile_regions, region_options
from backend_kwargs.registry import (
    get_template,
    list_backends,
    list_templates,
    load_templates,
    make_backend,
    register_backend,
    register_template,
)
from backend_kwargs.report import report
from backend_kwargs.sealing import seal
from backend_kwargs.stores import Store

__version__ = _version("backend-kwargs")

__all__ = [
    "Backend",
    "BackendKwargsError",
    "BackendKwargsWarning",
    "CompileConfig",
    "CompiledModule",
    "Store",
    "__version__",
    "compile_regions",
    "explain",
    "get_template",
    "list_backends",
    "list_templates",
    "load_templates",
    "make_backend",
    "pin",
    "region_options",
    "register_backend",
    "register_template",
    "report",
    "seal",
]

_MOVED = {
    "Explanation": "explain",
    "InductorOptions": "options.inductor_names",
    "Report": "report",
    "Rewrite": "rewrites",
    "Template": "options.templates",
    "list_rewrites": "rewrites",
    "load_cache_artifacts": "cache_artifacts",
    "register_rewrite": "rewrites",
    "save_cache_artifacts": "cache_artifacts",
}

if not _TYPE_CHECKING:  # where every name would be known

    def __getattr__(name: str) -> object:
        """Raise; for a name of earlier releases, with where it is now."""
        if name in _MOVED:
            raise AttributeError(f"bk.{name} was moved: from backend_kwargs.{_MOVED[name]} import {name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
