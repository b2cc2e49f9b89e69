"""Calls of what is sealed: at other sizes, compared with eager, and padded to buckets if that changes no result."""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn.functional import pad

from backend_kwargs.bundles.module import CompiledModule
from backend_kwargs.bundles.running import in_eager, without_gradients
from backend_kwargs.bundles.samples import Sample, is_dense, sample_of, zeros_of
from backend_kwargs.errors import BackendKwargsError, error_text, wrong_value
from backend_kwargs.facts import Call
from backend_kwargs.graphs.memory import SHARED, Memory, overlapping
from backend_kwargs.graphs.writes import has_memory
from backend_kwargs.sealing.declared import Declared, InputPath, Point, UndeclaredError, Values, shown_point
from backend_kwargs.torch_internals import pytree, sealing
from backend_kwargs.torch_internals.tensors import (
    OPERATORS,
    OperatorMode,
    arguments_of,
    copy_each,
    counted_writes,
    in_storage,
)
from backend_kwargs.trial import check_within, copied, copies, cotangents, largest_of, same_bits, tensors_of, walk

COMPILED = "what torch.compile returned, a module after .compile(), or a CompiledModule"
Missed = Callable[[str], None]


@dataclass(frozen=True)
class Target:
    """A compiled callable, and the ways to call it.

    `compiling` is the user's, `eager` the same without dynamo. `serving` returns a call that compiles nothing and tells
    of each frame that ran in eager; `look` says why no code fits some arguments, "" if some does, and
    None where there was no frame to look at.
    """

    name: str
    signature: inspect.Signature
    compiling: Call
    eager: Call
    serving: Callable[[Missed], Call]
    look: Callable[..., str | None]
    module: torch.nn.Module | None

    def leaves(self, sample: Sample) -> list[tuple[InputPath, Any]]:
        """Return where each leaf of a call's arguments is, and the leaf; raise if they do not fit the signature."""
        try:
            return leaves_of(self.signature, sample)
        except TypeError as error:
            raise BackendKwargsError(f"The example inputs do not fit {self.name!r}: {error}.") from None


def leaves_of(signature: inspect.Signature, sample: Sample) -> list[tuple[InputPath, Any]]:
    """Return where each leaf of a call's arguments is, and the leaf; raise TypeError if they do not fit `signature`.

    Leaves in dicts, lists and tuples are named "x.key" and "x.0".
    """
    arguments = dict(signature.bind(*sample.args, **sample.kwargs).arguments)
    leaves: Any = pytree.tree_flatten_with_path(arguments)[0]
    found = []
    for path, leaf in leaves:
        own, *keys = path
        position: int | None = [*signature.parameters].index(own.key)
        keyword = own.key
        match signature.parameters[own.key].kind:
            case inspect.Parameter.VAR_POSITIONAL:
                position, keyword = position + keys.pop(0).idx, None
            case inspect.Parameter.VAR_KEYWORD:
                position, keyword = None, keys.pop(0).key
            case inspect.Parameter.KEYWORD_ONLY:
                position = None
        found.append((InputPath(".".join(map(_key, path)), position, keyword, tuple(keys)), leaf))
    return found


def with_leaves(sample: Sample, changed: Iterable[tuple[InputPath, Any]]) -> Sample:
    """Return the arguments of a call with some of its leaves replaced; keywords stay keywords.

    Of a function that takes `**kwargs`, as torch's own modules do when they are compiled, they are another call.
    """
    args, kwargs = [*sample.args], dict(sample.kwargs)
    for place, leaf in changed:
        arguments, at = place.holder(args, kwargs)
        if place.keys:
            paths, spec = pytree.tree_flatten_with_path(arguments[at])
            arguments[at] = pytree.tree_unflatten([leaf if path == place.keys else each for path, each in paths], spec)
        else:
            arguments[at] = leaf
    return Sample(tuple(args), kwargs)


def _key(key: Any) -> str:
    """Return a part of a path in a tree as text."""
    return str(next(getattr(key, name) for name in ("idx", "key", "name") if hasattr(key, name)))


def target_of(compiled: object) -> Target:
    """Return how to call a compiled callable; raise if it is none that can be sealed."""
    if isinstance(compiled, CompiledModule):
        return _bundle(compiled)
    parts = sealing.wrapped(compiled)
    if parts is None:
        raise wrong_value("seal's `compiled`", COMPILED, compiled)
    if sealing.has_own_hooks(compiled):
        raise BackendKwargsError(
            "seal would leave out the hooks of what torch.compile returned: register them on the module itself."
        )
    module = sealing.module_of(compiled)
    eager = sealing.uncompiled(compiled, parts)
    return Target(
        name=type(module).__name__ if module is not None else getattr(parts.function, "__name__", "function"),
        signature=inspect.signature(module.forward if module is not None else parts.function),
        compiling=compiled,  # type: ignore[arg-type]
        eager=sealing.in_eager(eager),
        serving=partial(sealing.without_compiling, parts),
        look=sealing.looking(parts),
        module=module,
    )


def _bundle(compiled: CompiledModule) -> Target:
    """Return how to call a module of a bundle: its own check comes first, where it is deployed."""
    built, running = compiled.serving()
    call: Any = running.call
    check: Any = running.check
    parts = sealing.wrapped(call.func)
    assert parts is not None

    def serving(missed: Missed) -> Call:
        run = without_gradients(partial(sealing.without_compiling(parts, missed), *call.args))

        def checked(*args: object, **kwargs: object) -> Any:
            try:
                check(args, kwargs)
            except BackendKwargsError as error:
                raise UndeclaredError(str(error).rstrip(".")) from None
            return run(*args, **kwargs)

        return run if check is None else checked

    return Target(
        name=type(built.module).__name__,
        signature=inspect.signature(built.module.forward),
        compiling=compiled,
        eager=sealing.in_eager(in_eager(built)),
        serving=serving,
        look=without_gradients(partial(sealing.looking(parts), *call.args)),
        module=built.module,
    )


def example_of(compiled: object, example_inputs: object) -> Sample:
    """Return the arguments of the example call: the given ones, or the first sample of a CompiledModule as zeros."""
    if example_inputs is not None:
        return sample_of(example_inputs)
    if not isinstance(compiled, CompiledModule):
        raise BackendKwargsError(
            "seal must have the arguments of one call: seal(compiled, example_inputs, ...), a tensor, a tuple of "
            "arguments, a dict of keywords, or (args, kwargs)."
        )
    built, _ = compiled.serving()
    try:
        args, kwargs = zeros_of(built.samples[0], built.device)
    except Exception as error:
        raise BackendKwargsError(
            f"The bundle's sample cannot be made: {error_text(error)}. Pass example_inputs."
        ) from error
    return Sample(tuple(args), dict(kwargs))


# ---- calls, and what they give


def resized(tensor: torch.Tensor, sizes: Mapping[int, int], *, values: bool = True) -> torch.Tensor:
    """Return a tensor like this one with other sizes of some dimensions, its rows repeated or left out.

    Repeated rows are valid wherever the example's are: as tokens, indices and masks. The order of its strides stays.
    Without `values` memory is not filled, except for integers.
    """
    order = sorted(range(tensor.ndim), key=lambda dim: (-tensor.stride()[dim], dim))
    back = [order.index(dim) for dim in range(tensor.ndim)]
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if values:
            made = tensor.detach()
            for dim, size in sizes.items():
                rows = torch.arange(size, device=tensor.device) % max(tensor.shape[dim], 1)
                made = made.index_select(dim, rows)
            made = made.permute(order).clone(memory_format=torch.contiguous_format).permute(back)
        else:
            shape = [sizes.get(dim, tensor.shape[dim]) for dim in order]
            new = tensor.new_empty if tensor.is_floating_point() else tensor.new_zeros
            made = new(shape).permute(back)
        made = in_storage(made.untyped_storage(), made, 0)
    return made.requires_grad_(tensor.requires_grad)


class Apart:
    """The check that inputs share no memory with `buffers` that are written, and none with each other.

    The latter counts if `inputs` are written. Code is compiled for inputs that are apart, which torch does not guard.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], *, inputs: bool) -> None:
        self._buffers, self._inputs = Memory(buffers), inputs

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise UndeclaredError if they do."""
        tensors = [*{id(each): each for each in tensors_of((args, kwargs)) if has_memory(each)}.values()]
        self._buffers = self._buffers.now()
        if (self._inputs and overlapping(tensors)) or any(each in self._buffers for each in tensors):
            raise UndeclaredError(SHARED)


def apart_of(call: Callable[[Sample], object], sample: Sample, buffers: Collection[torch.Tensor]) -> Apart | None:
    """Return the check for what `call` runs, None if it writes into no input and no buffer."""
    inputs = [each for each in tensors_of(tuple(sample)) if has_memory(each)]
    held = [*inputs, *(each for each in buffers if has_memory(each))]
    # Version counters tell of what a write leaves as it was, values of `torch._foreach_add_` and writes into `.data`.
    before = [(counted_writes(each), copied(each)) for each in held]
    call(sample)
    changed = [
        version != counted_writes(each) or not same_bits(each, values)
        for each, (version, values) in zip(held, before, strict=True)
    ]
    count = len(inputs)
    written = [each for each, is_changed in zip(held[count:], changed[count:], strict=True) if is_changed]
    return Apart(written, inputs=any(changed[:count])) if any(changed) else None


class Result(NamedTuple):
    """What a call gives: its output, the gradients of its backward pass by the tensors that get them, and what is left.

    That are the inputs and the buffers as the call leaves them.
    """

    output: Any
    gradients: Mapping[str, torch.Tensor]
    left: Mapping[str, Mapping[str, Any]]


def called(call: Call, sample: Sample) -> tuple[Any, Mapping[str, torch.Tensor]]:
    """Return the output and the gradients of a call, and of its backward pass if it has one; none is accumulated."""
    output = call(*sample.args, **sample.kwargs)
    leaves = [leaf for _, leaf in walk("", output)] if torch.is_grad_enabled() else []
    wanted = [each for each in leaves if isinstance(each, torch.Tensor) and each.requires_grad]
    if not wanted:
        return output, {}
    targets = [*_leaves(wanted)]
    # Not ones, from which the gradients of a softmax are zero but for rounding.
    gradients = torch.autograd.grad(wanted, targets, cotangents(wanted), allow_unused=True)
    inputs = {id(each): f"of input {at}" for at, each in enumerate(tensors_of(tuple(sample)))}
    named = zip(targets, gradients, strict=True)
    return output, {inputs.get(id(leaf), str(id(leaf))): each for leaf, each in named if each is not None}


def _leaves(outputs: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors that get gradients in a backward pass, in order."""
    yield from (each for each in outputs if each.is_leaf)
    waiting, seen = [each.grad_fn for each in reversed(outputs)], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        waiting += [each for each, _ in reversed(node.next_functions)]


@dataclass
class Calls:
    """The calls of one `seal`: inputs of any declared sizes, and each call from the state before."""

    target: Target
    declared: Declared
    example: Sample
    places: Sequence[InputPath]
    has_gradients: bool = field(default=False, init=False)
    # With their values before.
    _buffers: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, init=False)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put back the buffers of a module, which calls may change, before each call and at the end."""
        buffers = self.target.module.named_buffers() if self.target.module is not None else ()
        self._buffers = {name: (each, each.detach().clone()) for name, each in buffers if not each.is_inference()}
        try:
            yield
        finally:
            self._restore()
            self._buffers.clear()

    def _restore(self) -> None:
        if changed := [pair for pair in self._buffers.values() if not same_bits(*pair)]:
            with torch.no_grad():
                copy_each(*zip(*changed, strict=True))  # type: ignore[arg-type]

    def compiling(self) -> AbstractContextManager[None]:
        """Compile code for each size of a list, and for any size of a range."""
        return sealing.compiling_ahead(dynamic=bool(self.declared.dynamic))

    def inputs(self, point: Point, *, values: bool = True, marked: bool = False) -> Sample:
        """Return the arguments of a call of these sizes, made from the example's; `marked` for dynamo."""
        changed = []
        made: dict[tuple[int, str], torch.Tensor] = {}
        for place in self.places:
            sizes, leaf = {dim: point[name] for dim, name in place.dims}, place.get(*self.example)
            key = id(leaf), str(sizes)  # a tensor that is given twice stays one
            tensor = made.setdefault(key, resized(leaf, sizes, values=values))
            changed.append((place, tensor))
            for dim, name in place.dims if marked else ():
                sealing.mark(tensor, dim, dynamic=name in self.declared.dynamic)
        return with_leaves(copies(self.example) if values else self.example, changed)

    def call(self, call: Call, sample: Sample, point: Point | None = None) -> Result:
        """Call from the state before, and the backward pass too."""
        self._restore()
        try:
            output, gradients = called(call, sample)
        except BackendKwargsError:
            raise
        except Exception as error:  # the user's own code, or its compiler
            at = f" for {shown_point(point)}" if point else ""
            raise BackendKwargsError(
                f"{self.target.name!r} fails{at}, and is not sealed: {error_text(error)}."
            ) from error
        self.has_gradients |= bool(gradients)
        buffers = {
            name: before if same_bits(each, before) else each.detach().clone()
            for name, (each, before) in self._buffers.items()
        }
        return Result(
            output,
            gradients,
            {"input": {path.name: leaf for path, leaf in self.target.leaves(sample)}, "buffer": buffers},
        )


# ---- checks of the results

TIGHT, LOOSE = 1e-3, 3e-2  # of float32 and float64; of shorter types and under autocast
SHORT = (torch.float16, torch.bfloat16)
LEAST_SHARE = 0.01  # of the largest tensor: a smaller one may be zero but for rounding, as gradients of biases are


class Checks:
    """Compares results of compiled code with eager's; those of functions that draw random numbers differ anyhow."""

    def __init__(self, name: str, run_eager: Callable[[Sample], Result], tol: float | None) -> None:
        self.name, self._run, self._tol = name, run_eager, tol
        self.random: bool | None = None

    def eager(self, make: Callable[[], Sample]) -> Result | None:
        """Return eager's result, None if each run gives another."""
        if self.random is None:
            # Without a seed, which other threads' draws would have too.
            self.random = bool(self.difference(self._run(make()), self._run(make())))
        return None if self.random else self._run(make())

    def compare(self, result: Result, make: Callable[[], Sample], point: Point) -> None:
        """Raise if a result is not eager's."""
        wanted = self.eager(make)
        if wanted is not None and (why := self.difference(result, wanted)):
            raise BackendKwargsError(
                f"{self.name!r} is not sealed: compiled for {shown_point(point)} it gives other results than eager, "
                f"{why}. To seal it anyway, pass a larger `tol`, or check=False."
            )

    def difference(self, result: Result, wanted: Result) -> str:
        """Return what differs, "" if nothing does."""
        mine, theirs = dict(result.gradients), dict(wanted.gradients)
        for key in mine.keys() ^ theirs.keys():  # one that is missing is zero
            one, other = (mine, theirs) if key in theirs else (theirs, mine)
            one[key] = torch.zeros_like(other[key])
        compared = {
            "output": (result.output, wanted.output),
            "gradient": ([*mine.values()], [theirs[key] for key in mine]),
            **{what: (each, wanted.left[what]) for what, each in result.left.items()},
        }
        for what, (one, other) in compared.items():
            if pytree.tree_structure(one) != pytree.tree_structure(other):
                return f"the {what} has another structure"
            least = LEAST_SHARE * largest_of(leaf for _, leaf in walk(what, other)) or 1.0
            accuracy = check_within(one, other, other, self._bound, what=what, by="tol", least=least)
            if not accuracy.passed:
                return accuracy.reason
        return ""

    def _bound(self, leaf: torch.Tensor) -> float:
        short = leaf.dtype in SHORT or torch.is_autocast_enabled(leaf.device.type)
        return self._tol or (LOOSE if short else TIGHT)


# ---- padding to buckets

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

    def around(self, call: Call, point: Point, padded: Point) -> Call:
        """Return a call with inputs padded to buckets, whose results are cut."""

        def run(*args: Any, **kwargs: Any) -> Any:
            changed = []
            for place in self.places:
                if any(of in padded for _, of in place.dims):
                    tensor = place.get(args, kwargs)
                    amounts = [0] * (2 * tensor.ndim)
                    for dim, of in place.dims:
                        amounts[2 * (tensor.ndim - 1 - dim) + 1] = padded.get(of, tensor.shape[dim]) - tensor.shape[dim]
                    changed.append((place, pad(tensor, amounts, value=self.fill.get(place.name, 0))))
            wide = with_leaves(Sample(args, kwargs), changed)
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
            leaves = work.target.leaves(sample)
            values = {id(leaf): changed[path.name](leaf) for path, leaf in leaves if path.name in changed}
            return with_leaves(sample, [(path, values[id(leaf)]) for path, leaf in leaves if id(leaf) in values])

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
        leaves = {id(leaf): (path.name, leaf) for path, leaf in work.target.leaves(work.inputs(point))}
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
