"""Trees of arguments and results: pytrees, and the attributes of objects in them, such as a decoder's cache.

They are walked by path, copied, moved, cast, and given other values.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from enum import Enum
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

import torch

from backend_kwargs.torch_internals import pytree
from backend_kwargs.torch_internals.tensors import replace_tensors, without_modes
from backend_kwargs.trial.served import copied

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


def in_precision(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a floating tensor in `dtype`, a complex one in the complex type of that precision, others as they are."""
    if value.is_complex():
        return value.to(dtype.to_complex())
    return value.to(dtype) if value.is_floating_point() else value


def upcast(tree: T, dtype: torch.dtype) -> T:
    """Return a copy of a tree, or a module, with its floating and complex tensors in the precision of `dtype`."""
    if isinstance(tree, torch.nn.Module):  # whose to() would make complex parameters real
        twin = copy.deepcopy(tree)
        replace_tensors(twin, lambda tensor: in_precision(tensor, dtype))
        return twin

    def changed(value: torch.Tensor) -> torch.Tensor:
        return in_precision(value.detach().clone(), dtype).requires_grad_(value.requires_grad)

    return map_tensors(changed, tree)


def cotangents(outputs: Sequence[torch.Tensor], seed: int = 0) -> list[torch.Tensor]:
    """Return the gradients to start a backward pass with: random numbers for each output, 1 for a single number."""
    generator = torch.Generator().manual_seed(seed)
    return [_cotangent(each, generator) if each.numel() > 1 else torch.ones_like(each) for each in outputs]


def _cotangent(end: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    # An outer product of random vectors: no large draw on the host, and rows differ, since equal rows would cancel in
    # a batch norm. It has the output's strides; otherwise each backward pass would first make a copy.
    with without_modes():  # not an operator of the graph, so not counted
        row = torch.randn(end.shape[-1], generator=generator).to(end.device)
        column = torch.randn(*end.shape[:-1], 1, generator=generator).to(end.device)
        return torch.mul(row, column, out=torch.empty_like(end))


def copies(tree: T, *, plain: bool = False) -> T:
    """Return a tree with copies of its tensors, in their layouts; one that is given twice stays one.

    They require gradients and are inference tensors as the originals do and are, or neither if they are `plain`.
    """

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(tensor.is_inference() and not plain):
            return copied(tensor).requires_grad_(tensor.requires_grad and not plain)

    return map_tensors(cache(copy), tree)


def moved(tree: T, device: torch.device, dtype: torch.dtype | None = None) -> T:
    """Return a tree with its tensors on a device, numbers in the precision of `dtype`; a tensor that is so stays."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        there = (in_precision(tensor, dtype) if dtype else tensor).to(device)
        return tensor if there is tensor else there.detach().requires_grad_(tensor.requires_grad)

    return map_tensors(cache(move), tree)


def fresh_inputs(inputs: object, seed: int) -> Any:
    """Return other inputs of the same shapes, strides, types and ranges, so that a cached result is detected.

    Floating-point values are shuffled (those of a constant tensor are scaled by 0.5 to 1 instead); if no floating-point
    tensor can change, integers are shuffled. Masks and single integers stay. Accepts any pytree.
    """
    generator = torch.Generator().manual_seed(seed)
    leaves, spec = pytree.tree_flatten(inputs)
    numbers = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    floats = any(bool(_bytes_of_float8(leaf).any()) for leaf in numbers)
    return pytree.tree_unflatten([_fresh(leaf, generator, floats) for leaf in leaves], spec)


def _fresh(leaf: object, generator: torch.Generator, floats: bool) -> object:
    """Return another leaf of the same kind, with other numbers if they are `floats`, or else integers."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
        return copy.deepcopy(leaf)
    # Expanded dimensions stay expanded, since other strides would recompile.
    narrow = leaf.detach()[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in leaf.stride())]
    fresh = torch.empty_strided(narrow.shape, narrow.stride(), dtype=leaf.dtype, device=leaf.device)
    stays = leaf.is_complex() or leaf.dtype == torch.bool or leaf.is_floating_point() != floats or not leaf.numel()
    fresh.copy_(narrow if stays else _shuffled(narrow, generator))
    return fresh.expand(leaf.shape).requires_grad_(leaf.requires_grad)


def _bytes_of_float8(values: torch.Tensor) -> torch.Tensor:
    # CUDA neither compares nor indexes float8.
    return values.view(torch.uint8) if values.is_floating_point() and values.itemsize == 1 else values


def _shuffled(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return values in a random order, or floating-point ones scaled if all are equal."""
    raw = _bytes_of_float8(values)
    if raw is values and values.is_floating_point() and bool((values == values.flatten()[0]).all()):
        return values * (0.5 + 0.5 * torch.rand(values.shape, generator=generator)).to(values)
    # Drawn on the device: a CPU needs half a minute for a thousand million numbers.
    own = torch.Generator(values.device).manual_seed(int(torch.randint(1 << 31, (1,), generator=generator)))
    order = torch.randperm(values.numel(), generator=own, device=values.device)
    return raw.flatten()[order].reshape(values.shape).view(values.dtype)
