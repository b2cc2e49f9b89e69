"""What belongs to torch, numpy and Python's library, whose releases are compared, and not each of their functions."""

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType

CACHED = type(lru_cache(lambda: None))
# The releases of torch and Python are compared when a bundle is loaded; numpy's is part of the hash.
LIBRARIES = frozenset(
    {"torch", "numpy", "builtins", "math", "cmath", "operator", "functools", "itertools", "collections", "typing"}
    | {"_operator", "_functools", "_collections", "_collections_abc", "abc", "enum", "types", "typing_extensions"}
    | {"dataclasses", "numbers", "fractions", "contextlib", "warnings", "_warnings", "logging", "string", "re"}
    | {"bisect", "_bisect", "heapq", "_heapq", "copy", "reprlib"}
)
# Methods that Python code calls by these names, when it copies or pickles; other special methods need no name.
BY_NAME = frozenset({"__reduce__", "__reduce_ex__", "__deepcopy__", "__copy__", "__getstate__", "__setstate__"})
HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class of Python, or one of a C extension that could be one


def is_library_name(name: str) -> bool:
    """Return whether a Python module of this name belongs to a library whose release is compared."""
    return name.partition(".")[0] in LIBRARIES


def is_library(value: type | FunctionType) -> bool:
    """Return whether a class or function is the one that a library has under its name."""
    if not is_library_name(value.__module__ or ""):
        return False
    own: object = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        own = getattr(own, name, None)
    return own is value or (isinstance(value, type) and not value.__flags__ & HEAP_TYPE)


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


# ---- what code reads


def names_in(code: CodeType) -> set[str]:
    """Return the names that code may read: of globals and attributes, and all texts, by which it may look up some."""
    inner = [names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    return {*code.co_names, *_texts(code.co_consts)}.union(*inner)


def names_read(names: Iterable[str], members: Mapping[str, Iterable[object]]) -> set[str]:
    """Return the names that code which reads `names` may read, also through functions of libraries.

    `members` are what is in the namespaces of libraries, by name: code that reads a name may call each of these.
    """
    known = defaultdict(list, {name: [*values] for name, values in members.items()})
    read: set[str] = set()
    seen: set[int] = set()
    queue: list[object] = ["forward", *names, *filter(_needs_no_name, known)]
    while queue:
        item = queue.pop()
        if isinstance(item, str):
            if item not in read:
                read.add(item)
                queue += known[item]
        elif id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, type):
                for name, value in vars(item).items() if is_library(item) else ():
                    known[name].append(value)
                    if name in read or _needs_no_name(name):
                        queue.append(value)
            elif isinstance(item, FunctionType):
                queue += _read_by(item)
            else:
                queue += _functions_in(item)
    return read


def _needs_no_name(name: str) -> bool:
    """Return whether Python calls a method of this name without code that names it."""
    return name.startswith("__") and name not in BY_NAME


def _read_by(function: FunctionType) -> Iterator[object]:
    """Yield the names that a function may read, and the values of those that are globals or attributes of modules."""
    names = names_in(function.__code__)
    yield from names
    for value in map(function.__globals__.get, names):
        if isinstance(value, ModuleType):
            yield from (vars(value)[name] for name in names & vars(value).keys())
        elif not isinstance(value, str):
            yield value
    yield from (cell.cell_contents for cell in function.__closure__ or () if cell != CellType())


def _functions_in(value: object) -> tuple[object, ...]:
    """Return what is called in place of a descriptor, or of an object that wraps a function."""
    if isinstance(value, property):
        return value.fget, value.fset, value.fdel
    if isinstance(value, staticmethod | classmethod | MethodType):
        return (value.__func__,)
    if isinstance(value, partial):
        return (value.func,)
    return (value.__wrapped__,) if isinstance(value, CACHED) else ()


def _texts(constants: Iterable[object]) -> Iterator[str]:
    """Yield the texts among constants."""
    for each in constants:
        if isinstance(each, str):
            yield each
        elif isinstance(each, tuple | frozenset):
            yield from _texts(each)
