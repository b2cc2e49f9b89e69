"""Named, configured torch.compile backends that are values. Imports no torch until a backend is made."""

from importlib.metadata import version as _version

from backend_kwargs.backend import Backend
from backend_kwargs.bundles.config import CompileConfig
from backend_kwargs.bundles.module import CompiledModule
from backend_kwargs.cache_artifacts import load_cache_artifacts, save_cache_artifacts
from backend_kwargs.errors import BackendKwargsError, BackendKwargsWarning
from backend_kwargs.explain import Explanation, explain
from backend_kwargs.options.inductor_names import InductorOptions
from backend_kwargs.options.templates import Template
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
from backend_kwargs.report import Report, report
from backend_kwargs.rewrites.table import Rewrite, list_rewrites, register_rewrite
from backend_kwargs.sealing.seal import seal

__version__ = _version("backend-kwargs")

__all__ = [
    "Backend",
    "BackendKwargsError",
    "BackendKwargsWarning",
    "CompileConfig",
    "CompiledModule",
    "Explanation",
    "InductorOptions",
    "Report",
    "Rewrite",
    "Template",
    "__version__",
    "compile_regions",
    "explain",
    "get_template",
    "list_backends",
    "list_rewrites",
    "list_templates",
    "load_cache_artifacts",
    "load_templates",
    "make_backend",
    "pin",
    "region_options",
    "register_backend",
    "register_rewrite",
    "register_template",
    "report",
    "save_cache_artifacts",
    "seal",
]
