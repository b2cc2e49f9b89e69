"""What belongs to torch, numpy and Python's library, whose releases are compared, and not each of their functions."""

import sys
from types import FunctionType
from typing import Any

# The releases of torch and Python are compared when a bundle is loaded; numpy's is part of the hash.
LIBRARIES = frozenset(
    {"torch", "numpy", "builtins", "math", "cmath", "operator", "functools", "itertools", "collections", "typing"}
    | {"_operator", "_functools", "_collections", "_collections_abc", "abc", "enum", "types", "typing_extensions"}
    | {"dataclasses", "numbers", "fractions", "contextlib", "warnings", "_warnings", "logging", "string", "re"}
    | {"bisect", "_bisect", "heapq", "_heapq", "copy", "reprlib"}
)
HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class of Python, or one of a C extension that could be one


def is_library_name(name: str) -> bool:
    """Return whether a Python module of this name belongs to a library whose release is compared."""
    return name.partition(".")[0] in LIBRARIES


def is_library(value: Any) -> bool:
    """Return whether a class or function is the one that a library has under its name."""
    if not is_library_name(value.__module__ or ""):
        return False
    found: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value or (isinstance(value, type) and not value.__flags__ & HEAP_TYPE)


def is_own(function: FunctionType) -> bool:
    """Return whether a function's code is in the source file of a library's module."""
    name = function.__globals__.get("__name__", "")
    module = sys.modules.get(name)
    return (
        module is not None
        and is_library_name(name)
        and function.__globals__ is vars(module)
        and function.__code__.co_filename in (getattr(module, "__file__", None), f"<frozen {name}>")
    )


def has_python_layout(cls: type) -> bool:
    """Return whether all that a class adds to its base is an attribute dict, weak references and slots."""
    if cls is object:
        return True
    slots = vars(cls).get("__slots__", ())
    slots = (slots,) if isinstance(slots, str) else tuple(slots)
    base = cls.__base__ or object
    added = cls.__basicsize__ - base.__basicsize__
    from_python = added == 0 or "__dict__" in vars(cls) or "__slots__" in vars(cls)
    return from_python and bool(cls.__flags__ & HEAP_TYPE) and added <= 8 * (len(slots) + 2)
