"""The table of Inductor's options: types, defaults, environment variables, aliases; and their values for a while."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._config_module import _UNSET_SENTINEL as UNSET
from torch.utils._config_module import _ConfigEntry

from backend_kwargs.torch_internals.replacing import replaced, undone

INDUCTOR = "torch._inductor.config"
CLONING = "triton.cudagraph_trees_generation_cloning"


def entries(module: str = INDUCTOR) -> Mapping[str, _ConfigEntry]:
    """Return the options of a config module by name.

    An entry has `default`, `value_type`, `alias` (None, or the module and name of the entry that torch reads in place
    of this one), `env_value_force`, `env_value_default`, and from torch 2.12 `deprecated`, `deprecation_message`.
    """
    return import_module(module)._config  # type: ignore[no-any-return]


@contextmanager
def config_alone() -> Iterator[bool]:
    """Let Inductor's config be imported without the package that it is in, which imports dynamo and takes seconds.

    Gives whether it is. Not beside other threads: they would import from an empty package. Afterwards it is not loaded.
    """
    package, _, _ = INDUCTOR.rpartition(".")
    if package in sys.modules:
        yield False
        return
    empty = ModuleType(package)
    empty.__path__ = [str(Path(torch.__file__).parent / "_inductor")]
    sys.modules[package] = empty
    try:
        yield True
    finally:
        for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
            del sys.modules[name]


def target_of(entry: _ConfigEntry) -> _ConfigEntry:
    """Return the entry that torch reads in place of this one."""
    if entry.alias is None:
        return entry
    module, _, name = entry.alias.rpartition(".")
    return target_of(entries(module)[name])


@cache
def source(module: str = INDUCTOR) -> str:
    """Return the source of a config module."""
    return Path(str(import_module(module).__file__)).read_text(encoding="utf-8")


def value(name: str) -> Any:
    """Return the present value of an option of Inductor."""
    found: object = import_module(INDUCTOR)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def clones_live_outputs(options: Mapping[str, object]) -> bool:
    """Return whether torch itself copies results of forward graphs that are alive when a CUDA graph is replayed.

    From torch 2.14 on it does, if these options or its configuration say so. Gradients it does not copy, nor what it
    takes for dead: a result that was dropped, and that another stream or a backward pass still reads.
    """
    return CLONING in entries() and options.get(CLONING, value(CLONING)) == "user_visible"


@contextmanager
def patched(options: Mapping[str, object]) -> Iterator[None]:
    """Set options of Inductor in this thread, until the context is left."""
    with undone() as stack:
        stack.enter_context(import_module(INDUCTOR).patch(dict(options)))
        yield


@contextmanager
def defaults_replaced(defaults: Mapping[str, object]) -> Iterator[None]:
    """Replace the defaults of options of Inductor, which hold in every thread, until the context is left."""
    with undone() as stack:
        for name, default in defaults.items():
            stack.enter_context(replaced(entries()[name], "default", default))
        yield
