"""Padding to buckets: what is cut from results again, and the check that padding changes nothing else."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import torch
from torch.nn.functional import pad

from backend_kwargs.bundles.samples import Sample, is_dense
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.facts import Call
from backend_kwargs.sealing.calls import SHORT, Calls, Checks
from backend_kwargs.sealing.declared import Declared, InputPath, Point, Values, shown_point
from backend_kwargs.torch_internals import pytree
from backend_kwargs.torch_internals.tensors import OPERATORS, OperatorMode, arguments_of, counted_writes
from backend_kwargs.trial.trees import tensors_of

Change: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
Cuts = Mapping[int, Sequence[tuple[int, str]]]  # by result, its dimensions whose size is padded


@dataclass
class Padding:
    """How inputs are padded to buckets, and results are cut."""

    places: Sequence[InputPath]
    fill: Mapping[str, float]
    cuts: Cuts

    @classmethod
    def of(
        cls, declared: Declared, places: Sequence[InputPath], work: Calls, checks: Checks, *, check: bool
    ) -> "Padding":
        """Return the padding of a function that is right with it; raise if it changes results.

        With `check`, values that the example does not have are tried too.
        """
        padding = cls(places, declared.fill, {})
        for name in declared.buckets:
            padding.cuts = padding._with_cuts_of(name, declared, work)
        for point, padded in _cases(declared):
            padding._check(point, padded, work, checks)
        for point, padded in _small_cases(declared) if check else ():
            padding._check_other_values(point, padded, work, checks)
        return padding

    def filled(self, args: Sequence[Any], kwargs: Mapping[str, Any], padded: Point) -> Sample:
        """Return the arguments with the declared inputs padded to buckets."""
        own, named = list(args), dict(kwargs)
        for place in self.places:
            if any(of in padded for _, of in place.dims):
                tensor = place.get(args, kwargs)
                amounts = [0] * (2 * tensor.ndim)
                for dim, of in place.dims:
                    amounts[2 * (tensor.ndim - 1 - dim) + 1] = padded.get(of, tensor.shape[dim]) - tensor.shape[dim]
                place.put(own, named, pad(tensor, amounts, value=self.fill.get(place.name, 0)))
        return Sample(tuple(own), named)

    def around(self, call: Call, point: Point, padded: Point) -> Call:
        """Return a call with padded inputs, whose results are cut."""

        def run(*args: Any, **kwargs: Any) -> Any:
            wide = self.filled(args, kwargs, padded)
            return self.cut(call(*wide.args, **wide.kwargs), point, padded)

        return run

    def cut(self, result: Any, point: Point, padded: Point) -> Any:
        """Return results with the sizes of the call in place of the buckets."""
        leaves, spec = pytree.tree_flatten(result)
        for at, dims in self.cuts.items():
            whole = leaves[at]
            for dim, name in dims:
                if name in padded:
                    leaves[at] = leaves[at].narrow(dim, 0, min(point[name], leaves[at].shape[dim]))
            if whole.is_contiguous():  # so is an unpadded result, of which a caller may want a view
                leaves[at] = leaves[at].contiguous()
        return pytree.tree_unflatten(leaves, spec)

    def _with_cuts_of(self, name: str, declared: Declared, work: Calls) -> Cuts:
        """Return the cuts with those of one name: the dimensions whose size is the padded one's."""
        bucket = next((each for each in declared.buckets[name] if declared.padded_sizes(name, each)), None)
        if bucket is None:
            return self.cuts
        size = declared.padded_sizes(name, bucket)[0]
        point = {of: values[-1] for of, values in declared.codes.items()} | {name: size}
        sample = work.inputs(point)
        versions = [counted_writes(place.get(*sample)) for place in self.places]
        narrow = pytree.tree_leaves(work.call(work.target.eager, sample, point).output)
        if versions != [counted_writes(place.get(*sample)) for place in self.places]:
            raise BackendKwargsError(f"{name!r} cannot be padded: {work.target.name!r} writes to what would be padded.")
        padded = self.around(work.target.eager, point, {name: bucket})
        wide = pytree.tree_leaves(work.call(padded, work.inputs(point), point).output)
        cuts = {at: [*dims] for at, dims in self.cuts.items()}
        for at, both in enumerate(zip(wide, narrow, strict=False)):  # all is compared below
            for dim, (long, short) in enumerate(zip(*(getattr(each, "shape", ()) for each in both), strict=False)):
                if (long, short) == (bucket, size):
                    cuts.setdefault(at, []).append((dim, name))
                elif long != short:
                    raise BackendKwargsError(
                        f"{name!r} cannot be padded: a result of {work.target.name!r} has size {short} at {size}, and "
                        f"{long} at {bucket}; declare `sizes` without buckets."
                    )
        return cuts

    def _check(self, point: Point, padded: Point, work: Calls, checks: Checks) -> None:
        """Raise if padding changes results: in eager, where nothing else differs, and compiled."""
        make = partial(work.inputs, point)
        wanted = checks.eager(make)
        if wanted is None:
            raise BackendKwargsError(
                f"{work.target.name!r} draws random numbers, so that padding cannot be checked: declare `sizes` "
                "without buckets, or call eval()."
            )
        with work.compiling():
            for call in (work.target.eager, work.target.compiling):
                if why := checks.difference(work.call(self.around(call, point, padded), make(), point), wanted):
                    raise self._changes(point, padded, work, why)

    def _check_other_values(self, point: Point, padded: Point, work: Calls, checks: Checks) -> None:
        """Raise if padding changes results of inputs with values that the example does not have.

        In eager: compiled code is that of the example. Values that eager refuses are not checked.
        """

        def made(changed: Mapping[str, Change]) -> Sample:
            sample = work.inputs(point)
            leaves = work.target.named_leaves(sample)
            values = {id(leaves[name]): change(leaves[name]) for name, change in changed.items()}
            return work.target.with_leaves(
                sample, {name: values[id(leaf)] for name, leaf in leaves.items() if id(leaf) in values}
            )

        changes = dict(self._changes_of_inputs(point, padded, work))
        around = self.around(work.target.eager, point, padded)
        first = {name: next(iter(each.values())) for name, each in changes.items()}
        for others, (name, each) in product(({}, first), changes.items()):
            for how, change in each.items():
                changed = others | {name: change}
                try:
                    wanted = work.call(work.target.eager, made(changed), point)
                except BackendKwargsError:
                    continue
                if why := checks.difference(work.call(around, made(changed), point), wanted):
                    raise self._changes(point, padded, work, why, f", with {name!r} {how},")

    def _changes_of_inputs(
        self, point: Point, padded: Point, work: Calls
    ) -> Iterator[tuple[str, Mapping[str, Change]]]:
        """Yield the inputs by one of their names, and how to change each; raise if one that is padded cannot be."""
        sample = work.inputs(point)
        with Positions() as positions:
            work.call(work.target.eager, sample, point)
        dims = {place.name: [dim for dim, of in place.dims if of in padded] for place in self.places}
        leaves = {id(leaf): (name, leaf) for name, leaf in work.target.named_leaves(work.inputs(point)).items()}
        for name, leaf in leaves.values():
            found = changes_of(name, leaf, self.fill.get(name, 0), dims.get(name, []), free=not positions.found)
            if found:
                yield name, found
            elif dims.get(name):
                raise BackendKwargsError(
                    f"{', '.join(map(repr, padded))} cannot be padded: with what the example has in {name!r} it cannot "
                    "be checked. Pass other values, or check=False to seal it all the same."
                )

    def _changes(self, point: Point, padded: Point, work: Calls, why: str, values: str = "") -> BackendKwargsError:
        way_out = " check=False seals it all the same." if values else ""
        return BackendKwargsError(
            f"{', '.join(map(repr, padded))} cannot be padded: {work.target.name!r} at {shown_point(point)}{values} "
            f"gives other results padded to {shown_point(padded)}, {why}. Pass a mask of what is real and its `fill`, "
            f"or declare `sizes` without buckets.{way_out}"
        )


def _cases(declared: Declared) -> Iterator[tuple[Point, Point]]:
    """Yield sizes and the buckets that they are padded to: the ends of each bucket, and all that is least at once."""
    base = {of: values[-1] for of, values in declared.codes.items()}
    least: Point = {}
    for name, buckets in declared.buckets.items():
        for bucket in buckets:
            for size in declared.padded_sizes(name, bucket):
                yield base | {name: size}, {name: bucket}
                least.setdefault(name, size)
    if len(least) > 1:
        yield base | least, {name: declared.bucket_of(name, size) for name, size in least.items()}


def _small_cases(declared: Declared) -> Iterator[tuple[Point, Point]]:
    """Yield for each name a small size that is padded, and its bucket; other sizes are small too, but not 1 if any."""
    base = {of: _above_one(values) for of, values in declared.codes.items()}
    for name, buckets in declared.buckets.items():
        if sizes := [size for bucket in buckets for size in declared.padded_sizes(name, bucket)]:
            size = _above_one(sizes)
            yield base | {name: size}, {name: declared.bucket_of(name, size)}


def _above_one(sizes: Values) -> int:
    return next((size for size in sizes if size > 1), sizes[-1])


# ---- values that the example does not have, on which padding is checked too

# A maximum over padded numbers is right for positive ones and wrong for negative ones. Values stay valid where they
# are positions: integers of a function that indexes by any are within the example's and the fill. A mask keeps, in
# each row, something that is not the fill, since a row of nothing real means nothing. Whole numbers that are neither
# padded nor a mask keep their values, since lengths have a largest one. Inputs are changed one at a time, and once
# more while all others are changed too, since zeros hide what they are multiplied with.
FLOATS = (*SHORT, torch.float32, torch.float64, torch.complex64, torch.complex128)
LARGE = 64
WORDS = ("ind", "offset", "target", "length", "repeats")  # in names of arguments that are positions or sizes


def changes_of(name: str, example: object, fill: float, dims: Sequence[int], *, free: bool) -> Mapping[str, Change]:
    """Return how to change an input's values, by how the new ones differ.

    `dims` are those that are padded with `fill`. Integers are `free` if none is a position; else of those that are all
    the fill no other one is known to be valid.
    """
    if not isinstance(example, torch.Tensor) or not is_dense(example) or not example.numel():
        return {}
    found: dict[str, Change] = {}
    if _is_mask(name, example):
        # For what is real: a value of its own, or 0 for a fill that is not 0, else 1.
        real = example[example != fill]
        other = real.flatten()[0] if real.numel() else example.new_full((), not fill)
        found = {
            "all real": lambda x: torch.where(x == fill, other, x),
            "inverted in part": lambda x: torch.where(_odd(x, dims), torch.where(x == fill, other, fill), x),
        }
    elif example.dtype in FLOATS:
        found = {
            "positive": lambda x: x.abs() + 1,
            "negative": lambda x: -x.abs() - 1,
            "of the other sign": torch.neg,
            "zero in part": lambda x: x.masked_fill(_odd(x, dims), 0),
        }
        if example.dtype not in SHORT and not torch.is_autocast_enabled(example.device.type):
            found |= {"large": lambda x: LARGE * (x.abs() + 1), "large and negative": lambda x: -LARGE * (x.abs() + 1)}
    elif dims and not (example.is_floating_point() or example.is_complex()):
        least, largest = (int(end) for end in example.aminmax())
        least, largest = min(least, int(fill)), max(largest, int(fill))
        if least < largest:
            found = {
                "mirrored": lambda x: least + largest - x,
                "shifted": lambda x: (x - least + 1) % (largest - least + 1) + least,
            }
        if free:
            found |= {"positive": lambda x: x.abs() + 1, "negative": lambda x: -x.abs() - 1}
    return {how: partial(_kept_real, change, fill, dims) for how, change in found.items()}


class Positions(OperatorMode):  # type: ignore[no-untyped-call]
    """Notes whether an operator takes integers as positions, lengths or sizes; one that is not torch's may."""

    def __init__(self) -> None:
        super().__init__(self.called)
        self.found = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: else dynamo skips what `torch.cond` compiles in eager, also in later calls, which then raise."""
        return True

    def higher_order(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
        """Call an operator that runs graphs, which may index in them."""
        self.found = True
        return func(*args, **kwargs)

    def called(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
        """Call an operator."""
        named = dict(zip((each.name for each in arguments_of(func)), args, strict=False)) | dict(kwargs)
        every = func.namespace not in OPERATORS or torch.Tag.data_dependent_output in func.tags
        for name, value in named.items():
            integers = [each for each in tensors_of(value) if not each.is_floating_point() and each.dtype != torch.bool]
            self.found |= bool(integers) and (every or any(word in name for word in WORDS))
        return func(*args, **kwargs)


def _is_mask(name: str, example: torch.Tensor) -> bool:
    """Return whether an input says what is real: a bool, one that is called a mask, or one of zeros and ones."""
    zeros, ones = example == 0, example == 1
    both = bool(zeros.any() and ones.any() and (zeros | ones).all())
    return both or example.dtype == torch.bool or "mask" in name.lower()


def _odd(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """Return a mask of every second element along the last of the padded dimensions, the first one not among them."""
    odd = torch.zeros_like(x, dtype=torch.bool)
    if x.ndim:
        odd.transpose(dims[-1] if dims else -1, -1)[..., 1::2] = True
    return odd


def _kept_real(change: Change, fill: float, dims: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    """Return changed values; rows that would hold nothing but the fill keep their own."""
    with torch.inference_mode(x.is_inference()), torch.no_grad():
        made = change(x.detach()).to(x.dtype)
        for dim in dims:
            made = torch.where((made == fill).all(dim, keepdim=True), x.detach(), made)
        made = torch.empty_like(x).copy_(made)
    return made.requires_grad_(x.requires_grad)
