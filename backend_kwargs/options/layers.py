"""Layers of options: later ones take precedence, and each value keeps the name of its layer."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

Options = Mapping[str, Any]  # values by name
# Options that permit what they name, so that `auto` also races code without it: (the user's value, a candidate's).
PERMITTING: Mapping[str, tuple[object, object]] = MappingProxyType({"freezing": (True, False)})


def copied(value: Any) -> Any:
    """Copy the containers in `value` and share their elements, so that neither side sees changes by the other."""
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(copied(item) for item in value)
    return value


@dataclass(frozen=True, slots=True)
class Layer:
    """Options from one source, and the source's name, such as "template max_autotune"."""

    source: str
    options: Options

    def __post_init__(self) -> None:
        # A copy, since torch.compile removes some options from the caller's dict.
        object.__setattr__(self, "options", MappingProxyType(copied(self.options)))


def merge(layers: Iterable[Layer]) -> Options:
    """Return each option's value in the last layer that sets it."""
    return {name: value for layer in layers for name, value in layer.options.items()}


def sources(layers: Iterable[Layer]) -> dict[str, str]:
    """Return the name of the layer from which each option's value comes."""
    return {name: layer.source for layer in layers for name in layer.options}


def with_users(options: Options, users: Options) -> Options:
    """Return what a graph is compiled with under a candidate of `auto`: its `options`, with the user's own on top.

    The exception are options of the user's that only permit what they name: `freezing=True` lets a candidate win that
    sets it to False.
    """
    return {**options, **standing(users, options)}


def standing(users: Options, options: Options) -> Options:
    """Return the user's own options that precede a candidate's `options`: all but those that only permit."""
    return {name: value for name, value in users.items() if PERMITTING.get(name) != (value, options.get(name))}


def same(a: Any, b: Any) -> bool:
    """Return whether two option values have equal value and type: `1`, `1.0` and `True` differ, `nan` equals `nan`."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return repr(a) == repr(b)
    try:
        equal = a == b
        return bool(equal.all()) if hasattr(equal, "all") else bool(equal)
    except Exception:  # noqa: BLE001 - such as tensors of two shapes: values that cannot be compared are not equal
        return False
