"""The study of training steps of public nets: its nets, its arguments and its page."""

import json

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.studies import training_nets as study

LEAF = {"name": "gradient[0]", "size": 2.0, "eager": 0.25, "default": 1.0}
GRAPH = {"status": "fail_accuracy", "reason": "gradient[0]: RMSE", "count": 3, "leaves": [LEAF]}
PASSED = {"net": "timm:dla34", "precision": "float32", "variant": "", "device": "cpu", "status": "pass", "reason": ""}
RECORDS = [
    {**PASSED, "graphs": [{**GRAPH, "status": "pass", "leaves": []}, {**GRAPH, "status": "pass", "leaves": []}]},
    {**PASSED, "precision": "bfloat16 autocast", "status": "timeout", "reason": "longer than 9 s", "graphs": []},
    {**PASSED, "net": "timm:a", "status": "fail_accuracy", "reason": "gradient[0]: RMSE", "graphs": [GRAPH]},
]


def test_there_are_forty_nets_or_more():
    """Of each of the three libraries."""
    assert len(study.names()) >= 40
    assert {name.split(":")[0] for name in study.names()} == {"torchvision", "timm", "transformers"}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        pytest.param(["--nets", "timm:dla33"], "Unknown net 'timm:dla33'. Did you mean 'timm:dla34'?", id="net"),
        pytest.param(["--precisions", "float33"], "Unknown precision 'float33'. Did you mean", id="precision"),
        pytest.param(["--variants", "tf32"], "Unknown variant 'tf32'. Did you mean 'no tf32'?", id="variant"),
    ],
)
def test_unknown_names(tmp_path, option, message):
    """They are refused before anything runs."""
    result = CliRunner().invoke(app, ["training-nets", "--out", str(tmp_path), "--device", "cpu", *option])
    assert result.exit_code
    assert message in f"{result.output} {result.exception}"


def test_the_page_of_records(tmp_path):
    """A row for each net, a column for each precision, and the errors of each tensor of what was refused."""
    (tmp_path / "training_nets.jsonl").write_text("".join(json.dumps(each) + "\n" for each in RECORDS))
    result = CliRunner().invoke(app, ["training-nets", "--out", str(tmp_path), "--page"])
    assert result.exit_code == 0
    page = (tmp_path / "training_nets.md").read_text()
    assert page.startswith("1 of 3 passed. In parentheses: the tensors compared.\n")
    assert "| net | float32 | bfloat16 autocast |\n|---|---:|---:|\n" in page
    assert "| timm:a, cpu | fail_accuracy |  |\n| timm:dla34, cpu | pass (6) | timeout |\n" in page
    assert "**timm:a, float32 cpu**: gradient[0]: RMSE\n" in page
    assert "| leaf | size in float64 | eager's error | default's error |" in page
    assert "| gradient[0] | 2 | 0.25 | 1 |" in page


@pytest.mark.parametrize("net", ["transformers:ResNetForImageClassification", "transformers:BertForMaskedLM"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_net_returns_its_loss(net, precision):
    """It trains, and has a gradient."""
    model, inputs = study.built(study.Case(net, precision, "", "cpu"))
    loss = model(*inputs)
    assert model.training
    assert (loss.ndim, loss.requires_grad) == (0, True)


def test_a_net_is_checked(monkeypatch):
    """Its graph is compiled, run, and compared leaf by leaf."""
    monkeypatch.setattr(study, "built", lambda case: (torch.nn.Linear(4, 1), (torch.randn(2, 4),)))
    record = study.check_net(lambda text: None, study.Case("tiny", "float32", "", "cpu"), leaves=True)
    assert (record["status"], record["reason"]) == ("pass", "")
    (graph,) = record["graphs"]
    assert graph["reference"]
    assert [leaf["name"] for leaf in graph["leaves"]] == ["output[0]", "gradient[0]", "gradient[1]"]
