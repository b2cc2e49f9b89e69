"""What results are compared with: eager's, a reference, and how far eager's move at other roundings.

The random numbers that eager draws are noted in one run, and given to another in a higher precision.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakTensorKeyDictionary

from backend_kwargs.errors import error_text
from backend_kwargs.options.option import Options
from backend_kwargs.torch_internals import pytree
from backend_kwargs.torch_internals.replacing import undone
from backend_kwargs.torch_internals.tensors import (
    OPERATORS,
    OperatorMode,
    OpOverload,
    TorchDispatchMode,
    arguments_of,
    schema_of,
)
from backend_kwargs.trial.accuracy import (
    NONE,
    PRECISE,
    Accuracy,
    Errors,
    check_all,
    check_errors,
    is_number,
    mismatch,
    reference,
    root_mean_square,
    same_twice,
    wide,
)
from backend_kwargs.trial.trees import Results, in_precision, tensors_of, walk

HALVES: tuple[object, ...] = (torch.float16, torch.bfloat16)
SUMS = frozenset({"sum", "mean", "mm", "addmm", "bmm", "baddbmm", "dot", "mv"})  # these may be exact by chance
MOST = 16  # runs; an honest result seldom needs more than one
LONGEST = 60.0  # seconds of runs, after which no other begins
NO_TIME = "eager could not be run often enough at other roundings in the time there is"


OFF = ("dropout_p", "dropout", "train", "training")  # arguments that are zero or False where nothing is drawn
DROPOUT = "native_dropout"  # multiplies with what it draws, its second result
# Operators whose results are what they draw, though they take a tensor: one to fill, its shape, or probabilities.
_FILLING = ("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "random", "uniform")
_LIKE = ("rand_like", "randn_like", "randint_like", "normal_", "normal_functional")
DRAWN = frozenset({*_FILLING, *(f"{name}_" for name in _FILLING), *_LIKE, "multinomial", "poisson", "binomial"})


class DrawsError(Exception):
    """Random numbers are, or may be, drawn where they must not be; the message says which."""


def may_draw(func: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Return whether a call of an operator may draw: by its tag, or since it is not torch's."""
    if getattr(func, "__module__", "") == "_operator":
        return False
    if getattr(func, "namespace", "") not in OPERATORS:
        return True
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    declared = arguments_of(func)
    given = {each.name: each.default_value for each in declared}  # which the dispatcher leaves out
    given |= dict(zip((each.name for each in declared), args, strict=False)) | dict(kwargs)
    return not any(given.get(name) in (0, False) for name in OFF)


class Draws:
    """What `run` draws, which returns `eager`, if it is `random`: noted in a further run, when it is first asked for.

    With the same seed, a generator gives other numbers in another dtype: `rand` does, and dropout on a GPU.
    """

    def __init__(self, run: Callable[[], Results], eager: Results, *, random: bool) -> None:
        self._run, self._eager, self._random = run, eager, random

    @cached_property
    def noted(self) -> Sequence[tuple[str, list[torch.Tensor]]]:
        """The operators that draw, in the order of their calls, with the numbers."""
        noted: list[tuple[str, list[torch.Tensor]]] = []

        def note(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
            result = func(*args, **kwargs)
            if may_draw(func, args, kwargs):
                noted.append((str(func), [each.clone() for each in _drawn(func, (args, kwargs), result)]))
            return result

        with undone() as stack:
            stack.enter_context(OperatorMode(note))
            seen = self._run()
        if not same_twice(seen, self._eager, training=True).passed:  # other numbers would move it further
            raise DrawsError("torch chooses other operators in a run whose random numbers are noted")
        return noted

    def given_to(self, run: Callable[..., Results]) -> Callable[..., Results]:
        """Return `run`, which then draws the same numbers; it raises DrawsError if it draws by other operators."""

        def drawing(*args: Any) -> Results:
            left = iter(self.noted)
            with undone() as stack:
                stack.enter_context(OperatorMode(partial(_drawing_again, left)))
                results = run(*args)
            if following := next(left, None):
                raise DrawsError(f"nothing draws for {following[0]}")
            return results

        return drawing if self._random else run


def _drawing_again(
    left: Iterator[tuple[str, list[torch.Tensor]]], func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> object:
    """Run an operator, and replace what it draws with the next of what is `left` of what was noted."""
    result = func(*args, **kwargs)
    if not may_draw(func, args, kwargs):
        return result
    name, noted = next(left, ("", []))
    drawn = _drawn(func, (args, kwargs), result)
    if name != str(func) or [each.shape for each in drawn] != [each.shape for each in noted]:
        raise DrawsError(f"{func} draws where eager had {name or 'nothing'}")
    for to, numbers in zip(drawn, noted, strict=True):
        to.copy_(numbers)
    if func.overloadpacket.__name__ == DROPOUT:
        value, p = args[:2]
        return value * drawn[0] * (1 / (1 - p)), drawn[0]
    return result


def _drawn(func: Any, arguments: object, result: Any) -> list[torch.Tensor]:
    """Return the results of an operator that hold what it draws; raise DrawsError if that is not known."""
    name = func.overloadpacket.__name__
    if name == DROPOUT:
        return [result[1]]
    if func.namespace not in OPERATORS or (name not in DRAWN and tensors_of(arguments)):
        raise DrawsError(f"{func} computes with what it draws")
    return tensors_of(result)


class Roundings:
    """The errors of eager's leaves in runs that round otherwise, each run when it is first asked for.

    `run` is called with nothing and returns results by name, as `eager` holds them; it is not called again once it
    fails, once `affordable` returns False, or, after the first that rounds otherwise, once all have taken a minute.
    `lacking` then says why there are no more; `cut` is whether that was for time.
    """

    def __init__(
        self,
        run: Callable[[], Results],
        eager: Results,
        affordable: Callable[[], bool] = lambda: True,
    ) -> None:
        self.lacking = ""
        self._seen: list[dict[str, Errors]] = []
        self._run, self._eager, self._affordable = run, eager, affordable
        self._drawn = self._draw()

    @property
    def cut(self) -> bool:
        """Whether there was no time for more runs."""
        return self.lacking == NO_TIME

    def add(self, moved: dict[str, Errors]) -> None:
        """Let errors that are known from elsewhere come first."""
        self._seen.insert(0, moved)

    def close(self) -> None:
        """Draw no more: until then this and what draws hold each other."""
        self._drawn.close()

    def __iter__(self) -> Iterator[dict[str, Errors]]:
        for at in range(MOST):
            if at == len(self._seen):
                if (following := next(self._drawn, None)) is None:
                    return
                self._seen.append(following)
            yield self._seen[at]

    def _draw(self) -> Generator[dict[str, Errors], None, None]:
        """Yield the errors of eager's leaves in one run after the other, until no more are affordable."""
        spent = 0.0
        for at, mode in enumerate(_modes()):
            if not self._affordable() or (at > 1 and spent >= LONGEST):
                self.lacking = NO_TIME
                return
            began = time.perf_counter()
            try:
                with undone() as stack:
                    stack.enter_context(mode)
                    results = self._run()
            except Exception as error:  # noqa: BLE001 - an operator that no mode can run, or no memory left
                if isinstance(mode, Fused):
                    continue
                self.lacking = f"eager cannot be run at other roundings: {error_text(error)}"
                return
            moved = errors(results, self._eager)
            spent += time.perf_counter() - began
            if isinstance(mode, Fused):
                yield self._little(moved)
            elif at:
                yield moved
            elif not same_twice(results, self._eager, training=True).passed:
                self.lacking = "torch chooses other operators in eager's runs at other roundings"
                return

    def _little(self, moved: dict[str, Errors]) -> dict[str, Errors]:
        """Return no error where a leaf is moved by a large share of its size: it may consist of roundings."""
        sizes = {
            path: root_mean_square(wide(leaf))
            for what in self._eager
            for path, leaf in walk(what, self._eager[what])
            if path in moved
        }
        return {path: each if each.rms < PRECISE * sizes[path] else NONE for path, each in moved.items()}


@dataclass(frozen=True)
class Expected:
    """Eager's results, those in higher precision if they can be computed, and eager's errors at other roundings."""

    eager: Results
    reference: Results | None
    roundings: Roundings

    @classmethod
    def of(
        cls,
        eager: Results,
        again: Callable[[], Results],
        fn: Callable[..., object],
        args: Any,
        run: Callable[[Any, Any], Results],
        *,
        random: bool = False,
    ) -> "Expected":
        """Return what is expected of `fn`, where `eager` is what `again` returns each time.

        `run` returns the results of upcast copies of `fn` and `args`, which draw what eager draws if it is `random`.
        """
        drawing = Draws(again, eager, random=random).given_to(run)
        return cls(eager, reference(fn, args, drawing), Roundings(again, eager))

    def check(self, seen: Results, max_error: float | None = None, **how: Any) -> Accuracy:
        """Compare results, `how` as in `check`; those that fail pass if their error is at most `max_error`."""
        accuracy = check_all(seen, self.eager, self.reference, roundings=self.roundings, **how)
        if accuracy.passed or max_error is None or self.reference is None:
            return accuracy
        return check_errors(seen, self.eager, self.reference, max_error)


def errors(seen: Results, eager: Results) -> dict[str, Errors]:
    """Return how far the numbers of each leaf are from eager's, of any dtype, by the leaf's path."""
    by_path = {}
    for what in seen:
        expected = dict(walk(what, eager[what]))
        for path, leaf in walk(what, seen[what]):
            if is_number(leaf) and is_number(other := expected.get(path)) and not mismatch(leaf, other.to(leaf.dtype)):
                apart = wide(leaf) - wide(other)
                by_path[path] = Errors.of(apart[apart.isfinite()])
    return by_path


def _modes() -> Iterator[Any]:
    """Yield the modes of eager's runs: the first changes nothing, and shows whether anything is in half precision."""
    yield (unchanged := OtherRounding(None))
    if unchanged.halves:
        yield Fused()
    yield from map(OtherRounding, range(MOST))


@dataclass(slots=True)
class _Unrounded:
    """A number before it is rounded, how often its memory was written by then, and at which call it was first read."""

    value: torch.Tensor
    written: int
    read_at: int | None = None


class Fused(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands results in half precision on as they are before they are rounded, as compiled code does within a kernel.

    Each is rounded for what is called, such as a product or a convolution of a library, and for what reads it again
    after that. Errors of one direction add up so, which no random rounding shows: the sum of two numbers of bfloat16 is
    often half-way between two others, and is rounded down each time if one of the two is a little less before it is
    rounded. A cast stays.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unrounded: Any = WeakTensorKeyDictionary()
        self.written = Counter[int]()  # how often memory was written, or read by what is called
        self.calls = 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Options | None = None
    ) -> object:
        arguments = args, kwargs or {}
        exact = self._exact(func, arguments)
        result = func(*arguments[0], **arguments[1])
        for leaf, unrounded in zip(_numbers(result), exact, strict=False):
            if leaf.shape == unrounded.shape:
                if not func.is_view:
                    leaf.copy_(unrounded)
                if leaf.dtype in HALVES:
                    self.unrounded[leaf] = _Unrounded(unrounded, self.written[_memory(leaf)])
        return result

    def _exact(self, func: Any, arguments: Any) -> list[torch.Tensor]:
        """Return what an operator gives for its inputs before they are rounded, nothing where these are rounded."""
        leaves = pytree.tree_leaves(arguments)
        numbers = [leaf for leaf in leaves if is_number(leaf)]
        is_known = isinstance(func, OpOverload) and func.namespace in ("aten", "prims")
        if not is_known or func.overloadpacket in flop_registry:
            self._write(numbers)
            self.calls += 1
            return []
        writes = schema_of(func).is_mutable and not _keeps_statistics(func)
        random = torch.Tag.nondeterministic_seeded in func.tags
        casts = any(isinstance(leaf, torch.dtype) and leaf in HALVES for leaf in leaves)
        exact = list[torch.Tensor]()
        if any(map(_is_half, numbers)) and not (random or casts or (writes and torch.Tag.pointwise not in func.tags)):
            copies = writes or _keeps_statistics(func)
            args, kwargs = pytree.tree_map(partial(self._wide, copies=copies), arguments)
            with suppress(RuntimeError, TypeError):  # no kernel for float32
                exact = _numbers(func(*args, **kwargs))
        if writes:
            self._write(numbers)
        return exact

    def _wide(self, leaf: object, *, copies: bool) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        value = leaf
        if leaf.dtype in HALVES:
            known = self.unrounded.get(leaf)
            if known is None or known.written != self.written[_memory(leaf)] or known.read_at not in (None, self.calls):
                return leaf.float()
            known.read_at, value = self.calls, known.value
        return value.clone() if copies else value

    def _write(self, tensors: Sequence[torch.Tensor]) -> None:
        self.written.update(map(_memory, tensors))


def _memory(leaf: torch.Tensor) -> int:
    return leaf.untyped_storage().data_ptr() if leaf.layout == torch.strided else 0


class OtherRounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws the rounding error of each operator anew; exact results and whole numbers stay as they are.

    An operator runs in float64 as well, which shows its error, and whether it has one. That error gets a random factor,
    and an error of up to half a unit in the last place is added. Where fewer numbers come out than went in, terms were
    summed, and these are moved first, by so much as adding them one by one may add to the sum's error: also of a sum
    that eager gets right by chance, or in a wider type. So are a norm's running statistics, which are sums that it
    writes. A cast stays: a result without it is another one.
    """

    supports_higher_order_operators = True

    def __init__(self, seed: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed = seed  # None changes nothing
        self.halves = False  # whether anything was in half precision, if there is no seed
        self.generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Options | None = None
    ) -> object:
        arguments = args, kwargs or {}
        if self.seed is None or not isinstance(func, OpOverload) or func.namespace not in ("aten", "prims"):
            result = func(*arguments[0], **arguments[1])
            self.halves = self.halves or any(map(_is_half, pytree.tree_leaves(result)))
            return result
        name = func.overloadpacket.__name__
        keeps_statistics = _keeps_statistics(func)
        changes = schema_of(func).is_mutable and not keeps_statistics
        if func.is_view or changes or torch.Tag.nondeterministic_seeded in func.tags:
            return func(*arguments[0], **arguments[1])
        before = pytree.tree_map(_cloned, arguments) if keeps_statistics else arguments
        result = func(*arguments[0], **arguments[1])
        if func is torch.ops.aten._to_copy.default:  # a cast rounds in one way
            return result
        was, now = _numbers(before), _numbers(arguments)
        written = [at for at, leaf in enumerate(now) if leaf is not was[at] and not torch.equal(leaf, was[at])]
        made = [result, [now[at] for at in written]]
        read = max((leaf.numel() for leaf in was), default=0)
        least = min((leaf.numel() for leaf in _numbers(made) if leaf.numel()), default=read)
        try:
            exact = _in_float64(func, before, written)
            if name not in SUMS and all(map(torch.equal, _numbers(exact), map(_wide, _numbers(made)))):
                return result
            order = partial(self._moved, terms=read / max(least, 1))
            moved = _in_float64(func, before, written, order) if least < read else exact
        except (RuntimeError, TypeError):  # no kernel for float64
            exact = moved = made
        redrawn, statistics = pytree.tree_map(partial(self._redrawn, read), made, exact, moved)
        for at, values in zip(written, statistics, strict=True):
            now[at].copy_(values)
        return redrawn

    def _redrawn(self, read: int, value: Any, exact: Any, moved: Any) -> object:
        """Return a result with another rounding error; `moved` is the operator's result for terms that were moved."""
        if not is_number(value) or exact.shape != value.shape:
            return value
        wide, terms = _wide(value), moved if value.numel() < read else exact
        made = self._moved(terms, value.dtype) + self._random(wide) * (wide - exact)
        return torch.empty_like(value).copy_(torch.where(made.isfinite(), made, wide))

    def _moved(self, value: torch.Tensor, dtype: torch.dtype, terms: float = 0.0) -> torch.Tensor:
        """Return numbers with a random error of up to half a unit in the last place of `dtype`; whole ones stay.

        It is larger for `terms` that are added one by one: each partial sum is rounded, to float32 or better.
        """
        eps = torch.finfo(dtype).eps
        order = min(eps, torch.finfo(torch.float32).eps) * math.sqrt(terms / 2)
        step = self._random(value) * max(eps, order) / 2 * value
        return torch.where(value == value.round(), value, value + step) if not value.is_complex() else value + step

    def _random(self, like: torch.Tensor) -> torch.Tensor:
        """Return a number from -1 to 1 for each of `like`."""
        if like.device not in self.generators:
            self.generators[like.device] = torch.Generator(like.device).manual_seed(self.seed or 0)
        drawn = torch.empty(like.shape, device=like.device)  # float32, which takes half the time
        return drawn.uniform_(-1, 1, generator=self.generators[like.device])


_wide: Callable[[torch.Tensor], torch.Tensor] = partial(in_precision, dtype=torch.float64)


def _in_float64(
    func: Callable[..., object],
    arguments: object,
    written: Sequence[int],
    change: Callable[[torch.Tensor, torch.dtype], torch.Tensor] = lambda value, _: value,
) -> list[object]:
    """Return what an operator gives in float64, for inputs that `change` has changed, and those that are `written`."""

    def wide(leaf: object) -> object:
        if isinstance(leaf, torch.dtype) and leaf.is_floating_point:
            return torch.float64
        # A copy, since some operators write where their schema does not say so.
        return change(_wide(leaf.clone()), leaf.dtype) if is_number(leaf) else _cloned(leaf)

    args, kwargs = pytree.tree_map(wide, arguments)
    result, numbers = func(*args, **kwargs), _numbers((args, kwargs))
    return [result, [numbers[at] for at in written]]


def _keeps_statistics(func: OpOverload) -> bool:
    """Return whether an operator may write a norm's running statistics, of which its schema says nothing."""
    name = func.overloadpacket.__name__
    return "batch_norm" in name and "backward" not in name


def _is_half(leaf: object) -> bool:
    return (leaf.dtype if isinstance(leaf, torch.Tensor) else leaf) in HALVES


def _cloned(leaf: object) -> object:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _numbers(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if is_number(leaf)]
