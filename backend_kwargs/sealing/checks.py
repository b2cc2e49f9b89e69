"""Whether sealed results are right: compared with eager's, padded ones with unpadded ones."""

from collections.abc import Callable

import torch

from backend_kwargs.bundles.samples import Sample
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.sealing.declared import Point, shown_point
from backend_kwargs.sealing.inputs import Result
from backend_kwargs.torch_internals import pytree
from backend_kwargs.trial import check_within, largest_of, walk

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
