"""The code that Inductor generates: where it lies, its modules, its libraries and its packages."""

import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch._inductor.codecache import PyCodeCache
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

# The variable by which Inductor passes its libraries torch's function for a tensor's memory, at each load.
DATA_POINTER_VARIABLE = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"
# Its address.
DATA_POINTER_FUNCTION = str(torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr)  # type: ignore[attr-defined]
# torch's stand-ins for what CUTLASS imports.
CUTLASS_MOCKS = Path(torch.__file__).parent / "_inductor/codegen/cutlass/lib_extensions/cutlass_mock_imports"


def cutlass_links() -> Path:
    """Return the folder in which Inductor puts links to CUTLASS's packages and CUTLASS_MOCKS, once per process.

    It puts that folder at the end of sys.path.
    """
    return Path(cache_dir()) / "torch_cutlass"


def generated_modules() -> list[ModuleType]:
    """Return the modules that Inductor has generated; a copy, since a collection in a loop may forget some."""
    return [*PyCodeCache.modules]


def forget_module(module: ModuleType) -> None:
    """Free a generated module, with the constants in it."""
    with suppress(ValueError):  # torch has cleared the list
        PyCodeCache.modules.remove(module)  # in one step: other threads append
    if sys.modules.get(module.__name__) is module:
        del sys.modules[module.__name__]
