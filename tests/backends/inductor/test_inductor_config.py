"""A template as a plain dict of Inductor's options: its effect in AOTInductor, and what a dict cannot contain."""

import json

import pytest
import torch
from torch import nn

import backend_kwargs as bk
from tests.backends.inductor.ahead_of_time import Calls, code_of, result_of, rounding

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU cannot do")

KERNEL = "cpp_fused_"
ONLY_TRITON = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "TRITON"}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU()).eval()


@pytest.fixture(scope="module")
def plain_mlp(tmp_path_factory):
    net, x = mlp(), torch.randn(32, 64)
    return net, x, code_of(net, (x,), {}, tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("name", ["default", "cpp_wrapper"])
def test_dict_of_what_aotinductor_does_anyway(plain_mlp, tmp_path, name):
    """`default` and `cpp_wrapper` give AOTInductor's usual code."""
    net, x, plain = plain_mlp
    assert KERNEL in plain
    assert code_of(net, (x,), bk.make_backend(f"tmpl-inductor:{name}").inductor_config(), tmp_path) == plain


def test_aten_calls_the_library(plain_mlp, tmp_path):
    """With the dict of `aten` a GEMM is a library call, even if only Triton's kernels are allowed otherwise."""
    net, x, _ = plain_mlp
    with pytest.raises(torch._inductor.exc.InductorError, match="NoValidChoicesError"):
        code_of(net, (x,), ONLY_TRITON, tmp_path)
    aten = bk.make_backend("tmpl-inductor:aten").inductor_config()
    assert "aoti_torch_cpu_addmm_out" in code_of(net, (x,), ONLY_TRITON | aten, tmp_path)


@pytest.mark.parametrize(
    ("spec", "same"),
    [
        # Before torch 2.13 the C++ kernels do not round where `emulate_precision_casts` asks for it.
        pytest.param("tmpl-inductor:eager_numerics", torch.__version__ >= "2.13", id="eager_numerics"),
        pytest.param("inductor", False, id="no"),
    ],
)
def test_eager_numerics_rounds_as_eager(tmp_path, spec, same):
    """The dict of `eager_numerics` gives eager's bits in bfloat16, where AOTInductor's default does not."""
    torch.manual_seed(0)
    inputs = torch.randn(2, 64, 64).bfloat16().unbind()
    result = result_of(Calls(rounding), inputs, bk.make_backend(spec).inductor_config(), tmp_path)
    assert torch.equal(result, rounding(*inputs)) == same


def test_debug_writes_each_graph(plain_mlp, tmp_path):
    """The dict of `debug` writes the graphs that AOTInductor lowers."""
    net, x, _ = plain_mlp
    backend = bk.make_backend("tmpl-inductor:debug", {"trace.debug_dir": str(tmp_path)})
    code_of(net, (x,), backend.inductor_config(), tmp_path)
    assert {"fx_graph_readable.py", "fx_graph_transformed.py"} <= {path.name for path in tmp_path.rglob("*.py")}


@on_cpu
def test_max_autotune_generates_a_gemm(plain_mlp, tmp_path):
    """The dict of `max_autotune_no_cudagraphs` allows a generated GEMM; here the library's are excluded."""
    net, x, plain = plain_mlp
    backend = bk.make_backend("tmpl-inductor:max_autotune_no_cudagraphs", max_autotune_gemm_backends="CPP")
    assert "micro_gemm" in code_of(net, (x,), backend.inductor_config(), tmp_path)
    assert "micro_gemm" not in plain


@on_cpu
@pytest.mark.parametrize("name", ["triton", "tma", "coordinate_descent"])
def test_a_gpus_dict_compiles_on_a_cpu(plain_mlp, tmp_path, name):
    """Options for a GPU fall back on a CPU, as the template does under torch.compile."""
    net, x, _ = plain_mlp
    code = code_of(net, (x,), bk.make_backend(f"tmpl-inductor:{name}").inductor_config(), tmp_path)
    assert "aoti_torch_cpu_addmm_out" in code


def test_later_options_win():
    """The dict contains the final options of templates, mode and options."""
    backend = bk.make_backend("tmpl-inductor:aten+debug", mode="max-autotune-no-cudagraphs", size_asserts=False)
    config = backend.inductor_config()
    assert (config["max_autotune"], config["size_asserts"]) == (True, False)
    assert config["max_autotune_gemm_backends"] == "ATEN"


def test_clone_outputs_that_is_off_is_left_out():
    """An option of this package without effect does not raise."""
    off = {"clone_outputs": False, "precision": None, "rewrites": []}
    assert bk.make_backend("tmpl-inductor", off, epilogue_fusion=False).inductor_config() == {"epilogue_fusion": False}


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        pytest.param(
            "tmpl-inductor:auto",
            {},
            "Option 'auto' does not work in a plain dict: it decides for each graph; "
            "report(compiled).graphs[0].inductor_config() and `backend-kwargs decisions show KEY --as inductor-config` "
            "give what it decided.",
            id="auto",
        ),
        pytest.param(
            "tmpl-inductor:freezing",
            {},
            "Option 'freezing' does not work in a plain dict: under torch.compile, Inductor alone freezes nothing, "
            "since parameters are inputs of the graph; inductor_config(ahead_of_time=True) gives it to AOTInductor, "
            "which freezes them.",
            id="freezing",
        ),
        pytest.param(
            "tmpl-inductor:max_autotune",
            {},
            "Option 'triton.cudagraphs' does not work in a plain dict: AOTInductor records no CUDA graphs, and vLLM "
            "records its own.",
            id="CUDA graphs",
        ),
        pytest.param(
            "tmpl-inductor:fast_compile",
            {},
            "Option 'fallback_by_default' does not work in a plain dict: the package that AOTInductor makes fails "
            "where it calls ATen's operators.",
            id="fast_compile",
        ),
        pytest.param(
            "tmpl-inductor",
            {"clone_outputs": True},
            "Option 'clone_outputs' does not work in a plain dict: it is an option of backend_kwargs, not of Inductor.",
            id="clone_outputs",
        ),
        pytest.param(
            "tmpl-inductor:cutlass",
            {},
            "CUTLASS does not work in a plain dict: only backend_kwargs tells Inductor where it is.",
            id="CUTLASS",
        ),
        pytest.param("aot_eager", {}, "Backend 'aot_eager' has no options of Inductor.", id="another backend"),
    ],
)
@pytest.mark.filterwarnings("ignore::backend_kwargs.BackendKwargsWarning")
def test_what_no_dict_can_carry_raises(spec, options, message):
    """An option that works only if this package compiles raises with the reason."""
    with pytest.raises(bk.BackendKwargsError) as raised:
        bk.make_backend(spec, options).inductor_config()
    assert str(raised.value) == message


def test_plain_inductor_records_no_cuda_graph_ahead_of_time(plain_mlp, tmp_path):
    """A fact about torch: `triton.cudagraphs` does not change what AOTInductor compiles."""
    net, x, plain = plain_mlp
    assert code_of(net, (x,), {"triton.cudagraphs": True}, tmp_path) == plain


@pytest.mark.skipif(torch.__version__ < "2.13", reason="packages of older releases can call them")
def test_plain_inductor_cannot_call_operators_ahead_of_time(plain_mlp, tmp_path):
    """A fact about torch: a package compiled with `fallback_by_default` fails when it is called."""
    net, x, _ = plain_mlp
    with pytest.raises(RuntimeError, match="Mismatch between ints consumed and num_ints"):
        result_of(net, (x,), dict(bk.get_template("fast_compile").options), tmp_path)


@on_cpu
def test_freezing_acts_ahead_of_time(tmp_path):
    """The dict for AOTInductor has `freezing`, which folds a batch norm, with eager's numbers."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval(), torch.randn(2, 3, 8, 8)
    config = bk.make_backend("tmpl-inductor:freezing").inductor_config(ahead_of_time=True)
    code = code_of(net, (x,), config, tmp_path)
    assert ("batch_norm" in code_of(net, (x,), {}, tmp_path), "batch_norm" in code) == (True, False)
    assert "mkldnn__convolution_pointwise" in code
    with torch.no_grad():
        torch.testing.assert_close(result_of(net, (x,), config, tmp_path), net(x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("spec", ["tmpl-inductor:auto", "tmpl-inductor:max_autotune", "tmpl-inductor:fast_compile"])
@pytest.mark.filterwarnings("ignore::backend_kwargs.BackendKwargsWarning")
def test_what_fails_ahead_of_time_too_raises(spec):
    """For AOTInductor nothing else is allowed than for other callers of Inductor."""
    with pytest.raises(bk.BackendKwargsError, match="does not work in a plain dict"):
        bk.make_backend(spec).inductor_config(ahead_of_time=True)


def test_explain_prints_it_for_aotinductor(capsys, monkeypatch):
    """`explain SPEC --as aoti-config` prints the dict for AOTInductor."""
    from backend_kwargs.cli import main

    monkeypatch.setattr("sys.argv", ["backend-kwargs", "explain", "tmpl-inductor:freezing", "--as", "aoti-config"])
    with pytest.raises(SystemExit):
        main()
    assert json.loads(capsys.readouterr().out) == {"freezing": True}


def test_explain_prints_it(capsys, monkeypatch):
    """`explain SPEC --as inductor-config` prints the dict as JSON."""
    from backend_kwargs.cli import main

    monkeypatch.setattr("sys.argv", ["backend-kwargs", "explain", "tmpl-inductor:aten", "--as", "inductor-config"])
    with pytest.raises(SystemExit):
        main()
    assert json.loads(capsys.readouterr().out) == bk.make_backend("tmpl-inductor:aten").inductor_config()


def test_explain_prints_no_value_that_json_lacks(capsys, monkeypatch):
    """A callable has no JSON form, so printing it raises."""
    from backend_kwargs.cli import main

    option = "post_grad_custom_post_pass=builtins:print"
    monkeypatch.setattr(
        "sys.argv", ["backend-kwargs", "explain", "tmpl-inductor", "--option", option, "--as", "inductor-config"]
    )
    with pytest.raises(SystemExit):
        main()
    message = "error: Option 'post_grad_custom_post_pass' is <built-in function print>, which JSON cannot represent.\n"
    assert capsys.readouterr().err == message
