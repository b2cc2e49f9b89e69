"""Signals in commands: nothing is left behind, and the exit code is the shells'."""

import os
import signal
import subprocess
import time

import pytest

from tests import forks
from tests.faults.attempts import TIMES

LIMIT_S = 300  # only against hanging
MODEL = """
import pathlib, subprocess, sys, time, torch

def sleep():
    pathlib.Path("ready").touch()
    time.sleep(600)

class Sleeping(torch.nn.Module):
    def forward(self, x):
        sleep()

def build():
    return Sleeping().eval(), (torch.ones(2),)

def sleeping_factory():
    sleep()
"""
COMMANDS = {
    "tune": ["tune", "model.py:sleeping_factory", "-o", "made.toml"],
    "build": ["bundle", "build", "model.py:build", "-o", "bundle", "-b", "eager"],
    "compare": ["compare", "model.py:build", "--backends", "eager,tmpl-inductor", "-o", "made.json"],
}
ALL = [(command, name) for command in COMMANDS for name in ("SIGINT", "SIGTERM", "SIGHUP")]


@pytest.fixture
def started(tmp_path):
    """Return a function that starts a command, and waits until the model sleeps."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "temporary").mkdir()
    processes = []

    def start(command, **how):
        env = os.environ | {"TMPDIR": str(tmp_path / "temporary")}
        processes.append(forks.Fork("-m", "backend_kwargs", *COMMANDS[command], cwd=tmp_path, env=env, **how))
        until = time.monotonic() + LIMIT_S
        while not (tmp_path / "ready").exists() and processes[-1].poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("command", "name"), ALL if TIMES > 1 else [("tune", "SIGTERM"), ("build", "SIGHUP")])
def test_a_signal_leaves_nothing(started, tmp_path, command, name):
    """Temporary folders are removed, nothing is written, and no traceback is printed."""
    process = started(command)
    process.send_signal(getattr(signal, name))
    said = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == 128 + getattr(signal, name)
    assert "Traceback" not in said
    assert list((tmp_path / "temporary").iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} <= {"model.py", "ready", "temporary", "__pycache__"}


def test_nohup_is_respected(started):
    """A signal that the parent ignores is ignored."""
    process = started("build", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.0)
