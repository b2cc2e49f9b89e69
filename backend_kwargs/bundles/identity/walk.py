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
from collections.abc import Callable, Hashable, Iterable, Mapping
from enum import EnumMeta
from functools import cached_property, partial
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
from typing import Any, TypeAlias, TypeVar

import torch

from backend_kwargs.auto.cache_key import ambient
from backend_kwargs.bundles.identity.library_code import (
    CACHED,
    HEAP_TYPE,
    has_python_layout,
    is_library,
    is_library_name,
    is_own,
    names_in,
    names_read,
)
from backend_kwargs.bundles.identity.operators import TORCH_NAMESPACES
from backend_kwargs.bundles.samples import content_hash
from backend_kwargs.errors import shown
from backend_kwargs.torch_internals.modes import any_mode
from backend_kwargs.torch_internals.modules import FUNCTIONS_OF_C, FUNCTIONS_OF_PYTHON, buffers_of, parameters_of
from backend_kwargs.torch_internals.operators import OpOverload, OpOverloadPacket, is_namespace, name_of
from backend_kwargs.torch_internals.tensors import has_hooks, memory_id

T = TypeVar("T")
Rule: TypeAlias = Callable[[Any, Any], str]  # describes an object of one class
Scope: TypeAlias = dict[str, Any]  # the globals of a function
Descriptor: TypeAlias = MethodDescriptorType | WrapperDescriptorType | GetSetDescriptorType
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
    *("builtins", "collections", "functools", "itertools", "enum", "types", "numpy", "dataclasses", "re"),
    *("contextlib", "typing"),
)
# Not operator.attrgetter and methodcaller, which read what code does not name.
CLASSES = (
    *(torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, torch.Size, torch.dtype, torch.device),
    *(operator.itemgetter,),
)
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


class _Walk:
    """A walk over what a module reaches: each object once, in an order that is the same in every process."""

    most = MOST

    def __init__(self, module: torch.nn.Module) -> None:
        self.lines: list[str] = []
        self.numbers: dict[Hashable, int] = {}
        self.kept: list[object] = []  # so that no id is used twice
        self.queue: deque[tuple[int, Any, Callable[[Any], str]]] = deque()
        self.namespaces: set[str] = set()  # of libraries
        self.members: defaultdict[str, list[object]] = defaultdict(list)  # what is in these namespaces, by name
        self.others: dict[str, tuple[str, object]] = {}  # what others have put there, by place: its name and value
        self.names: set[str] = set()  # that the user's code may read
        self.read: set[tuple[int, str]] = set()
        # The values of registered tensors are inputs of compiled code; those of other tensors may be part of it.
        self.registered = {
            id(tensor)
            for submodule in module.modules()
            for tensor in (*parameters_of(submodule).values(), *buffers_of(submodule).values())
            if tensor is not None
        }
        self.start(module)

    def start(self, module: torch.nn.Module) -> None:
        """Describe what every module depends on: torch's settings, modes, functions and hooks of all modules."""
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
        self.follow()
        self.follow_others()
        hashed = hashlib.sha256()
        for line in self.lines:
            hashed.update(f"{line}\n".encode())
        return hashed.hexdigest()

    def follow(self) -> None:
        """Describe what is reached, in the order in which it is."""
        while self.queue:
            number, value, describe = self.queue.popleft()
            self.lines.append(f"{number} {describe(value)}")
            if len(self.numbers) > self.most:
                raise CannotCompareError("too many objects")

    # ---- references

    def ref(self, value: object) -> str:
        """Return a plain value as text, and the number of any other."""
        if type(value) in PLAIN:
            if type(value) is str:
                self.names.add(value)
            return f"{type(value).__name__} {value!r}"
        return self.numbered(id(value), value, self.describe)

    def refs(self, values: Iterable[object]) -> str:
        """Return values as text, in order."""
        return f"[{', '.join(map(self.ref, values))}]"

    def type_ref(self, cls: type) -> str:
        """Return the number of an object's class, which no code needs to call."""
        return self.numbered(("type", id(cls)), cls, self.class_)

    def numbered(self, key: Hashable, value: T, describe: Callable[[T], str]) -> str:
        """Return the number of an object, which is described later if it is new."""
        if key not in self.numbers:
            self.numbers[key] = len(self.numbers)
            self.kept.append(value)
            self.queue.append((self.numbers[key], value, describe))
        return f"#{self.numbers[key]}"

    def unknown(self, value: object) -> str:
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
        if issubclass(kind, ModuleType | torch.Tensor):
            return self.unknown(value)  # code may read anything in it
        if kind.__module__ == "typing":
            return self.typing(value)
        if kind.__module__.partition(".")[0] == "numpy":
            return self.numpy(value)
        return self.instance(value)

    def instance(self, value: object) -> str:
        """Describe an object whose state is in attributes, slots and the items of a container."""
        cls = type(value)
        items = ""
        for base in cls.__mro__:
            if base in CONTAINERS:
                items = CONTAINERS[base](self, value)
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
        described = [f"{self.ref(name)}={self.ref(attribute)}" for name, attribute in attributes.items()]
        return f"{self.type_ref(cls)} {items} {' '.join(described)}"

    def pairs(self, value: dict[Any, Any]) -> str:
        """Describe the items of a dict in their order."""
        return f"{{{', '.join(f'{self.ref(key)}: {self.ref(item)}' for key, item in dict.items(value))}}}"

    def elements(self, value: Iterable[object]) -> str:
        """Describe a set in its order, which is the same in each process for numbers alone."""
        items = [*value]
        if len(items) > 1 and any(type(each) not in (bool, int, float) for each in items):
            return self.unknown(value)
        return self.refs(items)

    def typing(self, value: object) -> str:
        """Describe an alias of the module typing."""
        origin, args = getattr(value, "__origin__", None), getattr(value, "__args__", ())
        return f"{value!r} {self.refs((origin, *args))}" if origin else repr(value)

    def tensor(self, value: torch.Tensor) -> str:
        """Describe a dense tensor without gradient: its layout, its memory, and its values unless it is registered."""
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
        return "" if id(value) in self.registered else content_hash(value)

    def numpy(self, value: object) -> str:
        """Describe an array, a number, a dtype or a ufunc."""
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
        contents = [f"{name}={self.ref(value)}" for name, value in vars(cls).items() if name not in ASIDE]
        return f"{cls.__name__} {cls.__qualname__} {bases} {contents}"

    def foreign(self, label: str, members: Mapping[str, Any]) -> None:
        """Describe what a library's class or module holds, except what others have put there: that may be unread."""
        if label in self.namespaces:
            return
        self.namespaces.add(label)
        for name, value in [*members.items()]:
            place = f"{label}.{name}"
            if (
                (place in WRAPPED and is_own(value))
                or (name.startswith("__") and type(value) not in METHODS)
                or name == "_abc_impl"
                # Which submodules are there depends on what was imported.
                or (isinstance(value, ModuleType) and value.__name__ == place)
            ):
                continue
            self.members[name].append(value)
            own = _own_name(value)
            if own is None:
                self.others[place] = (name, value)
            else:
                self.lines.append(f"{place} {own}")

    def follow_others(self) -> None:
        """Follow what others have put into libraries, such as patched functions, if code may read it by its name."""
        while self.others:
            read = names_read(self.names, self.members)
            reached = [place for place, (name, _) in self.others.items() if name in read]
            if not reached:
                return
            for place in reached:
                _, value = self.others.pop(place)
                self.lines.append(f"{place} {self.ref(value)}")
            self.follow()

    # ---- functions

    def function(self, value: FunctionType) -> str:
        """Describe a function by its code, or by its name if it is a library's that depends on its arguments alone."""
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        inside = f"{self.refs(cells)} {self.ref(value.__defaults__)} {self.ref(value.__kwdefaults__)}"
        if is_own(value):
            place, name = value.__globals__["__name__"], value.__qualname__
            is_method = place.startswith("torch.nn.") and "." in name
            if not is_method and place not in FUNCTIONS_OF and f"{place}.{name}" not in FUNCTIONS:
                return self.unknown(value)
            self.names.add(value.__name__)
            self.members[value.__name__].append(value)
            return f"{place}.{name} {value.__code__.co_firstlineno} {inside}"
        code = self.code(value.__code__, value.__globals__)
        return f"{value.__name__} {value.__qualname__} {code} {inside} {self.pairs(vars(value))}"

    def code(self, code: CodeType, scope: Scope) -> str:
        """Describe a function's code, and follow the globals that it reads."""
        steps = [step for step in dis.get_instructions(code) if step.opname not in PADDING]
        for at, step in enumerate(steps):
            if step.opname in LOADS:
                after = itertools.takewhile(lambda later: later.opname in ATTRIBUTES, steps[at + 1 :])
                self.global_(step.argval, [later.argval for later in after], scope, steps[at + 1 :])
            elif step.opname.startswith(HIDES):
                self.refuse(f"{code.co_qualname}: {step.opname}")
            elif isinstance(step.argval, frozenset) and steps[at + 1].opname != "CONTAINS_OP":
                self.refuse(f"{code.co_qualname}: the order of a set")
        names = names_in(code)
        self.names |= names
        if reflective := REFLECTIVE & names:
            self.refuse(f"{code.co_qualname}: {sorted(reflective)}")
        constants = [
            self.code(constant, scope) if isinstance(constant, CodeType) else _constant(constant)
            for constant in code.co_consts
        ]
        shape = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        variables = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        return f"{code.co_code.hex()} {code.co_exceptiontable.hex()} {shape} {variables} {constants}"

    def refuse(self, why: str) -> None:
        """Raise, as code does what cannot be compared."""
        raise CannotCompareError(why)

    def global_(self, name: str, names: list[str], scope: Scope, after: list[dis.Instruction]) -> None:
        """Follow a global, and attributes of it as long as they are those of Python modules."""
        place = scope.get("__builtins__", builtins)
        variables = scope if name in scope else place if isinstance(place, dict) else vars(place)
        label = self.numbered(("scope", id(scope)), scope, lambda _: "globals")
        if name not in variables:
            self.lines.append(f"{label} {name} unbound")
            return
        value = variables[name]
        for attribute in names:
            if isinstance(value, ModuleType):
                name, value = f"{name}.{attribute}", self.attribute(value, attribute)
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
        place, members = module.__name__, vars(module)
        known = is_library_name(place) or ("__getattr__" not in members and place.partition(".")[0] not in STDLIB)
        if type(module) is not ModuleType or not known or name not in members:
            self.refuse(f"{place}.{name}")
        return members.get(name)

    def builtin(self, value: BuiltinFunctionType) -> str:
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

    def descriptor(self, value: Descriptor) -> str:
        """Describe a descriptor of a class of C by name."""
        return f"{value.__objclass__.__qualname__}.{value.__name__} {self.type_ref(value.__objclass__)}"

    def operator_(self, value: OpOverload | OpOverloadPacket) -> str:
        """Describe one of torch's own operators by name."""
        return str(value) if name_of(value).partition("::")[0] in TORCH_NAMESPACES else self.unknown(value)


class _State(_Walk):
    """A walk in one process: what cannot be compared with another process is compared by identity."""

    most = sys.maxsize

    def start(self, module: torch.nn.Module) -> None:
        self.ref(module)

    def unknown(self, value: object) -> str:
        attributes = getattr(value, "__dict__", {})
        mine = not isinstance(value, ModuleType) and type(attributes) is dict
        return f"{id(value)} {self.pairs(attributes) if mine else ''}"

    def refuse(self, why: str) -> None:
        """Compare the rest."""

    def class_(self, cls: type) -> str:
        return str(id(cls)) if is_library(cls) else super().class_(cls)

    def values(self, value: torch.Tensor) -> str:
        return str(id(value))


# Containers of C from which a class of Python may inherit, and how their items are read.
CONTAINERS: dict[type, Rule] = {
    list: lambda walk, value: walk.refs(list.__iter__(value)),
    tuple: lambda walk, value: walk.refs(tuple.__iter__(value)),
    deque: lambda walk, value: f"{value.maxlen} {walk.refs(deque.__iter__(value))}",
    OrderedDict: _Walk.pairs,
    defaultdict: lambda walk, value: f"{walk.ref(value.default_factory)} {walk.pairs(value)}",
    dict: _Walk.pairs,
    set: lambda walk, value: walk.elements(set.__iter__(value)),
    frozenset: lambda walk, value: walk.elements(frozenset.__iter__(value)),
}
RULES: dict[type, Rule] = CONTAINERS | {
    OrderedDict: lambda walk, value: f"{walk.pairs(value)} {walk.pairs(vars(value))}",
    MappingProxyType: lambda walk, value: walk.pairs(dict(value)),
    SimpleNamespace: lambda walk, value: walk.pairs(vars(value)),
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
    CACHED: lambda walk, value: walk.refs((value.__wrapped__, value.cache_parameters(), vars(value))),
    torch.Tensor: _Walk.tensor,
    torch.nn.Parameter: _Walk.tensor,
    OpOverload: _Walk.operator_,
    OpOverloadPacket: _Walk.operator_,
    operator.itemgetter: lambda walk, value: walk.refs(value.__reduce__()),
    re.Pattern: lambda walk, value: f"{value.pattern!r} {value.flags}",
    GenericAlias: _Walk.typing,
    UnionType: lambda walk, value: walk.refs(value.__args__),
}
STDLIB = sys.stdlib_module_names


def _with_numbered_hooks(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return a module's attributes with its hooks by their order."""
    attributes = {name: value for name, value in attributes.items() if name not in STATE_HOOKS}
    hooks = {name: value for name, value in attributes.items() if name in HOOKS and isinstance(value, dict)}
    keys = sorted({key for value in hooks.values() for key in value})
    numbers = {key: at for at, key in enumerate(keys)}
    return attributes | {name: {numbers[key]: hook for key, hook in value.items()} for name, value in hooks.items()}


def _constant(value: object) -> str:
    """Return a constant of code as text, a set in order."""
    if isinstance(value, frozenset):
        return str(sorted(map(_constant, value)))
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    return f"{type(value).__name__} {value!r}"


def _own_name(value: Any) -> str | None:
    """Return the name of what a library has in one of its namespaces, None if that is another's."""
    kind = type(value)
    if kind in (staticmethod, classmethod):
        inner = _own_name(value.__func__)
        return inner and f"{kind.__name__} {inner}"
    if kind is property:
        names = [_own_name(each) for each in (value.fget, value.fset, value.fdel)]
        return None if None in names else f"property {names}"
    if kind is FunctionType:
        place = f"{value.__module__}.{value.__qualname__}:{value.__code__.co_firstlineno}"
        return place if is_own(value) else None
    if kind in PLAIN:
        return f"{kind.__name__} {value!r}"
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, type):
        named = is_library(value) or kind.__module__ == "pybind11_builtins"
        return f"{value.__module__}.{value.__qualname__}" if named else None
    if kind is CACHED:
        return _own_name(value.__wrapped__)
    return None if _is_foreign(value) else f"{kind} {getattr(value, '__qualname__', '')}"


def _is_foreign(value: object) -> bool:
    """Return whether an object in a library's namespace may be another's, or call what is."""
    kind = type(value)
    if isinstance(value, partial | MethodType | torch.nn.Module):
        return True
    return not (is_library_name(kind.__module__) or (kind.__module__ in STDLIB and not callable(value)))


def _called_with_constant(steps: list[dis.Instruction]) -> bool:
    """Return whether these instructions pass arguments to a function and call it, the second one a constant text."""
    depth, named = 0, False
    for step in steps:
        if step.opname == "CALL":
            if depth == step.arg:
                return named
            depth -= (step.arg or 0) + 1
        elif step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            return False
        elif depth == 1 and not named and step.opname == "LOAD_CONST" and type(step.argval) is str:
            depth, named = 2, True
            continue
        else:
            depth += dis.stack_effect(step.opcode, step.arg)
        if depth <= 0 or (named and depth <= 2):
            return False
    return False
