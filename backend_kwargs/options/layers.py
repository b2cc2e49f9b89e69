"""Layers of options: later ones take precedence, and each value keeps the name of its layer."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


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
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        # A copy, since torch.compile removes some options from the caller's dict.
        object.__setattr__(self, "options", MappingProxyType(copied(self.options)))


def merge(layers: Iterable[Layer]) -> dict[str, Any]:
    """Return each option's value in the last layer that sets it."""
    return {name: value for layer in layers for name, value in layer.options.items()}


def sources(layers: Iterable[Layer]) -> dict[str, str]:
    """Return the name of the layer from which each option's value comes."""
    return {name: layer.source for layer in layers for name in layer.options}


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
