"""Shared libraries of bundled code, by SHA-256: a bundle's generated code loads its C++ functions here."""

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

_folder: ContextVar[Path] = ContextVar("_folder")


@contextmanager
def provided(libraries: Mapping[str, bytes], folder: Path) -> Iterator[None]:
    """Write verified libraries into `folder`, from which they are loaded meanwhile; loaded ones need no file."""
    for digest, content in libraries.items():
        (folder / f"{digest}.so").write_bytes(content)
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


def library(digest: str, module: str, function: str) -> Any:
    """Return `function` of the library with the hash `digest`, whose module is named `module`."""
    from backend_kwargs.torch_internals.inductor_code import DATA_POINTER_FUNCTION, DATA_POINTER_VARIABLE

    name = f"backend_kwargs_{digest}.{module}"
    if name not in sys.modules:
        # Inductor passes its libraries torch's function for a tensor's memory in this way, at each load.
        os.environ[DATA_POINTER_VARIABLE] = DATA_POINTER_FUNCTION
        path = _folder.get() / f"{digest}.so"
        loader = importlib.machinery.ExtensionFileLoader(name, str(path))
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        assert spec
        loaded = importlib.util.module_from_spec(spec)
        loader.exec_module(loaded)
        sys.modules[name] = loaded
    return getattr(sys.modules[name], function)
