"""Which candidates win a race, and which never do."""

import re
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import backend_kwargs
from backend_kwargs import trial
from backend_kwargs.auto import budget, process_memory, race, reporting, result_checks, selection, steps
from backend_kwargs.auto.candidates import RaceCandidate
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.errors import BackendKwargsWarning
from backend_kwargs.graphs.replay import Inputs
from backend_kwargs.trial import roundings
from tests.auto.graphs import backend_of, chain, logged, rows_of


@pytest.mark.parametrize(
    ("candidate", "why"),
    [
        pytest.param("wrong", "fail_accuracy: output", id="other results"),
        pytest.param("crash", "fail_to_run: RuntimeError: planted", id="fails to compile"),
        pytest.param("burst", "fail_to_run: RuntimeError: planted in a call", id="fails in a call"),
    ],
)
def test_a_broken_candidate_never_wins(auto, planted, store, log, candidate, why):
    """One whose results differ from eager's, or that fails when it is compiled or runs, is dropped with the reason."""
    x = torch.randn(8, 64)
    assert torch.allclose(auto(chain, [candidate])(x), chain(x))
    assert f"{candidate} is dropped: {why}" in log.text
    assert rows_of(store)["default"].status == "pass"


def test_the_next_process_finds_the_winner(auto, store, default_wins):
    """The winner is in AOTAutograd's cache under the key of a process that runs no race."""
    x = torch.randn(8, 64)
    with fresh_cache():
        auto(chain)(x)
        torch._dynamo.reset()
        process_memory.forget_process()
        counters.clear()
        auto(chain)(x)
    assert (counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_miss"]) == (1, 0)


def test_rows_say_when_each_candidate_began(auto, planted, store, default_wins):
    """Each compiled candidate has the time of its compile, its timing and its lead, one after the other; eager none."""
    backend_kwargs.register_template("narrow", {"cpp.simdlen": 256})
    auto(chain, ["narrow", "crash"])(torch.randn(8, 64))
    rows = rows_of(store)
    assert (rows["eager"].began_s, rows["eager"].timed_s, rows["crash"].timed_s) == (None, None, None)
    tried = sorted((rows[name] for name in ("default", "narrow", "crash")), key=lambda row: row.began_s)
    assert tried[0] is rows["default"]
    ends = [row.began_s + row.compile_s + (row.timed_s or 0.0) for row in tried]
    assert all(end <= later.began_s for end, later in zip(ends, tried[1:], strict=False))
    assert rows["narrow"].timed_s > 0
    assert 0 < rows["default"].led_s < rows["narrow"].led_s
    assert rows["crash"].led_s is rows["eager"].led_s is None


def test_the_fastest_so_far_gives_way_when_it_breaks(auto, planted, store, log, default_wins):
    """If the current best fails when it is timed against the next candidate, that one takes its place."""
    gone = []

    @torch.library.custom_op("backend_kwargs_tests::fleeting", mutates_args=())
    def fleeting(x: torch.Tensor) -> torch.Tensor:
        if gone:
            raise RuntimeError("planted later")
        return x.clone()

    fleeting.register_fake(torch.empty_like)

    def once(graph):
        (output,) = graph.find_nodes(op="output")
        with graph.inserting_before(output):
            output.args = ([graph.call_function(fleeting._opoverload, (each,)) for each in output.args[0]],)

    uncached = {"fx_graph_cache": False}
    backend_kwargs.register_template("fleeting", {"post_grad_custom_post_pass": once, **uncached})
    backend_kwargs.register_template(
        "lasting", {"cpp.simdlen": 256, "post_grad_custom_pre_pass": gone.append, **uncached}
    )
    x = torch.randn(8, 64)
    with pytest.warns(BackendKwargsWarning, match="is not JSON serializable"):  # a template of functions
        assert torch.allclose(auto(chain, ["fleeting", "lasting"], budget_s=600)(x), chain(x))
    assert logged(log).startswith("auto: lasting for ")
    table = next(line for line in log.text.splitlines() if line.strip().startswith("fleeting "))
    assert table.split(maxsplit=1)[1] == "fail_to_run: RuntimeError: planted later"


def test_a_slow_candidate_loses(auto, planted, log):
    """A candidate that sleeps 20 ms in each call is not kept."""
    auto(chain, ["slow"])(torch.randn(8, 64))
    slow = next(line for line in log.text.splitlines() if line.strip().startswith("slow "))
    assert "compiled in" in slow
    assert "kept" not in slow


def test_eager_wins_where_compiling_loses(auto, planted, log):
    """If every compiled candidate is slower than eager, the graph runs in eager."""
    backend_kwargs.register_template("slow_auto", base="auto+slow")
    x = torch.randn(8, 64)
    compiled = torch.compile(chain, backend=backend_kwargs.make_backend("tmpl-inductor:slow_auto", candidates=[]))
    assert torch.equal(compiled(x), chain(x))
    assert "No candidate beats eager on this graph, which runs uncompiled." in log.text


def test_without_a_right_candidate_eager_runs_with_a_warning(auto, planted):
    """If no candidate passes the accuracy check, the graph runs in eager, with a warning."""
    backend_kwargs.register_template("wrong_auto", base="auto+wrong")
    x = torch.randn(8, 64)
    compiled = torch.compile(chain, backend=backend_kwargs.make_backend("tmpl-inductor:wrong_auto", candidates=[]))
    with pytest.warns(
        BackendKwargsWarning,
        match=r"A graph runs in eager, because no candidate compiled and passed the accuracy check: default: output",
    ):
        assert torch.equal(compiled(x), chain(x))


@pytest.mark.parametrize("is_time", [False, True], ids=["no time", "time"])
def test_what_cannot_be_checked_has_not_failed(auto, planted, store, monkeypatch, is_time):
    """Without any evidence eager serves, the row says so with the reason, and nothing is stored."""
    monkeypatch.setattr(budget.Budget, "allows", lambda self, calls: is_time)
    backend_kwargs.register_template("wrong_auto", base="auto+wrong")
    x = torch.randn(8, 64)
    compiled = torch.compile(chain, backend=backend_kwargs.make_backend("tmpl-inductor:wrong_auto", candidates=[]))
    with pytest.warns(BackendKwargsWarning, match="A graph runs in eager"):
        assert torch.equal(compiled(x), chain(x))
    (decision,) = process_memory.memory().decisions.values()
    row = next(row for row in decision.rows if row.name == "default")
    assert (row.status, store.exists()) == (("fail_accuracy", True) if is_time else ("unchecked", False))
    no_evidence = (
        r"output.*; there is no float64 reference \(a call in eager takes .* s\), and "
        "eager could not be run often enough at other roundings in the time there is"
    )
    assert bool(re.fullmatch(no_evidence, row.reason)) is not is_time


def test_what_can_never_be_checked_is_stored(auto, planted, store, monkeypatch):
    """Without memory for float64, and an operator that no mode can run, the next process does not race it again."""

    def lacks(mode):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(result_checks, "LARGEST_REFERENCE", 0)
    monkeypatch.setattr(roundings.OtherRounding, "__enter__", lacks)
    backend_kwargs.register_template("wrong_auto", base="auto+wrong")
    backend, x = backend_kwargs.make_backend("tmpl-inductor:wrong_auto", candidates=[]), torch.randn(8, 64)
    with pytest.warns(BackendKwargsWarning, match="A graph runs in eager"):
        torch.compile(chain, backend=backend)(x)
    (decision,) = Catalogue(store).all()
    assert rows_of(store)["default"].status == "uncheckable"
    assert reporting.what_is_open(decision) == "the numbers of default cannot be checked here"
    process_memory.forget_process()
    torch._dynamo.reset()
    monkeypatch.setattr(race, "race", pytest.fail)
    assert torch.equal(torch.compile(chain, backend=backend)(x), chain(x))
    assert [each.winner for each in process_memory.memory().decisions.values()] == ["eager"]


class InPlace(nn.Module):
    """A layer whose backward pass eager cannot run."""

    def __init__(self, *then):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), *then)

    def forward(self, x):
        return self.layers(x)


ONLY_FORWARD = pytest.mark.parametrize(
    "then",
    [
        pytest.param((nn.ReLU(inplace=True), nn.Dropout(0.5, inplace=True)), id="relu, dropout"),
        pytest.param((nn.Sigmoid(), nn.ReLU(inplace=True)), id="sigmoid, relu"),
        pytest.param((nn.Softmax(-1), nn.Hardtanh(inplace=True)), id="softmax, hardtanh"),
    ],
)


@ONLY_FORWARD
@pytest.mark.filterwarnings("ignore:Error detected in")  # AOTAutograd traces under anomaly detection
def test_eager_runs_where_default_does_not_compile(auto, store, then):
    """What eager gives is given: its forward, and its own error in the backward; one warning says why."""
    model, x = InPlace(*then), torch.ones(16, 8)
    torch.manual_seed(0)
    with pytest.warns(BackendKwargsWarning) as warned:
        found = auto(model, [])(x)
    told = [str(each.message) for each in warned if issubclass(each.category, BackendKwargsWarning)]
    assert len(told) == 1
    assert told[0].startswith(
        "A graph runs in eager, because default failed: RuntimeError: one of the variables needed"
    )
    torch.manual_seed(0)
    assert torch.equal(found, model(x))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()
    assert not store.exists()


@pytest.mark.filterwarnings("ignore:Error detected in")  # as above
def test_what_is_never_raced_raises_as_in_torch(auto):
    """Under race="never" default is what was asked for."""
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="modified by an inplace operation"):
        auto(InPlace(nn.Sigmoid(), nn.ReLU(inplace=True)), [], race="never")(torch.ones(16, 8))


def test_equal_code_is_not_raced(auto, log, default_wins):
    """A candidate with the same generated code as the current best is not timed."""
    backend_kwargs.register_template("same", {"max_autotune_gemm": False})
    auto(chain, ["same"])(torch.randn(64, 4096))
    row = next(line for line in log.text.splitlines() if line.strip().startswith("same "))
    assert row.split(maxsplit=1)[1] == "same code: as default"


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), id="cond"),
        pytest.param(lambda x: (x[0] + x[1]) * x.sum(), id="views"),
    ],
)
def test_default_wins_right(auto, default_wins, store, fn):
    """Graphs that contain other graphs, or return views, are raced with right results."""
    x = torch.randn(8, 64)
    with torch.no_grad():
        assert torch.allclose(auto(fn)(x), fn(x), atol=1e-4)
    assert rows_of(store)["default"].won


def test_inputs_that_share_memory(auto, default_wins, store):
    """A write through one input shows in another that shares its memory, once."""

    def step(whole, row):
        row.add_(1)
        return whole * 2

    whole = torch.zeros(4, 8)
    with torch.no_grad():
        seen = auto(step)(whole, whole[1])
    assert whole[1].eq(1).all()
    assert not whole[[0, 2, 3]].any()
    assert torch.equal(seen, whole * 2)
    assert rows_of(store)["default"].won


def test_a_wrong_candidate_never_wins_where_inputs_share_memory(auto, planted, store):
    """The reference is not computed on copies that share no memory, which would excuse any error."""

    def step(whole, row):
        row.add_(1)
        return whole * 2

    whole = torch.zeros(4, 8)
    with torch.no_grad():
        auto(step, ["wrong"], budget_s=600)(whole, whole[1])
    assert rows_of(store)["wrong"].status == "fail_accuracy"


def test_inference_mode(auto, default_wins, store):
    """Graphs with inference tensors are raced like others."""
    with torch.inference_mode():
        x = torch.randn(8, 64)
        assert torch.allclose(auto(chain)(x), chain(x), atol=1e-5)
    assert rows_of(store)["default"].won


def test_a_wrong_default_of_a_random_graph_never_wins(auto, planted):
    """In a graph that draws random numbers, default is checked with `fallback_random`, which draws as eager does."""
    backend_kwargs.register_template("wrong_auto", base="auto+wrong")
    backend = backend_kwargs.make_backend("tmpl-inductor:wrong_auto", candidates=[])
    with pytest.warns(
        BackendKwargsWarning,
        match=r"A graph runs in eager, because no candidate compiled and passed the accuracy check: default: output",
    ):
        torch.compile(lambda x: torch.nn.functional.dropout(x, 0.5) + x, backend=backend)(torch.randn(8, 64))


def test_after_the_budget_default_stands(monkeypatch, auto, planted, store):
    """If the budget ends while default is compiled, nothing more is compiled, and the decision records the cut."""
    monkeypatch.setattr(budget.Budget, "left_s", property(lambda self: 0.0 if self.free_s else 300.0))
    auto(chain, ["slow"])(torch.randn(8, 64))
    (decision,) = Catalogue(store).all()
    rows = rows_of(store)
    assert (decision.cut_s, rows["default"].status) == (300, "pass")
    assert (rows["slow"].status, rows["slow"].reason) == ("skipped", "the budget of 300 s is spent")


def test_a_call_longer_than_the_budget_is_not_raced(auto, log):
    """If one eager call takes longer than the budget, default is used after two calls in eager."""
    naps = []

    @torch.library.custom_op("backend_kwargs_tests::long_nap", mutates_args=())
    def long_nap(x: torch.Tensor) -> torch.Tensor:
        naps.append(time.sleep(0.3))
        return x.clone()

    long_nap.register_fake(torch.empty_like)
    auto(lambda x: long_nap(x) + 1, budget_s=0.2)(torch.randn(8, 64))
    (message,) = [message for message in log.messages if message.startswith("auto: ")]
    why = r"one call in eager took [\d.]+ s, over budget_s=0\.2; raise budget_s"
    assert re.fullmatch(rf"auto: default for a graph not raced: {why} \(\d+\.\d s\)", message)
    assert len(naps) == 3  # the last is the result's


def test_a_slow_first_call_is_timed_again(monkeypatch, auto):
    """Where the first calls in eager take long, as they do while kernels load, the time of a later one counts."""
    calls, seen, now = [], [], [0.0]
    for module in (race, steps, budget):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(race, "dynamo_seconds", lambda: 0.0)  # the clock would not pass

    @torch.library.custom_op("backend_kwargs_tests::loading", mutates_args=())
    def loading(x: torch.Tensor) -> torch.Tensor:
        now[0] += 0.5 if len(calls) < 2 else 0.0
        calls.append(x)
        return x.clone()

    def candidates(self, champion, original=selection.RaceState.candidates):
        seen.append(self.budget.call_s)
        return original(self, champion)

    loading.register_fake(torch.empty_like)
    monkeypatch.setattr(selection.RaceState, "candidates", candidates)
    auto(lambda x: loading(x) + 1)(torch.randn(8, 64))
    assert seen == [0.0]


def test_what_cannot_be_timed_in_time_is_not(monkeypatch, auto, store):
    """If timing would exceed the budget, default is used untimed, also against eager at the end; more may time it."""
    monkeypatch.setattr(budget, "LEAST_CALLS", 10**9)
    monkeypatch.setattr(race, "is_slower", lambda best, eager: True)
    auto(chain)(torch.randn(8, 64))
    rows = rows_of(store)
    (decision,) = Catalogue(store).all()
    assert (rows["default"].won, rows["default"].seconds, rows["eager"].seconds) == (True, None, None)
    assert {rows[name].reason for name in ("eager", "default")} == {"the budget ended before it was timed"}
    assert decision.cut_s == 300


def test_both_sides_pay_what_dynamo_costs(monkeypatch, auto, store):
    """Every timed call, also eager's, adds dynamo's estimated overhead, so that it does not decide short kernels."""
    monkeypatch.setattr(race, "PROLOGUE_S", 0.02)
    auto(chain)(torch.randn(8, 64))
    assert all(row.seconds > 0.015 for row in rows_of(store).values())


def test_more_guards_cost_more(monkeypatch):
    """Dynamo's overhead is estimated from its guards, and is zero where dynamo does not call."""
    seen = []

    def backend(gm, example_inputs):
        seen.append(race.dynamo_seconds())
        return gm

    x = torch.randn(4, 4)
    torch.compile(torch.sin, backend=backend)(x)
    torch.compile(nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)]), backend=backend)(x)
    assert race.PROLOGUE_S < seen[0] < seen[1] < 1e-3
    assert race.dynamo_seconds() == 0


def test_memory_is_not_that_of_the_inputs(monkeypatch, auto):
    """A candidate's peak does not include the creation of its inputs."""
    copies, within, fresh = [], [], Inputs.fresh
    monkeypatch.setattr(Inputs, "fresh", lambda self, *args: copies.append(self) or fresh(self, *args))

    def peak_memory(call, device):
        before = len(copies)
        call()
        within.append(len(copies) - before)

    monkeypatch.setattr(trial, "peak_memory", peak_memory)
    auto(lambda x: x.add_(1).relu() * 2, objective="memory")(torch.randn(8, 64))
    assert within
    assert not any(within)


def test_the_steps_of_a_race(monkeypatch, auto):
    """Each candidate is compiled, checked, and timed against the best so far; at last that is timed against eager."""
    monkeypatch.setattr(race, "better", lambda new, old, _: new.row.name == "default" or old.row.name == "default")
    taken, kinds = [], ("compile_candidate", "check_results", "time_in_turn")
    for name in kinds:
        step = getattr(race, name)
        noting = lambda of, runner, *args, step=step, **kwargs: (  # noqa: E731
            taken.append((step.__name__, runner.row.name)) or step(of, runner, *args, **kwargs)
        )
        monkeypatch.setattr(race, name, noting)
    monkeypatch.setattr(race, "is_slower", lambda best, eager: True)
    auto(chain, ["no_size_asserts"])(torch.randn(8, 64))
    raced = [(kind, name) for name in ("default", "no_size_asserts") for kind in kinds]
    assert taken == [("check_results", "eager"), *raced, ("time_in_turn", "no_size_asserts")]
    assert [each.winner for each in process_memory.memory().decisions.values()] == ["eager"]


def test_seconds_do_not_contradict_who_won(monkeypatch, auto, store):
    """A row's time follows from its speedup over its opponent, so drift between comparisons cannot reverse ranks."""
    step = RaceCandidate("step", {"epilogue_fusion": False})
    monkeypatch.setattr(selection, "candidates_for", lambda *_, **__: [step])
    monkeypatch.setattr(steps, "compiled_graphs", lambda fn: [])
    monkeypatch.setattr(steps, "speedup", lambda samples: trial.Interval(2.0, 2.0, 2.0))
    auto(chain)(torch.randn(8, 64))
    rows = rows_of(store)
    assert [rows["eager"].seconds / rows[name].seconds for name in ("default", "step")] == [2.0, 4.0]


def test_what_would_be_compiled_twice_is_not(auto, planted, store):
    """A candidate is skipped if its options, merged with the current best's, were tried already."""
    backend_kwargs.register_template("slower", base="slow")
    auto(chain, ["slow", "slower"])(torch.randn(8, 64))
    row = rows_of(store)["slower"]
    assert (row.status, row.reason) == ("skipped", "it would be slow again")


def test_a_reference_that_cannot_be_had_says_nothing(auto, capfd):
    """A graph that fails in float64 because it names float32 is raced without a reference, and without a traceback."""
    x, w = torch.randn(8, 8).bfloat16(), torch.randn(8, 8)
    with torch.no_grad():
        auto(lambda x, w: x.to(torch.float32) @ w)(x, w)
    assert "Traceback" not in capfd.readouterr().err


def test_float8_is_raced(auto, store):
    """Inputs in float8, which has no comparison operators, are raced like others."""
    with torch.no_grad():
        auto(lambda x: x.to(torch.float32) * 2)(torch.randn(64, 64).to(torch.float8_e4m3fn))
    assert rows_of(store)["default"].status == "pass"


def test_sparse_gradients_are_raced(auto, store):
    """A table whose gradient is sparse is raced like others, and its gradient stays sparse."""
    table = nn.Embedding(20, 64, sparse=True)
    auto(lambda at: table(at).sin())(torch.tensor([1, 2])).sum().backward()
    assert rows_of(store)["default"].status == "pass"
    assert table.weight.grad.is_sparse


@torch.no_grad()
def test_frozen_weights_bring_a_cpus_own_gemms(store):
    """With freezing=True, kernels for constant weights are tried, also on a CPU."""
    model, x = nn.Linear(32, 32), torch.randn(8, 32)
    options = {"candidates": ["max_autotune"], "budget_s": 300.0}
    compiled = torch.compile(model, backend=backend_kwargs.make_backend("tmpl-inductor:auto+freezing", options))
    assert torch.allclose(compiled(x), model(x), atol=1e-5)
    assert rows_of(store)["max_autotune"].status in ("pass", "same code")


def test_a_step_leaves_out_what_it_must(monkeypatch, auto, store, default_wins):
    """A step's options are merged onto those of the current best, except those in `without`."""
    one = RaceCandidate("one", {"epilogue_fusion": False, "max_fusion_size": 2})
    two = RaceCandidate("two", {"realize_reads_threshold": 1}, without=("max_fusion_size",))
    monkeypatch.setattr(selection, "candidates_for", lambda *_, **__: [one, two])
    monkeypatch.setattr(steps, "compiled_graphs", lambda fn: [])
    auto(chain)(torch.randn(8, 64))
    assert rows_of(store)["two"].options == {"epilogue_fusion": False, "realize_reads_threshold": 1}


def test_dynamic_shapes_take_one_decision(store):
    """A symbolic graph has one decision, which serves other sizes without a recompile."""
    compiled = torch.compile(chain, backend=backend_of(), dynamic=True)
    for size in (64, 32, 17):
        x = torch.randn(8, size)
        assert torch.allclose(compiled(x), chain(x), atol=1e-5)
    assert len(Catalogue(store).all()) == 1


def test_options_of_the_user_stand(auto, planted, store):
    """The user's options apply to every candidate; a candidate that would only change them is skipped."""
    backend_kwargs.register_template("fuse", {"epilogue_fusion": True})
    auto(chain, ["fuse"], epilogue_fusion=False)(torch.randn(8, 64))
    row = rows_of(store)["fuse"]
    assert row.reason == "it can do nothing here: your options set it otherwise"


def test_an_unknown_candidate_is_an_error_at_once():
    """A candidate's name is checked when the backend is made."""
    with pytest.raises(backend_kwargs.BackendKwargsError) as error:
        backend_kwargs.make_backend("tmpl-inductor:auto", candidates=["cudagraph"])
    assert str(error.value) == "Unknown candidate 'cudagraph'. Did you mean 'cudagraphs'?"


def test_the_winner_comes_as_the_compiler_made_it(default_wins):
    """auto returns the winner's callable without a wrapper."""
    import torch._inductor.compile_fx as module

    returned, compile_fx = [], module.compile_fx

    def spy(*args, **kwargs):
        returned.append(compile_fx(*args, **kwargs))
        return returned[-1]

    backend, seen = backend_of(cpp_wrapper=False), []

    def through(gm, example_inputs):
        seen.append(backend(gm, example_inputs))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "compile_fx", spy)
        torch.compile(lambda x: torch.relu(x @ x + 1).sum(-1), backend=through)(torch.randn(64, 64))
    assert seen[0] is returned[-1]


def test_memory_as_the_objective(store):
    """With objective="memory" every candidate's peak is measured, and the smaller one wins."""
    torch.compile(chain, backend=backend_of(objective="memory"))(torch.randn(512, 512))
    rows = rows_of(store)
    assert all(row.peak_bytes is not None for row in rows.values())
    least = min(row.peak_bytes for row in rows.values())
    winner = next(row for row in rows.values() if row.won)
    assert winner.peak_bytes <= 1.05 * least


def test_a_report_tells_the_race(store):
    """`report` contains the table of the race that chose how a graph is compiled."""
    compiled = torch.compile(chain, backend=backend_of())
    compiled(torch.randn(8, 64))
    (graph,) = backend_kwargs.report(compiled).graphs
    assert [row.name for row in graph.race.rows] == ["eager", "default"]
    assert [row.name for row in graph.race.rows if row.won] == [graph.race.winner]
    assert graph.race.table in str(backend_kwargs.report(compiled)).replace("\n  ", "\n")


def test_four_threads(auto):
    """Four threads that compile at the same time all get right results."""
    x = torch.randn(8, 64)
    seen = {}

    def work(at):
        seen[at] = auto(lambda x: chain(x) + at)(x)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.allclose(seen[at], chain(x) + at, atol=1e-5) for at in range(4))


@torch.no_grad()
def test_what_is_drawn_within_a_branch_is_seen(auto, store):
    """Random operators inside a branch are found, so default is checked by a twin that draws as eager does."""

    def drawn(x):
        return torch.cond(x.sum() > 1e9, torch.sin, lambda x: torch.nn.functional.dropout(x, 0.5), (x,))

    auto(drawn)(torch.ones(64, 64))
    assert rows_of(store)["default"].status == "pass"


def convolved():
    """Return convolutions whose biases batch norms take away: their gradients are zero but for rounding.

    With ReLU, an input that is zero but for rounding would be on the other side in code that sums in another order.
    """
    first, second = (
        (torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16)),
        (torch.nn.Conv2d(16, 32, 3), torch.nn.BatchNorm2d(32)),
    )
    last = torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, 10)
    return torch.nn.Sequential(*first, torch.nn.SiLU(), *second, torch.nn.SiLU(), *last)


@pytest.mark.parametrize("seed", range(3))
def test_gradients_that_are_zero_but_for_rounding(auto, store, seed):
    """A step of convolutions and batch norms is raced: Inductor's noise in their biases' gradients is no error."""
    torch.manual_seed(seed)
    loss = torch.nn.functional.cross_entropy(auto(convolved())(torch.randn(8, 3, 32, 32)), torch.arange(8))
    loss.backward()
    assert rows_of(store)["default"].status == "pass"
