"""What a user declares of a sealed function's sizes: their names, the values that will come, and buckets to pad to."""

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
    """Where a leaf is among the arguments of a call; for a tensor of `dims`, the names of its dimensions and its rank.

    It is the argument at `position`, or else the keyword `keyword`, or in that by pytree's `keys`.
    """

    name: str
    position: int | None
    keyword: str | None
    keys: tuple[Any, ...]
    dims: tuple[tuple[int, str], ...] = ()
    rank: int = 0

    def holder(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments, positional or keywords, and the index or name of the one that is or holds the leaf."""
        position = self.position
        return (args, position) if position is not None and position < len(args) else (kwargs, self.keyword)

    def get(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the leaf; raise LookupError, TypeError or AttributeError if it is not there."""
        arguments, at = self.holder(args, kwargs)
        value = arguments[at]
        for key in self.keys:
            value = key.get(value)
        return value


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


class Reader(NamedTuple):
    """Reads the declared sizes of a call from its arguments."""

    declared: Declared
    places: Sequence[InputPath]

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Point, Point]:
        """Return the sizes of a call, and the buckets of those that must be padded; raise if it was not declared."""
        found: Point = {}
        padded: Point = {}
        allowed = self.declared.allowed
        for place in self.places:
            name, rank = place.name, place.rank
            try:
                shape = place.get(args, kwargs).shape
            except (LookupError, TypeError, AttributeError):
                raise UndeclaredError(f"input {name!r} must be a tensor") from None
            if len(shape) != rank:
                raise UndeclaredError(f"input {name!r} has {len(shape)} dimensions, declared with {rank}")
            for dim, of in place.dims:
                size = shape[dim]
                if found.setdefault(of, size) != size:
                    raise UndeclaredError(f"{of!r} has two sizes in one call", f"{found[of]} and {size}")
                if size not in allowed[of]:
                    raise UndeclaredError(f"{of!r} has a size that was not declared", str(size))
        for of in self.declared.buckets:
            if (bucket := self.declared.bucket_of(of, found[of])) != found[of]:
                padded[of] = bucket
        return found, padded


def places_of(declared: Declared, leaves: Iterable[tuple[InputPath, Any]]) -> list[InputPath]:
    """Return where the declared inputs are, by their names among the `leaves` of the example."""
    known = {path.name: (path, leaf) for path, leaf in leaves}
    places = []
    for name, dims in declared.dims.items():
        if name not in known:
            raise unknown("input in seal's `dims`", name, known, otherwise=f"The inputs are {_listed(known)}.")
        path, leaf = known[name]
        rank = getattr(leaf, "ndim", None)
        if rank is None:
            raise wrong_value(f"Input {name!r}, which `dims` names,", "a tensor", leaf)
        for dim in dims:
            if not -rank <= dim < rank:
                raise BackendKwargsError(f"Input {name!r} has {rank} dimensions, but `dims` names dimension {dim}.")
        places.append(path._replace(dims=tuple(sorted((dim % rank, of) for dim, of in dims.items())), rank=rank))
    return places


def _items(what: str, wanted: str, given: object) -> Iterable[tuple[Any, Any]]:
    if given is None:
        return ()
    if not isinstance(given, Mapping):
        raise wrong_value(f"seal's `{what}`", wanted, given)
    return given.items()


def _named_dims(name: object, dims: object) -> dict[int, str]:
    if not isinstance(name, str) or not name:
        raise wrong_value("seal's `dims`", DIMS, name)
    named = dict(dims) if isinstance(dims, Mapping) else {}
    if not named or not all(type(dim) is int and isinstance(of, str) and of for dim, of in named.items()):
        raise wrong_value(f"seal's `dims[{name!r}]`", "a dict from dimensions to names, such as {0: 'batch'}", dims)
    return named


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
