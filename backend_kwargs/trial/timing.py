"""Timing of callables: interleaved rounds in wall time, and the time that a device works; statistics of the times.

The statistics trim nothing: medians, ratios with bootstrap intervals, and the noise that they must exceed.
`sure_ratio` and `holm` are for decisions about many rounds, whose noise is correlated: a bootstrap of single rounds
takes them as independent, and is then sure too often.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.profiler import ProfilerActivity, profile

from backend_kwargs.interval import Interval
from backend_kwargs.torch_internals.tensors import OperatorMode, is_profiled, keep_device_busy, name_of
from backend_kwargs.trial.served import State
from backend_kwargs.trial.trees import tensors_of

SHORTEST_SAMPLE_S = 1e-3
MOST_REPEATS = 1_000_000
QUEUED_S = 5e-3
CYCLES_PER_S = 2e9  # no GPU has a faster clock; a slower one is kept busy longer
LEAST_SHARE = 0.01  # of a sample that remains after what puts the state back is subtracted


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    torch.get_device_module(device).synchronize()


def interleave(
    calls: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    device: torch.device,
    warmup: int = 3,
    budget_s: float | None = None,
    hold: bool = True,
    progress: Callable[[float], None] | None = None,
    failed: Callable[[str, Exception], None] | None = None,
    repeated: Callable[[str, int], None] | None = None,
) -> dict[str, list[float]]:
    """Time every call once per round and return its samples: seconds of wall time per call, one per round.

    Each order is run forward and then backward, and rotated, so that each call runs before and after each other one,
    and in each place, equally often. A sample repeats its call until it lasts about 1 ms, waits for the device, and is
    divided by the repeats; with repeats, one untimed call comes first, so that its caches are its own. Where a
    `RestoringCall` puts its state back first, the time of that alone is measured beside each sample and subtracted.
    `hold` keeps each call's result until its next call has returned, as `out = call()` in a loop does; otherwise
    results are dropped at once. `budget_s` ends the rounds early, but not before the first is complete. `progress`
    receives the fraction done, `repeated` the number of calls per sample. A call that raises is no longer timed, and
    its exception goes to `failed`; without `failed` it propagates.
    """
    race = WallTimer(dict(calls), failed, device, hold)
    return race.in_turn(rounds, warmup, budget_s, repeated, progress)


def order(names: Sequence[str], done: int) -> list[str]:
    """Return the order of a round; the next round reverses it.

    Over twice as many rounds as names, each name is in each place and follows each other one equally often.
    """
    # A plain rotation keeps each call's neighbours, and a call after a similar one runs some per cent faster. A zigzag
    # (Williams 1949) makes all pairs neighbours.
    size = len(names)
    zigzag = [size - 1 - at // 2 if at % 2 else at // 2 for at in range(size)]
    rotated = [names[(at + done // 2) % size] for at in zigzag]
    return rotated[::-1] if done % 2 else rotated


def restoring(call: Callable[[], object]) -> Callable[[], None] | None:
    """Return what puts back the state that `call` changes; None if it changes none."""
    state = getattr(call, "state", None)
    return state.restore if isinstance(state, State) and state else None


@dataclass
class Calls:
    """Calls that are timed in turn, by name; one that raises is removed, and its exception goes to `failed`, if given.

    Each timer has its own `prepare` and `round`.
    """

    calls: dict[str, Callable[[], object]]
    failed: Callable[[str, Exception], None] | None
    device: torch.device

    def __post_init__(self) -> None:
        self.repeats = dict.fromkeys(self.calls, 1)
        self.samples: dict[str, list[float]] = {name: [] for name in self.calls}

    def prepare(self, name: str, warmup: int) -> None:
        """Warm a call up, and find its repeats."""

    def round(self, names: Sequence[str]) -> None:
        """Add a sample of each call, in this order."""

    def in_turn(
        self,
        rounds: int,
        warmup: int,
        budget_s: float | None,
        repeated: Callable[[str, int], None] | None,
        progress: Callable[[float], None] | None = None,
    ) -> dict[str, list[float]]:
        """Return the samples of the calls that did not raise; the arguments are those of `interleave`."""
        for name in [*self.calls]:
            self.guard(name, partial(self.prepare, name, warmup))
        if repeated:
            for name in self.calls:
                repeated(name, self.repeats[name])
        started = time.perf_counter()
        for done in range(rounds):
            self.round(order([*self.calls], done))
            if progress:
                progress((done + 1) / rounds)
            if budget_s is not None and time.perf_counter() - started > budget_s:
                break
        return {name: samples for name, samples in self.samples.items() if name in self.calls}

    def guard(self, name: str, step: Callable[[], None]) -> None:
        """Run `step` for the call, and handle its exception."""
        try:
            step()
        except Exception as error:
            if self.failed is None:
                raise
            del self.calls[name]
            self.failed(name, error)

    def add(self, name: str, seconds: float, restored: float) -> None:
        """Add a sample, without the seconds in which the call's state was put back."""
        self.samples[name].append(max(seconds - restored, LEAST_SHARE * seconds) / self.repeats[name])


@dataclass
class WallTimer(Calls):
    """Calls in a loop, which holds each result until the next one is there; a sample lasts `shortest_s` or more."""

    hold: bool = True
    shortest_s: float = SHORTEST_SAMPLE_S

    def __post_init__(self) -> None:
        super().__post_init__()
        self.held: dict[str, object] = {}

    def round(self, names: Sequence[str]) -> None:
        """Take a sample of each call."""
        for name in names:
            self.guard(name, partial(self.sample, name))

    def prepare(self, name: str, warmup: int) -> None:
        """Warm a call up, and find its repeats by trying."""
        self.run(name, warmup)
        while (seconds := self.timed(name)) < self.shortest_s and self.repeats[name] < MOST_REPEATS:
            grown = self.shortest_s / max(seconds, 1e-9)
            self.repeats[name] = min(int(self.repeats[name] * min(max(grown * 1.2, 2), 100)), MOST_REPEATS)

    def run(self, name: str, times: int) -> None:
        """Make some calls."""
        call, out = self.calls[name], self.held.pop(name, None)
        for _ in range(times):
            if not self.hold:
                out = None
            out = call()
        if self.hold:
            self.held[name] = out

    def timed(self, name: str) -> float:
        """Return the seconds of as many calls as a sample has."""
        return self.seconds(partial(self.run, name, self.repeats[name]))

    def seconds(self, what: Callable[[], object]) -> float:
        """Return the seconds until the device has done it."""
        synchronize(self.device)
        started = time.perf_counter()
        what()
        synchronize(self.device)
        return time.perf_counter() - started

    def sample(self, name: str) -> None:
        """Add a sample; with repeats, one untimed call comes first."""
        if self.repeats[name] > 1:
            self.run(name, 1)
        seconds, restore = self.timed(name), restoring(self.calls[name])
        self.add(
            name, seconds, self.seconds(lambda: [restore() for _ in range(self.repeats[name])]) if restore else 0.0
        )


def device_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that the device works for one call, without the gaps between its kernels.

    The device is kept busy until all launches are queued. A CPU runs kernels as they are called: there it is the least
    wall time of three calls. What puts a call's state back is subtracted. Meant for decisions, not for reports: few
    calls, on a warm L2.
    """
    seconds, restore = _device_seconds(call, device), restoring(call)
    return max(seconds - _device_seconds(restore, device), LEAST_SHARE * seconds) if restore else seconds


def _device_seconds(call: Callable[[], object], device: torch.device) -> float:
    call()
    synchronize(device)
    if device.type != "cuda":
        return min(host_seconds(call) for _ in range(3))
    host_s = host_seconds(call)  # time of the launches, without waiting for the device
    synchronize(device)
    calls = min(max(int(QUEUED_S / max(host_s, 1e-7)), 1), 20)
    for covered_s in (1.5 * calls * host_s, 6 * calls * host_s):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        keep_device_busy(int(covered_s * CYCLES_PER_S))
        start.record()
        for _ in range(calls):
            call()
        exposed = start.query()  # type: ignore[no-untyped-call]
        end.record()
        synchronize(device)
        if not exposed:
            break
    return float(start.elapsed_time(end)) / 1e3 / calls


def host_seconds(call: Callable[[], object]) -> float:
    """Return the wall time of one call, without waiting for the device."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


# ---- kernels of one call

CALLS = 3  # profiled; the fastest counts
LEAST = 0.002  # of the call's time; a shorter kernel is left out
GENERATED = "generated code"  # on a CPU, where Inductor's kernels are not told apart
CALL_OF_A_GRAPH = "## Call CompiledFxGraph"  # as Inductor calls it
AROUND = "around the graph"  # guards, and what torch does before and after a compiled graph
CALLED_AROUND = ("TorchDynamo ", "Torch-Compiled Region", "Pregraph bytecode", "AOTDispatcher ")
ADDED = {"aten::addmm": "aten::mm", "aten::baddbmm": "aten::bmm"}  # which Inductor may take apart, to fuse the addition
COVER = 2  # times as long as the launches take a GPU is kept busy

Times: TypeAlias = dict[str, tuple[int, float]]  # how often each is called in one call, and its seconds in all


@dataclass(frozen=True, slots=True)
class KernelTime:
    """The launches of a kernel in one call, and their seconds."""

    name: str
    calls: int
    seconds: float


def kernel_times(call: Callable[[], object], device: torch.device, least: float = LEAST) -> tuple[KernelTime, ...]:
    """Return the kernels of one call, longest first, of at least this share of it; the call has been made before."""
    profiles = [_profiled(call, device) for _ in range(CALLS)]
    fastest = min(profiles, key=lambda each: sum(seconds for _, seconds in each.values()))
    total = sum(seconds for _, seconds in fastest.values())
    kernels = (KernelTime(name, count, seconds) for name, (count, seconds) in fastest.items())
    return tuple(sorted((k for k in kernels if k.seconds >= least * total), key=lambda kernel: -kernel.seconds))


def operator_times(call: Callable[[], object], device: torch.device, wanted: Callable[[Any], bool]) -> Times:
    """Return the times in one call of the operators that are `wanted`, by name with the layouts of what each reads.

    On a GPU it is kept busy until all is launched, and its L2 cache is overwritten first: a call by itself finds there
    what one within a model does. Not by a profiler: CUPTI stays attached afterwards, or fails beside CUDA graphs. The
    call has been made before.
    """
    noted: list[tuple[str, Any, Any]] = []

    def called(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
        if not wanted(func):
            return func(*args, **kwargs)
        name = name_of(func)
        layouts = map(_layout_of, tensors_of(args[name in ADDED :]))
        start = _time_of(device)
        result = func(*args, **kwargs)
        noted.append((f"{ADDED.get(name, name)} of {', '.join(layouts)}", start, _time_of(device)))
        return result

    def watched() -> None:
        with OperatorMode(called):
            call()

    if device.type == "cuda":
        host_s = host_seconds(watched)
        torch.zeros(2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.uint8, device=device)
        keep_device_busy(int(COVER * host_s * CYCLES_PER_S))
        noted.clear()
    watched()
    synchronize(device)
    found: Times = {}
    for name, start, end in noted:
        _add(found, name, start.elapsed_time(end) / 1e3 if device.type == "cuda" else end - start)
    return found


def _layout_of(tensor: torch.Tensor) -> str:
    """Return the sizes, and the strides of those above 1: the others reach no other number, and are as it comes."""
    strides = (stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    return f"{tuple(tensor.shape)} {tuple(strides)}"


def _time_of(device: torch.device) -> Any:
    """Return the time as a device comes to it: on a GPU an event, which is read later."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _profiled(call: Callable[[], object], device: torch.device) -> Times:
    on_gpu = device.type == "cuda"
    found: Times = {}
    if is_profiled():  # a second profiler would end the first one, whose events would be lost
        raise RuntimeError("another profiler is running")
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU], acc_events=True) as seen:
        call()
        synchronize(device)
    for event in seen.events() or ():
        if (event.device_type.name == "CUDA") == on_gpu:
            around = AROUND if event.name.startswith(CALLED_AROUND) else event.name
            name = GENERATED if event.name.startswith(CALL_OF_A_GRAPH) else around
            _add(found, name, (event.device_time if on_gpu else event.self_cpu_time_total) / 1e6)
    return found


def _add(found: Times, name: str, more_s: float) -> None:
    count, seconds = found.get(name, (0, 0.0))
    found[name] = count + 1, seconds + more_s


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
