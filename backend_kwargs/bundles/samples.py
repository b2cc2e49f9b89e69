"""Samples: the arguments of calls, their metadata as JSON, and the check of later inputs against them."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch

from backend_kwargs.errors import BackendKwargsError, shown, wrong_value
from backend_kwargs.keys import digest
from backend_kwargs.torch_internals import pytree
from backend_kwargs.torch_internals.tensors import same_layouts
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
    return [sample_of(each) for each in data]


def sample_of(value: object) -> Sample:
    """Return the arguments of a call that one of the four forms stands for: everyone's example inputs."""
    if isinstance(value, torch.Tensor):
        return Sample((value,), {})
    if isinstance(value, Mapping):
        return Sample((), dict(value))
    if not isinstance(value, tuple | list):
        raise wrong_value("Inputs", "a tensor, a tuple of arguments, a dict of keywords, or (args, kwargs)", value)
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
        like, (shape, stride, *_) = _like(value, device), value
        if stride is None:  # a sparse tensor, in bundles of earlier releases
            return torch.zeros(shape, dtype=like.dtype, device=like.device, layout=like.layout)
        _, elements = span_of(torch.empty_strided(shape, stride, device="meta"))
        return torch.zeros(elements, dtype=like.dtype, device=like.device).as_strided(shape, stride)

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
    for sample in metadata:
        alike = tree_of(sample, lambda kind, value: (len(value[0]), value[2:]) if kind == "tensor" else kind)
        shapes = [value[0] for kind, value in leaves_of(sample) if kind == "tensor"]
        if seen.setdefault(repr(alike), shapes) != shapes:
            return True
    return False


def leaves_of(metadata: Metadata) -> list[tuple[str, Any]]:
    """Return the kind and the description of each argument that is not a dict, list or tuple."""
    found: list[tuple[str, Any]] = []
    tree_of(metadata, lambda *leaf: found.append(leaf))
    return found


def torch_value(name: str) -> Any:
    """Return the dtype or layout of this name."""
    return getattr(torch, name.removeprefix("torch."))


# ---- the check of a call's inputs

MOST_PASSED = 4  # guards of inputs for one set of arguments


@dataclass(frozen=True, slots=True)
class Like:
    """The required properties of a tensor; None in `shape` allows any size, and `stride` None any stride."""

    dtype: torch.dtype
    device: torch.device
    layout: torch.layout
    shape: tuple[int | None, ...]
    stride: tuple[int, ...] | None

    def fits(self, value: object) -> bool:
        """Return whether `value` is such a tensor."""
        return (
            isinstance(value, torch.Tensor)
            and value.dtype is self.dtype
            and value.device == self.device
            and value.layout is self.layout
            and len(value.shape) == len(self.shape)
            and all(wanted in (None, size) for wanted, size in zip(self.shape, value.shape, strict=True))
            and (self.stride is None or value.stride() == self.stride)
        )

    def __str__(self) -> str:
        sizes = ", ".join("any" if size is None else str(size) for size in self.shape)
        laid_out = f" with strides {self.stride}" if self.stride is not None else ""
        sparse = "" if self.layout is torch.strided else f" {self.layout}"
        return f"{self.dtype}[{sizes}]{sparse} on {self.device}{laid_out}".replace("torch.", "")


Requirement: TypeAlias = Like | None  # None: any value


class InputCheck:
    """Whether a call's inputs are like one of the samples: dtype, shape, device and layout of each tensor.

    If sizes are `dynamic`, those in which the samples differ (all of a single sample) may have any value, and strides
    are not compared. Keywords, and keys of dicts, may come in any order. Objects other than tensors, dicts, lists and
    tuples are not compared.
    """

    def __init__(self, metadata: Sequence[Metadata], device: torch.device, *, dynamic: bool) -> None:
        # Each argument's requirement, None for any value.
        required = lambda kind, value: _like(value, device) if kind == "tensor" else None  # noqa: E731
        samples: list[Any] = [tree_of(sample, required) for sample in metadata]
        self._known: dict[pytree.TreeSpec, list[list[Requirement]]] = {}
        for sample in samples:
            leaves, structure = pytree.tree_flatten(_plain(sample))
            self._known.setdefault(structure, []).append(leaves)
        if dynamic:
            self._known = {structure: _of_any_sizes(alike) for structure, alike in self._known.items()}
        # Guards of inputs that were compared, by the number and the names of the arguments.
        self._passed: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __call__(self, args: Args, kwargs: Kwargs) -> None:
        """Raise BackendKwargsError if the inputs match no sample."""
        tensors = (*args, *kwargs.values()) if kwargs else args
        place = (len(args), *kwargs)
        passed = self._passed.get(place, ())
        for guards in passed:
            if guards.check(*tensors):
                return
        paths, structure = pytree.tree_flatten_with_path(_plain((args, kwargs)))
        problems = [_problem(paths, likes) for likes in self._known.get(structure, ())]
        if not problems:
            known = " or ".join(map(_spelled, self._known))
            raise BackendKwargsError(
                f"The arguments must have the structure of a sample, {known}, got {_spelled(structure)}. Build with a "
                "sample of this kind."
            )
        if all(problems):
            raise BackendKwargsError(problems[0])
        if (
            tensors
            and len(passed) < MOST_PASSED
            and all(map(is_dense, tensors))
            and len({*map(id, tensors)}) == len(tensors)
        ):
            self._passed[place] = (same_layouts(tensors), *passed)


def _plain(value: Any) -> object:
    """Return arguments with sorted dicts for their mappings, and with a blank for what is no dict, list or tuple.

    dynamo's guards check what of that matters.
    """
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(value[key]) for key in sorted(value)}
    leaves = pytree.tree_leaves(value)
    return value if len(leaves) == 1 and leaves[0] is value else _Blank()


def _spelled(structure: pytree.TreeSpec) -> str:
    """Return the arguments of a call as a call is written, with `_` for each value."""
    args, kwargs = pytree.tree_unflatten([_Blank()] * structure.num_leaves, structure)
    return f"({', '.join([*map(repr, args), *(f'{name}={value!r}' for name, value in kwargs.items())])})"


class _Blank:
    def __repr__(self) -> str:
        return "_"


def _like(value: list[Any], device: torch.device) -> Like:
    """Return the properties of a tensor that is described in metadata, on `device` if that is of its type."""
    shape, stride, dtype, where, layout, *_ = value
    on = device if where == device.type else torch.device(where)
    return Like(torch_value(dtype), on, torch_value(layout), tuple(shape), None if stride is None else tuple(stride))


def _of_any_sizes(alike: Sequence[Sequence[Requirement]]) -> list[list[Requirement]]:
    """Return what samples of one structure require, those that differ only in sizes as one."""
    kinds: dict[object, list[Any]] = {}
    for leaves in alike:
        kind = tuple(like and (like.dtype, like.device, like.layout, len(like.shape)) for like in leaves)
        kinds.setdefault(kind, []).append(leaves)
    return [[*map(_opened, zip(*each, strict=True))] for each in kinds.values()]


def _opened(leaves: Sequence[Requirement]) -> Requirement:
    """Return what samples require of one argument, with any value for sizes in which they differ."""
    sizes = [{*each} for each in zip(*(like.shape for like in leaves if like), strict=True)]
    shape = tuple(None if len(leaves) == 1 or len(each) > 1 else next(iter(each)) for each in sizes)
    return leaves[0] and replace(leaves[0], shape=shape, stride=None)


def _problem(paths: Sequence[tuple[Any, Any]], likes: list[Requirement]) -> str:
    """Return what is wrong with inputs of a sample's structure, by their paths in (args, kwargs); "" if nothing is."""
    for (path, value), like in zip(paths, likes, strict=True):
        if like and not like.fits(value):
            got = shown(value)
            if isinstance(value, torch.Tensor):
                stride = value.stride() if value.layout is torch.strided else None
                got = str(Like(value.dtype, value.device, value.layout, tuple(value.shape), stride))
            hint = "Build with a sample of this kind, or with dynamic=True."
            where = "args" if path[0].idx == 0 else "kwargs"
            return f"Input {where}{pytree.keystr(path[1:])} must be {like}, got {got}. {hint}"
    return ""
