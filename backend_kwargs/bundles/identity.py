"""Whether two modules are the same for a compiler: a hash of all that traced code can depend on.

What is compared: the attributes of every object that is reached from the module, which of them are the same object,
hooks, all of each user's class, and the code of each function with the globals that it reads. Of a library, code may
use what depends on its arguments alone. A release of torch, numpy or Python's library is compared elsewhere; here only
that what it holds is its own. Anything of another kind cannot be compared.
"""

import builtins
import dis
import hashlib
import itertools
import operator
import re
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import EnumMeta
from functools import cached_property, lru_cache, partial
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GenericAlias,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
    UnionType,
    WrapperDescriptorType,
)
from typing import Any

import torch

from backend_kwargs.auto.cache_key import ambient
from backend_kwargs.bundles.library_code import HEAP_TYPE, has_python_layout, is_library, is_library_name, is_own
from backend_kwargs.bundles.operators import TORCH_NAMESPACES
from backend_kwargs.bundles.samples import memory_of
from backend_kwargs.errors import shown
from backend_kwargs.torch_internals.modes import any_mode
from backend_kwargs.torch_internals.modules import FUNCTIONS_OF_C, FUNCTIONS_OF_PYTHON, buffers_of, parameters_of
from backend_kwargs.torch_internals.operators import OpOverload, OpOverloadPacket, is_namespace, name_of
from backend_kwargs.torch_internals.tensors import has_hooks, memory_id

CACHED = type(lru_cache(lambda: None))
METHODS = (FunctionType, property, staticmethod, classmethod, partial)
PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, range, slice, type(...), type(NotImplemented), torch.Size}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format}
)
# Their objects are Python's alone, with all their state in attributes.
WITH_ATTRIBUTES = (
    "torch.nn",
    "torch.autograd.grad_mode",
    "torch.amp",
    "collections",
    "functools",
    "enum",
    "types",
    "dataclasses",
)
METACLASSES = (type, EnumMeta)
# Functions of Python in these modules depend on their arguments alone, and those of C on them and torch's own state.
FUNCTIONS_OF = frozenset(
    {"torch.nn.functional", "torch.functional", *FUNCTIONS_OF_PYTHON, "torch.nn.init", "dataclasses"}
    | {"torch.nn.utils.parametrize", "torch.nn.utils.parametrizations", "torch.utils.checkpoint", "collections", "enum"}
    | {*FUNCTIONS_OF_C, "math", "cmath", "operator"}
    | {"_operator", "functools", "_functools", "itertools", "_collections", "contextlib", "copy"}
)
FUNCTIONS = ("torch.is_tensor", "typing.cast")
BUILTINS = frozenset(
    {"abs", "all", "any", "bin", "callable", "chr", "divmod", "hex", "isinstance", "issubclass", "iter", "len", "max"}
    | {"min", "next", "oct", "ord", "pow", "repr", "round", "sorted", "sum", "getattr", "hasattr", "setattr"}
)
CLASSES_OF = (
    *("torch.nn.", "torch.autograd.grad_mode", "torch.amp.autocast_mode", "torch.cuda.amp.autocast_mode"),
    *("builtins", "collections", "functools", "itertools", "enum", "types", "numpy", "operator", "dataclasses", "re"),
    *("contextlib", "typing"),
)
CLASSES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, torch.Size, torch.dtype, torch.device)
LOADS = ("LOAD_GLOBAL", "LOAD_NAME")
ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
HIDES = ("IMPORT_", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_BUILD_CLASS", "LOAD_FROM_DICT_OR_GLOBALS", "BUILD_SET")
PADDING = ("CACHE", "EXTENDED_ARG", "PRECALL")
# dynamo puts its own functions in the place of these when it is first used.
WRAPPED = (
    "torch.manual_seed",
    "torch.nn.modules.module.Module.__init__",
    "torch.nn.modules.module.Module.__setstate__",
)
# torch's tables of hooks have keys that are numbers of the process; those of weights that are loaded or saved have run.
HOOKS = frozenset(
    {"_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks"}
    | {"_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks"}
)
STATE_HOOKS = frozenset(
    {"_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"}
)
# Not compared in a class, so that code must not read them.
ASIDE = frozenset(
    {"__dict__", "__weakref__", "__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__"}
    | {"__static_attributes__", "__firstlineno__", "__slotnames__", "__orig_bases__", "__parameters__"}
    | {"__type_params__", "__abstractmethods__", "_abc_impl", "__hash__"}
)
# Names by which code reads what is not compared, such as the order of attributes or all globals.
REFLECTIVE = (
    ASIDE
    | HOOKS
    | STATE_HOOKS
    | {"__globals__", "__code__", "__subclasses__", "__mro__", "mro", "__closure__", "__defaults__", "__kwdefaults__"}
    | {"__bases__", "__base__", "__slots__", "__wrapped__", "__args__", "__origin__", "__getattribute__", "__self__"}
    | {"__func__", "__builtins__", "__spec__", "__loader__", "__file__", "__path__", "__dir__", "__sizeof__"}
    | {"__traceback__", "tb_frame", "f_globals", "f_locals", "f_back", "gi_frame", "format", "format_map"}
    | {"__reduce__", "__reduce_ex__", "__getstate__", "cache_info"}
)
MOST = 200_000  # objects; tracing a module with more takes no longer than this walk


class CannotCompareError(Exception):
    """Something that was reached is not of a kind that can be compared."""


def identity_of(module: torch.nn.Module) -> str | None:
    """Return a hash that is equal, in any process, for modules that compute the same; None if it cannot be known."""
    try:
        return _Walk(module).digest()
    except Exception:  # noqa: BLE001 - such as an object whose attributes raise: it cannot be compared
        return None


def state_of(module: torch.nn.Module) -> str:
    """Return a hash of the attributes of a module and of all that they reach, to be compared in this process."""
    return _State(module).digest()


def shared_names(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of tensors that share memory with an earlier one, and the name of that one."""
    first: dict[int, list[tuple[int, int, str]]] = {}
    shared: dict[str, str] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided or not value.numel():
            continue
        begin, end = memory_of(value)
        spans = first.setdefault(value.untyped_storage().data_ptr(), [])
        if known := next((at for low, high, at in spans if begin < high and low < end), None):
            shared[name] = known
        spans.append((begin, end, name))
    return shared


class _Walk:
    """A walk over what a module reaches: each object once, in an order that is the same in every process."""

    most = MOST

    def __init__(self, module: torch.nn.Module) -> None:
        self.lines: list[str] = []
        self.numbers: dict[Any, int] = {}
        self.kept: list[Any] = []  # so that no id is used twice
        self.queue: deque[tuple[int, Any, Callable[[Any], str]]] = deque()
        self.namespaces: set[str] = set()  # of libraries
        self.read: set[tuple[int, str]] = set()
        # The values of registered tensors are inputs of compiled code; those of other tensors may be part of it.
        self.registered = {
            id(tensor)
            for each in module.modules()
            for tensor in (*parameters_of(each).values(), *buffers_of(each).values())
            if tensor is not None
        }
        self.start(module)

    def start(self, module: torch.nn.Module) -> None:
        self.ref(module)
        self.lines.append(str({key: value for key, value in ambient().items() if key != "grad"}))
        if any_mode():
            raise CannotCompareError("a mode that changes torch's functions")
        for space in (torch, torch.nn.functional, torch.Tensor):
            self.foreign(space.__name__, vars(space))
        for name, hooks in vars(torch.nn.modules.module).items():
            if name.startswith("_global_") and isinstance(hooks, dict):
                self.lines.append(f"{name} {self.refs(hooks.values())}")

    def digest(self) -> str:
        """Return the hash of all that is reached."""
        hashed = hashlib.sha256()
        while self.queue:
            number, value, describe = self.queue.popleft()
            self.lines.append(f"{number} {describe(value)}")
            if len(self.numbers) > self.most:
                raise CannotCompareError("too many objects")
        for line in self.lines:
            hashed.update(f"{line}\n".encode())
        return hashed.hexdigest()

    # ---- references

    def ref(self, value: Any) -> str:
        """Return a plain value as text, and the number of any other."""
        if type(value) in PLAIN:
            return f"{type(value).__name__} {value!r}"
        return self.numbered(id(value), value, self.describe)

    def refs(self, values: Iterable[Any]) -> str:
        return f"[{', '.join(map(self.ref, values))}]"

    def type_ref(self, cls: type) -> str:
        """Return the number of an object's class, which no code needs to call."""
        return self.numbered(("type", id(cls)), cls, self.class_)

    def numbered(self, key: Any, value: Any, describe: Callable[[Any], str]) -> str:
        if key not in self.numbers:
            self.numbers[key] = len(self.numbers)
            self.kept.append(value)
            self.queue.append((self.numbers[key], value, describe))
        return f"#{self.numbers[key]}"

    def unknown(self, value: Any) -> str:
        """Raise, as this value cannot be compared."""
        raise CannotCompareError(shown(value))

    # ---- objects

    def describe(self, value: Any) -> str:
        """Return what an object consists of, with numbers for the objects in it."""
        rule = RULES.get(type(value))
        if rule is not None:
            return f"{type(value).__name__} {rule(self, value)}"
        kind = type(value)
        if issubclass(kind, type):
            return f"class {self.named_class(value)}"
        if issubclass(kind, ModuleType):
            return self.unknown(value)  # code may read anything in it
        if issubclass(kind, torch.Tensor):
            return self.unknown(value)
        if kind.__module__ == "typing":
            return self.typing(value)
        if kind.__module__.partition(".")[0] == "numpy":
            return self.numpy(value)
        return self.instance(value)

    def instance(self, value: Any) -> str:
        """Describe an object whose state is in attributes, slots and the items of a container."""
        cls = type(value)
        held: Any = ""
        for base in cls.__mro__:
            if base in CONTAINERS:
                held = CONTAINERS[base](self, value)
                break
            if not has_python_layout(base):
                return self.unknown(value)
        place = cls.__module__
        if is_library(cls) and not place.startswith(WITH_ATTRIBUTES):
            return self.unknown(value)
        attributes = dict(getattr(value, "__dict__", {}))
        for base in cls.__mro__:
            for name, slot in vars(base).items():
                if isinstance(slot, MemberDescriptorType) and slot.__objclass__ is base and base not in CONTAINERS:
                    try:
                        attributes[f"{base.__qualname__}.{name}"] = slot.__get__(value, cls)
                    except AttributeError:
                        continue
        if isinstance(value, torch.nn.Module):
            attributes = _with_numbered_hooks(attributes)
        described = [f"{self.ref(name)}={self.ref(each)}" for name, each in attributes.items()]
        return f"{self.type_ref(cls)} {held} {' '.join(described)}"

    def pairs(self, value: Mapping[Any, Any]) -> str:
        items: Any = dict.items(value)  # type: ignore[arg-type]
        return f"{{{', '.join(f'{self.ref(key)}: {self.ref(item)}' for key, item in items)}}}"

    def elements(self, value: Iterable[Any]) -> str:
        """Describe a set in its order, which is the same in each process for numbers alone."""
        items = [*value]
        if len(items) > 1 and any(type(each) not in (bool, int, float) for each in items):
            return self.unknown(value)
        return self.refs(items)

    def typing(self, value: Any) -> str:
        origin, args = getattr(value, "__origin__", None), getattr(value, "__args__", ())
        return f"{value!r} {self.refs((origin, *args))}" if origin else repr(value)

    def tensor(self, value: torch.Tensor) -> str:
        if value.layout != torch.strided or value.is_quantized or value.is_nested or has_hooks(value):
            return self.unknown(value)
        if value.is_conj() or value.is_neg() or value.grad_fn is not None:
            return self.unknown(value)
        kind = list(value.shape), value.stride(), str(value.dtype), value.device.type, value.requires_grad
        storage = value.untyped_storage()
        place = self.numbered(("storage", memory_id(value)), storage, lambda each: f"storage {each.nbytes()}")
        attributes = self.pairs({key: each for key, each in vars(value).items() if not key.startswith("_dynamo")})
        inference = value.is_inference()
        return f"{kind} {place} {value.storage_offset()} {inference} {attributes} {self.values(value)}"

    def values(self, value: torch.Tensor) -> str:
        """Return a hash of a tensor's values, "" for a registered one."""
        if id(value) in self.registered:
            return ""
        with torch.no_grad():
            plain = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return hashlib.sha256(plain.numpy().tobytes()).hexdigest()

    def numpy(self, value: Any) -> str:
        import numpy as np

        if type(value) is np.ndarray and not value.dtype.hasobject:
            return f"{value.dtype} {value.shape} {value.strides} {hashlib.sha256(value.tobytes()).hexdigest()}"
        if isinstance(value, np.generic | np.dtype) and not np.dtype(value).hasobject:
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, np.ufunc):
            return f"numpy {np.__version__} {value.__name__}"
        return self.unknown(value)

    # ---- classes

    def named_class(self, cls: type) -> str:
        """Describe a class that code uses."""
        place = f"{cls.__module__}."
        if is_library(cls) and cls not in CLASSES and (not place.startswith(CLASSES_OF) or type(cls) is not type):
            return self.unknown(cls)
        return self.type_ref(cls)

    def class_(self, cls: type) -> str:
        """Describe a class by all that it holds; a library's class by name, if all that it holds is the library's."""
        bases = [self.type_ref(base) for base in cls.__bases__]
        if is_library(cls):
            if cls.__flags__ & HEAP_TYPE:
                self.foreign(f"{cls.__module__}.{cls.__qualname__}", vars(cls))
                self.foreign(cls.__module__, vars(sys.modules[cls.__module__]))
            return f"{cls.__module__}.{cls.__qualname__} {bases}"
        if type(cls) not in METACLASSES:
            return self.unknown(cls)
        held = [f"{name}={self.ref(value)}" for name, value in vars(cls).items() if name not in ASIDE]
        return f"{cls.__name__} {cls.__qualname__} {bases} {held}"

    def foreign(self, label: str, members: Mapping[str, Any]) -> None:
        """Describe what a library's class or module holds."""
        if label not in self.namespaces:
            self.namespaces.add(label)
            self.lines += [
                f"{label}.{name} {self.member(value)}"
                for name, value in [*members.items()]
                if not (f"{label}.{name}" in WRAPPED and is_own(value))
                if (type(value) in METHODS or not name.startswith("__")) and name != "_abc_impl"
                # Which submodules are there depends on what was imported.
                if not isinstance(value, ModuleType) or value.__name__ != f"{label}.{name}"
            ]

    def member(self, value: Any) -> str:
        """Describe what a library holds: what is its own by name, and anything else as what code uses."""
        kind = type(value)
        if kind in (staticmethod, classmethod):
            return f"{kind.__name__} {self.member(value.__func__)}"
        if kind is property:
            return f"property {[self.member(each) for each in (value.fget, value.fset, value.fdel)]}"
        if kind is FunctionType:
            if is_own(value):
                return f"{value.__module__}.{value.__qualname__}:{value.__code__.co_firstlineno}"
            return self.ref(value)
        if kind in PLAIN:
            return f"{kind.__name__} {value!r}"
        if isinstance(value, ModuleType):
            return value.__name__
        if isinstance(value, type):
            named = is_library(value) or kind.__module__ == "pybind11_builtins"
            return f"{value.__module__}.{value.__qualname__}" if named else self.ref(value)
        if kind is CACHED:
            return self.member(value.__wrapped__)
        return self.ref(value) if _is_foreign(value) else f"{kind} {getattr(value, '__qualname__', '')}"

    # ---- functions

    def function(self, value: FunctionType) -> str:
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        inside = f"{self.refs(cells)} {self.ref(value.__defaults__)} {self.ref(value.__kwdefaults__)}"
        if is_own(value):
            place, name = value.__globals__["__name__"], value.__qualname__
            is_method = place.startswith("torch.nn.") and "." in name
            if not is_method and place not in FUNCTIONS_OF and f"{place}.{name}" not in FUNCTIONS:
                return self.unknown(value)
            return f"{place}.{name} {value.__code__.co_firstlineno} {inside}"
        code = self.code(value.__code__, value.__globals__)
        return f"{value.__name__} {value.__qualname__} {code} {inside} {self.pairs(vars(value))}"

    def code(self, code: CodeType, scope: dict[str, Any]) -> str:
        """Describe a function's code, and follow the globals that it reads."""
        steps = [each for each in dis.get_instructions(code) if each.opname not in PADDING]
        for at, each in enumerate(steps):
            if each.opname in LOADS:
                after = itertools.takewhile(lambda step: step.opname in ATTRIBUTES, steps[at + 1 :])
                self.global_(each.argval, [step.argval for step in after], scope, steps[at + 1 :])
            elif each.opname.startswith(HIDES):
                self.refuse(f"{code.co_qualname}: {each.opname}")
            elif isinstance(each.argval, frozenset) and steps[at + 1].opname != "CONTAINS_OP":
                self.refuse(f"{code.co_qualname}: the order of a set")
        if found := REFLECTIVE & {*code.co_names, *_texts(code.co_consts)}:
            self.refuse(f"{code.co_qualname}: {sorted(found)}")
        constants = [
            self.code(each, scope) if isinstance(each, CodeType) else _constant(each) for each in code.co_consts
        ]
        shape = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        variables = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        return f"{code.co_code.hex()} {code.co_exceptiontable.hex()} {shape} {variables} {constants}"

    def refuse(self, why: str) -> None:
        """Raise, as code does what cannot be compared."""
        raise CannotCompareError(why)

    def global_(self, name: str, names: list[str], scope: dict[str, Any], after: list[dis.Instruction]) -> None:
        """Follow a global, and attributes of it as long as they are those of Python modules."""
        place = scope.get("__builtins__", builtins)
        found = scope if name in scope else place if isinstance(place, dict) else vars(place)
        label = self.numbered(("scope", id(scope)), scope, lambda _: "globals")
        if name not in found:
            self.lines.append(f"{label} {name} unbound")
            return
        value = found[name]
        for each in names:
            if isinstance(value, ModuleType):
                name, value = f"{name}.{each}", self.attribute(value, each)
        if isinstance(value, ModuleType):
            self.refuse(f"{name} is a module")
        elif (value is getattr or value is hasattr) and not _called_with_constant(after):
            self.refuse(f"{name}() of a computed name")
        elif (id(scope), name) not in self.read:
            self.read.add((id(scope), name))
            self.kept.append(scope)
            self.lines.append(f"{label} {name} {self.ref(value)}")

    def attribute(self, module: ModuleType, name: str) -> Any:
        """Return an attribute of a Python module, which code reads."""
        if module is torch.ops or (is_namespace(module) and module.name in TORCH_NAMESPACES):
            return getattr(module, name)
        place, held = module.__name__, vars(module)
        known = is_library_name(place) or ("__getattr__" not in held and place.partition(".")[0] not in STDLIB)
        if type(module) is not ModuleType or not known or name not in held:
            self.refuse(f"{place}.{name}")
        return held.get(name)

    def builtin(self, value: Any) -> str:
        """Describe a function of C by name, and what it is bound to."""
        owner = getattr(value, "__self__", None)
        if owner is not None and not isinstance(owner, ModuleType | type):
            return f"{value.__name__} {self.ref(owner)}"
        name = value.__qualname__
        if isinstance(owner, type):
            return f"{name} {self.type_ref(owner)}"
        known = name in BUILTINS if value.__module__ == "builtins" else value.__module__ in FUNCTIONS_OF
        if not known and not name.startswith("_VariableFunctionsClass."):
            return self.unknown(value)
        return f"{value.__module__}.{name}"

    def descriptor(self, value: Any) -> str:
        return f"{value.__objclass__.__qualname__}.{value.__name__} {self.type_ref(value.__objclass__)}"

    def operator_(self, value: Any) -> str:
        return str(value) if name_of(value).partition("::")[0] in TORCH_NAMESPACES else self.unknown(value)


class _State(_Walk):
    """A walk in one process: what cannot be compared with another process is compared by identity."""

    most = sys.maxsize

    def start(self, module: torch.nn.Module) -> None:
        self.ref(module)

    def unknown(self, value: Any) -> str:
        attributes = getattr(value, "__dict__", {})
        mine = not isinstance(value, ModuleType) and type(attributes) is dict
        return f"{id(value)} {self.pairs(attributes) if mine else ''}"

    def refuse(self, why: str) -> None:
        """Compare the rest."""

    def class_(self, cls: type) -> str:
        return str(id(cls)) if is_library(cls) else super().class_(cls)

    def values(self, value: torch.Tensor) -> str:
        return str(id(value))


RULES: dict[type, Callable[[Any, Any], str]] = {
    list: _Walk.refs,
    tuple: _Walk.refs,
    deque: lambda walk, value: f"{value.maxlen} {walk.refs(value)}",
    dict: _Walk.pairs,
    OrderedDict: lambda walk, value: f"{walk.pairs(value)} {walk.pairs(vars(value))}",
    defaultdict: lambda walk, value: f"{walk.ref(value.default_factory)} {walk.pairs(value)}",
    MappingProxyType: lambda walk, value: walk.pairs(dict(value)),
    SimpleNamespace: lambda walk, value: walk.pairs(vars(value)),
    set: _Walk.elements,
    frozenset: _Walk.elements,
    FunctionType: _Walk.function,
    MethodType: lambda walk, value: f"{walk.ref(value.__func__)} {walk.ref(value.__self__)}",
    BuiltinFunctionType: _Walk.builtin,
    MethodDescriptorType: _Walk.descriptor,
    WrapperDescriptorType: _Walk.descriptor,
    GetSetDescriptorType: _Walk.descriptor,
    MemberDescriptorType: lambda walk, value: value.__name__,
    type(vars(dis.Instruction.__base__)["opname"]): lambda walk, value: str(value.__reduce__()[1]),  # of a named tuple
    property: lambda walk, value: walk.refs((value.fget, value.fset, value.fdel)),
    classmethod: lambda walk, value: walk.ref(value.__func__),
    staticmethod: lambda walk, value: walk.ref(value.__func__),
    cached_property: lambda walk, value: f"{value.attrname} {walk.ref(value.func)}",
    partial: lambda walk, value: walk.refs((value.func, value.args, value.keywords, vars(value))),
    type(lru_cache(lambda: None)): lambda walk, value: walk.refs(
        (value.__wrapped__, value.cache_parameters(), vars(value))
    ),
    torch.Tensor: _Walk.tensor,
    torch.nn.Parameter: _Walk.tensor,
    OpOverload: _Walk.operator_,
    OpOverloadPacket: _Walk.operator_,
    operator.itemgetter: lambda walk, value: walk.refs(value.__reduce__()),
    re.Pattern: lambda walk, value: f"{value.pattern!r} {value.flags}",
    GenericAlias: _Walk.typing,
    UnionType: lambda walk, value: walk.refs(value.__args__),
}
# Containers of C from which a class of Python may inherit, and how their items are read.
CONTAINERS: dict[type, Callable[[Any, Any], str]] = {
    list: lambda walk, value: walk.refs(list.__iter__(value)),
    tuple: lambda walk, value: walk.refs(tuple.__iter__(value)),
    deque: lambda walk, value: f"{value.maxlen} {walk.refs(deque.__iter__(value))}",
    OrderedDict: _Walk.pairs,
    defaultdict: lambda walk, value: f"{walk.ref(value.default_factory)} {walk.pairs(value)}",
    dict: _Walk.pairs,
    set: lambda walk, value: walk.elements(set.__iter__(value)),
    frozenset: lambda walk, value: walk.elements(frozenset.__iter__(value)),
}
STDLIB = sys.stdlib_module_names


def _with_numbered_hooks(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return a module's attributes with its hooks by their order."""
    attributes = {name: value for name, value in attributes.items() if name not in STATE_HOOKS}
    hooks = {name: value for name, value in attributes.items() if name in HOOKS and isinstance(value, dict)}
    keys = sorted({key for value in hooks.values() for key in value})
    numbers = {key: at for at, key in enumerate(keys)}
    return attributes | {name: {numbers[key]: hook for key, hook in value.items()} for name, value in hooks.items()}


def _constant(value: Any) -> str:
    if isinstance(value, frozenset):
        return str(sorted(map(_constant, value)))
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    return f"{type(value).__name__} {value!r}"


def _is_foreign(value: Any) -> bool:
    """Return whether an object in a library's namespace may be another's, or call what is."""
    kind = type(value)
    if isinstance(value, partial | MethodType | torch.nn.Module):
        return True
    return not (is_library_name(kind.__module__) or (kind.__module__ in STDLIB and not callable(value)))


def _texts(constants: Iterable[Any]) -> Iterator[str]:
    for each in constants:
        if isinstance(each, str):
            yield each
        elif isinstance(each, tuple | frozenset):
            yield from _texts(each)


def _called_with_constant(steps: list[dis.Instruction]) -> bool:
    """Return whether these instructions pass arguments to a function and call it, the second one a constant text."""
    depth, named = 0, False
    for each in steps:
        if each.opname == "CALL":
            if depth == each.arg:
                return named
            depth -= (each.arg or 0) + 1
        elif each.opcode in dis.hasjrel or each.opcode in dis.hasjabs:
            return False
        elif depth == 1 and not named and each.opname == "LOAD_CONST" and type(each.argval) is str:
            depth, named = 2, True
            continue
        else:
            depth += dis.stack_effect(each.opcode, each.arg)
        if depth <= 0 or (named and depth <= 2):
            return False
    return False
