"""Statistics without trimming: medians, ratios with bootstrap intervals, and the noise that they must exceed."""

from collections.abc import Sequence
from functools import cache

import torch

from backend_kwargs.interval import Interval

RESAMPLES = 2000


def percentile(samples: Sequence[float], q: float) -> float:
    """Return the `q` quantile (0 to 1) of the samples, interpolated."""
    return float(torch.tensor(samples, dtype=torch.float64).quantile(q))


def median_interval(samples: Sequence[float]) -> Interval:
    """Return the median and its bootstrap 95 % interval; no sample is trimmed and the seed is fixed.

    Raises ValueError if there are no samples.
    """
    if not samples:
        raise ValueError("median_interval requires at least one sample, got none.")
    values = torch.tensor(samples, dtype=torch.float64).sort().values
    lower, upper = _median_ranks(len(samples))
    medians = (values[lower] + values[upper]) / 2
    low, high = medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(percentile(samples, 0.5), low, high)


@cache
def _median_ranks(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two ranks between which the median of each resample of `count` samples lies."""
    picks = torch.randint(count, (RESAMPLES, count), generator=torch.Generator().manual_seed(0)).sort(dim=1).values
    return picks[:, (count - 1) // 2], picks[:, count // 2]


def ratio_interval(baseline: Sequence[float], candidate: Sequence[float]) -> Interval:
    """Return the candidate's speedup, `baseline / candidate` paired round by round: above 1 is faster.

    Rounds are paired because the machine's clock drifts between them. Raises ValueError if the lengths differ.
    """
    return median_interval([b / c for b, c in zip(baseline, candidate, strict=True)])


def noise_floor(interval: Interval) -> Interval:
    """Return the interval of an A/A ratio, made symmetric: a baseline 3 % fast could as well have been 3 % slow."""
    reach = max(interval.high, 1 / interval.low, 1.0)
    return Interval(1.0, 1 / reach, reach)


def within_noise(interval: Interval, noise: Interval) -> bool:
    """Return whether a speedup's interval overlaps the noise floor, so that it is not significant."""
    return interval.low <= noise.high and noise.low <= interval.high
