"""Other compilers as candidates of a race: checked at once, raced, remembered, and used only where listed."""

import pytest
import torch

import backend_kwargs as bk
from backend_kwargs.auto.candidates import allowed_candidates, trusted
from backend_kwargs.auto.decisions_toml import read_decisions, write_decisions
from backend_kwargs.auto.process_memory import forget_process
from backend_kwargs.auto.settings import RaceSettings
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.backends.others import OTHERS

pytest.importorskip("tvm")
TVM = "tmpl-tvm[exec_mode=compiled]"


def options_of(name):
    """Return the options of a template."""
    return bk.make_backend(f"tmpl-inductor:{name}").options


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Softmax(-1)).eval()


def raced(candidates, **options):
    """Return the race of the only graph of a small network."""
    module = net()
    options = {"budget_s": 300.0, **options}  # so that none is skipped on a slow machine
    compiled = torch.compile(module, backend=bk.make_backend("tmpl-inductor:auto", candidates=candidates, **options))
    with torch.no_grad():
        torch.testing.assert_close(compiled(INPUT), module(INPUT), rtol=1e-4, atol=1e-4)
    return bk.report(compiled).graphs[0].race


INPUT = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))


def test_a_row_and_its_decision_name_the_compiler(store):
    """A row contains the compiler's own options, and neither Inductor's nor the user's."""
    row = raced([TVM]).rows[-1]
    assert (row.name, row.compiler, row.options, row.status) == (TVM, "tmpl-tvm", {"exec_mode": "compiled"}, "pass")


def test_a_winner_of_another_compiler_is_remembered(store, monkeypatch):
    """A later process takes the winner from the store and compiles it with that compiler, without a race."""
    _let_challengers_win(monkeypatch)
    assert raced([TVM]).compiler == "tmpl-tvm"
    forget_process()
    torch._dynamo.reset()
    module = net()
    compiled = torch.compile(module, backend=bk.make_backend("tmpl-inductor:auto", candidates=[TVM], race="never"))
    with torch.no_grad():
        compiled(INPUT)
    graph = bk.report(compiled).graphs[0]
    assert (graph.race.winner, graph.race.compiler, len(graph.relax.partitions)) == (TVM, "tmpl-tvm", 1)
    with pytest.raises(bk.BackendKwargsError, match=r"^Backend 'tmpl-tvm' has no options of Inductor\.$"):
        graph.inductor_config()


def test_what_is_pinned_where_another_compiler_has_won(store, monkeypatch, tmp_path):
    """A lock has the fastest of Inductor's candidates, and serves by it."""
    _let_challengers_win(monkeypatch)
    race = raced([TVM])
    assert race.compiler == "tmpl-tvm"
    own = min((row for row in race.rows if row.seconds and not row.compiler), key=lambda row: row.seconds)
    module, lock = net(), tmp_path / "k.lock"
    with torch.no_grad():
        serving = bk.pin(module, INPUT, lock=lock, backend=bk.make_backend("tmpl-inductor:auto", candidates=[TVM]))
        # Eager is pinned under deterministic algorithms alone.
        assert f'"winner" = "{"default" if own.name == "eager" else own.name}"' in lock.read_text()
        compiled = torch.compile(module, backend=bk.make_backend(serving, strict=True))
        torch.testing.assert_close(compiled(INPUT), module(INPUT), rtol=1e-4, atol=1e-4)


def test_a_step_after_another_compiler_is_merged_onto_inductors_best(store, monkeypatch):
    """A step after a TVM candidate is merged onto Inductor's best options, not onto TVM's."""
    _let_challengers_win(monkeypatch)
    rows = {row.name: row for row in raced(["no_size_asserts", TVM, "cpp_wrapper"]).rows}
    assert rows["cpp_wrapper"].options == {"size_asserts": False, "cpp_wrapper": True}
    assert rows["cpp_wrapper"].against == TVM


def test_parameters_are_constants_only_where_the_caller_froze_them(store):
    """TVM's `freeze` follows Inductor's `freezing`."""
    assert raced(["tmpl-tvm"]).rows[-1].options == {}
    torch._dynamo.reset()
    assert raced(["tmpl-tvm"], freezing=True).rows[-1].options == {"freeze": True}


def test_random_numbers_are_left_to_inductor(store):
    """No other compiler is raced for a graph with random numbers, since it would draw different ones."""
    module = torch.nn.Sequential(net(), torch.nn.Dropout())
    compiled = torch.compile(module, backend=bk.make_backend("tmpl-inductor:auto", candidates=["tmpl-tvm"]))
    with torch.no_grad():
        compiled(INPUT)
    row = bk.report(compiled).graphs[0].race.rows[-1]
    assert (row.status, row.reason) == ("skipped", "it draws other random numbers than Inductor")


def test_what_a_compiler_leaves_to_eager_is_no_result_of_it(store):
    """If a compiler leaves the whole graph to eager, its row says so instead of showing a time."""

    def cumulated(x):
        return torch.cumsum(x, 0), torch.cumsum(x, 1), torch.cumsum(x, 0)

    compiled = torch.compile(cumulated, backend=bk.make_backend("tmpl-inductor:auto", candidates=["tmpl-tvm"]))
    compiled(torch.randn(600, 600))
    row = bk.report(compiled).graphs[0].race.rows[-1]
    assert row.status == "fell_back"
    assert row.reason == "all of it runs in eager: cumsum: a running result has no parallel loop"


def test_full_effort_races_those_installed(store):
    """Without a list of candidates, effort="full" races the steps and, on a CPU, the installed compilers."""
    assert "tmpl-tvm" in [row.name for row in raced(None, effort="full").rows]


WANTED = (
    "must be a step, a template without its backend, such as 'freezing', or one of the compilers "
    f"{', '.join(OTHERS)}, which alone take options in brackets."
)
WRONG = {
    "tmpl-tvm[trails=1]": "Unknown TVM option 'trails'. Did you mean 'trials'?",
    "tmpl-tvm[exec_mode=fast]": "TVM option 'exec_mode' must be 'bytecode' | 'compiled', got 'fast' (str).",
    "tmpl-tvm[work_dir=/tmp]": "Candidate 'tmpl-tvm[work_dir=/tmp]' sets 'work_dir', which is code; "
    "a candidate may set only data: leave it out.",
    "tmpl-tvn[trials=1]": "Candidate 'tmpl-tvn[trials=1]' must be a compiler's name, with its options in brackets: "
    "'tmpl-tvm[trials=64]'.",
    "tmpl-inductor:auto": f"Candidate 'tmpl-inductor:auto' {WANTED}",
    "mine[trials=1]": f"Candidate 'mine[trials=1]' {WANTED}",
    "auto": "Candidate 'auto' enables `auto`; races cannot be nested; leave it out.",
    "tmpl-tvn": "Unknown candidate 'tmpl-tvn'. Did you mean 'tmpl-tvm'?",
}


@pytest.mark.parametrize("candidate", WRONG)
def test_a_wrong_candidate_raises_at_once(candidate):
    """A wrong candidate raises before anything is compiled."""
    with pytest.raises(bk.BackendKwargsError) as raised:
        bk.make_backend("tmpl-inductor:auto", candidates=[candidate])
    assert str(raised.value) == WRONG[candidate]


@pytest.mark.parametrize(
    ("winner", "compiler", "options", "listed", "wanted"),
    [
        pytest.param("tmpl-tvm", "tmpl-tvm", {}, ("tmpl-tvm",), True, id="listed"),
        pytest.param("tmpl-tvm", "tmpl-tvm", {"freeze": True}, ("tmpl-tvm",), True, id="listed, frozen"),
        pytest.param("tmpl-tvm", "tmpl-tvm", {}, ("freezing",), False, id="another is listed"),
        pytest.param("tmpl-tvm", "tmpl-tvm", {"target": "llvm"}, ("tmpl-tvm",), False, id="an option that it sets not"),
        pytest.param(
            "tmpl-tvm", "tmpl-openvino-native", {}, ("tmpl-tvm",), False, id="another compiler under its name"
        ),
        pytest.param("tmpl-tvm", "", {}, ("tmpl-tvm",), False, id="no compiler under its name"),
        pytest.param("default", "tmpl-tvm", {}, ("default",), False, id="a step's name"),
        pytest.param("tmpl-openvino", "tmpl-openvino", {}, ("tmpl-openvino",), False, id="a compiler that was removed"),
    ],
)
def test_a_stored_decision_may_name_another_compiler_only_where_it_is_listed(winner, compiler, options, listed, wanted):
    """A file of decisions cannot choose a compiler that the caller did not list."""
    allowed = allowed_candidates(RaceSettings(candidates=listed), options_of)
    assert trusted(winner, options, compiler, allowed) is wanted


def test_toml_names_the_compiler(store, tmp_path, monkeypatch):
    """The compiler is written to TOML and read back, and is not a template of Inductor."""
    _let_challengers_win(monkeypatch)
    raced([TVM])
    (held,) = Catalogue().all()
    write_decisions([held], tmp_path / "decisions.toml")
    text = (tmp_path / "decisions.toml").read_text()
    assert '"compiler" = "tmpl-tvm"' in text
    assert "[templates" not in text
    (read,) = read_decisions(tmp_path / "decisions.toml", options_of)
    assert (read.winner, read.compiler, read.options) == (TVM, "tmpl-tvm", {"exec_mode": "compiled"})
    whys = {
        "tmpl-openvino-native": "by 'tmpl-openvino-native', which candidate 'tmpl-tvm",
        "tmpl-openvino": "names 'tmpl-openvino', which was removed",
    }
    for other, why in whys.items():
        (tmp_path / "decisions.toml").write_text(text.replace('"tmpl-tvm"', f'"{other}"'))
        with pytest.raises(bk.BackendKwargsError, match=why):
            read_decisions(tmp_path / "decisions.toml", options_of)


def _let_challengers_win(monkeypatch):
    from backend_kwargs.auto import race

    monkeypatch.setattr(race, "better", lambda challenger, champion, objective: True)
    monkeypatch.setattr(race, "is_slower", lambda best, eager: False)
