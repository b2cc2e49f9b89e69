"""The random numbers that eager draws, noted in one run and given to another in a higher precision."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from backend_kwargs.torch_internals.modes import OperatorMode
from backend_kwargs.torch_internals.operators import OPERATORS, arguments_of
from backend_kwargs.torch_internals.replacing import undone
from backend_kwargs.trial.accuracy import same_twice
from backend_kwargs.trial.trees import Results, tensors_of

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
