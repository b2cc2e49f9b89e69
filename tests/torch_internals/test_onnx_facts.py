"""Facts about the exporter to ONNX."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("onnxscript")

from backend_kwargs.backends.onnxruntime.session import exported
from backend_kwargs.torch_internals.onnx import translated, translated_operators


def part():
    """Return a graph of operators that the exporter has, with types to promote and a constant."""

    def fn(x, i):
        return torch.nn.functional.gelu(x) + i, torch.where(i > 1.5, x, 0), x.sum(0).reshape(2, -1) @ torch.ones(2, 3)

    return make_fx(fn, tracing_mode="fake")(torch.ones(3, 4), torch.ones(3, 4, dtype=torch.int64))


@pytest.mark.filterwarnings("ignore")
def test_translates_as_the_exporter_does():
    """`torch.onnx.export` has the same operators in the same order and of the same version."""
    theirs = torch.onnx.export(exported(part()), dynamo=True, verbose=False, optimize=False).model
    ours = translated(exported(part()), translated_operators())
    found = [([node.op_type for node in model.graph], model.opset_imports) for model in (ours, theirs)]
    assert found[0] == found[1]
    assert "Gelu" in found[0][0]
