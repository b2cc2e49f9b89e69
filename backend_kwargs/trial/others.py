"""Where something is measured: the machine, and other processes, whose work shows in no interval of one run."""

import time
from pathlib import Path

import torch

from backend_kwargs.options.machine import machine

STAT = Path("/proc/stat")
LOOK_S = 0.2
MUCH = 0.25  # of all cores: less is what any machine does beside
OWN_BYTES = 2 << 30  # of a GPU's memory that a process may hold outside torch's allocator: its context, libraries


def others_on(device: torch.device) -> str:
    """Return what other processes do on `device` while this one waits, "" if that is little or unknown."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        held = total - free - torch.cuda.memory_reserved(device)
        return f"other processes hold {held / 2**30:.1f} GiB of the GPU's memory" if held > OWN_BYTES else ""
    before = _stat()
    time.sleep(LOOK_S)
    busy = busy_share(before, _stat())
    return f"other processes used {busy:.0%} of the CPUs when it began" if busy > MUCH else ""


def busy_share(before: str, after: str) -> float:
    """Return the share of all cores' time that was used between two contents of /proc/stat, 0 if they say nothing."""
    try:
        was, now = ([int(number) for number in text.split("\n", 1)[0].split()[1:9]] for text in (before, after))
        spent = sum(now) - sum(was)
        idle = sum(now[3:5]) - sum(was[3:5])  # idle, and waiting for a disk
    except (ValueError, IndexError):
        return 0.0
    return 1 - idle / spent if spent > 0 else 0.0


def _stat() -> str:
    try:
        return STAT.read_text()
    except OSError:  # not Linux
        return ""


def environment(device: torch.device) -> dict[str, str | int | None]:
    """Return what a reader needs to judge a figure: torch, Python, device, CPU, threads, Triton, CUDA."""
    return {**machine().on(device).stored("figure"), "device": device.type, "threads": torch.get_num_threads()}
