"""Trees of arguments and results: pytrees, and the attributes of objects in them, such as a decoder's cache."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from enum import Enum
from types import ModuleType
from typing import Any, TypeVar

import torch

from backend_kwargs.torch_internals import pytree

T = TypeVar("T")
Results = Mapping[str, Any]  # trees by what they are of a call: output, gradient, written
# Objects of these kinds are compared as a whole.
WHOLE = (torch.Tensor, torch.nn.Module, type, Enum, ModuleType)


def walk(path: str, tree: object, within: frozenset[int] = frozenset()) -> Iterator[tuple[str, Any]]:
    """Yield each leaf of a tree with its path; objects that are `within` themselves end there."""
    for keys, leaf in pytree.tree_flatten_with_path(tree)[0]:
        name = path + pytree.keystr(keys)
        parts = parts_of(leaf)
        if not parts:
            yield name, leaf
        elif id(leaf) not in within:
            for part, value in parts.items():
                below = f"{name}[{part!r}]" if isinstance(leaf, Mapping) else f"{name}.{part}"
                yield from walk(below, value, within | {id(leaf)})


def tensors_of(tree: object) -> list[torch.Tensor]:
    """Return the tensors of a pytree."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], tree: T, memo: dict[int, object] | None = None) -> T:
    """Return a copy of a tree with `change` applied to each tensor, also to those in attributes of objects."""
    copies = {} if memo is None else memo

    def leaf(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return change(value)
        if (parts := parts_of(value)) and id(value) not in copies:
            copies[id(value)] = twin = copy.copy(value)
            for part, each in parts.items():
                mapped = map_tensors(change, each, copies)
                if isinstance(twin, MutableMapping):
                    twin[part] = mapped
                else:
                    object.__setattr__(twin, part, mapped)  # dataclasses may be frozen
        return copies.get(id(value), value)

    changed: T = pytree.tree_map(leaf, tree)
    return changed


def parts_of(leaf: object) -> dict[Any, Any]:
    """Return the fields, items or attributes of an object that `==` compares by identity or by tensors, else {}."""
    if isinstance(leaf, WHOLE):
        return {}
    if dataclasses.is_dataclass(leaf):
        return {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
    if isinstance(leaf, Mapping):
        return dict(leaf)
    # A function or a bound object is itself; others without an `==` of their own would differ from each copy.
    kind: Any = type(leaf)
    by_identity = kind.__eq__ is object.__eq__ and not callable(leaf)
    return dict(getattr(leaf, "__dict__", {})) if by_identity else {}
