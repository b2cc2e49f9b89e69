"""Before anything compiles: where each option's value comes from, and whether it acts here."""

import json
import os
import subprocess
import sys

import pytest
import torch

import backend_kwargs as bk
from backend_kwargs import BackendKwargsError, explain
from backend_kwargs.explain import Effect, Verdict, verdict

INDUCTOR = "tmpl-inductor"
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="what is inert elsewhere acts here")


def target(gm, example_inputs, *, level=1):
    return gm.forward


def effect(explanation, option):
    (found,) = (e for e in explanation.effects if e.option == option)
    return found


def test_layers(monkeypatch):
    """Each option shows the layer that set it and the layers that it overrides, lowest first."""
    monkeypatch.setenv("BACKEND_KWARGS_OPTIONS", '{"freezing": true}')
    monkeypatch.setenv("BACKEND_KWARGS_TEMPLATE", "eager_numerics")
    explained = explain(INDUCTOR, {"emulate_precision_casts": False}, mode="lite")
    assert effect(explained, "freezing") == Effect("freezing", True, "environment", False, "changed")
    assert effect(explained, "fallback_random") == Effect(
        "fallback_random", True, "template eager_numerics (environment)", False, "changed"
    )
    assert effect(explained, "use_dce") == Effect("use_dce", False, "mode lite (make_backend)", True, "changed")
    assert effect(explained, "emulate_precision_casts") == Effect(
        "emulate_precision_casts",
        False,
        "make_backend",
        False,
        "same as default",
        (("template eager_numerics (environment)", True),),
    )


def test_names_the_backend():
    """The explanation starts with the make_backend call."""
    explained = explain(f"{INDUCTOR}:freezing", max_autotune=True)
    assert explained.backend == "make_backend('tmpl-inductor:freezing', {'max_autotune': True})"


def test_every_option_is_told():
    """Each option that is set is listed once."""
    backend = bk.make_backend(f"{INDUCTOR}:max_autotune+freezing", mode="lite")
    assert sorted(e.option for e in explain(backend).effects) == sorted(backend.options)


@NO_GPU
def test_inert_here():
    """An option without effect on this machine says why, and the note says what runs instead."""
    explained = explain(f"{INDUCTOR}:cudagraphs")
    assert effect(explained, "triton.cudagraphs").status == "inert because no CUDA GPU is visible"
    assert explained.notes == (
        "Template 'cudagraphs' cannot act fully here: no CUDA GPU is visible; kernels are launched one by one.",
    )


def test_inert_beside_the_others():
    """An option that other options disable says why."""
    explained = explain(f"{INDUCTOR}:aten")
    assert (
        effect(explained, "max_autotune_gemm_backends").status
        == "inert because it is read only under max_autotune or max_autotune_gemm"
    )


def test_str():
    """The text contains the backend, a line for each option, and the notes."""
    assert str(explain(INDUCTOR, freezing=True)) == (
        "make_backend('tmpl-inductor', {'freezing': True})\n  freezing = True  (make_backend; default False; changed)"
    )


def test_to_dict():
    """to_dict returns data that JSON can represent."""
    explained = explain(INDUCTOR, freezing=True).to_dict()
    assert json.loads(json.dumps(explained)) == {
        "backend": "make_backend('tmpl-inductor', {'freezing': True})",
        "effects": [
            {
                "option": "freezing",
                "value": True,
                "layer": "make_backend",
                "default": False,
                "status": "changed",
                "overrides": [],
            }
        ],
        "notes": [],
    }


def test_any_backend():
    """The options of any backend are explained by its signature."""
    assert explain(target, level=2).effects == (Effect("level", 2, "make_backend", 1, "changed"),)


def test_nothing_to_explain():
    """A backend without options shows none."""
    assert str(explain("eager")) == "make_backend('eager')"


@pytest.mark.parametrize(
    ("name", "variable", "shown"),
    [
        pytest.param(
            "fx_graph_cache", "TORCHINDUCTOR_FX_GRAPH_CACHE=0", "TORCHINDUCTOR_FX_GRAPH_CACHE makes it False", id="one"
        ),
        pytest.param(
            "force_disable_caches",
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1",
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES or TORCH_COMPILE_FORCE_DISABLE_CACHES makes it True",
            id="an alias",
        ),
    ],
)
def test_forced_by_environment(name, variable, shown):
    """An option forced by the environment names every variable that can, in a process that has one."""
    code = (
        "from torch._inductor import config\n"
        "from backend_kwargs import explain\n"
        f"default = config.{name}\n"
        f"(effect,) = explain('tmpl-inductor', {{{name!r}: not default}}).effects\n"
        f"with config.patch({name}=not default):\n"
        f"    print(effect.default is default is config.{name}, effect.status)"
    )
    env = os.environ | dict([variable.split("=")])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout == f"True forced by environment: {shown}\n"


def test_refuses_as_make_backend():
    """A wrong spec raises the same error as make_backend."""
    with pytest.raises(BackendKwargsError) as e:
        explain(f"{INDUCTOR}:freezin")
    assert str(e.value) == "Unknown template 'freezin'. Did you mean 'freezing'?"


@NO_GPU
@pytest.mark.parametrize(
    ("spec", "word"),
    [
        pytest.param(INDUCTOR, "works", id="plain"),
        pytest.param(f"{INDUCTOR}:freezing", "works", id="freezing"),
        pytest.param(f"{INDUCTOR}:cudagraphs", "cannot: no CUDA GPU is visible", id="cudagraphs"),
        pytest.param(f"{INDUCTOR}:cudagraphs+freezing", "works partly: no CUDA GPU is visible", id="partly"),
        pytest.param("eager", "works", id="eager"),
        pytest.param("cudagraphs", "cannot: no CUDA GPU is visible", id="cudagraphs-of-dynamo"),
    ],
)
def test_verdict(spec, word):
    """A backend works here, works partly or cannot, with the first reason."""
    assert str(verdict(bk.make_backend(spec))) == word


def test_verdict_says_what_would_change_it():
    """A verdict's remedy is a separate field."""
    assert str(Verdict("cannot", "no luck", "try again")) == "cannot: no luck"


def test_an_option_of_another_backend_that_has_the_name_of_rewrites():
    """The option `rewrites` of the user's own function is not Inductor's, so nothing is said of it."""

    def mine(gm, example_inputs, *, rewrites=()):
        return gm.forward

    assert explain(mine, rewrites=("a", "b")).notes == ()


def test_rewrites_are_described():
    """Each rewrite that is named has a note: what it does, for which graphs, and its costs; then why it cannot act."""
    notes = explain("tmpl-inductor", rewrites=("grouped_convolution", "linear_activation")).notes
    grouped = "Convolutions in groups by our own kernels, depthwise ones with a norm and an activation."
    linear = "Linear with bias and ReLU or tanh-GELU, also one that is written out, as one library call."
    assert notes[0] == (
        f"Rewrite 'grouped_convolution': {grouped} Where: half precision in channels last, at most 512 channels "
        "in a group."
    )
    assert notes[1] == (
        f"Rewrite 'linear_activation': {linear} Where: float32 or half precision (on a CPU not float16). Costs: the "
        "library's ReLU may turn nan into 0."
    )
    assert [note.partition(":")[0] for note in notes[2:]] == ["Rewrite 'grouped_convolution' cannot act fully here"]
