"""After a race, a process is as if it had compiled only the winner, whatever happened in the race."""

import json
import os

import pytest

from tests import forks
from tests.auto import census

EVERY = "BACKEND_KWARGS_EVERY_LINE"  # set, each line of ours is interrupted: docs/attacks.md says how long that takes
ONE_IN = 40  # else
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
            "BACKEND_KWARGS_STORE": str(tmp_path / "decisions"),
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


def interrupted(lines_of, call, one_in):
    """Return what differs after each interrupted execution of a line, and how many there were."""
    *answers, total = lines_of("interrupts", call, str(one_in))
    return {each["line"]: left for each in answers if (left := unexplained(each["left"]))}, total


@pytest.mark.parametrize("call", ["race", "stored"])
def test_an_interrupted_call_leaves_nothing(lines_of, call):
    """After a Ctrl-C at any line of this package, the process is as before, and a second call works."""
    every = os.environ.get(EVERY)
    left, total = interrupted(lines_of, call, 1 if every else ONE_IN)
    assert left == {}
    assert total["forks"] > total["lines"] / (1 if every else 2 * ONE_IN)


def test_a_change_without_protection_is_found(lines_of):
    """A control: a call that disables the garbage collector one line before its `try`."""
    found, total = interrupted(lines_of, "control", 1)
    changed = {"gc": [[True, [700, 10, 10], 0, 0], [False, [700, 10, 10], 0, 0]]}
    assert found == {"/planted.py:3 (1)": changed, "/planted.py:4 (1)": changed}
    assert total["lines"] == 5
