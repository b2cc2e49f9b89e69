"""When a slice of a race in the background may run: alone, and within its share of the time."""

import gc
import threading
from functools import partial

import pytest

from backend_kwargs.auto.background import pacing
from backend_kwargs.auto.background.pacing import PAUSE_S, Gate, Pacer, SliceBudget
from backend_kwargs.auto.background.versions import Versions

WAIT_S = 60.0  # of a thread that should end


def elsewhere(do):
    """Run `do` in another thread, and return the thread."""
    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    return thread


def alone(gate):
    with gate.alone() as yes:
        return yes


def test_calls_come_in_together():
    """A call does not wait for another one, and a slice is not alone beside one."""
    gate = Gate()
    with gate.call(), gate.call():
        assert not alone(gate)
    assert alone(gate)


def test_a_call_that_raises_leaves():
    """Otherwise no slice would ever begin again."""
    gate = Gate()
    with pytest.raises(KeyError), gate.call():
        raise KeyError
    assert alone(gate)


def test_a_slice_that_raises_leaves():
    """Otherwise the next call would wait for ever."""
    gate = Gate()
    with pytest.raises(KeyError), gate.alone():
        raise KeyError
    assert alone(gate)


def test_a_call_waits_for_the_end_of_a_slice():
    """What a slice changes in the model's code is not seen by a call."""
    gate, order = Gate(), []

    def call():
        with gate.call():
            order.append("call")

    with gate.alone() as yes:
        waiting = elsewhere(call)
        assert yes
        assert alone(gate) is False  # and another slice is not begun
        order.append("slice")
    waiting.join(WAIT_S)
    assert order == ["slice", "call"]


def test_a_backward_pass_waits_for_a_slice():
    """With `wait` it comes in when the slice has ended."""
    gate, seen = Gate(), []

    def backward():
        with gate.alone(wait=True) as yes:
            seen.append(yes)

    with gate.alone():
        waiting = elsewhere(backward)
    waiting.join(WAIT_S)
    assert seen == [True]


def test_a_backward_pass_waits_for_calls():
    """With `wait` it is alone: what it changes in the model's code is seen by no call that had begun."""
    gate, order = Gate(), []

    def backward():
        with gate.alone(wait=True) as yes:
            order.append(yes)

    with gate.call():
        waiting = elsewhere(backward)
        waiting.join(0.05)
        order.append("call")
    waiting.join(WAIT_S)
    assert order == ["call", True]


class Context:
    """What autograd keeps of a forward pass."""


def test_forward_passes_of_other_threads_await_their_backward_passes():
    """No slice begins before those came, or will not come; this thread's own do not count."""
    versions, contexts = Versions(Gate()), [Context(), Context()]
    forward = partial(versions._forward, lambda ctx: None)
    forward(contexts[0])
    assert not versions.awaited_elsewhere()
    elsewhere(lambda: forward(contexts[1])).join(WAIT_S)
    assert versions.awaited_elsewhere()
    versions.switch()
    assert versions.awaited_elsewhere()  # also by the version that served before
    del contexts[1]
    gc.collect()
    assert not versions.awaited_elsewhere()


def test_a_forked_process_forgets_who_was_inside():
    """They are threads of the parent."""
    gate = Gate()
    with gate.call():
        gate.reset()
        assert alone(gate)


@pytest.fixture
def clock(monkeypatch):
    """The time that `pacing` and the budget below it see."""
    now = [100.0]
    monkeypatch.setattr(pacing.time, "perf_counter", lambda: now[0])
    return now


def test_only_slices_spend_the_budget(clock):
    """The time between them is the user's; a slice that raises counts too."""
    budget = SliceBudget(10.0, 0.0, 0.1)
    assert (budget.spent_s, budget.ends) == (0.0, 100.0 + PAUSE_S)
    with budget.sliced():
        clock[0] = 102.0
        assert (budget.spent_s, budget.ends) == (2.0, 100.0 + PAUSE_S)
    clock[0] = 200.0
    assert (budget.spent_s, budget.left_s) == (2.0, 8.0)

    def fails():
        with budget.sliced():
            clock[0] = 203.0
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    clock[0] = 300.0
    assert budget.spent_s == 5.0


@pytest.mark.parametrize(("share", "begins"), [(1.0, 103.0), (0.1, 130.0)])
def test_a_slice_begins_when_its_share_has_room(share, begins):
    """A whole pause must fit beside what was spent."""
    assert Pacer(began=100.0, spent_s=2.0).begins(share) == pytest.approx(begins)
