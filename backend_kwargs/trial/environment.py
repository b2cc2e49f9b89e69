"""The environment of a measurement."""

import torch

from backend_kwargs.options.machine import machine


def environment(device: torch.device) -> dict[str, str | int | None]:
    """Return what a reader needs to judge a figure: torch, Python, device, CPU, threads, Triton, CUDA."""
    return {**machine().on(device).stored("figure"), "device": device.type, "threads": torch.get_num_threads()}
