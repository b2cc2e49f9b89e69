"""Ceilings: what is measured, in which unit, and their JSON."""

import dataclasses
import json

import pytest
import torch

from benchmarks.execution import ceilings
from benchmarks.execution.ceilings import Ceilings, Sizes, measure_ceilings

CPU = torch.device("cpu")
SMALL = Sizes((2**16,), {"fp32": (16, 32), "bf16": (16,)})


@pytest.fixture(scope="module")
def measured():
    return measure_ceilings(CPU, rounds=3, sizes=SMALL)


def test_a_cpu_has_its_ceilings(measured):
    """A CPU has bandwidths, matmuls and the launch of an empty operation, each in its unit."""
    units = {name: figure.unit for name, figure in measured.figures.items()}
    rates = {"fp32": "FLOP/s", "bf16": "FLOP/s"}
    assert units == {"copy": "B/s", "read": "B/s", "write": "B/s", **rates, "launch": "s"}
    assert measured.l2_bytes > 0


def test_figures_hold_their_intervals(measured):
    """Each ceiling is within its interval and names its attempt."""
    for figure in measured.figures.values():
        assert 0 < figure.low <= figure.value <= figure.high
        assert figure.attempt


def test_written_and_read(measured):
    """Ceilings are read back from JSON unchanged."""
    assert Ceilings.from_json(json.loads(json.dumps(measured.to_json()))) == measured


@pytest.mark.parametrize(
    ("name", "amount"),
    [
        pytest.param("copy copy_ of 1 MiB", 2 * 2**20, id="copy: read and written"),
        pytest.param("read sum of 1 MiB", 2**20, id="read"),
        pytest.param("write fill_ of 1 MiB", 2**20, id="write"),
        pytest.param("fp32 16³ NN", 2 * 16**3, id="matmul"),
    ],
)
def test_a_rate_is_amount_over_time(name, amount):
    """An attempt that takes a tenth of a second has a rate of ten times its amount."""
    attempts = [*ceilings._bandwidths(2**20, CPU), *ceilings._matmuls("fp32", 16, CPU)]
    attempt = next(each for each in attempts if f"{each.figure} {each.how}" == name)
    figure = ceilings._figure(attempt, [0.1])
    assert (figure.value, figure.low, figure.high) == pytest.approx((10 * amount,) * 3)


def test_arithmetic_takes_the_fastest_sample():
    """A bandwidth is the median of its samples; a matmul's ceiling is the fastest one, before the clock drops."""
    bandwidth = ceilings._Attempt("read", "x", lambda: None, 100.0, "B/s")
    matmul = ceilings._Attempt("fp32", "x", lambda: None, 100.0, "FLOP/s")
    assert [ceilings._figure(each, [1.0, 2.0, 4.0]).value for each in (bandwidth, matmul)] == [50.0, 100.0]


def test_the_best_of_several_devices_stands(measured):
    """Over several runs on one kind of device, each ceiling is the best."""
    faster = dataclasses.replace(
        measured, figures={n: dataclasses.replace(f, value=f.value * 2) for n, f in measured.figures.items()}
    )
    best = Ceilings.best([measured, faster])
    for name, figure in best.figures.items():
        assert figure == (measured if figure.unit == "s" else faster).figures[name]


@pytest.mark.parametrize("unit", ["B/s", "s"])
def test_the_best_attempt_stands(monkeypatch, unit):
    """The best attempt is the highest rate, or the shortest launch."""
    amount = 100.0 if unit == "B/s" else 0
    seconds = {"slow": 2.0, "fast": 1.0, "slower": 3.0}
    attempts = [ceilings._Attempt("x", how, lambda: None, amount, unit) for how in seconds]
    monkeypatch.setattr(ceilings, "_groups", lambda device, sizes: [[attempt] for attempt in attempts])
    times = {f"x {how}": [s] * 3 for how, s in seconds.items()}
    monkeypatch.setattr(
        ceilings.device_timer, "device_times", lambda calls, *_, **__: {name: times[name] for name in calls}
    )
    figure = measure_ceilings(CPU).figures["x"]
    assert (figure.attempt, figure.value) == ("fast", amount or 1.0)


def test_what_a_device_cannot_do_is_not_there():
    """A device without fp8 has no ceiling for it; the other figures remain."""

    def raises():
        raise RuntimeError("no fp8")

    attempts = [
        ceilings._Attempt("fp8", "16", raises, 1, "FLOP/s"),
        ceilings._Attempt("launch", "", lambda: None, 0, "s"),
    ]
    assert [name for name, _ in ceilings._race(attempts, 2, CPU)] == ["launch"]


def test_data_are_random(monkeypatch):
    """Attempts use random data, since an H200 is 13 % faster on zeros."""
    sources = [each.call.__self__ for each in ceilings._bandwidths(2**16, CPU) if "sum" in each.how]
    assert sources[0].std() == pytest.approx(1.0, abs=0.1)


def test_tf32_is_put_back():
    """The precision setting of other matmuls is restored."""
    before = torch.backends.cuda.matmul.fp32_precision
    ceilings._tf32(torch.ones(2, 2), torch.ones(2, 2))
    assert torch.backends.cuda.matmul.fp32_precision == before
