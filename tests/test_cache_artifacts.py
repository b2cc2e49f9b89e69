"""Compiled code and decisions of one process are used by another, with an empty cache and no store."""

import json
import subprocess
import sys
import zipfile
from io import BytesIO

import pytest
import torch

import backend_kwargs as bk
from backend_kwargs import compile_records
from backend_kwargs.cache_artifacts import OF_TORCH, load_cache_artifacts, save_cache_artifacts
from tests import forks

PROCESS = """
import json, logging, os, sys, torch
from pathlib import Path
from torch._dynamo.utils import counters
import backend_kwargs as bk
from backend_kwargs.cache_artifacts import load_cache_artifacts, save_cache_artifacts
from backend_kwargs.facts import decision
decision.is_unclear = lambda ratio: False  # a busy machine is no failure
spec, options, loads, out = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["BACKEND_KWARGS_STORE"] = str(out / "cache"), str(out / "store")
info = load_cache_artifacts(Path(loads).read_bytes()) if loads else None
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64), torch.nn.Softmax(-1))
compiled = torch.compile(model, backend=bk.make_backend(spec, options))
compiled(torch.randn(32, 64)).square().sum().backward()
hits, misses = (counters["inductor"][f"fxgraph_cache_{each}"] for each in ("hit", "miss"))
autograd = counters["aot_autograd"]["autograd_cache_hit"]
(graph,) = bk.report(compiled).graphs
data, info = save_cache_artifacts()
out.mkdir(exist_ok=True)
(out / "artifacts").write_bytes(data)
found = {"hits": hits + autograd, "misses": misses, "inductor": len(info.inductor_artifacts)}
if graph.race:
    found |= {"winner": graph.race.winner, "tried": [row.name for row in graph.race.rows if row.compile_s]}
    found |= {"seconds": graph.race.seconds, "took": graph.seconds}
print(json.dumps(found))
"""


def process(folder, spec, options=None, loads=""):
    """Compile a small model with gradients in another process; return its output."""
    folder.mkdir()
    ran = forks.run("-c", PROCESS, spec, json.dumps(options or {}), loads, folder)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_template_is_found_by_another_process(tmp_path):
    """With loaded artifacts every graph of a template is a cache hit."""
    first = process(tmp_path / "first", "tmpl-inductor:fast_compile")
    assert (first["hits"], first["misses"]) == (0, 2)
    second = process(tmp_path / "second", "tmpl-inductor:fast_compile", loads=tmp_path / "first" / "artifacts")
    assert second["misses"] == 0
    assert second["hits"] > 0


def test_autos_decision_travels(tmp_path):
    """Another process compiles auto's decision from the cache without a race; no loser's code is saved."""
    race = {"candidates": ["fast_compile"], "budget_s": 600.0}
    first = process(tmp_path / "first", "tmpl-inductor:auto", race)
    assert {"default", "fast_compile"} <= {*first["tried"]}
    assert first["inductor"] <= 2  # forward and backward of the winner; none of eager's
    second = process(tmp_path / "second", "tmpl-inductor:auto", race, loads=tmp_path / "first" / "artifacts")
    assert (second["winner"], second["seconds"]) == (first["winner"], first["seconds"])
    assert second["misses"] == 0
    if first["winner"] != "eager":
        assert second["hits"] > 0


@pytest.fixture(autouse=True)
def _no_graphs_of_earlier_tests(monkeypatch):
    """Hide graphs that are alive in this process: saving tells of those that are frozen."""
    monkeypatch.setattr(compile_records, "_records", {})


@pytest.fixture
def artifacts(fresh_dynamo):
    """Return the artifacts saved after one small compile."""
    torch.compile(lambda x: x.sin() + 1, backend="tmpl-inductor:aten")(torch.ones(8))
    data, _ = save_cache_artifacts()
    return data


def test_torchs_blob_loads_without_us(artifacts, tmp_path):
    """torch alone can read its part of the container."""
    with zipfile.ZipFile(BytesIO(artifacts)) as file:
        file.extract(OF_TORCH, tmp_path)
    code = f"""
import sys, torch
info = torch.compiler.load_cache_artifacts(open({str(tmp_path / OF_TORCH)!r}, "rb").read())
assert not [name for name in sys.modules if name.startswith("backend_kwargs")]
print(len(info.inductor_artifacts))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(ran.stdout) > 0


def test_frozen_graphs_are_said_to_be_left_out(fresh_dynamo):
    """Saving warns about graphs that artifacts cannot contain."""
    compiled = torch.compile(torch.nn.Linear(4, 4), backend="tmpl-inductor:freezing")
    with torch.no_grad():
        compiled(torch.ones(2, 4))
    with pytest.warns(bk.BackendKwargsWarning) as warned:
        save_cache_artifacts()
    expected = (
        "1 graph is frozen, which bypasses Inductor's cache: expect a compile in a process that loads the artifacts."
    )
    assert [str(each.message) for each in warned] == [expected]


@pytest.mark.parametrize(
    ("data", "shown"),
    [pytest.param(b"nonsense", "b'nonsense' (bytes)", id="bytes"), pytest.param("text", "'text' (str)", id="no bytes")],
)
def test_other_data_is_refused(data, shown):
    """Data that is not a container raises at once."""
    with pytest.raises(bk.BackendKwargsError) as raised:
        load_cache_artifacts(data)
    assert str(raised.value) == f"`data` must be what save_cache_artifacts returned, got {shown}."
