"""Races in the background: what serves is right at every moment, and the winner takes over between two calls."""

import gc
import os
import threading
import weakref
from functools import partial

import pytest
import torch

import backend_kwargs
from backend_kwargs.auto import race
from backend_kwargs.auto.background import following, serving
from backend_kwargs.auto.background.pacing import Pacer
from backend_kwargs.auto.background.serving import WATCHED, Background
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.auto.workers.pool import Workers
from backend_kwargs.compile_records import records
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.facts.decision import RaceRow
from tests.auto.background_loop import backend, record, timeline, until, until_ended, words
from tests.auto.graphs import rows_of


@pytest.fixture(scope="module")
def worker():
    made = Workers(1, nice=0)  # tests that run beside it would leave it no time
    yield made
    made.stop()


@pytest.fixture(autouse=True)
def one_worker(worker, monkeypatch):
    """Let all races of this module have the same worker, and pace each by itself."""
    own = Pacer()
    monkeypatch.setattr(serving, "pool", lambda: worker)
    monkeypatch.setattr(serving, "pacer", lambda: own)


@pytest.fixture
def last_wins(monkeypatch):
    """Let the last candidate that passes the check win."""
    monkeypatch.setattr(race, "better", lambda challenger, champion, objective: True)
    monkeypatch.setattr(race.Race, "not_slower", lambda self, champion, eager: champion)


def net():
    return torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.LayerNorm(32))


def test_the_winner_takes_over(store, last_wins):
    """The first call is eager's; each later one is right, and in the end dynamo calls the winner itself."""
    model, x = net(), torch.randn(8, 32)
    fn, expected = torch.compile(model, backend=backend("no_size_asserts", budget_s=900)), model(x)
    with torch.no_grad():
        assert torch.equal(fn(x), expected)
        assert "eager serves" in words()
        switch = record().compiled()
        until_ended(lambda: torch.testing.assert_close(fn(x), expected))
        for _ in range(WATCHED):  # the race may end in the call after a switch, or in that call
            torch.testing.assert_close(fn(x), expected)
    assert not isinstance(getattr(switch.func, "__self__", None), Background)
    assert " takes over" in words()  # default, or at once a candidate that was ready with it
    rows = rows_of(store)
    assert rows["default"].status == "pass"
    assert rows["no_size_asserts"].status in ("pass", "same code")
    assert sum(row.won for row in rows.values()) == 1
    assert Catalogue(store).all()[0].cut_s == 0


def test_the_report_shows_the_timeline(last_wins):
    """A report has the decision as it is known now, and what happened when."""
    model, x = net(), torch.randn(8, 32)
    fn = torch.compile(model, backend=backend())
    with torch.no_grad():
        fn(x)
        assert "in the background, not yet ended:" in str(backend_kwargs.report(fn))
        until_ended(lambda: fn(x))
    text = str(backend_kwargs.report(fn))
    assert "in the background:" in text
    assert "default takes over" in text
    assert "(a pause of " in text
    assert "auto: default for" in text


def test_training(last_wins):
    """Gradients are eager's in each step, and a backward pass is done by what did its forward pass."""
    model, x = net(), torch.randn(8, 32)
    fn = torch.compile(model, backend=backend("no_size_asserts"))

    def gradients(output):
        return torch.autograd.grad(output.square().sum(), list(model.parameters()))

    expected = gradients(model(x))
    close = partial(torch.testing.assert_close, expected=expected, rtol=1e-3, atol=1e-4)
    early = fn(x)
    calls = until_ended(lambda: close(gradients(fn(x))))
    assert calls > 1
    close(gradients(early))
    close(gradients(fn(x)))
    del early
    gc.collect()
    fn(x)
    close(gradients(fn(x)))
    assert not isinstance(getattr(record().compiled().func, "__self__", None), Background)


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x):
        self.calls.add_(1)
        return (x * self.calls).softmax(-1)


def two_of_equal_code():
    """Return functions of two models, whose code objects differ, so that dynamo compiles both, and their results."""
    models, x = [net(), net()], torch.randn(8, 32)
    fns = [lambda: models[0](x), lambda: models[1](x)]
    with torch.no_grad():
        return fns, [fn() for fn in fns]


def raced_together(*candidates):
    """Call two functions of equal code until both races have ended; return the timelines, the one that began first."""
    functions, expected = two_of_equal_code()
    fns = [torch.compile(each, backend=backend(*candidates)) for each in functions]

    def call():
        for fn, result in zip(fns, expected, strict=True):
            torch.testing.assert_close(fn(), result)

    with torch.no_grad():
        call()
        first, second = (each.facts.background for each in records()[-2:])
        until(lambda: first.ended and second.ended, call)
        call()
    return first, second


@pytest.mark.parametrize("pause_s", [0.0, serving.PAUSE_S], ids=["a step a slice", "several steps a slice"])
def test_graphs_of_equal_code_are_raced_once(last_wins, store, monkeypatch, pause_s):
    """The second race waits for the first one's decision, and times its winner alone; the first one's is stored."""
    monkeypatch.setattr(serving, "PAUSE_S", pause_s)
    first, second = raced_together("no_size_asserts", "persistent_reductions")
    ended = [each.began + event.at_s for each in (first, second) for event in each.events if "has ended" in event.what]
    assert ended == sorted(ended)
    assert "default takes over" in [event.what for event in second.events]
    (decision,) = Catalogue(store).all()
    assert decision == first.decision
    assert decision.cut_s == 0
    assert (second.decision.winner, decision.winner) == ("no_size_asserts", "no_size_asserts")
    skipped = {row.name: row.reason for row in second.decision.rows if row.status == "skipped"}
    assert skipped == {"persistent_reductions": "a graph of equal code chose no_size_asserts"}


def test_a_winner_that_is_wrong_for_an_equal_graph(last_wins, store, monkeypatch):
    """What the first race chose, and fails in the second, is stored no longer as decided."""
    entered, seen = race.Race._entered, []

    def failing(self, candidate, made, row):
        seen.append(candidate.name)
        if seen.count("no_size_asserts") == 2:
            raise ValueError("planted")
        return entered(self, candidate, made, row)

    monkeypatch.setattr(race.Race, "_entered", failing)
    first, second = raced_together("no_size_asserts")
    assert first.decision.winner == "no_size_asserts"
    assert {row.name: row.reason for row in second.decision.rows}["no_size_asserts"] == "ValueError: planted"
    (decision,) = Catalogue(store).all()
    assert decision.winner == second.decision.winner == "default"
    assert decision.cut_s > 0


def test_an_equal_graph_whose_race_stands_still(last_wins, monkeypatch):
    """It holds nobody up: the second race goes its own way, and times all candidates."""
    monkeypatch.setattr(following, "SILENT_S", 0.0)
    (one, two), (_, expected) = two_of_equal_code()
    first, second = (torch.compile(each, backend=backend("no_size_asserts")) for each in (one, two))
    with torch.no_grad():
        first()
        second()
        until_ended(lambda: torch.testing.assert_close(second(), expected))
    assert not records()[-2].facts.background.ended
    assert "a graph of equal code" not in words()
    assert "no_size_asserts was checked and timed" in words()


def test_state_changes_once_a_call(last_wins):
    """A timed call does not change the user's buffer."""
    model, x = Counting(), torch.randn(8, 4)
    fn, count = torch.compile(model, backend=backend("no_size_asserts")), 0

    def call():
        nonlocal count
        count += 1
        torch.testing.assert_close(fn(x), (x * count).softmax(-1))

    with torch.no_grad():
        call()
        until_ended(call)
    assert model.calls.eq(count).all()
    assert "default takes over" in words()


def test_inputs_are_not_kept(last_wins):
    """The inputs of a call live no longer than without the race; the caller may use their memory again."""
    model = net()
    fn, seen = torch.compile(model, backend=backend("no_size_asserts")), []

    def call():
        x = torch.randn(8, 32)
        torch.testing.assert_close(fn(x), model(x))
        seen.append(weakref.ref(x))

    with torch.no_grad():
        call()
        until(lambda: "default takes over" in words(), call)
        gc.collect()
        assert not any(each() is not None for each in seen)
        until_ended(call)  # while what served before would still serve a call that fails
        gc.collect()
        assert not any(each() is not None for each in seen)


def test_two_threads(last_wins):
    """Calls of two threads are right while the race goes on in one of them."""
    model, ended, wrong = net(), threading.Event(), []
    fn = torch.compile(model, backend=backend("no_size_asserts"))

    def loop():
        while not ended.is_set():
            x = torch.randn(8, 32)
            with torch.no_grad():
                if not torch.allclose(fn(x), model(x), atol=1e-5):
                    wrong.append(x)
            ended.wait(0.005)

    x = torch.randn(8, 32)
    with torch.no_grad():
        fn(x)
        thread = threading.Thread(target=loop)
        thread.start()
        try:
            until_ended(lambda: fn(x))
        finally:
            ended.set()
            thread.join()
    assert not wrong
    assert "default takes over" in words()


def test_the_thread_of_its_slices_has_ended(last_wins):
    """On a GPU, where CUDA graphs are recorded for a thread, the race then ends with what serves."""
    model, x = net(), torch.randn(8, 32)
    fn = torch.compile(model, backend=backend("no_size_asserts"))
    with torch.no_grad():
        fn(x)
        background = record().compiled().func.__self__
        background.thread = threading.Thread(target=lambda: None)
        background.thread.start()
        background.thread.join()
        until(lambda: "the thread in which its candidates recorded CUDA graphs has ended" in words(), lambda: fn(x))
        torch.testing.assert_close(fn(x), model(x))
    assert "the race has ended: eager" in words()


def test_no_slice_before_another_threads_backward_pass(last_wins, monkeypatch):
    """On a GPU both would wait for each other in autograd's thread."""
    fn, begun = torch.compile(net(), backend=backend("no_size_asserts")), []
    with torch.no_grad():
        fn(torch.randn(8, 32))
    background = record().compiled().func.__self__
    monkeypatch.setattr(serving, "pacer", lambda: Pacer(began=-1e9))  # there is time for a slice
    monkeypatch.setattr(background, "_slice", begun.append)
    background.ready = lambda: True
    context = Context()
    background.versions.pending.add(context)
    background._boundary((torch.randn(8, 32),))
    assert not begun
    del context
    gc.collect()
    background._boundary((torch.randn(8, 32),))
    assert begun


class Context:
    """What autograd keeps of another thread's forward pass."""

    served_in = None


def test_a_winner_that_fails_in_a_call(last_wins, monkeypatch, store):
    """The user's call is served as before, on the inputs as they were, and the race ends."""
    model, x = Counting(), torch.randn(8, 4)
    fn, serve = torch.compile(model, backend=backend()), Background._serve

    def spoiled(self, runner):
        serve(self, runner)

        def failing(*inputs):
            next(each for each in inputs if each.shape == (4,)).add_(1)
            raise RuntimeError("planted")

        self.serving = failing

    monkeypatch.setattr(Background, "_serve", spoiled)
    with torch.no_grad():
        fn(x)
        calls = until_ended(lambda: fn(x))
    assert model.calls.eq(calls + 1).all()
    assert "default failed in a call, which was served as before: RuntimeError: planted" in words()
    assert timeline().decision.winner == "eager"


def test_a_race_that_ends_early_is_stored(last_wins, store, monkeypatch):
    """What is known after each candidate is stored as a cut decision, which a later race may improve."""
    model, x = net(), torch.randn(8, 32)
    fn = torch.compile(model, backend=backend())
    monkeypatch.setattr(Background, "_end", lambda self, why="": None)
    monkeypatch.setattr(serving, "PAUSE_S", 0.0)  # a slice for each step
    with torch.no_grad():
        fn(x)
        until(lambda: len(Catalogue(store).all()) == 1, lambda: fn(x))
    (decision,) = Catalogue(store).all()
    assert decision.winner == "default"
    assert decision.cut_s > 0


def test_tuning_that_does_not_end(monkeypatch):
    """A candidate whose tuning takes more slices than it has is refused, and the race goes on."""

    def interrupted(self, candidate, options, champion, make):
        yield
        self.rows.append(RaceRow(candidate.name, options, "timeout", "planted"))

    model, x = net(), torch.randn(8, 32)
    monkeypatch.setattr(race.Race, "preparing", interrupted)
    with torch.no_grad():
        fn = torch.compile(model, backend=backend())
        expected = fn(x)
        until_ended(lambda: fn(x))
        assert torch.equal(fn(x), expected)
    assert "default is refused: timeout: planted" in words()
    assert "the race failed" not in words()


def test_a_fork_goes_on_without_the_race(worker):
    """A forked process serves what served before, and ends its race."""
    x, threads = torch.randn(8, 32), torch.get_num_threads()
    torch.set_num_threads(1)  # a fork has no others
    try:
        with torch.no_grad():
            fn = torch.compile(lambda x: (x * 2).softmax(-1) + 1, backend=backend())
            expected = fn(x)
            child = os.fork()
            if not child:
                right = False
                try:
                    right = torch.equal(fn(x), expected) and "this process was forked, and has no workers" in words()
                finally:
                    os._exit(0 if right else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        torch.set_num_threads(threads)
    assert not timeline().ended


def test_ctrl_c_in_a_slice(monkeypatch):
    """It reaches the user, and later calls are served."""
    model, x = net(), torch.randn(8, 32)
    fn = torch.compile(model, backend=backend())

    def interrupted(self, began):
        raise KeyboardInterrupt

    with torch.no_grad():
        expected = fn(x)
        monkeypatch.setattr(Background, "_steps", interrupted)
        with pytest.raises(KeyboardInterrupt):
            until(lambda: False, lambda: fn(x))
        assert torch.equal(fn(x), expected)
    assert "it was interrupted" in words()
    assert timeline().ended


@pytest.mark.parametrize(
    ("fn", "dynamic", "why"),
    [
        pytest.param(
            lambda x: torch.nn.functional.dropout(x, 0.5).sum(-1) * 2,
            False,
            "it draws random numbers, of which a later call would see others",
            id="random",
        ),
        pytest.param(
            lambda x: (x * 2).softmax(-1) + 1,
            True,
            "its sizes are symbols, for which a later compile could add guards",
            id="dynamic",
        ),
    ],
)
def test_what_is_not_raced_later(log, fn, dynamic, why):
    """Such a graph is compiled under default, and its decision says why."""
    with torch.no_grad():
        torch.compile(fn, backend=backend(), dynamic=dynamic)(torch.randn(8, 32))
    facts = record().facts
    assert facts.decision.winner == "default"
    assert facts.decision.facts == f"a graph not raced: race='background', and {why}"


def test_without_workers(monkeypatch):
    """Where no process may be started, default serves."""
    none = Workers(0)
    none.refused = "workers need Linux"
    monkeypatch.setattr(serving, "pool", lambda: none)
    with torch.no_grad():
        torch.compile(net(), backend=backend())(torch.randn(8, 32))
    facts = record().facts
    why = "race='background', and there is no worker to compile: workers need Linux"
    assert facts.decision.facts == f"a graph not raced: {why}"


def test_what_cannot_be_sent(worker):
    """A graph with an operator of this script's cannot be lowered elsewhere: default is compiled here."""

    @torch.library.custom_op("backend_kwargs_tests::later", mutates_args=())
    def later(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    later.register_fake(torch.empty_like)
    x = torch.randn(8, 32)
    with torch.no_grad():
        fn = torch.compile(lambda x: later(x).softmax(-1) * 2 + 1, backend=backend())
        torch.testing.assert_close(fn(x), (x + 1).softmax(-1) * 2 + 1)
    facts = record().facts
    assert "race='background', and " in facts.decision.facts
    assert facts.decision.winner == "default"


def test_the_share_is_never_exceeded():
    """A slice begins when the longest pause fits into the share of the time since the first race."""
    pacer = Pacer(began=100.0, spent_s=2.0)
    assert pacer.begins(0.05) == 160.0  # of 60 s, 3 s: those spent, and a pause of 1 s


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_an_impossible_share(share):
    """A share is above 0 and at most 1."""
    with pytest.raises(BackendKwargsError) as error:
        backend_kwargs.make_backend("tmpl-inductor:auto", background_share=share)
    assert str(error.value) == f"Option 'background_share' must be float above 0 and at most 1, got {share} (float)."
