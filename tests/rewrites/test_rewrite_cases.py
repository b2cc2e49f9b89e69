"""The study of rewrites: its cases hold what their rewrites replace, and each race is recorded."""

import json
import subprocess
from importlib.util import find_spec

import pytest
import torch

import backend_kwargs
from backend_kwargs.rewrites.table import find_rewrite
from benchmarks.studies.rewrite_cases import CASES
from benchmarks.studies.rewrites import names_of, place_of, race_one, race_shard, report
from tests.rewrites.lowering import Changed, Rewriting

LIBRARIES = {"ResNet-50": "timm", "RegNetY": "timm", "Swin": "timm", "GPT-2": "transformers"}


@pytest.mark.parametrize("name", CASES)
def test_a_case_has_its_pattern(name, fresh_dynamo):
    """What a case is there for matches in it."""
    for model, library in LIBRARIES.items():
        if name.startswith(model) and find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    case = CASES[name]
    torch.manual_seed(0)
    fn, args = case.make(place_of("cpu"))
    with torch.set_grad_enabled(case.mode == "training"):
        if case.rewrite == "packed":  # makes other inputs of the graph too
            compiled = torch.compile(fn, backend=backend_kwargs.make_backend("tmpl-inductor", rewrites=case.named))
            compiled(*args)
            assert backend_kwargs.report(compiled).graphs[0].rewritten == {"packed": 2}
            return
        rewriting = (Changed if find_rewrite(case.rewrite).traced else Rewriting)(fn, case.rewrite)
        rewriting(*args)
    assert rewriting.counts[case.rewrite] > 0


def test_a_race_is_recorded(tmp_path, fresh_dynamo):
    """A record of a case has rows for default and both races; the report is a table with the gain and its mean."""
    name = "linear 16384 x (768 -> 3072) + tanh-GELU"
    file = tmp_path / "linear.json"
    race_one(name, file, 2, 5.0, (), place_of("cpu"))
    record = json.loads(file.read_text())
    assert [row["label"] for row in record["auto"]["candidates"]] == ["default", "auto without", "auto with"]
    assert any("linear_activation matches 1 times" in line for line in record["matches"])
    text = report(tmp_path)
    assert f"| {name} | " in text
    assert "Geometric mean of `auto` with over `auto` without: " in text


MODEL = """
import torch

def build():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU()), torch.randn(4, 8)
"""


def test_a_users_model_is_raced(tmp_path, fresh_dynamo):
    """A model that is no case is built as `run` and `compare` build it, in its own size."""
    (tmp_path / "mine.py").write_text(MODEL)
    spec, file = f"{tmp_path}/mine.py:build", tmp_path / "mine.json"
    race_one(spec, file, 2, 5.0, (), place_of("cpu"))
    record = json.loads(file.read_text())
    assert (record["case"], record["bar"]) == (spec, None)
    assert [row["status"] for row in record["auto"]["candidates"]] == ["pass"] * 3


def test_names_of_cases():
    """Cases are chosen by a part of their names."""
    assert names_of("GPT-2") == ["GPT-2, 8 x 1024 tokens"]
    assert set(names_of("")) == set(CASES)


def test_a_case_that_fails_leaves_the_others(tmp_path, monkeypatch):
    """A case that is stopped, or not begun, is one line; what has a file is done."""
    begun = []

    def run(command, timeout, check):
        begun.append(command[command.index("--one") + 1])
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr("benchmarks.studies.rewrites.subprocess.run", run)
    (tmp_path / "GPT_2_8_x_1024_tokens.json").write_text("{}")
    names = names_of("")
    shards = [race_shard(tmp_path, names, (number, 3), (60.0, 1.0), []) for number in (1, 2, 3)]
    assert shards == [0, 0, 0]
    assert sorted(begun) == sorted(name for name in CASES if not name.startswith("GPT-2"))
    assert race_shard(tmp_path, names, (1, 1), (-1.0, 1.0), []) == len(CASES) - 1
