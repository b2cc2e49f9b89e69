"""The decision of auto as a plain dict of Inductor's options."""

import json

import pytest
import torch

import backend_kwargs as bk
from backend_kwargs.cli import main
from tests.auto.graphs import backend_of, chain


@pytest.fixture
def decided(races):
    """Return a function compiled by auto where `eager_numerics` won, with an option set by the user."""
    races.winner, races.options = "eager_numerics", dict(bk.get_template("eager_numerics").options)
    compiled = torch.compile(chain, backend=backend_of(epilogue_fusion=False))
    compiled(torch.randn(8, 64))
    return compiled


def expected():
    return {**bk.get_template("eager_numerics").options, "epilogue_fusion": False}


def test_report_has_what_was_decided(decided):
    """A graph's `inductor_config` contains the winner's options and, with higher precedence, the user's."""
    (graph,) = bk.report(decided).graphs
    assert graph.inductor_config() == expected()


def test_command_prints_what_was_decided(decided, capsys, monkeypatch):
    """`decisions show KEY --as inductor-config` prints the same dict."""
    monkeypatch.setattr("sys.argv", ["backend-kwargs", "decisions", "show", "", "--as", "inductor-config"])
    with pytest.raises(SystemExit):
        main()
    assert json.loads(capsys.readouterr().out) == expected()


def test_eager_has_no_dict(races):
    """If eager won, there is no dict to compile with."""
    compiled = torch.compile(chain, backend=backend_of())
    compiled(torch.randn(8, 64))
    (graph,) = bk.report(compiled).graphs
    with pytest.raises(bk.BackendKwargsError) as raised:
        graph.inductor_config()
    assert str(raised.value) == "Eager won here, so there are no options to compile under."


def test_value_that_was_not_kept_raises(races, capsys, monkeypatch):
    """A file cannot contain a callable, so a decision made with one cannot be printed as a dict."""
    races.winner = "default"
    compiled = torch.compile(chain, backend=backend_of(post_grad_custom_post_pass=lambda graph: None))
    compiled(torch.randn(8, 64))
    monkeypatch.setattr("sys.argv", ["backend-kwargs", "decisions", "show", "", "--as", "inductor-config"])
    with pytest.raises(SystemExit):
        main()
    message = (
        "error: The value of option 'post_grad_custom_post_pass' was not kept with the decision; set it yourself.\n"
    )
    assert capsys.readouterr().err == message


def test_report_of_a_template_has_its_dict():
    """The `inductor_config` of a graph without a race is the dict of its backend."""
    compiled = torch.compile(lambda x: x.exp(), backend="tmpl-inductor:aten")
    compiled(torch.randn(8, 64))
    (graph,) = bk.report(compiled).graphs
    assert graph.inductor_config() == bk.make_backend("tmpl-inductor:aten").inductor_config()
