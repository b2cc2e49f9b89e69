"""Ranks with a GPU each share a race by default, and end with one decision."""

import json

import pytest
import torch

from tests import forks

RANK = "tests/auto/shared_race_of_a_rank.py"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it needs two GPUs")
def test_two_gpus_share_a_race(tmp_path):
    """Rank 1 times what it took on its own GPU; the winner is raced by the rank that decides."""
    ranks = [forks.Fork(RANK, "GPUs", rank, 2, tmp_path / "init") for rank in range(2)]
    ended = [each.wait() for each in ranks]
    assert [each.returncode for each in ended] == [0, 0], [each.stderr for each in ended]
    first, second = [json.loads(each.stdout) for each in ended]
    assert first == second
    by = {name: rank for name, _, rank, _ in first["rows"]}
    assert 1 in by.values()
    assert by[first["winner"]] is by["default"] is None
