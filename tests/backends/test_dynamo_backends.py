"""Any other backend: keyword arguments bound by its signature."""

from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch

import backend_kwargs as bk
from backend_kwargs.backend import find_backend
from backend_kwargs.backends.tvm.settings import unfit
from backend_kwargs.explain import verdict

if TYPE_CHECKING:
    from nowhere import Unknown

GOT: list[dict[str, Any]] = []


def note(gm, **kwargs):
    GOT.append(kwargs)
    return gm.forward


def named(gm, example_inputs, *, level: int = 1, kind: Literal["a", "b"] = "a"):
    """Take options by name.

    And more.
    """
    return note(gm, level=level, kind=kind)


def positional(gm, example_inputs, level=1):
    return note(gm, level=level)


def anything(gm, example_inputs, **kwargs):
    return note(gm, **kwargs)


def mapping(gm, example_inputs, level=1, options=None):
    return note(gm, level=level, options=options)


def needs_mapping(gm, example_inputs, options):
    return note(gm, options=options)


def with_mode(gm, example_inputs, mode=None):
    return note(gm, mode=mode)


def nothing(gm, example_inputs):
    return note(gm)


def unnameable(gm, example_inputs, level=1, /):
    return note(gm, level=level)


def required(gm, example_inputs, *, level: int, name: str):
    return note(gm, level=level, name=name)


def optional(gm, example_inputs, level: int = None):  # noqa: RUF013 - as people write it
    return note(gm, level=level)


def unresolved(gm, example_inputs, level: "Unknown" = None, size: "int" = 1):
    return note(gm, level=level)


def written(gm, example_inputs, level: "int" = 1):
    return note(gm, level=level)


class Instance:
    def __call__(self, gm, example_inputs, level: "int" = 1):
        return note(gm, level=level)


INSTANCE = Instance()


@pytest.fixture(autouse=True)
def _nothing_got(fresh_dynamo):
    GOT.clear()


def f(x):
    return torch.sin(x) + 1


def compile_and_run(backend, **kwargs):
    x = torch.ones(3)
    torch.testing.assert_close(torch.compile(f, backend=backend, **kwargs)(x), f(x))
    return GOT


@pytest.mark.parametrize(
    ("fn", "given", "got"),
    [
        pytest.param(named, {"level": 2}, {"level": 2, "kind": "a"}, id="keyword-only"),
        pytest.param(positional, {"level": 2}, {"level": 2}, id="positional-or-keyword"),
        pytest.param(anything, {"a": 1, "b.c": 2}, {"a": 1, "b.c": 2}, id="kwargs"),
        pytest.param(mapping, {"level": 2, "a.b": 1}, {"level": 2, "options": {"a.b": 1}}, id="name-and-mapping"),
        pytest.param(mapping, {"options": {"a.b": 1}}, {"level": 1, "options": {"a.b": 1}}, id="mapping-as-mapping"),
        pytest.param(mapping, {}, {"level": 1, "options": None}, id="mapping-left-alone"),
        pytest.param(needs_mapping, {}, {"options": {}}, id="required-mapping"),
        pytest.param(with_mode, {"mode": "fast"}, {"mode": "fast"}, id="mode"),
        pytest.param(nothing, {}, {}, id="nothing"),
        pytest.param(required, {"level": 2, "name": "x"}, {"level": 2, "name": "x"}, id="required"),
        pytest.param(INSTANCE, {"level": 2}, {"level": 2}, id="callable-instance"),
        pytest.param(partial(named, level=3), {"kind": "b"}, {"level": 3, "kind": "b"}, id="partial"),
        pytest.param(lambda gm, inputs, a=1: note(gm, a=a), {"a": 2}, {"a": 2}, id="lambda"),
    ],
)
def test_bound_by_make_backend(fn, given, got):
    """Arguments of make_backend are passed to the function by its signature."""
    assert compile_and_run(bk.make_backend(fn, given)) == [got]


@pytest.mark.parametrize(
    ("fn", "kwargs", "got"),
    [
        pytest.param(named, {"options": {"level": 2}}, {"level": 2, "kind": "a"}, id="options"),
        pytest.param(mapping, {"options": {"level": 2, "x": 1}}, {"level": 2, "options": {"x": 1}}, id="mapping"),
        pytest.param(with_mode, {"mode": "fast"}, {"mode": "fast"}, id="mode"),
    ],
)
def test_bound_by_torch_compile(fn, kwargs, got):
    """A registered function gets the options and the mode of torch.compile by its signature."""
    bk.register_backend("mine", fn)
    assert compile_and_run("mine", **kwargs) == [got]


def test_wrong_option_of_torch_compile():
    """An option that a registered function does not accept raises at the first call."""
    bk.register_backend("mine", named)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as e:
        compile_and_run("mine", options={"leve": 2})
    message = "Backend 'mine' has no option 'leve'; it takes level, kind. Did you mean 'level'?"
    assert str(e.value.inner_exception) == message


def test_the_call_wins():
    """Options of torch.compile override those of make_backend."""
    assert compile_and_run(bk.make_backend(named, level=2, kind="b"), options={"level": 3}) == [
        {"level": 3, "kind": "b"}
    ]


@pytest.mark.parametrize(
    ("fn", "given", "message"),
    [
        pytest.param(
            named, {"leve": 1}, "has no option 'leve'; it takes level, kind. Did you mean 'level'?", id="near"
        ),
        pytest.param(named, {"qqq": 1}, "has no option 'qqq'; it takes level, kind.", id="unknown"),
        pytest.param(named, {3: 1}, "has no option 3; it takes level, kind.", id="no-str"),
        pytest.param(named, {"gm": 1}, "has no option 'gm'; it takes level, kind.", id="the-graph"),
        pytest.param(nothing, {"a": 1}, "has no option 'a'; it takes none.", id="takes-none"),
        pytest.param(unnameable, {"level": 1}, "has no option 'level'; it takes none.", id="positional-only"),
        pytest.param(with_mode, {"a": 1}, "has no option 'a'; it takes mode.", id="takes-mode"),
        pytest.param(
            mapping,
            {"mode": "fast"},
            "has no option 'mode'; it takes level, anything in `options`.",
            id="a-mode-is-no-option",
        ),
        pytest.param(required, {"name": "x"}, "needs a value for 'level'.", id="required"),
        pytest.param(required, {}, "needs a value for 'level', 'name'.", id="required-both"),
        pytest.param(named, {"level": "2"}, ": option 'level' must be int, got '2' (str).", id="type"),
        pytest.param(named, {"kind": "c"}, ": option 'kind' must be 'a' | 'b', got 'c' (str).", id="literal"),
        pytest.param(written, {"level": "2"}, ": option 'level' must be int, got '2' (str).", id="annotation-as-text"),
        pytest.param(named, {"level": None}, ": option 'level' must be int, got None (NoneType).", id="none"),
        pytest.param(
            required,
            {"level": None, "name": "x"},
            ": option 'level' must be int, got None (NoneType).",
            id="required-none",
        ),
        pytest.param(
            optional, {"level": "2"}, ": option 'level' must be int | None, got '2' (str).", id="default-none"
        ),
    ],
)
def test_refuses(fn, given, message):
    """A wrong name raises with the accepted names, a wrong value with its type; both at once."""
    with pytest.raises(bk.BackendKwargsError) as e:
        bk.make_backend(fn, given)
    space = "" if message.startswith(":") else " "
    assert str(e.value) == f"Backend '{__name__}:{fn.__name__}'{space}{message}"


@pytest.mark.parametrize(
    ("fn", "name", "message"),
    [
        pytest.param(INSTANCE, "Instance", "must be int, got 'x' (str).", id="instance"),
        pytest.param(partial(named, kind="b"), "named", "must be int, got 'x' (str).", id="partial"),
    ],
)
def test_annotations_of_other_callables_are_checked(fn, name, message):
    """A callable instance and a partial are checked like a function."""
    with pytest.raises(bk.BackendKwargsError) as e:
        bk.make_backend(fn, level="x")
    assert str(e.value) == f"Backend '{__name__}:{name}': option 'level' {message}"


@pytest.mark.parametrize(
    ("backend", "name", "first", "second"),
    [
        pytest.param(mapping, "level", 1, 2, id="a function"),
        pytest.param("tmpl-inductor", "max_autotune", True, False, id="Inductor"),
        pytest.param("onnxruntime", "min_block_size", 1, 2, id="an engine"),
    ],
)
def test_a_keyword_takes_precedence_over_options(backend, name, first, second):
    """Of a keyword and the same name in `options` the keyword counts, for each compiler."""
    assert bk.make_backend(backend, options={name: first}, **{name: second}).options[name] == second


def test_options_want_a_mapping():
    """`options` that is not a mapping raises."""
    with pytest.raises(bk.BackendKwargsError) as e:
        bk.make_backend(mapping, options=3)
    assert str(e.value) == "'options' must be a mapping of options, got 3 (int)."


@pytest.mark.parametrize(
    ("fn", "level"), [pytest.param(optional, None, id="none-as-default"), pytest.param(unresolved, 3, id="unresolved")]
)
def test_accepts(fn, level):
    """None is accepted where it is the default, and any value where an annotation cannot be resolved."""
    assert dict(bk.make_backend(fn, level=level).options) == {"level": level}


def test_callable_without_signature():
    """A callable without a signature accepts any argument."""
    assert dict(bk.make_backend(max, a=1).options) == {"a": 1}


def test_partial_is_a_value():
    """Two partials of one function with equal keywords are one backend, compiled once."""
    first, second = (bk.make_backend(partial(named, level=2)) for _ in range(2))
    assert first == second == bk.make_backend(named, level=2)
    compile_and_run(first)
    assert len(compile_and_run(second)) == 1


@pytest.mark.parametrize("name", ["ts", "aot_ts"])
@pytest.mark.filterwarnings("ignore")  # TorchScript's own
def test_the_verdict_on_torchscript_is_torchs(name):
    """`ts` cannot work where torch itself fails to compile a graph with it."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    try:
        torch.compile(model, backend=name)(torch.ones(2, 4))
        wanted = "works"
    except torch._dynamo.exc.BackendCompilerFailed:
        wanted = "cannot: torch.jit.script fails on dynamo's graphs in this torch"
    assert str(verdict(find_backend(name))) == wanted


def test_partial_of_positions_stays_whole():
    """A partial with positional arguments is kept as it is."""
    bound = partial(lambda extra, gm, inputs, a=1: note(gm, extra=extra, a=a), "x")
    assert compile_and_run(bk.make_backend(bound, a=2)) == [{"extra": "x", "a": 2}]


@pytest.mark.parametrize(
    ("spec", "summary"),
    [
        pytest.param(f"{__name__}:named", "Take options by name.", id="docstring"),
        pytest.param("eager", "eager, as dynamo has it", id="without"),
        pytest.param("dynamo:inductor", "inductor, as dynamo has it", id="forced"),
    ],
)
def test_summary(spec, summary):
    """A backend's summary is the first line of its docstring."""
    assert bk.make_backend(spec).summary == summary


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("eager", "eager", id="registered"),
        pytest.param("dynamo:inductor", "inductor", id="forced"),
        pytest.param(f"{__name__}:named", f"{__name__}:named", id="function"),
    ],
)
def test_compiler_name(name, expected):
    """dynamo can tell whether a backend is in its registry."""
    backend = bk.make_backend(name)
    assert (backend.compiler_name, backend.__name__) == (expected, expected)


def test_compiler_name_with_a_colon(install):
    """A plug-in's name may contain a colon."""
    source = "def fast(gm, example_inputs, *, level=1):\n    return gm.forward\n"
    install("acme", source, "torch_dynamo_backends", **{"acme:fast": "fast"})
    from torch._dynamo.backends.registry import _discover_entrypoint_backends

    _discover_entrypoint_backends.cache_clear()
    _discover_entrypoint_backends()
    assert "acme:fast" in bk.list_backends()
    backend = bk.make_backend("acme:fast", level=2)
    assert (backend.compiler_name, repr(backend)) == ("acme:fast", "make_backend('acme:fast', {'level': 2})")


@pytest.mark.parametrize(
    ("call", "name", "reason"),
    [
        pytest.param(
            bk.make_backend,
            "dynamo:tvm",
            "torch's own tvm backend imports tvm.relay, which the installed TVM does not have; take 'tmpl-tvm'.",
            id="dynamo:tvm",
            marks=pytest.mark.skipif(bool(unfit()), reason=f"no TVM: {unfit()}"),
        ),
        pytest.param(
            bk.explain,
            "dynamo:tvm",
            "torch's own tvm backend imports tvm.relay, which the installed TVM does not have; take 'tmpl-tvm'.",
            id="explain dynamo:tvm",
            marks=pytest.mark.skipif(bool(unfit()), reason=f"no TVM: {unfit()}"),
        ),
        pytest.param(
            bk.make_backend,
            "torch_tensorrt",
            "no CUDA GPU is visible.",
            id="torch_tensorrt",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        pytest.param(
            bk.make_backend,
            "openxla",
            "torch_xla is not importable; pip install torch_xla.",
            id="openxla",
            marks=pytest.mark.skipif(bool(find_spec("torch_xla")), reason="torch_xla is installed"),
        ),
    ],
)
def test_what_torch_would_raise_is_said_at_once(call, name, reason):
    """A backend of dynamo's that cannot work here raises one line with the reason when it is made."""
    with pytest.raises(bk.BackendKwargsError) as raised:
        call(name)
    (limit,) = raised.value.args
    assert str(limit) == f"Backend {name!r} cannot work here: {reason}"


REQUIRED: Mapping[str, dict[str, Any]] = {
    "aot_eager_decomp_partition_with_mode": {"mode": torch.utils._python_dispatch.TorchDispatchMode()},
    "dynamo_minifier_backend": {"compiler_name": "eager"},
    "dynamo_accuracy_minifier_backend": {"compiler_name": "eager"},
}


# OpenVINO's warning when its backend is imported.
@pytest.mark.filterwarnings("ignore:torch._dynamo.config.inline_inbuilt_nn_modules is deprecated:FutureWarning")
@pytest.mark.parametrize("name", torch._dynamo.list_backends(None))
def test_every_backend_of_dynamo(name):
    """Every backend that dynamo lists can be made, equals itself, and has dynamo's name."""
    if name in ("tvm", "tmpl-tvm") and unfit():
        pytest.skip(f"no TVM: {unfit()}")
    if name in ("tmpl-openvino", "tmpl-tensorrt"):
        pytest.skip("removed: tests/test_entry_points.py")
    if "openvino" in name and not find_spec("openvino"):
        pytest.skip("no OpenVINO")
    if "onnxruntime" in name and not find_spec("onnxruntime"):
        pytest.skip("no ONNX Runtime")
    given = REQUIRED.get(name, {})
    backend = find_backend(name).bind("test", given)
    assert (backend, backend.spec) == (find_backend(name).bind("test", given), name)
    assert hash(backend) == hash(find_backend(name).bind("test", given))


@pytest.mark.parametrize("name", ["eager", "aot_eager", "aot_eager_decomp_partition", "invoke_subgraph"])
def test_backends_of_dynamo_compile(name):
    """torch's own simple backends run through ours."""
    compile_and_run(bk.make_backend(name))


def test_config():
    """The configuration of such a backend is its options."""
    assert bk.make_backend(named, level=2).get_compiler_config() == {"level": 2}


class Stateful:
    dropped = 0

    def __call__(self, gm, example_inputs):
        return gm.forward

    def get_compiler_config(self):
        return {"own": 1}

    def reset(self):
        self.dropped += 1


def test_own_config_and_reset():
    """A target's own get_compiler_config and reset are used; torch._dynamo.reset() calls the latter."""
    target = Stateful()
    backend = bk.make_backend(target)
    assert backend.get_compiler_config() == {"own": 1}
    compile_and_run(backend)
    torch._dynamo.reset()
    assert target.dropped == 1
