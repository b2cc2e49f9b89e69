"""Samples: the arguments of calls, their metadata as JSON, and the check of later inputs against them."""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch

from backend_kwargs.errors import BackendKwargsError, shown, wrong_value
from backend_kwargs.measure.trees import map_tensors
from backend_kwargs.options.layers import same
from backend_kwargs.torch_internals import pytree

WRITTEN = "written"  # the last property of a tensor to which the module writes


class Sample(NamedTuple):
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def samples_of(data: Any) -> list[Sample]:
    """Convert a list of samples: each a tensor, a tuple of arguments, a dict of keywords, or a pair of the two."""
    if not isinstance(data, list) or not data:
        raise wrong_value("build's `data`", "a list of at least one sample", data)
    return [_sample(each) for each in data]


def _sample(given: Any) -> Sample:
    if isinstance(given, torch.Tensor):
        return Sample((given,), {})
    if isinstance(given, Mapping):
        return Sample((), dict(given))
    if not isinstance(given, tuple | list):
        raise wrong_value("A sample", "a tensor, a tuple of arguments, a dict of keywords, or (args, kwargs)", given)
    if len(given) == 2 and isinstance(given[0], tuple | list) and isinstance(given[1], Mapping):
        return Sample(tuple(given[0]), dict(given[1]))
    return Sample(tuple(given), {})


def cloned(sample: Sample) -> Any:
    """Return `sample` with copies of its tensors, so that a module that changes its inputs changes the copies."""
    return map_tensors(cache(_clone), sample)  # an argument given twice stays one object


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides, which clone() does not keep of expanded and sliced tensors."""
    copied = tensor.detach().clone()
    if not is_dense(tensor) or copied.stride() == tensor.stride():
        return copied
    memory = tensor.detach().as_strided((extent(tensor),), (1,)).clone()
    # Not a view of `memory`: dynamo traces a view in another way.
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        memory.untyped_storage(), 0, tensor.shape, tensor.stride()
    )


def extent(tensor: torch.Tensor) -> int:
    """Return how many elements lie between the first and the last one of a strided tensor, both included."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in sizes) if tensor.numel() else 0


def memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses where a strided tensor begins and ends."""
    return tensor.data_ptr(), tensor.data_ptr() + extent(tensor) * tensor.element_size()


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether sizes, strides, dtype and memory are all there is of a tensor."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
    )


# ---- metadata


def described(value: Any, written: Collection[int] = ()) -> Any:
    """Return a sample's description as JSON values: properties of dense tensors, and plain values themselves.

    `written` are the ids of tensors that the module writes to.
    """
    if isinstance(value, torch.Tensor) and is_dense(value):
        known = [list(value.shape), list(value.stride()), str(value.dtype), value.device.type, str(value.layout)]
        return {"tensor": [*known, WRITTEN] if id(value) in written else known}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: described(item, written) for key, item in value.items()}}
    if type(value) in (list, tuple):
        return {type(value).__name__: [described(item, written) for item in value]}
    if value is None or type(value) in (bool, int, float, str):
        return {"value": value}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return {"other": f"{kind} that is not dense" if type(value) is torch.Tensor else kind}


def made(metadata: Any, device: torch.device) -> Any:
    """Return the value that `metadata` describes, with zeros in tensors; raise if it is of an unknown kind."""
    ((kind, value),) = metadata.items()
    if kind == "tensor":
        shape, stride, dtype, where, layout, *_ = value
        like = {"dtype": _torch(dtype), "device": device if where == device.type else where}
        if stride is None:
            return torch.zeros(shape, layout=_torch(layout), **like)
        elements = extent(torch.empty_strided(shape, stride, device="meta"))
        return torch.zeros(elements, **like).as_strided(shape, stride)
    if kind == "dict":
        return {key: made(item, device) for key, item in value.items()}
    if kind in ("list", "tuple"):
        items = [made(item, device) for item in value]
        return items if kind == "list" else tuple(items)
    if kind == "value":
        return value
    raise BackendKwargsError(f"A sample contains a {value}, which cannot be created from the bundle.")


def sizes_differ(metadata: Sequence[Any]) -> bool:
    """Return whether two samples of one structure differ in the sizes of a tensor, and in nothing else."""
    seen: dict[str, Any] = {}
    for each in metadata:
        shapes = shapes_of(each)
        if seen.setdefault(repr(_kinds(each)), shapes) != shapes:
            return True
    return False


def one_signature(metadata: Sequence[Any]) -> bool:
    """Return whether the samples differ in nothing but the sizes of tensors."""
    plain = [[value for kind, value in leaves_of(each) if kind == "value"] for each in metadata]
    return all(_kinds(each) == _kinds(metadata[0]) for each in metadata) and all(same(each, plain[0]) for each in plain)


def shapes_of(metadata: Any) -> list[list[int]]:
    """Return the shapes of the tensors that `metadata` describes, in order."""
    return [value[0] for kind, value in leaves_of(metadata) if kind == "tensor"]


def leaves_of(metadata: Any) -> Iterator[tuple[str, Any]]:
    """Yield the kind and the description of each argument that is not a dict, list or tuple."""
    ((kind, value),) = metadata.items()
    if kind in ("dict", "list", "tuple"):
        for item in value.values() if kind == "dict" else value:
            yield from leaves_of(item)
    else:
        yield kind, value


def _kinds(metadata: Any) -> Any:
    """Return what samples that differ only in sizes and in plain values have in common."""
    ((kind, value),) = metadata.items()
    if kind == "tensor":
        return len(value[0]), value[2:]
    if kind == "dict":
        return {key: _kinds(item) for key, item in value.items()}
    return [kind, *map(_kinds, value)] if kind in ("list", "tuple") else kind


# ---- the check of inputs


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

    def fits(self, value: Any) -> bool:
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

    value: Any

    def fits(self, value: Any) -> bool:
        """Return whether `value` is equal."""
        return same(value, self.value)

    def __str__(self) -> str:
        return shown(self.value)


def oddity(value: torch.Tensor) -> str:
    """Return what a tensor has that no sample has, as samples are copied: code may depend on it."""
    if value.__class__ is not torch.Tensor:
        return f" that is a {value.__class__.__name__}"
    if value.requires_grad:
        return " that requires a gradient"
    return f" with the attributes {sorted(vars(value))}" if vars(value) else ""


def _like(value: torch.Tensor) -> Like:
    stride = value.stride() if value.layout == torch.strided else None
    return Like(value.dtype, value.device, value.layout, tuple(value.shape), stride, is_dense(value))


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
        metadata: Sequence[Any],
        device: torch.device,
        *,
        dynamic: bool,
        values: bool,
        any_order: bool = False,
        named: Collection[str] = (),
        owned: Collection[torch.Tensor] | None = None,
    ) -> None:
        self._plain_tensors = owned is not None
        self._owned = _Memory(owned or ())
        self._any_order, self._named = any_order, frozenset(named)
        self._known: dict[Any, list[list[Like | Same | None]]] = {}
        self._sorted: dict[Any, list[list[Like | Same | None]]] = {}
        for each in metadata:
            likes = _likes(each, device, values=values, plain=owned is not None)
            for known, tree in ((self._known, likes), (self._sorted, self._in_order(*likes))):
                leaves, structure = pytree.tree_flatten(tree)
                known.setdefault(structure, []).append(leaves)
        if dynamic:
            self._known, self._sorted = (
                {structure: [_merged(leaves)] for structure, leaves in known.items()}
                for known in (self._known, self._sorted)
            )
        # The common case, tensors by position, is compared without flattening the arguments.
        structure, leaves = next(iter(self._known.items()))
        positional = structure == pytree.tree_flatten(((None,) * len(leaves[0]), {}))[1]
        likes = [each for each in leaves[0] if isinstance(each, Like)]
        tensors = [like for like in likes if like.stride is not None and not like.written]
        plain = positional and len(tensors) == len(leaves[0])
        self._exact = [_properties(each) for each in tensors] if plain else []

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise BackendKwargsError if the inputs match no sample."""
        exact = self._exact
        if not kwargs and exact and len(args) == len(exact):
            for value, (dtype, device, shape, stride, dense, is_complex) in zip(args, exact, strict=False):
                if value.__class__ is not torch.Tensor:
                    break
                if (
                    value.dtype is not dtype
                    or value.shape != shape
                    or value.device != device
                    or value.stride() != stride
                    or (dense and value.is_neg())
                    or (is_complex and value.is_conj())
                ):
                    break
                if self._plain_tensors and (value.requires_grad or value.__dict__ or value in self._owned):
                    break
            else:
                if not self._plain_tensors or len(args) == 1 or len({*map(id, args)}) == len(args):
                    return
        self._compare(args, kwargs)

    def _compare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        paths, structure = pytree.tree_flatten_with_path((args, kwargs))
        alike = self._known.get(structure)
        if alike is None:
            paths, in_order = pytree.tree_flatten_with_path(self._in_order(args, kwargs))
            alike = self._sorted.get(in_order, [])
        problems = [_problem(paths, likes) for likes in alike]
        if self._plain_tensors and not all(problems):
            self._owned = _Memory(self._owned.tensors)  # as it is now
            problems = [_twice(paths) or _of_module(paths, self._owned)]
        if not problems:
            wanted = " or ".join(map(_spelled, self._known))
            raise BackendKwargsError(
                f"The arguments must have the structure of a sample, {wanted}, got {_spelled(structure)}. Build with a "
                "sample of this kind."
            )
        if all(problems):
            raise BackendKwargsError(problems[0])

    def _in_order(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments with dicts in place of other mappings, sorted where their order does not matter."""
        free = self._any_order or kwargs.keys() <= self._named
        names = sorted(kwargs) if free else kwargs
        return self._plain(args), {name: self._plain(kwargs[name]) for name in names}

    def _plain(self, value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)(map(self._plain, value))
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return {key: self._plain(value[key]) for key in (sorted(value) if self._any_order else value)}
        leaves = pytree.tree_leaves(value)
        return value if len(leaves) == 1 and leaves[0] is value else _Blank()


def _properties(like: Like) -> Any:
    return like.dtype, like.device, like.shape, like.stride, like.dense, like.dense and like.dtype.is_complex


def _spelled(structure: pytree.TreeSpec) -> str:
    """Return the arguments of a call as a call is written, with `_` for each value."""
    args, kwargs = pytree.tree_unflatten([_Blank()] * structure.num_leaves, structure)
    return f"({', '.join([*map(repr, args), *(f'{name}={value!r}' for name, value in kwargs.items())])})"


class _Blank:
    def __repr__(self) -> str:
        return "_"


class _Memory:
    """The memory of tensors: whether another tensor is in it, at 0.3 µs."""

    def __init__(self, tensors: Collection[torch.Tensor]) -> None:
        self.tensors = tensors
        storages = [each.untyped_storage() for each in tensors if each.layout is torch.strided]
        spans = sorted({(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages if each.nbytes()})
        self.begins, self.ends = [begin for begin, _ in spans], [end for _, end in spans]

    def __contains__(self, tensor: torch.Tensor) -> bool:
        at = tensor.data_ptr()
        found = bisect_right(self.begins, at)
        return found > 0 and at < self.ends[found - 1]


def _likes(metadata: Any, device: torch.device, *, values: bool, plain: bool) -> Any:
    """Return the structure that `metadata` describes, with each argument's requirement, None for any value."""
    ((kind, value),) = metadata.items()
    if kind == "tensor":
        shape, stride, dtype, where, layout, *rest = value
        on = device if where == device.type else torch.device(where)
        strides = None if stride is None else tuple(stride)
        return Like(_torch(dtype), on, _torch(layout), tuple(shape), strides, values, values and WRITTEN in rest, plain)
    if kind == "dict":
        return {key: _likes(item, device, values=values, plain=plain) for key, item in value.items()}
    if kind in ("list", "tuple"):
        items = [_likes(item, device, values=values, plain=plain) for item in value]
        return items if kind == "list" else tuple(items)
    return Same(value) if kind == "value" and values else None


def _torch(name: str) -> Any:
    return getattr(torch, name.removeprefix("torch."))


def _merged(samples: list[list[Like | Same | None]]) -> list[Like | Same | None]:
    """Return one list of requirements for samples of one structure, with any value for sizes in which they differ."""
    return [_opened(leaves) for leaves in zip(*samples, strict=True)]


def _opened(leaves: Sequence[Like | Same | None]) -> Like | Same | None:
    likes = [leaf for leaf in leaves if isinstance(leaf, Like)]
    if not likes:
        return leaves[0]
    sizes = [{*each} for each in zip(*(like.shape for like in likes), strict=True)]
    shape = tuple(None if len(likes) == 1 or len(each) > 1 else next(iter(each)) for each in sizes)
    return replace(likes[0], shape=shape, stride=None, written=any(like.written for like in likes))


def _problem(paths: Any, likes: list[Like | Same | None]) -> str:
    for (path, value), like in zip(paths, likes, strict=True):
        if like and not like.fits(value):
            got = _described(value) if isinstance(value, torch.Tensor) else shown(value)
            odd = isinstance(like, Like) and like.plain and isinstance(value, torch.Tensor) and oddity(value)
            hint = "Pass its detach()." if odd else "Build with a sample of this kind, or with dynamic=True."
            return f"Input {spot(path)} must be {like}, got {got}. {hint}"
    return _shared(paths, likes)


def _described(value: torch.Tensor) -> str:
    other = value.layout is torch.strided and not is_dense(value)
    return f"{_like(value)}{' that is not dense' * other or oddity(value)}"


def _shared(paths: Any, likes: list[Like | Same | None]) -> str:
    """Return what is wrong if a tensor that the module writes to shares memory with another, as no sample's does."""
    tensors = [(path, value, like) for (path, value), like in zip(paths, likes, strict=True) if isinstance(like, Like)]
    for at, (path, value, like) in enumerate(tensors):
        for other_path, other, other_like in tensors[:at]:
            (begin, end), (first, last) = memory_of(value), memory_of(other)
            if (like.written or other_like.written) and begin < last and first < end:
                spots = f"{spot(other_path)} and {spot(path)}"
                return f"Inputs {spots} must not share memory, as the module writes to one of them: pass a clone()."
    return ""


def _twice(paths: Any) -> str:
    seen: dict[int, Any] = {}
    for path, value in paths:
        if isinstance(value, torch.Tensor) and seen.setdefault(id(value), path) is not path:
            return f"Inputs {spot(seen[id(value)])} and {spot(path)} must not be one tensor: pass a clone()."
    return ""


def _of_module(paths: Any, owned: "_Memory") -> str:
    for path, value in paths:
        if isinstance(value, torch.Tensor) and value in owned:
            return f"Input {spot(path)} must not share memory with the module's parameters or buffers: pass a clone()."
    return ""


def spot(path: Any) -> str:
    """Return the name of an argument by its path in (args, kwargs)."""
    return ("args" if path[0].idx == 0 else "kwargs") + str(pytree.keystr(path[1:]))
