"""A tuned graph runs in eager where that is faster."""

import re
import time

import pytest
import torch
from torch.testing import assert_close

import backend_kwargs as bk
from backend_kwargs.backends.tvm.settings import unfit

if unfit():  # the module below imports TVM
    pytest.skip(f"no TVM: {unfit()}", allow_module_level=True)

from backend_kwargs import trial
from backend_kwargs.backends.tvm import part_compiler

TUNED = {"scheduler": "meta_schedule", "trials": 1, "seed": 0}
REASON = re.compile(r"it is faster: \S+ ms a call, and \S+ ms with TVM")


@pytest.fixture
def slow(monkeypatch):
    """Make each call of TVM's code take 20 ms longer."""
    runner = part_compiler.runner

    def slow_runner(*args, **kwargs):
        run = runner(*args, **kwargs)

        def call(*given):
            time.sleep(0.02)
            return run(*given)

        return call

    monkeypatch.setattr(part_compiler, "runner", slow_runner)


def chain(x):
    for _ in range(20):
        x = x * 1.5 + 0.5
    return x


def test_a_graph_that_eager_runs_faster_is_left_to_it(slow, compiled):
    """If TVM's code is slower, dynamo's graph itself runs, and the reason has both times."""
    call, x = compiled(chain, **TUNED), torch.randn(8, 8)
    assert_close(call(x), chain(x), rtol=0, atol=0)
    assert (call.graphs, list(call.fallbacks)) == ([], ["the graph"])
    assert REASON.fullmatch(call.fallbacks["the graph"])


def test_a_graph_that_tvm_runs_faster_stays_with_it(monkeypatch, compiled):
    """If TVM's code takes half of eager's time, it stays."""
    monkeypatch.setattr(trial, "interleave", lambda calls, **_: {"eager": [2e-3] * 6, "TVM": [1e-3] * 6})
    call = compiled(chain, **TUNED)
    call(torch.randn(8, 8))
    assert (call.graphs, call.fallbacks) == (["inference"], {})


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, id="untuned"), pytest.param({**TUNED, "fallback": "error"}, id="nothing may run in eager")],
)
def test_other_graphs_stay_with_tvm(slow, compiled, options):
    """Without tuning nothing is timed, and with fallback="error" nothing may run in eager."""
    call = compiled(chain, **options)
    call(torch.randn(8, 8))
    assert call.graphs == ["inference"]


def test_a_graph_in_training_stays_with_tvm(slow, compiled):
    """With gradients, nothing is timed: the backward graph is compiled only later."""
    call, x = compiled(chain, **TUNED), torch.randn(8, 8, requires_grad=True)
    call(x).sum().backward()
    assert call.graphs == ["forward", "backward"]


def test_timing_changes_no_inputs(slow, compiled):
    """A graph that writes to its input is timed on copies."""
    call, x = compiled(lambda x: x.add_(1) * 2, **TUNED), torch.zeros(8, 8)
    assert_close(call(x), torch.full((8, 8), 2.0))
    assert_close(x, torch.ones(8, 8))


def test_timing_draws_no_random_numbers_of_the_user(slow, compiled):
    """The random numbers of the first call are those that eager draws."""

    def draws(x):
        return torch.rand_like(x) + x * 2

    call, x = compiled(draws, **TUNED), torch.randn(8, 8)
    torch.manual_seed(3)
    found = call(x)
    torch.manual_seed(3)
    assert_close(found, draws(x), rtol=0, atol=0)


def test_operators_that_are_not_torchs_run_once(slow, compiled):
    """A graph with a user's operator is not timed, since each call would repeat it."""
    calls = []

    @torch.library.custom_op("against_eager::counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return x.clone()

    counted.register_fake(torch.empty_like)
    call = compiled(lambda x: counted(x * 2) + 1, **TUNED)
    call(torch.randn(8, 8))
    assert (calls, bool(call.graphs)) == ([8], True)


@pytest.mark.parametrize("options", [{"dynamic": True}, {"freeze": True}], ids=["dynamic", "frozen"])
def test_other_calls_of_a_graph_left_to_eager_are_right(slow, compiled, options):
    """Dynamic sizes and frozen parameters stay right in eager."""
    model = torch.nn.Linear(8, 4)
    call = compiled(model, **TUNED, **options)
    with torch.no_grad():
        for rows in (4, 6):
            x = torch.randn(rows, 8)
            assert_close(call(x), model(x), rtol=0, atol=0)
    assert list(call.fallbacks) == ["the graph"]


def test_the_report_has_the_reason(slow):
    """`report` says that the graph runs in eager, and why."""
    call = torch.compile(chain, backend=bk.make_backend("tmpl-tvm", **TUNED))
    call(torch.randn(8, 8))
    lines = str(bk.report(call)).splitlines()
    (told,) = (line for line in lines if line.startswith("  in eager: "))
    assert REASON.fullmatch(told.removeprefix("  in eager: the graph, because "))
    assert "  no partition of TVM" in lines
