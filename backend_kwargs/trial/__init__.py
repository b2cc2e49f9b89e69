"""A trial: a callable is called as its user calls it, its results are checked, and it is timed beside others in turn.

Whoever runs a model uses these, and has none of its own, nor has the benchmark suite:

- `served`: a call from the state that the user's call had, what it changes, and the copy of one tensor's memory.
- `roundings.Expected`: what results are compared with, by `accuracy` (eager's error to a reference, and at other
  roundings, or the user's bound). Eager's random numbers are repeated in the reference.
- `timing.Calls`: calls in turn; `interleave` has wall time, `kernel_times` the kernels of one. `statistics` says what
  exceeds the noise.
- `trees`: walks by path, and copies: of other values, elsewhere, in another precision; cotangents.

`memory` is that of a call, and `failures` gives an exception its status.
"""

from backend_kwargs.interval import Interval
from backend_kwargs.trial.accuracy import (
    Accuracy,
    Errors,
    LeafError,
    Status,
    check,
    check_all,
    check_error,
    check_errors,
    check_within,
    is_number,
    largest_of,
    reference,
    same_twice,
    worst,
)
from backend_kwargs.trial.failures import status_of
from backend_kwargs.trial.memory import fill_free_memory, peak_memory, room_for_copies
from backend_kwargs.trial.others import environment, others_on
from backend_kwargs.trial.roundings import DrawsError, Expected, Roundings, all_kept, errors, may_draw
from backend_kwargs.trial.served import (
    ChangedSlice,
    Changes,
    CopyError,
    RestoringCall,
    State,
    bits_of,
    copied,
    layout_of,
    memory_of,
    parts,
    same_bits,
    span_of,
)
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
from backend_kwargs.trial.timing import (
    AROUND,
    GENERATED,
    Calls,
    KernelTime,
    Times,
    WallTimer,
    device_seconds,
    interleave,
    kernel_times,
    operator_times,
    order,
    restoring,
    synchronize,
)
from backend_kwargs.trial.trees import (
    Results,
    copies,
    cotangents,
    fresh_inputs,
    map_tensors,
    moved,
    tensors_of,
    upcast,
    walk,
)

__all__ = [
    "AROUND",
    "GENERATED",
    "Accuracy",
    "Calls",
    "ChangedSlice",
    "Changes",
    "CopyError",
    "DrawsError",
    "Errors",
    "Expected",
    "Interval",
    "KernelTime",
    "LeafError",
    "RestoringCall",
    "Results",
    "Roundings",
    "State",
    "Status",
    "SureRatio",
    "Times",
    "WallTimer",
    "all_kept",
    "bits_of",
    "check",
    "check_all",
    "check_error",
    "check_errors",
    "check_within",
    "copied",
    "copies",
    "cotangents",
    "device_seconds",
    "environment",
    "errors",
    "fill_free_memory",
    "fresh_inputs",
    "holm",
    "interleave",
    "is_number",
    "kernel_times",
    "largest_of",
    "layout_of",
    "map_tensors",
    "may_draw",
    "median_interval",
    "memory_of",
    "moved",
    "noise_floor",
    "operator_times",
    "order",
    "others_on",
    "parts",
    "peak_memory",
    "percentile",
    "ratio_interval",
    "reference",
    "restoring",
    "room_for_copies",
    "same_bits",
    "same_twice",
    "span_of",
    "status_of",
    "sure_ratio",
    "synchronize",
    "tensors_of",
    "upcast",
    "walk",
    "within_noise",
    "worst",
]
