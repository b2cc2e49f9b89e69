"""Other processes on the device of a measurement."""

from pathlib import Path

import pytest
import torch

from backend_kwargs.trial import memory, others_on
from backend_kwargs.trial.memory import busy_share

BEFORE = "cpu  100 0 100 800 0 0 0 0 0 0\ncpu0 1 2 3\n"


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        pytest.param("cpu  175 0 100 825 0 0 0 0 0 0\n", 0.75, id="used by programs"),
        pytest.param("cpu  100 0 100 850 50 0 0 0 0 0\n", 0.0, id="waiting for a disk is idle"),
        pytest.param(BEFORE, 0.0, id="no time passed"),
        pytest.param("", 0.0, id="not Linux"),
        pytest.param("cpu  a b\n", 0.0, id="another kernel's"),
    ],
)
def test_the_share_of_the_cores_in_use(after, expected):
    """It is what was not idle, of all cores together."""
    assert busy_share(BEFORE, after) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("used", "expected"),
    [(90, "other processes used 90% of the CPUs when it began"), (10, "")],
    ids=["much", "little"],
)
def test_only_much_is_worth_a_warning(monkeypatch, used, expected):
    """Any machine does something beside; the file's content changes while this process waits."""
    contents = iter([BEFORE, f"cpu  {100 + used} 0 100 {900 - used} 0 0 0 0 0 0\n"])
    monkeypatch.setattr(Path, "read_text", lambda path: next(contents))
    assert others_on(torch.device("cpu")) == expected


def test_a_file_that_cannot_be_read(monkeypatch):
    """As in a sandbox: this one exists, and its first byte belongs to nobody."""
    monkeypatch.setattr(memory, "STAT", Path("/proc/self/mem"))
    assert others_on(torch.device("cpu")) == ""
