"""The environment of a measurement."""

import os
import platform
from pathlib import Path

import torch

from backend_kwargs.options.requirements import installed_version


def environment(device: torch.device) -> dict[str, str | int | None]:
    """Return what a reader needs to judge a figure: torch, Python, device, CPU, threads, Triton, CUDA."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "triton": installed_version("triton"),
    }


def processor() -> dict[str, str]:
    """Return what Linux says of the first processor, by its words; {} if it says nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}


def _cpu_name() -> str:
    return processor().get("model name") or platform.processor() or platform.machine()
