"""Inductor backends through real torch.compile: what is compiled, with which options, and what stays unchanged."""

import contextlib
import copy
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import backend_kwargs as bk
from backend_kwargs.torch_internals.compile_fx import inductor_wrapper
from backend_kwargs.torch_internals.inductor_config import CLONING, entries
from tests import forks

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

X = torch.randn(4, 4)
CUPTI = ("DISABLE_CUPTI_LAZY_REINIT", "TEARDOWN_CUPTI")


def mm(x: torch.Tensor) -> torch.Tensor:
    """Multiply by a library call, which needs no C++ compiler and compiles quickly."""
    return x @ x


class Watch:
    """An Inductor pass that records the named options while each graph is lowered."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.seen: list[Any] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        values = tuple(getattr(config, name) for name in self.names)
        self.seen.append(values if len(values) > 1 else values[0])


def watched(watch: Watch, spec: str = "tmpl-inductor", **options: Any) -> bk.Backend:
    return bk.make_backend(spec, options, post_grad_custom_post_pass=watch)


@pytest.fixture(autouse=True)
def _counted():
    counters.clear()


def graphs_compiled() -> int:
    return counters["stats"]["unique_graphs"]


# --- how often ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "graphs"),
    [
        pytest.param({"max_fusion_size": 7}, {"max_fusion_size": 7}, 1, id="equal"),
        pytest.param({"max_fusion_size": 7}, {"max-fusion-size": 7}, 1, id="spelled-otherwise"),
        pytest.param({"max_fusion_size": 7}, {"max_fusion_size": 8}, 2, id="different"),
        pytest.param({"debug": True}, {}, 2, id="more"),
    ],
)
def test_compile_count_of_made_backends(first, second, graphs):
    """Equal backends created separately share one compile; different ones do not."""
    for options in (first, second):
        torch.compile(mm, backend=bk.make_backend("tmpl-inductor", options))(X)
    assert graphs_compiled() == graphs


@pytest.mark.parametrize(
    ("first", "second", "graphs"),
    [
        pytest.param({"max_fusion_size": 7}, {"max_fusion_size": 7}, 1, id="equal"),
        pytest.param({"max_fusion_size": 7}, {"max_fusion_size": 8}, 2, id="different"),
    ],
)
def test_compile_count_of_a_named_backend(first, second, graphs):
    """The same holds for a name with options of torch.compile."""
    for options in (first, second):
        torch.compile(mm, backend="tmpl-inductor", options=options)(X)
    assert graphs_compiled() == graphs


def test_a_fresh_equal_backend_compiles_nothing_more():
    """Compiled code is reused by an equal backend that is created or unpickled later."""
    made = bk.make_backend("tmpl-inductor", max_fusion_size=7)
    torch.compile(mm, backend=made)(X)
    for fresh in (eval(repr(made), {"make_backend": bk.make_backend}), bk.Backend.from_config(made.to_config())):
        torch.compile(mm, backend=fresh)(X)
    assert graphs_compiled() == 1


def test_copied_arguments_of_torch_compile():
    """Lightning compiles again with a deep copy of torch.compile's arguments; nothing is compiled twice."""
    kwargs = {"backend": bk.make_backend("tmpl-inductor", max_fusion_size=7), "fullgraph": True}
    for given in (kwargs, copy.deepcopy(kwargs)):
        torch.compile(mm, **given)(X)
    assert graphs_compiled() == 1


def test_dynamic_compiles_once_for_all_sizes():
    """`dynamic=True` works as with any backend."""
    compiled = torch.compile(mm, backend="tmpl-inductor", dynamic=True)
    for size in (4, 5, 6):
        x = torch.randn(size, size)
        assert_close(compiled(x), mm(x))
    assert graphs_compiled() == 1


def test_fullgraph_refuses_a_graph_break():
    """`fullgraph=True` works as with any backend."""

    def breaks(x):
        torch._dynamo.graph_break()
        return x @ x

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(breaks, backend="tmpl-inductor", fullgraph=True)(X)


# --- under which options --------------------------------------------------------------------------------------------


def test_options_hold_in_forward_and_backward():
    """The backward graph, lowered after torch.compile's call, has the options of the forward graph."""
    watch, x = Watch("max_fusion_size"), X.clone().requires_grad_()
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=False):
        out = torch.compile(mm, backend=watched(watch, max_fusion_size=7))(x)
        forward = list(watch.seen)
        out.sum().backward()
    assert (forward, watch.seen) == ([7], [7, 7])


@pytest.mark.parametrize(
    ("spec", "kwargs", "seen"),
    [
        pytest.param("tmpl-inductor", {"mode": "max-autotune-no-cudagraphs"}, (True, False), id="mode"),
        pytest.param("tmpl-inductor:cudagraphs", {}, (False, True), id="template"),
        pytest.param(
            "tmpl-inductor:cudagraphs", {"mode": "max-autotune-no-cudagraphs"}, (True, False), id="mode-over-template"
        ),
        pytest.param(
            "tmpl-inductor",
            {"options": {"template": "cudagraphs", "mode": "max-autotune", "triton.cudagraphs": False}},
            (True, False),
            id="options-over-mode-over-template",
        ),
        pytest.param(
            "tmpl-inductor:max_autotune",
            {"options": {"template": "aten+cudagraphs"}},
            (True, True),
            id="templates-add-up",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::backend_kwargs.BackendKwargsWarning")
def test_precedence_reaches_inductor(spec, kwargs, seen):
    """Options of torch.compile override the backend's, and reach Inductor."""
    watch = Watch("max_autotune", "triton.cudagraphs")
    backend = bk.make_backend(spec, post_grad_custom_post_pass=watch)
    torch.compile(mm, backend=backend, **kwargs)(X)
    assert watch.seen == [seen]


def test_the_environment_is_the_lowest_layer(monkeypatch):
    """Two variables set options where only a string can be given; torch.compile's own options override them."""
    monkeypatch.setenv("BACKEND_KWARGS_OPTIONS", '{"max_fusion_size": 7, "epilogue_fusion": false}')
    watch = Watch("max_fusion_size", "epilogue_fusion")
    backend = watched(watch)
    torch.compile(mm, backend=backend, options={"max_fusion_size": 8})(X)
    assert watch.seen == [(8, False)]


def test_the_global_config_stands_where_nothing_is_said():
    """Options set in Inductor's own config apply if the backend does not set them."""
    watch = Watch("triton.cudagraphs", "max_fusion_size")
    with config.patch({"triton.cudagraphs": True, "max_fusion_size": 7}):
        torch.compile(mm, backend=watched(watch))(X)
    assert watch.seen == [(True, 7)]


def test_config_patches_of_dynamo():
    """Options that dynamo adds for a graph take precedence."""
    watch = Watch("max_fusion_size")
    gm = torch.fx.symbolic_trace(lambda x: (x @ x,))
    watched(watch, max_fusion_size=7)(gm, [X], config_patches={"max_fusion_size": 9})
    assert watch.seen == [9]


def test_compiler_config_is_plain_inductors():
    """`get_compiler_config` returns the same whole config as plain "inductor" with equal options."""
    options = {"max_autotune": True, "triton.cudagraphs": False}
    plain = torch._TorchCompileInductorWrapper(None, options, None)
    assert bk.make_backend("tmpl-inductor", options).get_compiler_config() == plain.get_compiler_config()


def test_cache_entries_are_shared_with_plain_inductor():
    """The FX-graph cache entries of plain "inductor" are used with equal options, one of which is a CPU's width."""
    hits, width = [], inductor_wrapper({}, (), code_for="cpu").config
    with fresh_cache(), torch._functorch.config.patch(enable_autograd_cache=False):
        for backend, size, more in (("inductor", 7, width), ("tmpl-inductor", 7, {}), ("tmpl-inductor", 8, {})):
            torch._dynamo.reset()
            torch.compile(mm, backend=backend, options={"max_fusion_size": size, **more})(X)
            hits.append(counters["inductor"]["fxgraph_cache_hit"])
    assert hits == [0, 1, 1]


class Regions(TorchDispatchMode):
    """Record the names of the compiled regions that are called."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names += [kwargs["name"]] if kwargs and "name" in kwargs else []
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(torch.__version__ < "2.13", reason="regions have no name in this torch")
def test_region_name_reaches_inductor():
    """The name that newer torch passes to a backend is the compiled region's."""
    backend = bk.make_backend("tmpl-inductor", wrap_inductor_compiled_regions=True)
    compiled = torch.compile(mm, backend=lambda gm, inputs: backend(gm, inputs, name="attention"))
    compiled(X)
    with Regions() as regions:
        compiled(X)
    assert regions.names == ["attention"]


# --- what stays unchanged --------------------------------------------------------------------------------------------


@pytest.fixture
def same_config():
    """Check that Inductor's whole config is the same before and after the test."""
    before = config.get_config_copy()
    yield
    after = config.get_config_copy()
    assert {name: value for name, value in after.items() if value != before[name]} == {}
    assert after.keys() == before.keys()


@pytest.mark.usefixtures("same_config")
def test_config_is_untouched_by_success():
    """Compiling forward and backward does not change Inductor's config."""
    backend = bk.make_backend("tmpl-inductor:coordinate_descent", max_fusion_size=7)
    with pytest.warns(bk.BackendKwargsWarning):
        torch.compile(mm, backend=backend)(X.clone().requires_grad_()).sum().backward()


def broken(graph: torch.fx.Graph) -> None:
    raise LookupError("from inside a pass")


@pytest.mark.usefixtures("same_config")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"_raise_error_for_testing": True}, "AssertionError: ", id="a-failing-compile"),
        pytest.param({"post_grad_custom_post_pass": broken}, "from inside a pass", id="a-pass-that-raises"),
        pytest.param({"epilog_fusion": True}, "Did you mean 'epilogue_fusion'?", id="a-wrong-option"),
    ],
)
def test_config_is_untouched_by_failure(options, message):
    """A failing compile restores the config too, and raises."""
    with pytest.raises(BackendCompilerFailed) as error:
        torch.compile(mm, backend="tmpl-inductor", options={"max_fusion_size": 7, **options})(X)
    assert message in str(error.value)


@pytest.mark.usefixtures("same_config")
def test_threads_keep_their_options_apart():
    """Four threads that compile with different templates each have their own options, and none afterwards."""
    specs = ("default", "fast_compile", "eager_numerics", "aten")
    together, seen, left = threading.Barrier(4), {}, {}

    def work(spec: str, size: int) -> None:
        before, watch = config.get_config_copy(), Watch("max_fusion_size", "fallback_random", "fallback_by_default")
        compiled = torch.compile(lambda x: x @ x, backend=watched(watch, f"tmpl-inductor:{spec}", max_fusion_size=size))
        together.wait()
        compiled(X)
        seen[spec], left[spec] = watch.seen, config.get_config_copy() == before

    threads = [threading.Thread(target=work, args=(spec, size)) for size, spec in enumerate(specs, start=10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {
        "default": [(10, False, False)],
        "fast_compile": [(11, False, True)],
        "eager_numerics": [(12, True, False)],
        "aten": [(13, False, False)],
    }
    assert left == dict.fromkeys(specs, True)


@pytest.mark.filterwarnings("ignore::backend_kwargs.BackendKwargsWarning")
def test_the_callers_options_are_untouched():
    """A dict of options and its values are neither changed nor kept."""
    given = {"template": "cudagraphs", "mode": "max-autotune", "inductor_config": {"max-fusion-size": 7}}
    before = copy.deepcopy(given)
    made = bk.make_backend("tmpl-inductor", given)
    torch.compile(mm, backend="tmpl-inductor", options=given)(X)
    assert given == before
    given["inductor_config"]["max-fusion-size"] = 8
    assert made.options["max_fusion_size"] == 7


def test_a_callers_container_is_not_kept():
    """A backend does not change if the caller changes an option's value afterwards."""
    fusions = {"batch_linear": {}}
    made = bk.make_backend("tmpl-inductor", pre_grad_fusion_options=fusions)
    fusions["batch_linear"]["min_fuse_set_size"] = 9
    assert made.options["pre_grad_fusion_options"] == {"batch_linear": {}}


# --- ways to ask for it ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(torch.compiler, "set_default_backend"), reason="torch before 2.13 lacks it")
def test_default_backend():
    """A backend can be the default of torch.compile."""
    watch = Watch("max_fusion_size")
    torch.compiler.set_default_backend(watched(watch, max_fusion_size=7))
    try:
        torch.compile(mm)(X)
    finally:
        torch.compiler.set_default_backend(None)
    assert watch.seen == [7]


OVERRIDDEN = """
import sys, torch
from torch._inductor.utils import run_and_get_code
x = torch.ones(4, 4)
result, codes = run_and_get_code(torch.compile(lambda x: x @ x, backend="eager"), x)
print(len(codes), "async_compile.cpp_wrapper" in codes[0] or "cpp_wrapper_src" in codes[0], result[0, 0].item())
"""


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({"TORCH_COMPILE_OVERRIDE_BACKENDS": ">=0:tmpl-inductor:cpp_wrapper"}, id="template"),
        pytest.param(
            {
                "TORCH_COMPILE_OVERRIDE_BACKENDS": ">=0:tmpl-inductor",
                "TORCH_COMPILE_OVERRIDE_INDUCTOR_CONFIGS": ">=0:cpp_wrapper=true",
            },
            id="config",
        ),
    ],
)
def test_override_by_environment(variables):
    """torch's debugging variables can replace one backend by another, with a template or with options."""
    child = subprocess.run(
        [sys.executable, "-c", OVERRIDDEN], env=os.environ | variables, capture_output=True, text=True, check=True
    )
    assert child.stdout == "1 True 4.0\n"


def test_wrong_option_is_told_through_dynamo():
    """Options of torch.compile are checked at the first call, and dynamo wraps the error."""
    with pytest.raises(BackendCompilerFailed) as error:
        torch.compile(mm, backend="tmpl-inductor", options={"epilog_fusion": True})(X)
    message = "BackendKwargsError: Unknown Inductor option 'epilog_fusion'. Did you mean 'epilogue_fusion'?"
    assert str(error.value).splitlines()[:2] == ["backend='tmpl-inductor' raised:", message]


def test_suppressed_errors_hide_a_wrong_option_but_not_from_make_backend():
    """With suppress_errors a wrong option of torch.compile runs in eager; make_backend raises at once."""
    with torch._dynamo.config.patch(suppress_errors=True):
        assert_close(torch.compile(mm, backend="tmpl-inductor", options={"epilog_fusion": True})(X), mm(X))
        with pytest.raises(bk.BackendKwargsError):
            bk.make_backend("tmpl-inductor", epilog_fusion=True)


def test_guard_filter_fn_is_torch_compiles():
    """It can be combined with our options in torch.compile: without guards another size compiles nothing."""
    options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe, "max_fusion_size": 7}
    compiled = torch.compile(mm, backend="tmpl-inductor", options=options)
    compiled(X)
    with pytest.raises((AssertionError, RuntimeError)):
        compiled(torch.ones(5, 5))
    assert graphs_compiled() == 1


def test_guard_filter_fn_is_not_a_backends():
    """A backend cannot have this option, and the error says where to put it."""
    with pytest.raises(bk.BackendKwargsError) as error:
        bk.make_backend("tmpl-inductor", guard_filter_fn=torch.compiler.skip_all_guards_unsafe)
    assert (
        str(error.value)
        == "'guard_filter_fn' is for torch.compile(..., options={'guard_filter_fn': ...}), not a backend."
    )


AHEAD_OF_TIME = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="aot_compile() of torch 2.11 takes no backend but torch's own"
)


@torch.no_grad()
def aot_compiled(backend: Any) -> Callable[..., torch.Tensor]:
    return torch.compile(mm, backend=backend, fullgraph=True).aot_compile(((X,), {}))


@AHEAD_OF_TIME
def test_aot_compile_can_be_saved(tmp_path):
    """`aot_compile()` works and its result can be saved, since compile_fx's result is not wrapped."""
    path = tmp_path / "compiled"
    aot_compiled("tmpl-inductor").save_compiled_function(str(path))
    with path.open("rb") as file, torch.no_grad():
        assert_close(torch.compiler.load_compiled_function(file)(X), mm(X))


@AHEAD_OF_TIME
def test_use_aoti_compiles_ahead_of_time():
    """With `use_aoti=True` the graph becomes an AOTInductor package with the same results, as under "inductor"."""
    backend, packages = bk.make_backend("tmpl-inductor", use_aoti=True), []

    def kept(gm, inputs):
        packages.append(backend(gm, inputs))
        return packages[0]

    ahead = aot_compiled(kept)
    with torch.no_grad():
        assert_close(ahead(X), mm(X))
    assert packages[0].filename[-1].endswith(".wrapper.so")


@pytest.mark.parametrize("cudagraphs", [True, False], ids=["cudagraphs", "without"])
def test_cupti_variables_are_torchs(monkeypatch, cudagraphs):
    """CUDA graphs on an old CUDA set the profiler variables that torch's wrapper sets, and no others."""
    monkeypatch.setattr(torch.version, "cuda", "12.1")

    def variables(make: Callable[[], object]) -> dict[str, str]:
        with monkeypatch.context() as patch:
            for name in CUPTI:
                patch.setenv(name, "unset")  # so that the context restores it afterwards
                os.environ.pop(name)
            make()
            return {name: os.environ[name] for name in CUPTI if name in os.environ}

    options = {"triton.cudagraphs": cudagraphs}
    gm = torch.fx.symbolic_trace(lambda x: (x @ x,))
    plain = variables(lambda: torch.compile(mm, options=dict(options)))
    assert variables(lambda: bk.make_backend("tmpl-inductor", options)(gm, [X])) == plain
    assert bool(plain) == cudagraphs


@pytest.mark.parametrize("cudagraphs", [True, False], ids=["cudagraphs", "without"])
def test_dynamo_reset_resets_the_backend(cudagraphs):
    """torch._dynamo.reset() resets CUDA graphs, as under "inductor": their step counter is 0."""
    from torch._inductor.cudagraph_trees import MarkStepBox

    torch.compile(mm, backend=bk.make_backend("tmpl-inductor", {"triton.cudagraphs": cudagraphs}))(X)
    torch.compiler.cudagraph_mark_step_begin()
    marked = MarkStepBox.mark_step_counter
    torch._dynamo.reset()
    assert MarkStepBox.mark_step_counter == (0 if cudagraphs else marked)
    assert marked != 0


@torch.no_grad()
def test_compiled_code_is_plain_inductors():
    """Without options the generated code is that of plain "inductor"."""
    codes = []
    for backend in ("inductor", "tmpl-inductor"):
        torch._dynamo.reset()
        _, (code,) = run_and_get_code(torch.compile(mm, backend=backend), X)
        codes.append(code.partition("async_compile")[2])
    assert codes[0] == codes[1]


def test_clone_outputs_needs_graph_trees():
    """Without CUDA-graph trees outputs cannot be told apart, and the option raises at once."""
    with pytest.raises(bk.BackendKwargsError) as raised:
        bk.make_backend("tmpl-inductor:cudagraphs", {"triton.cudagraph_trees": False}, clone_outputs=True)
    assert str(raised.value) == "Option 'clone_outputs' needs 'triton.cudagraph_trees': leave that True."


@pytest.mark.parametrize(
    ("template", "options", "copies"),
    [
        pytest.param("auto", {"candidates": []}, True, id="auto"),
        pytest.param("auto", {"candidates": [], "clone_outputs": None}, True, id="auto, not told"),
        pytest.param("auto", {"candidates": [], "clone_outputs": False}, False, id="auto, told not to"),
        pytest.param("default", {}, False, id="default"),
        pytest.param("default", {"clone_outputs": None}, False, id="default, not told"),
        pytest.param("default", {"clone_outputs": True}, True, id="default, told to"),
    ],
)
def test_results_are_copied_under_auto_alone_unless_told(monkeypatch, template, options, copies):
    """`clone_outputs=None` is on if auto may choose CUDA graphs, and off if a user does."""
    from backend_kwargs.backends.inductor import cudagraph_outputs

    wrapped, wrap = [], cudagraph_outputs.with_independent_outputs
    monkeypatch.setattr(
        cudagraph_outputs, "with_independent_outputs", lambda fn, **how: wrapped.append(fn) or wrap(fn, **how)
    )
    backend = bk.make_backend(f"tmpl-inductor:{template}", {"triton.cudagraphs": True} | options)
    assert_close(torch.compile(mm, backend=backend)(X), mm(X))
    assert bool(wrapped) is copies


@pytest.mark.skipif(CLONING not in entries(), reason="torch clones live results from 2.14 on")
@pytest.mark.parametrize(
    ("options", "config", "ours"),
    [
        pytest.param({}, {}, ["backward", "call"], id="torch does not"),
        pytest.param({CLONING: "user_visible"}, {}, ["backward"], id="by an option"),
        pytest.param({}, {CLONING: "user_visible"}, ["backward"], id="by its configuration"),
        pytest.param({CLONING: None}, {CLONING: "user_visible"}, ["backward", "call"], id="not by this option"),
    ],
)
def test_results_that_torch_clones_are_not_copied_here(monkeypatch, options, config, ours):
    """Where torch clones live results of forward graphs itself, the gradients are copied here, and nothing else."""
    from backend_kwargs.backends.inductor import cudagraph_outputs
    from backend_kwargs.torch_internals import inductor_config

    copied, copy = [], cudagraph_outputs._with_copied_results
    monkeypatch.setattr(cudagraph_outputs, "_with_copied_results", lambda fn: copied.append(fn.__name__) or copy(fn))
    backend = bk.make_backend("tmpl-inductor", {"triton.cudagraphs": True} | options, clone_outputs=True)
    x = X.clone().requires_grad_()
    with inductor_config.patched(config):
        torch.compile(mm, backend=backend)(x).sum().backward()
    assert [name if name == "backward" else "call" for name in copied] == ours


def test_copies_of_gradients_change_no_class_of_torch():
    """Gradients of one function are copied; other autograd functions, old and new, have torch's backward pass."""
    backend = bk.make_backend("tmpl-inductor", {"triton.cudagraphs": True}, clone_outputs=True)
    x = X.clone().requires_grad_()
    torch.compile(mm, backend=backend)(x).sum().backward()
    assert vars(torch.autograd.Function).keys().isdisjoint({"forward", "backward"})


def test_functions_of_the_user_stay_as_they_are():
    """A graph that calls an autograd function of the user's has its own among what was compiled, and no other."""
    from torch._inductor.compile_fx import compile_fx

    from backend_kwargs.backends.generated_code import autograd_functions

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    @torch.compiler.allow_in_graph
    def doubled(x):
        return Doubled.apply(x)

    found = []

    def compiler(gm, example_inputs):
        compiled = compile_fx(gm, example_inputs)
        found.extend(each.__name__ for each in autograd_functions(compiled))
        return compiled

    torch.compile(lambda x: doubled(x).sin(), backend=compiler)(X.clone().requires_grad_()).sum().backward()
    assert found == ["CompiledFunction"]


def test_auto_needs_graph_trees_for_its_copies():
    """auto's copies need CUDA-graph trees too; without copies auto does not."""
    with pytest.raises(bk.BackendKwargsError) as raised:
        bk.make_backend("tmpl-inductor:auto", {"triton.cudagraph_trees": False})
    assert str(raised.value) == "Option 'clone_outputs' needs 'triton.cudagraph_trees': leave that True."
    bk.make_backend("tmpl-inductor:auto", {"triton.cudagraph_trees": False}, clone_outputs=False)


@pytest.mark.parametrize("value", [None, True, False])
def test_clone_outputs_may_be_left_open(value):
    """None is accepted as well as True and False, and `explain` shows which applies."""
    backend = bk.make_backend("tmpl-inductor", clone_outputs=value)
    (effect,) = bk.explain(backend).effects
    assert (effect.option, effect.value) == ("clone_outputs", value)


def test_clone_outputs_is_no_text():
    """Another type raises at once with all three values."""
    with pytest.raises(bk.BackendKwargsError) as raised:
        bk.make_backend("tmpl-inductor", clone_outputs="yes")
    assert str(raised.value) == "Option 'clone_outputs' must be bool | None, got 'yes' (str)."


@AHEAD_OF_TIME
def test_clone_outputs_refuses_to_be_saved(tmp_path):
    """aot_compile() raises for copied outputs, since the copies would be lost."""
    backend = bk.make_backend("tmpl-inductor", {"triton.cudagraphs": True}, clone_outputs=True)
    with pytest.raises(bk.BackendKwargsError) as raised:
        aot_compiled(backend).save_compiled_function(tmp_path / "saved")
    assert str(raised.value) == (
        "Option 'clone_outputs' does not survive aot_compile(); clone the outputs in the model."
    )


@AHEAD_OF_TIME
def test_without_cuda_graphs_clone_outputs_is_saved(tmp_path):
    """Without CUDA graphs nothing is copied, so the result can be saved."""
    aot_compiled(bk.make_backend("tmpl-inductor", clone_outputs=True)).save_compiled_function(tmp_path / "saved")


@pytest.mark.parametrize(
    "sizes", [(8, 8), (8, 1 << 21), (1 << 21, 8, 1 << 21), (8,)], ids=["small", "one large", "mixed", "one"]
)
def test_copies_of_outputs(sizes):
    """Each copy has the values, dtype and strides of its output, in memory of its own, in the same order."""
    from backend_kwargs.backends.inductor.cudagraph_outputs import _Plan

    outputs = [
        torch.randn(2, size // 2).t().to(torch.float16 if at % 2 else torch.float32) for at, size in enumerate(sizes)
    ]
    made = _Plan(outputs, [out.data_ptr() for out in outputs]).copies(outputs)
    torch.testing.assert_close(made, outputs, rtol=0, atol=0, check_stride=True)
    assert not {out.data_ptr() for out in outputs} & {copy.data_ptr() for copy in made}


def test_copies_of_some_outputs():
    """Outputs without an address are returned; those with one address share the memory of one copy."""
    from backend_kwargs.backends.inductor.cudagraph_outputs import _Plan

    base, other, bits = torch.randn(8, 8), torch.randn(4), torch.randn(4, dtype=torch.complex64).conj()
    outputs = [base[1:], None, other, base.t(), 7, torch.ones(3).expand(2, 3), other + 1, bits]
    made = _Plan(outputs, [1, None, None, 1, None, 2, 3, 4]).copies(outputs)
    assert [made[at] is outputs[at] for at in range(8)] == [at in (1, 2, 4) for at in range(8)]
    torch.testing.assert_close(made, outputs, rtol=0, atol=0)
    base.zero_()
    made[3].fill_(5)
    assert (made[0] == 5).all()


@pytest.mark.parametrize(
    "other", [torch.zeros(3), torch.zeros(2, dtype=torch.int64), None], ids=["size", "dtype", "None"]
)
def test_copies_of_other_outputs(other):
    """A plan copies nothing of another layout than it was made for."""
    from backend_kwargs.backends.inductor.cudagraph_outputs import _Plan

    outputs = [torch.zeros(2), torch.ones(2)]
    assert _Plan(outputs, [1, 2]).copies([outputs[0], other]) is None


def test_processes_of_two_vector_widths_share_a_cache(tmp_path):
    """Neither takes code for the other's width, with which plain Inductor returns wrong numbers."""
    code = """
import torch, backend_kwargs
from torch._dynamo.utils import counters
x = torch.arange(148.0).view(4, 37)
y = torch.compile(lambda x: x.sin().sum(-1), backend="tmpl-inductor")(x)
torch.testing.assert_close(y, x.sin().sum(-1))
print(counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"])
"""
    narrow = {"AVX512": "avx2", "AVX2": "default"}.get(torch.backends.cpu.get_cpu_capability(), "")
    shared = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    ran = [forks.run("-c", code, env=shared | each) for each in ({}, {}, {"ATEN_CPU_CAPABILITY": narrow})]
    assert [each.stdout for each in ran] == ["0 0\n", "1 1\n", "0 0\n" if narrow else "1 1\n"], ran[-1].stderr


def activations(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    hidden = (x @ w).tanh()
    logits = hidden @ v
    return logits.sin().exp().sum(), logits.detach(), hidden.detach()


def loss(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return activations(x, w, v)[:1]


@pytest.mark.parametrize(
    ("backend", "wrong"),
    [pytest.param("tmpl-inductor", False, id="ours"), pytest.param("inductor", True, id="torch's, still")],
)
@pytest.mark.parametrize(
    ("function", "passes", "donated_buffer"),
    [
        pytest.param(activations, 1, True, id="a saved tensor is a result too"),
        pytest.param(loss, 3, False, id="the backward pass runs again"),
    ],
)
def test_cached_code_overwrites_nothing_that_is_read(backend, wrong, function, passes, donated_buffer):
    """Where it does, as with torch's key of its cache, results change in the backward pass, or gradients are wrong."""
    torch.manual_seed(0)
    x, *weights = (torch.randn(64, 64) / 10 for _ in range(3))
    for weight in weights:
        weight.requires_grad_()

    def run(fn: Callable[..., tuple[torch.Tensor, ...]], passes: int) -> list[torch.Tensor]:
        results = fn(x, *weights)
        gradients = [torch.autograd.grad(results[0], weights, retain_graph=at < passes) for at in range(1, passes + 1)]
        return [*results, *sum(gradients, ())]

    with fresh_cache():
        run(torch.compile(loss, backend=backend), 1)
        torch._dynamo.reset()
        with torch._functorch.config.patch(donated_buffer=donated_buffer):
            pairs = zip(run(torch.compile(function, backend=backend), passes), run(function, passes), strict=True)
            assert all(torch.allclose(got, want, rtol=1e-4, atol=1e-4) for got, want in pairs) is not wrong


@contextlib.contextmanager
def tf32_in_convolutions(allowed: bool):
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = allowed
    yield
    torch.backends.cudnn.allow_tf32 = before


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype):
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("function", "first", "second"),
    [
        pytest.param(
            lambda: X @ X, torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", torch.float16), id="autocast"
        ),
        pytest.param(
            lambda: torch.ones(4) / 3, default_dtype(torch.float32), default_dtype(torch.float64), id="default dtype"
        ),
        pytest.param(lambda: X @ X, tf32_in_convolutions(True), tf32_in_convolutions(False), id="TF32 in convolutions"),
    ],
)
def test_code_for_another_state_of_torch_is_not_found(function, first, second):
    """torch's caches are asked with what code depends on: keys of 2.11 lack the dtypes, those of 2.14 still TF32."""
    with fresh_cache():
        with first:
            torch.compile(function, backend="tmpl-inductor")()
        torch._dynamo.reset()
        counters.clear()
        with second:
            assert_close(torch.compile(function, backend="tmpl-inductor")(), function())
        assert not counters["inductor"]["fxgraph_cache_hit"]
        assert not counters["aot_autograd"]["autograd_cache_hit"]
