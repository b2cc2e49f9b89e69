"""Modules whose result depends on a number in a place that only an attribute, a global or code shows."""

import abc
import collections
import contextlib
import dataclasses
import enum
import functools
import operator
import os
import time
import types
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

FACTOR, TABLE, TENSOR, SETTINGS = 2.0, {"factor": 2.0}, torch.tensor(2.0), types.SimpleNamespace(factor=2.0)
LAYER = nn.LeakyReLU(2.0)


class Applies(nn.Module):
    """`function` applied to the input."""

    def __init__(self, function, **attributes):
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.function(x)


class Reads(nn.Module):
    """The input times what `read` finds in `held`."""

    def __init__(self, held, read=operator.itemgetter(0)):
        super().__init__()
        self.held, self.read = held, read

    def forward(self, x):
        return x * self.read(self.held)


def factor_of(held):
    return held.factor


class Scale:
    """An object that scales."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor

    def times(self, x):
        return x * self.factor


class Slotted:
    """A configuration in a slot."""

    __slots__ = ("factor",)

    def __init__(self, factor):
        self.factor = factor


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """A configuration that cannot be changed."""

    factor: float


class Point(NamedTuple):
    """A named tuple."""

    factor: float


class Kind(enum.Enum):
    """Two kinds."""

    two = 2.0
    three = 3.0


class Mapped(dict):
    """A dict with an attribute."""

    factor = 0.0


class Listed(nn.Module):
    """A module that is not registered, in a list."""

    def __init__(self, k):
        super().__init__()
        self.layers = [nn.LeakyReLU(k)]

    def forward(self, x):
        return self.layers[0](-x)


class Shared(nn.Module):
    """Two activations, of which the third is one."""

    def __init__(self, k):
        super().__init__()
        self.a, self.b = nn.GELU(), nn.ReLU()
        self.c = self.b if k > 2 else self.a

    def forward(self, x):
        return self.c(-x)


class Tied(nn.Module):
    """Two parameters, or one twice, and a result that depends on which."""

    def __init__(self, k):
        super().__init__()
        self.a = nn.Parameter(torch.ones(4))
        self.b = self.a if k > 2 else nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * (3 if self.a is self.b else 2)


class Trainable(nn.Module):
    """A result that depends on requires_grad."""

    def __init__(self, k):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4), requires_grad=k > 2)

    def forward(self, x):
        return x * (3 if self.weight.requires_grad else 2)


class Global(nn.Module):
    """A global number."""

    def forward(self, x):
        return x * FACTOR


class Inner(nn.Module):
    """A global that a function reads which another one calls."""

    def forward(self, x):
        return outer(x)


def outer(x):
    return inner(x) + 1


def inner(x):
    return x * TABLE["factor"]


class GlobalTensor(nn.Module):
    """A global tensor."""

    def forward(self, x):
        return x * TENSOR


class GlobalLayer(nn.Module):
    """A module that is a global."""

    def forward(self, x):
        return LAYER(-x)


class GlobalObject(nn.Module):
    """An attribute of an object that is a global."""

    def forward(self, x):
        return x * SETTINGS.factor


class ThroughModule(nn.Module):
    """An attribute of a Python module."""

    def forward(self, x):
        return x * helpers.factor


class ThroughFunction(nn.Module):
    """A function of a Python module."""

    def forward(self, x):
        return helpers.function(x)


class Method(nn.Module):
    """A method that forward() calls."""

    def forward(self, x):
        return self.scaled(x)

    def scaled(self, x):
        return x * 2


class Named(nn.Module):
    """A method by a name that is an attribute."""

    def __init__(self, name):
        super().__init__()
        self.called = name

    def forward(self, x):
        return getattr(self, f"by_{self.called}")(x)

    def by_two(self, x):
        return x * 2

    def by_three(self, x):
        return x * 3


class Environment(nn.Module):
    """A variable of the process's environment."""

    def forward(self, x):
        return x * float(os.environ["BACKEND_KWARGS_TEST_FACTOR"])


class Weighted(nn.Linear):
    """A layer with a parametrized weight."""


class Times(nn.Module):
    """A parametrization."""

    def __init__(self, k):
        super().__init__()
        self.k = k

    def forward(self, weight):
        return weight * self.k


class Descriptor:
    """A descriptor in a class."""

    def __init__(self, k):
        self.k = k

    def __get__(self, instance, owner):
        return self.k


class Counting(type):
    """A class of classes."""

    @property
    def factor(cls):
        return cls._factor


helpers = types.ModuleType("helpers")


def closed(table):
    return lambda x: x * table["k"]


def add(cls, **attributes):
    for name, value in attributes.items():
        setattr(cls, name, value)


def of_class(make):
    """Return a module of a class that `make` gets to change."""

    def module(k):
        class Own(nn.Module):
            def forward(self, x):
                return x * self.factor

        make(Own, k)
        return Own()

    return module


def assigned(name, cls, value=lambda k: k):
    def module(k):
        globals()[name] = value(k)
        return cls()

    return module


def hooked(register, function):
    def module(k):
        made = nn.Sequential(Applies(torch.sin))
        getattr(made[0], register)(function(k))
        return made

    return module


class Hook:
    """A hook with a number."""

    def __init__(self, k):
        self.k = k

    def __call__(self, module, args, out=None):
        return out * self.k if out is not None else (args[0] * self.k,)


def with_helper(name, value, cls):
    def module(k):
        setattr(helpers, name, value(k))
        return cls()

    return module


def parametrized(k):
    layer = Weighted(4, 4, bias=False)
    nn.init.ones_(layer.weight)
    nn.utils.parametrize.register_parametrization(layer, "weight", Times(k))
    return layer


def with_forward(k):
    module = Applies(torch.sin)
    module.forward = types.MethodType(lambda self, x: x * k, module)
    return module


def with_method(k):
    class Own(Method):
        if k > 2:

            def scaled(self, x):
                return x * 3

    Own.__qualname__ = "Own"
    return Own()


def of_metaclass(k):
    return Reads(Counting("Made", (), {"_factor": k}), factor_of)


def partially(k):
    return functools.partial(torch.mul, other=k)


def nested(k):
    def times(x):
        def inside():
            return k

        return x * inside()

    return times


def decorated(k):
    def decorator(function):
        @functools.wraps(function)
        def wrapper(self, x):
            return function(self, x) * k

        return wrapper

    class Own(nn.Module):
        @decorator
        def forward(self, x):
            return x + 1

    return Own()


def default(k):
    return lambda x, k=k: x * k


def keyword_default(k):
    return lambda x, *, k=k: x * k


def generic(k):
    class Own(Method):
        scaled = functools.partialmethod(lambda self, factor, x: x * factor, k)

    return Own()


def cached(k):
    class Own(nn.Module):
        @functools.cached_property
        def factor(self):
            return k

        def forward(self, x):
            return x * self.factor

    return Own()


def aliased(k):
    first, second = Scale(2.0), Scale(2.0)
    return Reads((first, first if k > 2 else second), lambda held: 3.0 if held[0] is held[1] else 2.0)


# Whether a second module with the same number is known to be the same.
COMPARED = {
    "callable object": lambda k: Applies(Scale(k)),
    "bound method": lambda k: Applies(Scale(k).times),
    "slots": lambda k: Reads(Slotted(k), factor_of),
    "frozen dataclass": lambda k: Reads(Config(k), factor_of),
    "named tuple": lambda k: Reads(Point(k), factor_of),
    "simple namespace": lambda k: Reads(types.SimpleNamespace(factor=k), factor_of),
    "attribute of a dict": lambda k: Reads(setter(Mapped(), k), factor_of),
    "item of a subclass of dict": lambda k: Reads(Mapped(factor=k), operator.itemgetter("factor")),
    "enum": lambda k: Reads(Kind(k), lambda held: held.value),
    "deque": lambda k: Reads(collections.deque([k])),
    "default of a dict": lambda k: Reads(collections.defaultdict(functools.partial(float, k)), lambda held: held["x"]),
    "order of a dict": lambda k: Reads(dict.fromkeys((k, 2.0, 3.0)), lambda held: next(iter(held))),
    "mapping proxy": lambda k: Reads(types.MappingProxyType({0: k})),
    "frozen set": lambda k: Reads(frozenset({k, 5}), lambda held: 2.0 if 2.0 in held else 3.0),
    "tensor": lambda k: Reads([torch.tensor(k)]),
    "numpy array": lambda k: Reads(np.array([k]), lambda held: float(held[0])),
    "same object twice": aliased,
    "module in a list": Listed,
    "shared activation": Shared,
    "tied parameters": Tied,
    "requires_grad": Trainable,
    "training": lambda k: nn.Sequential(nn.Dropout(1.0)).train(k > 2),
    "closure over a dict": lambda k: Applies(closed({"k": k})),
    "nested function": lambda k: Applies(nested(k)),
    "default": lambda k: Applies(default(k)),
    "default of a keyword": lambda k: Applies(keyword_default(k)),
    "partial": lambda k: Applies(partially(k)),
    "decorator": decorated,
    "list of a class": of_class(lambda cls, k: add(cls, sizes=[k], factor=property(lambda self: self.sizes[0]))),
    "number of a class": of_class(lambda cls, k: add(cls, factor=k)),
    "nested class": of_class(
        lambda cls, k: add(cls, Config=type("Config", (), {"k": k}), factor=property(lambda self: self.Config.k))
    ),
    "property": of_class(lambda cls, k: add(cls, factor=property(lambda self: k))),
    "descriptor": of_class(lambda cls, k: add(cls, factor=Descriptor(k))),
    "__getattr__": of_class(lambda cls, k: add(cls, __getattr__=lambda self, name: k)),
    "class method": of_class(
        lambda cls, k: add(cls, read=classmethod(lambda cls: k), factor=property(lambda self: self.read()))
    ),
    "cached property": cached,
    "partial method": generic,
    "another method": with_method,
    "forward of the object": with_forward,
    "global number": assigned("FACTOR", Global),
    "global of a function": assigned("TABLE", Inner, lambda k: {"factor": k}),
    "global tensor": assigned("TENSOR", GlobalTensor, torch.tensor),
    "global module": assigned("LAYER", GlobalLayer, nn.LeakyReLU),
    "global object": assigned("SETTINGS", GlobalObject, lambda k: types.SimpleNamespace(factor=k)),
    "number of a Python module": with_helper("factor", float, ThroughModule),
    "function of a Python module": with_helper("function", default, ThroughFunction),
    "forward hook": hooked("register_forward_hook", Hook),
    "forward hook, a function": hooked("register_forward_hook", lambda k: lambda module, args, out: out * k),
    "forward pre-hook": hooked("register_forward_pre_hook", Hook),
    "parametrization": parametrized,
}
# What such a module computes depends on what is not known to be the same.
NOT_COMPARED = {
    "name of a method": lambda k: Named("two" if k == 2 else "three"),
    "set of texts": lambda k: Reads({"a", "b"}, lambda held: 2.0 if next(iter(held)) == "a" else 3.0),
    "metaclass": of_metaclass,
    "iterator": lambda k: Reads(iter([k] * 9), next),
    "generator": lambda k: Reads((each for each in [k] * 9), next),
    "sparse tensor": lambda k: Reads(torch.tensor([k]).to_sparse(), lambda held: held.to_dense()),
    "code as text": lambda k: Applies(lambda x: x * eval("k", {"k": k})),
}


def imports(x):
    from tests.bundles import unlike_modules  # noqa: PLW0406 - code that imports

    return x * unlike_modules.FACTOR


class Level(enum.IntEnum):
    """A member with an attribute."""

    low = 1


class Made:
    """An object that a class method makes."""

    def __init__(self):
        self.factor = 2.0

    @classmethod
    def create(cls):
        return cls()


class Shown:
    """An object that is shown in another way."""

    def __repr__(self):
        return "2"


class Ordered:
    """An object whose attributes have an order."""

    def __init__(self, k):
        for name in ("two", "three") if k == 2 else ("three", "two"):
            setattr(self, name, {"two": 2.0, "three": 3.0}[name])


class Fast(metaclass=abc.ABCMeta):  # noqa: B024
    """A class with which others are registered."""


def level(k):
    Level.low.extra = k
    return Reads(Level.low, lambda held: held.extra)


def made_by_class_method(k):
    class Own(Made):
        def __init__(self):
            self.factor = k

    return Reads(Own, lambda held: held.create().factor)


def shown_as(k):
    class Own(Shown):
        def __repr__(self):
            return str(k)

    return Reads(Own(), lambda held: float(f"{held!r}"))


def named_buffers(k):
    class Own(nn.Module):
        def named_buffers(self, *args, **kwargs):
            yield "a", torch.tensor(k)

        def forward(self, x):
            return x * next(self.buffers())

    return Own()


def registered(k):
    class Own:
        pass

    if k > 2:
        Fast.register(Own)
    return Reads(Own(), lambda held: 3.0 if isinstance(held, Fast) else 2.0)


def metadata(k):
    fields = [("a", int, dataclasses.field(default=1, metadata={"factor": k}))]
    cls = dataclasses.make_dataclass("Config", fields)
    return Reads(cls(), lambda held: dataclasses.fields(held)[0].metadata["factor"])


def matched(k):
    class Own:
        __match_args__ = ("a",) if k == 2 else ("b",)
        a, b = 2.0, 3.0

    def read(held):
        match held:
            case Own(found):
                return found

    return Reads(Own(), read)


def of_ordered_dict(k):
    held = collections.OrderedDict()
    held.factor = k
    return Reads(held, factor_of)


def state_hook(k):
    module = Applies(torch.sin)
    module.my_state_dict_factor, module.my_hooks = k, {1: k}
    return module


def cached_function(k):
    @functools.lru_cache
    def function(x):
        return x * function.factor

    function.factor = k
    return Applies(function)


# Those of which it is enough that they are not taken for each other.
UNLIKE = {
    "attribute of a member": level,
    "class method that makes an object": made_by_class_method,
    "__repr__": shown_as,
    "overridden method that torch calls": named_buffers,
    "registered class": registered,
    "metadata of a field": metadata,
    "__match_args__": matched,
    "attribute of an ordered dict": of_ordered_dict,
    "attributes named like hooks": state_hook,
    "attribute of a cached function": cached_function,
    "order of attributes": lambda k: Reads(Ordered(k), lambda held: next(iter(vars(held).values()))),
    "order of attributes by __dict__": lambda k: Reads(Ordered(k), lambda held: next(iter(held.__dict__.values()))),
    "name of a class": lambda k: Reads(type(f"Own{k}", (), {})(), lambda held: float(type(held).__name__[3:])),
    "parts of a generic alias": lambda k: Reads(list[type("Own", (), {"k": k})], lambda held: held.__args__[0].k),
    "hash of a process": lambda k: Reads(types.SimpleNamespace(_original_object_hash=k), factor_of),
}
# What torch's or Python's state decides, which is not compared.
STATE = {
    "rank": lambda x: x * torch.distributed.is_initialized(),
    "setting of a library": lambda x: x * torch.backends.cudnn.benchmark,
    "threads": lambda x: x * torch.get_num_threads(),
    "autocast": lambda x: x.to(torch.get_autocast_dtype("cpu")),
    "imported module": imports,
    "module as a value": lambda x, held=torch: held.sin(x),
    "time": lambda x: x * time.time(),
    "globals": lambda x: x * outer.__globals__["FACTOR"],
    "text of an attribute": lambda x: x * len("{.dtype}".format(x)),  # noqa: UP032
    "variables": lambda x: x * len(vars(x)),
    "order of a set": lambda x: x * len(next(iter({"a", "bc"}))),
    "print": lambda x: print("called") or x,  # noqa: T201
}


def setter(mapped, k):
    mapped.factor = k
    return mapped


@contextlib.contextmanager
def patched(owner, name, function):
    original, inherited = getattr(owner, name), name not in vars(owner)
    setattr(owner, name, function)
    try:
        yield
    finally:
        delattr(owner, name) if inherited else setattr(owner, name, original)
