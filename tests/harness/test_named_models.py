"""Models by name in `compare` and `tune`: timm:NAME and transformers:CLASS?option=value."""

import re
import tomllib
from importlib.util import find_spec

import pytest
from typer.testing import CliRunner

from backend_kwargs.cli import app

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
BERT = (
    "transformers:BertModel?num_hidden_layers=1&hidden_size=32&num_attention_heads=2&intermediate_size=64&vocab_size=99"
)
VIT = "timm:vit_tiny_patch16_224?img_size=32&depth=1&num_classes=7"
NAMES = [
    pytest.param(f"{BERT}&tokens=8", marks=pytest.mark.skipif(not find_spec("transformers"), reason="no transformers")),
    pytest.param(VIT, marks=pytest.mark.skipif(not find_spec("timm"), reason="no timm")),
]


def run(*arguments):
    ran = CliRunner().invoke(app, [*map(str, arguments)])
    assert ran.exit_code == 0, f"{ran.output}\n{ran.exception!r}"
    return ran.output


@pytest.mark.parametrize("name", NAMES, ids=["transformers", "timm"])
def test_compare_takes_a_name(name):
    """The model is made with random weights, and each backend's results are checked."""
    said = run("compare", name, "--backends", "eager,tmpl-inductor", "--rounds", "2")
    (row,) = [line.split() for line in said.splitlines() if line.strip().startswith("tmpl-inductor")]
    assert "pass" in row


@pytest.mark.parametrize("name", NAMES, ids=["transformers", "timm"])
def test_tune_takes_a_name_and_sizes(name, tmp_path):
    """A decision for each size, and the call's speedup over eager with its interval."""
    file = tmp_path / "decisions.toml"
    said = run(
        "tune", name, "--shapes", "batch=1,2", "--option", "budget_s=60", "--option", "candidates=default", "-o", file
    )
    assert len(tomllib.loads(file.read_text())["decisions"]) == 2
    for size in ("batch=1", "batch=2"):
        (row,) = [line for line in said.splitlines() if line.strip().startswith(size)]
        assert re.search(r"\d+\.\d\dx \[\d+\.\d\d, \d+\.\d\d\]", row)


@pytest.mark.parametrize("command", ["compare", "tune"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param(
            "transformers:BertModl",
            "Unknown model of transformers 'BertModl'. Did you mean 'BertModel'?",
            marks=NAMES[0].marks,
            id="class",
        ),
        pytest.param(
            "timm:vit_tiny_patch16_225",
            "Unknown model of timm 'vit_tiny_patch16_225'. Did you mean 'vit_tiny_patch16_224'?",
            marks=NAMES[1].marks,
            id="name",
        ),
    ],
)
def test_an_unknown_name_is_one_line(command, name, message, tmp_path):
    """With the closest name that there is."""
    output = ["-o", str(tmp_path / "decisions.toml")] if command == "tune" else []
    ran = CliRunner().invoke(app, [command, name, *output])
    assert ran.exit_code == 1
    assert message in str(ran.exception)
