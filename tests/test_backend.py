"""A backend is a value: compared, hashed, copied, printed, pickled, written."""

import base64
import copy
import json
import os
import pickle
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch._dynamo.backends.registry
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import backend_kwargs as bk
from backend_kwargs import Backend, BackendKwargsError, make_backend
from backend_kwargs.catalogue import inductor_options
from backend_kwargs.templates import BUILT_IN

INDUCTOR = "tmpl-inductor"


def target(gm, example_inputs, *, level=1, extra=None):
    return gm.forward


def a_pass(graph):
    return graph


class Pass:
    def __call__(self, graph, inputs=None):
        return graph


SIMPLE = {
    bool: st.booleans(),
    int: st.integers(-(2**40), 2**40),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(max_size=20),
    bool | None: st.none() | st.booleans(),
    int | None: st.none() | st.integers(),
    str | None: st.none() | st.text(max_size=20),
    list[str]: st.lists(st.text(max_size=9), max_size=3),
}
DRAWN = {name: SIMPLE[option.type] for name, option in inductor_options().items() if option.type in SIMPLE}
# cuda.* and xpu.* hold unread copies of cutlass.*, which are refused.
TAKEN = sorted(name for name in DRAWN if not name.startswith(("cuda.", "xpu.")))
OPTION_DICTS = st.lists(st.sampled_from(TAKEN), max_size=6, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: DRAWN[name] for name in names})
)
SPECS = st.lists(st.sampled_from([*BUILT_IN]), max_size=2, unique=True).map(
    lambda names: f"{INDUCTOR}:{'+'.join(names)}" if names else INDUCTOR
)


@st.composite
def backends(draw):
    return make_backend(draw(SPECS), draw(OPTION_DICTS))


# The fixture round each test resets names, and these tests leave none behind. Contradicting templates warn.
of_any_backend = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
contradictions_are_fine = pytest.mark.filterwarnings("ignore::backend_kwargs.BackendKwargsWarning")


def test_catalogue_gives_enough_to_draw():
    """The random backends below are drawn from hundreds of real options."""
    assert len(TAKEN) > 250


@contradictions_are_fine
@of_any_backend
@given(backends())
def test_repr_makes_it_again(b):
    """A backend's repr is the call that makes it."""
    assert eval(repr(b)) == b


@contradictions_are_fine
@of_any_backend
@given(backends())
def test_config_makes_it_again(b):
    """to_config and from_config are each other's way back, through JSON text and its base64 as well."""
    text = json.dumps(b.to_config())
    forms = (b.to_config(), text, base64.b64encode(text.encode()).decode(), base64.encodebytes(text.encode()).decode())
    assert [Backend.from_config(form) for form in forms] == [b] * 4


@contradictions_are_fine
@of_any_backend
@given(backends())
def test_pickle_makes_it_again(b):
    """A backend survives pickling."""
    assert pickle.loads(pickle.dumps(b)) == b


@contradictions_are_fine
@of_any_backend
@given(backends(), backends())
def test_equal_backends_hash_and_write_alike(a, b):
    """Equality, the key and the config agree about any two; equal ones share a hash."""
    assert (a == b) == (a.key() == b.key()) == (a.to_config() == b.to_config())
    assert a != b or hash(a) == hash(b)
    again = make_backend(a.spec, dict(a.options))
    assert (again, hash(again), again.key()) == (a, hash(a), a.key())


def test_order_of_options_does_not_matter():
    """Options given in another order make an equal backend with the same key."""
    a = make_backend(INDUCTOR, {"freezing": True, "max_autotune": True})
    b = make_backend(INDUCTOR, {"max_autotune": True, "freezing": True})
    assert (a, hash(a), a.key(), repr(a.to_config())) == (b, hash(b), b.key(), repr(b.to_config()))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        pytest.param((INDUCTOR,), (f"{INDUCTOR}:default",), id="templates"),
        pytest.param((INDUCTOR,), ("inductor",), id="name"),
        pytest.param((INDUCTOR, {"freezing": True}), (INDUCTOR, {"freezing": False}), id="value"),
        pytest.param((INDUCTOR, {"freezing": False}), (INDUCTOR,), id="default-said"),
        pytest.param((target, {"level": 1}), (target, {"level": True}), id="type"),
        pytest.param((target, {"extra": [1]}), (target, {"extra": (1,)}), id="container"),
        pytest.param(("eager",), ("aot_eager",), id="function"),
    ],
)
def test_unequal(a, b):
    """Backends that differ in name, templates, or an option's value or type are unequal, both ways."""
    a, b = make_backend(*a), make_backend(*b)
    assert a != b
    assert b != a


def test_unequal_to_anything_else():
    """A backend equals no string and no function."""
    assert make_backend("eager") != "eager"
    assert make_backend(target) != target


def test_two_spellings_of_one_function_are_equal():
    """A function by name and in person is one backend."""
    a, b = make_backend(target, level=2), make_backend(f"{__name__}:target", level=2)
    assert (a, hash(a)) == (b, hash(b))


@pytest.mark.parametrize(
    "value",
    [pytest.param([{"a": {1}}], id="nested"), pytest.param(torch.ones(2), id="tensor"), pytest.param({}, id="mapping")],
)
def test_unhashable_values(value):
    """Unhashable option values compare and hash."""
    a, b = (make_backend(target, extra=copy.deepcopy(value)) for _ in range(2))
    assert (a, hash(a)) == (b, hash(b))
    assert a != make_backend(target, extra=torch.ones(3))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda b: copy.deepcopy({"compile": [b]})["compile"][0]])
def test_copies_are_itself(copied):
    """A copy of an immutable value is that value, also with options that cannot be copied."""
    b = make_backend(target, extra=(i for i in range(3)))
    assert copied(b) is b


def test_the_callers_dict_stays():
    """The caller's dict is neither kept nor changed."""
    mine = {"extra": [1]}
    b = make_backend(target, mine)
    mine["extra"].append(2)
    mine["level"] = 3
    assert dict(b.options) == {"extra": [1]}
    make_backend(target, mine)
    assert mine == {"extra": [1, 2], "level": 3}


def test_options_are_read_only():
    """Options can be read, not set."""
    with pytest.raises(TypeError, match="does not support item assignment"):
        make_backend(f"{INDUCTOR}:freezing").options["freezing"] = False


def test_options_hold_copies():
    """Changing a list that `options` showed changes no backend."""
    b = make_backend(target, extra=[1])
    b.options["extra"].append(2)
    assert dict(b.options) == {"extra": [1]}


def test_interned():
    """A plain spec gives the same object each time, which dynamo's guard compares fastest."""
    assert make_backend(f"{INDUCTOR}:freezing") is make_backend(f"{INDUCTOR}:freezing")
    assert make_backend("eager") is make_backend("eager")
    assert make_backend("eager") is not make_backend(INDUCTOR)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        pytest.param((INDUCTOR,), "make_backend('tmpl-inductor')", id="plain"),
        pytest.param((f"{INDUCTOR}:aten",), "make_backend('tmpl-inductor:aten')", id="template"),
        pytest.param((INDUCTOR, {"template": "aten"}), "make_backend('tmpl-inductor:aten')", id="template-as-option"),
        pytest.param(
            (f"{INDUCTOR}:aten", {"template": "freezing"}), "make_backend('tmpl-inductor:aten+freezing')", id="both"
        ),
        pytest.param(
            (f"{INDUCTOR}:freezing", {"freezing": True}), "make_backend('tmpl-inductor:freezing')", id="as-the-template"
        ),
        pytest.param(
            (f"{INDUCTOR}:freezing", {"freezing": False}),
            "make_backend('tmpl-inductor:freezing', {'freezing': False})",
            id="against-the-template",
        ),
        pytest.param(
            (INDUCTOR, {"mode": "reduce-overhead"}),
            "make_backend('tmpl-inductor', {'triton.cudagraphs': True})",
            id="mode",
        ),
        pytest.param(("dynamo:inductor",), "make_backend('dynamo:inductor')", id="forced"),
        pytest.param((target, {"level": 2}), f"make_backend('{__name__}:target', {{'level': 2}})", id="function"),
        pytest.param((partial(target, level=2),), f"make_backend('{__name__}:target', {{'level': 2}})", id="partial"),
    ],
)
def test_repr(args, text):
    """The repr is the shortest make_backend call, and makes an equal backend."""
    b = make_backend(*args)
    assert repr(b) == text
    assert eval(text) == b


# --- written --------------------------------------------------------------------------------------------------------


def test_to_config():
    """A config is plain data: sorted, with a version, without what the templates say already."""
    b = make_backend(f"{INDUCTOR}:aten", {"triton.cudagraphs": False, "freezing": True})
    assert json.dumps(b.to_config()) == (
        '{"backend": "tmpl-inductor:aten", "options": {"freezing": true, "triton.cudagraphs": false}, "version": 1}'
    )


def test_to_json(tmp_path):
    """The file holds the config, and from_config reads it."""
    b = make_backend(f"{INDUCTOR}:aten", freezing=True)
    b.to_json(tmp_path / "b.json")
    assert json.loads((tmp_path / "b.json").read_text()) == b.to_config()
    assert Backend.from_config((tmp_path / "b.json").read_text()) == b


def test_key_is_of_all_time():
    """The key depends on no process: it is written down here."""
    key = "f4bbdb5f77993172550533b7318e0a53f819bbb23cf222b6e58df06aabf64753"
    assert make_backend(f"{INDUCTOR}:aten", freezing=True).key() == key


def test_key_and_pickle_in_another_process():
    """Another process, with another hash seed, reads the pickle and computes the same key."""
    b = make_backend(f"{INDUCTOR}:freezing", {"max_autotune_gemm_backends": "ATEN", "triton.cudagraphs": False})
    code = "import pickle, sys; b = pickle.load(sys.stdin.buffer); print(b.key(), b, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(b),
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7", "BACKEND_KWARGS_OPTIONS": '{"max_autotune": true}'},
    )
    assert done.stdout.decode().splitlines() == [b.key(), repr(b)]


def local():
    def inner(gm, example_inputs):
        return gm.forward

    return inner


LAMBDA, LOCAL, PASS = lambda graph, inputs=None: graph, local(), Pass()
WRITERS = [
    pytest.param(pickle.dumps, id="pickle"),
    pytest.param(Backend.to_config, id="to_config"),
    pytest.param(Backend.key, id="key"),
]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    ("value", "kind"),
    [
        pytest.param(lambda graph: graph, "function", id="lambda"),
        pytest.param(local(), "function", id="local"),
        pytest.param(Pass(), "Pass", id="pass-object"),
    ],
)
def test_values_that_cannot_be_written(write, value, kind):
    """A value that would not be read back the same is named in one line, by each way to write."""
    b = make_backend(INDUCTOR, joint_custom_pre_pass=value)
    with pytest.raises(BackendKwargsError) as e:
        write(b)
    shown = bk.errors.shown(value)
    assert str(e.value) == (
        f"Option 'joint_custom_pre_pass' cannot be written: {shown} ({kind}) would not be read back the same."
    )


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    ("fn", "name"),
    [
        pytest.param(LAMBDA, "<lambda>", id="lambda"),
        pytest.param(LOCAL, "local.<locals>.inner", id="local"),
        pytest.param(PASS, "Pass", id="instance"),
    ],
)
def test_functions_that_cannot_be_written(write, fn, name):
    """A function that no other process would find is named in one line, by each way to write."""
    with pytest.raises(BackendKwargsError) as e:
        write(make_backend(fn))
    assert str(e.value) == (
        f"Backend '{__name__}:{name}' cannot be written: use a function at the top of a module, or register_backend."
    )


def test_a_function_as_value_is_written_by_name():
    """A function at the top of a module is written as `module:name` where the option wants a callable."""
    b = make_backend(INDUCTOR, joint_custom_pre_pass=a_pass)
    assert b.to_config()["options"] == {"joint_custom_pre_pass": f"{__name__}:a_pass"}
    assert Backend.from_config(json.dumps(b.to_config())) == b == pickle.loads(pickle.dumps(b))


@pytest.mark.parametrize(
    "value",
    [
        pytest.param({1: 2}, id="keys-that-are-no-text"),
        pytest.param((1, 2), id="tuple-of-unknown-type"),
        pytest.param({1, 2}, id="set-of-unknown-type"),
        pytest.param(a_pass, id="function-of-unknown-type"),
        pytest.param([object()], id="object"),
    ],
)
def test_values_that_json_would_change(value):
    """What JSON would give back as something else is refused, not changed."""
    with pytest.raises(BackendKwargsError) as e:
        make_backend(target, extra=value).to_config()
    assert str(e.value) == (
        f"Option 'extra' cannot be written: {bk.errors.shown(value)} ({type(value).__name__}) "
        "would not be read back the same."
    )


def test_a_registered_backend_is_written_by_its_name():
    """A local function can be written once it has a name."""
    b = bk.register_backend("mine", local())
    assert b.to_config()["backend"] == "mine"
    assert pickle.loads(pickle.dumps(make_backend("mine"))) == b


# --- from_config ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "same_as"),
    [
        pytest.param({}, (INDUCTOR,), id="empty"),
        pytest.param({"template": "freezing"}, (f"{INDUCTOR}:freezing",), id="template"),
        pytest.param(
            {
                "template": "max_autotune",
                "mode": None,
                "freezing": True,
                "inductor_config": {"triton.cudagraphs": False},
            },
            (f"{INDUCTOR}:max_autotune", {"freezing": True, "triton.cudagraphs": False}),
            id="graphnet",
        ),
        pytest.param({"mode": "lite"}, (INDUCTOR, {"mode": "lite"}), id="mode"),
        pytest.param({"backend": "inductor", "max-autotune": True}, ("inductor", {"max_autotune": True}), id="dash"),
        pytest.param({"freezing": "yes"}, (INDUCTOR, {"freezing": True}), id="text"),
        pytest.param(
            {"triton.cudagraph_capture_sizes": [1, [2, 3]]},
            (INDUCTOR, {"triton.cudagraph_capture_sizes": (1, (2, 3))}),
            id="list-for-tuple",
        ),
        pytest.param({"backend": f"{__name__}:target", "level": 2}, (target, {"level": 2}), id="function"),
        pytest.param('{"freezing": true}', (INDUCTOR, {"freezing": True}), id="json"),
        pytest.param(base64.b64encode(b'{"freezing": true}').decode(), (INDUCTOR, {"freezing": True}), id="base64"),
    ],
)
def test_from_config(config, same_as):
    """A config gives the backend that make_backend gives."""
    assert Backend.from_config(config) == make_backend(*same_as)


def wanted(got):
    return f"A config wants a mapping, its JSON text, or base64 of that, got {got}."


@pytest.mark.parametrize(
    ("config", "message"),
    [
        pytest.param(3, wanted("3 (int)"), id="number"),
        pytest.param("freezing", wanted("'freezing' (str)"), id="word"),
        pytest.param("{", wanted("'{' (str)"), id="broken-json"),
        pytest.param(base64.b64encode(b"[1]").decode(), wanted("[1] (list)"), id="list"),
        pytest.param(base64.b64encode(b"\xff").decode(), wanted("'/w==' (str)"), id="no-text"),
        pytest.param('{"a":' + "[" * 100_000, wanted('\'{"a":' + "[" * 71 + "... (str)"), id="deep"),
        pytest.param({"version": 2}, "Config version 2 is not 1 to 1; update backend-kwargs.", id="version"),
        pytest.param({"version": "1"}, "Config version '1' is not 1 to 1; update backend-kwargs.", id="no-version"),
        pytest.param({"backend": None}, "A backend's spec wants a str, got None (NoneType).", id="backend"),
        pytest.param({"backend": "eage"}, "Unknown backend 'eage'. Did you mean 'eager'?", id="unknown-backend"),
        pytest.param({"freezin": 1}, "Unknown Inductor option 'freezin'. Did you mean 'freezing'?", id="option"),
        pytest.param(
            {"inductor_config": 3}, "'inductor_config' wants a mapping of options, got 3 (int).", id="inductor_config"
        ),
        pytest.param({"freezing": "maybe"}, "Inductor option 'freezing' wants bool, got 'maybe' (str).", id="value"),
    ],
)
def test_wrong_config(config, message):
    """What is wrong in a config is told in one line."""
    with pytest.raises(BackendKwargsError) as e:
        Backend.from_config(config)
    assert str(e.value) == message


def test_from_config_leaves_the_mapping():
    """The mapping that a config comes in stays as it was."""
    config = {"backend": INDUCTOR, "version": 1, "freezing": True}
    Backend.from_config(config)
    assert config == {"backend": INDUCTOR, "version": 1, "freezing": True}


# --- the environment ------------------------------------------------------------------------------------------------


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
    """The two variables feed the plain name."""
    environment(**variables)
    assert repr(make_backend(INDUCTOR)) == text


@pytest.mark.parametrize("spec", ["inductor", f"{INDUCTOR}:default", "eager"])
def test_environment_feeds_the_plain_name_alone(environment, spec):
    """Any other name is deaf to the variables."""
    before = make_backend(spec)
    environment("freezing", '{"max_autotune": true}')
    assert make_backend(spec) is before


def test_environment_is_read_when_the_backend_is_made(environment):
    """What the environment said then is part of the value; a change makes another backend."""
    before = make_backend(INDUCTOR)
    environment("freezing")
    after = make_backend(INDUCTOR)
    assert (repr(before), before.options) == ("make_backend('tmpl-inductor')", {})
    assert (after != before, dict(after.options)) == (True, {"freezing": True})


def test_environment_is_written(environment, monkeypatch):
    """A config or pickle carries what the environment said, and reading one asks no environment."""
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
            "The environment variable BACKEND_KWARGS_OPTIONS wants a JSON object, got '{' (str).",
            id="no-json",
        ),
        pytest.param(
            {"options": "[1]"},
            "The environment variable BACKEND_KWARGS_OPTIONS wants a JSON object, got [1] (list).",
            id="no-object",
        ),
        pytest.param(
            {"options": '{"freezin": 1}'}, "Unknown Inductor option 'freezin'. Did you mean 'freezing'?", id="option"
        ),
    ],
)
def test_wrong_environment(environment, variables, message):
    """What is wrong in a variable is told when the backend is made."""
    environment(**variables)
    with pytest.raises(BackendKwargsError) as e:
        make_backend(INDUCTOR)
    assert str(e.value) == message


# --- as torch's own -------------------------------------------------------------------------------------------------


def test_get_compiler_config_is_as_torchs():
    """The whole patched config, as torch's wrapper for "inductor" gives for the same options."""
    options = {"freezing": True, "triton.cudagraphs": False}
    torchs = torch._TorchCompileInductorWrapper(None, options, None).get_compiler_config()
    ours = make_backend(f"{INDUCTOR}:freezing", {"triton.cudagraphs": False}).get_compiler_config()
    assert ours == torchs


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        pytest.param(INDUCTOR, INDUCTOR, id="plain"),
        pytest.param(f"{INDUCTOR}:freezing", f"{INDUCTOR}:freezing", id="template"),
        pytest.param(f"{INDUCTOR}:freezing+aten", INDUCTOR, id="composed"),
        pytest.param("inductor", "inductor", id="inductor"),
        pytest.param("inductor:freezing", "inductor", id="inductor-with-template"),
        pytest.param("eager", "eager", id="eager"),
    ],
)
def test_names_are_registered_ones(spec, name):
    """The compiler's name is one of dynamo's registry, so that dynamo frees what it may."""
    b = make_backend(spec)
    assert (b.__name__, b.compiler_name) == (name, name)
    assert torch._dynamo.backends.registry._is_registered_backend(b)


def test_repr_of_what_has_no_name_does_not_evaluate():
    """Where no spec would find the function, repr shows the function, which eval refuses."""
    with pytest.raises(SyntaxError):
        eval(repr(make_backend(LAMBDA)))


def test_the_environment_is_named_in_layers(monkeypatch):
    """What the environment's template sets is told apart from what a spec's would."""
    monkeypatch.setenv("BACKEND_KWARGS_TEMPLATE", "freezing")
    assert [layer.source for layer in make_backend(INDUCTOR).layers] == ["template freezing (environment)"]


def test_nan_is_no_json():
    """A value that JSON has no form for is refused, and not written as something no reader takes."""
    b = make_backend(INDUCTOR, {"min_overlap_ratio": float("nan")})
    with pytest.raises(BackendKwargsError, match="Option 'min_overlap_ratio' cannot be written: nan"):
        b.to_config()
