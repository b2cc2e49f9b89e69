"""What is replaced for a while is put back on every way out."""

import sys
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest

from backend_kwargs.torch_internals import replacing
from backend_kwargs.torch_internals.replacing import replaced, restored_by, undone


def owners():
    return {"attribute": SimpleNamespace(a=1), "item": {"a": 1}}


def value_of(owner):
    return owner.get("a") if isinstance(owner, dict) else getattr(owner, "a", None)


@pytest.mark.parametrize("owner", owners().values(), ids=owners())
@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_a_value_comes_back(owner, error):
    """The value is replaced within, and back after a return or any exception."""
    try:
        with replaced(owner, "a", 2):
            assert value_of(owner) == 2
            if error:
                raise error
    except (RuntimeError, KeyboardInterrupt):
        pass
    assert (value_of(owner), replacing._replaced) == (1, {})


def test_what_was_absent_is_removed():
    """An attribute of the class that an instance replaced is the class's again."""

    class Timer:
        def time(self):
            return "class"

    timer = Timer()
    with replaced(timer, "time", lambda: "instance"):
        assert timer.time() == "instance"
    assert (timer.time(), vars(timer)) == ("class", {})


def test_a_value_replaced_by_itself_comes_back():
    """What others write meanwhile is undone."""
    counts = {"total": 3}
    with replaced(counts, "total", 3):
        counts["total"] += 4
    assert counts == {"total": 3}


def test_contexts_may_be_left_in_any_order():
    """The first to leave keeps the value of the other, and the last brings back what was there."""
    owner = SimpleNamespace(a=1)
    first, second = replaced(owner, "a", 2), replaced(owner, "a", 3)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert owner.a == 3
    second.__exit__(None, None, None)
    assert owner.a == 1


def test_a_local_of_another_thread_stays():
    """A thread's value of a `threading.local` is replaced for that thread alone."""
    local = threading.local()
    local.a, seen = 1, []

    def other():
        local.a = 5
        with replaced(local, "a", 6):
            seen.append(local.a)
        seen.append(local.a)

    with replaced(local, "a", 2):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert local.a == 2
    assert (local.a, seen) == (1, [6, 5])


def test_a_context_that_is_dropped_puts_back():
    """A Ctrl-C before the exit drops the context, which then ends."""
    owner = SimpleNamespace(a=1)
    context = replaced(owner, "a", 2)
    context.__enter__()
    del context
    assert owner.a == 1


def interrupted(at, call):
    """Raise KeyboardInterrupt before the line number `at` of this module's and replacing.py's code in `call`."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if frame.f_code.co_filename not in (replacing.__file__, __file__):
            return None
        if event == "line":
            count += 1
            if count == at:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def test_a_ctrl_c_at_any_line(monkeypatch):
    """Wherever a Ctrl-C comes, before or within or after, the value from before is there afterwards."""
    # A trace raises between a `with` and its exit too, where no signal is handled: the lock stays held.
    monkeypatch.setattr(replacing, "_lock", threading.RLock())
    owner = SimpleNamespace(a=1)

    def call():
        with replaced(owner, "a", 2), replaced(owner, "b", 3):
            owner.c = 4

    at = 1
    while interrupted(at, call):
        assert (owner.a, hasattr(owner, "b"), replacing._replaced) == (1, False, {})
        at += 1
    assert at > 10


def test_undoing_runs_again_after_a_ctrl_c():
    """What a Ctrl-C interrupts in one's own undoing is completed, and what was registered before it runs too."""
    left, ran = [1, 2], []

    def undo():
        ran.append(len(left))
        left.pop()
        if len(ran) == 1:
            raise KeyboardInterrupt
        left.clear()

    with suppress(KeyboardInterrupt), undone() as stack:
        stack.callback(ran.append, "first")
        restored_by(stack, undo)
    assert (left, ran) == ([], [2, 1, "first"])
