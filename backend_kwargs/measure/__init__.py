"""The one way this package times, compares numbers and counts memory; the benchmark suite uses it too.

The numbers live in `accuracy.py` and are named here; timing, statistics and memory follow.
"""

import ctypes
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from backend_kwargs.interval import Interval
from backend_kwargs.measure.accuracy import Accuracy, Status, check, cotangents, fresh_inputs, reference, upcast, worst

__all__ = [
    "Accuracy",
    "Calls",
    "Interval",
    "Status",
    "check",
    "cotangents",
    "device_seconds",
    "environment",
    "fresh_inputs",
    "interleave",
    "median_interval",
    "noise_floor",
    "peak_memory",
    "percentile",
    "ratio_interval",
    "reference",
    "status_of",
    "synchronize",
    "upcast",
    "within_noise",
    "worst",
]

SHORTEST_SAMPLE_S = 1e-3
QUEUED_S = 5e-3
RESAMPLES = 2000
LONGEST_REASON = 200


# ---- statistics


def percentile(samples: Sequence[float], q: float) -> float:
    """Return the `q` quantile (0 to 1) of the samples, interpolated."""
    return float(torch.tensor(samples, dtype=torch.float64).quantile(q))


def median_interval(samples: Sequence[float]) -> Interval:
    """Return the median and its bootstrap 95 % interval; no sample is trimmed and the seed is fixed.

    Raises ValueError where there are no samples.
    """
    if not samples:
        raise ValueError("median_interval wants at least one sample, got none.")
    values = torch.tensor(samples, dtype=torch.float64).sort().values
    lower, upper = _median_ranks(len(samples))
    medians = (values[lower] + values[upper]) / 2
    low, high = medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(percentile(samples, 0.5), low, high)


@cache
def _median_ranks(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return between which two ranks the median of each resample of `count` samples lies."""
    picks = torch.randint(count, (RESAMPLES, count), generator=torch.Generator().manual_seed(0)).sort(dim=1).values
    return picks[:, (count - 1) // 2], picks[:, count // 2]


def ratio_interval(baseline: Sequence[float], candidate: Sequence[float]) -> Interval:
    """Return the candidate's speedup, `baseline / candidate` paired round by round: above 1 is faster.

    Rounds are paired because the clock of the machine drifts between them. Raises ValueError where the lengths differ.
    """
    return median_interval([b / c for b, c in zip(baseline, candidate, strict=True)])


def noise_floor(interval: Interval) -> Interval:
    """Return the band that an A/A ratio spans, made symmetric: a baseline 3 % fast could as well have been 3 % slow."""
    reach = max(interval.high, 1 / interval.low, 1.0)
    return Interval(1.0, 1 / reach, reach)


def within_noise(interval: Interval, noise: Interval) -> bool:
    """Say whether a speedup's interval meets the noise floor, so that it shows nothing."""
    return interval.low <= noise.high and noise.low <= interval.high


# ---- timing


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type != "cpu":
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

    Each order is run forward and then backward, and rotated, so that each call comes before and after each other one,
    and in each place, equally often. A sample repeats its call until it lasts about 1 ms, waits for the device, and is
    divided by the repeats; where it repeats, one call goes before the clock, to be its own predecessor in the caches.
    `hold` keeps each call's result until its next call has returned, as `out = call()` in a loop does; otherwise
    results are dropped at once. `budget_s` ends the rounds early, never before the first is whole. `progress` receives
    the fraction done, `repeated` the number of calls per sample. A call that raises is no longer timed and its
    exception goes to `failed`; without `failed` it propagates.
    """
    race = _Race(dict(calls), failed, device, hold)
    for name in calls:
        race.guard(name, partial(race.prepare, name, warmup))
    if repeated:
        for name in race.calls:
            repeated(name, race.repeats[name])
    started = time.perf_counter()
    for done in range(rounds):
        for name in order(list(race.calls), done):
            race.guard(name, partial(race.sample, name))
        if progress:
            progress((done + 1) / rounds)
        if budget_s is not None and time.perf_counter() - started > budget_s:
            break
    return {name: race.samples[name] for name in calls if name in race.calls}


def order(names: Sequence[str], done: int) -> list[str]:
    """Return the order of a round, which the next one reverses.

    Over twice as many rounds as names, each name is in each place and follows each other one equally often.
    """
    # A plain rotation keeps everybody's neighbours, and who follows its like runs some per cent faster: zigzag
    # (Williams 1949) meets all neighbours.
    size = len(names)
    zigzag = [size - 1 - at // 2 if at % 2 else at // 2 for at in range(size)]
    rotated = [names[(at + done // 2) % size] for at in zigzag]
    return rotated[::-1] if done % 2 else rotated


@dataclass
class Calls:
    """Calls that are timed by name; one that raises leaves, and its exception goes to `failed`, if there is one."""

    calls: dict[str, Callable[[], object]]
    failed: Callable[[str, Exception], None] | None

    def guard(self, name: str, step: Callable[[], None]) -> None:
        """Do `step`, on behalf of the call."""
        try:
            step()
        except Exception as error:
            if self.failed is None:
                raise
            del self.calls[name]
            self.failed(name, error)


@dataclass
class _Race(Calls):
    device: torch.device
    hold: bool

    def __post_init__(self) -> None:
        self.held: dict[str, object] = {}
        self.repeats = dict.fromkeys(self.calls, 1)
        self.samples: dict[str, list[float]] = {name: [] for name in self.calls}

    def prepare(self, name: str, warmup: int) -> None:
        self.run(name, warmup)
        while (seconds := self.timed(name)) < SHORTEST_SAMPLE_S and self.repeats[name] < 1_000_000:
            grown = SHORTEST_SAMPLE_S / max(seconds, 1e-9)
            self.repeats[name] = min(int(self.repeats[name] * min(max(grown * 1.2, 2), 100)), 1_000_000)

    def run(self, name: str, times: int) -> None:
        call, out = self.calls[name], self.held.pop(name, None)
        for _ in range(times):
            if not self.hold:
                out = None
            out = call()
        if self.hold:
            self.held[name] = out

    def timed(self, name: str) -> float:
        synchronize(self.device)
        started = time.perf_counter()
        self.run(name, self.repeats[name])
        synchronize(self.device)
        return time.perf_counter() - started

    def sample(self, name: str) -> None:
        if self.repeats[name] > 1:
            self.run(name, 1)
        self.samples[name].append(self.timed(name) / self.repeats[name])


def device_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that the device works for one call: time between its kernels, while it waits, is left out.

    The device is kept busy until all launches are queued. On a CPU, which runs what it launches, the least of three
    calls by the clock. For a decision, not for a report: few calls, on a warm L2.
    """
    call()
    synchronize(device)
    if device.type != "cuda":
        return min(_host_seconds(call) for _ in range(3))
    host_s = _host_seconds(call)  # of the launches: nothing is waited for
    synchronize(device)
    calls = min(max(int(QUEUED_S / max(host_s, 1e-7)), 1), 20)
    cycles_per_s = 2e9  # no GPU has a faster clock; a slower one is kept busy for longer
    for covered_s in (1.5 * calls * host_s, 6 * calls * host_s):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(int(covered_s * cycles_per_s))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(calls):
            call()
        exposed = start.query()  # type: ignore[no-untyped-call]
        end.record()
        synchronize(device)
        if not exposed:
            break
    return float(start.elapsed_time(end)) / 1e3 / calls


def _host_seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


# ---- memory


def peak_memory(call: Callable[[], object], device: torch.device, held: int | None = None) -> int | None:
    """Return the bytes that the process held at most while `call` ran, above what it held before, or None.

    On CUDA the allocator's own count (`held` moves its start, say to before a compile, so that the pools of CUDA
    graphs count); on Linux's CPUs the growth of the resident set, after the heap's free pages went back: it sees every
    allocator, in pages, and is not disturbed by what ran earlier in this process, as a process-wide maximum would be.
    Elsewhere None. Both reset a peak counter of this process.
    """
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) if held is None else held
        call()
        synchronize(device)
        return max(torch.cuda.max_memory_allocated(device) - before, 0)
    return _peak_resident(call)


def _peak_resident(call: Callable[[], object]) -> int | None:
    try:
        ctypes.CDLL(None).malloc_trim(0)
        # 5 resets VmHWM to the present size: proc_pid_clear_refs(5).
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident("VmRSS")
    except (OSError, AttributeError, TypeError, KeyError):
        call()
        return None
    call()
    return max(_resident("VmHWM") - before, 0)


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)[field].split()[0]) * 1024


# ---- failures


def status_of(error: BaseException) -> tuple[Status, str]:
    """Return the status word of an exception and its reason in one line, looking through torch's own wrapping."""
    chain = [error]
    while (inner := getattr(chain[-1], "inner_exception", None) or chain[-1].__cause__) and inner not in chain:
        chain.append(inner)
    reason = _reason(chain[-1])
    return _status(chain), reason if len(reason) <= LONGEST_REASON else reason[: LONGEST_REASON - 3] + "..."


def _reason(error: BaseException) -> str:
    if isinstance(error, subprocess.CalledProcessError) and (said := _said(error)):
        return said
    line = next((part.strip() for part in str(error).splitlines() if part.strip()), "")
    return f"{type(error).__name__}: {line}".rstrip(": ")


def _said(error: subprocess.CalledProcessError) -> str:
    """Return what a program, a compiler say, gave as its error: its first line that names one, else its last."""
    output = error.stderr or error.output or ""
    text = output.decode(errors="replace") if isinstance(output, bytes) else output
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "")


def _status(chain: list[BaseException]) -> Status:
    if any(isinstance(e, MemoryError | torch.OutOfMemoryError) or _no_memory(e) for e in chain):
        return "oom"
    missing = any(isinstance(e, ImportError) or type(e).__name__ == "InvalidBackend" for e in chain)
    return "unavailable" if missing else "fail_to_run"


def _no_memory(error: BaseException) -> bool:
    # The CPU's allocator raises a plain RuntimeError.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


# ---- where it was measured


def environment(device: torch.device) -> dict[str, str | int | None]:
    """Return what a reader needs to place a figure: torch, python, device, CPU, threads, triton, CUDA."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named: dict[str, Any] = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return str(named.get("model name") or platform.processor() or platform.machine())
