"""After a race, a process is as if it had compiled only the winner, whatever happened in the race."""

import json
import os

import census
import forks
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
def lines_of(tmp_path_factory):
    """Return a function that runs census.py in its own process and returns what it prints."""

    def run(*arguments):
        tmp_path = tmp_path_factory.mktemp("census")
        settings = {
            # One process for each: Inductor raises the recursion limit permanently when it compiles.
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
            "BACKEND_KWARGS_STORE": str(tmp_path / "decisions.sqlite"),
            "CUDA_VISIBLE_DEVICES": "",
        }
        ran = forks.run(census.__file__, *arguments, env=os.environ | settings)
        assert ran.returncode == 0, ran.stderr
        return [json.loads(line) for line in ran.stdout.splitlines()]

    return run


def unexplained(left):
    return {name: values for name, values in left.items() if name not in ALLOWED}


@pytest.fixture(scope="module")
def alone(lines_of):
    """Return the census of a process that compiled only default."""
    return lines_of("alone")[0]


@pytest.mark.parametrize("name", ["race", *census.PLANTED])
def test_a_race_leaves_what_the_winner_alone_leaves(lines_of, alone, name):
    """A race leaves the same state as its winner alone, even if a candidate fails to compile, check or run."""
    assert unexplained(census.differences(alone, lines_of(name)[0])) == {}


@pytest.mark.parametrize("half", [0, 1], ids=["even lines", "odd lines"])
def test_an_interrupted_race_leaves_nothing(lines_of, half):
    """After a Ctrl-C at any line of this package, the process is as before, and nothing hangs."""
    every = os.environ.get(EVERY)
    seconds, candidates = (1e9, ["call", "simd_256"]) if every else (SAMPLE_S, [])
    lines = lines_of("interrupts", seconds, half, 2, *candidates)
    assert {line["line"]: left for line in lines if (left := unexplained(line["left"]))} == {}
    assert sum(line["reached"] for line in lines) > 0.8 * len(lines) > 0
