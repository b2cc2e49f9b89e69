"""Facts about torch on which the package relies, one test for each."""

import functools
import inspect
import os
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config, list_mode_options
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.runtime import compile_tasks
from torch._inductor.utils import fresh_cache, run_and_get_code

from backend_kwargs.backends.inductor.compiler import TORCH_COMPILE_ONLY
from backend_kwargs.options.machine import LEAST_SMS
from backend_kwargs.pipeline import OWN

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

X = torch.randn(4, 4)


def mm(x: torch.Tensor) -> torch.Tensor:
    return x @ x


class Recorder:
    """A backend that runs graphs in eager and keeps the arguments that dynamo passed."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, list[Any], dict[str, Any]]] = []
        self.resets = 0

    def __call__(self, gm, example_inputs, **kwargs):
        self.calls.append((gm, example_inputs, kwargs))
        return gm.forward

    def reset(self) -> None:
        self.resets += 1


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


# --- torch.compile --------------------------------------------------------------------------------------------------


def test_mode_and_options_together_are_refused():
    """torch.compile refuses mode with options, so our options accept a `mode`."""
    with pytest.raises(RuntimeError) as error:
        torch.compile(mm, backend="eager", mode="default", options={"a": 1})
    assert str(error.value) == (
        "Either mode or options can be specified, but both can't be specified at the same time."
    )


@pytest.mark.parametrize(
    ("given", "kwargs"),
    [
        pytest.param({}, {}, id="nothing"),
        pytest.param({"mode": "default"}, {}, id="default-mode"),
        pytest.param({"options": {}}, {}, id="no-options"),
        pytest.param({"mode": "any"}, {"mode": "any"}, id="mode"),
        pytest.param({"options": {"a": 1}}, {"options": {"a": 1}}, id="options"),
        pytest.param({"options": {"a": 1}, "dynamic": True}, {"options": {"a": 1}}, id="dynamic-is-kept"),
    ],
)
def test_a_backend_gets_mode_and_options_only_where_they_say_something(recorder, given, kwargs):
    """A backend gets the keywords `mode` and `options` only if they are set."""
    torch.compile(mm, backend=recorder, **given)(X)
    assert recorder.calls[0][2] == kwargs


@pytest.mark.parametrize("name", ["guard_filter_fn", "use_aoti"])
def test_torch_takes_an_option_out_of_the_callers_dict(name):
    """torch removes two options from the dict; `use_aoti` has an effect only for "inductor"."""
    options = {name: None, "a": 1}
    torch.compile(mm, backend="eager", options=options)
    assert options == {"a": 1}


def test_example_inputs_are_the_real_tensors(recorder):
    """example_inputs are real tensors, including parameters, whose values freezing reads."""
    net = nn.Linear(4, 4)
    torch.compile(net, backend=recorder)(X)
    inputs = recorder.calls[0][1]
    assert {id(net.weight), id(net.bias), id(X)} == {id(value) for value in inputs}


def test_parameters_are_inputs_that_know_their_source(recorder):
    """Parameters are inputs with `_dynamo_source`, and the graph has `_param_name_to_source`."""
    from torch._dynamo.source import DictGetItemSource, UnspecializedParamBufferSource

    torch.compile(nn.Linear(4, 4), backend=recorder)(X)
    gm = recorder.calls[0][0]
    sources = [node._dynamo_source for node in gm.graph.find_nodes(op="placeholder")]
    lifted = [
        s for s in sources if isinstance(s, DictGetItemSource) and isinstance(s.base, UnspecializedParamBufferSource)
    ]
    assert (len(sources), len(lifted)) == (3, 2)
    assert isinstance(gm._param_name_to_source, dict)


@torch.no_grad()
def test_plain_freezing_freezes_nothing():
    """Inductor's freezing alone freezes nothing, so ours re-attaches the parameters."""
    net = nn.Linear(4, 4).eval()
    _, (code,) = run_and_get_code(torch.compile(net, options={"freezing": True}), X)
    assert "_frozen_param" not in code


def test_dynamo_resets_backends(recorder):
    """torch._dynamo.reset() calls `reset` of the backends that were used."""
    torch.compile(mm, backend=recorder)(X)
    torch._dynamo.reset()
    assert recorder.resets >= 1


def test_a_fresh_closure_recompiles():
    """dynamo compares backends with `==`, so ours are values."""
    counters.clear()
    for _ in range(2):
        torch.compile(mm, backend=functools.partial(lambda gm, inputs: gm.forward))(X)
    assert counters["stats"]["unique_graphs"] == 2


def test_recompiles_are_limited_to_eight():
    """Recompiles are limited to eight, so `compare` isolates its candidates."""
    assert torch._dynamo.config.recompile_limit == 8


# --- dynamo's registry ----------------------------------------------------------------------------------------------


def test_entry_points_with_a_colon_are_listed():
    """Each "tmpl-inductor:NAME" is listed as a backend, with dynamo's own."""
    ours = {entry.name for entry in entry_points(group="torch_dynamo_backends") if "tmpl-inductor" in entry.name}
    assert ours | {"inductor", "eager"} <= set(torch._dynamo.list_backends(None))


def test_an_unknown_name_is_refused_before_any_backend_runs():
    """An unknown name raises at once, so `a+b` in a string needs make_backend."""
    from torch._dynamo.exc import InvalidBackend

    with pytest.raises(InvalidBackend):
        torch.compile(mm, backend="tmpl-inductor:max_autotune+freezing")


def test_registering_refuses_a_second():
    """Registering a taken name raises; up to torch 2.14 it marks the object, so Backend is not frozen."""
    registered = Recorder()
    torch._dynamo.register_backend(registered, name="once")
    assert getattr(registered, "_tags", ()) == ()
    with pytest.raises(AssertionError, match="duplicate name"):
        torch._dynamo.register_backend(Recorder(), name="once")


# --- torch's wrapper of Inductor ------------------------------------------------------------------------------------


def test_the_wrapper_holds_its_config():
    """The wrapper keeps its config, so we pass it CUDA graphs for the CUPTI variables, and replace the rest."""
    wrapper = torch._TorchCompileInductorWrapper(None, {"triton.cudagraphs": True}, None)
    assert wrapper.config == {"triton.cudagraphs": True}
    assert callable(wrapper.reset)


def test_the_ahead_of_time_wrapper_adds_two_options():
    """The ahead-of-time wrapper adds two options, which ours keeps."""
    wrapper = torch._TorchCompileAOTInductorWrapper(None, {}, None)
    assert wrapper.config == {"cpp_wrapper": True, "aot_inductor.package": True}


def test_the_wrapper_refuses_values_for_untyped_options():
    """The wrapper refuses untyped options, so ours do not use its apply_options()."""
    with pytest.raises(RuntimeError, match="Unexpected type of attr"):
        torch._TorchCompileInductorWrapper(None, {"cuda.cutlass_op_allowlist_regex": "a"}, None)


def test_modes():
    """The mode "max-autotune-no-cudagraphs" does not turn CUDA graphs off, so ours does."""
    modes = list_mode_options()
    assert set(modes) == {"default", "lite", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"}
    assert "triton.cudagraphs" not in modes["max-autotune-no-cudagraphs"]


def test_no_inductor_option_has_a_name_that_we_use():
    """No Inductor option has the name of one of ours."""
    names = {"template", "mode", "name", "options", "inductor_config", *OWN, *TORCH_COMPILE_ONLY}
    assert not names & set(config.get_config_copy())


# --- compile_fx -----------------------------------------------------------------------------------------------------


def test_compile_fx_takes_patches_and_an_inner_compile():
    """compile_fx takes these names and, for the third, this position."""
    parameters = list(inspect.signature(compile_fx).parameters)
    assert parameters[:4] == ["model_", "example_inputs_", "inner_compile", "config_patches"]


@pytest.mark.parametrize(
    ("handed_on", "seen"),
    [pytest.param(True, [7, 7], id="handed-on"), pytest.param(False, [7, 64], id="patched-round")],
)
def test_patches_reach_the_backward_graph_only_if_handed_on(handed_on, seen):
    """The backward graph gets patches only if they are passed on: it goes through `inner_compile` later."""
    sizes = []

    def inner(gm, example_inputs, **kwargs):
        sizes.append(config.max_fusion_size)
        return compile_fx_inner(gm, example_inputs, **kwargs)

    def backend(gm, example_inputs):
        patches = {"max_fusion_size": 7}
        if handed_on:
            return compile_fx(gm, example_inputs, inner, config_patches=patches)
        with config.patch(patches):
            return compile_fx(gm, example_inputs, inner)

    with fresh_cache():
        torch.compile(mm, backend=backend)(X.clone().requires_grad_()).sum().backward()
    assert sizes == seen


def test_compiled_graphs_serialize():
    """The result of compile_fx has the attributes that aot_compile() needs."""
    results = []

    def backend(gm, example_inputs):
        results.append(compile_fx(gm, example_inputs))
        return results[0]

    torch.compile(mm, backend=backend)(X)
    assert callable(results[0].serialize)


def test_a_gemm_without_a_kernel_says_so():
    """The message of the error has the name by which the fallback to ATEN recognizes it."""
    options = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "TRITON", "fx_graph_cache": False}
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="NoValidChoicesError"):
        torch.compile(mm, options=options)(X)


@torch.no_grad()
def test_the_frozen_graph_cannot_be_copied():
    """deepcopy() cannot copy packed weights, so the fallback to ATEN copies only the graph."""
    import copy

    failed = []

    def inner(gm, example_inputs, **kwargs):
        try:
            copy.deepcopy(gm)
        except RuntimeError:
            failed.append(True)
        return compile_fx_inner(gm, example_inputs, **kwargs)

    from backend_kwargs.graphs.freezing import UNCACHED, compile_frozen

    patches = {"freezing": True, **UNCACHED}
    net, x = nn.Linear(64, 64).eval(), torch.randn(32, 64)
    torch.compile(
        net,
        backend=lambda gm, inputs: compile_frozen(
            gm, inputs, lambda gm, inputs: compile_fx(gm, inputs, inner, config_patches=patches)
        ),
    )(x)
    assert failed == [True]


# --- Inductor's config ----------------------------------------------------------------------------------------------


def test_entries_of_the_config():
    """`_config` has the fields that the catalogue reads."""
    entry = config._config["max_fusion_size"]
    assert (entry.default, entry.value_type, entry.alias) == (64, int, None)
    assert {"env_value_force", "env_value_default"} <= set(dir(entry))


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 marks no option as deprecated")
def test_entries_of_the_config_say_what_is_deprecated():
    """`_config` marks options as deprecated, with a message."""
    assert {"deprecated", "deprecation_message"} <= set(dir(config._config["max_fusion_size"]))


def test_unset_is_a_sentinel_of_its_own():
    """Unset is a sentinel other than None, which is a value."""
    from torch.utils._config_module import _UNSET_SENTINEL

    assert config._config["max_fusion_size"].env_value_force is _UNSET_SENTINEL


def test_types_that_torch_does_not_check():
    """torch accepts a wrong value for a Literal; we refuse it."""
    wrapper = torch._TorchCompileInductorWrapper(None, {"autotune_num_choices_displayed": 1}, None)
    wrapper.apply_options({"cpp.descriptive_names": "no such"})
    assert wrapper.config["cpp.descriptive_names"] == "no such"


def test_large_gpus_have_68_multiprocessors():
    """GEMM templates need 68 multiprocessors, as options/machine.py assumes."""
    from torch._inductor.utils import is_big_gpu

    assert f"else {LEAST_SMS}" in inspect.getsource(is_big_gpu)


def test_the_c_compiler_is_that_of_CXX():  # noqa: N802 - the variable's name
    """torch's C++ compiler is that of CXX, as options/machine.py assumes."""
    assert os.environ.get("CXX", "g++") in config.cpp.cxx or config.cpp.cxx[1] == "clang++"


def test_triton_asks_ptxas_once(monkeypatch, tmp_path):
    """Triton asks ptxas for its version, part of each kernel's key, once; torch can set another path."""
    compiler = pytest.importorskip("triton.backends.nvidia.compiler")
    other = tmp_path / "ptxas"
    other.write_text("#!/bin/sh\necho Cuda compilation tools, release 99.9, V99.9.9\n")
    other.chmod(0o755)
    assert callable(compile_tasks._set_triton_ptxas_path)
    first = compiler.get_ptxas_version(80)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(other))
    assert compiler.get_ptxas_version(80) == first
    compiler.get_ptxas_version.cache_clear()
    assert "99.9" in compiler.get_ptxas_version(80)
    compiler.get_ptxas_version.cache_clear()
