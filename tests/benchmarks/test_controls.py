"""The controls have the expected outcome; each test fails without the check that it exercises."""

import pytest
import torch

from backend_kwargs.trial import Interval, interleave, noise_floor, ratio_interval, timing, within_noise
from benchmarks.execution import controls
from benchmarks.execution.controls import FAULTY, SLOWED, Control, is_seen
from benchmarks.execution.records import AGAIN
from benchmarks.execution.study import CaseStudy
from benchmarks.execution.trial import PeerTrial
from benchmarks.workloads.case import Case, Problem

CPU = torch.device("cpu")
CLOCK = controls.Timer(CPU, events=False)
REASONS = {
    "wrong result": "output: RMSE to the reference ",
    "no-op": "output: RMSE to the reference ",
    "cached result": "output: RMSE to the reference ",
    "graph break": "the graph broke: 2 graphs.",
    "recompile": "recompiled at each call, since an attribute of the model changes",
}


def softmax_of_gemm(x, w):
    return torch.softmax(x @ w, dim=-1)


def tried(control: Control, tmp_path, dtype=torch.float32) -> PeerTrial:
    """Compile and check a control, as a run does with every peer."""

    def build(device, dtype, scale):
        args = (torch.randn(8, 16, dtype=dtype), torch.randn(16, 16, dtype=dtype))
        return Problem(control.plant(softmax_of_gemm), args)

    study = CaseStudy.of(Case("control", "test", build), "fwd", CPU, dtype, "smoke")
    assert study.learn().passed
    trial = PeerTrial(study, control.peer("control"), tmp_path)
    trial.attempt(trial.start)
    return trial


@pytest.fixture(autouse=True)
def _forward_alone():
    with torch.no_grad():
        yield


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_is_caught(name, dtype, tmp_path):
    """Wrong, idle and caching backends fail the accuracy check; graph breaks and recompiles are counted."""
    trial = tried(FAULTY[name], tmp_path, dtype)
    assert trial.status == FAULTY[name].expected
    assert trial.reason.startswith(REASONS[name])


@pytest.mark.usefixtures("fresh_dynamo")
def test_what_is_sound_passes(tmp_path):
    """The same case with a correct backend passes both checks."""
    trial = tried(Control("pass"), tmp_path)
    trial.attempt(trial.finish)
    assert (trial.status, trial.reason) == ("pass", "")


@pytest.mark.usefixtures("fresh_dynamo")
def test_what_becomes_wrong_while_it_is_timed_is_caught(tmp_path):
    """The check after timing uses the timed callable, on other inputs."""
    faulty = []

    def turncoat(gm, example_inputs):
        wrong = controls.wrong_result(gm, example_inputs)

        def run(*args):
            return wrong(*args) if faulty else gm(*args)

        return run

    trial = tried(Control("pass", turncoat), tmp_path)
    assert trial.passed
    faulty.append(True)
    trial.attempt(trial.finish)
    assert trial.status == "fail_accuracy"


class Clock:
    """A fake clock that advances a little at each reading, so that waiting ends."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 1e-7
        return self.now

    def passes(self, seconds):
        self.now += seconds


def test_same_is_within_noise_and_five_per_cent_is_seen(monkeypatch):
    """The baseline against itself shows no difference, and 5 % more work shows as 5 %."""
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(controls, "time", clock)

    def call():
        clock.passes(2e-3)

    samples = interleave({"eager": call, **controls.timed(call, CLOCK)}, rounds=30, device=CPU)
    floor = noise_floor(ratio_interval(samples["eager"], samples[AGAIN]))
    slowed = ratio_interval(samples["eager"], samples[SLOWED])
    assert floor.high == pytest.approx(1.0, abs=1e-3)
    assert slowed.median == pytest.approx(1 / 1.05, rel=1e-3)
    assert not within_noise(slowed, floor)


def test_a_short_call_gets_what_a_launch_takes(monkeypatch):
    """If the launch takes longer than the requested share, nothing more is added, and the actual share is recorded."""
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(controls, "spinning", lambda seconds, device: lambda: clock.passes(2e-6 + seconds))
    shares = {us: controls.slowed(lambda us=us: clock.passes(us * 1e-6), CLOCK).injected for us in (10, 40, 400)}
    assert shares == pytest.approx({10: 0.2, 40: 0.05, 400: 0.05}, rel=1e-2)


@pytest.mark.parametrize("injected", [0.0, 0.02, 0.5], ids=str)
def test_a_share_far_from_what_was_asked_is_no_proof(injected):
    """A timer that cannot measure the injected work is detected, even if it is consistent."""
    seen = 1 / (1 + injected)
    assert not is_seen(Interval(seen, seen / 1.001, seen * 1.001), Interval(1, 1 / 1.01, 1.01), injected)


@pytest.mark.parametrize(("injected", "seen"), [(0.05, True), (0.06, True), (0.08, False), (0.03, False)], ids=str)
def test_the_work_must_show_at_its_size(injected, seen):
    """5 % of work, measured to 0.5 % with a noise floor of 1 %, must not appear as 8 % or 3 %."""
    speedup = Interval(1 / 1.05, 1 / 1.055, 1 / 1.045)
    assert is_seen(speedup, Interval(1, 1 / 1.01, 1.01), injected) is seen


def test_injected_work_takes_time():
    """On the real clock 50 % more work takes 50 % longer, within the calibration's error."""

    def call():
        end = controls.time.perf_counter() + 2e-3
        while controls.time.perf_counter() < end:
            pass

    samples = interleave({"": controls.slowed(call, CLOCK, share=0.5)}, rounds=3, device=CPU)
    assert min(samples[""]) >= 2.9e-3


def test_a_graph_break_alone_makes_nothing_wrong():
    """A planted graph break leaves the results right, so only the break itself is detected."""
    x = torch.randn(4)
    assert torch.equal(controls.breaking(torch.sin)(x), x.sin())


def test_slowed_gives_the_result():
    """A slowed call returns the baseline's result, so it is checked like the baseline."""
    assert controls.slowed(lambda: 42, CLOCK)() == 42
