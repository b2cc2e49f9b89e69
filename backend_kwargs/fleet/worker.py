"""A worker of one unit: `python -m backend_kwargs.fleet.worker UNIT RESULT CORE,CORE`, whose first two are files.

It ends when its standard input is closed, which is when the process that started it dies.
"""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

GRACE_S = 5.0  # for compilers to remove what they wrote in part
PROCESSES = Path("/proc")


def main(unit: str, result: str, cores: str) -> None:
    """Race the unit in a file on these cores, and write its result as another."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from backend_kwargs.files import write_whole
    from backend_kwargs.fleet.racing import race_unit

    write_whole(Path(result), race_unit(Path(unit).read_bytes()).decode())


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.killpg(os.getpgid(0), signal.SIGINT)
    time.sleep(GRACE_S)
    end_tree(os.getpid())


def end_tree(leader: int) -> None:
    """Kill the leader of a session with all processes of the session, and all that descend from them."""
    killed = {os.getpid()}  # this one with its group, as the last
    while found := _tree(leader) - killed:
        killed |= found
        for each in found:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _tree(leader: int) -> set[int]:
    parents, found = {}, set()
    for stat in PROCESSES.glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            _, parent, _, session = stat.read_text(errors="replace").rpartition(")")[2].split()[:4]
            process = int(stat.parent.name)
            parents[process] = int(parent)
            if int(session) == leader:
                found.add(process)
    while more := {process for process, parent in parents.items() if parent in found} - found:
        found |= more
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
