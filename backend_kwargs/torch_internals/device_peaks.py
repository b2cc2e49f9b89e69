"""What a GPU does at best in a second, by its clocks and the width of its memory's bus, as its driver tells Triton."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch

# Operations of a multiprocessor in a cycle, in halves on tensor cores, by capability. In TF32 they are half as many.
# Source: NVIDIA's white papers on A100 (312 TFLOP/s with 108 at 1.41 GHz) and H100 (989 TFLOP/s with 132 at 1.83 GHz).
PER_CYCLE = {(8, 0): 2048, (9, 0): 4096}


class Peaks(NamedTuple):
    """The bytes that it moves between its memory and its cores, and the operations of its tensor cores."""

    bytes_per_s: float
    flops_per_s: float


def peaks_of(device: torch.device, dtype: torch.dtype) -> Peaks | None:
    """Return the peaks of a GPU for products of `dtype`, None if they are not known."""
    if device.type == "cuda":
        with suppress(Exception):  # no Triton, or a driver that tells it otherwise
            from triton.runtime import driver  # type: ignore[import-untyped]

            index = torch.cuda.current_device() if device.index is None else device.index
            told = driver.active.utils.get_device_properties(index)
            return peaks_from(told, torch.cuda.get_device_capability(index), dtype)
    return None


def peaks_from(told: Mapping[str, Any], capability: tuple[int, int], dtype: torch.dtype) -> Peaks | None:
    """Return the peaks of a GPU with such properties: clocks in kHz, the bus in bits."""
    bytes_per_s = 2e3 * told["mem_clock_rate"] * told["mem_bus_width"] / 8
    halves = 1e3 * told["sm_clock_rate"] * told["multiprocessor_count"] * PER_CYCLE.get(capability, 0)
    peaks = Peaks(bytes_per_s, halves if dtype.itemsize == 2 else halves / 2 if dtype == torch.float32 else 0.0)
    return peaks if min(peaks) > 0 else None
