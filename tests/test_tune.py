"""`backend-kwargs tune`: races at each size, a file of decisions, and the lines to serve with."""

import pytest
import torch
from typer.testing import CliRunner

import backend_kwargs as bk
from backend_kwargs.cli import app
from backend_kwargs.compilers.auto.store import Store

FACTORY = """
import torch

def build(batch=2):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4)), torch.ones(batch, 16)
"""


@pytest.fixture
def tune(tmp_path, monkeypatch):
    """Return a function that runs `tune` on a small model, and returns its result."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(FACTORY, encoding="utf-8")

    def run(*arguments, model="model.py:build"):
        return CliRunner().invoke(app, ["tune", model, "-o", "decisions.toml", *arguments])

    return run


def last_line(ran):
    return " ".join(ran.output.split("rror: ", 1)[-1].split())


@pytest.mark.usefixtures("fresh_dynamo")
def test_each_size_is_decided_and_served(tune, tmp_path):
    """The file has a decision for each size; imported, it serves without a race, by the printed line."""
    ran = tune("--shapes", "batch=2,3", "--budget-s", "20")
    assert ran.exit_code == 0, ran.output
    assert "2 decisions written to decisions.toml" in ran.output
    store = str(tmp_path / "store.sqlite")
    imported = CliRunner().invoke(app, ["decisions", "import", "decisions.toml", "--store", store])
    assert imported.exit_code == 0, imported.output
    assert len(Store(tmp_path / "store.sqlite").all()) == 2
    scope = {}
    exec(FACTORY, scope)
    model, x = scope["build"](batch=3)
    (line,) = [line for line in ran.output.splitlines() if line.startswith("backend = ")]
    exec("import backend_kwargs as bk\n" + line, scope)
    compiled = torch.compile(model, backend=scope["backend"].bind("test", {"store": store}), dynamic=False)
    with torch.no_grad():
        assert torch.allclose(compiled(x), model(x), atol=1e-5)
    (graph,) = bk.report(compiled).graphs
    assert "no decision is stored" not in str(graph.race)


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
            ["-o", "nowhere/decisions.toml"],
            "Cannot write 'nowhere/decisions.toml': there is no directory 'nowhere'.",
            id="no directory",
        ),
    ],
)
def test_what_is_wrong_is_one_line(tune, arguments, message):
    """Wrong sizes and files raise before anything is raced."""
    ran = tune(*arguments)
    assert (ran.exit_code, isinstance(ran.exception, SystemExit | bk.BackendKwargsError)) == (1, True)
    assert message in " ".join((ran.output + str(ran.exception)).split())


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_precision_is_raced_within_its_bound(tune, tmp_path):
    """--precision and --max-error apply to the race and to the printed line."""
    ran = tune("--precision", "bf16", "--max-error", "0.1", "--budget-s", "20")
    assert ran.exit_code == 0, ran.output
    (line,) = [line for line in ran.output.splitlines() if line.startswith("backend = ")]
    assert "'precision': ('bf16',), 'max_error': 0.1" in line


def test_a_precision_needs_its_bound(tune):
    """--precision without --max-error raises with the option to add."""
    ran = tune("--precision", "bf16")
    assert ran.exit_code == 1
    assert "max_error" in ran.output + str(ran.exception)
