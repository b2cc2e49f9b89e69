"""`backend-kwargs tune`: races at each size, a file of decisions, and the lines to serve with."""

from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import backend_kwargs as bk
from backend_kwargs.auto import race
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.cli import app
from backend_kwargs.cli import measured as command
from backend_kwargs.cli.commands import sizes_of
from backend_kwargs.facts import decision
from backend_kwargs.facts.decision import Decision, RaceRow
from backend_kwargs.fleet import racing
from backend_kwargs.fleet.board import is_slower
from backend_kwargs.fleet.racing import Tuned
from backend_kwargs.page import read_document

FACTORY = """
import torch

def build(batch=2):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4)), torch.ones(batch, 16)
"""


QUICKLY = ("--option", "candidates=", "--option", "budget_s=600")


@pytest.fixture
def tune(tmp_path, monkeypatch):
    """Return a function that runs `tune` on a small model, and returns its result."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(FACTORY, encoding="utf-8")

    def run(*arguments, model="model.py:build", output="decisions.toml"):
        return CliRunner().invoke(app, ["tune", model, "-o", output, *arguments])

    return run


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Let no timing be noise, and no compiled call be slower than the model itself, whatever else this machine does."""
    monkeypatch.setattr(decision, "is_unclear", lambda ratio: False)
    monkeypatch.setattr(racing, "is_slower", lambda speedup, same: False)


def tuned(compiled_s, *further):
    rows = (RaceRow("default", seconds=9.0, won=True), *further)
    made = Decision("ab" * 32, "graph", "default", rows=rows, facts="3 ops", seconds=10.0, made=0.0)
    return Tuned("as given", [made], [1.0] * 8, [compiled_s] * 8, [compiled_s] * 8)


def test_where_the_model_itself_is_faster_there_is_no_line_to_paste(tune, monkeypatch):
    """The command says to call the model itself, and how much slower the compiled call is."""
    monkeypatch.setattr(racing, "is_slower", is_slower)
    monkeypatch.setattr(command, "_raced", lambda *given: ([tuned(9.0)], 0))
    ran = tune()
    assert ran.exit_code == 0, ran.output
    assert ran.output.splitlines()[-2:] == [
        "1 decision written to decisions.toml.",
        "Call the model itself (as given): the compiled call is 0.11x [0.11, 0.11] as fast.",
    ]


def test_what_is_provisional_is_not_written(tune, monkeypatch, tmp_path):
    """The command says what is open, and the budget that would settle it."""
    left = RaceRow("freezing", status="skipped", untried=True, predicted_s=30.0)
    monkeypatch.setattr(command, "_raced", lambda *given: ([tuned(0.5, left)], 0))
    ran = tune()
    open_ = "1 of 2 not tried; budget_s=50 would try all"
    assert str(ran.exception) == f"Nothing is written: provisional, so not one to ship: {open_}."
    assert not (tmp_path / "decisions.toml").exists()


def test_the_size_that_is_left_out_is_named(tune, monkeypatch):
    """Of two sizes one is written; of the other its name, and what is open."""
    left = tuned(0.5, RaceRow("freezing", status="skipped", untried=True, predicted_s=30.0))
    monkeypatch.setattr(command, "_raced", lambda *given: ([tuned(0.5), replace(left, label="batch=8")], 0))
    why = "provisional, so not one to ship: 1 of 2 not tried; budget_s=50 would try all"
    assert f"Left out (batch=8): {why}." in tune().output.splitlines()


def last_line(ran):
    return " ".join(ran.output.split("rror: ", 1)[-1].split())


@pytest.mark.usefixtures("fresh_dynamo")
def test_each_size_is_decided_and_served(tune, tmp_path):
    """The file has a decision for each size; imported, it serves without a race, by the printed line."""
    ran = tune("--shapes", "batch=2,3", *QUICKLY)
    assert ran.exit_code == 0, ran.output
    assert "2 decisions written to decisions.toml" in ran.output
    store = str(tmp_path / "store")
    imported = CliRunner().invoke(app, ["decisions", "import", "decisions.toml", "--store", store])
    assert imported.exit_code == 0, imported.output
    assert len(Catalogue(tmp_path / "store").all()) == 2
    scope = {}
    exec(FACTORY, scope)
    model, x = scope["build"](batch=3)
    (line,) = [line for line in ran.output.splitlines() if line.startswith("backend = ")]
    exec("import backend_kwargs as bk\n" + line, scope)
    compiled = torch.compile(model, backend=scope["backend"].bind("test", {"store": store}), dynamic=False)
    with torch.no_grad():
        assert torch.allclose(compiled(x), model(x), atol=1e-5)
    (graph,) = bk.report(compiled).graphs
    assert "a graph not raced" not in str(graph.race)


STEP = """
import torch

class Step(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(4, 16))
        self.register_buffer("filled", torch.tensor([3]))

    def forward(self, x):
        at = torch.arange(1) + self.filled
        self.filled.add_(1)
        self.keys.index_copy_(0, at, x)
        return (self.keys @ x[0]).softmax(0)

def build():
    return Step(), torch.ones(1, 16)
"""


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_step_is_tuned_from_its_state(tune, tmp_path):
    """A step whose second call would go past its cache is raced, timed beside eager, and shown on a page."""
    (tmp_path / "step.py").write_text(STEP, encoding="utf-8")
    ran = tune(*QUICKLY, "-o", "tune.html", "-o", "tune.json", model="step.py:build")
    assert ran.exit_code == 0, ran.output
    document = read_document("tune.html")
    assert document == read_document("tune.json")
    assert (document.title, [group.over for group in document.speedups]) == ("step.py:build", ["eager", "eager"])
    assert [lane.name for lane in document.races[0].lanes][:2] == ["eager", "default"]
    assert "backend-kwargs decisions import decisions.toml" in document.verdict.paste
    assert "1 decision written to decisions.toml" in ran.output
    assert "x [" in ran.output


@pytest.mark.parametrize(
    ("shapes", "sizes"),
    [
        pytest.param([], [{}], id="none"),
        pytest.param(["batch=1"], [{"batch": 1}], id="one"),
        pytest.param([" batch = 8 , 1 "], [{"batch": 8}, {"batch": 1}], id="blanks"),
        pytest.param(["batch=1,8,1"], [{"batch": 1}, {"batch": 8}], id="a size twice"),
        pytest.param(
            ["n=1,2", "m=3,4"],
            [{"n": 1, "m": 3}, {"n": 1, "m": 4}, {"n": 2, "m": 3}, {"n": 2, "m": 4}],
            id="two names",
        ),
        pytest.param(["n=1", "n=8,01"], [{"n": 1}, {"n": 8}], id="a name twice"),
        pytest.param(["n=1", "N=2"], [{"n": 1, "N": 2}], id="names that differ in case"),
    ],
)
def test_sizes_as_they_are_written(shapes, sizes):
    """Every combination once, in the order in which the sizes are written."""
    assert sizes_of(shapes) == sizes


@pytest.mark.parametrize(
    "text",
    ["", "batch", "=1", "batch=", "batch=1,", "batch=,1", "batch=1 2", "batch=-1", "batch=1.0", "b c=1", "b=1=2"],
)
def test_sizes_that_cannot_be_read(text):
    """A text that is no name with whole numbers above 0 is an error that shows it."""
    with pytest.raises(bk.BackendKwargsError) as raised:
        sizes_of([text])
    wanted = "Option '--shapes' must be name=1,2,3 with whole numbers above 0"
    assert str(raised.value) == f"{wanted}, got {text!r}."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            ["--shapes", "batch=0"],
            "Option '--shapes' must be name=1,2,3 with whole numbers above 0, got 'batch=0'.",
            id="0",
        ),
        pytest.param(
            ["--shapes", "rows=2"],
            "Factory 'model.py:build' must take rows as keyword arguments for --shapes: def build(rows=1).",
            id="another size",
        ),
        pytest.param(
            ["-o", "nowhere/tune.html"],
            "Cannot write 'nowhere/tune.html': there is no directory 'nowhere'.",
            id="no directory",
        ),
        pytest.param(
            ["-o", "tune"],
            "Option '--output' must be a file that ends in .toml, .html, .json or .md, got 'tune' (str).",
            id="no ending",
        ),
        pytest.param(["-o", "more.toml"], "Name one file for the decisions: -o FILE.toml.", id="two files"),
        pytest.param(
            ["--option", "most_races=3"], "--option most_races has no effect, since tune races every size.", id="limits"
        ),
        pytest.param(["--option", "auto=false"], "--option auto has no effect, since tune always races.", id="no race"),
    ],
)
def test_what_is_wrong_is_one_line(tune, arguments, message):
    """Wrong sizes and files raise before anything is raced."""
    ran = tune(*arguments)
    assert (ran.exit_code, isinstance(ran.exception, SystemExit | bk.BackendKwargsError)) == (1, True)
    assert message in " ".join((ran.output + str(ran.exception)).split())


@pytest.mark.usefixtures("fresh_dynamo")
def test_the_import_goes_to_the_store_that_serves(tune):
    """If the options name a store, so does the printed command; it can be pasted into a shell."""
    ran = tune("--option", "store=my decisions", *QUICKLY)
    assert ran.exit_code == 0, ran.output
    assert "\nbackend-kwargs decisions import decisions.toml --store 'my decisions'\n" in ran.output


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_precision_is_raced_within_its_bound(tune, tmp_path):
    """A precision and its bound apply to the race and to the printed line."""
    ran = tune("--option", "precision=bf16", "--option", "max_error=0.1", "--option", "budget_s=600")
    assert ran.exit_code == 0, ran.output
    (line,) = [line for line in ran.output.splitlines() if line.startswith("backend = ")]
    assert "'precision': ('bf16',), 'max_error': 0.1" in line


WRONG = """
import torch

def none(): return torch.nn.Linear(2, 2), None
def number(): return 5, torch.ones(2)
def alone(): return torch.nn.Linear(2, 2)
def sizes(): return torch.nn.Linear(2, 2), torch.ones(3, 7)
def missing(): return torch.nn.Linear(2, 2), ()
"""


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        pytest.param(
            "none",
            "Inputs must be a tensor, a tuple of arguments, a dict of keywords, or (args, kwargs), got None "
            "(NoneType).",
            id="no inputs",
        ),
        pytest.param(
            "number", "The model of factory 'wrong.py:number' must be a module or a function, got 5 (int).", id="number"
        ),
        pytest.param(
            "alone",
            "The result of factory 'wrong.py:alone' must be (model, example_inputs), got Linear(in_features=2, "
            "out_features=2, bias=True) (Linear).",
            id="no tuple",
        ),
        pytest.param(
            "sizes",
            "The model fails on its example inputs in eager: RuntimeError: mat1 and mat2 shapes cannot be multiplied "
            "(3x7 and 2x2).",
            id="wrong sizes",
        ),
        pytest.param(
            "missing",
            "The model fails on its example inputs in eager: TypeError: Linear.forward() missing 1 required positional "
            "argument: 'input'.",
            id="too few",
        ),
    ],
)
def test_a_wrong_model_is_one_line(tune, tmp_path, factory, message):
    """What the factory returns is checked before anything is compiled."""
    (tmp_path / "wrong.py").write_text(WRONG, encoding="utf-8")
    ran = tune(model=f"wrong.py:{factory}")
    assert str(ran.exception) == message
    assert not (tmp_path / "decisions.toml").exists()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        pytest.param("KeyboardInterrupt", 130, "interrupted\n1 of 3 sizes are kept.", id="Ctrl-C"),
        pytest.param(
            "ValueError('too large')",
            2,
            "error: Factory 'stops.py:build' failed: ValueError: too large.\n1 of 3 sizes are kept.",
            id="a size that fails",
        ),
    ],
)
def test_what_was_raced_before_an_interrupt_is_kept(tune, tmp_path, raised, code, said):
    """Decisions of earlier sizes are written, the output says how many, and the exit code is not 0."""
    stops = FACTORY.replace(
        "    torch.manual_seed(0)\n", f"    if batch == 3: raise {raised}\n    torch.manual_seed(0)\n"
    )
    (tmp_path / "stops.py").write_text(stops, encoding="utf-8")
    ran = tune("--shapes", "batch=2,3,4", *QUICKLY, model="stops.py:build")
    assert (ran.exit_code, said in ran.output) == (code, True)
    assert "1 decision written to decisions.toml" in ran.output


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_model_is_raced_in_eval_mode(tune, tmp_path):
    """Dropout is off while a model is tuned for inference, whichever mode its factory left it in."""
    (tmp_path / "drop.py").write_text(FACTORY.replace("torch.nn.GELU()", "torch.nn.Dropout()"), encoding="utf-8")
    ran = tune(*QUICKLY, model="drop.py:build")
    assert (ran.exit_code, "random" in ran.output) == (0, False)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_winner_without_a_default_is_not_written(tune, tmp_path, monkeypatch):
    """Where default could not run, what won is used by no other process, so there is nothing to ship."""
    rows = RaceRow("eager", seconds=1e-4, won=True), RaceRow("default", status="oom")
    raced = race.RaceResult(rows[0], rows, "3 ops", 0.1, cut=False)
    monkeypatch.setattr(race, "race", lambda request, tick: raced)
    with pytest.warns(bk.BackendKwargsWarning, match="^A graph runs in eager, because no candidate compiled"):
        ran = tune()
    assert str(ran.exception) == ("Nothing is written: provisional, so not one to ship: default could not run here.")
    assert not (tmp_path / "decisions.toml").exists()
