"""Whether two modules are the same for a compiler: a hash of all that traced code can depend on.

What is compared: the attributes of every object that is reached from the module, which of them are the same object,
hooks, and the code of each function with the globals that it reads. Methods, class attributes and attributes of Python
modules count if some code that was reached names them. A release of torch, numpy or Python's library is compared
elsewhere; here only that their functions are their own. Anything of another kind cannot be compared.
"""

import builtins
import dis
import hashlib
import importlib.util
import logging
import operator
import re
import sys
from abc import ABCMeta
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, EnumMeta
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

from backend_kwargs.compiled.library_code import has_python_layout, is_library, is_library_name, is_own
from backend_kwargs.compiled.operators import TORCH_NAMESPACES
from backend_kwargs.compiled.samples import memory_of
from backend_kwargs.compilers.auto.cache_key import ambient
from backend_kwargs.errors import shown

PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, range, slice, type(...), type(NotImplemented), torch.Size}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format}
)
# Their objects are Python's alone, with all their state in attributes.
WITH_ATTRIBUTES = ("torch.nn", "torch.autograd.grad_mode", "torch.amp", "collections", "functools", "enum", "types")
METACLASSES = (type, ABCMeta, EnumMeta)
# What a builtin finds depends on more than its arguments.
UNSEEN = {"eval", "exec", "compile", "globals", "locals", "vars", "dir", "open", "input", "__import__", "id"}
LOADS = ("LOAD_GLOBAL", "LOAD_NAME")
CALLED = ("forward", "__call__", "_call_impl", "_wrapped_call_impl", "_slow_forward", "__getattr__")
FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodDescriptorType)
GETTERS = (operator.itemgetter, operator.attrgetter, operator.methodcaller)
MADE = {"__init__", "__new__", "__post_init__"}  # run only where a class is called
# These say nothing about what a method computes.
ASIDE = frozenset(
    {"__doc__", "__module__", "__qualname__", "__dict__", "__weakref__", "__slots__", "__slotnames__", "__repr__"}
    | {"__annotations__", "__annotate__", "__orig_bases__", "__parameters__", "__abstractmethods__", "_abc_impl"}
    | {"__match_args__", "__dataclass_params__", "__dataclass_fields__", "__init_subclass__", "__set_name__", "__dir__"}
    | {"__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__copy__", "__deepcopy__"}
    | {"__del__"}
)
PER_PROCESS = {"_original_object_hash"}  # transformers keeps Python's hash of a text in its GenerationConfig
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
        self.names: dict[str, None] = {}  # attributes that code reads
        # Attributes that count if code reads them: by any name that it computes, or by those alone that it contains.
        self.spaces: list[tuple[str, Mapping[str, Any], bool]] = []
        self.every_name = False
        self.read: set[tuple[int, str]] = set()
        # The values of registered tensors are inputs of compiled code; those of other tensors may be part of it.
        self.registered = {
            id(tensor)
            for each in module.modules()
            for tensor in (*each._parameters.values(), *each._buffers.values())
            if tensor is not None
        }
        self.start(module)

    def start(self, module: torch.nn.Module) -> None:
        self.name(CALLED)
        self.ref(module)
        self.lines.append(str({key: value for key, value in ambient().items() if key != "grad"}))
        if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
            raise CannotCompareError("a mode that changes torch's functions")
        for space in (torch, torch.nn.functional, torch.Tensor):
            self.lines += self.foreign(vars(space))
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

    def name(self, names: Iterable[str]) -> None:
        """Count attributes of these names, wherever they are."""
        for name in names:
            if name not in self.names:
                self.names[name] = None
                found = [(label, space) for label, space, _ in self.spaces if name in space]
                self.lines += [f"{label}.{name} {self.ref(space[name])}" for label, space in found]

    def space(self, label: str, members: Mapping[str, Any], *, computed: bool = True) -> None:
        """Count those of these attributes that code reads; `computed` by names that it computes, too."""
        self.spaces.append((label, members, computed))
        read = members if self.every_name and computed else self.names
        self.lines += [f"{label}.{name} {self.ref(members[name])}" for name in sorted(read) if name in members]

    def any_name(self) -> None:
        """Count all attributes, as code reads some by names that it computes."""
        if not self.every_name:
            self.every_name = True
            self.name(sorted({name for _, space, computed in self.spaces if computed for name in space}))

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
            return f"class {self.called_class(value)}"
        if issubclass(kind, ModuleType):
            return self.module(value)
        if issubclass(kind, torch.Tensor):
            return self.unknown(value)
        if issubclass(kind, Enum):
            return f"{self.type_ref(type(value))} {value.name} {self.ref(value.value)}"
        if kind.__module__ == "typing":
            return repr(value)
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
        described = [f"{name}={self.ref(attributes[name])}" for name in sorted(attributes.keys() - PER_PROCESS)]
        return f"{self.type_ref(cls)} {held} {' '.join(described)}"

    def pairs(self, value: Mapping[Any, Any]) -> str:
        items: Any = dict.items(value)  # type: ignore[arg-type]
        return f"{{{', '.join(f'{self.ref(key)}: {self.ref(item)}' for key, item in items)}}}"

    def elements(self, value: Iterable[Any]) -> str:
        """Describe a set, whose order differs between processes."""
        return str(sorted(map(self.unordered, value)))

    def unordered(self, value: Any) -> str:
        if type(value) in PLAIN:
            return f"{type(value).__name__} {value!r}"
        if type(value) is tuple:
            return f"({', '.join(map(self.unordered, value))})"
        if isinstance(value, type | FunctionType | BuiltinFunctionType) and is_library(value):
            return f"{value.__module__}.{value.__qualname__}"
        return self.unknown(value)

    def tensor(self, value: torch.Tensor) -> str:
        if value.layout != torch.strided or value.is_quantized or value.is_nested or value._backward_hooks:
            return self.unknown(value)
        if value.is_conj() or value.is_neg() or value.grad_fn is not None:
            return self.unknown(value)
        kind = list(value.shape), value.stride(), str(value.dtype), value.device.type, value.requires_grad
        storage = value.untyped_storage()
        place = self.numbered(("storage", storage._cdata), storage, lambda each: f"storage {each.nbytes()}")
        self.space(place, {key: each for key, each in vars(value).items() if not key.startswith("_dynamo")})
        inference = value.is_inference()
        return f"{kind} {place} {value.storage_offset()} {inference} {self.values(value)}"

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
        if isinstance(value, np.ufunc) or callable(value):
            return f"numpy {np.__version__} {value.__name__}"
        return self.unknown(value)

    def module(self, value: ModuleType) -> str:
        name = value.__name__
        if isinstance(value, torch._ops._OpNamespace):
            return name if value.name in TORCH_NAMESPACES else self.unknown(value)
        if value is torch.ops:
            others = {each.partition("::")[0] for each in torch._C._dispatch_get_all_op_names()} - TORCH_NAMESPACES
            self.space("torch.ops", dict.fromkeys(sorted(others), _Operators()), computed=False)
            return "torch.ops"
        if is_library_name(name):
            if type(value) is ModuleType:
                self.space(name, vars(value), computed=False)
            return name
        if type(value) is not ModuleType or "__getattr__" in vars(value) or name.partition(".")[0] in STDLIB:
            return self.unknown(name)
        self.space(name, vars(value))
        return name

    # ---- classes

    def called_class(self, cls: type) -> str:
        """Describe a class that code may call: with what makes an object of it."""
        if cls in GETTERS[1:]:
            self.any_name()
        if not is_library(cls):
            for base in cls.__mro__:
                if not is_library(base):
                    made = [f"{name} {self.ref(vars(base)[name])}" for name in sorted(MADE & vars(base).keys())]
                    self.lines.append(f"{base.__qualname__} {made}")
        return self.type_ref(cls)

    def class_(self, cls: type) -> str:
        """Describe a class by those of its attributes that code may read; a library's class by name."""
        if is_library(cls):
            self.lines += self.foreign(vars(cls))
            return f"{cls.__module__}.{cls.__qualname__} {[self.type_ref(base) for base in cls.__bases__]}"
        if type(cls) not in METACLASSES:
            return self.unknown(cls)
        label = self.type_ref(cls)
        members = {name: value for name, value in vars(cls).items() if name not in ASIDE | MADE}
        # A library's class calls those of its methods that are overridden. For nn.Module these are the names CALLED.
        bases = [base for base in cls.__mro__ if is_library(base) and base not in (object, torch.nn.Module)]
        overridden = {name for base in bases for name in vars(base)}
        always = [name for name in sorted(members) if name in overridden or re.fullmatch("__.*__", name)]
        self.lines += [f"{label}.{name} {self.ref(members[name])}" for name in always]
        self.space(label, {name: value for name, value in members.items() if name not in always})
        made = tuple(vars(cls)[name] for name in sorted(MADE & vars(cls).keys()))
        self.space(label, {"type()": made, "__class__": made}, computed=False)
        self.space(label, {name: vars(cls)[name] for name in ASIDE & vars(cls).keys()}, computed=False)
        return f"{cls.__qualname__} {[self.type_ref(base) for base in cls.__bases__]}"

    def foreign(self, members: Mapping[str, Any]) -> list[str]:
        """Describe the members of a library, and follow functions that are not its own, as after a monkeypatch."""
        lines = []
        for name, value in [*members.items()]:
            if type(value) is FunctionType and not is_own(value):
                lines.append(f"{name} {self.ref(value)}")
            elif type(value) in (bool, int, float) and not name.startswith("___"):  # dynamo's names
                lines.append(f"{name} {value!r}")
            elif type(value) in FUNCTIONS and value.__name__ != name and name not in MADE | ASIDE:
                lines.append(f"{name} {value.__qualname__}")
        return lines

    # ---- functions

    def function(self, value: FunctionType) -> str:
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        inside = f"{self.refs(cells)} {self.ref(value.__defaults__)} {self.ref(value.__kwdefaults__)}"
        if is_own(value):
            return f"{value.__module__}.{value.__qualname__} {value.__code__.co_firstlineno} {inside}"
        self.space(self.ref(value), vars(value))
        return f"{value.__name__} {self.code(value.__code__, value.__globals__)} {inside}"

    def code(self, code: CodeType, scope: dict[str, Any]) -> str:
        """Describe a function's code, and follow the globals and attributes that it reads."""
        read, names, unseen = _names(code)
        for name in _imported(code, scope):
            module = sys.modules.get(name)
            self.lines.append(f"import {name} {self.ref(module) if module else self.unknown(name)}")
        if unseen:
            raise CannotCompareError(f"{code.co_qualname}: {unseen}")
        self.name(names)
        for name in read:
            self.global_(name, scope, code)
        constants = [
            self.code(each, scope) if isinstance(each, CodeType) else _constant(each) for each in code.co_consts
        ]
        self.name(sorted(name for each in code.co_consts if type(each) is str for name in each.split(".")))
        shape = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        variables = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        return f"{code.co_code.hex()} {code.co_exceptiontable.hex()} {shape} {variables} {constants}"

    def global_(self, name: str, scope: dict[str, Any], code: CodeType) -> None:
        place = scope.get("__builtins__", builtins)
        found = scope if name in scope else place if isinstance(place, dict) else vars(place)
        value = found.get(name)
        if value is type:
            self.name(["type()"])
        if value is getattr or value is hasattr:
            if not _reads_constants(code, name):
                self.any_name()
            return
        if (id(scope), name) not in self.read:
            self.read.add((id(scope), name))
            self.kept.append(scope)
            label = self.numbered(("scope", id(scope)), scope, lambda _: "globals")
            self.lines.append(f"{label} {name} {self.ref(value) if name in found else 'unbound'}")

    def builtin(self, value: Any) -> str:
        """Describe a function of C by name, and what it is bound to."""
        if value in (getattr, hasattr):
            self.any_name()
        owner = getattr(value, "__self__", None)
        if owner is not None and not isinstance(owner, ModuleType | type):
            return f"{value.__name__} {self.ref(owner)}"
        place = value.__module__ or getattr(owner, "__module__", None) or "builtins"
        if not is_library_name(place) or (place == "builtins" and value.__name__ in UNSEEN):
            return self.unknown(value)
        return f"{place}.{value.__qualname__}"

    def descriptor(self, value: Any) -> str:
        return f"{value.__objclass__.__qualname__}.{value.__name__} {self.type_ref(value.__objclass__)}"

    def operator_(self, value: Any) -> str:
        packet = getattr(value, "_qualified_op_name", None) or value._name
        return str(value) if packet.partition("::")[0] in TORCH_NAMESPACES else self.unknown(value)


class _State(_Walk):
    """A walk over attributes alone, in one process: what cannot be compared is compared by identity."""

    most = sys.maxsize

    def start(self, module: torch.nn.Module) -> None:
        self.ref(module)

    def unknown(self, value: Any) -> str:
        attributes = getattr(value, "__dict__", {})
        return f"{id(value)} {self.pairs(attributes) if type(attributes) is dict else ''}"

    def class_(self, cls: type) -> str:
        return str(id(cls))

    called_class = class_

    def module(self, value: ModuleType) -> str:
        return value.__name__

    def values(self, value: torch.Tensor) -> str:
        return str(id(value))

    def code(self, code: CodeType, scope: dict[str, Any]) -> str:
        return str(id(code))


class _Operators:
    """The operators of a namespace that is not torch's, whose code is not known."""


RULES: dict[type, Callable[[Any, Any], str]] = {
    list: _Walk.refs,
    tuple: _Walk.refs,
    deque: lambda walk, value: f"{value.maxlen} {walk.refs(value)}",
    dict: _Walk.pairs,
    OrderedDict: _Walk.pairs,
    defaultdict: lambda walk, value: f"{walk.ref(value.default_factory)} {walk.pairs(value)}",
    MappingProxyType: lambda walk, value: walk.pairs(dict(value)),
    SimpleNamespace: lambda walk, value: walk.pairs({k: v for k, v in vars(value).items() if k not in PER_PROCESS}),
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
    _Operators: lambda walk, value: walk.unknown(value),
    property: lambda walk, value: walk.refs((value.fget, value.fset, value.fdel)),
    classmethod: lambda walk, value: walk.ref(value.__func__),
    staticmethod: lambda walk, value: walk.ref(value.__func__),
    cached_property: lambda walk, value: f"{value.attrname} {walk.ref(value.func)}",
    partial: lambda walk, value: walk.refs((value.func, value.args, value.keywords, vars(value))),
    type(lru_cache(lambda: None)): lambda walk, value: walk.ref(value.__wrapped__),
    torch.Tensor: _Walk.tensor,
    torch.nn.Parameter: _Walk.tensor,
    torch._ops.OpOverload: _Walk.operator_,
    torch._ops.OpOverloadPacket: _Walk.operator_,
    **dict.fromkeys(GETTERS, lambda walk, value: walk.refs(value.__reduce__())),
    logging.Logger: lambda walk, value: value.name,  # a call of it is not part of a graph
    re.Pattern: lambda walk, value: f"{value.pattern!r} {value.flags}",
    GenericAlias: lambda walk, value: repr(value),
    UnionType: lambda walk, value: repr(value),
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
    """Return a module's attributes with its hooks by their order, since their keys are numbers of the process.

    Hooks that run when weights are saved or loaded have run.
    """
    attributes = {name: value for name, value in attributes.items() if "_state_dict_" not in name}
    hooks = {name: value for name, value in attributes.items() if "hooks" in name and isinstance(value, dict)}
    keys = sorted({key for value in hooks.values() for key in value})
    numbers = {key: at for at, key in enumerate(keys)}
    return attributes | {name: {numbers[key]: hook for key, hook in value.items()} for name, value in hooks.items()}


def _constant(value: Any) -> str:
    if isinstance(value, frozenset):
        return str(sorted(map(_constant, value)))
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    return f"{type(value).__name__} {value!r}"


def _names(code: CodeType) -> tuple[list[str], list[str], str]:
    """Return the globals that code reads, the other names in it, and an instruction that hides what it reads."""
    read: dict[str, None] = {}
    names: dict[str, None] = {}
    unseen = ""
    for each in dis.get_instructions(code):
        if each.opname in LOADS:
            read[each.argval] = None
        elif each.opname.startswith(("IMPORT_STAR", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_BUILD_CLASS")):
            unseen = each.opname
        elif each.opcode in dis.hasname:
            names[each.argval] = None
    return [*read], [*names], unseen


def _imported(code: CodeType, scope: Mapping[str, Any]) -> list[str]:
    """Return the absolute names of the Python modules that code imports."""
    found: list[str] = []
    before: list[dis.Instruction] = []
    for each in dis.get_instructions(code):
        if each.opname == "IMPORT_NAME":
            level, names = before[-2].argval, before[-1].argval or ()
            name = importlib.util.resolve_name("." * level + each.argval, scope.get("__package__"))
            found += [name, *(f"{name}.{part}" for part in names if f"{name}.{part}" in sys.modules)]
            found += [] if names else [name.partition(".")[0]]
        before.append(each)
    return found


def _reads_constants(code: CodeType, name: str) -> bool:
    """Return whether code calls getattr() or hasattr(), its global `name`, only with constants as names."""
    steps = [each for each in dis.get_instructions(code) if each.opname not in ("PRECALL", "CACHE")]
    starts = [at for at, each in enumerate(steps) if each.opname in LOADS and each.argval == name]
    return all(_called_with_constant(steps[at + 1 :]) for at in starts)


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
