"""A plan on this machine's GPUs: a process for each, which sees no other one."""

import os

import pytest
import torch

from backend_kwargs.fleet.scheduling import devices_here
from tests.fleet.conftest import Planned

HEAD = 'devices = ["cuda"]\nbudget_s = 20\n'
SEES = """
def sees(batch=1):
    with open(FILE, "a") as file:
        file.write(f"{torch.cuda.device_count()} {os.environ['CUDA_VISIBLE_DEVICES']}\\n")
    return small(batch)
"""


@pytest.fixture
def planned(tmp_path):
    """Give a folder for a plan."""
    return Planned(tmp_path)


def test_each_gpu_has_a_worker():
    """Each visible GPU is a device with its name, and with cores that no other one has."""
    gpus = [device for device in devices_here(None) if device.gpu]
    assert [device.name for device in gpus] == [
        torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())
    ]
    cores = [core for device in gpus for core in device.cores]
    assert len(cores) == len(set(cores)) or len(gpus) > len(os.sched_getaffinity(0))


def test_a_plan_on_the_gpus(planned):
    """Each unit runs in a process that sees one GPU, whose name the table shows; another GPU's units are not run."""
    models, seen = planned.folder / "models.py", planned.folder / "seen"
    models.write_text(models.read_text() + SEES.replace("FILE", repr(str(seen))), encoding="utf-8")
    head = HEAD + '[[models]]\nmodel = "models.py:sees"\nshapes = { batch = [1, 2, 4, 8] }\n'
    ran = planned.plan(head=head).run()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count(torch.cuda.get_device_name()) == 4
    lines = [line.split() for line in seen.read_text().splitlines()]
    assert {count for count, _ in lines} == {"1"}
    assert len({gpu for _, gpu in lines}) == min(torch.cuda.device_count(), 4)
    other = planned.plan("small", head=HEAD.replace("cuda", "Z9000")).run()
    assert other.returncode == 1
    assert "not run here: 1 unit, since this machine has no Z9000" in other.stdout
