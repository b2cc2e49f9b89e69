"""Fused code has IEEE's floats and wrapping integers: TVM simplifies only indices, not data."""

import pytest

tvm = pytest.importorskip("tvm")

import torch  # noqa: E402 - TVM's tests are skipped whole where it is missing
import tvm_ffi  # noqa: E402
from tvm import tirx  # noqa: E402

from backend_kwargs.backends.tvm.build import build  # noqa: E402
from backend_kwargs.backends.tvm.lowering.graph import lower  # noqa: E402
from backend_kwargs.backends.tvm.opaque import NUMBER, hide, is_opaque, number, opaque  # noqa: E402
from backend_kwargs.backends.tvm.settings import TVMOptions  # noqa: E402
from tests.backends.composition import same  # noqa: E402
from tests.backends.tvm.exact_examples import EXAMPLES, X, Y, two_sum  # noqa: E402
from tests.backends.tvm.lowered import traced  # noqa: E402

GPU = {"kind": "cuda", "arch": "sm_90", "max_threads_per_block": 1024, "thread_warp_size": 32}
GPU |= {"max_shared_memory_per_block": 49152}
EACH = pytest.mark.parametrize(("function", "args", "code"), EXAMPLES.values(), ids=EXAMPLES)


@EACH
@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"scheduler": "dlight"}, {"pipeline": "default"}], ids=str)
def test_fused_code_is_eagers(compiled, function, args, code, options):
    """Fused code equals eager bit for bit, in one part that TVM runs entirely."""
    call = compiled(function, fallback="error", **options)
    assert same(call(*args), function(*args))


@torch.no_grad()
def test_tuned_code_is_eagers(compiled):
    """The passes of a search do not simplify data either."""

    def function(x, y):
        z = (x + 1e6) - x
        rounded = (x + 12582912.0) - 12582912.0
        return z.amax(-1), rounded.amin(-1), (~(x < 1)).long().sum(-1), two_sum(x, y).amax(-1)

    x, y = X[:88].view(8, 11).nan_to_num(0, 7, -7), Y[:88].view(8, 11)
    call = compiled(function, fallback="error", scheduler="meta_schedule", trials=8, max_trials_per_task=2, seed=0)
    assert all(map(same, call(x, y), function(x, y)))
    assert any(part.tuned for summary in call.summaries for part in summary.partitions)


@torch.no_grad()
def test_frozen_constants_are_not_folded_as_reals(compiled):
    """Constants that TVM folds at compile time have the same values as at run time."""
    module = torch.nn.Module()
    module.register_buffer("c", X.clone())
    module.forward = lambda y: (y, (module.c + 12582912.0) - 12582912.0, module.c * 0.0)
    call = compiled(module, fallback="error", freeze=True)
    assert all(map(same, call(Y), module(Y)))


def source(function, *args):
    """Return the CUDA code of a function, for which no GPU is needed."""
    built = build(lower(traced(function, *args)).mod, TVMOptions(target=GPU), torch.device("cuda"))
    return "".join(each.inspect_source() for host in built.executable.mod.imports for each in host.imports)


@EACH
def test_cuda_code_keeps_what_was_written(function, args, code):
    if not code:
        pytest.skip("it takes AOTAutograd to trace")
    assert code in source(function, *args)


def loops(function, *args):
    """Return the text of the only function of a lowered graph."""
    (func,) = [f for f in lower(traced(function, *args)).mod.functions.values() if isinstance(f, tirx.PrimFunc)]
    return func.script()


def test_indices_stay_tvms_own():
    """Only data is opaque: padding uses indices that TVM can simplify."""
    text = loops(lambda x: torch.nn.functional.pad(x, (1, 2)), torch.randn(4, 8))
    assert "backend_kwargs." not in text
    assert "if_then_else" in text


def test_hidden_twice_is_hidden_once():
    mod = lower(traced(lambda x: (x * 2 + 1).sum(), torch.randn(8))).mod
    assert tvm_ffi.structural_equal(hide(mod, totals=True), mod)


def test_numbers_are_plain_again_within_a_function():
    """The barrier against constant folding does not hinder later passes."""
    x = tirx.Var("x", "float32")
    zero = number(0.0, "float32")
    assert is_opaque(zero)
    assert NUMBER not in str(opaque(x * zero))
    assert "mul" in str(opaque(x * zero))


@pytest.mark.parametrize(
    ("function", "args", "once"),
    [
        pytest.param(lambda b, x, w: torch.addmm(b, x, w, alpha=1), ((6,), (5, 1), (1, 6)), "x0_ptr[", id="a bias"),
        pytest.param(
            lambda x, b: torch.nn.functional.avg_pool2d(x, 1) + b, ((1, 1, 3, 2), (2,)), "b_1_ptr[", id="pool"
        ),
        pytest.param(lambda x: (x > 0.5).any(-1), ((5, 1),), "!= 0", id="any"),
    ],
)
def test_a_reduction_over_one_element_is_computed_once_on_cuda(function, args, once):
    """What follows a reduction is not merged into its initial value as well."""
    code = source(function, *map(torch.rand, args))
    stores = [line for line in code.splitlines() if "_ptr[((int)threadIdx.x)] =" in line]
    assert sum(line.count(once) for line in stores) == 1


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64], ids=str)
def test_wrapped_integers_are_divided_rounding_down_on_cuda(dtype):
    """A sum that wraps may be negative, so its division is not C's, which truncates."""
    code = source(lambda v: (v + 100) // 7, torch.ones(5, dtype=dtype))
    (store,) = [line for line in code.splitlines() if "_ptr[((int)threadIdx.x)] =" in line]
    assert "% " in store or "?" in store, store


def test_the_smallest_integer_is_no_literal_of_a_maximum_on_cuda():
    """CUDA reads -2147483648 as a wider type than the other argument of max."""
    assert "max(-2147483648" not in source(lambda v: v.amax(-1), torch.ones(5, 1, dtype=torch.int32))


def test_vectors_are_compared_with_nan_without_not_on_cuda():
    """CUDA's vectors have no operator !, and TVM vectorizes the loops of products."""
    layer = torch.nn.Linear(256, 256)

    def function(x, weight, bias):
        return torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias))

    assert "= !" not in source(function, torch.rand(32, 256), layer.weight.detach(), layer.bias.detach())
