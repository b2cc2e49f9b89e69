"""The accuracy check: right and wrong results, the reference, fresh inputs and cotangents."""

import math
from collections import UserDict
from dataclasses import dataclass

import pytest
import torch

from backend_kwargs import trial
from backend_kwargs.trial import Accuracy, Errors, check, reference, same_twice, worst

# ---- numbers


@dataclass
class Output:
    """An output class that torch's pytrees do not know."""

    logits: torch.Tensor


class Cache:
    """An object such as a decoder's cache: tensors in attributes, in lists of other objects, and itself."""

    def __init__(self, *layers):
        self.layers, self.owner, self.dtype = list(layers), self, torch.float32


class Fields(UserDict):
    """A mapping that torch's pytrees do not know."""


ONE = torch.tensor([1.0, 2.0, 3.0])
NAN = torch.tensor([1.0, math.nan, 3.0])
INF = torch.tensor([1.0, math.inf, 3.0])
HALF = torch.tensor([1.0, 0.5, 3.0])
LARGEST = torch.tensor([1.0, torch.finfo(torch.float64).max, 3.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("result", "eager"),
    [
        pytest.param(ONE, ONE, id="tensor"),
        pytest.param((ONE, {"a": [ONE, None, 3, True, "x"]}), (ONE, {"a": [ONE, None, 3, True, "x"]}), id="pytree"),
        pytest.param(NAN, NAN.clone(), id="nan in the same place"),
        pytest.param(-INF, -INF.clone(), id="infinity in the same place"),
        pytest.param(ONE.long(), ONE.long(), id="integers"),
        pytest.param(ONE.to(torch.complex64), ONE.to(torch.complex64), id="complex"),
        pytest.param(ONE.to(torch.complex64).conj(), ONE.to(torch.complex64), id="conjugate"),
        pytest.param(ONE.to_sparse(), ONE.to_sparse(), id="sparse"),
        pytest.param(int("7" * 30), int("7" * 30), id="large integer"),
        pytest.param(torch.empty(0), torch.empty(0), id="empty"),
        pytest.param(torch.zeros(3), torch.zeros(3), id="zeros"),
        pytest.param(1.0, 1.0 + 1e-9, id="float"),
        pytest.param(None, None, id="none"),
        pytest.param(Output(ONE), Output(ONE.clone()), id="dataclass"),
        pytest.param([Cache(ONE, Cache(ONE))], [Cache(ONE.clone(), Cache(ONE.clone()))], id="objects"),
        pytest.param(Fields(a=ONE), Fields(a=ONE.clone()), id="mapping"),
        pytest.param(ONE + 1e-5, ONE, id="close"),
    ],
)
def test_right_results_pass(result, eager):
    """A result equal to eager's passes, whatever the structure of the output."""
    assert check(result, eager).passed
    assert check(result, eager, eager).passed


@pytest.mark.parametrize(
    ("result", "eager", "reason"),
    [
        pytest.param(
            [Cache(ONE, Cache(2 * ONE))],
            [Cache(ONE, Cache(ONE))],
            "output[0].layers[1].layers[0]: RMS 4.32, eager's is 2.16",
            id="object",
        ),
        pytest.param(ONE[:2], ONE, "output: eager's shape is (3,), this one's (2,)", id="shape"),
        pytest.param(ONE.double(), ONE, "output: eager's dtype is torch.float32, this one's torch.float64", id="dtype"),
        pytest.param([ONE], [ONE, ONE], "the structure of the result differs from eager's at output[1]", id="length"),
        pytest.param({"b": 1}, {"a": 1}, "the structure of the result differs from eager's at output['a']", id="keys"),
        pytest.param([None], [ONE], "output[0]: eager gives Tensor, this one NoneType", id="none"),
        pytest.param([True], [1], "output[0]: eager gives int, this one bool", id="type"),
        pytest.param([3], [4], "output[0]: the values differ from eager's", id="int"),
        pytest.param(ONE.long() + 1, ONE.long(), "output: the values differ from eager's", id="integers"),
        pytest.param(NAN, ONE, "output: NaN or infinity where eager has none, or vice versa", id="nan"),
        pytest.param(ONE, NAN, "output: NaN or infinity where eager has none, or vice versa", id="no nan"),
        pytest.param(HALF, NAN, "output: NaN or infinity where eager has none, or vice versa", id="a half for nan"),
        pytest.param(
            LARGEST, INF.double(), "output: NaN or infinity where eager has none, or vice versa", id="largest for inf"
        ),
        pytest.param(INF, NAN, "output: NaN or infinity where eager has none, or vice versa", id="inf, nan"),
        pytest.param(-INF, INF, "output: NaN or infinity where eager has none, or vice versa", id="sign"),
        pytest.param(Output(-ONE), Output(ONE), "output.logits: cosine to eager -1, at least 0.99 wanted", id="fields"),
        pytest.param(0 * ONE, ONE, "output: cosine to eager 0, at least 0.99 wanted", id="zeros"),
    ],
)
def test_wrong_results_fail(result, eager, reason):
    """A wrong result fails with the reason and the place."""
    found = check(result, eager)
    assert (found.status, found.reason) == ("fail_accuracy", reason)


@pytest.mark.parametrize(
    ("error", "dtype", "passes"),
    [
        pytest.param(1.9, torch.float64, True, id="twice eager's"),
        pytest.param(2.1, torch.float64, False, id="more than twice"),
        pytest.param(2.9, torch.bfloat16, True, id="thrice eager's, computed in bf16"),
        pytest.param(3.1, torch.bfloat16, False, id="more than thrice, in bf16"),
    ],
)
@pytest.mark.parametrize("training", [False, True])
def test_error_is_held_against_eagers_own(error, dtype, passes, training):
    """RMSE(reference, result) may be m times eager's, plus a tenth of the tolerance."""
    truth = torch.zeros(1000, dtype=torch.float64)
    truth[0] = 1000.0
    noise = torch.ones_like(truth)
    noise[1::2] = -1
    found = check(truth + error * noise, truth - noise, truth, dtype=dtype, training=training)
    assert found.passed is passes
    assert (found.rmse, found.reference_rmse) == pytest.approx((error, 1.0))


@pytest.mark.parametrize(
    ("off", "passes"), [pytest.param(3e-3, True, id="less"), pytest.param(3.3e-3, False, id="more")]
)
def test_a_tenth_of_the_tolerance_is_allowed_in_the_mean(off, passes):
    """One element of a thousand may exceed the tolerance if the RMSE stays within a tenth of it."""
    truth = torch.ones(1000, dtype=torch.float64)
    result = truth.clone()
    result[0] += off
    assert check(result, truth, truth).passed is passes


def test_a_tolerance_of_ones_own_holds():
    """`tol` replaces 1e-3, for closeness and for the RMSE."""
    assert check(1.03 * ONE, ONE, ONE.double(), tol=0.1).passed
    assert not check(1.03 * ONE, ONE, ONE.double()).passed


def test_figures_are_those_of_the_worst_tensor():
    """Reported figures are the largest: absolute error and cosine to eager, both RMSEs to the reference."""
    found = check([ONE, ONE + 1e-4, 3], [ONE, ONE, 3], [ONE.double(), ONE.double() + 1e-5, 3])
    assert (found.max_error, found.rmse, found.reference_rmse) == pytest.approx((1e-4, 9e-5, 1e-5), rel=1e-2)
    assert found.cosine == pytest.approx(1.0)
    empty = check(torch.empty(0), torch.empty(0), torch.empty(0))
    assert (empty.max_error, empty.rmse, empty.reference_rmse) == (0.0, 0.0, 0.0)


def test_a_reference_of_another_shape_is_none():
    """A reference of another shape is not used; the cosine decides."""
    assert check(1.01 * ONE, ONE, ONE.double()[:2]).passed


def test_a_reference_of_another_structure_is_none():
    """A reference with other outputs than eager's is not used."""
    assert not check([1.5 * ONE], [ONE], [5 * ONE.double(), ONE.double()]).passed


def test_training_allows_ten_times_more():
    """The tolerance is 1e-3 in inference and 1e-2 in training."""
    truth = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    result = truth + 5e-3
    assert not check(result, truth, truth).passed
    assert check(result, truth, truth, training=True).passed


@pytest.mark.parametrize(
    ("count", "other"),
    [
        pytest.param(100, ONE.long(), id="many"),
        pytest.param(8, 3, id="a few beside an integer"),
        pytest.param(8, ONE.long(), id="a few beside integers"),
        pytest.param(8, torch.empty(0), id="a few beside nothing"),
        pytest.param(8, torch.tensor([math.inf, 1e-6]), id="a few beside an infinity"),
    ],
)
def test_small_numbers_are_not_zero(count, other):
    """Zeros do not pass for outputs of 1e-6, although they are within any absolute tolerance."""
    small = 1e-6 * torch.randn(count, generator=torch.Generator().manual_seed(0))
    assert not check([torch.zeros(count), other], [small, other], [small.double(), other]).passed


def test_a_tiny_tensor_beside_a_large_one_may_be_noise():
    """The gradient of a bias before a normalisation, which is only rounding, does not fail among others."""
    noise = torch.full((64,), 1e-7)
    assert check([ONE, -9 * noise], [ONE, noise], [ONE.double(), 0 * noise.double()]).passed
    assert check([ONE, noise], [ONE, 0 * noise], [ONE.double(), 0 * noise.double()]).passed


@pytest.mark.parametrize("factor", [0.0, 2.0], ids=["zeroed", "doubled"])
def test_a_small_tensor_beside_a_large_one_must_be_right(factor):
    """An output of 1e-3 that eager computes accurately is compared at its own scale."""
    small = 1e-3 * torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert not check([ONE, factor * small], [ONE, small], [ONE.double(), small.double()], training=True).passed


@pytest.mark.parametrize("count", [1, 64], ids=["a number", "many"])
def test_a_small_number_may_be_rounded_otherwise(count):
    """One unit in the last place of bfloat16 passes, even if eager is closer to the reference."""
    small = torch.full((count,), 1e-3, dtype=torch.bfloat16)
    other = small * (1 + torch.finfo(torch.bfloat16).eps)
    assert bool((other != small).all())
    assert check([ONE, other], [ONE, small], [ONE.double(), small.double()]).passed


def test_a_small_output_beside_a_large_one_must_be_right():
    """1.4 for 1.0 fails among values of 1000, whose errors may be as large."""
    large, small = torch.full((8,), 1000.0), torch.tensor([1.0])
    reference = [large.double(), small.double()]
    assert not check([large, 1.4 * small], [large, small]).passed
    assert not check([large, 1.0025 * small], [large, small], reference).passed
    assert check([large, 1.0015 * small], [large, small], reference).passed


@pytest.mark.parametrize(("count", "passes"), [(1, True), (31, True), (32, False)])
def test_a_number_that_eager_rounded_well_by_chance_may_be_rounded_otherwise(count, passes):
    """A float32 number computed from bfloat16 may have bfloat16's rounding error, even if eager's is smaller by chance.

    A few numbers' errors can be small or large by chance, so only large tensors are compared at their own scale.
    """
    small = torch.full((count,), 1e-2)
    assert check([ONE, 1.004 * small], [ONE, small], [ONE.double(), small.double()]).passed is passes


def test_without_reference_the_cosine_decides():
    """Without a reference a cosine to eager of at least 0.99 passes."""
    eager = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert check(1.05 * eager, eager).passed
    assert not check(1.05 * eager, eager, eager.double()).passed


@pytest.mark.parametrize(
    ("factor", "reason"),
    [
        pytest.param(0.5, "output: RMS 1.08, eager's is 2.16", id="half"),
        pytest.param(1.1, "output: RMS 2.38, eager's is 2.16", id="larger"),
    ],
)
def test_without_reference_the_size_must_be_right(factor, reason):
    """A result with eager's direction fails if it is smaller or larger by more than 5 %."""
    assert check(factor * ONE, ONE).reason == reason


def test_a_float_is_compared_with_its_reference():
    """An output that is a Python float may be 4 % off eager's only if there is no reference."""
    assert check(1.04, 1.0).passed
    assert not check(1.04, 1.0, 1.0).passed
    assert check(1.04, 1.0, None).passed


def test_an_infinity_of_the_reference_hides_nothing():
    """If the reference overflows, the other elements are still compared."""
    eager = torch.randn(100, generator=torch.Generator().manual_seed(0))
    reference = eager.double()
    reference[0] = math.inf
    assert check(eager, eager, reference).passed
    assert not check(2 * eager, eager, reference).passed


def test_reference_is_in_float64_and_leaves_the_model():
    """The reference is computed on an upcast copy, including buffers."""
    model = torch.nn.BatchNorm1d(4).half().eval()
    found = trial.reference(model, (torch.randn(3, 4).half(),))
    assert found.dtype == torch.float64
    assert model.running_mean.dtype == torch.float16


def test_reference_falls_back_to_float32():
    """Without float64 the reference is in float32, and without either there is none."""

    def no_double(x):
        if x.dtype == torch.float64:
            raise NotImplementedError
        return x

    def half_only(x):
        if x.dtype != torch.float16:
            raise NotImplementedError
        return x

    x = torch.ones(2).half()
    assert trial.reference(no_double, (x,)).dtype == torch.float32
    assert trial.reference(half_only, (x,)) is None


# ---- fresh inputs


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.arange(12.0).reshape(3, 4), id="floats"),
        pytest.param(torch.arange(12.0).reshape(3, 4).t(), id="transposed"),
        pytest.param(torch.arange(4.0).expand(3, 4), id="expanded"),
        pytest.param(torch.ones(5), id="constant"),
        pytest.param(torch.arange(8), id="only integers"),
        pytest.param(torch.arange(4.0).requires_grad_(), id="leaf"),
    ],
)
def test_fresh_inputs_differ_and_look_alike(tensor):
    """Fresh inputs have other values with the same layout and range, so nothing recompiles."""
    fresh = trial.fresh_inputs([tensor], seed=1)[0]
    assert not torch.equal(fresh, tensor)
    assert (fresh.shape, fresh.stride(), fresh.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert fresh.requires_grad == tensor.requires_grad
    assert fresh.abs().max() <= tensor.abs().max()


def test_a_constant_is_scaled_element_by_element():
    """A constant tensor, which shuffling would not change, becomes different values between half of it and it."""
    (fresh,) = trial.fresh_inputs([torch.full((100,), 4.0)], seed=1)
    assert fresh.unique().numel() == 100
    assert 2.0 <= fresh.min() < 2.5
    assert 3.5 < fresh.max() <= 4.0


def test_eight_bits_are_shuffled():
    """float8, which can be neither compared nor indexed, is shuffled as bytes."""
    tensor = torch.arange(16.0).to(torch.float8_e4m3fn)
    (fresh,) = trial.fresh_inputs([tensor], seed=1)
    assert fresh.dtype == tensor.dtype
    assert sorted(fresh.tolist()) == sorted(tensor.tolist()) != fresh.tolist()
    constant = torch.ones(8).to(torch.float8_e4m3fn)
    assert trial.fresh_inputs([constant], seed=1)[0].tolist() == constant.tolist()


def test_beside_shuffled_integers_all_others_stay():
    """If only integers can change, complex numbers, masks and zeros stay unchanged."""
    given_inputs = {"n": torch.arange(9), "z": torch.arange(9) * 1j, "mask": torch.arange(9) > 4, "x": torch.zeros(9)}
    fresh = trial.fresh_inputs(given_inputs, seed=1)
    assert sorted(fresh["n"].tolist()) == list(range(9)) != fresh["n"].tolist()
    assert all(torch.equal(fresh[name], given_inputs[name]) for name in ("z", "mask", "x"))


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(torch.zeros(4, 8), id="contiguous"),
        pytest.param(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last), id="channels last"),
        pytest.param(torch.zeros(4, 8, dtype=torch.complex64).T, id="complex and transposed"),
    ],
)
def test_cotangents_differ_and_lie_as_outputs_do(end):
    """Cotangents have the layout of the outputs and repeat for a seed, and two of one shape differ."""
    made, again = trial.cotangents([end.requires_grad_(), end], seed=3)
    assert (made.shape, made.stride(), made.dtype, made.requires_grad) == (end.shape, end.stride(), end.dtype, False)
    assert len({*made.flatten().tolist()}) == end.numel()
    assert not torch.equal(made, again)
    assert torch.equal(made, trial.cotangents([end], seed=3)[0])


def test_cotangents_differ_from_row_to_row():
    """Cotangents differ in each row, since a batch norm subtracts their mean over the batch."""
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)), torch.randn(32, 8)
    weight = model[0].weight
    (gradient,) = torch.autograd.grad(out := model(x), weight, trial.cotangents([out]))
    assert gradient.abs().max() > 0.1


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_the_gradient_of_one_number_is_one(shape):
    """A loss is differentiated as `backward()` does it, whatever its type."""
    (made,) = trial.cotangents([torch.full(shape, 3.0, dtype=torch.bfloat16)])
    assert torch.equal(made, torch.ones(shape, dtype=torch.bfloat16))


def test_fresh_inputs_keep_masks():
    """If there are floats, integers and masks stay unchanged: they may be lengths or positions."""
    given_inputs = {"x": torch.randn(4), "lengths": torch.arange(9), "mask": torch.arange(9) > 4, "n": 3}
    fresh = trial.fresh_inputs(given_inputs, seed=1)
    assert torch.equal(fresh["lengths"], given_inputs["lengths"])
    assert torch.equal(fresh["mask"], given_inputs["mask"])
    assert fresh["n"] == 3


def signs(count=1000):
    """Return ones with alternating signs."""
    values = torch.ones(count, dtype=torch.float64)
    values[1::2] = -1
    return values


@pytest.mark.parametrize(
    ("size", "error", "bound", "reason"),
    [
        pytest.param(1.0, 1.5, None, "", id="passes"),
        pytest.param(1.0, 3.0, 2.0, "output: RMSE to the reference 3, at most 2 allowed", id="fails"),
        pytest.param(4.0, 12.0, 8.0, "output: RMSE to the reference 12, at most 8 allowed", id="larger numbers"),
    ],
)
def test_a_figure_relative_to_the_reference(size, error, bound, reason):
    """`error` is the RMSE as a share of the reference's size; `bound` is the largest that was allowed, on failure."""
    truth = torch.full((1000,), 1000 * size, dtype=torch.float64)
    found = check(truth + error * signs(), truth - size * signs(), truth, tol=1e-4)
    assert found.error == pytest.approx(error / (1000 * size))
    assert found.bound == (bound and pytest.approx(bound / (1000 * size), rel=1e-4))
    assert found.reason == reason


def test_no_figure_relative_to_nothing():
    """A reference of zeros has no size to compare with."""
    zeros = torch.zeros(64, dtype=torch.float64)
    found = check(zeros + 1.0, zeros, zeros)
    assert (found.status, found.error, found.bound) == ("fail_accuracy", None, None)
    assert found.reason == "output: RMSE to the reference 1, at most 0 allowed"


def turned(cosine):
    """Return two vectors of one size with this cosine."""
    return torch.tensor([cosine, math.sqrt(1 - cosine**2)], dtype=torch.float64), torch.tensor([1.0, 0.0]).double()


@pytest.mark.parametrize(
    ("cosine", "reason"),
    [
        pytest.param(0.9901, "", id="near"),
        pytest.param(0.9899, "output: cosine to eager 0.9899, at least 0.99 wanted", id="far"),
        pytest.param(-0.9999, "output: cosine to eager -0.9999, at least 0.99 wanted", id="turned round"),
    ],
)
def test_where_the_cosine_ends(cosine, reason):
    """Without a reference a hundredth of the cosine may be lost."""
    assert check(*turned(cosine)).reason == reason


@pytest.mark.parametrize(
    ("factor", "passes"),
    [(1.0509, True), (1.0511, False), (0.9491, True), (0.9489, False)],
    ids=["as large", "larger", "as small", "smaller"],
)
def test_where_the_size_ends(factor, passes):
    """Five per cent and the tolerance, to either side."""
    assert check(factor * signs(), signs()).passed is passes


@pytest.mark.parametrize(
    ("training", "scale", "passes", "fails"),
    [
        pytest.param(False, 1.0, 1.9e-3, 2.1e-3, id="inference"),
        pytest.param(True, 1.0, 1.9e-2, 2.1e-2, id="training"),
        pytest.param(False, 0.5, 1.9e-3, 2.1e-3, id="smaller numbers"),
        pytest.param(False, 50.0, 1.01e-3, 1.2e-3, id="larger numbers"),
    ],
)
def test_how_close_is_close(training, scale, passes, fails):
    """An element may be off by the tolerance of its own size and by that of the output, which counts as at most 1."""
    eager = scale * torch.ones(4, dtype=torch.float64)
    flat = eager.clone()
    for off, wanted in ((passes, True), (fails, False)):
        result = eager.clone()
        result[0] *= 1 + off
        far = check(
            torch.cat([result, -result]), torch.cat([eager, -flat]), torch.cat([eager, -flat]), training=training
        )
        assert far.passed is wanted


def test_the_first_failure_is_the_worst():
    """Of several comparisons the first that failed, whatever the errors of others; of none, one that passed."""
    passed, failed = Accuracy(rmse=9.0), Accuracy("fail_accuracy", "first")
    assert worst([passed, failed, Accuracy("oom", "second")]) == failed
    assert worst([Accuracy(), passed, Accuracy(rmse=1.0)]) == passed
    assert worst([Accuracy(), Accuracy(rmse=0.0)]) == Accuracy(rmse=0.0)
    assert worst([]) == Accuracy()


@pytest.mark.parametrize(
    ("got", "want", "cosine"),
    [
        pytest.param([0.0, 0.0], [0.0, 0.0], 1.0, id="zeros"),
        pytest.param([1.0, 0.0], [0.0, 0.0], 0.0, id="against zeros"),
        pytest.param([3.0, 4.0], [4.0, 3.0], 0.96, id="turned"),
    ],
)
def test_the_cosine_in_the_figures(got, want, cosine):
    """Two rows of zeros have the same direction."""
    assert check(torch.tensor(got), torch.tensor(want), tol=10.0).cosine == pytest.approx(cosine)


def test_a_reference_is_computed_without_gradients():
    """Parameters of the copy are not trained, and a function that is no module is called with wider inputs alone."""
    seen = []

    def fn(x, count):
        seen.append((x.dtype, count, torch.is_grad_enabled()))
        return x

    assert reference(fn, (ONE, 3)).dtype == torch.float64
    assert seen == [(torch.float64, 3, False)]


def test_without_any_reference():
    """A function that fails in each precision has none."""

    def fails(x):
        raise RuntimeError("planted")

    assert reference(fails, (ONE,)) is None


def test_a_number_in_place_of_a_tensor_fails():
    """A Python float does not pass for a tensor of its value, nor a tensor for a float."""
    one = torch.tensor(1.0, dtype=torch.float64)
    assert check(1.0, one).status == check(one, 1.0).status == "fail_accuracy"


def test_the_reference_of_complex_parameters_is_complex():
    """The reference keeps imaginary parts; a real one would be far from eager, and wrong results near enough to it."""
    module = torch.nn.Linear(3, 2, dtype=torch.complex64)
    x = torch.randn(4, 3, dtype=torch.complex64)
    precise = reference(module, (x,))
    assert precise.dtype is torch.complex128
    torch.testing.assert_close(precise.to(torch.complex64), module(x).detach())


def test_the_reference_gets_a_copy_of_an_object_in_its_precision():
    """A call may change the tensors in an object, such as a cache, which must not change the caller's."""
    cache = Cache(ONE.clone())
    precise = reference(lambda cache: cache.layers[0].add_(1), (cache,))
    assert (precise.dtype, cache.layers[0].tolist()) == (torch.float64, ONE.tolist())


LOGITS = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
FLAT = torch.linspace(-2, 2, 1_000_000)


def one_off(by, at=500_000):
    values = FLAT.clone()
    values[at] += by
    return values


@pytest.mark.parametrize(
    ("result", "eager", "training"),
    [
        pytest.param(torch.tensor(0.0), torch.tensor(5e-4), False, id="loss"),
        pytest.param(torch.tensor(0.0), torch.tensor(5e-3), True, id="loss in training"),
        pytest.param(torch.zeros(16), torch.full((16,), 5e-3), True, id="gradients"),
        pytest.param(torch.full((16,), -5e-3), torch.full((16,), 5e-3), True, id="sign of gradients"),
        pytest.param(torch.zeros(31), torch.full((31,), 9e-4), False, id="probabilities"),
        pytest.param(torch.full((3,), 1.2e-5), torch.full((3,), 1e-5), True, id="a fifth"),
        pytest.param(torch.zeros(2).bfloat16(), torch.full((2,), 1e-3).bfloat16(), True, id="half precision"),
        pytest.param(one_off(0.09), FLAT, False, id="one element"),
        pytest.param(one_off(0.9), FLAT, True, id="one element in training"),
        pytest.param(one_off(4.0, at=-1), FLAT, True, id="the largest element"),
    ],
)
def test_each_leaf_and_element_is_compared_at_its_own_size(result, eager, training):
    """Neither many other elements nor larger leaves hide a wrong number."""
    precise = [LOGITS.double(), eager.double()]
    assert not check([LOGITS, result], [LOGITS, eager], precise, training=training).passed


@pytest.mark.parametrize(
    ("result", "eager"),
    [
        pytest.param(torch.tensor(0.0), torch.tensor(5e-3), id="loss"),
        pytest.param(torch.full((16,), -5e-3), torch.full((16,), 5e-3), id="sign of gradients"),
        pytest.param(one_off(0.9), FLAT, id="one element"),
    ],
)
def test_without_reference_too(result, eager):
    """What is small is no rounding error, and one element may be off by a quarter of its size and the leaf's."""
    assert not check([LOGITS, result], [LOGITS, eager], training=True).passed


def test_the_reason_names_one_element():
    found = check(one_off(0.5), FLAT, FLAT.double(), tol=1e-2)
    assert found.reason == "output: one element is off by 0.5, at most 0.02 allowed"


def test_an_element_may_be_off_ten_times_eagers_largest_error():
    """Beside twice the tolerance of its own size and of the leaf's."""
    eager = FLAT.clone()
    eager[3] += 0.01
    assert check(one_off(0.1), eager, FLAT.double()).passed
    assert not check(one_off(0.11), eager, FLAT.double()).passed


@pytest.mark.parametrize(("largest", "passes"), [(0.02, True), (0.01, False)])
def test_errors_at_other_roundings_count_as_eagers(largest, passes):
    """They are read by the path of the leaf."""
    rounding = {"output[1]": Errors(1e-3, largest), "output[0]": Errors(1.0, 1.0)}
    found = check([ONE, one_off(0.15)], [ONE, FLAT], [ONE.double(), FLAT.double()], roundings=[rounding])
    assert found.passed is passes


@pytest.mark.parametrize(
    ("second", "passes"),
    [
        pytest.param([LOGITS, 5 * torch.full((64,), 1e-6)], True, id="rounding"),
        pytest.param([LOGITS, torch.ones(64)], False, id="a small leaf"),
        pytest.param([LOGITS.flip(0), torch.full((64,), 1e-6)], False, id="a large leaf"),
    ],
)
def test_two_runs_of_eager_may_round_otherwise(second, passes):
    """Errors of up to the tolerance of the largest leaf, as atomic additions make them."""
    first = [LOGITS, torch.full((64,), 1e-6)]
    assert same_twice({"output": second}, {"output": first}).passed is passes


@pytest.mark.parametrize(
    ("off", "passes"), [pytest.param(5e-3, True, id="at most"), pytest.param(6e-3, False, id="more")]
)
def test_one_element_of_two_runs_of_eager(off, passes):
    """One element of a small leaf may be off by five times the tolerance of the largest leaf, which has a size of 1."""
    small, changed = torch.full((4096,), 1e-6), torch.full((4096,), 1e-6)
    changed[7] = off
    assert same_twice({"output": [LOGITS, changed]}, {"output": [LOGITS, small]}, tol=1e-3).passed is passes


def test_each_leaf_has_its_error_and_bound():
    """Every tensor compared is listed with its relative error and the largest that passes, the failed one last."""
    wide = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    eager = {"output": [wide.float(), wide.float()], "gradients": {"w": wide.float(), "b": wide.float()}}
    precise = {"output": [wide, wide], "gradients": {"w": wide, "b": wide}}
    seen = {"output": [wide.float(), 1.0001 * wide.float()], "gradients": {"w": 2 * wide.float(), "b": wide.float()}}
    first, second, failed = trial.check_all(seen, eager, precise).leaves
    assert [leaf.name for leaf in (first, second, failed)] == ["output[0]", "output[1]", "gradients['w']"]
    assert [leaf.passed for leaf in (first, second, failed)] == [True, True, False]
    assert all(leaf.error < leaf.bound for leaf in (first, second))
    assert second.error == pytest.approx(1e-4, rel=1e-2)
    assert failed.error > failed.bound
