"""The check of a call's inputs against the samples: by dtype, sizes, strides, device and layout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from backend_kwargs.bundles.samples import Args, Kwargs, Metadata, is_dense, torch_value, tree_of
from backend_kwargs.errors import BackendKwargsError, shown
from backend_kwargs.torch_internals import pytree
from backend_kwargs.torch_internals.tensors import same_layouts

KeyPath: TypeAlias = tuple[Any, ...]  # where an argument is in (args, kwargs), as in torch's pytrees
Paths: TypeAlias = Sequence[tuple[KeyPath, Any]]
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
        sparse = "" if self.layout is torch.strided else f" {self.layout}".replace("torch.", "")
        return f"{self.dtype}[{sizes}]{sparse} on {self.device}{laid_out}".removeprefix("torch.")


Requirement: TypeAlias = Like | None  # None: any value


class InputCheck:
    """Whether a call's inputs are like one of the samples: dtype, shape, device and layout of each tensor.

    If sizes are `dynamic`, those in which the samples differ (all of a single sample) may have any value, and strides
    are not compared. Keywords, and keys of dicts, may come in any order. Objects other than tensors, dicts, lists and
    tuples are not compared.
    """

    def __init__(self, metadata: Sequence[Metadata], device: torch.device, *, dynamic: bool) -> None:
        samples = [_required(sample, device) for sample in metadata]
        self._structures = dict.fromkeys(_spelled(pytree.tree_structure(sample)) for sample in samples)
        self._known: dict[pytree.TreeSpec, list[list[Requirement]]] = {}
        for sample in samples:
            leaves, structure = pytree.tree_flatten(_in_order(*sample))
            self._known.setdefault(structure, []).append(leaves)
        if dynamic:
            self._known = {
                structure: [[*map(_opened, zip(*alike, strict=True))]] for structure, alike in self._known.items()
            }
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
        self._compare(args, kwargs)
        known = len(passed) == MOST_PASSED
        if tensors and not known and all(map(is_dense, tensors)) and len({*map(id, tensors)}) == len(tensors):
            self._passed[place] = (same_layouts(tensors), *passed)

    def _compare(self, args: Args, kwargs: Kwargs) -> None:
        """Compare the inputs with each sample of their structure."""
        paths, structure = pytree.tree_flatten_with_path(_in_order(args, kwargs))
        problems = [_problem(paths, likes) for likes in self._known.get(structure, ())]
        if not problems:
            got = _spelled(pytree.tree_structure((args, kwargs)))
            raise BackendKwargsError(
                f"The arguments must have the structure of a sample, {' or '.join(self._structures)}, got {got}. Build "
                "with a sample of this kind."
            )
        if all(problems):
            raise BackendKwargsError(problems[0])


def _in_order(args: Args, kwargs: Kwargs) -> tuple[object, object]:
    """Return the arguments with dicts in place of other mappings, sorted, since dynamo's guards check what matters."""
    return _plain(args), _plain(kwargs)


def _plain(value: Any) -> object:
    """Return an argument with its mappings in order, and with a blank for what is no dict, list or tuple."""
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


def _required(metadata: Metadata, device: torch.device) -> Any:
    """Return the structure that `metadata` describes, with each argument's requirement, None for any value."""

    def leaf(kind: str, value: Any) -> Requirement:
        if kind != "tensor":
            return None
        shape, stride, dtype, where, layout, *_ = value
        on = device if where == device.type else torch.device(where)
        strides = None if stride is None else tuple(stride)
        return Like(torch_value(dtype), on, torch_value(layout), tuple(shape), strides)

    return tree_of(metadata, leaf)


def _opened(leaves: Sequence[Requirement]) -> Requirement:
    """Return what samples require of one argument, with any value for sizes in which they differ."""
    likes = [leaf for leaf in leaves if isinstance(leaf, Like)]
    if not likes:
        return None
    sizes = [{*each} for each in zip(*(like.shape for like in likes), strict=True)]
    shape = tuple(None if len(likes) == 1 or len(each) > 1 else next(iter(each)) for each in sizes)
    return replace(likes[0], shape=shape, stride=None)


def _problem(paths: Paths, likes: list[Requirement]) -> str:
    """Return what is wrong with inputs of a sample's structure, "" if nothing is."""
    for (path, value), like in zip(paths, likes, strict=True):
        if like and not like.fits(value):
            got = shown(value)
            if isinstance(value, torch.Tensor):
                stride = value.stride() if value.layout is torch.strided else None
                got = str(Like(value.dtype, value.device, value.layout, tuple(value.shape), stride))
            hint = "Build with a sample of this kind, or with dynamic=True."
            return f"Input {spot(path)} must be {like}, got {got}. {hint}"
    return ""


def spot(path: KeyPath) -> str:
    """Return the name of an argument by its path in (args, kwargs)."""
    return ("args" if path[0].idx == 0 else "kwargs") + str(pytree.keystr(path[1:]))
