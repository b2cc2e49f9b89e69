"""Device times: one cold sample per call and round, covered launches."""

import time

import pytest
import torch

from benchmarks.execution import device_timer
from benchmarks.execution.device_timer import device_times

CPU = torch.device("cpu")


class Clock:
    """A fake clock that advances only in calls, by a fixed time each."""

    def __init__(self):
        self.now, self.events = 0.0, []

    def perf_counter(self):
        return self.now

    def call(self, name, seconds):
        def passes(*_):
            self.events.append(name)
            self.now += seconds

        return passes


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(device_timer, "time", clock)
    monkeypatch.setattr(device_timer.Scratch, "flush", clock.call("flush", 5.0))
    return clock


def test_a_sample_is_the_time_of_the_call_alone(clock):
    """The L2 flush is not timed, and each call has one sample per round."""
    calls = {"a": clock.call("a", 0.25), "b": clock.call("b", 0.5)}
    assert device_times(calls, 4, CPU) == {"a": [0.25] * 4, "b": [0.5] * 4}


def test_each_cold_sample_is_one_call_behind_a_flush(clock):
    """Each call of a round follows a flush, so it does not find the caches of an earlier call."""
    device_times({"a": clock.call("a", 0.25), "b": clock.call("b", 0.5)}, 2, CPU, warmup=0)
    rounds = clock.events[4:]  # finding out how long to cover took a sample of each
    assert [event == "flush" for event in rounds] == [True, False] * 4


def test_cold_samples_are_one_call_however_short(clock):
    """With a cold L2 even a call of 0.1 ms is not repeated, since the second one would be warm."""
    repeats = {}
    device_times({"a": clock.call("a", 1e-4)}, 1, CPU, "cold", warmup=0, repeated=repeats.__setitem__)
    assert repeats == {"a": 1}


def test_warm_samples_repeat_after_an_uncounted_call(clock):
    """With a warm L2 a call of 0.1 ms is repeated ten times after an untimed one, and the sample is per call."""
    recorded = {}
    found = device_times({"a": clock.call("a", 1e-4)}, 1, CPU, "warm", warmup=0, repeated=recorded.__setitem__)
    assert found["a"] == pytest.approx([1e-4])
    assert recorded == {"a": pytest.approx(10, abs=1)}
    assert clock.events.count("a") == pytest.approx(2 + 1 + 10, abs=1)


def test_warm_up_calls_come_first(clock):
    """Three untimed calls come first, to warm up, record and replay."""
    device_times({"a": clock.call("a", 0.1)}, 1, CPU)
    assert clock.events[:4] == ["a", "a", "a", "flush"]


def test_nothing_is_trimmed(clock):
    """A sample a thousand times as long as the others is kept."""
    durations = iter([0.1] * 4 + [100.0] + [0.1] * 9)

    def call():
        clock.now += next(durations)

    assert device_times({"a": call}, 10, CPU)["a"] == pytest.approx([100.0] + [0.1] * 9)


def test_launches_that_show_are_covered_for_longer(clock, monkeypatch):
    """If the device starts before everything is launched, the cover before the sample is extended."""
    shows = iter([True, True, False])

    class Event(device_timer._Instant):
        def query(self):
            return next(shows)

    monkeypatch.setattr(device_timer._Bench, "event", lambda self: Event())
    recorded = []
    device_times({"a": clock.call("a", 0.1)}, 1, CPU, warmup=0, exposed=recorded.append)
    assert not recorded
    assert clock.events == ["flush"] * 1 + ["a"] + ["flush"] * 2 + ["a"] + ["flush"] * 4 + ["a"] + ["flush"] * 4 + ["a"]


def test_covering_ends(clock, monkeypatch):
    """A call that waits for the device cannot be covered: it is timed without cover, and marked."""
    recorded = []
    monkeypatch.setattr(device_timer._Instant, "query", lambda self: True)
    device_times({"a": clock.call("a", 0.1)}, 1, CPU, warmup=0, exposed=recorded.append)
    assert recorded == ["a"]
    assert clock.events.count("flush") == sum(2**n for n in range(8)) + device_timer.MOST_COVERS


def test_a_failing_call_leaves_the_race(clock):
    """A call that raises while it is timed is reported and dropped; the others are timed to the end."""
    left, values = iter(range(5)), []

    def bad():
        if next(left, None) is None:
            raise RuntimeError("too many blocks")

    calls = {"bad": bad, "good": clock.call("good", 0.1)}
    found = device_times(calls, 6, CPU, failed=lambda name, error: values.append((name, str(error))))
    assert values == [("bad", "too many blocks")]
    assert found == {"good": pytest.approx([0.1] * 6)}


def test_a_cpu_sleeps_as_long_as_it_slept():
    """On the real clock, a call that sleeps takes at least as long as it sleeps."""
    assert min(device_times({"sleep": lambda: time.sleep(0.002)}, 3, CPU)["sleep"]) >= 0.002


def test_the_scratch_is_larger_than_the_l2():
    """The flush buffer is larger than the L2."""
    scratch = device_timer.Scratch(CPU)
    assert scratch.buffer.nbytes == 4 * device_timer.l2_bytes(CPU)
    scratch.buffer.fill_(1.0)
    scratch.flush()
    assert not scratch.buffer.any()
