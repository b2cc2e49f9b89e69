"""Parts of Inductor's compiler by themselves: fallbacks, modes, the options that decide what is compiled how."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._inductor import config as inductor_config

import backend_kwargs as bk
from backend_kwargs import pipeline
from backend_kwargs.backends.inductor import compiler
from backend_kwargs.backends.inductor.compiler import mode_options
from backend_kwargs.options.machine import machine
from backend_kwargs.pipeline import OWN
from backend_kwargs.torch_internals import compile_fx

GEMM, CONV = compiler.AUTOTUNED_BACKENDS
NO_KERNEL, LEFT_ALONE = compiler.FALLBACKS
NO_GPU = replace(machine(), triton=False)


@pytest.mark.parametrize(
    ("config", "instead", "reason"),
    [
        pytest.param({GEMM: "TRITON"}, {GEMM: "TRITON,ATEN"}, "TRITON", id="gemm"),
        pytest.param({GEMM: "TRITON", CONV: "TRITON"}, {GEMM: "TRITON,ATEN", CONV: "TRITON,ATEN"}, "TRITON", id="both"),
        pytest.param({GEMM: "CPP", CONV: "TRITON"}, {GEMM: "CPP,ATEN", CONV: "TRITON,ATEN"}, "CPP or TRITON", id="two"),
        pytest.param({GEMM: "TRITON,ATEN", CONV: "TRITON"}, {CONV: "TRITON,ATEN"}, "TRITON", id="one has ATen"),
        pytest.param({GEMM: "aten"}, {}, "", id="small letters"),
        pytest.param({}, {}, "", id="Inductor's own"),
    ],
)
def test_aten_joins_the_generators_that_fail(config, instead, reason):
    """A list of backends without ATen has it appended; the reason names the list."""
    assert NO_KERNEL.instead(config) == instead
    assert NO_KERNEL.reason(config) == f"A GEMM or convolution of this graph has no {reason} kernel"
    assert compiler.can_fall_back(config) is bool(instead)


@pytest.mark.parametrize(("asked", "instead"), [(True, {"fallback_by_default": False}), (False, {}), (None, {})])
def test_code_where_atens_operators_alone_do_not_do(asked, instead):
    """Only where all was left to ATen is there code to generate in its place."""
    config = {} if asked is None else {"fallback_by_default": asked}
    assert LEFT_ALONE.instead(config) == instead
    assert compiler.can_fall_back(config) is bool(instead)


@pytest.mark.parametrize(
    ("config", "added"),
    [
        pytest.param({"max_autotune": True, GEMM: "CUTLASS"}, {GEMM: "CUTLASS,ATEN"}, id="none works here"),
        pytest.param({"max_autotune": True, GEMM: "CUTLASS,ATEN"}, {}, id="with ATen"),
        pytest.param({"max_autotune": True}, {}, id="Inductor's own"),
        pytest.param({}, {}, id="nothing"),
    ],
)
def test_aten_joins_what_this_machine_lacks(config, added):
    """Before anything fails, where no requested generator can work."""
    here = replace(NO_GPU, cutlass="", nvcc="") if hasattr(NO_GPU, "nvcc") else NO_GPU
    assert compiler.aten_where_alone(config, here) == added


@pytest.mark.parametrize("strict", [False, True])
def test_an_error_of_another_kind_is_raised(monkeypatch, strict):
    """Only what the options cause is compiled again without them."""

    def fails(*args, **kwargs):
        raise RuntimeError("planted")

    monkeypatch.setattr(compile_fx, "compile_fx_inner", fails)
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    with inductor_config.patch({GEMM: "TRITON"}), pytest.raises(RuntimeError, match=r"^planted$"):
        compiler.compile_with_fallback(gm, (), strict=strict)


@pytest.mark.parametrize(
    ("error", "patch", "wanted"),
    [
        pytest.param("NoValidChoicesError: none", {GEMM: "TRITON"}, {GEMM: "TRITON,ATEN"}, id="no kernel"),
        pytest.param(
            "<built-in function getitem> is not an OpOverload",
            {"fallback_by_default": True},
            {"fallback_by_default": False},
            id="a list of tensors",
        ),
    ],
)
def test_a_graph_is_compiled_again_without_what_fails(monkeypatch, error, patch, wanted):
    """With a copy of the graph, since the first try may have changed it, and one warning."""
    tried = []

    def once(gm, example_inputs, **kwargs):
        tried.append((gm, kwargs, {name: getattr(inductor_config, name) for name in patch}))
        gm.graph.erase_node(gm.graph.output_node())
        if len(tried) == 1:
            raise RuntimeError(error)
        return "compiled"

    monkeypatch.setattr(compile_fx, "compile_fx_inner", once)
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    gm.meta["kept"] = 1
    with inductor_config.patch(patch), pytest.warns(bk.BackendKwargsWarning) as told:
        assert compiler.compile_with_fallback(gm, (), strict=False, is_backward=True) == "compiled"
    assert [each[2] for each in tried] == [patch, wanted]
    assert tried[1][0] is not gm
    assert (tried[1][0].meta, tried[1][1]) == ({"kept": 1}, {"is_backward": True})
    assert len(told) == 1


def test_modes_are_torchs_and_do_what_they_say():
    """One that is without CUDA graphs by name turns them off."""
    from torch._inductor import list_mode_options

    off = {"triton.cudagraphs": False}
    for mode, options in list_mode_options().items():
        assert mode_options(mode) == options | (off if mode == "max-autotune-no-cudagraphs" else {})


@pytest.mark.parametrize(
    ("options", "clones"),
    [
        pytest.param({}, False, id="nothing"),
        pytest.param({"auto": True}, True, id="auto"),
        pytest.param({"auto": True, "clone_outputs": False}, False, id="auto, and not wanted"),
        pytest.param({"clone_outputs": True}, True, id="wanted"),
        pytest.param({"auto": False}, False, id="no auto"),
        pytest.param({"auto": True, "clone_outputs": None}, True, id="auto decides"),
    ],
)
def test_whose_outputs_are_copied(options, clones):
    """Those of `auto`, unless the user says otherwise."""
    assert pipeline._clones(options) is clones


@pytest.mark.parametrize(
    ("options", "everywhere", "records"),
    [
        pytest.param({}, False, False, id="nothing"),
        pytest.param({"triton.cudagraphs": True}, False, True, id="by option"),
        pytest.param({}, True, True, id="globally"),
        pytest.param({"triton.cudagraphs": False}, True, False, id="not by option"),
    ],
)
def test_what_records_cuda_graphs(options, everywhere, records):
    """The option wins over Inductor's global configuration."""
    with inductor_config.patch({"triton.cudagraphs": everywhere}):
        assert pipeline._records(options) is records


def test_paths_in_options_are_the_machines():
    """A path that is given replaces the one that was found."""
    options = {"cutlass.cutlass_dir": "/c", "cuda.cuda_cxx": "/n"}
    found = compiler.machine_of(options)
    assert (found.cutlass, found.nvcc) == ("/c", "/n")
    assert compiler.machine_of({}) == machine()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"use_aoti": True, "freezing": True},
            "Options 'use_aoti' and 'freezing' cannot be combined; leave one out.",
            id="two ways to freeze",
        ),
        *(
            pytest.param(
                {one: first, other: value},
                f"Options {one!r} and {other!r} cannot be combined; leave one out.",
                id=f"{one} and {other}",
            )
            for one, first, other, value in (
                ("use_aoti", True, "auto", True),
                ("use_aoti", True, "rewrites", ("packed",)),
            )
        ),
        pytest.param(
            {"clone_outputs": True, "triton.cudagraph_trees": False},
            "Option 'clone_outputs' needs 'triton.cudagraph_trees': leave that True.",
            id="copies without trees",
        ),
        pytest.param(
            {"auto": True, "triton.cudagraph_trees": False},
            "Option 'clone_outputs' needs 'triton.cudagraph_trees': leave that True.",
            id="auto without trees",
        ),
        pytest.param({"options": 3}, "'options' must be a mapping of options, got 3 (int).", id="no mapping"),
        pytest.param(
            {"guard_filter_fn": print},
            "'guard_filter_fn' is for torch.compile(..., options={'guard_filter_fn': ...}), not a backend.",
            id="torch.compile's own",
        ),
    ],
)
def test_options_that_do_not_go_together(options, message):
    """At once, when the backend is made."""
    with pytest.raises(bk.BackendKwargsError) as error:
        bk.make_backend("tmpl-inductor", options)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "options",
    [
        {"use_aoti": True},
        {"freezing": True},
        {"triton.cudagraph_trees": False},
        {"clone_outputs": True},
        {"options": None},
        *(
            {one: first, other: value}
            for one, first, other, left in (
                ("use_aoti", True, "freezing", (False,)),
                ("use_aoti", False, "freezing", (True,)),
                ("use_aoti", True, "auto", (False,)),
                ("use_aoti", False, "auto", (True,)),
                ("use_aoti", True, "rewrites", (None, ())),
                ("use_aoti", True, "precision", (None, ())),
            )
            for value in left
        ),
    ],
    ids=str,
)
def test_options_that_go_alone(options):
    """Each of them is no error by itself."""
    bk.make_backend("tmpl-inductor", options)


def test_rewrites_are_a_tuple_from_wherever_they_come():
    """Equal backends compile once, so a list from a file equals a tuple from Python."""
    one, other = (bk.make_backend("tmpl-inductor", rewrites=given) for given in (["packed"], ("packed",)))
    assert one == other
    assert one.options["rewrites"] == ("packed",)


def test_what_dynamo_calls_a_backend():
    """A published template has a name of its own there; several templates have the compiler's."""
    made = compiler.InductorCompiler("tmpl-inductor")
    assert made.dynamo_name(("aten",)) == "tmpl-inductor:aten"
    assert made.dynamo_name(("aten", "freezing")) == "tmpl-inductor"
    assert made.dynamo_name(()) == "tmpl-inductor"
    assert compiler.InductorCompiler("mine").dynamo_name(("aten",)) == "mine"


def test_the_configuration_that_compile_fx_gets():
    """The options without those of this package; CUDA graphs only where they were asked for."""
    options = {"strict": True, "clone_outputs": False, "epilogue_fusion": False}
    assert {**compile_fx.inductor_wrapper(options, OWN).config} == {"epilogue_fusion": False}
    for value in (True, False):
        assert compile_fx.inductor_wrapper({"triton.cudagraphs": value}, OWN).config["triton.cudagraphs"] is value


@pytest.mark.parametrize("strict", [False, True])
def test_what_compiles_a_lowered_graph(monkeypatch, strict):
    """Inductor itself, unless options may fail; strictness goes along."""
    here = SimpleNamespace(nvcc="")
    monkeypatch.setattr(compiler, "asks_for_cutlass", lambda config, here: False)
    assert compiler._inner_compile({}, here, strict=strict) is compile_fx.compile_fx_inner
    falling_back = compiler._inner_compile({GEMM: "TRITON"}, here, strict=strict)
    assert (falling_back.func, falling_back.keywords) == (compiler.compile_with_fallback, {"strict": strict})
