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


def spare_workers(cores: int, environ: Mapping[str, str] = os.environ) -> int:
    """Return how many workers `cores` allow beside this process: half of them are for it and its compilers.

    `LOCAL_WORLD_SIZE`, which torchrun sets, is the number of processes that share the host.
    """
    ranks = environ.get("LOCAL_WORLD_SIZE", "")
    return max(0, min(MOST, (cores // 2 - 1) // (int(ranks) if ranks.isdecimal() and int(ranks) else 1)))


def allowed_cores() -> int:
    """Return the number of cores on which this process may run, by its affinity and its cgroup's quota."""
    return min(len(os.sched_getaffinity(0)), _quota())


def _quota() -> int:
    try:
        quota, period = QUOTA.read_text(encoding="ascii").split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no such file, or "max"
        return sys.maxsize
