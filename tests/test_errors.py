import pickle
import sys
import warnings

import pytest
import torch

from backend_kwargs.errors import (
    BackendKwargsError,
    BackendKwargsWarning,
    pip_install,
    shown,
    unknown,
    warn_once,
    wrong_value,
)


def test_error_is_a_value_error():
    """Code that catches ValueError catches this package's errors."""
    assert issubclass(BackendKwargsError, ValueError)


def test_error_pickles():
    """An error keeps its message when it is pickled."""
    error = pickle.loads(pickle.dumps(unknown("backend", "x", [])))
    assert (type(error), str(error)) == (BackendKwargsError, "Unknown backend 'x'.")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        pytest.param("a", "'a'", id="short"),
        pytest.param("a" * 78, f"'{'a' * 78}'", id="just-fits"),
        pytest.param("a" * 79, f"'{'a' * 76}...", id="cut"),
        pytest.param(type("T", (), {"__repr__": lambda self: "a\n  b"})(), "a b", id="one-line"),
    ],
)
def test_shown(value, text):
    """A value is shown in one line of at most eighty characters."""
    assert shown(value) == text


@pytest.mark.parametrize(
    ("name", "otherwise", "message"),
    [
        pytest.param("freezin", "Look.", "Unknown template 'freezin'. Did you mean 'freezing'?", id="near"),
        pytest.param("qqq", "Look.", "Unknown template 'qqq'. Look.", id="next-step"),
        pytest.param("qqq", "", "Unknown template 'qqq'.", id="nothing-to-say"),
        pytest.param(3, "Look.", "Unknown template 3. Look.", id="no-str"),
    ],
)
def test_unknown(name, otherwise, message):
    """The error for a wrong name has the nearest name, or else the next step."""
    assert str(unknown("template", name, ["freezing", "debug"], otherwise=otherwise)) == message


def test_wrong_value():
    """The error for a wrong value has the expected type, the value and its type."""
    assert str(wrong_value("'x'", "int | None", "3")) == "'x' must be int | None, got '3' (str)."


def test_message_stays_short():
    """A message has less than 400 characters, however long the name and the value."""
    long = "x" * 10_000
    assert max(len(str(unknown("option", long, ["y"]))), len(str(wrong_value("'x'", "int", long)))) < 400


def test_warn_once():
    """Each message warns once."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for message in ("a", "a", "b"):
            warn_once(message)
    assert [(w.category, str(w.message)) for w in warned] == [(BackendKwargsWarning, "a"), (BackendKwargsWarning, "b")]


@pytest.mark.parametrize("spec", ["tmpl-inductor:freezing", "tmpl-inductor:auto"])
def test_warning_points_at_the_users_line(spec, recwarn, monkeypatch):
    """A warning while torch compiles points at the line that calls the compiled function, not into torch."""
    torch.compiler.reset()
    monkeypatch.setenv("BACKEND_KWARGS_STORE", "env:OTHER")  # of which auto warns
    compiled = torch.compile(lambda x: x + 1, backend=spec)
    warnings.simplefilter("always")
    compiled(torch.ones(3)), (line := sys._getframe().f_lineno)
    (warned,) = [each for each in recwarn if issubclass(each.category, BackendKwargsWarning)]
    assert (warned.filename, warned.lineno) == (__file__, line)


def test_an_extra_is_installed_by_the_names_of_its_packages():
    """Not by this package's name, which is on no index: anyone could put another package there."""
    assert pip_install("ray") == 'pip install "ray[client,default]>=2.40"'
    assert pip_install("fsspec") == 'pip install "fsspec>=2024.2" "s3fs>=2024.2"'
