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


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    fields: dict[str, str] = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return str(fields.get("model name") or platform.processor() or platform.machine())
