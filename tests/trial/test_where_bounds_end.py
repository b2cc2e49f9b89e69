"""Each bound of the accuracy check: what lies on it is allowed, and the next number is not."""

import math
from types import SimpleNamespace

import pytest
import torch

from backend_kwargs.interval import Interval
from backend_kwargs.trial import accuracy, memory, timing
from backend_kwargs.trial.accuracy import Accuracy, Errors, relative_error

MORE, LESS = math.inf, -math.inf


def next_to(value, towards):
    return math.nextafter(value, towards)


def leaf(got, want, precise=None, *, tol=0.0, dtype=torch.float64):
    """Return a leaf of numbers in float64, which no tolerance excuses."""
    limits = accuracy._Limits(tol, dtype, accuracy.largest_of([want]))
    return accuracy._Leaf("output", got, want, precise, dtype, limits)


def ones(count=64):
    return torch.ones(count, dtype=torch.float64)


@pytest.mark.parametrize(
    ("dtype", "count", "times"),
    [
        pytest.param(torch.float64, 64, 2.0, id="float64"),
        pytest.param(torch.float32, 32, 2.0, id="32 numbers"),
        pytest.param(torch.float32, 16, 2.5, id="few"),
        pytest.param(torch.bfloat16, 64, 3.0, id="bfloat16"),
    ],
)
def test_the_mean_error_in_eagers(dtype, count, times):
    """Twice eager's own, or three times in half precision, and more of few numbers."""
    own, judged = Errors(2.0**-7, 1.0), leaf(ones(count), ones(count), ones(count), dtype=dtype)
    allowed = times * own.rms
    assert judged._far(own, Accuracy(rmse=allowed)) is None
    assert judged._far(own, Accuracy(rmse=next_to(allowed, MORE))) is not None


def test_the_mean_error_in_those_of_other_roundings():
    """Twice the largest that other roundings gave, which are apart from eager's, and eager's own."""
    own, drawn, judged = Errors(2.0**-9, 1.0), Errors(2.0**-7, 1.0), leaf(ones(), ones(), ones())
    allowed = 2.0**-6 + own.rms
    assert judged._far(own, Accuracy(rmse=allowed), drawn) is None
    assert judged._far(own, Accuracy(rmse=next_to(allowed, MORE)), drawn) is not None


def test_how_many_times_no_rounding_explains():
    """Beyond ten times what is allowed nothing more is drawn."""
    own, judged = Errors(2.0**-7, 1.0), leaf(ones(), ones(), ones())
    allowed = accuracy.BEYOND * 2 * own.rms
    assert judged._far(own, Accuracy(rmse=allowed), beyond=accuracy.BEYOND) is None
    assert judged._far(own, Accuracy(rmse=next_to(allowed, MORE)), beyond=accuracy.BEYOND) is not None


@pytest.mark.parametrize("towards", [None, MORE], ids=["at", "above"])
def test_one_element_in_eagers_largest_error(towards):
    """It may be off ten times eager's largest, and no more."""
    truth, off = torch.zeros(64, dtype=torch.float64), 1.25
    got = truth.clone()
    got[3] = off if towards is None else next_to(off, towards)
    found = leaf(got, truth, truth)._far(Errors(1.0, 0.125), Accuracy(rmse=0.0))
    assert (found is None) is (towards is None)


@pytest.mark.parametrize(
    ("moved", "counts"), [(1.0, True), (next_to(1.0, LESS), False), (next_to(1.0, MORE), True)], ids=str
)
def test_from_which_error_on_a_leaf_may_be_zero(moved, counts):
    """A tenth of its size: of 10, an error of 1."""
    judged = leaf(10 * ones(), 10 * ones())
    assert (judged._rounding(Errors(moved, moved), accuracy.NONE) > 0) is counts


@pytest.mark.parametrize(("drawn", "noise"), [(1.0, True), (next_to(1.0, LESS), False)], ids=["half", "less"])
def test_which_leaf_is_noise_without_a_reference(drawn, noise):
    """Other roundings move it by half of its size."""
    judged = leaf(2 * ones(), 2 * ones(), tol=1.0)
    rounding = judged._rounding(accuracy.NONE, Errors(drawn, drawn))
    assert (rounding > judged.limits.rounding) is noise


@pytest.mark.parametrize(("own", "zero"), [(1.0, True), (next_to(1.0, LESS), False)], ids=["zero", "not"])
def test_which_leaf_is_zero_in_exact_arithmetic(own, zero):
    """Float64 gives a millionth of eager's error."""
    judged = leaf(ones(), ones(), 2.0**-20 * ones(), tol=1.0)
    rounding = judged._rounding(Errors(own, own), accuracy.NONE)
    assert (rounding > judged.limits.rounding) is zero


@pytest.mark.parametrize(("count", "few"), [(31, True), (32, False)])
def test_how_many_numbers_are_few(count, few):
    """Of 32 and more, eager's error is not small by chance."""
    assert leaf(ones(count), ones(count)).few is few


@pytest.mark.parametrize(("cosine", "passes"), [(0.99, True), (next_to(0.99, LESS), False)], ids=["at", "below"])
def test_the_lowest_cosine(cosine, passes):
    """Without a reference it must be 0.99."""
    found = leaf(ones(), ones())._far_from_eager(Accuracy(cosine=cosine), 0.0)
    assert (found is None) is passes


@pytest.mark.parametrize(
    ("size", "passes"),
    [(21.0, True), (21.0 + 1e-12, False), (19.0, True), (19.0 - 1e-12, False)],
    ids=["at", "above", "at the lower end", "below"],
)
def test_the_largest_growth(size, passes):
    """Without a reference the size may be five per cent off: of 20, by 1."""
    found = leaf(size * ones(), 20 * ones())._far_from_eager(Accuracy(cosine=1.0), 0.0)
    assert (found is None) is passes


@pytest.mark.parametrize(("element", "passes"), [(1.5, True), (next_to(1.5, MORE), False)], ids=["at", "above"])
def test_the_largest_change_of_one_element(element, passes):
    """Without a reference it may be off by a quarter of its size and the leaf's, of 1 each."""
    got = ones(1024)
    got[5] = element
    found = leaf(got, ones(1024))._far_from_eager(Accuracy(cosine=1.0), 0.0)
    assert (found is None) is passes


@pytest.mark.parametrize(
    ("size", "eager", "error"),
    [
        pytest.param(1.0, 2.0, 1.0, id="as large as eager's error"),
        pytest.param(1.0, 2.5, 1.0 * torch.finfo(torch.float32).eps / 1.5, id="smaller"),
        pytest.param(0.0, 0.0, math.inf, id="no size, no error of eager's"),
    ],
)
def test_which_reference_has_no_size_of_its_own(size, eager, error):
    """One that is smaller than eager's error is measured by what was summed; one as large is not."""
    wide = torch.full((4,), size, dtype=torch.float64)
    result = (wide + 1.0).float()
    assert relative_error(result, torch.full((4,), eager), wide) == pytest.approx(error)


@pytest.mark.parametrize(
    ("low", "high", "inside"),
    [
        pytest.param(1.25, 2.0, True, id="begins where the noise ends"),
        pytest.param(next_to(1.25, MORE), 2.0, False, id="begins above"),
        pytest.param(0.5, 0.75, True, id="ends where the noise begins"),
        pytest.param(0.5, next_to(0.75, LESS), False, id="ends below"),
    ],
)
def test_what_is_within_noise(low, high, inside):
    """Intervals that touch overlap."""
    assert timing.within_noise(Interval(1.0, low, high), Interval(1.0, 0.75, 1.25)) is inside


@pytest.mark.parametrize(("used", "said"), [(24, False), (25, False), (26, True)])
def test_how_much_other_processes_may_use(monkeypatch, used, said):
    """A quarter of the cores' time is what any machine does beside."""
    contents = iter(["cpu  0 0 0 0 0 0 0 0\n", f"cpu  {used} 0 0 {100 - used} 0 0 0 0\n"])
    monkeypatch.setattr(memory, "STAT", SimpleNamespace(read_text=lambda: next(contents)))
    assert bool(memory.others_on(torch.device("cpu"))) is said
