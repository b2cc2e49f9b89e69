"""`compare` with lower precision: a row for each, a bound that accepts them, and rows beyond the limit."""

import pytest
import torch
from torch import nn

from backend_kwargs.compare import Candidate, Row, compare
from backend_kwargs.compare.comparison import cells
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.trial import Accuracy

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def rounding(gm, example_inputs):
    """Compute like a backend that uses bfloat16 for float32: a relative error of 1.5e-3."""
    return lambda *args: tuple(out.bfloat16().float() for out in gm(*args))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)).eval()


def row_of(backend, **options) -> Row:
    (row,) = compare(net(), torch.randn(16, 64), [Candidate("c", backend)], rounds=1, **options).rows
    return row


def test_less_precise_numbers_say_what_accepts_them():
    """A row shows the error, the limit, the option that accepts it, and the speedup."""
    row = row_of(rounding)
    assert row.status == "fail_accuracy"
    *_, remark = cells(row)
    assert remark == (
        f"error {row.accuracy.error:.1e}, above the limit {row.accuracy.bound:.1e}: raise --max-error to accept it"
    )
    assert 1e-3 < row.accuracy.error < 3e-3
    assert row.speedup is not None


def test_wrong_numbers_are_no_question_of_precision():
    """Entirely wrong results keep the plain reason."""
    row = Row("c", "c", "fail_accuracy", "output: far", accuracy=Accuracy("fail_accuracy", error=0.9, bound=1e-4))
    assert cells(row)[-1] == "output: far"


@pytest.mark.parametrize(("max_error", "status"), [(1e-2, "unknown"), (1e-4, "fail_accuracy")])
def test_bound(max_error, status):
    """`max_error` accepts errors within it, and none beyond."""
    row = row_of(rounding, max_error=max_error)
    assert row.status == status
    if status == "fail_accuracy":
        assert row.accuracy.bound == max_error


def test_a_precision_beyond_the_bound_is_timed():
    """A row beyond the bound has a time, an error and the limit."""
    candidate = Candidate("c", "tmpl-inductor", options={"precision": "bf16", "max_error": 1e-5})
    (row,) = compare(net(), torch.randn(16, 64), [candidate], rounds=1, max_error=1e-5).rows
    assert row.status == "fail_accuracy"
    assert row.latency is not None
    assert row.accuracy.error > 1e-3


@pytest.mark.parametrize("value", [0, 1, -0.1])
def test_wrong_bound(value):
    """An invalid bound raises at once."""
    with pytest.raises(BackendKwargsError) as caught:
        compare(net(), torch.randn(1, 64), [], max_error=value)
    assert str(caught.value) == (
        f"max_error must be a number above 0 and below 1, got {value!r} ({type(value).__name__})."
    )
