"""Samples: the arguments of calls, their metadata as JSON, and the check of later inputs against them."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from backend_kwargs.errors import BackendKwargsError, wrong_value
from backend_kwargs.keys import digest
from backend_kwargs.trial.served import span_of

Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = Mapping[str, Any]
Metadata: TypeAlias = dict[str, Any]  # a kind of value, and its description: `described` makes it


class Sample(NamedTuple):
    """The arguments of one call."""

    args: Args
    kwargs: dict[str, Any]


def samples_of(data: object) -> list[Sample]:
    """Convert a list of samples: each a tensor, a tuple of arguments, a dict of keywords, or a pair of the two."""
    if not isinstance(data, list) or not data:
        raise wrong_value("build's `data`", "a list of at least one sample", data)
    return [_sample(each) for each in data]


def _sample(value: object) -> Sample:
    """Return the arguments that one of the four forms stands for."""
    if isinstance(value, torch.Tensor):
        return Sample((value,), {})
    if isinstance(value, Mapping):
        return Sample((), dict(value))
    if not isinstance(value, tuple | list):
        raise wrong_value("A sample", "a tensor, a tuple of arguments, a dict of keywords, or (args, kwargs)", value)
    if len(value) == 2 and isinstance(value[0], tuple | list) and isinstance(value[1], Mapping):
        return Sample(tuple(value[0]), dict(value[1]))
    return Sample(tuple(value), {})


def content_hash(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's values."""
    values = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    return digest(memory_view(values))


def memory_view(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without a copy; valid as long as the tensor."""
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))  # numpy() needs numpy


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether sizes, strides, dtype and memory are all there is of a tensor."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
    )


# ---- metadata


def described(value: Any) -> Metadata:
    """Return a sample's description as JSON values: properties of dense tensors, and plain values themselves."""
    if isinstance(value, torch.Tensor) and is_dense(value):
        return {
            "tensor": [list(value.shape), list(value.stride()), str(value.dtype), value.device.type, str(value.layout)]
        }
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: described(item) for key, item in value.items()}}
    if type(value) in (list, tuple):
        return {type(value).__name__: [described(item) for item in value]}
    if value is None or type(value) in (bool, int, float, str):
        return {"value": value}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return {"other": f"{kind} that is not dense" if type(value) is torch.Tensor else kind}


def zeros_of(metadata: Metadata, device: torch.device) -> Any:
    """Return the value that `metadata` describes, with zeros in tensors; raise if it is of an unknown kind."""

    def leaf(kind: str, value: Any) -> object:
        if kind == "value":
            return value
        if kind != "tensor":
            raise BackendKwargsError(f"A sample contains a {value}, which cannot be created from the bundle.")
        shape, stride, dtype, where, layout, *_ = value
        like = {"dtype": torch_value(dtype), "device": device if where == device.type else where}
        if stride is None:
            return torch.zeros(shape, layout=torch_value(layout), **like)
        _, elements = span_of(torch.empty_strided(shape, stride, device="meta"))
        return torch.zeros(elements, **like).as_strided(shape, stride)

    return tree_of(metadata, leaf)


def tree_of(metadata: Metadata, leaf: Callable[[str, Any], object]) -> Any:
    """Return the dicts, lists and tuples that `metadata` describes, with `leaf(kind, description)` in them."""
    ((kind, value),) = metadata.items()
    if kind == "dict":
        return {key: tree_of(item, leaf) for key, item in value.items()}
    if kind in ("list", "tuple"):
        items = [tree_of(item, leaf) for item in value]
        return items if kind == "list" else tuple(items)
    return leaf(kind, value)


def sizes_differ(metadata: Sequence[Metadata]) -> bool:
    """Return whether two samples of one structure differ in the sizes of a tensor, and in nothing else."""
    seen: dict[str, list[list[int]]] = {}
    return any(seen.setdefault(repr(_kinds(sample)), shapes_of(sample)) != shapes_of(sample) for sample in metadata)


def shapes_of(metadata: Metadata) -> list[list[int]]:
    """Return the shapes of the tensors that `metadata` describes, in order."""
    return [value[0] for kind, value in leaves_of(metadata) if kind == "tensor"]


def leaves_of(metadata: Metadata) -> list[tuple[str, Any]]:
    """Return the kind and the description of each argument that is not a dict, list or tuple."""
    found: list[tuple[str, Any]] = []
    tree_of(metadata, lambda *leaf: found.append(leaf))
    return found


def _kinds(metadata: Metadata) -> object:
    """Return what samples that differ only in sizes and in plain values have in common."""
    return tree_of(metadata, lambda kind, value: (len(value[0]), value[2:]) if kind == "tensor" else kind)


def torch_value(name: str) -> Any:
    """Return the dtype or layout of this name."""
    return getattr(torch, name.removeprefix("torch."))
