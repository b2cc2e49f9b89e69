"""How many workers there may be."""

import multiprocessing
import os
import sys
from collections.abc import Mapping
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")
MOST = 6  # as many candidates as a race lowers


def refused() -> str:
    """Return why this process must have no workers, "" if it may."""
    if sys.platform != "linux":
        return "workers need Linux"
    if multiprocessing.current_process().daemon:
        return "this process is daemonic, as a DataLoader's worker is, and may have no children"
    if not sys.executable:
        return "Python does not know its own executable"
    return ""


def spare_workers(cores: int) -> int:
    """Return how many workers `cores` allow beside this process: half of them are for it and its compilers."""
    return max(0, min(MOST, cores // 2 - 1))


def allowed_cores() -> int:
    """Return the number of cores for this process, by its affinity and its cgroup's quota."""
    own = os.sched_getaffinity(0)
    return share_of(len(own), _quota(), is_bound=own < _parents())


def share_of(cores: int, quota: int, *, is_bound: bool, environ: Mapping[str, str] = os.environ) -> int:
    """Return this process's share of the cores on which it may run, and of its cgroup's quota.

    `LOCAL_WORLD_SIZE`, which torchrun sets, is the number of processes on the host. They share cores, unless each is
    bound to its own.
    """
    ranks = environ.get("LOCAL_WORLD_SIZE", "")
    sharing = int(ranks) if ranks.isdecimal() and int(ranks) else 1
    return min(cores if is_bound else cores // sharing, quota // sharing)


def _parents() -> set[int]:
    """Return the cores of the process that started this one: more than this one's, if it was bound to some of them."""
    try:
        return os.sched_getaffinity(os.getppid())
    except OSError:
        return set()


def _quota() -> int:
    try:
        quota, period = QUOTA.read_text(encoding="ascii").split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no such file, or "max"
        return sys.maxsize
