"""Plans of small models, and the command that tunes them in a process of its own."""

import os
import subprocess
from pathlib import Path

import pytest

from tests import forks
from tests.fleet.clusters import cluster

MODELS = """
import os, signal, subprocess, time
import torch
from backend_kwargs.facts import decision

decision.is_unclear = lambda ratio: False  # a busy machine is no failure

def small(batch=2):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)), torch.ones(batch, 64)

def broken():
    raise ValueError("no weights here")

def long():
    with open("begun", "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(600)

def hangs():
    # One process of the session, one of its own.
    children = [subprocess.Popen(["sleep", "600"], start_new_session=own) for own in (False, True)]
    with open(BEGUN, "a") as file:
        file.write("".join(f"{pid}\\n" for pid in [os.getpid(), *(child.pid for child in children)]))
    while True:
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            pass

def dies_once():
    if not os.path.exists(DIED):
        open(DIED, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return small()
"""
HEAD = 'devices = ["cpu"]\nthreads = [1]\nbudget_s = 600\ncandidates = ["no_size_asserts"]\n'


class Planned:
    """A folder with factories and a plan, and the processes that tune it."""

    def __init__(self, folder):
        self.folder, self.store = folder, folder / "kept"
        models = MODELS.replace("DIED", repr(str(folder / "died"))).replace("BEGUN", repr(str(folder / "begun")))
        (folder / "models.py").write_text(models, encoding="utf-8")

    def plan(self, *names, head=HEAD):
        """Write the plan of some of the models."""
        tables = "".join(f'[[models]]\nmodel = "models.py:{name}"\n' for name in names)
        (self.folder / "plan.toml").write_text(head + tables, encoding="utf-8")
        return self

    def command(self, *arguments):
        """Return the command of Python that tunes it."""
        return ["-m", "backend_kwargs", "tune-plan", "plan.toml", "--store", str(self.store), *arguments]

    @property
    def environment(self):
        root = str(Path(__file__).parents[2])
        return os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}

    def run(self, *arguments):
        """Tune it, and return the process that ended."""
        return forks.run(*self.command(*arguments), cwd=self.folder, env=self.environment)

    def start(self, *arguments):
        """Begin to tune it."""
        return forks.Fork(
            *self.command(*arguments), cwd=self.folder, env=self.environment, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip


@pytest.fixture(scope="package")
def ray_cluster(tmp_path_factory):
    """Give a cluster of two workers."""
    with cluster(tmp_path_factory.mktemp("r"), 2) as started:
        yield started


def tuned_on(folder, pool):
    """Tune a plan with units of each kind, two of which fail; return it and the process that ended."""
    planned = Planned(folder).plan(
        "small", "dies_once", "broken", head=f'{HEAD}[[models]]\nmodel = "models.py:hangs"\nlimit_s = 30\n'
    )
    return planned, planned.run("--on", pool, "-o", "out.json")


@pytest.fixture
def planned(tmp_path):
    """Give a folder for a plan."""
    return Planned(tmp_path)
