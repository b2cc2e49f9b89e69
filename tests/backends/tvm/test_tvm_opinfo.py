"""A sample of torch's OpInfo samples; `python tests/backends/tvm/opinfo.py` runs all of them."""

import re

import pytest

pytest.importorskip("tvm")
pytest.importorskip("expecttest", reason="torch's own test tables need it")

from tests.backends.tvm.opinfo import EAGER, LIST, RAN, WORSE, examine, heading

SLICE = {
    "float32": [
        "add",
        "clamp",
        "cat",
        "floor_divide",
        "remainder",
        "nn.functional.gelu",
        "nn.functional.layer_norm",
        "softmax",
        "var",
    ],
    "float64": ["mul", "nn.functional.interpolate.nearest"],
    "int64": ["mul", "sum", "roll"],
    "int32": ["maximum", "cat"],
    "uint8": ["add", "nn.functional.interpolate.bicubic"],
    "bool": ["all", "where"],
    "bfloat16": ["mm", "mean"],
}


@pytest.mark.parametrize(("dtype", "op"), [(dtype, op) for dtype, ops in SLICE.items() for op in ops])
def test_no_operator_is_worse_than_eager(dtype, op):
    """No operator is worse than eager, and TVM ran it: samples in eager would pass too."""
    verdict = examine(op, dtype, samples=2)
    assert verdict.worse == []
    assert verdict.counts[RAN]


@pytest.mark.parametrize("op", ["nn.functional.linear", "tanh"])
def test_gradients_are_eagers(op):
    verdict = examine(op, "float32", samples=1, gradients=True)
    assert (verdict.worse, verdict.counts[RAN]) == ([], 1)


def test_what_tvm_has_not_runs_in_eager():
    verdict = examine("sort", "float32", samples=1)
    assert (verdict.counts[EAGER], verdict.fallbacks) == (
        1,
        {"sort": "TVM's sort orders equal elements and nan differently"},
    )


def test_the_list_says_of_which_releases_it_is(monkeypatch):
    monkeypatch.setattr("sys.argv", ["tests/backends/tvm/opinfo.py", "--out", "opinfo.md"])
    assert re.fullmatch(
        r"What TVM ran of .*, written by `python tests/backends/tvm/opinfo.py --out opinfo.md`: "
        r"torch 2\.\S+, apache-tvm 0\.27\S+, apache-tvm-ffi 0\.1\.14\S+, Python 3\.\S+\.",
        heading(),
    )


def test_the_list_has_nothing_worse_than_eager():
    """The list of the last full run has no operator worse than eager."""
    assert WORSE not in re.search(r"^Samples: (.*)$", LIST.read_text(), re.MULTILINE)[1]
