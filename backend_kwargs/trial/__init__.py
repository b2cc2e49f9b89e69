"""A trial: a callable is called as its user calls it, its results are checked, and it is timed beside others in turn.

Whoever runs a model uses these, and has none of its own, nor has the benchmark suite:

- `served`: a call from the state that the user's call had, what it changes, and the copy of one tensor's memory.
- `roundings.Expected`: what results are compared with, by `accuracy` (eager's error to a reference, and at other
  roundings), or by `bound` (the user's). `draws` repeats eager's random numbers in the reference.
- `timing.Calls`: calls in turn; `interleave` has wall time. `statistics` says what exceeds the noise.
- `trees`: walks by path. `inputs`: copies, of other values, elsewhere, in another precision; cotangents.

`kernels` and `memory` are those of a call, and `failures` gives an exception its status.
"""

from backend_kwargs.interval import Interval
from backend_kwargs.trial.accuracy import (
    Accuracy,
    Errors,
    LeafError,
    Status,
    check,
    check_all,
    reference,
    same_twice,
    worst,
)
from backend_kwargs.trial.bound import check_error, check_errors
from backend_kwargs.trial.environment import environment
from backend_kwargs.trial.failures import status_of
from backend_kwargs.trial.inputs import cotangents, fresh_inputs, upcast
from backend_kwargs.trial.kernels import AROUND, GENERATED, KernelTime, Times, kernel_times, operator_times
from backend_kwargs.trial.memory import peak_memory
from backend_kwargs.trial.others import others_on
from backend_kwargs.trial.roundings import Expected, Roundings, errors
from backend_kwargs.trial.served import Changes, CopyError, RestoringCall, State, same_bits
from backend_kwargs.trial.statistics import (
    SureRatio,
    holm,
    median_interval,
    noise_floor,
    percentile,
    ratio_interval,
    sure_ratio,
    within_noise,
)
from backend_kwargs.trial.timing import Calls, WallTimer, device_seconds, interleave, order, restoring, synchronize

__all__ = [
    "AROUND",
    "GENERATED",
    "Accuracy",
    "Calls",
    "Changes",
    "CopyError",
    "Errors",
    "Expected",
    "Interval",
    "KernelTime",
    "LeafError",
    "RestoringCall",
    "Roundings",
    "State",
    "Status",
    "SureRatio",
    "Times",
    "WallTimer",
    "check",
    "check_all",
    "check_error",
    "check_errors",
    "cotangents",
    "device_seconds",
    "environment",
    "errors",
    "fresh_inputs",
    "holm",
    "interleave",
    "kernel_times",
    "median_interval",
    "noise_floor",
    "operator_times",
    "order",
    "others_on",
    "peak_memory",
    "percentile",
    "ratio_interval",
    "reference",
    "restoring",
    "same_bits",
    "same_twice",
    "status_of",
    "sure_ratio",
    "synchronize",
    "upcast",
    "within_noise",
    "worst",
]
