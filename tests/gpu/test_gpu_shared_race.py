"""Ranks with a GPU each share a race by default, and end with one decision."""

import json
import subprocess
import sys

import pytest
import torch

RANK = "tests/auto/shared_race_of_a_rank.py"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it needs two GPUs")
def test_two_gpus_share_a_race(tmp_path):
    """Rank 1 times what it took on its own GPU; the winner is raced by the rank that decides."""
    # No forks: CUDA may have been asked for its devices in the process that they are of.
    commands = [[sys.executable, RANK, "GPUs", str(rank), "2", str(tmp_path / "init")] for rank in range(2)]
    ranks = [subprocess.Popen(each, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for each in commands]
    said = [each.communicate() for each in ranks]
    assert [each.returncode for each in ranks] == [0, 0], "\n".join(error for _, error in said)
    first, second = [json.loads(out.splitlines()[-1]) for out, _ in said]
    assert first == second
    by = {name: rank for name, _, rank, _ in first["rows"]}
    assert 1 in by.values()
    assert by[first["winner"]] is by["default"] is None
