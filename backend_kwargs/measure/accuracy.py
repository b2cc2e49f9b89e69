"""The accuracy check: a result against eager's, relative to eager's own error to a higher-precision reference."""

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from backend_kwargs.measure.inputs import in_precision, upcast
from backend_kwargs.measure.trees import walk

# "fell_back": right results, but not run by the backend; "unknown": it cannot be determined what ran.
Status = Literal[
    "pass",
    "unknown",
    "fell_back",
    "fail_accuracy",
    "fail_to_run",
    "oom",
    "timeout",
    "eager_two_runs_differ",
    "unavailable",
]

REFERENCE_DTYPES = (torch.float64, torch.float32)
WELL_CONDITIONED = (torch.float32, torch.float64, torch.complex64, torch.complex128)
LOWEST_COSINE = 0.99
LARGEST_GROWTH = 0.05
PRECISE = 0.1  # the largest eager error, relative to a leaf's size, at which the leaf can be compared
MANY = 32  # elements; with fewer, eager's error to the reference may be small by chance


@dataclass(frozen=True)
class Accuracy:
    """One comparison: its verdict, the reason, and the figures of the worst tensor.

    `rmse` and `reference_rmse` are the root mean square errors of the result and of eager to the reference; without a
    reference `rmse` is the distance to eager and `reference_rmse` is None. `max_error` is absolute, to eager. `error`
    is the relative RMSE to a reference, and `bound` the largest error allowed, if there was a bound.
    """

    status: Status = "pass"
    reason: str = ""
    rmse: float | None = None
    reference_rmse: float | None = None
    max_error: float | None = None
    cosine: float | None = None
    error: float | None = None
    bound: float | None = None

    @property
    def passed(self) -> bool:
        """Return whether the result may be timed."""
        return self.status == "pass"


def call(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call `fn` with gradients off."""
    with torch.no_grad():
        return fn(*args)


def reference(fn: Callable[..., Any], args: Any, run: Callable[[Any, Any], Any] = call) -> Any | None:
    """Return `run(fn, args)` computed in float64, else float32, else None; `fn` and `args` are copied, not changed.

    `fn` is upcast if it is a module; `args` is any pytree. A model that fails in both dtypes (a kernel without float64,
    too little memory) has no reference, and `check` then compares the cosine.
    """
    for dtype in REFERENCE_DTYPES:
        # Whatever prevents one reference, the next precision is tried.
        with contextlib.suppress(Exception):
            return run(_upcast_module(fn, dtype) if isinstance(fn, torch.nn.Module) else fn, upcast(args, dtype))
    return None


def _upcast_module(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    # Module.to() would make complex parameters real.
    copied: Any = copy.deepcopy(module)
    copied._apply(lambda tensor: in_precision(tensor, dtype))
    return copied  # type: ignore[no-any-return]


def check(
    result: Any,
    eager: Any,
    reference: Any | None = None,
    *,
    dtype: torch.dtype | None = None,
    training: bool = False,
    what: str = "output",
    tol: float | None = None,
) -> Accuracy:
    """Compare two pytrees of outputs leaf by leaf and return the worst comparison.

    Structure, types, shapes, devices and non-floating values must be equal. A floating leaf passes if it is close to
    eager's, or if `RMSE(reference, result) <= m * RMSE(reference, eager) + tol / 10`, with m = 2 (3 for half precision
    and below) and `tol` by default 1e-3 (1e-2 in training); without a reference, if its cosine to eager's is at least
    0.99 and the RMS within 5 %. `dtype` is the dtype the model computes in, by default each leaf's own. NaN and inf
    may occur only where eager has them. The absolute part of `tol` shrinks with the largest output if all are below 1,
    and with each leaf of many elements that eager computes well; otherwise zeros would pass for small numbers. `what`
    names the pytree in a reason. Source: `torch._dynamo.utils.same`, the rule of PyTorch's benchmarks, which
    in contrast tolerates errors in small leaves.
    """
    results, expected, precise = (dict(walk(what, tree)) for tree in (result, eager, reference))
    if results.keys() != expected.keys():
        odd = min(results.keys() ^ expected.keys())
        return _failed(f"the structure of the result differs from eager's at {odd}")
    if precise.keys() != expected.keys():
        precise = {}
    tol = tol or (1e-2 if training else 1e-3)
    floor = tol * min(1.0, max((_rms(leaf) for leaf in expected.values()), default=math.inf))
    each = [
        _check_leaf(path, leaf, expected[path], precise.get(path), dtype, (tol, floor))
        for path, leaf in results.items()
    ]
    return worst(each)


def worst(accuracies: list[Accuracy]) -> Accuracy:
    """Return the first comparison that failed, else the one with the largest error."""
    failed = next((a for a in accuracies if not a.passed), None)
    return failed or max(accuracies, key=lambda a: a.rmse if a.rmse is not None else -math.inf, default=Accuracy())


def _failed(reason: str, figures: Accuracy = Accuracy()) -> Accuracy:
    return dataclasses.replace(figures, status="fail_accuracy", reason=reason)


def is_number(value: Any) -> bool:
    """Return whether a leaf is a tensor of floating or complex numbers."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def wide(value: torch.Tensor) -> torch.Tensor:
    """Return the values as one row of float64; complex numbers become pairs."""
    dense = value.detach() if value.layout == torch.strided else value.detach().to_dense()
    real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return real.flatten().to(torch.float64)


def _rms(value: Any) -> float:
    if not is_number(value) or not value.numel():
        return 0.0
    values = wide(value)
    return root_mean_square(values[values.isfinite()])


def root_mean_square(error: torch.Tensor) -> float:
    """Return the root mean square, 0 of nothing."""
    return float(error.square().mean().sqrt()) if error.numel() else 0.0


def _check_leaf(
    path: str, result: Any, eager: Any, reference: Any, dtype: torch.dtype | None, tolerance: tuple[float, float]
) -> Accuracy:
    if isinstance(result, float) and isinstance(eager, float):
        result, eager = (torch.tensor(value, dtype=torch.float64) for value in (result, eager))
        reference = torch.tensor(reference, dtype=torch.float64) if isinstance(reference, float) else None
    if reason := mismatch(result, eager):
        return _failed(f"{path}: {reason}")
    if not is_number(eager):
        equal = torch.equal(result, eager) if isinstance(eager, torch.Tensor) else bool(result == eager)
        return Accuracy() if equal else _failed(f"{path}: the values differ from eager's")
    return _check_numbers(path, result, eager, reference, dtype or eager.dtype, tolerance)


def mismatch(result: Any, eager: Any) -> str:
    """Return how a leaf differs from eager's in other things than values, or ""."""
    if not isinstance(eager, torch.Tensor) or not isinstance(result, torch.Tensor):
        same = type(result) is type(eager)
        return "" if same else f"eager gives {type(eager).__name__}, this one {type(result).__name__}"
    facts = (
        ("shape", tuple(eager.shape), tuple(result.shape)),
        ("dtype", eager.dtype, result.dtype),
        ("device", eager.device, result.device),
    )
    return next((f"eager's {what} is {want}, this one's {got}" for what, want, got in facts if want != got), "")


def _check_numbers(
    path: str,
    result: torch.Tensor,
    eager: torch.Tensor,
    reference: Any,
    dtype: torch.dtype,
    tolerance: tuple[float, float],
) -> Accuracy:
    got, want = wide(result), wide(eager)
    finite = want.isfinite()
    if not torch.equal(got[~finite].nan_to_num(nan=0.5), want[~finite].nan_to_num(nan=0.5)) or not bool(
        got[finite].isfinite().all()
    ):
        return _failed(f"{path}: NaN or infinity where eager has none, or vice versa")
    precise = wide(reference) if isinstance(reference, torch.Tensor) and reference.shape == eager.shape else None
    if precise is not None:
        finite &= precise.isfinite()
        precise = precise[finite]
    return _judge(path, got[finite], want[finite], precise, (dtype, eager.dtype), tolerance)


def _judge(
    path: str,
    got: torch.Tensor,
    want: torch.Tensor,
    precise: torch.Tensor | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    tolerance: tuple[float, float],
) -> Accuracy:
    tol, floor = tolerance
    largest, cosine = float((got - want).abs().max()) if got.numel() else 0.0, _cosine(got, want)
    if precise is None:
        figures = Accuracy(rmse=root_mean_square(got - want), max_error=largest, cosine=cosine)
        return _judge_by_eager(path, got, want, figures, tolerance)
    error, own, size = root_mean_square(got - precise), root_mean_square(want - precise), root_mean_square(precise)
    share = error / size if size else None
    figures = Accuracy(rmse=error, reference_rmse=own, max_error=largest, cosine=cosine, error=share)
    floor = min(floor, _own_floor(want, own, max(tol, *(torch.finfo(d).eps for d in dtypes))))
    multiplier = 2.0 if dtypes[0] in WELL_CONDITIONED else 3.0
    allowed = multiplier * own + floor / 10
    if torch.allclose(got, want, rtol=tol, atol=floor) or error <= allowed:
        return figures
    far = f"{path}: RMSE to the reference {error:.3g}, at most {allowed:.3g} allowed"
    return _failed(far, dataclasses.replace(figures, bound=allowed / size) if size else figures)


def _judge_by_eager(
    path: str, got: torch.Tensor, want: torch.Tensor, figures: Accuracy, tolerance: tuple[float, float]
) -> Accuracy:
    tol, floor = tolerance
    if torch.allclose(got, want, rtol=tol, atol=floor):
        return figures
    if (cosine := _cosine(got, want)) < LOWEST_COSINE:
        return _failed(f"{path}: cosine to eager {cosine:.4g}, at least {LOWEST_COSINE} wanted", figures)
    # A cosine alone would pass an output of twice its size.
    found, wanted = root_mean_square(got), root_mean_square(want)
    apart = abs(found - wanted) > LARGEST_GROWTH * wanted + floor
    return _failed(f"{path}: RMS {found:.3g}, eager's is {wanted:.3g}", figures) if apart else figures


def _own_floor(want: torch.Tensor, reference_rmse: float, tol: float) -> float:
    """Return the floor by a leaf's own size; none if it has few numbers or consists of rounding errors."""
    size = root_mean_square(want)
    meaningful = size > 0 and reference_rmse <= PRECISE * size and want.numel() >= MANY
    return tol * size if meaningful else math.inf


def _cosine(got: torch.Tensor, want: torch.Tensor) -> float:
    size = math.sqrt(float(got.square().sum()) * float(want.square().sum()))
    return float(got.dot(want)) / size if size else float(torch.equal(got, want))
