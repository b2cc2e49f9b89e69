"""Timing, statistics and memory; the status of a call; and the environment."""

import random
import statistics
import time
import weakref
from collections import Counter
from itertools import combinations, pairwise
from subprocess import CalledProcessError

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_kwargs import trial
from backend_kwargs.trial import Interval, interleave, order, ratio_interval, timing, within_noise
from backend_kwargs.trial.trees import copies, moved

CPU = torch.device("cpu")
seconds = st.lists(st.floats(1e-7, 1e3), min_size=1, max_size=40)


def noisy(count: int, scale: float, seed: int) -> list[float]:
    """Return samples with a long tail to the right, like wall times."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.empty(count, dtype=torch.float64).exponential_(generator=generator)
    return (scale * (1 + 0.03 * noise)).tolist()


# ---- statistics


@given(seconds)
@settings(max_examples=50, deadline=None)
def test_interval_holds_its_median(samples):
    """The median is in its interval, and the interval within the samples."""
    found = trial.median_interval(samples)
    rounding = 1 + 1e-12
    assert min(samples) <= found.low * rounding
    assert found.low <= found.median * rounding
    assert found.median <= found.high * rounding
    assert found.high <= max(samples) * rounding


@given(seconds, st.floats(0.01, 100))
@settings(max_examples=50, deadline=None)
def test_ratio_of_a_constant_factor_is_that_factor(samples, factor):
    """A constant factor of k gives a speedup of exactly 1/k, however the machine drifts."""
    found = ratio_interval(samples, [sample * factor for sample in samples])
    assert (found.low, found.median, found.high) == pytest.approx((1 / factor,) * 3)


@given(seconds)
@settings(max_examples=25, deadline=None)
def test_statistics_repeat(samples):
    """The bootstrap's seed is fixed, so equal samples give equal intervals."""
    assert trial.median_interval(samples) == trial.median_interval(samples)


@given(st.floats(0.1, 10), st.floats(0.1, 10))
@settings(deadline=None)
def test_noise_floor_is_symmetric_about_one(one, other):
    """The band is symmetric about 1 as a ratio, and always contains 1."""
    low, high = sorted((one, other))
    floor = trial.noise_floor(Interval((low + high) / 2, low, high))
    assert floor.low <= 1 <= floor.high
    assert floor.low * floor.high == pytest.approx(1)


def test_interval_is_the_bootstraps():
    """The interval is that of medians of resamples, also for an even number of samples."""
    samples, draw = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0], random.Random(0)
    medians = [statistics.median(draw.choices(samples, k=len(samples))) for _ in range(20_000)]
    found = trial.median_interval(samples)
    assert (found.low, found.high) == pytest.approx(
        (trial.percentile(medians, 0.025), trial.percentile(medians, 0.975))
    )


def test_statistics_leave_the_random_state():
    """The bootstrap uses its own generator."""
    before = torch.get_rng_state()
    trial.median_interval([1.0, 2.0, 3.0])
    assert torch.equal(before, torch.get_rng_state())


def test_nothing_is_trimmed():
    """An outlier counts in the percentiles."""
    assert trial.percentile([1.0, 1.0, 1.0, 1.0, 9.0], 1.0) == 9.0


def test_no_samples():
    """Statistics without samples raise, instead of returning NaN."""
    with pytest.raises(ValueError, match=r"^median_interval requires at least one sample, got none\.$"):
        trial.median_interval([])


@pytest.mark.parametrize("seed", range(8))
def test_same_against_same_is_within_noise(seed):
    """A third run of the baseline is within the noise floor that the second one set."""
    baseline, again, third = (noisy(30, 1e-3, 3 * seed + at) for at in range(3))
    floor = trial.noise_floor(ratio_interval(baseline, again))
    assert within_noise(ratio_interval(baseline, third), floor)


@pytest.mark.parametrize("factor", [pytest.param(1.05, id="5% slower"), pytest.param(0.95, id="5% faster")])
@pytest.mark.parametrize("seed", range(4))
def test_five_per_cent_is_seen(factor, seed):
    """5 % of injected work is distinguished from 3 % of noise."""
    baseline, again, changed = (noisy(60, s, 3 * seed + at) for at, s in enumerate((1.0, 1.0, factor)))
    floor = trial.noise_floor(ratio_interval(baseline, again))
    assert not within_noise(ratio_interval(baseline, changed), floor)


# ---- timing


class Clock:
    """A fake clock that advances only in calls, by a fixed time each."""

    def __init__(self):
        self.now, self.calls = 0.0, 0

    def perf_counter(self):
        return self.now

    def passes(self, seconds):
        self.now += seconds
        self.calls += 1


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def test_threefold_work_is_seen(clock):
    """Three times the work takes three times as long, with one call per sample or many."""
    calls = {"once": lambda: clock.passes(0.0004), "thrice": lambda: clock.passes(0.0012)}
    samples = interleave(calls, rounds=15, device=CPU, warmup=1)
    found = ratio_interval(samples["thrice"], samples["once"])
    assert (found.low, found.median, found.high) == pytest.approx((3, 3, 3))


@pytest.mark.parametrize("cost", [7e-8, 7e-6, 7e-4])
def test_short_calls_are_repeated_and_divided(clock, cost):
    """A sample of a short call lasts a few milliseconds, and is the time of one call."""
    race = timing.WallTimer({"short": lambda: clock.passes(cost)}, None, CPU, True)
    race.prepare("short", warmup=0)
    clock.now, clock.calls = 0.0, 0
    race.sample("short")
    assert 1e-3 <= clock.now - cost < 3e-3  # one call goes before the clock
    assert clock.calls == race.repeats["short"] + 1
    assert race.samples["short"] == pytest.approx([cost])


@pytest.mark.parametrize("cost", [7e-8, 7e-6, 7e-4])
def test_the_number_of_repeats_is_found_in_few_calls(clock, cost):
    """The number of calls per sample is found with four timings."""
    race = timing.WallTimer({"short": lambda: clock.passes(cost)}, None, CPU, True)
    timed, timings = race.timed, []
    race.timed = lambda name: timings.append(timed(name)) or timings[-1]
    race.prepare("short", warmup=0)
    assert len(timings) <= 4
    assert race.repeats["short"] * cost < 2 * timing.SHORTEST_SAMPLE_S


def test_a_call_that_takes_no_time_ends(clock):
    """A call below the clock's resolution is repeated at most a million times."""
    race = timing.WallTimer({"nothing": lambda: None}, None, CPU, True)
    race.run = lambda name, times: None
    race.prepare("nothing", warmup=0)
    assert race.repeats == {"nothing": 1_000_000}


def test_a_long_call_is_a_sample(clock):
    """A call of a millisecond or more is not repeated, and none precedes it."""
    samples = interleave({"long": lambda: clock.passes(0.002)}, rounds=4, device=CPU, warmup=3)
    assert samples["long"] == pytest.approx([0.002] * 4)
    assert clock.calls == 3 + 1 + 4  # warm-up, finding the repeats, rounds


@pytest.mark.parametrize(
    ("options", "alive"),
    [
        pytest.param({}, 1, id="default"),
        pytest.param({"hold": True}, 1, id="held"),
        pytest.param({"hold": False}, 0, id="dropped"),
    ],
)
@pytest.mark.parametrize("seconds", [pytest.param(1e-5, id="repeated"), pytest.param(2e-3, id="one-call")])
def test_a_result_is_held_until_the_next_call_returns(clock, options, alive, seconds):
    """Every timed call runs while the previous call's result is alive, unless results are dropped."""
    results, seen = weakref.WeakSet(), []

    def call():
        clock.passes(seconds)
        seen.append(len(results))
        made = torch.zeros(1)
        results.add(made)
        return made

    interleave({"loop": call, "other": lambda: clock.passes(1e-3)}, rounds=3, device=CPU, warmup=1, **options)
    assert set(seen[1:]) == {alive}


def test_device_seconds_on_a_cpu_are_the_least_of_three(clock):
    """After a warm-up call the shortest of three calls counts, without disturbances by other processes."""
    left = iter([0.1, 0.03, 0.01, 0.03])
    assert trial.device_seconds(lambda: clock.passes(next(left)), CPU) == pytest.approx(0.01)
    assert not [*left]


def test_time_is_wall_time():
    """On the real clock, a call that sleeps takes at least as long as it sleeps."""
    assert min(interleave({"sleep": lambda: time.sleep(0.002)}, rounds=3, device=CPU)["sleep"]) >= 0.002


@pytest.mark.parametrize("size", [2, 4, 5])
def test_everyone_follows_everyone(size):
    """Over all rotations, forward and reversed, each call follows each other one equally often."""
    names = [str(at) for at in range(size)]
    followed = [pair for done in range(2 * size) for pair in pairwise(order(names, done))]
    assert {followed.count((a, b)) for a in names for b in names if a != b} == {2}


@given(size=st.integers(1, 40), start=st.integers(0, 200))
def test_over_two_rounds_for_each_name_all_are_equal(size, start):
    """From any start, each name is in each place twice, and each pair is in both orders equally often."""
    rounds = [order(range(size), start + done) for done in range(2 * size)]
    assert all(sorted(names) == list(range(size)) for names in rounds)
    assert {count for place in zip(*rounds, strict=True) for count in Counter(place).values()} == {2}
    first = Counter(pair for names in rounds for pair in combinations(names, 2))
    assert set(first.values()) <= {size}


@given(size=st.integers(2, 40))
def test_thirty_rounds_are_nearly_equal(size):
    """In 30 rounds each pair is in each order fifteen times, and positions and neighbours vary."""
    rounds = [order(range(size), done) for done in range(30)]
    first = Counter(pair for names in rounds for pair in combinations(names, 2))
    assert set(first.values()) == {15}
    assert {sum(names.index(name) for names in rounds) / 30 for name in range(size)} == {(size - 1) / 2}
    followed = Counter(pair for names in rounds for pair in pairwise(names))
    assert max(followed.values()) <= 30 / (size - 1) + 2


def test_each_round_times_each_call():
    """Every round has one sample of every candidate, so that rounds can be paired."""
    calls = {"a": lambda: time.sleep(0.001), "b": lambda: time.sleep(0.001), "c": lambda: time.sleep(0.001)}
    samples = interleave(calls, rounds=5, device=CPU)
    assert {name: len(found) for name, found in samples.items()} == {"a": 5, "b": 5, "c": 5}


def test_budget_ends_the_rounds():
    """The budget stops between rounds, after the first at the earliest."""
    samples = interleave({"a": lambda: time.sleep(0.002)}, rounds=1000, device=CPU, warmup=0, budget_s=0.0)
    assert len(samples["a"]) == 1


def test_progress_is_told():
    """`progress` gets the fraction of rounds that are done."""
    heard = []
    interleave({"a": lambda: time.sleep(0.001)}, rounds=4, device=CPU, warmup=0, progress=heard.append)
    assert heard == [0.25, 0.5, 0.75, 1.0]


def failing_after(calls: int):
    def call():
        nonlocal calls
        calls -= 1
        time.sleep(0.001)
        if calls < 0:
            raise RuntimeError("too many blocks")

    return call


@pytest.mark.parametrize("calls", [pytest.param(1, id="warm-up"), pytest.param(6, id="timing")])
def test_a_failing_call_leaves_the_race(calls):
    """A candidate that raises is reported and dropped; the others are timed to the end."""
    recorded = []
    samples = interleave(
        {"bad": failing_after(calls), "good": lambda: time.sleep(0.001)},
        rounds=5,
        device=CPU,
        failed=lambda name, error: recorded.append((name, str(error))),
    )
    assert recorded == [("bad", "too many blocks")]
    assert {name: len(found) for name, found in samples.items()} == {"good": 5}


def test_a_failing_call_raises_where_nobody_listens():
    """Without `failed` the exception is raised to the caller."""
    with pytest.raises(RuntimeError, match=r"^too many blocks$"):
        interleave({"bad": failing_after(0)}, rounds=1, device=CPU)


# ---- memory


def test_peak_memory_sees_what_is_freed_again():
    """A temporary of 64 MB counts, although it is freed before the call ends."""
    found = trial.peak_memory(lambda: torch.ones(16_000_000).sum(), CPU)
    if found is None:
        pytest.skip("this system does not let a process reset its peak")
    assert 60e6 < found < 90e6


def test_peak_memory_forgets_earlier_peaks():
    """The peak of a small call after a large one is small."""
    trial.peak_memory(lambda: torch.ones(32_000_000).sum(), CPU)
    found = trial.peak_memory(lambda: torch.ones(1000).sum(), CPU)
    if found is None:
        pytest.skip("this system does not let a process reset its peak")
    assert found < 20e6


def test_peak_memory_sees_what_reuses_freed_memory():
    """Memory that the heap has kept after a free counts when a call uses it again."""
    blocks = [torch.ones(16_000) for _ in range(1000)]  # of 64 KB, which come from the heap
    last = blocks.pop()
    blocks.clear()
    found = trial.peak_memory(lambda: [torch.ones(16_000) for _ in range(1000)], CPU)
    if found is None:
        pytest.skip("this system does not let a process reset its peak")
    assert found > 50e6
    assert last.numel()


# ---- failures and places


def caused(outer: Exception, inner: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        pytest.param(ValueError("bad\nmore"), "fail_to_run", "ValueError: bad", id="first line"),
        pytest.param(KeyError(), "fail_to_run", "KeyError", id="no text"),
        pytest.param(caused(RuntimeError("x"), ValueError("y")), "fail_to_run", "ValueError: y", id="cause"),
        pytest.param(torch.OutOfMemoryError("no"), "oom", "OutOfMemoryError: no", id="device memory"),
        pytest.param(caused(RuntimeError("x"), MemoryError("no")), "oom", "MemoryError: no", id="memory"),
        pytest.param(
            RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"),
            "oom",
            "RuntimeError: DefaultCPUAllocator: can't allocate memory: 8 bytes",
            id="CPU allocator",
        ),
        pytest.param(
            ImportError("No module named 'tvm'"), "unavailable", "ImportError: No module named 'tvm'", id="import"
        ),
        pytest.param(
            caused(
                RuntimeError("x"), CalledProcessError(1, ["g++"], b"In file a.cpp:\na.cpp:3: error: no 'f'\n3 | f()\n")
            ),
            "fail_to_run",
            "a.cpp:3: error: no 'f'",
            id="compiler",
        ),
        pytest.param(
            CalledProcessError(1, ["ld"], "", "first\nlast"), "fail_to_run", "last", id="program without the word"
        ),
        pytest.param(
            CalledProcessError(2, ["ld"]),
            "fail_to_run",
            "CalledProcessError: Command '['ld']' returned non-zero exit status 2.",
            id="silent program",
        ),
        pytest.param(ValueError("x" * 500), "fail_to_run", "ValueError: " + "x" * 185 + "...", id="long"),
    ],
)
def test_status_of_an_exception(error, status, reason):
    """An exception becomes a status and a reason in one line."""
    assert trial.status_of(error) == (status, reason)


def test_environment_says_where():
    """The environment contains torch, Python, device, CPU and threads."""
    found = trial.environment(CPU)
    assert found["torch"] == torch.__version__
    assert found["device"] == "cpu"
    assert all(found[name] for name in ("python", "platform", "device_name", "cpu", "cpus", "threads"))


@pytest.mark.parametrize(
    ("cost", "repeats"),
    [
        pytest.param(1e-3, 1, id="a sample"),
        pytest.param(9e-4, 2, id="hardly shorter"),
        pytest.param(2e-5, 60, id="a fifth more than enough"),
        pytest.param(7e-6, 200, id="a hundredfold, then twice"),
        pytest.param(7e-8, 20_000, id="a hundredfold twice, then twice"),
    ],
)
def test_how_often_a_call_is_repeated(clock, cost, repeats):
    """Calls per sample grow until one lasts a millisecond: at least twofold, at most a hundredfold at once."""
    told = {}
    interleave({"call": lambda: clock.passes(cost)}, rounds=1, device=CPU, warmup=0, repeated=told.__setitem__)
    assert told == {"call": repeats}


@pytest.mark.parametrize(
    ("budget_s", "rounds"),
    [
        pytest.param(None, 10, id="none"),
        pytest.param(3.0, 4, id="after the round that exceeds it"),
        pytest.param(2.9, 3, id="a little less"),
        pytest.param(0.0, 1, id="not before the first"),
    ],
)
def test_when_a_budget_ends_the_rounds(clock, budget_s, rounds):
    """It counts from the first round; what is prepared before takes nothing of it."""
    samples = interleave({"second": lambda: clock.passes(1.0)}, rounds=10, device=CPU, warmup=5, budget_s=budget_s)
    assert samples == {"second": [1.0] * rounds}


def test_the_orders_of_four():
    """A zigzag, its reverse, and both with each call in the next place."""
    assert ["".join(trial.order("abcd", done)) for done in range(8)] == [
        *("adbc", "cbda", "bacd", "dcab"),
        *("cbda", "adbc", "dcab", "bacd"),
    ]


def test_calls_that_fail_in_a_round_end_alone(clock):
    """Samples are returned in the order in which the calls were given, without those that failed."""
    calls = {name: lambda: clock.passes(1.0) for name in "abc"} | {"b": failing_after(0)}
    told = []
    found = interleave(calls, rounds=2, device=CPU, failed=lambda name, error: told.append(name))
    assert (list(found), told) == (["a", "c"], ["b"])


def test_a_constant_is_scaled_by_a_half_to_one():
    """Its numbers keep their sign and size."""
    found = trial.fresh_inputs(torch.full((4000,), -2.0), 0)
    assert -2.0 <= found.min() < -1.99
    assert -1.01 < found.max() <= -1.0


@pytest.mark.parametrize(
    ("inputs", "changes"),
    [
        pytest.param([torch.arange(50.0), torch.arange(50)], (True, False), id="floats alone"),
        pytest.param([torch.zeros(50), torch.arange(50)], (False, True), id="integers beside zeros"),
        pytest.param([torch.arange(50), torch.arange(50) > 25], (True, False), id="masks stay"),
        pytest.param([torch.arange(50), torch.arange(50).to(torch.complex64)], (True, False), id="complex stays"),
        pytest.param([torch.zeros(0), torch.arange(50)], (False, True), id="nothing"),
        pytest.param([torch.arange(50.0), torch.eye(3).to_sparse()], (True, False), id="sparse stays"),
    ],
)
def test_which_inputs_are_changed(inputs, changes):
    """Floats where one can change, else integers; another seed gives other inputs, the same seed the same."""
    found = trial.fresh_inputs(inputs, 3)
    assert (
        tuple(not torch.equal(*(each.to_dense() for each in pair)) for pair in zip(found, inputs, strict=True))
        == changes
    )
    again, other = trial.fresh_inputs(inputs, 3), trial.fresh_inputs(inputs, 4)
    assert all(torch.equal(one.to_dense(), two.to_dense()) for one, two in zip(found, again, strict=True))
    assert not all(torch.equal(one.to_dense(), two.to_dense()) for one, two in zip(found, other, strict=True))


def test_upcast_leaves_what_has_no_precision():
    """Integers, masks and what is no tensor stay; gradients are asked for as before."""
    tree = {"a": torch.ones(2, requires_grad=True), "b": torch.arange(2), "c": 3}
    found = trial.upcast(tree, torch.float64)
    assert (found["a"].dtype, found["a"].requires_grad, found["a"].grad_fn) == (torch.float64, True, None)
    assert (found["b"].dtype, found["c"]) == (torch.int64, 3)
    assert found["b"] is not tree["b"]


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(torch.ones(1, 3).expand(4, 3), id="expanded"),
        pytest.param(torch.ones(4, 8)[:, :4], id="sliced"),
        pytest.param(torch.arange(6.0).as_strided((4, 3), (1, 1)), id="overlapping"),
        pytest.param(torch.ones(3).to_sparse(), id="sparse"),
    ],
)
def test_copies_keep_values_and_layouts(x):
    """Strides are kept, which clone() would change, and the memory is another one."""
    (copy,) = copies([x])
    assert torch.equal(copy.to_dense(), x.to_dense())
    assert copy.layout == x.layout
    assert x.is_sparse or copy.stride() == x.stride()


def test_copies_of_a_call():
    """A tensor that is given twice stays one; its gradient stays, and its memory does not."""
    tensor = torch.ones(4, 3).T.requires_grad_()
    args, kwargs = copies(((tensor, [tensor], torch.zeros(2)), {"x": tensor}))
    assert args[0] is args[1][0] is kwargs["x"] is not tensor
    assert (args[0].requires_grad, args[0].is_leaf, args[2].requires_grad) == (True, True, False)
    assert args[0].data_ptr() != tensor.data_ptr()
    assert not copies(tensor, plain=True).requires_grad


def test_copies_of_inference_tensors_are_such():
    """dynamo guards on it."""
    with torch.inference_mode():
        tensor = torch.ones(3)
    assert [each.is_inference() for each in copies([tensor, torch.ones(3)])] == [True, False]
    assert not copies(tensor, plain=True).is_inference()


def test_what_is_moved_keeps_its_gradient_and_what_need_not_move_stays():
    """Numbers are in another precision, integers are not; a tensor that is given twice stays one."""
    x, n = torch.ones(2, requires_grad=True), torch.arange(2)
    found = moved({"x": x, "again": [x], "n": n}, CPU, torch.float64)
    assert (found["x"].dtype, found["x"].requires_grad, found["x"].is_leaf) == (torch.float64, True, True)
    assert found["x"] is found["again"][0]
    assert found["n"] is n
    assert moved(x, CPU) is x


class Cache:
    def __init__(self, keys, length):
        self.keys, self.length = keys, length


def test_what_an_object_holds_is_moved_too():
    """A copy of the object has it, and the object stays as it was."""
    cache = Cache([torch.ones(2)], 3)
    found = moved(cache, torch.device("meta"))
    assert (found.keys[0].device.type, found.length, cache.keys[0].device.type) == ("meta", 3, "cpu")
