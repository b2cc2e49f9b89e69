"""Each template's effect in code, kernel names and traces, compared with doctor's verdict."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from backend_kwargs import make_backend
from backend_kwargs.auto.candidates import records
from backend_kwargs.explain import verdict
from backend_kwargs.options.machine import machine, unmet
from backend_kwargs.options.templates import BUILT_IN
from tests.gpu.effects import CASES, Seen, compile_ratio, compile_seconds, gelu_and_scale, look

LARGE_GEMM, TMA = "relu(mm) 4096³ bf16", "triton_mm_persistent_tma"
GEMM, POINTWISE, DOUBLE = "relu(mm) 2048³ bf16", "gelu 1024²", "mm 512³ float64"


@dataclass(frozen=True)
class Effect:
    """A case on which a template has an effect, one on which it has none, and how to tell, also given default's.

    `spec` and `options` request it if its name is not enough; `idle` is "" if it always has an effect.
    """

    acting: str
    idle: str
    acts: Callable[[Seen, Seen], bool]
    spec: str = ""
    options: tuple[tuple[str, Any], ...] = ()


def in_code(text: str) -> Callable[[Seen, Seen], bool]:
    return lambda seen, default: text in seen.code


def timed(seen: Seen, kind: str) -> bool:
    return any(name.startswith(kind) for name in seen.choices)


def autotuned(seen: Seen) -> bool:
    return timed(seen, "triton_mm")


EFFECTS = {
    "default": Effect(POINTWISE, "", lambda seen, default: seen.code == default.code),
    "cudagraphs": Effect(
        "MLP 4 x 256", "input changed in place", lambda seen, default: seen.graph_launches == 1 > default.graph_launches
    ),
    # Which candidate wins is the race's affair; that it runs holds each time.
    "auto": Effect("MLP 4 x 256", "", lambda seen, default: seen.graph_launches == records(seen.decided)),
    "max_autotune": Effect(
        GEMM, POINTWISE, lambda seen, default: autotuned(seen) and seen.graph_launches == 1 and not autotuned(default)
    ),
    "max_autotune_no_cudagraphs": Effect(
        GEMM, POINTWISE, lambda seen, default: autotuned(seen) and not seen.graph_launches
    ),
    "coordinate_descent": Effect(
        "sigmoid+layer_norm 2048²",
        "mm 512³ bf16",
        lambda seen, default: (
            seen.counters.get("coordesc_tuning_bench", 0) > default.counters.get("coordesc_tuning_bench", 0)
        ),
    ),
    "triton": Effect(
        GEMM, DOUBLE, lambda seen, default: "triton_tem_fused_mm" in seen.code and "extern_kernels.mm" not in seen.code
    ),
    "aten": Effect(
        GEMM,
        POINTWISE,
        lambda seen, default: "extern_kernels.mm" in seen.code and not autotuned(seen) and "_tem_" not in seen.code,
        spec="max_autotune_no_cudagraphs+aten",
    ),
    "cutlass": Effect(
        GEMM,
        DOUBLE,
        lambda seen, default: (
            any("cutlass" in name.lower() for name in seen.kernels) and "extern_kernels.mm" not in seen.code
        ),
        options=(("cutlass.cutlass_max_profiling_configs", 2),),
    ),
    "tma": Effect(
        LARGE_GEMM,
        "relu(mm) 1021 x 2047 x 1023 bf16",
        lambda seen, default: timed(seen, TMA),
        options=(("shape_padding", False),),
    ),
    "freezing": Effect(
        "conv+bn+relu",
        "one product",
        lambda seen, default: "_frozen_param" in seen.code and seen.inputs == 1 and "rsqrt" not in seen.code,
    ),
    "cpp_wrapper": Effect("MLP 4 x 256", "", in_code("inductor_entry_impl")),
    "debug": Effect(POINTWISE, "", in_code("isnan().any()")),
    "eager_numerics": Effect("chain of bf16 steps", "one product", lambda seen, default: seen.error < default.error),
}


def seen_under(template: str, case: str) -> Seen:
    effect = EFFECTS[template]
    return look(f"tmpl-inductor:{effect.spec or template}", case, **dict(effect.options))


def acts(template: str, case: str) -> bool:
    return EFFECTS[template].acts(seen_under(template, case), look("inductor", case))


def acts_here(template: str) -> bool:
    """Return whether a template has its effect on its own case."""
    if template == "fast_compile":  # it calls ATen's operators
        return "@triton.jit" not in look("tmpl-inductor:fast_compile", POINTWISE).code
    return acts(template, EFFECTS[template].acting)


def needing(templates: list[str]) -> list[Any]:
    """Skip if this machine lacks something, with the reason."""
    return [pytest.param(name, id=name, marks=_skip(name)) for name in templates]


def _skip(name: str) -> list[pytest.MarkDecorator]:
    if not torch.cuda.is_available():
        return []
    lacking = unmet(BUILT_IN[name].needs, machine())
    return [pytest.mark.skip(reason=lacking[0].reason)] if lacking else []


@pytest.mark.parametrize("template", needing([name for name in EFFECTS if name != "cutlass"] + ["cutlass"]))
def test_acts(template, evidence):
    """On its own case a template has its effect, and the results are right."""
    case = EFFECTS[template].acting
    seen = seen_under(template, case)
    evidence(template, case, acts=acts(template, case), **seen.brief())
    assert acts(template, case), seen.brief()
    assert_close(seen.result, seen.expected, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("template", needing([name for name, effect in EFFECTS.items() if effect.idle]))
def test_leaves_alone(template, evidence):
    """On a case that it is not for, a template has no effect, and the results are right."""
    case = EFFECTS[template].idle
    seen = seen_under(template, case)
    evidence(template, case, acts=acts(template, case), **seen.brief())
    assert not acts(template, case), seen.brief()
    assert_close(seen.result, seen.expected, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("template", needing(["triton", "cutlass"]))
def test_falls_back_to_aten_with_one_warning(template):
    """A GEMM without a kernel of the requested kind uses ATen's, with one warning."""
    seen = seen_under(template, DOUBLE)
    assert "extern_kernels.mm" in seen.code
    (warned,) = seen.warned
    assert re.fullmatch(
        rf"A GEMM .* has no {template}\b.* kernel; ATEN's serve the graph as well\.", warned, re.IGNORECASE
    )


def test_aten_alone_calls_the_library(evidence):
    """Without max_autotune a GEMM is a library call too."""
    seen = look("tmpl-inductor:aten", GEMM)
    assert "extern_kernels.mm" in seen.code
    assert "_tem_" not in seen.code


def test_cudagraphs_copy_inputs_and_no_parameters(evidence):
    """Each replay copies the one real input into the graph, and none of the eight parameters."""
    seen = seen_under("cudagraphs", "MLP 4 x 256")
    assert seen.copied == ((64, 256),)


@pytest.mark.parametrize("template", ["freezing", "cudagraphs+freezing"])
def test_frozen_weights_are_not_copied(template, evidence):
    """With and without CUDA graphs, a frozen model has one input, and its weights are in the code."""
    seen = look(f"tmpl-inductor:{template}", "conv+bn+relu")
    evidence(template, "conv+bn+relu", acts=True, **seen.brief())
    assert seen.inputs == 1
    assert "rsqrt" not in seen.code
    assert seen.graph_launches == ("cudagraphs" in template)
    assert seen.copied == (((8, 16, 32, 32),) if "cudagraphs" in template else ())
    assert_close(seen.result, seen.expected, atol=1e-2, rtol=1e-2)


def test_tma_kernel_runs(evidence):
    """If a persistent-TMA kernel is chosen, here as the only choice, it loads by descriptors with right results."""
    seen = look("tmpl-inductor:tma", LARGE_GEMM, **{"test_configs.autotune_choice_name_regex": TMA})
    evidence("tma", f"{LARGE_GEMM}, TMA kernels alone", acts=True, **seen.brief())
    assert "triton_tem_fused_mm" in seen.code
    assert "make_tensor_descriptor" in seen.code
    assert_close(seen.result, seen.expected, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("case", ["chain of bf16 steps", "chain of float32 steps"])
def test_eager_numerics_distance(case, evidence):
    """Rounding and division are closer to eager's than default's."""
    seen, default = seen_under("eager_numerics", case), look("inductor", case)
    evidence("eager_numerics", case, acts=True, error=seen.error, default_error=default.error)
    assert seen.error < default.error


def test_eager_numerics_draws_eager_random_numbers():
    """With the same seed, compiled code draws eager's random numbers."""

    def draw(x):
        return torch.rand_like(x) + torch.randn_like(x)

    x = torch.zeros(256, 256, device="cuda")
    torch.manual_seed(3)
    expected = draw(x)
    torch.manual_seed(3)
    assert torch.equal(torch.compile(draw, backend="tmpl-inductor:eager_numerics")(x), expected)


def test_a_backward_pass_under_a_cpp_wrapper():
    """`cpp_wrapper` also compiles the backward graph, which comes later."""
    x = torch.randn(64, 256, device="cuda", requires_grad=True)
    torch.compile(gelu_and_scale, backend="tmpl-inductor:cpp_wrapper")(x).sum().backward()
    gradient, x.grad = x.grad, None
    gelu_and_scale(x).sum().backward()
    assert_close(gradient, x.grad)


TUNED = """
import torch
from torch._inductor.async_compile import AsyncCompile
from triton import knobs

def relu_of_mm(x, w):
    return torch.relu(x @ w)

def listen(*, src, cache_hit, **_):
    if src.name.startswith("triton_mm"):
        times[cache_hit] += 1

times = {True: 0, False: 0}
knobs.compilation.listener = listen
AsyncCompile.wait_pool_ready()
x, w = (torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(2))
torch.compile(relu_of_mm, backend="tmpl-inductor:max_autotune_no_cudagraphs")(x, w)
print(times[True], times[False])
"""


def test_tuning_compiles_no_kernel_again(tmp_path):
    """Tuning reuses the kernels of the compile processes; torch 2.13 ensures this itself."""
    places = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    without = ("TRITON_PTXAS_PATH", "TORCHINDUCTOR_COMPILE_THREADS", "TRITON_INTERPRET")
    env = {name: value for name, value in os.environ.items() if name not in without} | places
    output = subprocess.check_output([sys.executable, "-c", TUNED], text=True, env=env)
    found, compiled = map(int, output.splitlines()[-1].split())
    assert (found > 5, compiled) == (True, 0)


def test_seconds_of_fast_compile(evidence):
    """The seconds until the first result, forward and backward, are recorded beside default's, not judged."""
    ratio = compile_ratio("tmpl-inductor:fast_compile")
    seconds = compile_seconds(("tmpl-inductor:default", "tmpl-inductor:fast_compile"))
    evidence("fast_compile", "encoder, forward and backward", acts=ratio > 1, ratio=ratio, seconds=seconds)


def test_debug_writes_files_and_stops_at_nan(tmp_path, monkeypatch):
    """Each graph's code is written to the debug directory, and a NaN raises where it first appears."""
    import torch._dynamo.config as dynamo_config

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dynamo_config, "debug_dir_root", str(tmp_path))
    square_root = torch.compile(torch.sqrt, backend="tmpl-inductor:debug")
    square_root(torch.ones(8, device="cuda"))
    assert list(Path(tmp_path).rglob("output_code.py"))
    with pytest.raises(AssertionError):
        square_root(torch.full((8,), -1.0, device="cuda"))


@pytest.mark.parametrize("template", list(BUILT_IN))
def test_verdict_is_what_is_seen(template):
    """Doctor's verdict "works" agrees with whether the template has an effect on its own case."""
    found = verdict(make_backend(f"tmpl-inductor:{template}"))
    assert (found.word == "works") == acts_here(template), found


def test_every_template_has_an_effect():
    """Every template has a case, and every case a template."""
    assert {*EFFECTS, "fast_compile"} == set(BUILT_IN)
    assert {e.acting for e in EFFECTS.values()} | {e.idle for e in EFFECTS.values()} <= {*CASES, ""}
