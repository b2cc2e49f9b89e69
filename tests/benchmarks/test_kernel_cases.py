"""The kernel cases: their work gives the limits of the table, and each runs at a small size on a CPU."""

import copy

import pytest
import torch

from backend_kwargs import trial
from benchmarks.workloads.cases import attention, elementwise, gemm, norms, optimizer
from tests import forks

CASES = {case.name: case for module in (gemm, norms, attention, elementwise, optimizer) for case in module.CASES}
BYTES_PER_S = 4.3e12
FLOPS_PER_S = 790e12
# What the hardware allows on an H200, in microseconds, worked out by hand for each row.
LIMITS = {
    "gemm_8192": (1392, "compute"),
    "gemm_prefill": (1218, "compute"),
    "gemm_decode_16": (27, "memory"),
    "gemm_decode_1": (218, "memory"),
    "gemm_odd": (21.7, "compute"),
    "linear_bias_gelu": (174, "compute"),
    "rms_norm_residual": (125, "memory"),
    "rms_norm_residual_1023": (125, "memory"),
    "layer_norm": (125, "memory"),
    "layer_norm_backward": (187, "memory"),
    "layer_norm_fwd_bwd": (250, "memory"),
    "softmax": (62, "memory"),
    "cross_entropy": (977, "memory"),
    "swiglu": (164, "memory"),
    "rope": (78, "memory"),
    "sdpa_causal": (696, "compute"),
    "sdpa_decode": (250, "memory"),
    "conv_3x3_64": (37.5, "compute"),
    "conv_3x3_256": (37.5, "compute"),
    "conv_1x1_1024": (16.6, "compute"),
    "conv_7x7_stride_2": (57, "memory"),
    "embedding": (62, "memory"),
    "sum": (125, "memory"),
    "permute": (62, "memory"),
    "adamw": (1628, "memory"),
}
CPU = torch.device("cpu")
META = torch.device("meta")  # full sizes without their gigabytes
EACH = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.mark.parametrize(("name", "limit"), LIMITS.items(), ids=LIMITS)
def test_work_gives_the_limit_of_the_table(name, limit):
    work = CASES[name].build(META, CASES[name].dtype, "full").work
    terms = {"compute": 1e6 * work.flops / FLOPS_PER_S, "memory": 1e6 * work.bytes / BYTES_PER_S}
    bound = max(terms, key=terms.get)
    assert (pytest.approx(terms[bound], rel=0.005, abs=0.5), bound) == limit


def test_fp8_work_counts_bytes_of_one_and_an_output_of_two():
    work = CASES["gemm_fp8_rowwise"].build(META, torch.bfloat16, "full").work
    m, k, n = 4096, 7168, 4096
    assert (work.flops, work.bytes, work.unit) == (2 * m * k * n, m * k + k * n + 4 * (m + n) + 2 * m * n, "fp8")


def test_fp8_has_a_reference():
    """The fp8 product has a reference in higher precision, so that its bound is eager's error, not a cosine."""
    torch.manual_seed(0)
    problem = CASES["gemm_fp8_rowwise"].build(CPU, torch.float8_e4m3fn, "smoke")
    precise = trial.reference(problem.fn, problem.args)
    assert precise.dtype == torch.float64
    assert torch.allclose(problem.fn(*problem.args).double(), precise, rtol=1e-2, atol=1e-1)


def test_every_case_has_a_limit():
    assert set(LIMITS) == set(CASES) - {"gemm_fp8_rowwise"}


@EACH
def test_work_says_how_much_is_written(case):
    work = case.build(META, case.dtype, "full").work
    assert 0 < work.written < work.bytes


@EACH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_smoke_size_runs_on_a_cpu(case, dtype):
    torch.manual_seed(0)
    problem = case.build(CPU, dtype, "smoke")
    results = problem.fn(*problem.args)
    assert all(tensor.isfinite().all() for tensor in torch.utils._pytree.tree_leaves(results))


@EACH
def test_data_is_random_normal_and_nowhere_zero(case):
    torch.manual_seed(0)
    problem = case.build(CPU, case.dtype, "smoke")
    tensors = torch.utils._pytree.tree_leaves(problem.args)
    assert all(tensor.float().std() > 0 for tensor in tensors if tensor.is_floating_point() and tensor.numel() > 1)


def test_adamw_peer_steps_as_eager_does():
    """The fused kernel and the compiled loop change parameters and state alike."""
    torch.manual_seed(0)
    problem = CASES["adamw"].build(CPU, torch.float32, "smoke")
    args = copy.deepcopy(problem.args)
    torch.testing.assert_close(problem.peers["adamw_fused"](*args), problem.fn(*problem.args))
    torch.testing.assert_close(args, problem.args)


def test_folded_heads_attend_as_grouped_ones():
    torch.manual_seed(0)
    problem = CASES["sdpa_decode"].build(CPU, torch.float32, "smoke")
    torch.testing.assert_close(problem.peers["sdpa_folded"](*problem.args), problem.fn(*problem.args))


@pytest.mark.parametrize(("suite", "count"), [("dev", 8), ("smoke", 6)])
def test_suites_are_small(suite, count):
    assert sum(suite in case.suites for case in CASES.values()) == count


def test_at_most_four_headlines():
    assert sum(case.headline for case in CASES.values()) == 4


def test_triton_kernels_say_why_a_cpu_cannot_run_them(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    problem = CASES["softmax"].build(CPU, torch.float32, "smoke")
    from backend_kwargs.harness.trial import UnavailableError

    with pytest.raises(UnavailableError) as e:
        problem.peers["triton_softmax"](*problem.args)
    assert str(e.value) == "Triton's kernels need a GPU; TRITON_INTERPRET=1 runs them on a CPU, slowly."


def test_cases_import_without_triton():
    """Without Triton, as on a Mac, the cases can be listed and built."""
    code = (
        "import sys; sys.modules['triton'] = None; import torch; from benchmarks.workloads.cases.norms import CASES; "
        "[case.build(torch.device('cpu'), torch.float32, 'smoke') for case in CASES]"
    )
    ran = forks.run("-c", code)
    assert ran.returncode == 0, ran.stderr
