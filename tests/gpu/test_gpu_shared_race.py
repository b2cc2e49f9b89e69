"""Ranks with a GPU each share a race by default, and end with one decision."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
RANK = ROOT / "tests" / "auto" / "shared_race_of_a_rank.py"
LIMIT_S = 240.0  # where a rank fails, the other one waits for it


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it needs two GPUs")
def test_two_gpus_share_a_race(tmp_path):
    """Rank 1 times what it took on its own GPU; the winner is raced by the rank that decides."""
    # No forks: CUDA may have been asked for its devices in the process that they are of.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    outputs = [(tmp_path / f"{rank}.out", tmp_path / f"{rank}.err") for rank in range(2)]
    ranks = []
    for rank, (out, err) in enumerate(outputs):
        command = [sys.executable, RANK, "GPUs", str(rank), "2", tmp_path / "init"]
        with out.open("w") as stdout, err.open("w") as stderr:
            ranks.append(
                subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=stdout, stderr=stderr)
            )
    try:
        for each in ranks:
            each.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    said = [(out.read_text(), err.read_text()) for out, err in outputs]
    assert [each.returncode for each in ranks] == [0, 0], "\n".join(error for _, error in said)
    first, second = [json.loads(out.splitlines()[-1]) for out, _ in said]
    assert first == second
    by = {name: rank for name, _, rank, _ in first["rows"]}
    assert 1 in by.values()
    assert by[first["winner"]] is by["default"] is None
