"""The Triton kernels give eager's results under Triton's interpreter, in a separate process."""

import os
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context

import pytest
import torch
from torch.nn import functional

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

TOLERANCES = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (3e-2, 3e-2), torch.float16: (4e-3, 4e-3)}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=["fp32", "bf16", "fp16"])
WIDTHS = (1, 7, 64, 257)
INF, NAN = float("inf"), float("nan")


@pytest.fixture(scope="module")
def interpreted():
    """Return a function that calls another one in a process with Triton's interpreter, and raises its exception."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            yield lambda check, *args: pool.submit(seeded, check, *args).result(timeout=120)


def seeded(check, *args):
    torch.manual_seed(0)
    check(*args)


def close(result, expected, dtype):
    absolute, relative = TOLERANCES[dtype]
    torch.testing.assert_close(result, expected, atol=absolute, rtol=relative, equal_nan=True)


def normal(*shape, dtype):
    return torch.randn(shape).to(dtype)


def softmax(dtype, width, widest):
    from benchmarks.workloads.kernels.softmax import softmax as kernel

    x = normal(5, width, dtype=dtype)
    x[1], x[2, 0], x[3, -1], x[4, : width // 2] = -INF, NAN, INF, -INF
    close(kernel(x, widest), torch.softmax(x, -1), dtype)


@DTYPES
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("widest", [1000, 1], ids=["held", "read_twice"])
def test_softmax_of_numbers_infinities_and_nans(interpreted, dtype, width, widest):
    """Rows without a finite number, with NaN or infinity, or starting with -inf give eager's results."""
    interpreted(softmax, dtype, width, widest)


def rms_norm(dtype, width):
    from benchmarks.workloads.kernels.norms import rms_norm as kernel

    x, residual, weight = normal(7, width, dtype=dtype), normal(7, width, dtype=dtype), normal(width, dtype=dtype)
    x[1, 0], x[2, 0] = NAN, INF
    added = x + residual
    close(kernel(x, residual, weight, 1e-6), (functional.rms_norm(added, (width,), weight, 1e-6), added), dtype)


@DTYPES
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_with_residual(interpreted, dtype, width):
    interpreted(rms_norm, dtype, width)


def with_gradients(kernel, eager, args, dtype):
    ours, theirs = ([arg.clone().requires_grad_() for arg in args] for _ in range(2))
    out, expected = kernel(*ours), eager(*theirs)
    close(out, expected, dtype)
    grad = normal(*out.shape, dtype=dtype)
    close(torch.autograd.grad(out, ours, grad), torch.autograd.grad(expected, theirs, grad), dtype)


def layer_norm(dtype, width):
    from benchmarks.workloads.kernels.norms import layer_norm as kernel

    args = normal(7, width, dtype=dtype), normal(width, dtype=dtype), normal(width, dtype=dtype)
    with_gradients(
        lambda x, weight, bias: kernel(x, weight, bias, 1e-5),
        lambda x, weight, bias: functional.layer_norm(x, (width,), weight, bias, 1e-5),
        args,
        dtype,
    )


@DTYPES
@pytest.mark.parametrize("width", WIDTHS[1:])
def test_layer_norm_and_its_gradients(interpreted, dtype, width):
    interpreted(layer_norm, dtype, width)


def cross_entropy(dtype, classes):
    from benchmarks.workloads.kernels.cross_entropy import cross_entropy as kernel

    target = torch.randint(classes, (7,))
    logits = normal(7, classes, dtype=dtype)
    logits[1, torch.arange(classes) != target[1]] = -INF
    with_gradients(lambda x: kernel(x, target), lambda x: functional.cross_entropy(x, target), (logits,), dtype)


@DTYPES
@pytest.mark.parametrize("classes", WIDTHS)
def test_cross_entropy_and_its_gradient(interpreted, dtype, classes):
    interpreted(cross_entropy, dtype, classes)


def swiglu(dtype):
    from benchmarks.workloads.kernels.elementwise import swiglu as kernel

    gate, up = normal(9, 37, dtype=dtype), normal(9, 37, dtype=dtype)
    gate[0, 0], gate[1, 0] = NAN, -INF
    close(kernel(gate, up), functional.silu(gate) * up, dtype)


@DTYPES
def test_swiglu(interpreted, dtype):
    interpreted(swiglu, dtype)


def rope(dtype, half):
    from benchmarks.workloads.cases.elementwise import rope as eager
    from benchmarks.workloads.kernels.elementwise import rope as kernel

    q, k = normal(2, 3, 5, 2 * half, dtype=dtype), normal(2, 1, 5, 2 * half, dtype=dtype)
    cos, sin = normal(5, half, dtype=dtype), normal(5, half, dtype=dtype)
    close(kernel(q, k, cos, sin), eager(q, k, cos, sin), dtype)


@DTYPES
@pytest.mark.parametrize("half", [6, 16])
def test_rope(interpreted, dtype, half):
    interpreted(rope, dtype, half)


def matrices(dtype, m, k, n):
    return normal(m, k, dtype=dtype), normal(n, k, dtype=dtype) / k**0.5, normal(n, dtype=dtype)


def matmul(name, dtype, m, k, n):
    from benchmarks.workloads.kernels import matmul as kernels

    a, weight, _ = matrices(dtype, m, k, n)
    kernel = getattr(kernels, name)
    close(kernel(a, weight.t()), a @ weight.t(), dtype)
    close(kernel(a, weight.t().contiguous()), a @ weight.t(), dtype)


ODD_SHAPES = [(1, 17, 33), (33, 29, 57), (48, 96, 80)]
ALIGNED_SHAPES = [(5, 8, 8), (33, 40, 56), (48, 96, 80)]
PRODUCTS = [
    *(("matmul", shape) for shape in ODD_SHAPES),
    *(("matmul_padded", shape) for shape in ODD_SHAPES),
    *(("matmul_tma", shape) for shape in ALIGNED_SHAPES),
]


@DTYPES
@pytest.mark.parametrize(("name", "shape"), PRODUCTS, ids=lambda value: str(value).replace(", ", "x").strip("()"))
def test_matmul_for_both_orders_of_the_second_matrix(interpreted, name, shape, dtype):
    interpreted(matmul, name, dtype, *shape)


def linear_gelu(name, dtype):
    from benchmarks.workloads.kernels import matmul as kernels

    args = matrices(dtype, 33, 40, 56)
    close(getattr(kernels, name)(*args), functional.gelu(functional.linear(*args)), dtype)


@DTYPES
@pytest.mark.parametrize("name", ["linear_gelu", "linear_gelu_tma"])
def test_linear_with_bias_and_gelu(interpreted, name, dtype):
    interpreted(linear_gelu, name, dtype)


def scaled_matmul(name):
    from benchmarks.workloads.cases.gemm import scaled_mm, to_fp8
    from benchmarks.workloads.kernels import matmul as kernels

    (a, a_scale), (b, b_scale) = to_fp8(torch.randn(40, 64)), to_fp8(torch.randn(80, 64))
    args = a, b.t(), a_scale, b_scale.t()
    torch.testing.assert_close(getattr(kernels, name)(*args), scaled_mm(*args), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("name", ["scaled_matmul", "scaled_matmul_tma"])
def test_fp8_matmul_with_scales_by_row(interpreted, name):
    interpreted(scaled_matmul, name)


def unaligned():
    from benchmarks.workloads.kernels.matmul import matmul_tma

    matmul_tma(torch.randn(4, 17), torch.randn(17, 8))


def test_matmul_tma_says_why_it_cannot(interpreted):
    from backend_kwargs.harness.trial import UnavailableError

    with pytest.raises(UnavailableError) as e:
        interpreted(unaligned)
    assert str(e.value) == "TMA requires rows of multiples of 16 bytes, got strides (17, 1): use matmul."


def attention(dtype, heads, shared, length, width):
    from benchmarks.workloads.cases import attention as eager
    from benchmarks.workloads.kernels import attention as kernels

    q = normal(2, heads, length, width, dtype=dtype)
    k, v = normal(2, shared, length, width, dtype=dtype), normal(2, shared, length, width, dtype=dtype)
    close(kernels.attention(q, k, v), eager.causal(q, k, v), dtype)
    last = q[:, :, -1:]
    close(kernels.decode(last, k, v), eager.decode(last, k, v), dtype)


@DTYPES
@pytest.mark.parametrize("shape", [(2, 1, 5, 8), (4, 2, 33, 24), (3, 3, 64, 32)], ids=str)
def test_attention_causal_and_of_one_token(interpreted, shape, dtype):
    """Attention works for lengths and widths that are not powers of two, and with shared key heads."""
    interpreted(attention, dtype, *shape)


def kernel_of_a_case():
    from benchmarks.workloads.kernels import interpreted, kernel

    assert interpreted()
    assert os.environ["TRITON_INTERPRET"] == "1"
    x = torch.randn(3, 5)
    close(kernel("softmax.softmax", x.device)(x), torch.softmax(x, -1), x.dtype)


def test_a_case_finds_its_kernel_by_name(interpreted):
    interpreted(kernel_of_a_case)


def tuning():
    from benchmarks.studies import tune_kernels
    from benchmarks.studies.tune_kernels import table, time_case

    tune_kernels.TIMED = 1
    eager, *ours = time_case(print, "layer_norm_fwd_bwd", "cpu", "smoke")
    assert [(row["peer"], row["config"], row["error"]) for row in ours] == [
        ("triton_layer_norm", f"norms.{kernel} config(4, 1, ROWS=2, PER_SM=1{more})", "")
        for kernel, more in (("layer_norm_rows", ""), ("layer_norm_gradients", ", STAGES=2"))
    ]
    assert all(row["us"] > 0 for row in (eager, *ours))
    assert len(table([eager, *ours]).splitlines()) == 3


def test_tuning_times_each_configuration_of_each_kernel_of_a_case(interpreted):
    interpreted(tuning)


def moving(dtype, count):
    from benchmarks.workloads.kernels.bandwidth import READ, copy, sums

    x = normal(count, dtype=dtype)
    close(sums(x), torch.stack([block.float().sum() for block in x.split(READ)]), dtype)
    assert torch.equal(copy(x, torch.zeros_like(x)), x)


@DTYPES
def test_reading_and_copying_more_than_a_block(interpreted, dtype):
    interpreted(moving, dtype, 8193)


def pruned():
    from benchmarks.studies.tune_kernels import tuners
    from benchmarks.workloads.kernels.launch import KEPT

    found = tuners().values()
    assert found
    for tuner in found:
        assert tuner.configs == tuner.searched[:KEPT]
        assert len(set(map(str, tuner.searched))) == len(tuner.searched) >= KEPT


def test_a_call_chooses_among_few_of_the_configurations_that_tuning_tries(monkeypatch):
    """A call tries only a few of the configurations of tuning; the interpreter would use its own."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(pruned).result(timeout=120)


def result(case, peer, us, config="", error=""):
    return {"case": case, "peer": peer, "config": config, "error": error, "limit_us": 50.0, "us": us}


def test_report_has_the_best_of_each_peer_and_how_kernels_stand_to_libraries():
    from benchmarks.studies.tune_kernels import markdown

    rows = [
        result("softmax", "eager", 200.0),
        result("softmax", "triton_softmax", 110.0, "slow"),
        result("softmax", "triton_softmax", 100.0, "fast"),
        result("softmax", "triton_softmax", None, "wide", "wrong"),
        result("matmul", "eager", 90.0),
        result("matmul", "cublas", 80.0),
        result("matmul", "triton_matmul", 100.0),
        result("copy", "eager", 100.0),
        result("copy", "triton_copy", 101.0),
    ]
    text = markdown({"environment": {"device_name": "GPU", "torch": "2", "triton": "3"}, "rows": rows})
    assert "Environment: GPU, torch 2, triton 3.\n" in text
    assert "| softmax | triton_softmax | 100.0 | 50.0 | `fast` |\n| matmul | eager | 90.0 | 55.6 |  |\n" in text
    assert "Failed or wrong: softmax wide: wrong.\n" in text
    assert "- faster: softmax 2.00x\n- as fast: copy 0.99x\n- slower: matmul 0.80x\n" in text
