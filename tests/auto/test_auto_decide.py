"""Decisions: when no race runs, which winners are inherited, and which decision is used."""

import contextlib
import os
from dataclasses import replace

import pytest
import torch
from torch._inductor import config

import backend_kwargs
from backend_kwargs.auto import decide, process_memory, question, race
from backend_kwargs.auto.question import Request
from backend_kwargs.auto.settings import RaceSettings
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.backends import CapturedGraph
from backend_kwargs.compare import Candidate, compare
from backend_kwargs.errors import BackendKwargsWarning
from backend_kwargs.facts import Compiled
from backend_kwargs.facts.decision import RaceRow
from tests import forks
from tests.auto.graphs import backend_of, chain, logged

AHEAD_OF_TIME = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="aot_compile() of torch 2.11 takes no backend but torch's own"
)


def stored(store, **changes):
    """Replace the stored decision by a changed one."""
    (decision,) = Catalogue(store).all()
    Catalogue(store).add(replace(decision, **changes))
    torch._dynamo.reset()
    process_memory.forget_process()


def test_a_decision_is_remembered(auto, races, store):
    """The second compile, in another process, looks the decision up."""
    x = torch.randn(8, 64)
    for _ in range(2):
        assert torch.equal(auto(chain)(x), chain(x))
        torch._dynamo.reset()
        process_memory.forget_process()
    assert races.count == 1


def test_never_racing_takes_default(auto, store, log):
    """With race="never" and no stored decision, default is compiled."""
    x = torch.randn(8, 64)
    assert torch.allclose(auto(chain, race="never")(x), chain(x))
    assert logged(log) == "auto: default for a graph not raced: race='never', and no decision is stored (0.0 s)"
    assert not store.exists()


def test_never_racing_inherits_nothing(auto, races, log):
    """With race="never", the winner of another graph's race is not inherited."""
    races.winner, races.options = "cpp_wrapper", {"cpp_wrapper": True}
    auto(chain)(torch.randn(8, 64))
    auto(torch.sin, race="never")(torch.randn(8))
    assert logged(log).startswith("auto: default for a graph not raced")


def test_the_process_has_a_budget(auto, races, log):
    """When a process has spent its budget for races, further graphs use default."""
    auto(chain)(torch.randn(8, 64))
    auto(lambda x: chain(x).exp(), process_budget_s=0.0)(torch.randn(8, 64))
    assert logged(log) == "auto: default for a graph not raced: the process has spent its 0 s on races (0.0 s)"


def test_what_races_take_is_counted(auto, log):
    """The seconds of a process's races add up, whatever their outcome."""
    for fn in (chain, lambda x: chain(x).exp()):
        auto(fn, process_budget_s=1e-4)(torch.randn(8, 64))
    assert logged(log) == "auto: default for a graph not raced: the process has spent its 0.0001 s on races (0.0 s)"


def test_what_stood_in_decides_nothing(auto, races):
    """A graph that was not raced for lack of budget is raced later."""
    for budget_s in (0, 60):
        auto(chain, budget_s=budget_s)(torch.randn(8, 64))
        torch._dynamo.reset()
    assert races.count == 1


def test_the_users_option_beats_the_winners(auto, races):
    """If user and winner set the same option, Inductor gets the user's value and the winner's other options."""
    seen = []

    def watch(graph):
        seen.append((config.epilogue_fusion, config.max_fusion_size))

    backend_kwargs.register_template("mine", {"epilogue_fusion": True, "max_fusion_size": 7})
    races.winner, races.options = "mine", {"epilogue_fusion": True, "max_fusion_size": 7}
    auto(chain, ["mine"], epilogue_fusion=False, post_grad_custom_post_pass=watch)(torch.randn(8, 64))
    assert seen == [(False, 7)]


def test_recompiles_inherit(auto, races, log):
    """Beyond `most_races`, other sizes of one computation reuse the latest winner without a race."""
    compiled = torch.compile(chain, backend=backend_of(most_races=1), dynamic=False)
    for size in (64, 32):
        compiled(torch.randn(8, size))
    assert races.count == 1
    assert logged(log) == "auto: eager for a graph not raced: it was raced for 1 other sizes (0.0 s)"


def test_tiny_graphs_inherit(races, log):
    """After a first race, a graph of two operators on little data reuses the latest winner."""
    races.winner, races.options = "cpp_wrapper", {"epilogue_fusion": True}
    torch.compile(chain, backend=backend_of())(torch.randn(8, 64))
    torch.compile(torch.sin, backend=backend_of())(torch.randn(8))
    assert races.count == 1
    assert logged(log) == "auto: cpp_wrapper for a graph not raced: it is tiny (0.0 s)"


def test_tiny_graphs_inherit_when_the_budget_is_spent(races, log):
    """A tiny graph reuses the latest winner even if the process's budget is spent."""
    races.winner, races.options = "cpp_wrapper", {"epilogue_fusion": True}
    torch.compile(chain, backend=backend_of(process_budget_s=100.0))(torch.randn(8, 64))
    process_memory.memory().race_seconds.append(100.0)
    torch.compile(torch.sin, backend=backend_of(process_budget_s=100.0))(torch.randn(8))
    assert logged(log) == "auto: cpp_wrapper for a graph not raced: it is tiny (0.0 s)"


def test_always_races_tiny_graphs_and_all_sizes(races):
    """Under race="always" no graph reuses the winner of another."""
    for size in (8, 16, 24):
        backend = backend_of(race="always", most_races=1)
        torch.compile(chain, backend=backend, dynamic=False)(torch.randn(size, 64))
        torch.compile(torch.sin, backend=backend, dynamic=False)(torch.randn(size))
    assert races.count == 6


def test_a_decision_is_logged_with_its_table_once(races, log):
    """A graph that is compiled again, as between training and evaluation, is logged in one line."""
    for _ in range(3):
        torch.compile(chain, backend=backend_of())(torch.randn(8, 64))
        torch._dynamo.reset()
    lines = [line.splitlines() for line in log.messages if line.startswith("auto: ")]
    assert [len(each) > 1 for each in lines] == [True, False, False]
    assert lines[1] == [f"{lines[0][0]}, as decided before"]


def test_inputs_without_memory_are_not_raced(races, log):
    """If an input is not a plain tensor, such as a fake of DDP's optimizer, default is compiled."""
    gm = torch.fx.symbolic_trace(chain)
    with torch._subclasses.FakeTensorMode() as mode:
        backend_of()(gm, [mode.from_tensor(torch.randn(8, 64))])
    assert logged(log) == "auto: default for a graph not raced: an input is not a plain tensor (0.0 s)"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo asks a tensor with history for it
def test_an_input_that_trains_and_is_changed_is_not_raced(races, log):
    """A graph that changes an input in place which requires gradients is not raced."""

    def step(x):
        return x.mul_(2).sum()

    weight = torch.ones(8, requires_grad=True)
    torch.compile(step, backend=backend_of())(weight * 1).backward()
    assert torch.equal(weight.grad, torch.full((8,), 2.0))
    assert logged(log) == "auto: default for a graph not raced: it changes in place an input that requires grad (0.0 s)"


def test_a_larger_budget_races_again(auto, races):
    """A decision that was cut by its budget is used for equal or smaller budgets, and for race="never"."""
    races.cut, x = True, torch.randn(8, 64)
    for options in ({"budget_s": 1.0}, {"budget_s": 1.0}, {"race": "never"}, {"budget_s": 2.0}):
        torch._dynamo.reset()
        auto(chain, **options)(x)
    assert races.count == 2


def test_a_race_that_fails_falls_back(auto, monkeypatch, store, log):
    """If a race fails, default is compiled, a warning gives the reason, and nothing is stored."""

    def out_of_memory(request, tick):
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(race, "race", out_of_memory)
    x = torch.randn(8, 64)
    why = "its race failed: OutOfMemoryError: planted"
    with pytest.warns(BackendKwargsWarning) as warned:
        assert torch.allclose(auto(chain)(x), chain(x))
    assert str(warned[0].message) == f"A graph is compiled under default: {why}"
    assert logged(log) == f"auto: default for a graph not raced: {why} (0.0 s)"
    assert not store.exists()


def test_a_stored_winner_that_fails_falls_back(auto, planted, races, log):
    """If a stored winner no longer compiles, default is compiled, with a warning."""
    races.winner, races.options = "crash", dict(backend_kwargs.make_backend("tmpl-inductor:crash").options)
    x = torch.randn(8, 64)
    with pytest.warns(BackendKwargsWarning) as warned:
        assert torch.allclose(auto(chain)(x), chain(x))
    why = "the chosen crash failed: InductorError: RuntimeError: planted"
    assert str(warned[-1].message) == f"A graph is compiled under default: {why}"
    assert logged(log) == f"auto: default for a graph not raced: {why} (0.0 s)"
    assert not process_memory.memory().decisions


@pytest.mark.parametrize("fails", [True, False], ids=["compile fails", "compiles"])
def test_default_gets_the_graph_as_it_was(races, fails):
    """If the winner changes the graph and fails, default compiles the original graph."""
    races.winner, races.options = "cpp_wrapper", {"cpp_wrapper": True}

    def compile_one(graph, options, compiler):
        gm = graph.gm
        if options:
            gm.graph.find_nodes(op="output")[0].args = ((gm.graph.find_nodes(op="placeholder")[0],),)
            gm.recompile()
            if fails:
                raise RuntimeError("planted")
        return Compiled(gm.forward)

    x = torch.randn(8, 64)
    given = CapturedGraph(torch.fx.symbolic_trace(chain), [x]), RaceSettings(candidates=("cpp_wrapper",)), compile_one
    request = Request(*given, lambda name: {}, lambda options: {}, {})
    with pytest.warns(BackendKwargsWarning) if fails else contextlib.nullcontext():
        compiled = decide.compile_fastest(request).call
    assert torch.equal(compiled(x), chain(x)) if fails else compiled(x)[0] is x


def after_a_race(auto, races, **options):
    """Let "one_thread" win a race with `options`, so that later graphs can inherit it."""
    races.winner, races.options = "one_thread", {"cpp.threads": 1}
    auto(chain, **options)(torch.randn(8, 64))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("options", "state", "inherits"),
    [
        pytest.param({}, torch.enable_grad, True, id="same"),
        pytest.param({"candidates": ["slow"]}, torch.enable_grad, False, id="other candidates"),
        pytest.param({"epilogue_fusion": True}, torch.enable_grad, False, id="other options"),
        pytest.param({"store": "other"}, torch.enable_grad, False, id="other store"),
        pytest.param({}, torch.no_grad, False, id="without gradients"),
    ],
)
def test_a_tiny_graph_inherits_from_its_own_kind(
    auto, planted, races, log, tmp_path, monkeypatch, options, state, inherits
):
    """A tiny graph does not inherit the winner of a race with other candidates, such as freezing."""
    monkeypatch.chdir(tmp_path)
    after_a_race(auto, races)
    with state():
        auto(lambda x: x + 1, **options)(torch.randn(4))
    assert (logged(log) == "auto: one_thread for a graph not raced: it is tiny (0.0 s)") is inherits


@pytest.mark.parametrize("race", ["missing", "never"])
def test_a_store_is_asked_for_itself(auto, races, tmp_path, race):
    """A decision made for one store is not used for another."""
    x = torch.randn(8, 64)
    auto(chain, store=str(tmp_path / "one"))(x)
    torch._dynamo.reset()
    auto(chain, store=str(tmp_path / "two"), race=race)(x)
    assert races.count == (2 if race == "missing" else 1)
    assert len(Catalogue(tmp_path / "two").all()) == (race == "missing")


def test_a_lower_precision_is_told_with_its_error(auto, monkeypatch, log):
    """The winner's error stands beside its bound."""
    row = RaceRow("default", seconds=1e-4, won=True, error=0.00123, max_error=0.01)
    monkeypatch.setattr(race, "race", lambda *_: race.RaceResult(row, (row,), "3 ops", 0.1, cut=False))
    auto(chain)(torch.randn(8, 64))
    assert logged(log) == "auto: default for 3 ops, error 0.0012 (max_error=0.01) (0.1 s)"


def test_a_step_over_a_template_is_remembered(auto, races):
    """A winner that combines a step and a user's template is used again."""
    backend_kwargs.register_template("unfused", {"epilogue_fusion": False})
    races.winner, races.options = "cpp_wrapper", {"epilogue_fusion": False, "cpp_wrapper": True}
    for _ in range(2):
        auto(chain, ["unfused", "cpp_wrapper"])(torch.randn(8, 64))
        torch._dynamo.reset()
    assert races.count == 1


def test_the_users_options_are_told(auto, races, store):
    """A decision contains the user's own options, for export."""
    auto(chain, epilogue_fusion=True)(torch.randn(8, 64))
    (decision,) = Catalogue(store).all()
    assert decision.fixed == {"epilogue_fusion": True}


def test_always_means_always(auto, races):
    """With race="always", the same size again is not counted as another size."""
    for _ in range(3):
        auto(chain, race="always", most_races=1)(torch.randn(8, 64))
        torch._dynamo.reset()
    assert races.count == 3


def test_a_decision_for_other_sizes_is_named(auto, races, log):
    """With race="never", the log says that the computation was raced, but at other sizes."""
    auto(chain, most_races=1)(torch.randn(8, 64))
    torch._dynamo.reset()
    process_memory.forget_process()
    auto(chain, race="never", most_races=1)(torch.randn(9, 64))
    why = "race='never', and a decision is stored only for other sizes"
    assert logged(log) == f"auto: default for a graph not raced: {why} (0.0 s)"


def test_a_decision_for_another_machine_is_named(auto, races, log, monkeypatch):
    """With race="never", the log says in what the machine of a stored decision differs from this one."""
    here = question.machine()
    with monkeypatch.context() as there:
        there.setattr(question, "machine", lambda *_: here | {"threads": 77})
        auto(chain)(torch.randn(8, 64))
    torch._dynamo.reset()
    process_memory.forget_process()
    auto(chain, race="never")(torch.randn(8, 64))
    threads = here["threads"]
    differs = f"threads 77 (here {threads})"
    why = f"race='never', and a decision is stored only for another machine: {differs}; match='device' uses it"
    assert logged(log) == f"auto: default for a graph not raced: {why} (0.0 s)"


def test_a_race_has_what_the_process_has_left(auto, races, store, monkeypatch):
    """A graph's budget is at most the rest of the process's, and a decision records the budget that ended its race."""
    budgets = []
    monkeypatch.setattr(
        race, "race", lambda request, tick: budgets.append(request.settings.budget_s) or races(request, tick)
    )
    races.cut = True
    process_memory.memory().race_seconds.append(90.0)
    auto(chain, process_budget_s=100)(torch.randn(8, 64))
    (decision,) = Catalogue(store).all()
    assert (budgets, decision.cut_s) == ([10.0], 10.0)


def test_a_process_that_has_spent_its_budget_takes_what_is_stored(auto, races, store, log):
    """A process without budget uses stored decisions, even those that a larger budget would race again."""
    x = torch.randn(8, 64)
    races.cut = True
    auto(chain, budget_s=5)(x)
    torch._dynamo.reset()
    process_memory.forget_process()
    process_memory.memory().race_seconds.append(1000.0)
    auto(chain, budget_s=60)(x)
    assert (races.count, logged(log)) == (1, "auto: eager for 3 ops (0.1 s)")


def test_the_rest_of_a_process_is_no_larger_budget(auto, races, store, log):
    """What a race found within 5 s is not raced again for 2 s, the rest of the process's budget."""
    x = torch.randn(8, 64)
    races.cut = True
    auto(chain, budget_s=5)(x)
    torch._dynamo.reset()
    process_memory.forget_process()
    process_memory.memory().race_seconds.append(58.0)
    auto(chain, budget_s=30, process_budget_s=60)(x)
    assert races.count == 1


@pytest.mark.parametrize(
    ("first", "then", "kept"),
    [
        pytest.param((False, 5), (True, 300), "eager", id="cut, after one that ended"),
        pytest.param((True, 5), (True, 0.1), "eager", id="cut earlier"),
        pytest.param((True, 5), (True, 300), "default", id="cut later"),
        pytest.param((True, 5), (False, 0.1), "default", id="not cut"),
    ],
)
def test_a_race_with_less_time_replaces_no_other(auto, races, store, first, then, kept):
    """Under race='always', a race that was cut short does not replace the decision of one that had more time."""
    x = torch.randn(8, 64)
    for winner, (cut, budget_s) in (("eager", first), ("default", then)):
        races.winner, races.cut = winner, cut
        auto(chain, race="always", budget_s=budget_s)(x)
        torch._dynamo.reset()
    (decision,) = Catalogue(store).all()
    assert (races.count, decision.winner) == (2, kept)


def checkpointed(p):
    def part(x):
        return torch.nn.functional.dropout((x * 2).sin(), p)

    return lambda x: torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False).sum()


def test_what_is_drawn_again_is_not_raced(auto, log):
    """A checkpoint that redraws random numbers is not raced, since eager's output and gradients use different ones."""
    x = torch.randn(8, 64, requires_grad=True)
    auto(checkpointed(0.5))(x).backward()
    why = "activation checkpointing with random operators is not reproducible in eager"
    assert logged(log) == f"auto: default for a graph not raced: {why} (0.0 s)"


def test_a_checkpoint_that_draws_nothing_is_raced(auto, store):
    """A checkpoint without random operators is raced, since recomputation gives the same result."""
    x = torch.randn(8, 64, requires_grad=True)
    auto(checkpointed(0.0))(x).backward()
    (decision,) = Catalogue(store).all()
    assert {row.name: row.status for row in decision.rows} == {"eager": "pass", "default": "pass"}


def test_a_graph_with_state_is_not_raced(log):
    """A graph that contains modules, as when a user calls a backend directly, is not raced: a race changes state."""
    norm = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.BatchNorm1d(8)))
    with torch.no_grad():
        backend_of()(norm, [torch.randn(4, 8)])
    assert norm.get_submodule("0").num_batches_tracked == 0
    why = "it contains tensors, which a race would change"
    assert logged(log) == f"auto: default for a graph not raced: {why} (0.0 s)"


def test_no_budget_is_no_race(auto, races, store, log):
    """With a budget of 0 s nothing is raced, and no decision is stored."""
    auto(chain, budget_s=0)(torch.randn(8, 64))
    assert logged(log) == "auto: default for a graph not raced: its budget is 0 s (0.0 s)"
    assert not store.exists()


def test_a_size_unknown_before_it_runs_is_not_raced(auto, log):
    """A graph with sizes that are unknown before it runs has no real inputs, and is not raced."""
    x = torch.randn(8, 64)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    assert torch.allclose(auto(chain)(x), chain(x))
    assert logged(log) == "auto: default for a graph not raced: a size is unknown until it runs (0.0 s)"


def test_imported_eager_is_no_failure(auto, races, store, log):
    """An imported decision for eager, which has no table, causes no warning."""
    x = torch.randn(8, 64)
    auto(chain)(x)
    stored(store, rows=())
    log.clear()
    assert torch.equal(auto(chain)(x), chain(x))
    assert [message.splitlines()[0] for message in log.messages] == ["auto: eager for 3 ops (0.1 s)"]


@AHEAD_OF_TIME
@pytest.mark.parametrize("imported", [False, True], ids=["raced", "imported"])
@torch.no_grad()
def test_aot_compile(races, store, tmp_path, imported):
    """Eager cannot be saved, so `aot_compile()` uses the fastest compiled candidate, or else default."""
    x = torch.randn(8, 64)
    if imported:
        torch.compile(chain, backend=backend_of())(x)
        stored(store, rows=())
    ahead = torch.compile(chain, backend=backend_of(), fullgraph=True).aot_compile(((x,), {}))
    ahead.save_compiled_function(str(tmp_path / "saved"))
    with (tmp_path / "saved").open("rb") as file:
        assert torch.allclose(torch.compiler.load_compiled_function(file)(x), chain(x))


@AHEAD_OF_TIME
@torch.no_grad()
def test_aot_compile_takes_no_strangers_options(races, store, log):
    """If eager won, `aot_compile()` does not use a stored row whose options belong to no candidate."""
    x = torch.randn(8, 64)
    torch.compile(chain, backend=backend_of())(x)
    (decision,) = Catalogue(store).all()
    row = replace(decision.rows[-1], name="cpp_wrapper", options={"cpp.threads": 7}, seconds=1e-9)
    stored(store, rows=(*decision.rows, row))
    torch.compile(chain, backend=backend_of(), fullgraph=True).aot_compile(((x,), {}))
    assert logged(log) == "auto: default for 3 ops (0.1 s)"


def test_a_winners_option_of_another_value_is_a_strangers(auto, races, store):
    """A stored winner with an option value that the step of its name does not set is raced, not compiled."""
    races.winner, races.options = "one_thread", {"cpp.threads": 1}
    auto(chain)(torch.randn(8, 64))
    stored(store, options={"cpp.threads": 7})
    auto(chain)(torch.randn(8, 64))
    assert races.count == 2


@AHEAD_OF_TIME
@torch.no_grad()
def test_aot_compile_takes_the_fastest_that_can_be_saved(monkeypatch, log, tmp_path):
    """Copies of CUDA-graph outputs cannot be saved, so the next fastest candidate is used."""
    fastest = RaceRow("cudagraphs", {"triton.cudagraphs": True}, seconds=1.0, won=True)
    slower = [
        RaceRow("one_thread", {"cpp.threads": 1}, seconds=2.0),
        RaceRow("default", seconds=3.0),
        RaceRow("eager", seconds=1.5),
    ]
    monkeypatch.setattr(race, "race", lambda *_: race.RaceResult(fastest, (*slower, fastest), "3 ops", 0.1, False))
    x = torch.randn(8, 64)
    ahead = torch.compile(chain, backend=backend_of(), fullgraph=True).aot_compile(((x,), {}))
    ahead.save_compiled_function(str(tmp_path / "saved"))
    assert logged(log) == "auto: one_thread for 3 ops (0.1 s)"
    with (tmp_path / "saved").open("rb") as file:
        assert torch.allclose(torch.compiler.load_compiled_function(file)(x), chain(x))


def test_compare_races_anew(races, store):
    """With an empty cache the compile time includes a race, and the user's store does not change."""
    torch.compile(chain, backend=backend_of())(torch.randn(8, 64))
    before = Catalogue(store).all()
    torch._dynamo.reset()
    compare(chain, torch.randn(8, 64), [Candidate("auto", backend_of())], rounds=2)
    assert races.count == 2
    assert Catalogue(store).all() == before
    assert [each.key for each in process_memory.memory().decisions.values()] == [before[0].key]


COMPILED = """
import sys, torch, backend_kwargs
from backend_kwargs.facts import decision
decision.is_unclear = lambda ratio: False  # a busy machine is no failure
backend = backend_kwargs.make_backend("tmpl-inductor:auto", candidates=[], budget_s=300.0)
torch.compile(lambda x: torch.relu(x * 2 + 1).sum(-1), backend=backend)(torch.randn(8, 64))
print("backend_kwargs.auto.race" in sys.modules)
"""


def test_a_stored_decision_loads_no_race(tmp_path):
    """A process that races imports the race; one that finds a stored decision does not."""
    places = {"BACKEND_KWARGS_STORE": str(tmp_path / "store"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    loaded = [forks.run("-c", COMPILED, env=os.environ | places).stdout for _ in range(2)]
    assert loaded == ["True\n", "False\n"]
