"""DDP with several buckets, FSDP2 and tensor parallelism over two gloo processes, as in docs/frameworks.md."""

import json
from functools import cache
from pathlib import Path

import pytest

from tests import forks
from tests.frameworks.page import SECTIONS

HERE = Path(__file__).parent


@cache
def cases():
    """Run every case in one process group; return the reports."""
    ran = forks.run(HERE / "two_ranks.py", "--device", "cpu", "--budget_s", "1")
    output = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert output, ran.stderr
    return {each["case"]: each for each in output}


@pytest.mark.parametrize("which", ["template", "auto"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "tp"])
def test_trains_as_in_eager(kind, which):
    """Losses, gradients and a checkpoint loaded uncompiled equal those of training in eager."""
    found = cases()[f"{kind}:{which}"]
    assert found["graphs"] > 0
    assert max(found["loss"], found["gradients"], found["checkpoint"]) < 1e-4


def test_auto_decides_each_bucket():
    """Under DDP there are several graphs, and each one is raced unless it is too small."""
    decided = cases()["ddp:auto"]["decided"]
    assert len([each for each in decided if "not raced" not in each]) > 1
    assert {each.partition("not raced: ")[2] for each in decided} <= {"", "it is tiny"}


def test_auto_leaves_collectives_alone():
    """A graph with the collectives of tensor parallelism uses default, with the reason."""
    (reason,) = {each.partition("not raced: ")[2] for each in cases()["tp:auto"]["decided"]}
    assert f"`{reason}`" in SECTIONS["DDP, FSDP2, tensor parallel"]
