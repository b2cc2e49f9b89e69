"""Padding to buckets: at which sizes it is checked, what is padded with what, and what is cut."""

import math

import pytest
import torch

import backend_kwargs as bk

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

FAST = "aot_eager"
DIMS = {"x": {0: "n"}, "y": {0: "m"}}


def sealed(fn, *example, **declared):
    return bk.seal(torch.compile(fn, backend=FAST), example, **declared)


def wrong_where(**at):
    """Return a function that padding changes only where inputs have so many numbers, in memory of a size."""

    def fn(x, y):
        wrong = torch.ones((), dtype=torch.bool)
        for name, value in (("x", x), ("y", y)):
            if name in at:
                count, size = at[name]
                wrong = wrong & ((value != 0).sum() == count) & torch.tensor(value.shape[0] == size)
        return x + wrong, y * 1

    return fn


@pytest.mark.parametrize(
    ("at", "names", "point", "padded"),
    [
        pytest.param({"x": (1, 4)}, "'n'", "n=1, m=4", "n=4", id="the least size"),
        pytest.param({"x": (3, 4)}, "'n'", "n=3, m=4", "n=4", id="the largest"),
        pytest.param({"x": (5, 8)}, "'n'", "n=5, m=4", "n=8", id="the least of a further bucket"),
        pytest.param({"x": (7, 8)}, "'n'", "n=7, m=4", "n=8", id="the largest of a further bucket"),
        pytest.param({"y": (2, 4)}, "'m'", "n=8, m=2", "m=4", id="the least of another name"),
        pytest.param({"x": (1, 4), "y": (4, 4)}, "'n'", "n=1, m=4", "n=4", id="where the other is the largest"),
        pytest.param({"x": (1, 4), "y": (2, 4)}, "'n', 'm'", "n=1, m=2", "n=4, m=4", id="the least of both at once"),
    ],
)
def test_at_which_sizes_padding_is_checked(at, names, point, padded):
    """At the least and the largest size of each bucket, and at the least of all names together."""
    with pytest.raises(bk.BackendKwargsError) as refused:
        sealed(
            wrong_where(**at),
            torch.ones(8),
            torch.ones(4),
            dims=DIMS,
            buckets={"n": [4, 8], "m": [4]},
            sizes={"n": range(1, 9), "m": [2, 3, 4]},
        )
    said = f"{names} cannot be padded: 'fn' at {point} gives other results padded to {padded}, output[0]: error 1"
    assert str(refused.value).startswith(said)


def test_each_input_is_padded_with_its_own_number():
    """At the end of each dimension, and results are those of the inputs alone."""

    def bounds(x, y):
        return x.amin(0), y.amax(0)

    call = sealed(
        bounds,
        torch.ones(4, 3),
        -torch.ones(4, 3),
        dims={name: {0: "n"} for name in ("x", "y")},
        buckets={"n": [4]},
        sizes={"n": [2, 3, 4]},
        fill={"x": math.inf, "y": -math.inf},
    )
    for n in (2, 3, 4):
        x, y = torch.randn(n, 3) + 5, torch.randn(n, 3) - 5
        torch.testing.assert_close(call(x, y), bounds(x, y))
    assert call.counters == {"compiled": 1, "padded": 2, "missed": 0}


def test_dimensions_of_one_tensor():
    """Each is padded and cut by itself, and a result lies in memory as an unpadded one does."""

    def fn(x):
        return x.sin(), x.T * 2, x.exp().T, x.new_ones(3)

    call = sealed(
        fn,
        torch.ones(3, 5),
        dims={"x": {0: "n", 1: "m"}},
        buckets={"n": [4], "m": [6]},
        sizes={"n": [2, 3, 4], "m": [5, 6]},
    )
    for n in (2, 3, 4):
        for m in (5, 6):
            x = torch.arange(float(n * m)).reshape(n, m)
            results, wanted = call(x), fn(x)
            torch.testing.assert_close(results, wanted)
            assert [each.is_contiguous() for each in results] == [each.is_contiguous() for each in wanted]
    assert call.counters == {"compiled": 1, "padded": 5, "missed": 0}


def test_a_result_that_ends_before_the_bucket():
    """It is as long as without padding: what is cut is at most what is there."""
    call = sealed(lambda x: x[:4] * 1, torch.ones(8), dims={"x": {0: "n"}}, buckets={"n": [4, 8]})
    assert [len(call(torch.ones(n))) for n in (2, 4, 6, 8)] == [2, 4, 4, 4]
