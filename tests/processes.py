"""Whether processes of a test run, by their numbers."""

import time
from collections.abc import Callable
from pathlib import Path


def state(pid: int | str) -> str:
    """Return the letter of a process's state, "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def lives(pid: int | str) -> bool:
    """Return whether a process is there that is no zombie: an init process may never reap an orphan that was killed."""
    return state(pid) not in ("", "Z", "X")


def waits(condition: Callable[[], bool], limit_s: float = 60) -> bool:
    """Return whether a condition comes true within so many seconds."""
    limit = time.monotonic() + limit_s
    while not condition() and time.monotonic() < limit:
        time.sleep(0.02)
    return condition()


def ends(pid: int | str) -> bool:
    """Wait until a process has ended; return whether it has."""
    return waits(lambda: not lives(pid))
