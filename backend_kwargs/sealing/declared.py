"""What a user declares of a sealed function's sizes: their names, the values that will come, and buckets to pad to."""

import copy
import inspect
import itertools
import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from backend_kwargs.errors import BackendKwargsError, unknown, wrong_value

Point: TypeAlias = dict[str, int]  # a size for each name
Values: TypeAlias = Sequence[int] | range

DIMS = "a dict such as {'x': {0: 'batch', 1: 'sequence'}}"
SIZES = "a dict such as {'batch': [1, 2, 4], 'sequence': range(1, 513)}"
BUCKETS = "a dict such as {'sequence': [64, 128, 256]}"


class UndeclaredError(Exception):
    """A call was not declared: why, and for the log what it had."""

    def __init__(self, reason: str, got: str = "") -> None:
        super().__init__(reason)
        self.got = got


class InputPath(NamedTuple):
    """A tensor among the arguments, and the names of its dimensions.

    It is the argument at `position`, or else the keyword `keyword`, or in that by `keys`.
    """

    name: str
    position: int | None
    keyword: str | None
    keys: tuple[int | str, ...]
    dims: tuple[tuple[int, str], ...]
    rank: int

    def get(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the tensor; raise LookupError, TypeError or AttributeError if it is not there."""
        position = self.position
        value = args[position] if position is not None and position < len(args) else kwargs[self.keyword]  # type: ignore[index]
        for key in self.keys:
            value = value[key] if isinstance(value, Mapping) or isinstance(key, int) else getattr(value, key)
        return value

    def put(self, args: list[Any], kwargs: dict[str, Any], value: object) -> None:
        """Replace the tensor, in copies of the dicts, lists and tuples that hold it."""
        if self.position is not None and self.position < len(args):
            args[self.position] = _with(args[self.position], self.keys, value)
        else:
            assert self.keyword is not None
            kwargs[self.keyword] = _with(kwargs[self.keyword], self.keys, value)


def _with(tree: Any, keys: Sequence[int | str], value: object) -> Any:
    """Return a copy of a tree with another value at a path."""
    if not keys:
        return value
    key, *rest = keys
    if isinstance(tree, Mapping) or isinstance(key, int):
        changed = _with(tree[key], rest, value)
        if isinstance(tree, tuple):
            items = [changed if at == key else item for at, item in enumerate(tree)]
            return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
        twin: Any = copy.copy(tree)
        twin[key] = changed
    else:
        twin = copy.copy(tree)
        setattr(twin, key, _with(getattr(tree, key), rest, value))
    return twin


@dataclass(frozen=True)
class Declared:
    """Names of dimensions, the sizes that will come, and the buckets to which they are padded.

    A list of sizes asks for code for each of them; a range for code for any of them.
    """

    dims: Mapping[str, Mapping[int, str]]
    sizes: Mapping[str, Values]
    buckets: Mapping[str, tuple[int, ...]]
    fill: Mapping[str, float]

    @classmethod
    def read(cls, dims: object, sizes: object, buckets: object, fill: object) -> "Declared":
        """Return what the arguments of `seal` declare; raise if they are wrong or do not fit one another."""
        named = {name: _named_dims(name, each) for name, each in _items("dims", DIMS, dims)}
        names = {name for each in named.values() for name in each.values()}
        padded = {
            _known(name, names): tuple(sorted({*_values(f"buckets[{name!r}]", each)}))
            for name, each in _items("buckets", BUCKETS, buckets)
        }
        given = {_known(name, names): _values(f"sizes[{name!r}]", each) for name, each in _items("sizes", SIZES, sizes)}
        values = {name: range(1, each[-1] + 1) for name, each in padded.items()} | given
        if missing := sorted(names - values.keys()):
            raise BackendKwargsError(
                f"seal's `sizes` must have the sizes of {missing[0]!r}: sizes={{{missing[0]!r}: [...]}}."
            )
        for name, each in padded.items():
            if max(values[name]) > each[-1]:
                raise BackendKwargsError(
                    f"The largest bucket of {name!r} must be at least {max(values[name])}, which `sizes` declares, got "
                    f"{each[-1]}."
                )
        fills = dict(_items("fill", "a dict such as {'mask': 0}", fill))
        for name, value in fills.items():
            if name not in named:
                raise unknown("input in seal's `fill`", str(name), named, otherwise=f"`dims` names {_listed(named)}.")
            if not isinstance(value, int | float):
                raise wrong_value(f"seal's `fill[{name!r}]`", "a number", value)
        return cls(named, values, padded, fills)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of dimensions, in the order in which they were declared."""
        return tuple(dict.fromkeys(name for each in self.dims.values() for name in each.values()))

    @cached_property
    def dynamic(self) -> frozenset[str]:
        """The names whose code is for any size."""
        return frozenset(
            name for name, values in self.sizes.items() if isinstance(values, range) and name not in self.buckets
        )

    @cached_property
    def codes(self) -> Mapping[str, Values]:
        """The sizes with which compiled code is called, by name: the buckets where there are any."""
        used = {
            name: tuple(size for size in each if any(self.bucket_of(name, value) == size for value in self.sizes[name]))
            for name, each in self.buckets.items()
        }
        return {name: used.get(name, self.sizes[name]) for name in self.names}

    @property
    def count(self) -> int:
        """The number of combinations of sizes with which compiled code is called."""
        return math.prod(len(each) for each in self.codes.values())

    def points(self) -> Iterator[Point]:
        """Yield each combination of sizes with which compiled code is called."""
        for sizes in itertools.product(*self.codes.values()):
            yield dict(zip(self.names, sizes, strict=True))

    def spread(self, most: int) -> list[Point]:
        """Return at most about `most` combinations: all, or of each range its ends and sizes in between."""
        if self.count <= most:
            return [*self.points()]
        exact = math.prod(len(each) for name, each in self.codes.items() if name not in self.dynamic)
        each = max(int((most / exact) ** (1 / max(len(self.dynamic), 1))), 3)
        chosen = [_thinned(values, each) if name in self.dynamic else values for name, values in self.codes.items()]
        return [dict(zip(self.names, sizes, strict=True)) for sizes in itertools.product(*chosen)]

    def bucket_of(self, name: str, size: int) -> int:
        """Return the smallest bucket that holds a size; the size itself where none is declared."""
        buckets = self.buckets.get(name)
        return size if buckets is None else buckets[bisect_left(buckets, size)]

    def padded_sizes(self, name: str, bucket: int) -> list[int]:
        """Return the smallest and the largest declared size that is padded to a bucket."""
        sizes = [size for size in self.sizes[name] if size < bucket and self.bucket_of(name, size) == bucket]
        return sorted({min(sizes), max(sizes)}) if sizes else []

    @cached_property
    def allowed(self) -> Mapping[str, Collection[int]]:
        """The sizes of each name that have code or are padded, quick to look up."""
        return {
            name: values if name in self.dynamic else frozenset(values).union(self.codes[name])
            for name, values in self.sizes.items()
        }


class Reader:
    """Reads the declared sizes of a call from its arguments."""

    def __init__(self, declared: Declared, places: Sequence[InputPath]) -> None:
        self.declared, self.places = declared, places

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Point, Point]:
        """Return the sizes of a call, and the buckets of those that must be padded; raise if it was not declared."""
        found: Point = {}
        padded: Point = {}
        allowed = self.declared.allowed
        for place in self.places:
            name, dims, rank = place.name, place.dims, place.rank
            try:
                shape = place.get(args, kwargs).shape
            except (LookupError, TypeError, AttributeError):
                raise UndeclaredError(f"input {name!r} must be a tensor") from None
            if len(shape) != rank:
                raise UndeclaredError(f"input {name!r} has {len(shape)} dimensions, declared with {rank}")
            for dim, of in dims:
                size = shape[dim]
                if found.setdefault(of, size) != size:
                    raise UndeclaredError(f"{of!r} has two sizes in one call", f"{found[of]} and {size}")
                if size not in allowed[of]:
                    raise UndeclaredError(f"{of!r} has a size that was not declared", str(size))
        for of in self.declared.buckets:
            if (bucket := self.declared.bucket_of(of, found[of])) != found[of]:
                padded[of] = bucket
        return found, padded


def places_of(declared: Declared, signature: inspect.Signature, leaves: Mapping[str, Any]) -> list[InputPath]:
    """Return where the declared inputs are, by their names among the `leaves` of the example."""
    places = []
    for name, dims in declared.dims.items():
        if name not in leaves:
            raise unknown("input in seal's `dims`", name, leaves, otherwise=f"The inputs are {_listed(leaves)}.")
        rank = getattr(leaves[name], "ndim", None)
        if rank is None:
            raise wrong_value(f"Input {name!r}, which `dims` names,", "a tensor", leaves[name])
        for dim in dims:
            if not -rank <= dim < rank:
                raise BackendKwargsError(f"Input {name!r} has {rank} dimensions, but `dims` names dimension {dim}.")
        known = tuple(sorted((dim % rank, of) for dim, of in dims.items()))
        places.append(InputPath(name, *_place(signature, name), known, rank))
    return places


def _place(signature: inspect.Signature, name: str) -> tuple[int | None, str | None, tuple[int | str, ...]]:
    """Return where an input is in a call: "x" is an argument, "x.key" and "x.0" are in it."""
    first, *rest = name.split(".")
    kinds = {each.name: each.kind for each in signature.parameters.values()}
    position: int | None = [*kinds].index(first)
    keyword: str | None = first
    if kinds[first] is inspect.Parameter.VAR_POSITIONAL:
        position, keyword = position + int(rest.pop(0)), None  # type: ignore[operator]
    elif kinds[first] is inspect.Parameter.VAR_KEYWORD:
        position, keyword = None, rest.pop(0)
    elif kinds[first] is inspect.Parameter.KEYWORD_ONLY:
        position = None
    return position, keyword, tuple(int(key) if key.isdigit() else key for key in rest)


def _items(what: str, wanted: str, given: object) -> Iterable[tuple[Any, Any]]:
    if given is None:
        return ()
    if not isinstance(given, Mapping):
        raise wrong_value(f"seal's `{what}`", wanted, given)
    return given.items()


def _named_dims(name: object, dims: object) -> dict[int, str]:
    if not isinstance(name, str) or not name:
        raise wrong_value("seal's `dims`", DIMS, name)
    right = (
        isinstance(dims, Mapping)
        and dims
        and all(type(dim) is int and isinstance(of, str) and of for dim, of in dims.items())
    )
    if not right:
        raise wrong_value(f"seal's `dims[{name!r}]`", "a dict from dimensions to names, such as {0: 'batch'}", dims)
    assert isinstance(dims, Mapping)
    return dict(dims)


def _known(name: object, names: Collection[str]) -> str:
    if name not in names:
        raise unknown("size", str(name), names, otherwise=f"`dims` names {_listed(names)}.")
    return str(name)


def _values(what: str, given: object) -> Values:
    if type(given) is int:
        given = [given]
    if isinstance(given, range):
        values: Values = given
    elif isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping):
        values = tuple(given)
    else:
        raise wrong_value(f"seal's `{what}`", "a list of sizes or a range", given)
    if not values or not all(type(size) is int for size in values) or min(values) < 0:
        raise wrong_value(f"seal's `{what}`", "a list or range of at least one whole number, none negative", given)
    return values if isinstance(values, range) else tuple(dict.fromkeys(values))


def _thinned(values: Values, most: int) -> list[int]:
    """Return the smallest, the largest and others at equal ratios between them."""
    low, high = min(values), max(values)
    ratio = (high / max(low, 1)) ** (1 / (most - 1))
    wanted = {low, high, *(int(max(low, 1) * ratio**step) for step in range(1, most - 1))}
    ordered = sorted(values)
    return sorted({ordered[min(bisect_left(ordered, size), len(ordered) - 1)] for size in wanted})


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def shown_point(point: Mapping[str, int]) -> str:
    """Return sizes as text."""
    return ", ".join(f"{name}={size}" for name, size in point.items()) or "the example"
