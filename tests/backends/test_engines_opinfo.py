"""A small sample of torch's operators on each engine; the lists in this folder have all of them."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("expecttest", reason="torch's own test tables need it")

from tests.backends.tvm import opinfo

PACKAGES = {"onnxruntime": "onnxruntime", "openvino-native": "openvino"}
SLICE = {
    "float32": ["add", "div.floor_rounding", "nn.functional.conv2d", "nn.functional.gelu", "softmax", "sum", "where"],
    "int64": ["add", "floor_divide", "sum"],
}


@pytest.mark.parametrize("engine", PACKAGES)
@pytest.mark.parametrize(("dtype", "op"), [(dtype, op) for dtype, ops in SLICE.items() for op in ops])
def test_no_operator_is_worse_than_eager(engine, dtype, op, monkeypatch):
    """Every operator gives eager's results, on the engine or in eager."""
    if not find_spec(PACKAGES[engine]):
        pytest.skip(f"no {PACKAGES[engine]}")
    monkeypatch.setattr(opinfo, "backend_name", [engine])
    assert opinfo.examine(op, dtype, samples=1).worse == []


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_the_list_has_nothing_worse_than_eager(engine):
    """Each of torch's operators with samples of float32 is on it."""
    listed = Path(__file__).with_name(f"opinfo_{engine}.md").read_text()
    assert opinfo.WORSE not in re.search(r"^Samples: (.*)$", listed, re.MULTILINE)[1]
    assert listed.count("| float32 |") == 677
