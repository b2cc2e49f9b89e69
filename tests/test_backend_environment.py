"""Two environment variables apply to the plain name when the backend is created."""

import pickle

import pytest

from backend_kwargs import Backend, BackendKwargsError, make_backend

INDUCTOR = "tmpl-inductor"


@pytest.fixture
def environment(monkeypatch):
    def setenv(template=None, options=None):
        for name, value in (("TEMPLATE", template), ("OPTIONS", options)):
            if value is not None:
                monkeypatch.setenv(f"BACKEND_KWARGS_{name}", value)

    return setenv


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        pytest.param({"template": "freezing"}, "make_backend('tmpl-inductor:freezing')", id="template"),
        pytest.param(
            {"options": '{"freezing": true}'}, "make_backend('tmpl-inductor', {'freezing': True})", id="options"
        ),
        pytest.param({"options": '{"freezing": "on"}'}, "make_backend('tmpl-inductor', {'freezing': True})", id="text"),
        pytest.param(
            {"template": "freezing", "options": '{"freezing": false, "template": "aten"}'},
            "make_backend('tmpl-inductor:freezing', {'freezing': False})",
            id="both",
        ),
        pytest.param({"template": "", "options": ""}, "make_backend('tmpl-inductor')", id="empty"),
    ],
)
def test_environment(environment, variables, text):
    """The two variables apply to the plain name."""
    environment(**variables)
    assert repr(make_backend(INDUCTOR)) == text


@pytest.mark.parametrize("spec", ["inductor", f"{INDUCTOR}:default", "eager"])
def test_environment_feeds_the_plain_name_alone(environment, spec):
    """The variables do not apply to other names."""
    before = make_backend(spec)
    environment("freezing", '{"max_autotune": true}')
    assert make_backend(spec) is before


def test_environment_is_read_when_the_backend_is_made(environment):
    """The environment at creation is part of the value; another environment makes another backend."""
    before = make_backend(INDUCTOR)
    environment("freezing")
    after = make_backend(INDUCTOR)
    assert (repr(before), before.options) == ("make_backend('tmpl-inductor')", {})
    assert (after != before, dict(after.options)) == (True, {"freezing": True})


def test_environment_is_written(environment, monkeypatch):
    """A config or pickle contains the options of the environment, and reading one ignores the environment."""
    environment("freezing")
    b = make_backend(INDUCTOR)
    config, pickled = b.to_config(), pickle.dumps(b)
    environment("aten", '{"max_autotune": true}')
    assert Backend.from_config(config) == b == pickle.loads(pickled)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        pytest.param({"template": "freezin"}, "Unknown template 'freezin'. Did you mean 'freezing'?", id="template"),
        pytest.param(
            {"options": "{"},
            "The environment variable BACKEND_KWARGS_OPTIONS must be a JSON object, got '{' (str).",
            id="no-json",
        ),
        pytest.param(
            {"options": "[1]"},
            "The environment variable BACKEND_KWARGS_OPTIONS must be a JSON object, got [1] (list).",
            id="no-object",
        ),
        pytest.param(
            {"options": "[" * 100_000},
            f"The environment variable BACKEND_KWARGS_OPTIONS must be a JSON object, got '{'[' * 76}... (str).",
            id="nested",
        ),
        pytest.param(
            {"options": '{"freezin": 1}'}, "Unknown Inductor option 'freezin'. Did you mean 'freezing'?", id="option"
        ),
    ],
)
def test_wrong_environment(environment, variables, message):
    """A wrong variable raises when the backend is created."""
    environment(**variables)
    with pytest.raises(BackendKwargsError) as e:
        make_backend(INDUCTOR)
    assert str(e.value) == message


def test_the_environment_is_named_in_layers(monkeypatch):
    """Options of the environment's template have their own layer."""
    monkeypatch.setenv("BACKEND_KWARGS_TEMPLATE", "freezing")
    assert [layer.source for layer in make_backend(INDUCTOR).layers] == ["template freezing (environment)"]
