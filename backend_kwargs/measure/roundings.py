"""Eager's results at other roundings: how far they move shows which errors of a result are rounding errors."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from backend_kwargs.measure.accuracy import Errors, is_number, mismatch, same_twice, wide
from backend_kwargs.measure.inputs import in_precision
from backend_kwargs.measure.trees import Results, walk
from backend_kwargs.options.layers import Options
from backend_kwargs.torch_internals import pytree
from backend_kwargs.torch_internals.modes import TorchDispatchMode
from backend_kwargs.torch_internals.operators import OpOverload, schema_of
from backend_kwargs.torch_internals.replacing import undone

SUMS = frozenset({"sum", "mean", "mm", "addmm", "bmm", "baddbmm", "dot", "mv"})  # these may be exact by chance
MOST = 16  # runs; an honest result seldom needs more than one
LONGEST = 5.0  # seconds of runs, after which no other begins


class Roundings:
    """The errors of eager's leaves in runs that round otherwise, each run when it is first asked for.

    `run` is called with nothing and returns results by name, as `eager` holds them; it is not called again once it
    fails, once `affordable` returns False, or, after the first that rounds otherwise, once all have taken 5 s.
    """

    def __init__(
        self,
        run: Callable[[], Results],
        eager: Results,
        affordable: Callable[[], bool] = lambda: True,
    ) -> None:
        self._seen: list[dict[str, Errors]] = []
        self._drawn = _drawn(run, eager, affordable)

    def __iter__(self) -> Iterator[dict[str, Errors]]:
        for at in range(MOST):
            if at == len(self._seen):
                if (following := next(self._drawn, None)) is None:
                    return
                self._seen.append(following)
            yield self._seen[at]


def _drawn(run: Callable[[], Results], eager: Results, affordable: Callable[[], bool]) -> Iterator[dict[str, Errors]]:
    """Yield the errors of eager's leaves in one run after the other, until no more are affordable."""
    spent = 0.0
    for seed in (None, *range(MOST)):
        if not affordable() or (seed and spent >= LONGEST):
            return
        began = time.perf_counter()
        try:
            with undone() as stack:
                stack.enter_context(OtherRounding(seed))
                results = run()
        except Exception:  # noqa: BLE001 - an operator that no mode can run, or no memory left
            return
        moved = errors(results, eager)
        spent += time.perf_counter() - began
        if seed is not None:
            yield moved
        elif not same_twice(results, eager).passed:  # torch chooses other operators under a mode
            return


def errors(seen: Results, eager: Results) -> dict[str, Errors]:
    """Return how far the numbers of each leaf are from eager's, by the leaf's path."""
    by_path = {}
    for what in seen:
        expected = dict(walk(what, eager[what]))
        for path, leaf in walk(what, seen[what]):
            if is_number(leaf) and not mismatch(leaf, expected.get(path)):
                apart = wide(leaf) - wide(expected[path])
                by_path[path] = Errors.of(apart[apart.isfinite()])
    return by_path


class OtherRounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws the rounding error of each operator anew; exact results and whole numbers stay as they are.

    An operator runs in float64 as well, which shows its error, and whether it has one. That error gets a random factor,
    and an error of up to half a unit in the last place is added. What is summed is moved by so much first: a sum's own
    error depends on its order. A cast stays: a result without it is another one.
    """

    supports_higher_order_operators = True

    def __init__(self, seed: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed = seed  # None changes nothing
        self.generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Options | None = None
    ) -> object:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.seed is None or not isinstance(func, OpOverload) or func.namespace not in ("aten", "prims"):
            return result
        if func.is_view or schema_of(func).is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            return result
        if func is torch.ops.aten._to_copy.default:  # a cast rounds in one way
            return result
        try:
            exact = _in_float64(func, args, kwargs)
            by_chance = func.overloadpacket.__name__ in SUMS
            if not by_chance and all(map(torch.equal, _numbers(exact), map(_wide, _numbers(result)))):
                return result
            moved = _in_float64(func, args, kwargs, self._moved) if _sums((args, kwargs), result) else exact
        except (RuntimeError, TypeError):  # no kernel for float64
            exact = moved = result
        return pytree.tree_map(self._redrawn, result, exact, moved)

    def _redrawn(self, value: Any, exact: Any, moved: Any) -> object:
        """Return a result with another rounding error; `moved` is the operator's result for inputs that were moved."""
        if not is_number(value) or exact.shape != value.shape:
            return value
        wide = _wide(value)
        made = self._moved(moved, value.dtype) + self._random(wide) * (wide - exact)
        return torch.empty_like(value).copy_(torch.where(made.isfinite(), made, wide))

    def _moved(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return numbers with a random error of up to half a unit in the last place of `dtype`; whole ones stay."""
        step = self._random(value) * torch.finfo(dtype).eps / 2 * value
        return torch.where(value == value.round(), value, value + step) if not value.is_complex() else value + step

    def _random(self, like: torch.Tensor) -> torch.Tensor:
        """Return a number from -1 to 1 for each of `like`."""
        if like.device not in self.generators:
            self.generators[like.device] = torch.Generator(like.device).manual_seed(self.seed or 0)
        drawn = torch.empty(like.shape, device=like.device)  # float32, which takes half the time
        return drawn.uniform_(-1, 1, generator=self.generators[like.device])


def _in_float64(
    func: Callable[..., object],
    args: tuple[Any, ...],
    kwargs: Options,
    change: Callable[..., torch.Tensor] = lambda value, _: value,
) -> object:
    """Return what an operator gives in float64, for inputs that `change` has changed."""

    def wide(leaf: object) -> object:
        if isinstance(leaf, torch.dtype) and leaf.is_floating_point:
            return torch.float64
        if not isinstance(leaf, torch.Tensor):
            return leaf
        # A copy, since some operators write where their schema does not say so.
        return change(_wide(leaf.clone()), leaf.dtype) if is_number(leaf) else leaf.clone()

    wide_args, wide_kwargs = pytree.tree_map(wide, (args, kwargs))
    return func(*wide_args, **wide_kwargs)


def _wide(value: torch.Tensor) -> torch.Tensor:
    return in_precision(value, torch.float64)


def _numbers(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if is_number(leaf)]


def _sums(arguments: object, result: object) -> bool:
    """Return whether an operator reads more numbers than it returns."""
    read, made = (max((leaf.numel() for leaf in _numbers(tree)), default=0) for tree in (arguments, result))
    return read > made
