"""The error of results and gradients against a bound, and what statistics and statuses say at their ends."""

import math
import subprocess

import pytest
import torch

from backend_kwargs.trial import Accuracy, Interval, accuracy, check_error, status_of, timing, within_noise

ONES = torch.ones(4)
WIDE = ONES.double()
ODD = torch.tensor([1.0, math.inf, math.nan, -math.inf])


def off(share):
    return ONES * (1 + share)


@pytest.mark.parametrize(
    ("result", "max_error", "verdict"),
    [
        pytest.param(off(0.5), 0.5, Accuracy(error=0.5, bound=0.5), id="at the bound"),
        pytest.param(
            off(0.5),
            0.25,
            Accuracy("fail_accuracy", "output: error 0.5, above max_error=0.25", error=0.5, bound=0.25),
            id="beyond it",
        ),
        pytest.param(ONES, 0.5, Accuracy(error=0.0, bound=0.5), id="exact"),
        pytest.param(
            [ONES, off(0.25), off(0.5), off(0.125)],
            0.3,
            Accuracy("fail_accuracy", "output[2]: error 0.5, above max_error=0.3", error=0.5, bound=0.3),
            id="the worst of several",
        ),
        pytest.param(
            [off(0.5), off(0.5)],
            0.3,
            Accuracy("fail_accuracy", "output[0]: error 0.5, above max_error=0.3", error=0.5, bound=0.3),
            id="the first of equals",
        ),
    ],
)
def test_errors_are_held_to_the_bound(result, max_error, verdict):
    """Each leaf's error is a share of its own size; the largest is reported with its place."""
    same = [ONES] * len(result) if isinstance(result, list) else ONES
    wide = [WIDE] * len(result) if isinstance(result, list) else WIDE
    assert check_error(result, same, wide, max_error) == verdict


@pytest.mark.parametrize(
    ("result", "eager", "reference", "reason"),
    [
        pytest.param(
            ONES.double(), ONES, WIDE, "output: eager's dtype is torch.float32, this one's torch.float64", id="dtype"
        ),
        pytest.param(
            [ONES],
            [ONES, ONES],
            [WIDE, WIDE],
            "the structure of the result differs from eager's at output[1]",
            id="fewer",
        ),
        pytest.param(
            [ONES],
            [ONES],
            [WIDE, WIDE],
            "the structure of the result differs from eager's at output[1]",
            id="other reference",
        ),
        pytest.param(
            torch.arange(4),
            torch.arange(4) + 1,
            torch.arange(4),
            "output: the values differ from eager's",
            id="integers",
        ),
        pytest.param([2], [3], [2], "output[0]: the values differ from eager's", id="number"),
        pytest.param(ODD, ONES, WIDE, "output: NaN or infinity where eager has none, or vice versa", id="infinities"),
        pytest.param(
            ONES, ODD, ODD.double(), "output: NaN or infinity where eager has none, or vice versa", id="no infinities"
        ),
    ],
)
def test_what_no_bound_excuses(result, eager, reference, reason):
    """Structure, types, values that are not floating, NaN and infinity must be eager's."""
    found = check_error(result, eager, reference, 1e9)
    assert found == Accuracy("fail_accuracy", reason)


@pytest.mark.parametrize(
    ("result", "reference", "error"),
    [
        pytest.param(ODD, ODD.double(), 0.0, id="the same infinities"),
        pytest.param([2, ONES], [2, WIDE], 0.0, id="a number beside"),
        pytest.param([1.5], [1.0], 0.5, id="a float"),
        pytest.param(0 * ONES, 0 * WIDE, 0.0, id="zeros"),
        pytest.param(ONES, 0 * WIDE, math.inf, id="against zeros"),
        pytest.param(torch.tensor([5.0, 1.0]), torch.tensor([math.inf, 1.0]).double(), 0.0, id="an infinite reference"),
    ],
)
def test_which_elements_have_an_error(result, reference, error):
    """Where the reference is finite; nothing is a share of nothing."""
    found = check_error(result, result, reference, 1e9)
    assert found.error == error
    assert found.passed is math.isfinite(error)


@pytest.mark.parametrize("odd", [math.nan, math.inf], ids=str)
def test_without_a_finite_result_there_is_no_error(odd):
    """A bound is not kept by results that are all nan or infinite; one finite result is enough."""
    nothing = ONES * odd
    assert check_error([nothing, nothing], [nothing, nothing], [WIDE * odd, WIDE * odd], 0.5) == Accuracy(
        "fail_accuracy", "its error cannot be measured: no result is finite"
    )
    assert check_error([nothing, ONES], [nothing, ONES], [WIDE * odd, WIDE], 0.5) == Accuracy(error=0.0, bound=0.5)


def test_no_finite_result_where_the_reference_is():
    """An overflow in eager and in the result is an infinite error where the reference is finite."""
    overflow = torch.tensor([math.inf, 1.0])
    found = check_error(overflow, overflow, torch.tensor([1e39, 1.0], dtype=torch.float64), 1e9, what="grad")
    assert (found.error, found.reason) == (math.inf, "grad: error inf, above max_error=1e+09")


def test_each_gradient_is_measured_by_itself():
    """A small gradient that is all wrong is not hidden by a large one that is right."""
    found = check_error([ONES, -ONES / 1000], [ONES, ONES / 1000], [WIDE, WIDE / 1000], 0.4, what="gradient")
    assert (found.status, found.reason) == ("fail_accuracy", "gradient[1]: error 2, above max_error=0.4")


def test_a_gradient_that_is_zero_but_for_rounding_is_measured_by_what_is_summed():
    """That of an attention key's bias: in bfloat16 its rounding errors are 65536 times those of eager's float32."""
    nothing, eps = 1e-17 * WIDE, torch.finfo(torch.bfloat16).eps
    eager = torch.finfo(torch.float32).eps * ONES
    assert check_error([eps * ONES], [eager], [nothing], 0.01).passed
    assert not check_error([0.1 * ONES], [eager], [nothing], 0.01).passed


@pytest.mark.parametrize(("result", "eager"), [([None], [ONES]), ([ONES], [None])], ids=["missing", "odd"])
def test_a_missing_gradient_fails(result, eager):
    """A parameter has a gradient in both or in neither."""
    assert check_error(result, eager, eager, 1e9).reason.startswith("output[0]: eager gives ")


@pytest.mark.parametrize(
    ("interval", "inside"),
    [
        pytest.param((1.0, 0.9, 1.1), True, id="around"),
        pytest.param((1.1, 1.02, 1.2), True, id="touches from above"),
        pytest.param((1.1, 1.021, 1.2), False, id="above"),
        pytest.param((0.9, 0.8, 0.98), True, id="touches from below"),
        pytest.param((0.9, 0.8, 0.979), False, id="below"),
    ],
)
def test_where_the_noise_ends(interval, inside):
    """An interval that reaches the noise floor shows nothing."""
    assert within_noise(Interval(*interval), Interval(1.0, 0.98, 1.02)) is inside


@pytest.mark.parametrize(
    ("interval", "floor"),
    [
        pytest.param((1.0, 0.5, 1.25), (1.0, 0.5, 2.0), id="slow"),
        pytest.param((1.0, 0.8, 4.0), (1.0, 0.25, 4.0), id="fast"),
        pytest.param((2.0, 2.0, 2.0), (1.0, 0.5, 2.0), id="not about one"),
        pytest.param((1.0, 1.0, 1.0), (1.0, 1.0, 1.0), id="none"),
    ],
)
def test_the_floor_of_a_ratio_of_equals(interval, floor):
    """It reaches as far to one side as to the other."""
    assert timing.noise_floor(Interval(*interval)) == Interval(*floor)


@pytest.mark.parametrize(("q", "value"), [(0.0, 1.0), (0.25, 1.5), (0.5, 2.0), (1.0, 9.0)])
def test_percentiles_are_interpolated(q, value):
    """Between two samples the value is on the line between them."""
    assert timing.percentile([9.0, 1.0, 2.0], q) == value


LONG = "x" * 300


def failed_program(stdout=b"", stderr=b""):
    return subprocess.CalledProcessError(1, ["cc"], stdout, stderr)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        pytest.param(ValueError("y" * 188), ("fail_to_run", "ValueError: " + "y" * 188), id="as long as may be"),
        pytest.param(ValueError("y" * 189), ("fail_to_run", "ValueError: " + "y" * 185 + "..."), id="a letter longer"),
        pytest.param(ValueError(), ("fail_to_run", "ValueError"), id="without words"),
        pytest.param(ValueError("\n \n a \n b"), ("fail_to_run", "ValueError: a"), id="first line"),
        pytest.param(MemoryError("x"), ("oom", "MemoryError: x"), id="memory"),
        pytest.param(torch.OutOfMemoryError("x"), ("oom", "OutOfMemoryError: x"), id="memory of a GPU"),
        pytest.param(
            RuntimeError("can't allocate memory: 3"), ("oom", "RuntimeError: can't allocate memory: 3"), id="of a CPU"
        ),
        pytest.param(
            ValueError("can't allocate memory"), ("fail_to_run", "ValueError: can't allocate memory"), id="words alone"
        ),
        pytest.param(ImportError("x"), ("unavailable", "ImportError: x"), id="import"),
        pytest.param(
            failed_program(stderr=b"note\n a.c: Error: b\nlast"),
            ("fail_to_run", "a.c: Error: b"),
            id="a compiler's error",
        ),
        pytest.param(failed_program(stderr=b"first\nlast\n"), ("fail_to_run", "last"), id="a program's last line"),
        pytest.param(failed_program(stdout=b"out\n"), ("fail_to_run", "out"), id="a program's output"),
        pytest.param(
            failed_program(),
            ("fail_to_run", "CalledProcessError: Command '['cc']' returned non-zero exit status 1."),
            id="a silent program",
        ),
    ],
)
def test_the_status_of_an_error(error, status):
    """A word, and a line of at most 200 letters."""
    assert status_of(error) == status


def test_the_innermost_cause_is_the_reason():
    """Also where torch wraps an error in its own, and where a chain leads back to itself."""
    inner, outer = ImportError("inner"), RuntimeError("outer")
    outer.__cause__ = inner
    assert status_of(outer) == ("unavailable", "ImportError: inner")
    inner.__cause__ = outer
    assert status_of(outer) == ("unavailable", "ImportError: inner")
    wrapped = RuntimeError("wrapper")
    wrapped.inner_exception = ValueError("within")
    assert status_of(wrapped) == ("fail_to_run", "ValueError: within")


def test_a_result_without_numbers_has_no_error():
    assert check_error([True, "a"], [True, "a"], [True, "a"], 0.1).error == 0.0


def test_a_result_without_elements_has_no_error():
    """An empty tensor alone passes, since none of its elements could be measured."""
    empty = torch.empty(0)
    assert check_error(empty, empty, empty.double(), 0.5) == Accuracy(error=0.0, bound=0.5)


def test_an_error_beside_an_infinity_of_eagers():
    """Where eager overflows and the reference does not, the error is a share of the reference, not of infinity."""
    assert accuracy.relative_error(ONES * 2, ONES * math.inf, WIDE) == 1.0


def test_integers_are_compared_by_value():
    """A large integer equals another object of the same value."""
    assert check_error([int("100000")], [int("100000")], [int("100000")], 0.1).error == 0.0
