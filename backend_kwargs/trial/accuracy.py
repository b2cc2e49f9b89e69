"""The accuracy check: a result against eager's, relative to eager's own error to a higher-precision reference.

With a bound, the relative RMSE of each output to that reference is checked instead.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeGuard

import torch

from backend_kwargs.trial.trees import Results, upcast, walk

# "fell_back": right results, but not run by the backend; "unknown": it cannot be determined what ran; "unchecked": the
# results differ from eager's, and there was no time to find out whether by rounding; "uncheckable": there is no way to.
Status = Literal[
    "pass",
    "unknown",
    "fell_back",
    "fail_accuracy",
    "unchecked",
    "uncheckable",
    "fail_to_run",
    "oom",
    "timeout",
    "eager_two_runs_differ",
    "unavailable",
]

REFERENCE_DTYPES = (torch.float64, torch.float32)
WELL_CONDITIONED = (torch.float32, torch.float64, torch.complex64, torch.complex128)
TIGHT, LOOSE = 1e-3, 1e-2  # the default tolerance, and the one in training
LOWEST_COSINE = 0.99
LARGEST_GROWTH = 0.05
LARGEST_CHANGE = 0.25
PRECISE = 0.1  # with a larger eager error, relative to its size, a leaf is zero but for rounding
ROUNDING = 16  # units in the last place, as a share of the largest leaf, that such a leaf may be off
# A leaf is zero in exact arithmetic if float64 gives a millionth of eager's error. Each order of summation then gives
# other noise: of biases before a norm, compiled gradients were up to 180 times as far from 0 as eager's (CPU), and up
# to 40 times as far as float64's, in units of what was summed.
ZERO = 2.0**-20
NOISE = 256
FLOAT32, FLOAT64 = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps
ALL_NOISE = 0.5  # without a reference, a leaf is noise if other roundings move it by at least this share of its size
MANY = 32  # elements; with fewer, eager's error to the reference may be small by chance
TF32 = 2.0**-11  # the rounding error of an operand in TF32
ONE = 4  # the largest error of one element of such a leaf, in the root mean square that is allowed
ELEMENT = 10  # the largest error of one element, in eager's largest errors
DRAWN = 2  # the error of a leaf, in the largest of runs that round otherwise
DIFFERS = "the values differ from eager's"
NOT_FINITE = "NaN or infinity where eager has none, or vice versa"
ENOUGH = 2  # runs that moved a leaf, after which
BEYOND = 10  # times the allowed error are not explained by rounding


class Errors(NamedTuple):
    """The errors of one leaf: their root mean square, and the largest of one element."""

    rms: float
    largest: float

    @classmethod
    def of(cls, error: torch.Tensor) -> "Errors":
        """Return the errors of a row of numbers."""
        return cls(root_mean_square(error), float(error.abs().max()) if error.numel() else 0.0)


NONE = Errors(0.0, 0.0)


@dataclass(frozen=True)
class LeafError:
    """One output, gradient or changed tensor: its relative RMSE to the reference, and the largest that passes.

    Either is None where there is no reference, or no size to relate it to.
    """

    name: str
    error: float | None
    bound: float | None
    passed: bool


@dataclass(frozen=True)
class Accuracy:
    """One comparison: its verdict, the reason, and the figures of the worst tensor.

    `rmse` and `reference_rmse` are the root mean square errors of the result and of eager to the reference; without a
    reference `rmse` is the distance to eager and `reference_rmse` is None. `max_error` is absolute, to eager. `error`
    is the relative RMSE to a reference, and `bound` the largest error allowed, if there was a bound. `allowed` is the
    largest relative RMSE with which this tensor can pass. `leaves` are all tensors that were compared, up to the first
    that failed.
    """

    status: Status = "pass"
    reason: str = ""
    rmse: float | None = None
    reference_rmse: float | None = None
    max_error: float | None = None
    cosine: float | None = None
    error: float | None = None
    bound: float | None = None
    allowed: float | None = field(default=None, compare=False)
    leaves: tuple[LeafError, ...] = field(default=(), compare=False)

    @property
    def passed(self) -> bool:
        """Return whether the result may be timed."""
        return self.status == "pass"


def call(fn: Callable[..., object], args: tuple[object, ...]) -> Any:
    """Call `fn` with gradients off."""
    with torch.no_grad():
        return fn(*args)


def reference(fn: Callable[..., object], args: Any, run: Callable[[Any, Any], Any] = call) -> Any | None:
    """Return `run(fn, args)` computed in float64, else float32, else None; `fn` and `args` are copied, not changed.

    `fn` is upcast if it is a module; `args` is any pytree. A model that fails in both dtypes (a kernel without float64,
    too little memory) has no reference, and `check` then compares the cosine.
    """
    for dtype in REFERENCE_DTYPES:
        # Whatever prevents one reference, the next precision is tried.
        with contextlib.suppress(Exception):
            return run(upcast(fn, dtype) if isinstance(fn, torch.nn.Module) else fn, upcast(args, dtype))
    return None


def check(
    result: object,
    eager: object,
    reference: object | None = None,
    *,
    dtype: torch.dtype | None = None,
    training: bool = False,
    what: str = "output",
    tol: float | None = None,
    roundings: Iterable[Mapping[str, Errors]] = (),
) -> Accuracy:
    """Compare two pytrees of outputs leaf by leaf and return the worst comparison.

    Structure, types, shapes, devices and non-floating values must be equal, and NaN and inf may occur only where eager
    has them. Each floating leaf is compared at its own size, the RMS of its n elements, whatever the others hold. With
    `floor = tol * min(1, size)` and `tol` by default 1e-3 (1e-2 in training), it passes

    - if each element is within `tol * |eager| + floor` of eager's,
    - or if `RMSE(reference, result) <= m * RMSE(reference, eager) + floor / 10`, with m = 2 (3 for half precision and
      below), and each element is within `2 * (tol * |reference| + floor)` of the reference's, plus 10 times eager's
      largest error.

    Below 32 elements, m is larger by 8 / n. There, and in half precision and below, the share of the size in `floor`
    is the eps of bfloat16 or of the dtype if that is more than `tol`; `floor` is never above that of the largest leaf.

    On a GPU with TF32 allowed, which is torch's default for convolutions, eager's error in float32 counts as at least
    one rounding to TF32, 2**-11 of the size. A few elements of eager's may be right by chance. So `roundings` gives
    eager's errors in runs that round otherwise (`Roundings`). They are read while a leaf fails: its error may also be
    eager's and 2 times the largest of these, and that of one element 10 times; no more are read once two have moved the
    leaf and its error is still 10 times what is allowed. A leaf that is zero but for rounding (eager's error exceeds a
    tenth of its size) may also be off by 16 units in the last place of float32, of the largest leaf. A leaf that is
    zero in exact arithmetic, as is the gradient of a bias before a batch norm, holds nothing but the noise of what was
    summed. That noise is measured: by eager's error and float64's, or without a reference by `roundings`. It may be off
    by 256 times as much, at most by a tenth of `tol` of the largest leaf. One element of a leaf that is zero but for
    rounding may be off by four times that.
    Without a reference, the cosine to eager's must be at least 0.99, the RMS within 5 %, and each element within a
    quarter of `|eager| + size`. `dtype` is the dtype that the model computes in, by default each leaf's own; `what`
    names the pytree in a reason.

    Source of the second rule: `torch._dynamo.utils.same`, which in contrast tolerates errors in small leaves.
    """
    results, expected, precise = (dict(walk(what, tree)) for tree in (result, eager, reference))
    if results.keys() != expected.keys():
        odd = min(results.keys() ^ expected.keys())
        return _failed(f"the structure of the result differs from eager's at {odd}")
    if precise.keys() != expected.keys():
        precise = {}
    limits = _Limits(_tolerance(tol, training), dtype, largest_of(expected.values()), not roundings)

    def judged(path: str) -> Accuracy:
        otherwise = (errors.get(path) for errors in roundings)
        accuracy = _check_leaf(path, results[path], expected[path], precise.get(path), limits, otherwise)
        leaf = LeafError(path, accuracy.error, accuracy.bound or accuracy.allowed, accuracy.passed)
        return replace(accuracy, leaves=(leaf,))

    return worst(map(judged, results))


def check_all(seen: Results, eager: Results, reference: Results | None = None, **how: Any) -> Accuracy:
    """Check all that a call returns and changes, by name: outputs, gradients, state."""
    precise = reference or {}
    return worst(check(seen[what], eager[what], precise.get(what), what=what, **how) for what in seen)


def _tolerance(tol: float | None, training: bool) -> float:
    return (LOOSE if training else TIGHT) if tol is None else tol


def same_twice(seen: Results, eager: Results, *, training: bool = False, tol: float | None = None) -> Accuracy:
    """Compare two runs of eager, whose rounding errors may differ, as those of atomic additions do.

    Eager's own error says nothing here, since it would be as large as any difference. So errors of up to the tolerance
    of the largest leaf are rounding errors, however large it is: gradients may be scaled.
    """
    tol = _tolerance(tol, training)
    judged = []
    for what in seen:
        largest = largest_of([leaf for _, leaf in walk(what, eager[what])])
        allowed = Errors(tol * largest / 2, tol * largest / 2)
        rounding = {path: allowed for path, _ in walk(what, eager[what])}
        judged.append(check(seen[what], eager[what], training=training, what=what, tol=tol, roundings=[rounding]))
    return worst(judged)


def worst(accuracies: Iterable[Accuracy]) -> Accuracy:
    """Return the first comparison that failed, and make none after it; else return the one with the largest error.

    It has the leaves of all that were made.
    """
    made = []
    for accuracy in accuracies:
        made.append(accuracy)
        if not accuracy.passed:
            break

    def rank(each: Accuracy) -> tuple[bool, float]:
        return not each.passed, next((error for error in (each.rmse, each.error) if error is not None), -1.0)

    return replace(max(made, key=rank, default=Accuracy()), leaves=tuple(leaf for each in made for leaf in each.leaves))


def _failed(reason: str, figures: Accuracy = Accuracy()) -> Accuracy:
    """Return the failed comparison, with its figures."""
    return replace(figures, status="fail_accuracy", reason=reason)


def is_number(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a leaf is a tensor of floating or complex numbers."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def wide(value: torch.Tensor) -> torch.Tensor:
    """Return the values as one row of float64; complex numbers become pairs."""
    dense = value.detach() if value.layout == torch.strided else value.detach().to_dense()
    real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return real.flatten().to(torch.float64)


def root_mean_square(error: torch.Tensor) -> float:
    """Return the root mean square, 0 of nothing."""
    return math.sqrt(float(error.dot(error)) / error.numel()) if error.numel() else 0.0


def _check_leaf(
    path: str, result: Any, eager: object, reference: object, limits: "_Limits", roundings: Iterable[Errors | None]
) -> Accuracy:
    """Compare one leaf with eager's."""
    if isinstance(result, float) and isinstance(eager, float):
        result, eager = (torch.tensor(value, dtype=torch.float64) for value in (result, eager))
        reference = torch.tensor(reference, dtype=torch.float64) if isinstance(reference, float) else None
    if reason := mismatch(result, eager):
        return _failed(f"{path}: {reason}")
    if not is_number(eager):
        return Accuracy()
    got, want = wide(result), wide(eager)
    precise = wide(reference) if isinstance(reference, torch.Tensor) and reference.shape == eager.shape else None
    if not same_where_not_finite(got, want):
        return _failed(f"{path}: {NOT_FINITE}")
    finite = want.isfinite()
    if precise is not None:
        finite &= precise.isfinite()
    if not bool(finite.all()):
        got, want, precise = got[finite], want[finite], None if precise is None else precise[finite]
    coarse = eager.is_cuda and eager.dtype == torch.float32 and _may_use_tf32()
    leaf = _Leaf(path, got, want, precise, eager.dtype, limits, TF32 if coarse else 0.0)
    return leaf.judged(errors for errors in roundings if errors)


def mismatch(result: object, eager: object) -> str:
    """Return how a leaf differs from eager's in other things than floating or complex numbers, or ""."""
    if not isinstance(eager, torch.Tensor) or not isinstance(result, torch.Tensor):
        if type(result) is not type(eager):
            return f"eager gives {type(eager).__name__}, this one {type(result).__name__}"
        return "" if bool(result == eager) else DIFFERS
    facts = (
        ("shape", tuple(eager.shape), tuple(result.shape)),
        ("dtype", eager.dtype, result.dtype),
        ("device", eager.device, result.device),
    )
    if odd := next((f"eager's {what} is {want}, this one's {got}" for what, want, got in facts if want != got), ""):
        return odd
    return "" if is_number(eager) or torch.equal(result, eager) else DIFFERS


def same_where_not_finite(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Return whether `got` has NaN and infinity where `want` has them, and nowhere else."""
    odd = ~want.isfinite()
    there = torch.equal(~got.isfinite(), odd)
    return there and torch.equal(got[odd].nan_to_num(nan=0.5), want[odd].nan_to_num(nan=0.5))


def _may_use_tf32() -> bool:
    """Return whether eager may compute float32 in TF32."""
    with contextlib.suppress(RuntimeError):  # of precisions that were set in two ways
        return torch.backends.cudnn.allow_tf32 or torch.get_float32_matmul_precision() != "highest"
    return True


@dataclass(frozen=True)
class _Limits:
    """The tolerance, the dtype that the model computes in, and the size of the largest of eager's leaves."""

    tol: float
    dtype: torch.dtype | None
    largest: float
    alone: bool = True  # without runs that round otherwise

    @property
    def rounding(self) -> float:
        """How far a leaf may be off that is zero but for rounding."""
        return ROUNDING * FLOAT32 * self.largest


def largest_of(leaves: Iterable[object]) -> float:
    """Return the root mean square of the largest leaf, of its finite values."""
    sizes = (wide(leaf) for leaf in leaves if is_number(leaf))
    return max((root_mean_square(values[values.isfinite()]) for values in sizes), default=0.0)


@dataclass(frozen=True)
class _Leaf:
    """The finite values of one leaf: the result's, eager's and the reference's, if there is one.

    `rounding` is a share of its size that counts as eager's error, where that has other kernels to choose from.
    """

    path: str
    got: torch.Tensor
    want: torch.Tensor
    precise: torch.Tensor | None
    made_in: torch.dtype
    limits: _Limits
    rounding: float = 0.0

    def judged(self, roundings: Iterator[Errors]) -> Accuracy:
        """Return the verdict; errors under other `roundings` are drawn while it fails and they may explain it."""
        apart = (self.got - self.want).abs_()
        largest = float(apart.max()) if apart.numel() else 0.0
        figures = Accuracy(rmse=root_mean_square(apart), max_error=largest, cosine=_cosine(self.got, self.want))
        own = Errors(0.0, 0.0)
        if self.precise is not None:
            error, own = root_mean_square(self.got - self.precise), Errors.of(self.want - self.precise)
            share = error / self.size if self.size else None
            figures = replace(figures, rmse=error, reference_rmse=own.rms, error=share)
        own = Errors(*(max(each, self.rounding * self.size) for each in own))
        if self.precise is not None and self.size:
            figures = replace(figures, allowed=self._most(own) / self.size)
        floor = self.floor + (self.limits.rounding if self.precise is None else 0.0)
        if not apart.numel() or float(apart.sub_(self.want.abs(), alpha=self.limits.tol).max()) <= floor:
            return figures
        failed = self._far_from_eager(figures, floor) if self.precise is None else self._far(own, figures)
        moved = 0  # a draw that changes nothing is no sign of small errors, as in bfloat16
        drawn = NONE
        while failed and (errors := next(roundings, None)):
            drawn = Errors(*map(max, drawn, errors))
            failed = self._far(own, figures, drawn)
            moved += errors.largest > 0
            if moved >= ENOUGH and self._far(own, figures, drawn, BEYOND):
                break
        if not failed and self.precise is not None and self.size:
            return replace(figures, allowed=self._most(own, drawn) / self.size)
        return failed or figures

    @cached_property
    def truth(self) -> torch.Tensor:
        return self.want if self.precise is None else self.precise

    @cached_property
    def size(self) -> float:
        return root_mean_square(self.truth)

    @property
    def few(self) -> bool:
        return self.truth.numel() < MANY

    @property
    def dtype(self) -> torch.dtype:
        return self.limits.dtype or self.made_in

    @property
    def floor(self) -> float:
        """The tolerance of what is not a share of an element: of the leaf's size, at most 1."""
        tol = self.limits.tol
        # A few numbers of float32 that are computed from bfloat16 may be exact by chance, unless other roundings tell.
        dtypes = [self.dtype, self.made_in, *([torch.bfloat16] if self.few and self.limits.alone else [])]
        if (eps := max(torch.finfo(dtype).eps for dtype in dtypes)) > tol:
            return min(eps * self.size, tol * min(1.0, self.limits.largest))
        return tol * min(1.0, self.size)

    def _most(self, own: Errors, drawn: Errors = NONE) -> float:
        """Return the largest RMSE with which it passes by either rule: near the reference, or near eager."""
        of_eager = self.limits.tol * root_mean_square(self.want) + self.floor + self.limits.rounding + own.rms
        return max(self._near_reference(own, drawn), of_eager)

    def _near_reference(self, own: Errors, drawn: Errors) -> float:
        """Return the largest RMSE to the reference that eager's `own` errors, or those `drawn`, allow."""
        times = (2 if self.dtype in WELL_CONDITIONED else 3) + (8 / self.truth.numel() if self.few else 0)
        # Those drawn are apart from eager's, and a few numbers that are rounded may all be rounded the other way.
        last = torch.finfo(self.made_in).eps / 2 * self.size if self.few else 0.0
        most = max(times * own.rms, DRAWN * drawn.rms + own.rms + last if drawn.rms else 0.0)
        return most + self.floor / 10 + self._rounding(own, drawn)

    def _rounding(self, own: Errors, drawn: Errors) -> float:
        """Return how far a leaf may be off that is zero but for rounding, 0 if it is not."""
        moved = max(own.rms, drawn.rms)
        if moved < PRECISE * self.size:
            return 0.0
        noise = 0.0
        if self.precise is None and drawn.rms >= ALL_NOISE * self.size:
            noise = drawn.rms
        elif self.precise is not None and self.size <= ZERO * moved:
            # Each is of one order of summation.
            noise = max(moved, self.size * max(FLOAT32, 2 * self.rounding) / FLOAT64)
        return max(self.limits.rounding, min(NOISE * noise, self.limits.tol * min(1.0, self.limits.largest) / 10))

    def _far(self, own: Errors, figures: Accuracy, drawn: Errors = NONE, beyond: int = 1) -> Accuracy | None:
        """Return the failure if the errors exceed `beyond` times what eager's `own`, or those `drawn`, allow."""
        assert figures.rmse is not None
        floor, rounding = self.floor, self._rounding(own, drawn)
        allowed = self._near_reference(own, drawn)
        to = "eager" if self.precise is None else "the reference"
        if figures.rmse > beyond * allowed:
            reason = f"{self.path}: RMSE to {to} {figures.rmse:.3g}, at most {allowed:.3g} allowed"
            return _failed(reason, replace(figures, bound=allowed / self.size) if self.size else figures)
        off = (self.got - self.truth).abs_()
        at = int((off - 2 * self.limits.tol * self.truth.abs()).argmax())
        largest = ELEMENT * max(own.largest, drawn.largest)
        allowed = largest + 2 * (self.limits.tol * abs(float(self.truth[at])) + floor) + ONE * rounding
        if float(off[at]) > beyond * allowed:
            return _failed(f"{self.path}: one element is off by {off[at]:.3g}, at most {allowed:.3g} allowed", figures)
        return None

    def _far_from_eager(self, figures: Accuracy, floor: float) -> Accuracy | None:
        """Return the failure if a result differs more from eager's than rounding explains, without a reference."""
        assert figures.cosine is not None
        if figures.cosine < LOWEST_COSINE:
            return _failed(
                f"{self.path}: cosine to eager {figures.cosine:.4g}, at least {LOWEST_COSINE} wanted", figures
            )
        # A cosine alone would pass an output of twice its size.
        rms = root_mean_square(self.got)
        if abs(rms - self.size) > LARGEST_GROWTH * self.size + floor:
            return _failed(f"{self.path}: RMS {rms:.3g}, eager's is {self.size:.3g}", figures)
        off = (self.got - self.want).abs_()
        allowed = LARGEST_CHANGE * (self.want.abs() + self.size) + floor
        at = int((off - allowed).argmax())
        if float(off[at]) > float(allowed[at]):
            reason = f"{self.path}: one element is off by {off[at]:.3g}, at most {allowed[at]:.3g} allowed"
            return _failed(reason, figures)
        return None


def _cosine(got: torch.Tensor, want: torch.Tensor) -> float:
    size = math.sqrt(float(got.dot(got)) * float(want.dot(want)))
    return float(got.dot(want)) / size if size else float(torch.equal(got, want))


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
