"""Statistics without trimming: medians, ratios with bootstrap intervals, and the noise that they must exceed.

`sure_ratio` and `holm` are for decisions about many rounds, whose noise is correlated: a bootstrap of single rounds
takes them as independent, and is then sure too often.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from backend_kwargs.interval import Interval

RESAMPLES = 2000
BOUT = 4  # rounds whose median counts as one value
# The number of cosines that estimate the variance of a mean, with the 97.5 % quantile of Student's t with as many
# degrees of freedom. Few of them look only at slow changes, so that correlated rounds do not count as independent.
QUANTILES = {8: 2.306, 6: 2.447, 4: 2.776, 2: 4.303}
LEAST_ROUNDS = 6 * BOUT


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
    reach = interval.reach
    return Interval(1.0, 1 / reach, reach)


def within_noise(interval: Interval, noise: Interval) -> bool:
    """Return whether a speedup's interval overlaps the noise floor, so that it is not significant."""
    return interval.low <= noise.high and noise.low <= interval.high


class SureRatio(NamedTuple):
    """A ratio of times with its 95 % interval, and the p-value of its being at most 1 + the margin."""

    ratio: Interval
    p: float


def sure_ratio(slow: Sequence[float], fast: Sequence[float], margin: float = 0.0) -> SureRatio:
    """Return how many times as long `slow` takes as `fast`, paired round by round, also where rounds are correlated.

    The logarithms of bouts of rounds are tested by Student's t, with their long-run variance from the lowest cosines
    (Lazarus, Lewis, Stock, Watson 2018). Fewer than LEAST_ROUNDS prove nothing.
    """
    pairs = [math.log(a / b) for a, b in zip(slow, fast, strict=True)]
    middle = percentile(pairs, 0.5) if pairs else 0.0
    if len(pairs) < LEAST_ROUNDS:
        return SureRatio(Interval(math.exp(middle), 0.0, math.inf), 1.0)
    bouts = torch.tensor(pairs[: len(pairs) // BOUT * BOUT], dtype=torch.float64).view(-1, BOUT)
    values = bouts.quantile(0.5, dim=1)
    count = len(values)
    degrees = next(each for each in QUANTILES if 3 * each <= count)
    frequencies = torch.arange(1, degrees + 1, dtype=torch.float64)[:, None]
    waves = (math.pi / count * frequencies * (torch.arange(count) + 0.5)).cos() @ values
    error = math.sqrt(2 * float(waves.square().mean())) / count
    mean = float(values.mean())
    reach = QUANTILES[degrees] * error
    excess = mean - math.log1p(margin)
    p = _tail(excess / error, degrees) if error else float(excess <= 0)
    return SureRatio(Interval(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach)), p)


def _tail(t: float, degrees: int) -> float:
    """Return the probability that Student's t exceeds `t`, for an even number of degrees of freedom."""
    angle = math.atan(t / math.sqrt(degrees))
    term, total = 1.0, 0.0
    for k in range(1, degrees // 2 + 1):
        total += term
        term *= (2 * k - 1) / (2 * k) * math.cos(angle) ** 2
    return (1 - math.sin(angle) * total) / 2


def holm(p_values: Sequence[float]) -> list[float]:
    """Return each p-value adjusted for their number by Holm's method: compare it with the level of all of them."""
    adjusted, largest = [1.0] * len(p_values), 0.0
    for rank, at in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[at]))
        adjusted[at] = largest
    return adjusted
