"""Each built-in template's effect on a CPU: in generated code, in results, or why it has none."""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.testing import assert_close

import backend_kwargs as bk
from backend_kwargs.errors import warn_once

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU cannot do")

CPP_KERNEL = "async_compile.cpp_pybinding("
CPP_WRAPPER = "cpp_wrapper_src"
CPP_GEMM = "kernel_micro_gemm"
ACT_ON_CPU = {"default", "freezing", "cpp_wrapper", "fast_compile", "debug", "eager_numerics", "aten"}


@dataclass
class Compiled:
    code: str
    result: Any
    eager: Any
    warnings: list[str]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU()).eval()


def compiled(backend: Any, fn: Callable[..., Any], *args: Any) -> Compiled:
    """Compile and run `fn` without gradients, with a seed that eager's run has as well."""
    torch.manual_seed(0)
    with torch.no_grad(), warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always", bk.BackendKwargsWarning)
        result, codes = run_and_get_code(torch.compile(fn, backend=backend), *args)
    torch.manual_seed(0)
    with torch.no_grad():
        eager = fn(*args)
    return Compiled("\n".join(codes), result, eager, [str(warning.message) for warning in record])


@pytest.fixture
def debug(tmp_path):
    """Return the debug template, writing to this test's directory; torch's default is set at import."""
    return bk.make_backend("tmpl-inductor:debug", {"trace.debug_dir": str(tmp_path)})


@pytest.fixture(scope="module")
def default_mlp() -> tuple[nn.Module, torch.Tensor, Compiled]:
    torch._dynamo.reset()
    net, x = mlp(), torch.randn(32, 64)
    return net, x, compiled("tmpl-inductor:default", net, x)


# --- options that reach compile_fx ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in bk.list_templates() if name not in ("default", "auto")])
@pytest.mark.filterwarnings("ignore::backend_kwargs.BackendKwargsWarning")
def test_options_are_inductors_config_forward_and_backward(name, tmp_path):
    """While either graph is lowered, Inductor's config has every option of the template."""
    options, seen = dict(bk.make_backend(f"tmpl-inductor:{name}").options), []

    def watch(graph: torch.fx.Graph) -> None:
        seen.append({option: getattr(config, option) for option in options})

    passes = {"post_grad_custom_post_pass": watch, "trace.debug_dir": str(tmp_path)}
    x = torch.randn(4, 4, requires_grad=True)
    torch.compile(lambda x: x @ x, backend=bk.make_backend(f"tmpl-inductor:{name}", passes))(x).sum().backward()
    asked = {option: _served(option, value) for option, value in options.items()}
    # Under gradients nothing is frozen, as the template says.
    asked |= {"freezing": False} if name == "freezing" else {}
    assert seen == [asked, asked]


def _served(option: str, value: Any) -> Any:
    lacking = option.endswith("_backends") and value != "ATEN" and not torch.cuda.is_available()
    return f"{value},ATEN" if lacking else value


def test_default_is_plain_inductor():
    """`default` sets no option."""
    assert bk.make_backend("tmpl-inductor:default").options == {}


# --- in the generated code ------------------------------------------------------------------------------------------


def test_default_fuses_and_calls_the_library(default_mlp):
    """`default` generates a fused kernel and a library GEMM, in Python."""
    _, _, got = default_mlp
    assert_close(got.result, got.eager)
    assert "extern_kernels.addmm(" in got.code or "extern_kernels.mm(" in got.code
    assert CPP_KERNEL in got.code
    assert CPP_WRAPPER not in got.code


def test_cpp_wrapper_generates_cpp():
    """`cpp_wrapper` generates the calls between kernels in C++."""
    x = torch.randn(4, 4)
    got = compiled("tmpl-inductor:cpp_wrapper", lambda x: x @ x, x)
    assert_close(got.result, got.eager)
    assert CPP_WRAPPER in got.code
    assert "aoti_torch_cpu_mm_out(" in got.code


@pytest.fixture(scope="module")
def cpp_gemm() -> bk.Backend:
    # "CPP" alone: which of two candidates is faster would be left to the clock.
    return bk.make_backend("tmpl-inductor:max_autotune+freezing", max_autotune_gemm_backends="CPP")


@on_cpu
@pytest.mark.parametrize(
    ("template", "has_cpp_gemm"),
    [pytest.param(None, True, id="alone"), pytest.param("aten", False, id="aten-over-it")],
)
def test_aten_over_max_autotune_and_freezing(cpp_gemm, default_mlp, template, has_cpp_gemm):
    """max_autotune+freezing generates a C++ GEMM; with `aten` merged on top only the library's is called."""
    net, x, _ = default_mlp
    got = compiled(bk.make_backend(cpp_gemm, template=template) if template else cpp_gemm, net, x)
    assert_close(got.result, got.eager)
    assert (CPP_GEMM in got.code) == has_cpp_gemm


def test_freezing_packs_weights(default_mlp):
    """`freezing` makes weights constants, so the graph has one input."""
    net, x, plain = default_mlp
    got = compiled("tmpl-inductor:freezing", net, x)
    assert_close(got.result, got.eager)
    assert "_frozen_param" in got.code
    assert "_frozen_param" not in plain.code


@on_cpu
@pytest.mark.parametrize(
    ("name", "otherwise"),
    [
        pytest.param(
            "triton", "library GEMMs are called, as for each graph in which one has no Triton kernel", id="triton"
        ),
        pytest.param(
            "cutlass", "library GEMMs are called, as for each graph in which one has no CUTLASS kernel", id="cutlass"
        ),
        pytest.param("tma", "ordinary kernels are compiled", id="tma"),
        pytest.param("cudagraphs", "kernels are launched one by one", id="cudagraphs"),
        pytest.param("coordinate_descent", "ordinary kernels are compiled", id="coordinate_descent"),
    ],
)
def test_falls_back_with_one_warning(default_mlp, name, otherwise):
    """Without a GPU the template's fallback runs with the same result, and warns once."""
    net, x, _ = default_mlp
    got = compiled(f"tmpl-inductor:{name}", net, x)
    assert_close(got.result, got.eager)
    assert "extern_kernels." in got.code
    assert got.warnings == [f"Template {name!r} cannot act fully here: no CUDA GPU is visible; {otherwise}."]


@on_cpu
def test_falls_back_over_frozen_weights(default_mlp):
    """The fallback also works for a graph whose weights Inductor has packed."""
    net, x, _ = default_mlp
    got = compiled(bk.make_backend("tmpl-inductor", template="freezing+triton"), net, x)
    assert_close(got.result, got.eager)
    assert "_frozen_param" in got.code


class Mixed(nn.Module):
    """Two GEMMs: one whose weight can be packed, and one without a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) @ x.T


@on_cpu
@pytest.mark.parametrize("freezing", [False, True], ids=["plain", "frozen"])
def test_falls_back_where_a_graph_has_no_kernel(freezing):
    """If a generator works here but no kernel fits a GEMM, ATEN runs that graph, with a warning."""
    options = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "CPP", "freezing": freezing}
    options |= {"fx_graph_cache": False}  # a graph from the cache is not lowered again
    got = compiled(bk.make_backend("tmpl-inductor", options), Mixed().eval(), torch.randn(32, 64))
    assert_close(got.result, got.eager)
    assert "extern_kernels.mm(" in got.code
    assert got.warnings == ["A GEMM or convolution of this graph has no CPP kernel; ATEN's serve the graph as well."]


@on_cpu
def test_strict_does_not_fall_back():
    """With `strict=True` the template raises when the backend is created."""
    with pytest.raises(bk.BackendKwargsError) as error:
        bk.make_backend("tmpl-inductor:triton", strict=True)
    assert str(error.value) == ("Template 'triton' cannot work here: no CUDA GPU is visible.")


@on_cpu
def test_strict_names_the_graph_that_has_no_kernel():
    """With `strict=True` a graph without a fitting kernel raises in one line, instead of Inductor's many."""
    options = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "CPP", "fx_graph_cache": False, "strict": True}
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as error:
        torch.compile(Mixed().eval(), backend=bk.make_backend("tmpl-inductor", options))(torch.randn(32, 64))
    assert isinstance(error.value.inner_exception, bk.BackendKwargsError)
    assert str(error.value.inner_exception) == (
        "A GEMM or convolution of this graph has no CPP kernel; without strict=True ATEN's serve the graph as well."
    )


@on_cpu
def test_strict_adds_no_aten_where_no_generator_works():
    """With `strict=True` Triton alone, where there is none, raises instead of running ATen's kernels."""
    options = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "TRITON", "fx_graph_cache": False}
    backend = bk.make_backend("tmpl-inductor", options, strict=True)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as error:
        torch.compile(mlp(), backend=backend)(torch.randn(32, 64))
    assert str(error.value.inner_exception) == (
        "A GEMM or convolution of this graph has no TRITON kernel; without strict=True ATEN's serve the graph as well."
    )


NO_GPU = "inert because no CUDA GPU is visible"
NOT_TUNED = "inert because it is read only under max_autotune or max_autotune_gemm"


@on_cpu
@pytest.mark.parametrize(
    ("name", "inert"),
    [
        pytest.param("cudagraphs", {"triton.cudagraphs": NO_GPU}, id="cudagraphs"),
        pytest.param(
            "max_autotune", {"coordinate_descent_tuning": NO_GPU, "triton.cudagraphs": NO_GPU}, id="max_autotune"
        ),
        pytest.param(
            "max_autotune_no_cudagraphs", {"coordinate_descent_tuning": NO_GPU}, id="max_autotune_no_cudagraphs"
        ),
        pytest.param(
            "coordinate_descent",
            {"coordinate_descent_tuning": NO_GPU, "coordinate_descent_check_all_directions": NO_GPU},
            id="coordinate_descent",
        ),
        pytest.param(
            "triton",
            {
                "max_autotune_gemm": NO_GPU,
                "max_autotune_gemm_backends": NO_GPU,
                "max_autotune_conv_backends": NO_GPU,
            },
            id="triton",
        ),
        pytest.param(
            "cutlass",
            {
                "max_autotune_gemm": NO_GPU,
                "max_autotune_gemm_backends": NO_GPU,
                "cutlass.cutlass_max_profiling_configs": NO_GPU,
            },
            id="cutlass",
        ),
        pytest.param(
            "tma",
            {
                "max_autotune_gemm": NO_GPU,
                "max_autotune_gemm_backends": NO_GPU,
                "triton.enable_persistent_tma_matmul": NO_GPU,
            },
            id="tma",
        ),
        pytest.param(
            "aten",
            {"max_autotune_gemm_backends": NOT_TUNED, "max_autotune_conv_backends": NOT_TUNED},
            id="aten-alone",
        ),
    ],
)
def test_explain_says_why_it_cannot_act(name, inert):
    """Each option without effect here says why."""
    effects = bk.explain(f"tmpl-inductor:{name}").effects
    assert {e.option: e.status for e in effects if e.status.startswith("inert")} == inert


# --- debug ----------------------------------------------------------------------------------------------------------


def test_debug_writes_each_graph(debug, tmp_path):
    """`debug` writes each graph and its code to files."""
    compiled(debug, lambda x: x @ x, torch.randn(4, 4))
    assert {"fx_graph_readable.py", "output_code.py"} <= {path.name for path in tmp_path.rglob("*.py")}


def test_debug_catches_nan(debug):
    """A NaN raises with `debug`, and with no other template."""
    x = torch.full((4, 4), float("nan"))
    assert torch.compile(lambda x: x @ x, backend="tmpl-inductor")(x).isnan().all()
    with pytest.raises(AssertionError):
        torch.compile(lambda x: x @ x, backend=debug)(x)


# --- eager_numerics -------------------------------------------------------------------------------------------------


def rounding(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Round to bfloat16 at each of several steps, as eager does and a fused kernel does not.

    IEEE says how each step is rounded, so the bits are the same on every processor.
    """
    return ((x * w + x) * w - x) * x / (w * w + 3)


@pytest.mark.parametrize(
    ("backend", "bitwise"),
    [
        # Before torch 2.13 the C++ kernels do not round where `emulate_precision_casts` asks for it.
        pytest.param("tmpl-inductor:eager_numerics", torch.__version__ >= "2.13", id="eager_numerics"),
        pytest.param("tmpl-inductor", False, id="default"),
    ],
)
def test_eager_numerics_rounds_as_eager(backend, bitwise):
    """In bfloat16 `eager_numerics` equals eager bit for bit where default does not."""
    torch.manual_seed(0)
    got = compiled(backend, rounding, *torch.randn(2, 64, 64).bfloat16())
    assert torch.equal(got.result, got.eager) == bitwise
    assert_close(got.result, got.eager, atol=0.1, rtol=0.1)


@pytest.mark.parametrize(
    ("backend", "same"),
    [
        pytest.param("tmpl-inductor:eager_numerics", True, id="eager_numerics"),
        pytest.param("tmpl-inductor", False, id="default"),
    ],
)
def test_eager_numerics_draws_as_eager(backend, same):
    """With a seed dropout keeps the same elements as in eager."""
    got = compiled(backend, lambda x: nn.functional.dropout(x, 0.5), torch.ones(64))
    assert torch.equal(got.result, got.eager) == same


# --- fast_compile ---------------------------------------------------------------------------------------------------


def conv_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())


@pytest.fixture(scope="module")
def training_step() -> Callable[[Any], tuple[float, list[torch.Tensor]]]:
    net, x = conv_net(), torch.randn(2, 3, 8, 8)

    def step(backend: Any) -> tuple[float, list[torch.Tensor]]:
        torch._dynamo.reset()
        net.zero_grad()
        begin = time.perf_counter()
        torch.compile(net, backend=backend)(x).square().mean().backward()
        return time.perf_counter() - begin, [p.grad.clone() for p in net.parameters()]

    return step


def test_fast_compile_generates_no_kernel(default_mlp):
    """`fast_compile` calls ATen's operators, so no C++ is compiled, and gives eager's results."""
    net, x, plain = default_mlp
    got = compiled("tmpl-inductor:fast_compile", net, x)
    assert CPP_KERNEL not in got.code
    assert CPP_KERNEL in plain.code
    assert_close(got.result, got.eager)  # of the same kernels, whose sums may depend on where a result lies


def test_fast_compile_generates_code_where_it_must():
    """A list of tensors changed in place, as by an optimizer, is still compiled, with one warning."""

    def step(a, b):
        torch._foreach_mul_([a, b], 2.0)
        return torch._foreach_add([a, b], 1.0)

    warn_once.cache_clear()
    given, expected = ((torch.ones(3), torch.ones(4)) for _ in range(2))
    with fresh_cache(), pytest.warns(bk.BackendKwargsWarning) as warned:
        results = torch.compile(step, backend="tmpl-inductor:fast_compile")(*given)
    assert_close(list(results), step(*expected))
    assert_close(given, expected)
    text = "Inductor cannot leave what this graph does to ATen's operators alone; it generates code."
    assert [str(each.message) for each in warned] == [text]


def test_fast_compile_trains_a_conv_net(training_step):
    """Convolution and batch norm train as in eager; torch's own "lite" mode raises or gives other gradients."""
    assert_close(training_step("tmpl-inductor:fast_compile")[1], training_step("eager")[1])


def test_fast_compile_is_fast(training_step):
    """Compiling takes less than half of default's time (measured: less than a fifth)."""
    with fresh_cache():
        fast, _ = training_step("tmpl-inductor:fast_compile")
        slow, _ = training_step("tmpl-inductor:default")
    assert fast < slow / 2


def test_every_template_is_shown_here():
    """Every template has a test of its effect, or of the reason why it has none."""
    listed = set(bk.list_templates())
    fallbacks = {
        name
        for name in listed
        if any(e.status.startswith("inert") for e in bk.explain(f"tmpl-inductor:{name}").effects)
    }
    assert torch.cuda.is_available() or listed == ACT_ON_CPU | fallbacks | {"auto"}  # its races are shown in tests/auto


NEW_WEIGHTS = {
    "columns apart": lambda weight: weight.repeat(1, 2)[:, ::2],
    "transposed": lambda weight: weight.t().contiguous().t(),
    "fewer rows": lambda weight: weight[:32].clone(),
}


@pytest.mark.parametrize("new", NEW_WEIGHTS.values(), ids=NEW_WEIGHTS)
def test_guards_check_what_code_without_size_asserts_does_not(new):
    """The code of `auto`'s step `no_size_asserts` checks no layouts; dynamo's guards see that of a parameter change."""
    model, x = mlp(), torch.randn(4, 64)
    backend = bk.make_backend("tmpl-inductor", size_asserts=False)
    found = compiled(backend, model, x)
    assert "assert_size_stride(" in compiled("tmpl-inductor", model, x).code
    assert "assert_size_stride(" not in found.code.partition("def call")[2]
    with torch.no_grad():
        again = torch.compile(model, backend=backend)
        assert_close(again(x), model(x))
        weight = new(model[0].weight * 2)
        model[0].weight.data, model[0].bias.data = weight, model[0].bias[: len(weight)] * 2
        assert_close(again(x), model(x))
