"""Timing, comparison of results and memory, for this package and for the benchmark suite."""

from backend_kwargs.interval import Interval
from backend_kwargs.measure.accuracy import Accuracy, Errors, Status, check, check_all, reference, same_twice, worst
from backend_kwargs.measure.bound import check_error
from backend_kwargs.measure.environment import environment
from backend_kwargs.measure.failures import status_of
from backend_kwargs.measure.inputs import cotangents, fresh_inputs, upcast
from backend_kwargs.measure.memory import peak_memory
from backend_kwargs.measure.roundings import Roundings
from backend_kwargs.measure.statistics import median_interval, noise_floor, percentile, ratio_interval, within_noise
from backend_kwargs.measure.timing import Calls, device_seconds, interleave, order, synchronize

__all__ = [
    "Accuracy",
    "Calls",
    "Errors",
    "Interval",
    "Roundings",
    "Status",
    "check",
    "check_all",
    "check_error",
    "cotangents",
    "device_seconds",
    "environment",
    "fresh_inputs",
    "interleave",
    "median_interval",
    "noise_floor",
    "order",
    "peak_memory",
    "percentile",
    "ratio_interval",
    "reference",
    "same_twice",
    "status_of",
    "synchronize",
    "upcast",
    "within_noise",
    "worst",
]
