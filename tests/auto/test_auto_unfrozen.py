"""`freezing=True` under auto permits freezing: code that is not frozen is raced too, and kept where it is faster."""

import pytest
import torch
from torch import nn

import backend_kwargs as bk
from backend_kwargs.auto import process_memory, race
from backend_kwargs.auto.decisions_toml import read_decisions, write_decisions
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.bundles.graphs import under_decision
from backend_kwargs.cache_artifacts import save_cache_artifacts
from backend_kwargs.options.templates import find_template
from tests.auto.graphs import rows_of

pytestmark = pytest.mark.filterwarnings("ignore:.*cannot act fully here")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32)).eval()


X = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def call(compiled, x=X):
    return compiled(x)


@pytest.fixture
def wins(monkeypatch):
    """Return a function that lets the candidates with these names win, and no others but default."""

    def named(*names):
        def better(challenger, champion, objective):
            return challenger.candidate.name in ("default", *names)

        monkeypatch.setattr(race, "better", better)
        monkeypatch.setattr(race, "is_slower", lambda best, eager: False)

    return named


def test_it_is_raced_beside_named_candidates(auto, store, wins):
    """With freezing=True the unfrozen code is raced first, whichever candidates are named."""
    wins()
    call(auto(net(), ["no_size_asserts"], freezing=True))
    rows = rows_of(store)
    assert list(rows) == ["eager", "default", "unfrozen", "no_size_asserts"]
    assert (rows["unfrozen"].status, rows["unfrozen"].options) == ("pass", {"freezing": False})
    assert rows["unfrozen"].predicted_s > 0


def test_an_unfrozen_winner_takes_its_weights_as_inputs(auto, store, wins):
    """An unfrozen winner sees in-place changes, and a replaced parameter does not compile it again."""
    wins("unfrozen")
    model = net()
    compiled = auto(model, freezing=True)
    call(compiled)
    with torch.no_grad():
        model[0].weight.mul_(2)
    torch.testing.assert_close(call(compiled), model(X).detach())
    model[2].weight = nn.Parameter(torch.randn(32, 96))
    torch.testing.assert_close(call(compiled), model(X).detach())
    (graph,) = bk.report(compiled).graphs
    assert (graph.race.winner, graph.race.options, graph.recompiled) == ("unfrozen", {"freezing": False}, "")
    assert graph.inductor_config()["freezing"] is False


def test_a_frozen_winner_stays_frozen(auto, store, wins):
    """Where frozen code is the faster one it is kept, and a replaced parameter compiles it again."""
    wins()
    model = net()
    compiled = auto(model, freezing=True)
    before = call(compiled)
    with torch.no_grad():
        model[0].weight.data.mul_(2)
    assert torch.equal(call(compiled), before)
    model[2].weight = nn.Parameter(torch.randn(32, 96))
    torch.testing.assert_close(call(compiled), model(X).detach())
    assert [graph.compile_id for graph in bk.report(compiled).graphs] == ["0/1"]  # the former code is freed


def test_a_later_process_compiles_it_unfrozen(auto, store, wins):
    """A stored decision for unfrozen code is used without a race."""
    wins("unfrozen")
    call(auto(net(), freezing=True))
    process_memory.forget_process()
    torch._dynamo.reset()
    model = net()
    compiled = auto(model, freezing=True, race="never")
    call(compiled)
    with torch.no_grad():
        model[0].weight.mul_(2)
    torch.testing.assert_close(call(compiled), model(X).detach())


@pytest.mark.parametrize("step", ["max_autotune", "bf16"])
def test_a_step_that_needs_constants_is_frozen_again(auto, store, wins, step):
    """Inductor's own GEMMs and a lower precision are raced frozen even after unfrozen code won."""
    wins("unfrozen")
    bf16 = {"precision": "bf16", "max_error": 0.01} if step == "bf16" else {}
    call(auto(net(), [] if bf16 else [step], freezing=True, **bf16))
    rows = rows_of(store)
    assert rows["unfrozen"].won
    assert "freezing" not in rows[step].options


def test_other_steps_join_it(auto, store, wins):
    """Another step is merged onto the options of an unfrozen winner."""
    wins("unfrozen", "no_size_asserts")
    compiled = auto(net(), ["no_size_asserts"], freezing=True)
    call(compiled)
    assert rows_of(store)["no_size_asserts"].options == {"freezing": False, "size_asserts": False}
    assert bk.report(compiled).graphs[0].inductor_config()["freezing"] is False


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param(net(), {}, id="freezing is not set"),
        pytest.param(net(), {"freezing": False}, id="freezing is refused"),
        pytest.param(lambda x: torch.relu(x * 2 + 1).sum(-1), {"freezing": True}, id="no parameter"),
    ],
)
def test_without_frozen_parameters_it_is_not_raced(auto, store, model, options):
    """Unfrozen code is not raced where the same code is default, even if named."""
    call(auto(model, ["unfrozen"], **options))
    row = rows_of(store)["unfrozen"]
    assert (row.status, row.reason) == ("skipped", "no parameter is frozen here")
    torch._dynamo.reset()
    process_memory.forget_process()
    call(auto(model, [], **options))
    assert set().union(*(decision.options for decision in Catalogue(store).all())) == set()


def test_with_gradients_it_is_not_raced(auto, store):
    """Nothing is frozen while gradients are recorded, which a warning says, so there is nothing to race."""
    with pytest.warns(bk.BackendKwargsWarning, match="^Option 'freezing' is inert while gradients are recorded"):
        auto(net(), freezing=True)(X)
    assert "unfrozen" not in rows_of(store)


def test_a_refusal_stands(auto, store):
    """freezing=False is a constraint: a candidate that would freeze is skipped."""
    call(auto(net(), ["freezing"], freezing=False))
    row = rows_of(store)["freezing"]
    assert (row.status, row.reason) == ("skipped", "it can do nothing here: your options set it otherwise")


def test_toml(auto, store, wins, tmp_path):
    """A file of decisions contains the choice, and its template compiles unfrozen code."""
    wins("unfrozen")
    call(auto(net(), freezing=True))
    (decision,) = Catalogue(store).all()
    assert decision.fixed["freezing"] is True
    write_decisions([decision], tmp_path / "decisions.toml")
    (read,) = read_decisions(tmp_path / "decisions.toml", lambda name: find_template(name).options)
    assert (read.winner, read.options) == ("unfrozen", {"freezing": False})
    (template,) = bk.load_templates(tmp_path / "decisions.toml")
    assert bk.make_backend(f"tmpl-inductor:{template}").options["freezing"] is False


@pytest.mark.parametrize(
    ("winner", "count"), [pytest.param("default", 1, id="frozen"), pytest.param("unfrozen", 0, id="unfrozen")]
)
def test_artifacts_lack_only_frozen_winners(auto, store, wins, recwarn, winner, count):
    """Saving artifacts warns about a graph whose winner is frozen, and only then."""
    wins(winner)
    compiled = auto(net(), freezing=True)
    call(compiled)
    recwarn.clear()
    save_cache_artifacts()
    assert sum("frozen, which bypasses Inductor's cache" in str(each.message) for each in recwarn) == count


def test_a_bundle_compiles_as_decided():
    """Where a bundle compiles a graph again, it is not frozen if it was raced as not frozen."""
    backend = bk.make_backend("tmpl-inductor:auto", freezing=True, epilogue_fusion=False)
    found = under_decision(backend, {"winner": "unfrozen", "options": {"freezing": False}}).options
    assert (found["freezing"], found["epilogue_fusion"], found["auto"]) == (False, False, False)
    found = under_decision(backend, {"winner": "cpp_wrapper", "options": {"cpp_wrapper": True}}).options
    assert (found["freezing"], found["cpp_wrapper"]) == (True, True)


@pytest.mark.parametrize(
    ("options", "status"),
    [
        pytest.param({"freezing": True}, "permitted: auto also races code without it", id="consent"),
        pytest.param({"freezing": True, "auto": False}, "changed", id="without auto"),
        pytest.param({"freezing": False}, "same as default", id="refusal"),
    ],
)
def test_explain(options, status):
    """`explain` says that auto decides whether to freeze."""
    found = {each.option: each.status for each in bk.explain("tmpl-inductor:auto", options).effects}
    assert found["freezing"] == status
