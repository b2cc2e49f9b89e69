"""Cases of the table are passed to the processes that run them."""

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.workloads.cases import CASES

ROOT = Path(__file__).parents[2]


def test_a_fresh_process_reads_a_case_of_the_table():
    """A fresh process unpickles a case by its name, even if its `build` is a lambda."""
    code = "import pickle, sys; case = pickle.load(sys.stdin.buffer); print(type(case).__module__, case.name)"
    run = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(CASES["softmax"]), cwd=ROOT, capture_output=True, check=True
    )
    assert run.stdout.decode().split() == ["benchmarks.workloads.case", "softmax"]


def test_a_case_of_the_table_stays_the_same_object():
    """In the same process, unpickling returns the table's own case."""
    assert pickle.loads(pickle.dumps(CASES["softmax"])) is CASES["softmax"]


def test_a_changed_case_travels_by_its_fields():
    """A changed copy of a table's case with the same name keeps its changes."""
    changed = replace(CASES["roberta"], version=7)
    sent = pickle.loads(pickle.dumps(changed))
    assert (sent.name, sent.version, sent.modes) == ("roberta", 7, changed.modes)
