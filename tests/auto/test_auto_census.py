"""After a race, a process is as if it had compiled only the winner, whatever happened in the race."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import census
import pytest

EVERY = "BACKEND_KWARGS_EVERY_LINE"  # set, each line of ours is interrupted: some 25 minutes on two cores
SAMPLE_S = 5.0
# What may differ, with the reason.
ALLOWED = {
    "environment: BACKEND_KWARGS_STORE": "each process decides for itself",
    "environment: TORCHINDUCTOR_CACHE_DIR": "each process has a cache of its own, so that each of them compiles",
    "environment: _TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR": "an address, which Inductor tells its compile processes",
    "generation": "a call that ends early begins one or none",
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Return a function that starts census.py in a new process."""

    def start(*arguments):
        tmp_path = tmp_path_factory.mktemp("census")
        settings = {
            # One process for each: Inductor raises the recursion limit permanently when it compiles.
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
            "BACKEND_KWARGS_STORE": str(tmp_path / "decisions.sqlite"),
            "PYTHONHASHSEED": "0",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [sys.executable, Path(census.__file__), *map(str, arguments)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ | settings)

    return start


def error_text(process):
    return [json.loads(line) for line in process.communicate()[0].splitlines()]


def unexplained(left):
    return {name: values for name, values in left.items() if name not in ALLOWED}


@pytest.fixture(scope="module")
def censuses(begun):
    """Return the census of a process that compiled only default, and of one process per race; two run at a time."""
    names = ["alone", "race", *census.PLANTED]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(names, pool.map(lambda name: error_text(begun(name))[0], names), strict=True))


@pytest.mark.parametrize("name", ["race", *census.PLANTED])
def test_a_race_leaves_what_the_winner_alone_leaves(censuses, name):
    """A race leaves the same state as its winner alone, even if a candidate fails to compile, check or run."""
    assert unexplained(census.differences(censuses["alone"], censuses[name])) == {}


def test_an_interrupted_race_leaves_nothing(begun):
    """After a Ctrl-C at any line of this package, the process is as before, and nothing hangs."""
    every = os.environ.get(EVERY)
    seconds, candidates = (1e9, ["call", "simd_256"]) if every else (SAMPLE_S, [])
    processes = [begun("interrupts", seconds, shard, 2, *candidates) for shard in range(2)]
    lines = [line for process in processes for line in error_text(process)]
    assert {line["line"]: left for line in lines if (left := unexplained(line["left"]))} == {}
    assert sum(line["reached"] for line in lines) > 0.8 * len(lines) > 0
