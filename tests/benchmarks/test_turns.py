"""A process that measures one way of a held-out model, seen from the one that gives the turns."""

import pytest

from benchmarks.execution.turns import Job, Process

LIMIT_S = 120.0


@pytest.fixture
def started(tmp_path):
    """Return a function that starts a process of a way, which ends with the test."""
    pytest.importorskip("transformers")
    running = []

    def start(model, way="eager"):
        folder = tmp_path / way
        running.append(Process(Job(model, way, "tiny", "cpu", "float32", str(folder), str(tmp_path / "reference.pt"))))
        return running[-1]

    yield start
    for process in running:
        process.kill()


def test_a_process_is_built_called_checked_and_timed_in_turns(started):
    """Eager writes the reference; each sample is the seconds of one call."""
    process = started("qwen3_decode")
    assert process.answer(LIMIT_S) == {"status": "built"}
    first = process.ask(LIMIT_S, do="first_call")
    assert (first["status"], first["races"], first["graphs"]) == ("pass", [], 0)
    assert process.ask(LIMIT_S, do="check")["status"] == "pass"
    assert process.ask(LIMIT_S, do="prepare")["repeats"].keys() == {"eager"}
    sample = process.ask(LIMIT_S, do="sample", name="eager")
    assert 0 < sample["seconds"] < first["first_call_s"] + 1
    assert process.ask(LIMIT_S, do="end") == {"status": "ended"}


def test_a_model_that_cannot_be_built_is_a_row_with_its_reason(started):
    """Whatever a process raises comes back as a status and one line."""
    assert started("no_such_model").answer(LIMIT_S) == {"status": "fail_to_run", "reason": "KeyError: 'no_such_model'"}


def test_a_process_that_answers_too_late_is_ended(started):
    """A step over its limit is a timeout, and the process is gone."""
    process = started("qwen3_decode")
    assert process.answer(0.1) == {"status": "timeout", "reason": "longer than 0 s"}
    assert process.child.poll() is not None
