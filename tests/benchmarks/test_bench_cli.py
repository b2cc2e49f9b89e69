"""The command line of the suite."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.cli import main
from benchmarks.execution import records
from tests import forks
from tests.benchmarks.test_bench_records import ENVIRONMENT, FAILED, PASSED

ROOT = Path(__file__).parents[2]


def bench(*args):
    return forks.run("-m", "benchmarks", *args, cwd=ROOT)


def test_list():
    """`list` prints the table of cases and of peers."""
    output = bench("list", "--case", "softmax*").stdout
    assert "softmax" in output
    assert "tmpl-inductor:max_autotune" in output


def test_env():
    """`env` prints the environment of a run as JSON."""
    assert json.loads(bench("env", "--device", "cpu").stdout)["device"] == "cpu"


@pytest.mark.parametrize("case", ["softmax", "cross_entropy"], ids=["forward", "backward too"])
def test_kernels(case):
    """`kernels` prints the first call's seconds and a row for each kernel of a later one."""
    header, columns, *rows = bench(
        "kernels", case, "--device", "cpu", "--backend", "tmpl-inductor", "--option", "cpp.threads=1"
    ).stdout.splitlines()
    assert header.startswith("first call ")
    assert columns.split() == ["µs", "share", "launches", "kernel"]
    assert any(row.endswith("generated code") for row in rows)


def test_kernels_of_an_unknown_case(monkeypatch, capsys):
    """A wrong name is an error that says where the names are."""
    monkeypatch.setattr(sys, "argv", ["benchmarks", "kernels", "zzz", "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: No case is called 'zzz': `python -m benchmarks list` shows all.\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--case", "x"), "No case is called 'x': `python -m benchmarks list` shows all."),
        (("--one-cache", "--apart"), "--one-cache excludes --apart: a fresh compile finds nothing of its peers'."),
        (
            ("--one-cache", "--compiles", "2"),
            "--one-cache excludes --compiles 2: what is compiled once is there for all.",
        ),
        (
            ("--suite", "dev", "--jobs", "2"),
            "--jobs, --tuners, --ahead and --fewer-compiles need --apart: with --beside, peers compile in turn.",
        ),
        (("--peers", "x"), "No peer is called 'x': `python -m benchmarks list` shows all."),
        (("--shard", "0/2"), "--shard must be I/N, from 1/N to N/N, got '0/2' (str)."),
        (("--budget", "9m"), "--budget must be seconds, such as '540s', got '9m' (str)."),
        (("--budget", "nan"), "--budget must be seconds, such as '540s', got 'nan' (str)."),
        (("--timer", "events"), "--timer events requires a GPU: on a CPU the wall's clock is the only one."),
        (("--model", "timm:x", "--case", "softmax"), "--model replaces the cases: leave --case out."),
        (("--dtype", "int8"), "--dtype must be 'bf16' or 'fp16' or 'fp32', got 'int8' (str)."),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_mistakes(tmp_path, monkeypatch, capsys, args, message):
    """A user's mistake prints one line and exits with 2."""
    command = ["benchmarks", "run", "--device", "cpu", "--out", str(tmp_path / "r.jsonl"), *args]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().err) == (2, f"error: {message}\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        pytest.param(("env", "--device", "nosuch"), "--device must be 'cpu'", id="device"),
        pytest.param(("report", "{here}", "--hud", "{here}/no/h.json"), "Cannot write ", id="folder"),
    ],
)
def test_no_traceback(tmp_path, monkeypatch, capsys, args, message):
    """A missing file is reported in one line."""
    file = tmp_path / "r.jsonl"
    file.write_text("")
    monkeypatch.setattr(sys, "argv", ["benchmarks", *(arg.format(here=file) for arg in args)])
    with pytest.raises(SystemExit) as ended:
        main()
    output = capsys.readouterr().err
    assert (ended.value.code, output.startswith(f"error: {message}"), output.count("\n")) == (2, True, 1)


def test_an_empty_shard_is_done(tmp_path):
    """If there are fewer groups than shards, the last shards have nothing to do, and say so."""
    ended = bench("run", "--case", "softmax", "--shard", "2/2", "--device", "cpu", "--out", tmp_path / "r.jsonl")
    assert (ended.returncode, ended.stdout) == (0, "Shard 2/2 is empty: there are fewer groups.\n")


BREAKS = """
import torch
class Net(torch.nn.Module):
    def forward(self, x):
        x = x.sin()
        torch._dynamo.graph_break()
        return x + 1
def build():
    return Net(), (torch.randn(4),)
"""


@pytest.mark.parametrize(("strict", "code"), [(["--strict"], 1), ([], 0)], ids=["strict", "not strict"])
def test_a_peer_that_fails(tmp_path, strict, code):
    """A cell that fails is a row of the table; with --strict it fails the run."""
    (tmp_path / "net.py").write_text(BREAKS)
    run = ("run", "--model", f"{tmp_path / 'net.py'}:build", "--device", "cpu", "--rounds", "2", "--no-ceilings")
    ended = bench(*run, "--peers", "default", "--beside", *strict, "--out", tmp_path / "r.jsonl")
    assert (ended.returncode, "fail_to_run" in ended.stdout) == (code, True)


def test_report_as_hud(tmp_path):
    """`report --hud` writes records for PyTorch's HUD."""
    lines = [ENVIRONMENT, records.line_of(PASSED), records.line_of(FAILED), records.group_line("k", ["g"])]
    records.append(tmp_path / "r.jsonl", lines)
    assert bench("report", tmp_path / "r.jsonl", "--hud", tmp_path / "hud.json").returncode == 0
    assert {record["model"]["name"] for record in json.loads((tmp_path / "hud.json").read_text())} == {"softmax"}


def test_budget_ends_with_three(tmp_path):
    """A run that its budget ended exits with 3."""
    done = bench("run", "--device", "cpu", "--suite", "smoke", "--budget", "0s", "--out", tmp_path / "r.jsonl")
    assert done.returncode == 3
    assert done.stdout.strip().endswith("groups done: continue with --resume.")
