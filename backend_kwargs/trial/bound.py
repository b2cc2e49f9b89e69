"""Compare the error of a result with a bound: the relative RMSE of each output to a reference in higher precision."""

import math
from dataclasses import replace
from typing import Any

import torch

from backend_kwargs.trial.accuracy import (
    NOT_FINITE,
    Accuracy,
    LeafError,
    is_number,
    mismatch,
    root_mean_square,
    same_where_not_finite,
    wide,
    worst,
)
from backend_kwargs.trial.trees import Results, walk


def check_error(
    result: object, eager: object, reference: object, max_error: float, *, what: str = "output"
) -> Accuracy:
    """Compare a pytree with `reference`: pass if the relative error of every floating leaf is at most `max_error`.

    The relative error is the RMSE over the RMS of the reference, or of what is summed if the sum is zero but for
    rounding. Structure, dtypes, shapes, devices, other values, and the positions of NaN and infinity must equal
    eager's. The `error` of the result is the largest of all leaves; there is none, and the check fails, if no floating
    leaf has a finite value.
    """
    results, expected, precise = (dict(walk(what, tree)) for tree in (result, eager, reference))
    if results.keys() != expected.keys() or precise.keys() != expected.keys():
        odd = min(results.keys() ^ expected.keys() or precise.keys() ^ expected.keys())
        return Accuracy("fail_accuracy", f"the structure of the result differs from eager's at {odd}")
    largest, where, finite, leaves = 0.0, what, list[bool](), list[LeafError]()
    for path in results:
        leaf, of_eager, wanted = (_as_tensor(leaves[path]) for leaves in (results, expected, precise))
        reason = mismatch(leaf, of_eager)
        if not reason and is_number(leaf) and not same_where_not_finite(wide(leaf), wide(of_eager)):
            reason = NOT_FINITE
        if reason:
            return Accuracy("fail_accuracy", f"{path}: {reason}")
        if is_number(leaf):
            error = relative_error(leaf, of_eager, wanted)
            leaves.append(LeafError(path, error, max_error, error <= max_error))
            largest, where = (error, path) if error > largest else (largest, where)
            finite += [bool(wanted.isfinite().any())] if wanted.numel() else []
    if finite and not any(finite):  # as at a first call with inputs that are nan: the bound would hold of nothing
        return Accuracy("fail_accuracy", "its error cannot be measured: no result is finite")
    return replace(judged(largest, max_error, where), leaves=tuple(leaves))


def check_errors(seen: Results, eager: Results, reference: Results, max_error: float) -> Accuracy:
    """Compare all that a call returns and changes, by name: the first that fails, or the one with the largest error."""
    every = [check_error(seen[what], eager[what], reference[what], max_error, what=what) for what in seen]
    return replace(worst(every), leaves=tuple(leaf for accuracy in every for leaf in accuracy.leaves))


def judged(error: float, max_error: float, where: str) -> Accuracy:
    """Return the verdict on a relative error."""
    if error <= max_error:
        return Accuracy(error=error, bound=max_error)
    reason = f"{where}: error {error:.2g}, above max_error={max_error:g}"
    return Accuracy("fail_accuracy", reason, error=error, bound=max_error)


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


def _as_tensor(leaf: object) -> Any:
    return torch.tensor(leaf, dtype=torch.float64) if isinstance(leaf, float) else leaf
