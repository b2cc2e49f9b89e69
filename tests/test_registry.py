"""Names: made, registered, listed; and the precedence of options."""

from functools import partial

import pytest
import torch

import backend_kwargs as bk
from backend_kwargs import BackendKwargsError, BackendKwargsWarning, make_backend
from backend_kwargs.options.templates import BUILT_IN

INDUCTOR = "tmpl-inductor"
NO_NAME = "name must be letters, digits and '_', '-', '.', a letter first, got"


def target(gm, example_inputs, *, level=1):
    return gm.forward


def other(gm, example_inputs, *, level=1):
    return gm.forward


class Target:
    def __call__(self, gm, example_inputs, *, level=1):
        return gm.forward


NOT_CALLABLE = 3


def refusal(make, *args, **kwargs):
    with pytest.raises(BackendKwargsError) as e:
        make(*args, **kwargs)
    return str(e.value)


# --- what make_backend accepts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "spelled"),
    [
        pytest.param(INDUCTOR, INDUCTOR, id="ours"),
        pytest.param(f"{INDUCTOR}:freezing", f"{INDUCTOR}:freezing", id="template"),
        pytest.param(f"{INDUCTOR}:aten+freezing", f"{INDUCTOR}:aten+freezing", id="composed"),
        pytest.param("inductor:freezing", "inductor:freezing", id="inductor"),
        pytest.param("eager", "eager", id="of-dynamo"),
        pytest.param("dynamo:eager", "eager", id="of-dynamo-for-certain"),
        pytest.param("dynamo:inductor", "dynamo:inductor", id="hidden-by-ours"),
        pytest.param(f"dynamo:{INDUCTOR}:freezing", f"{INDUCTOR}:freezing", id="our-entry-point"),
        pytest.param(f"{__name__}:target", f"{__name__}:target", id="qualified"),
        pytest.param(target, f"{__name__}:target", id="function"),
        pytest.param(lambda gm, inputs: gm, f"{__name__}:<lambda>", id="lambda"),
        pytest.param(partial(target, level=2), f"{__name__}:target", id="partial"),
        pytest.param(Target(), f"{__name__}:Target", id="instance"),
    ],
)
def test_make_backend(spec, spelled):
    """Each way to name a backend gives one with its canonical name."""
    assert make_backend(spec).spec == spelled


def test_make_backend_of_a_backend():
    """make_backend of a Backend adds options with higher precedence."""
    b = make_backend(f"{INDUCTOR}:freezing", {"max_autotune": True, "epilogue_fusion": False})
    assert make_backend(b) is b
    assert make_backend(b, max_autotune=False) == make_backend(
        f"{INDUCTOR}:freezing", {"max_autotune": False, "epilogue_fusion": False}
    )


def test_kwargs_lie_over_options():
    """A keyword argument overrides the mapping."""
    assert dict(make_backend(target, {"level": 2}, level=3).options) == {"level": 3}


def test_a_backend_hides_a_module():
    """`package.module:function` is imported only if no backend has exactly this name."""
    assert make_backend(f"{INDUCTOR}:freezing").takes_inductor_options
    torch._dynamo.register_backend(target, name=f"{__name__}:other")
    assert make_backend(f"{__name__}:other") == make_backend(target)


def test_make_backend_compiles(fresh_dynamo):
    """The result of make_backend is a backend for torch.compile."""
    x = torch.ones(2)
    assert torch.equal(torch.compile(lambda x: x + 1, backend=make_backend("eager"))(x), x + 1)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        pytest.param("eage", {}, "Unknown backend 'eage'. Did you mean 'eager'?", id="near"),
        pytest.param(
            "auto",
            {},
            "Unknown backend 'auto'; it is a template. Did you mean 'tmpl-inductor:auto'?",
            id="a template",
        ),
        pytest.param(
            "aten+auto",
            {},
            "Unknown backend 'aten+auto'; it is a template. Did you mean 'tmpl-inductor:aten+auto'?",
            id="templates",
        ),
        pytest.param("qqq", {}, "Unknown backend 'qqq'. `backend-kwargs list` shows all.", id="unknown"),
        pytest.param("", {}, "Unknown backend ''. `backend-kwargs list` shows all.", id="empty"),
        pytest.param("dynamo:eage", {}, "Unknown dynamo backend 'eage'. Did you mean 'eager'?", id="dynamo-near"),
        pytest.param(
            "dynamo:qqq", {}, "Unknown dynamo backend 'qqq'. `backend-kwargs list` shows all.", id="dynamo-unknown"
        ),
        pytest.param("dynamo:", {}, "Unknown dynamo backend ''. `backend-kwargs list` shows all.", id="dynamo-empty"),
        pytest.param(3, {}, "A backend's spec must be a str or a callable, got 3 (int).", id="number"),
        pytest.param(None, {}, "A backend's spec must be a str or a callable, got None (NoneType).", id="none"),
        pytest.param(
            "nowhere:f",
            {},
            "No backend is called 'nowhere:f', and it cannot be imported: "
            "ModuleNotFoundError: No module named 'nowhere'.",
            id="no-module",
        ),
        pytest.param(
            "math:f",
            {},
            "No backend is called 'math:f', and it cannot be imported: "
            "AttributeError: module 'math' has no attribute 'f'.",
            id="no-attribute",
        ),
        pytest.param(
            f"{__name__}:NOT_CALLABLE",
            {},
            "A backend's spec must be a str or a callable, got 3 (int).",
            id="no-callable",
        ),
        pytest.param("eager:aten", {}, "Backend 'eager' has no templates, got 'aten'.", id="no-templates"),
        pytest.param(
            "tmpl-inductr:aten",
            {},
            "Unknown backend 'tmpl-inductr:aten'. Did you mean 'tmpl-inductor:aten'?",
            id="near-colon",
        ),
        pytest.param(
            f"{INDUCTOR}:freezing",
            {"use_aoti": True},
            "Options 'use_aoti' and 'freezing' cannot be combined; leave one out.",
            id="aoti-freezing",
        ),
        pytest.param(f"{INDUCTOR}:", {}, f"A template's {NO_NAME} '' (str).", id="no-template"),
        pytest.param(f"{INDUCTOR}:a+", {}, f"A template's {NO_NAME} '' (str).", id="no-second-template"),
        pytest.param(f"{INDUCTOR}:a:b", {}, f"A template's {NO_NAME} 'a:b' (str).", id="two-colons"),
        pytest.param(
            f"{INDUCTOR}:max_autotun", {}, "Unknown template 'max_autotun'. Did you mean 'max_autotune'?", id="template"
        ),
        pytest.param(
            INDUCTOR,
            {"epilog_fusion": True},
            "Unknown Inductor option 'epilog_fusion'. Did you mean 'epilogue_fusion'?",
            id="option",
        ),
        pytest.param(
            INDUCTOR,
            {"qqq": True},
            "Unknown Inductor option 'qqq'. Search them with: backend-kwargs explain inductor PATTERN",
            id="far-option",
        ),
        pytest.param(
            f"{INDUCTOR}:auto", {"budget": 3}, "Unknown option 'budget'. Did you mean 'budget_s'?", id="option-of-ours"
        ),
        pytest.param(
            INDUCTOR, {"clone_output": 1}, "Unknown option 'clone_output'. Did you mean 'clone_outputs'?", id="ours-too"
        ),
        pytest.param(INDUCTOR, {"strict": 1}, "Option 'strict' must be bool, got 1 (int).", id="value-of-ours"),
        pytest.param(INDUCTOR, {3: True}, "Inductor option name must be str, got 3 (int).", id="option-no-str"),
        pytest.param(INDUCTOR, {"freezing": 1}, "Inductor option 'freezing' must be bool, got 1 (int).", id="value"),
        pytest.param(INDUCTOR, {"template": 3}, f"A template's {NO_NAME} 3 (int).", id="template-no-str"),
        pytest.param(INDUCTOR, {"template": ["a"]}, f"A template's {NO_NAME} ['a'] (list).", id="template-list"),
        pytest.param(
            INDUCTOR,
            {"mode": "fast"},
            "Unknown mode 'fast'. Modes are default, lite, reduce-overhead, max-autotune-no-cudagraphs, max-autotune.",
            id="mode",
        ),
        pytest.param(
            INDUCTOR,
            {"mode": "max-autotun"},
            "Unknown mode 'max-autotun'. Did you mean 'max-autotune'?",
            id="near-mode",
        ),
        pytest.param(
            INDUCTOR,
            {"mode": [3]},
            "Unknown mode [3]. Modes are default, lite, reduce-overhead, max-autotune-no-cudagraphs, max-autotune.",
            id="mode-unhashable",
        ),
        pytest.param(
            INDUCTOR,
            {"inductor_config": 3},
            "'inductor_config' must be a mapping of options, got 3 (int).",
            id="config",
        ),
        pytest.param(INDUCTOR, {"options": 3}, "'options' must be a mapping of options, got 3 (int).", id="options"),
        pytest.param(
            INDUCTOR,
            {"guard_filter_fn": target},
            "'guard_filter_fn' is for torch.compile(..., options={'guard_filter_fn': ...}), not a backend.",
            id="guard_filter_fn",
        ),
        pytest.param("eager", {"a": 1}, "Backend 'eager' has no option 'a'; it takes none.", id="takes-none"),
    ],
)
def test_make_backend_refuses(spec, options, message):
    """Mistakes raise at once, with the expected value, the given value, and the next step."""
    assert refusal(make_backend, spec, options) == message
    assert len(message) < 400


def test_options_want_a_mapping():
    """Options that are not a mapping raise."""
    assert refusal(make_backend, INDUCTOR, [1]) == "make_backend's `options` must be a mapping, got [1] (list)."


@pytest.mark.skipif(torch.cuda.is_available(), reason="the template works here")
def test_strict_refuses_what_cannot_work_here():
    """With strict=True a template without effect raises with the reason and the remedy."""
    message = "Template 'cudagraphs' cannot work here: no CUDA GPU is visible."
    assert refusal(make_backend, f"{INDUCTOR}:cudagraphs", strict=True) == message
    make_backend(f"{INDUCTOR}:cudagraphs")


def test_broken_backend_of_a_package(monkeypatch):
    """A backend whose entry point fails to load is named in the error; the others still work."""
    from importlib.metadata import EntryPoint

    from torch._dynamo.backends.registry import _BACKENDS

    _BACKENDS["unlucky"] = EntryPoint("unlucky", "nowhere:f", "torch_dynamo_backends")
    message = "Backend 'unlucky' does not load: ModuleNotFoundError: No module named 'nowhere'."
    assert refusal(make_backend, "unlucky") == message
    assert "unlucky" in bk.list_backends()
    make_backend("eager")


# --- precedence: rule 1 of the design -------------------------------------------------------------------------------

CUDAGRAPHS = "triton.cudagraphs"


@pytest.mark.parametrize(
    ("spec", "bound", "call", "patches", "value"),
    [
        pytest.param("default", {}, {}, {}, None, id="inductors-default"),
        pytest.param("cudagraphs", {}, {}, {}, True, id="template"),
        pytest.param("cudagraphs+max_autotune_no_cudagraphs", {}, {}, {}, False, id="later-template"),
        pytest.param("max_autotune_no_cudagraphs+cudagraphs", {}, {}, {}, True, id="later-template-the-other-way"),
        pytest.param("cudagraphs", {CUDAGRAPHS: False}, {}, {}, False, id="option-over-template"),
        pytest.param("cudagraphs", {"mode": "max-autotune-no-cudagraphs"}, {}, {}, False, id="mode-over-template"),
        pytest.param("default", {"mode": "reduce-overhead", CUDAGRAPHS: False}, {}, {}, False, id="option-over-mode"),
        pytest.param(
            "default",
            {"template": "cudagraphs", "mode": "max-autotune-no-cudagraphs"},
            {},
            {},
            False,
            id="mode-over-template-of-one-source",
        ),
        pytest.param(
            "default",
            {"template": "cudagraphs", "inductor_config": {CUDAGRAPHS: False}},
            {},
            {},
            False,
            id="inductor_config-over-template",
        ),
        pytest.param(
            "default", {"inductor_config": {CUDAGRAPHS: False}, CUDAGRAPHS: True}, {}, {}, True, id="option-over-config"
        ),
        pytest.param("default", {CUDAGRAPHS: False}, {"template": "cudagraphs"}, {}, True, id="call-over-bound"),
        pytest.param(
            "cudagraphs", {CUDAGRAPHS: True}, {"mode": "max-autotune-no-cudagraphs"}, {}, False, id="calls-mode"
        ),
        pytest.param(
            "default", {}, {"template": "cudagraphs", CUDAGRAPHS: False}, {}, False, id="calls-option-over-its-template"
        ),
        pytest.param("cudagraphs", {CUDAGRAPHS: False}, {CUDAGRAPHS: False}, {CUDAGRAPHS: True}, True, id="patches"),
    ],
)
@pytest.mark.filterwarnings("ignore::backend_kwargs.BackendKwargsWarning")
def test_precedence(spec, bound, call, patches, value):
    """The later source wins: template, make_backend, the call, dynamo's patches; in each template, mode, options."""
    backend = make_backend(f"{INDUCTOR}:{spec}", bound)
    final = backend.bind("torch.compile", call).bind("dynamo's config_patches", patches)
    assert final.options.get(CUDAGRAPHS) is value


@pytest.mark.parametrize(
    ("bound", "value"),
    [
        pytest.param({}, True, id="environment"),
        pytest.param({"freezing": False}, False, id="option-over-environment"),
        pytest.param({"template": "freezing"}, True, id="template-over-environments-option"),
    ],
)
def test_environment_is_the_lowest(monkeypatch, bound, value):
    """make_backend's options override the environment's."""
    options = '{"freezing": false}' if "template" in bound else '{"freezing": true}'
    monkeypatch.setenv("BACKEND_KWARGS_OPTIONS", options)
    assert make_backend(INDUCTOR, bound).options["freezing"] is value


def test_contradiction_is_told():
    """Templates that disagree are named in a warning, with the value that wins."""
    expected = (
        "template cudagraphs and template max_autotune_no_cudagraphs disagree on 'triton.cudagraphs'; "
        "the later wins: False."
    )
    with pytest.warns(BackendKwargsWarning) as warned:
        make_backend(f"{INDUCTOR}:cudagraphs+max_autotune_no_cudagraphs")
    assert [str(w.message) for w in warned] == [expected]


def test_contradiction_across_a_third_is_told():
    """Templates that disagree warn even if another one is between them."""
    with pytest.warns(BackendKwargsWarning, match="template triton and template aten disagree on") as warned:
        make_backend(f"{INDUCTOR}:triton+cpp_wrapper+aten")
    assert len(warned) == 2
    assert {warning.filename for warning in warned} == {__file__}


def test_agreement_is_not_told():
    """Templates that agree, or set different options, combine without a warning."""
    b = make_backend(f"{INDUCTOR}:max_autotune+cudagraphs+freezing")
    assert dict(b.options) == {**BUILT_IN["max_autotune"].options, "freezing": True}


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [
        pytest.param(lambda gm: gm, "<function <lambda>", id="one-argument"),
        pytest.param(lambda: None, "<function <lambda>", id="none"),
    ],
)
def test_a_backend_takes_a_graph_and_inputs(wrong, shown):
    """A callable that cannot take a graph and its inputs raises at once."""
    message = refusal(make_backend, wrong)
    assert message.startswith(f"A backend must be a callable that takes (gm, example_inputs), got {shown}")


def test_a_module_that_fails_is_one_line(tmp_path, monkeypatch):
    """A module that raises at import gives a one-line error, whatever it raised."""
    (tmp_path / "failing_module.py").write_text("raise RuntimeError('one\\ntwo')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert refusal(make_backend, "failing_module:f") == (
        "No backend is called 'failing_module:f', and it cannot be imported: RuntimeError: one two."
    )


# --- register_backend -----------------------------------------------------------------------------------------------


def test_register_backend(fresh_dynamo):
    """A registered name works in torch.compile and in make_backend, and is listed."""
    b = bk.register_backend("mine", target)
    assert (make_backend("mine"), b.spec) == (b, "mine")
    assert "mine" in bk.list_backends()
    assert torch.compile(lambda x: x + 1, backend="mine", options={"level": 2})(torch.ones(1)) == 2


def test_register_backend_of_a_backend():
    """A Backend can be registered under another name, and keeps its repr."""
    b = make_backend(f"{INDUCTOR}:freezing", max_autotune=True)
    bk.register_backend("mine", b)
    assert make_backend("mine") is b
    assert torch._dynamo.lookup_backend("mine") is b


def test_register_backend_of_a_partial():
    """The arguments of a partial are bound under its name."""
    bk.register_backend("mine", partial(target, level=2))
    assert repr(make_backend("mine")) == "make_backend('mine', {'level': 2})"
    assert eval(repr(make_backend("mine"))) == make_backend("mine")


def test_register_backend_again():
    """Registering the same content twice is fine."""
    assert bk.register_backend("mine", target) is bk.register_backend("mine", target)


def test_register_what_dynamo_has():
    """A function that dynamo has under exactly this name counts as the same content."""
    torch._dynamo.register_backend(target, name="mine")
    assert bk.register_backend("mine", target) == make_backend("mine")


@pytest.mark.parametrize(
    ("name", "fn", "message"),
    [
        pytest.param("mine", other, "Backend 'mine' exists and is another; choose another name.", id="other-content"),
        pytest.param("eager", target, "Backend 'eager' exists and is another; choose another name.", id="of-dynamo"),
        pytest.param("inductor", target, "Backend 'inductor' exists and is another; choose another name.", id="ours"),
        pytest.param(
            "inductor",
            torch._dynamo.lookup_backend("inductor"),
            "Backend 'inductor' exists and is another; choose another name.",
            id="hidden-by-ours",
        ),
        pytest.param("a:b", target, f"A backend's {NO_NAME} 'a:b' (str).", id="colon"),
        pytest.param("", target, f"A backend's {NO_NAME} '' (str).", id="empty"),
        pytest.param(3, target, f"A backend's {NO_NAME} 3 (int).", id="no-str"),
        pytest.param("new", 3, "A backend's spec must be a str or a callable, got 3 (int).", id="no-callable"),
    ],
)
def test_register_backend_refuses(name, fn, message):
    """A taken or invalid name raises, and the existing registration stays."""
    bk.register_backend("mine", target)
    before = bk.list_backends()
    assert refusal(bk.register_backend, name, fn) == message
    assert (bk.list_backends(), make_backend("mine")) == (before, make_backend(target))


# --- register_template ----------------------------------------------------------------------------------------------


def test_register_template():
    """A registered template has a spec, is known to dynamo, and overrides its base's options."""
    bk.register_template("serve", {CUDAGRAPHS: False}, base="max_autotune", summary="for the server")
    b = make_backend(f"{INDUCTOR}:serve")
    assert dict(b.options) == {**BUILT_IN["max_autotune"].options, CUDAGRAPHS: False}
    assert (b.summary, b.compiler_name) == ("for the server", f"{INDUCTOR}:serve")
    assert torch._dynamo.lookup_backend(f"{INDUCTOR}:serve") is b


def test_register_template_of_a_mode():
    """A template can be made from a mode and has its options."""
    bk.register_template("quick", {"mode": "reduce-overhead", "freezing": True})
    assert dict(make_backend(f"{INDUCTOR}:quick").options) == {CUDAGRAPHS: True, "freezing": True}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("serve", {"max_autotune": True}, id="registered"),
        pytest.param("serve", {"max-autotune": True}, id="dash"),
        pytest.param("freezing", {"freezing": True}, id="built-in"),
    ],
)
def test_register_template_again(name, options):
    """Registering the same content under a taken name is fine, and changes nothing."""
    bk.register_template("serve", {"max_autotune": True})
    before = bk.list_templates(), bk.get_template(name)
    bk.register_template(name, options, summary="another")
    assert (bk.list_templates(), bk.get_template(name)) == before


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        pytest.param(
            "serve",
            {"options": {"max_autotune": False}},
            "Template 'serve' exists with other options; choose another name.",
            id="other-content",
        ),
        pytest.param(
            "freezing",
            {"base": "aten"},
            "Template 'freezing' exists with other options; choose another name.",
            id="taken",
        ),
        pytest.param("a+b", {}, f"A template's {NO_NAME} 'a+b' (str).", id="name"),
        pytest.param("new", {"base": "aen"}, "Unknown template 'aen'. Did you mean 'aten'?", id="base"),
        pytest.param("new", {"base": ["aten"]}, f"A template's {NO_NAME} ['aten'] (list).", id="base-no-str"),
        pytest.param("new", {"options": 3}, "A template's `options` must be a mapping, got 3 (int).", id="options"),
        pytest.param(
            "new",
            {"options": {"max_autotun": True}},
            "Unknown Inductor option 'max_autotun'. Did you mean 'max_autotune'?",
            id="option",
        ),
        pytest.param(
            "new",
            {"options": {"freezing": "yes"}},
            "Inductor option 'freezing' must be bool, got 'yes' (str).",
            id="value",
        ),
    ],
)
def test_register_template_refuses(name, kwargs, message):
    """A wrong template raises, and nothing is registered."""
    bk.register_template("serve", {"max_autotune": True})
    before = bk.list_templates(), bk.list_backends()
    assert refusal(bk.register_template, name, **kwargs) == message
    assert (bk.list_templates(), bk.list_backends()) == before


def test_load_templates_registers_all_or_none(tmp_path):
    """If one template's name is taken, nothing of the file is registered."""
    (tmp_path / "t.toml").write_text("[templates.fine]\nbase = 'aten'\n[templates.freezing]\nbase = 'aten'\n")
    message = "Template 'freezing' exists with other options; choose another name."
    assert refusal(bk.load_templates, tmp_path / "t.toml") == message
    assert bk.list_templates() == list(BUILT_IN)


def test_load_templates_publishes(tmp_path):
    """Each template of a file is known to dynamo."""
    (tmp_path / "t.toml").write_text("[templates.one]\nbase = 'aten'\n[templates.two]\nbase = 'one+freezing'\n")
    bk.load_templates(tmp_path / "t.toml")
    assert {f"{INDUCTOR}:one", f"{INDUCTOR}:two"} <= set(bk.list_backends())


# --- lists ----------------------------------------------------------------------------------------------------------


def test_list_backends():
    """Every name of ours and of dynamo is listed once, in order, and can be looked up."""
    names = bk.list_backends()
    assert names == sorted(set(names))
    assert {"eager", "inductor", INDUCTOR, f"{INDUCTOR}:freezing"} <= set(names)
    # Found by these names too; the entry points of removed backends only say what to write instead.
    ours, removed = {"onnxruntime", "openvino-native"}, {"tmpl-openvino", "tmpl-tensorrt"}
    assert set(names) == ours | {*torch._dynamo.list_backends(None)} - removed


def test_list_templates():
    """Built-in templates are listed first."""
    assert bk.list_templates() == list(BUILT_IN)


def test_a_registration_asks_nothing_of_this_machine():
    """A strict template without effect here can be registered, for machines where it has one."""
    bk.register_template("strict_tma", {"strict": True}, base="tma")
    assert "strict_tma" in bk.list_templates()


def test_a_refused_registration_leaves_nothing():
    """If dynamo has another backend with this name, the template is not registered either."""
    torch._dynamo.register_backend(target, name=f"{INDUCTOR}:taken")
    assert refusal(bk.register_template, "taken", {"max_autotune": True}) == (
        "Backend 'tmpl-inductor:taken' exists and is another; choose another name."
    )
    assert "taken" not in bk.list_templates()


def test_templates_together_by_the_ways_of_readme(fresh_dynamo):
    """dynamo refuses "a+b"; a Backend, the option `template` and a registered name compile with equal options."""
    with pytest.raises(torch._dynamo.exc.InvalidBackend):
        torch.compile(torch.sin, backend="tmpl-inductor:aten+fast_compile")
    bk.register_template("both", base="aten+fast_compile")
    ways = (
        {"backend": bk.make_backend("tmpl-inductor:aten+fast_compile")},
        {"backend": "tmpl-inductor", "options": {"template": "aten+fast_compile"}},
        {"backend": "tmpl-inductor:both"},
    )
    found = []
    for way in ways:
        compiled = torch.compile(lambda x: x.sin() + 1, **way)
        compiled(torch.ones(2))
        found.append(dict(bk.report(compiled).graphs[0].options))
    assert found[0] == found[1] == found[2] != {}


class Given:
    """A class whose instances are compiled graphs, as some backends are written."""

    def __init__(self, gm, example_inputs):
        self.gm = gm

    def __call__(self, *inputs):
        return self.gm.forward(*inputs)


@pytest.mark.parametrize(
    "given", [torch.nn.Linear, torch.nn.Linear(2, 2), dict, int], ids=["module class", "module", "dict", "int"]
)
def test_what_is_no_backend_is_refused(given):
    """A module, or a class whose instances cannot be called, is no backend, whatever arguments it takes."""
    with pytest.raises(
        BackendKwargsError, match=r"^A backend must be a callable that takes \(gm, example_inputs\), got"
    ):
        make_backend(given)


def test_class_whose_instances_are_compiled_graphs_is_a_backend():
    """A class is a backend if it takes a graph and its instances can be called."""
    assert torch.compile(lambda x: x + 1, backend=make_backend(Given))(torch.ones(2)).tolist() == [2, 2]


def test_version():
    """The package has its version."""
    from importlib.metadata import version

    assert bk.__version__ == version("backend-kwargs")
