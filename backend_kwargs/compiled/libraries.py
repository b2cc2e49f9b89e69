"""Shared libraries of bundled code, by SHA-256: a bundle's generated code loads its C++ functions here."""

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from backend_kwargs.atomic_write import write_whole

_paths: dict[str, Path] = {}


def provide(digest: str, content: bytes, folder: Path) -> None:
    """Write a verified library into `folder`, from which it is loaded."""
    path = folder / f"{digest}.so"
    if not path.exists():
        write_whole(path, content)
    _paths[digest] = path


def library(digest: str, module: str, function: str) -> Any:
    """Return `function` of the library with the hash `digest`, whose module is named `module`."""
    from torch._C import _dynamo

    name = f"backend_kwargs_{digest}.{module}"
    if name not in sys.modules:
        # Inductor passes its libraries torch's function for a tensor's memory in this way, at each load.
        os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(
            _dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
        )
        loader = importlib.machinery.ExtensionFileLoader(name, str(_paths[digest]))
        spec = importlib.util.spec_from_file_location(name, _paths[digest], loader=loader)
        assert spec
        loaded = importlib.util.module_from_spec(spec)
        loader.exec_module(loaded)
        sys.modules[name] = loaded
    return getattr(sys.modules[name], function)
