"""The check of a call's inputs against the samples: by dtype, sizes, strides, device and layout."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from backend_kwargs.bundles.samples import WRITTEN, Args, Kwargs, Metadata, is_dense, torch_value, tree_of
from backend_kwargs.errors import BackendKwargsError, shown
from backend_kwargs.graphs.memory import Memory, overlapping
from backend_kwargs.options.layers import same
from backend_kwargs.torch_internals import pytree
from backend_kwargs.torch_internals.tensors import same_layouts

KeyPath: TypeAlias = tuple[Any, ...]  # where an argument is in (args, kwargs), as in torch's pytrees
Paths: TypeAlias = Sequence[tuple[KeyPath, Any]]
MOST_PASSED = 4  # guards of inputs for one set of arguments


@dataclass(frozen=True, slots=True)
class Like:
    """The required properties of a tensor; None in `shape` allows any size, and `stride` None any stride.

    A `dense` one must be nothing but its memory; `written` says that the module writes to it. A `plain` one must
    also be a torch.Tensor that requires no gradient and has no attributes.
    """

    dtype: torch.dtype
    device: torch.device
    layout: torch.layout
    shape: tuple[int | None, ...]
    stride: tuple[int, ...] | None
    dense: bool = False
    written: bool = False
    plain: bool = False

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
            and (not self.dense or is_dense(value))
            and (not self.plain or not oddity(value))
        )

    def __str__(self) -> str:
        sizes = ", ".join("any" if size is None else str(size) for size in self.shape)
        laid_out = f" with strides {self.stride}" if self.stride is not None else ""
        sparse = "" if self.layout is torch.strided else f" {self.layout}".replace("torch.", "")
        return f"{self.dtype}[{sizes}]{sparse} on {self.device}{laid_out}".removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Same:
    """The required value of an argument that is not a tensor: the sample's, which is part of the compiled code."""

    value: object

    def fits(self, value: object) -> bool:
        """Return whether `value` is equal."""
        return same(value, self.value)

    def __str__(self) -> str:
        return shown(self.value)


Requirement: TypeAlias = Like | Same | None  # None: any value


def oddity(value: torch.Tensor) -> str:
    """Return what a tensor has that no sample has, as samples are copied: code may depend on it."""
    if value.__class__ is not torch.Tensor:
        return f" that is a {value.__class__.__name__}"
    if value.requires_grad:
        return " that requires a gradient"
    return f" with the attributes {sorted(vars(value))}" if vars(value) else ""


class InputCheck:
    """Whether a call's inputs are like one of the samples: dtype, shape, device and layout of each tensor.

    If sizes are `dynamic`, those in which the samples differ (all of a single sample) may have any value, and strides
    are not compared. If `values` is true, arguments that are not tensors must equal the sample's. Keywords may come in
    another order if all of them are in `named`, or if `any_order` is true, which includes the keys of dicts. Objects
    other than dicts, lists and tuples are not compared. If there are no guards, `owned` are the module's tensors: then
    inputs must be plain tensors, each given once, that share no memory with these.
    """

    def __init__(
        self,
        metadata: Sequence[Metadata],
        device: torch.device,
        *,
        dynamic: bool,
        values: bool,
        any_order: bool = False,
        named: Collection[str] = (),
        owned: Collection[torch.Tensor] | None = None,
    ) -> None:
        self._owned = None if owned is None else Memory(owned)
        self._any_order, self._named = any_order, frozenset(named)
        samples = [_required(sample, device, values=values, plain=owned is not None) for sample in metadata]
        self._structures = dict.fromkeys(_spelled(pytree.tree_structure(sample)) for sample in samples)
        self._known: dict[pytree.TreeSpec, list[list[Requirement]]] = {}
        for sample in samples:
            leaves, structure = pytree.tree_flatten(self._in_order(*sample))
            self._known.setdefault(structure, []).append(leaves)
        if dynamic:
            self._known = {
                structure: [[*map(_opened, zip(*alike, strict=True))]] for structure, alike in self._known.items()
            }
        # Guards of inputs that were compared, by the number and the names of the arguments.
        self._passed: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        likes = [like for alike in self._known.values() for leaves in alike for like in leaves]
        self._writes = any(isinstance(like, Like) and like.written for like in likes)

    def __call__(self, args: Args, kwargs: Kwargs) -> None:
        """Raise BackendKwargsError if the inputs match no sample."""
        tensors = (*args, *kwargs.values()) if kwargs else args
        place = (len(args), *kwargs)
        passed = self._passed.get(place, ())
        for guards in passed:
            if guards.check(*tensors) and (self._owned is None or self._are_separate(tensors, self._owned)):
                return
        self._compare(args, kwargs)
        # Where the module writes, the addresses of the inputs count too.
        known = len(passed) == MOST_PASSED
        if (
            tensors
            and not known
            and not self._writes
            and all(map(is_dense, tensors))
            and len({*map(id, tensors)}) == len(tensors)
        ):
            self._passed[place] = (same_layouts(tensors), *passed)

    def _are_separate(self, tensors: Sequence[torch.Tensor], owned: "Memory") -> bool:
        """Return whether tensors have no gradient, no attributes, and none of the module's memory."""
        # Without gradient mode dynamo's guards do not tell the first.
        return not any(tensor.requires_grad or tensor.__dict__ or tensor in owned for tensor in tensors)

    def _compare(self, args: Args, kwargs: Kwargs) -> None:
        """Compare the inputs with each sample of their structure."""
        paths, structure = pytree.tree_flatten_with_path(self._in_order(args, kwargs))
        problems = [_problem(paths, likes) for likes in self._known.get(structure, ())]
        if self._owned is not None and not all(problems):
            self._owned = Memory(self._owned.tensors)  # as it is now
            problems = [_not_separate(paths, self._owned)]
        if not problems:
            got = _spelled(pytree.tree_structure((args, kwargs)))
            raise BackendKwargsError(
                f"The arguments must have the structure of a sample, {' or '.join(self._structures)}, got {got}. Build "
                "with a sample of this kind."
            )
        if all(problems):
            raise BackendKwargsError(problems[0])

    def _in_order(self, args: Args, kwargs: Kwargs) -> tuple[object, dict[str, object]]:
        """Return the arguments with dicts in place of other mappings, sorted where their order does not matter."""
        free = self._any_order or kwargs.keys() <= self._named
        names = sorted(kwargs) if free else kwargs
        return self._plain(args), {name: self._plain(kwargs[name]) for name in names}

    def _plain(self, value: Any) -> object:
        """Return an argument with its mappings in order, and with a blank for what is no dict, list or tuple."""
        if type(value) in (list, tuple):
            return type(value)(map(self._plain, value))
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return {key: self._plain(value[key]) for key in (sorted(value) if self._any_order else value)}
        leaves = pytree.tree_leaves(value)
        return value if len(leaves) == 1 and leaves[0] is value else _Blank()


def _spelled(structure: pytree.TreeSpec) -> str:
    """Return the arguments of a call as a call is written, with `_` for each value."""
    args, kwargs = pytree.tree_unflatten([_Blank()] * structure.num_leaves, structure)
    return f"({', '.join([*map(repr, args), *(f'{name}={value!r}' for name, value in kwargs.items())])})"


class _Blank:
    def __repr__(self) -> str:
        return "_"


def _required(metadata: Metadata, device: torch.device, *, values: bool, plain: bool) -> Any:
    """Return the structure that `metadata` describes, with each argument's requirement, None for any value."""

    def leaf(kind: str, value: Any) -> Requirement:
        if kind != "tensor":
            return Same(value) if kind == "value" and values else None
        shape, stride, dtype, where, layout, *rest = value
        on = device if where == device.type else torch.device(where)
        strides = None if stride is None else tuple(stride)
        kinds = torch_value(dtype), on, torch_value(layout)
        return Like(*kinds, tuple(shape), strides, values, values and WRITTEN in rest, plain)

    return tree_of(metadata, leaf)


def _opened(leaves: Sequence[Requirement]) -> Requirement:
    """Return what samples require of one argument, with any value for sizes in which they differ."""
    likes = [leaf for leaf in leaves if isinstance(leaf, Like)]
    if not likes:
        return leaves[0]
    sizes = [{*each} for each in zip(*(like.shape for like in likes), strict=True)]
    shape = tuple(None if len(likes) == 1 or len(each) > 1 else next(iter(each)) for each in sizes)
    return replace(likes[0], shape=shape, stride=None, written=any(like.written for like in likes))


def _problem(paths: Paths, likes: list[Requirement]) -> str:
    """Return what is wrong with inputs of a sample's structure, "" if nothing is."""
    for (path, value), like in zip(paths, likes, strict=True):
        if like and not like.fits(value):
            odd, got = "", shown(value)
            if isinstance(value, torch.Tensor):
                strided = value.layout is torch.strided
                odd = oddity(value)
                stride = value.stride() if strided else None
                own = Like(value.dtype, value.device, value.layout, tuple(value.shape), stride)
                got = f"{own}{' that is not dense' if strided and not is_dense(value) else odd}"
            hint = "Build with a sample of this kind, or with dynamic=True."
            if odd and isinstance(like, Like) and like.plain:
                hint = "Pass its detach()."
            return f"Input {spot(path)} must be {like}, got {got}. {hint}"
    return _shared(paths, likes)


def _shared(paths: Paths, likes: list[Requirement]) -> str:
    """Return what is wrong if a tensor that the module writes to shares memory with another, as no sample's does."""
    tensors = [(path, value, like) for (path, value), like in zip(paths, likes, strict=True) if isinstance(like, Like)]
    written = [at for at, (_, _, like) in enumerate(tensors) if like.written]
    if not written or not (pair := overlapping([value for _, value, _ in tensors], written)):
        return ""
    first, other = (spot(tensors[at][0]) for at in pair)
    return f"Inputs {first} and {other} must not share memory, as the module writes to one of them: pass a clone()."


def _not_separate(paths: Paths, owned: "Memory") -> str:
    """Return what is wrong if a tensor is given twice, or is in memory of the module, "" if nothing is."""
    tensors = [(path, value) for path, value in paths if isinstance(value, torch.Tensor)]
    seen: dict[int, KeyPath] = {}
    for path, value in tensors:
        if seen.setdefault(id(value), path) is not path:
            return f"Inputs {spot(seen[id(value)])} and {spot(path)} must not be one tensor: pass a clone()."
    for path, value in tensors:
        if value in owned:
            return f"Input {spot(path)} must not share memory with the module's parameters or buffers: pass a clone()."
    return ""


def spot(path: KeyPath) -> str:
    """Return the name of an argument by its path in (args, kwargs)."""
    return ("args" if path[0].idx == 0 else "kwargs") + str(pytree.keystr(path[1:]))
