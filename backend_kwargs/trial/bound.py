"""Compare the error of a result with a bound: the relative RMSE of each output to a reference in higher precision."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from backend_kwargs.trial.accuracy import (
    NOT_FINITE,
    Accuracy,
    LeafError,
    Status,
    is_number,
    mismatch,
    root_mean_square,
    same_where_not_finite,
    wide,
    worst,
)
from backend_kwargs.trial.trees import Results, walk

# Leaves of other kinds, such as a user's own objects, have no `==` that says whether they are right.
COMPARED = (torch.Tensor, bool, int, float, str, type(None))


def check_within(
    result: object,
    eager: object,
    reference: object,
    bound: Callable[[torch.Tensor], float],
    *,
    what: str = "output",
    by: str = "max_error",
    least: float = 0.0,
) -> Accuracy:
    """Compare a pytree with `reference`: pass if the relative error of every floating leaf is within its `bound`.

    The relative error is the RMSE over the RMS of the reference, or of what is summed if the sum is zero but for
    rounding, and over `least` if that is more. Structure, dtypes, shapes, devices, other values, and the positions of
    NaN and infinity must equal eager's. The `error` of the result is the largest of all leaves. A reason calls the
    bound `by` its name.
    """
    results, expected, precise = (dict(walk(what, tree)) for tree in (result, eager, reference))
    if results.keys() != expected.keys() or precise.keys() != expected.keys():
        odd = min(results.keys() ^ expected.keys() or precise.keys() ^ expected.keys())
        return Accuracy("fail_accuracy", f"the structure of the result differs from eager's at {odd}")
    leaves: list[LeafError] = []
    for path in results:
        values = [tree[path] for tree in (results, expected, precise)]
        if all(isinstance(each, float) for each in values):
            values = [torch.tensor(each, dtype=torch.float64) for each in values]
        leaf, of_eager, wanted = values
        reason = mismatch(leaf, of_eager) if isinstance(of_eager, COMPARED) else ""
        if not reason and is_number(leaf):
            if same_where_not_finite(wide(leaf), wide(of_eager)):
                error, most = relative_error(leaf, of_eager, wanted, least), bound(leaf)
                leaves.append(LeafError(path, error, most, error <= most))
            else:
                reason = NOT_FINITE
        if reason:
            return Accuracy("fail_accuracy", f"{path}: {reason}")
    far = max(leaves, key=lambda each: (not each.passed, each.error), default=LeafError(what, 0.0, None, passed=True))
    reason = "" if far.passed else f"{far.name}: error {far.error:.2g}, above {by}={far.bound:g}"
    status: Status = "pass" if far.passed else "fail_accuracy"
    return Accuracy(status, reason, error=far.error, bound=far.bound, leaves=tuple(leaves))


def check_error(
    result: object, eager: object, reference: object, max_error: float, *, what: str = "output"
) -> Accuracy:
    """Compare a pytree with `reference` as `check_within` one bound, which holds of nothing where no leaf is finite."""
    accuracy = check_within(result, eager, reference, lambda _: max_error, what=what)
    if not accuracy.passed:
        return accuracy
    finite = [bool(each.isfinite().any()) for _, each in walk(what, reference) if is_number(each) and each.numel()]
    if finite and not any(finite):  # as at a first call with inputs that are nan
        return Accuracy("fail_accuracy", "its error cannot be measured: no result is finite")
    return replace(accuracy, bound=max_error)


def check_errors(seen: Results, eager: Results, reference: Results, max_error: float) -> Accuracy:
    """Compare all that a call returns and changes, by name: the first that fails, or the one with the largest error."""
    every = [check_error(seen[what], eager[what], reference[what], max_error, what=what) for what in seen]
    return replace(worst(every), leaves=tuple(leaf for accuracy in every for leaf in accuracy.leaves))


def relative_error(result: torch.Tensor, eager: torch.Tensor, reference: torch.Tensor, least: float = 0.0) -> float:
    """Return the RMSE over the RMS of the reference, or over `least` if that is more.

    A leaf that is zero but for rounding, such as the gradient of an attention key's bias, has no size of its own. The
    size of what was summed takes its place: eager's error, over a unit in the last place.
    """
    got, own, want = map(wide, (result, eager, reference))
    finite = want.isfinite()
    if not bool(got[finite].isfinite().all()):
        return math.inf
    error, size = root_mean_square(got[finite] - want[finite]), max(root_mean_square(want[finite]), least)
    noise = root_mean_square(own[finite] - want[finite])
    if 0 < size < noise < math.inf:
        size = noise / torch.finfo(eager.dtype).eps
    return error / size if size else math.inf if error else 0.0
