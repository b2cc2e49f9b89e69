"""A backend is saved and read back: configs, JSON, pickles, keys."""

import base64
import json
import os
import pickle
import subprocess
import sys

import pytest

import backend_kwargs as bk
from backend_kwargs import Backend, BackendKwargsError, make_backend

INDUCTOR = "tmpl-inductor"


def target(gm, example_inputs, *, level=1, extra=None):
    return gm.forward


def of_sizes(gm, example_inputs, *, sizes: set[int] = frozenset()):
    return gm.forward


def a_pass(graph):
    return graph


class Pass:
    def __call__(self, graph, inputs=None):
        return graph


def test_to_config():
    """A config is plain data: sorted, with a version, without options that the templates already set."""
    b = make_backend(f"{INDUCTOR}:aten", {"triton.cudagraphs": False, "freezing": True})
    assert json.dumps(b.to_config()) == (
        '{"backend": "tmpl-inductor:aten", "options": {"freezing": true, "triton.cudagraphs": false}, "version": 1}'
    )


def test_to_json(tmp_path):
    """The file contains the config, and from_config reads it."""
    b = make_backend(f"{INDUCTOR}:aten", freezing=True)
    b.to_json(tmp_path / "b.json")
    assert json.loads((tmp_path / "b.json").read_text()) == b.to_config()
    assert Backend.from_config((tmp_path / "b.json").read_text()) == b


def test_key_is_of_all_time():
    """The key is the same in every process, and recorded here."""
    key = "f4bbdb5f77993172550533b7318e0a53f819bbb23cf222b6e58df06aabf64753"
    assert make_backend(f"{INDUCTOR}:aten", freezing=True).key() == key


def test_key_and_pickle_in_another_process():
    """Another process with another hash seed reads the pickle and computes the same key."""
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
    """Every way to save names in one line a value that would not be read back equal."""
    b = make_backend(INDUCTOR, joint_custom_pre_pass=value)
    with pytest.raises(BackendKwargsError) as e:
        write(b)
    shown = bk.errors.shown(value)
    assert str(e.value) == (
        f"Option 'joint_custom_pre_pass' cannot be written: {shown} ({kind}) would not read back equal."
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
    """Every way to save names in one line a function that no other process could find."""
    with pytest.raises(BackendKwargsError) as e:
        write(make_backend(fn))
    assert str(e.value) == (
        f"Backend '{__name__}:{name}' cannot be written: use a function at the top of a module, or register_backend."
    )


def test_a_function_as_value_is_written_by_name():
    """A function at the top level of a module is saved as `module:name` if the option's type is a callable."""
    b = make_backend(INDUCTOR, joint_custom_pre_pass=a_pass)
    assert b.to_config()["options"] == {"joint_custom_pre_pass": f"{__name__}:a_pass"}
    assert Backend.from_config(json.dumps(b.to_config()), trust=True) == b == pickle.loads(pickle.dumps(b))


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
    """A value that JSON would change is refused."""
    with pytest.raises(BackendKwargsError) as e:
        make_backend(target, extra=value).to_config()
    assert str(e.value) == (
        f"Option 'extra' cannot be written: {bk.errors.shown(value)} ({type(value).__name__}) "
        "would not read back equal."
    )


def test_a_set_is_written_in_order():
    """A set is saved in sorted order, so that config and key do not depend on its order."""
    b = make_backend(of_sizes, sizes={64, 1, 3})
    assert b.to_config()["options"] == {"sizes": [1, 3, 64]}
    assert Backend.from_config(b.to_config(), trust=True) == b


def test_a_registered_backend_is_written_by_its_name():
    """A local function can be saved once it is registered."""
    b = bk.register_backend("mine", local())
    assert b.to_config()["backend"] == "mine"
    assert pickle.loads(pickle.dumps(make_backend("mine"))) == b


def test_nan_is_no_json():
    """A value that JSON cannot represent is refused."""
    b = make_backend(INDUCTOR, {"cpu_gpu_bw": float("nan")})
    with pytest.raises(BackendKwargsError, match="Option 'cpu_gpu_bw' cannot be written: nan"):
        b.to_config()


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
        pytest.param({"rocm.ck_dir": "none"}, (INDUCTOR, {"rocm.ck_dir": "none"}), id="text-of-none"),
        pytest.param(
            {"aot_inductor.aoti_shim_library": '["a"]'},
            (INDUCTOR, {"aot_inductor.aoti_shim_library": '["a"]'}),
            id="text-of-a-list",
        ),
        pytest.param('{"freezing": true}', (INDUCTOR, {"freezing": True}), id="json"),
        pytest.param('\n {"freezing": true}', (INDUCTOR, {"freezing": True}), id="json after blanks"),
        pytest.param(base64.b64encode(b'{"freezing": true}').decode(), (INDUCTOR, {"freezing": True}), id="base64"),
        pytest.param(
            base64.encodebytes(json.dumps({"freezing": True, "debug": True}, indent=40).encode()).decode(),
            (INDUCTOR, {"freezing": True, "debug": True}),
            id="base64 in lines",
        ),
    ],
)
def test_from_config(config, same_as):
    """A config gives the same backend as make_backend."""
    assert Backend.from_config(config, trust=True) == make_backend(*same_as)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((word, True) for word in ("true", "yes", "on", "1", " On\n")),
        *((w, False) for w in ("false", "no", "off", "0")),
    ],
)
def test_words_for_true_and_false(text, value):
    """Each word that people write for a bool is read as that, with blanks and in other case."""
    assert Backend.from_config({"freezing": text}, trust=True) == make_backend(INDUCTOR, freezing=value)


@pytest.mark.parametrize("text", ["none", "NULL"])
def test_words_for_none(text):
    """Both words for None are read as that."""
    option = "cpp.simdlen"
    assert Backend.from_config({option: text}, trust=True) == make_backend(INDUCTOR, {option: None})


def wanted(got):
    return f"A config must be a mapping, its JSON text, or base64 of that, got {got}."


CODE = "which a file may set only if it is trusted: pass trust=True if you trust its author."


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
        pytest.param({"version": True}, "Config version True is not 1 to 1; update backend-kwargs.", id="true-version"),
        pytest.param({"backend": None}, "A backend's spec must be a str, got None (NoneType).", id="backend"),
        pytest.param({"backend": "eage"}, "Unknown backend 'eage'. Did you mean 'eager'?", id="unknown-backend"),
        pytest.param({"freezin": 1}, "Unknown Inductor option 'freezin'. Did you mean 'freezing'?", id="option"),
        pytest.param(
            {"inductor_config": 3}, "'inductor_config' must be a mapping of options, got 3 (int).", id="inductor_config"
        ),
        pytest.param({"freezing": "maybe"}, "Inductor option 'freezing' must be bool, got 'maybe' (str).", id="value"),
        pytest.param(
            {"backend": "no_such_module:target"},
            "Backend 'no_such_module:target' is code to import, which a config may name only if it is trusted: pass "
            "trust=True if you trust its author.",
            id="function",
        ),
        pytest.param({"cpp.cxx": ["x.sh"]}, f"Inductor option 'cpp.cxx' is code, {CODE}", id="program"),
        pytest.param(
            {"post_grad_custom_pre_pass": "no_such_module:f"},
            f"Inductor option 'post_grad_custom_pre_pass' is code, {CODE}",
            id="callable",
        ),
        pytest.param({"store": "decisions", "auto": True}, f"Option 'store' is code, {CODE}", id="file"),
        pytest.param(
            {"backend": "tvm", "target": "llvm"}, f"TVM option 'target' is code, {CODE}", id="another compiler's"
        ),
    ],
)
def test_wrong_config(config, message):
    """A wrong config raises an error of one line; so does, before anything is imported, one with code without trust."""
    with pytest.raises(BackendKwargsError) as e:
        Backend.from_config(config)
    assert str(e.value) == message


def test_from_config_leaves_the_mapping():
    """from_config does not change the mapping that it reads."""
    config = {"backend": INDUCTOR, "version": 1, "freezing": True}
    Backend.from_config(config)
    assert config == {"backend": INDUCTOR, "version": 1, "freezing": True}


def test_a_file_is_sorted(tmp_path):
    """Two exports of one backend are the same text, whatever the order in which its options were given."""
    backend = make_backend("tmpl-inductor", {"max_autotune": True, "epilogue_fusion": False})
    backend.to_json(tmp_path / "b.json")
    assert (tmp_path / "b.json").read_text() == (
        '{\n  "backend": "tmpl-inductor",\n  "options": {\n    "epilogue_fusion": false,\n    "max_autotune": true\n'
        '  },\n  "version": 1\n}\n'
    )
