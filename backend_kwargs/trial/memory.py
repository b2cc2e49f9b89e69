"""The memory that a call and its copies take, and the conditions of a measurement: the machine, and other processes."""

import ctypes
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from backend_kwargs.options.machine import machine
from backend_kwargs.trial.timing import synchronize

LARGEST_COPIES = 2 << 30
SMALL = 1 << 20  # bytes of the largest tensor that torch's allocator for GPUs puts beside others in a segment


def room_for_copies(device: torch.device | None) -> float:
    """Return how many bytes copies may take on a device: a quarter of what a GPU has free, 2 GiB on a CPU."""
    return torch.cuda.mem_get_info(device)[0] / 4 if device and device.type == "cuda" else LARGEST_COPIES


def has_room(device: torch.device) -> bool:
    """Return whether a GPU has free memory for twice what a call took at most, up to now."""
    if device.type != "cuda":
        return True
    taken = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] >= 2 * taken


def fill_free_memory(device: torch.device) -> None:
    """Fill the memory that torch's allocator has free on a device with bytes that are nan in each floating-point dtype.

    What reads memory that it has not written, or before another of its threads has, returns right numbers where those
    of the call before are still there. Allocators but torch's own for GPUs do not tell what they have free: of theirs
    some blocks of each size are filled.
    """
    sizes = [1 << power for power in range(6, 21)] * 4
    if device.type == "cuda" and torch.cuda.get_allocator_backend() == "native":
        stream = torch.cuda.current_stream(device)
        blocks = [
            (block["size"], segment["segment_type"])
            for segment in torch.cuda.memory_snapshot(include_traces=False)  # type: ignore[no-untyped-call]
            if (segment["device"], segment["stream"]) == (stream.device_index, stream.cuda_stream)
            and segment["segment_pool_id"] == (0, 0)  # of no CUDA graph
            for block in segment["blocks"]
            if block["state"] == "inactive"
        ]
        # A tensor of a block's size gets that block, the largest first; small ones are in segments of their own.
        sizes = [size for size, kind in blocks if kind == "large" and size > SMALL]
        sizes += [min(size - at, SMALL) for size, kind in blocks if kind == "small" for at in range(0, size, SMALL)]
    with suppress(torch.OutOfMemoryError):
        held = [torch.full((size,), 0xFF, dtype=torch.uint8, device=device) for size in sorted(sizes, reverse=True)]
        del held
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # `has_room` reads what calls took, and not all that was free


def peak_memory(call: Callable[[], object], device: torch.device, held: int | None = None) -> int | None:
    """Return the peak memory in bytes while `call` runs, above what was in use before, or None.

    On CUDA it is the allocator's count; `held` moves its start, for instance to before a compile, so that the pools of
    CUDA graphs count. On Linux's CPUs it is the growth of the resident set after the heap's free pages were returned:
    this includes every allocator, in pages, and does not depend on what ran earlier in this process, as a process-wide
    maximum would. Elsewhere it is None. Both reset a peak counter of this process.
    """
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) if held is None else held
        call()
        synchronize(device)
        return max(torch.cuda.max_memory_allocated(device) - before, 0)
    try:
        ctypes.CDLL(None).malloc_trim(0)
        # Writing 5 resets VmHWM to the current size: proc_pid_clear_refs(5).
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident("VmRSS")
    except (OSError, AttributeError, TypeError, KeyError):
        call()
        return None
    call()
    return max(_resident("VmHWM") - before, 0)


def _resident(field: str) -> int:
    """Return a field of the process's memory in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)[field].split()[0]) * 1024


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
    busy = 0.0
    with suppress(OSError):  # not Linux, or a sandbox in which it cannot be read
        before = STAT.read_text()
        time.sleep(LOOK_S)
        busy = busy_share(before, STAT.read_text())
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


def environment(device: torch.device) -> dict[str, str | int | None]:
    """Return what a reader needs to judge a figure: torch, Python, device, CPU, threads, Triton, CUDA."""
    return {**machine().on(device).stored("figure"), "device": device.type, "threads": torch.get_num_threads()}
