"""What a GPU does at best in a second, by torch's data sheets and the driver."""

from contextlib import suppress
from functools import cache
from typing import NamedTuple

import torch
from torch._inductor.utils import get_device_tflops, get_gpu_dram_gbps


class Peaks(NamedTuple):
    """The bytes that it moves between its memory and its cores, and the operations of its tensor cores."""

    bytes_per_s: float
    flops_per_s: float


@cache
def peaks_of(device: torch.device, dtype: torch.dtype) -> Peaks | None:
    """Return the peaks of a GPU for products of `dtype`, None if they are not known."""
    if device.type == "cuda":
        with suppress(Exception), torch.cuda.device(device):  # a device or a dtype that torch has no figures of
            peaks = Peaks(get_gpu_dram_gbps() * 1e9, get_device_tflops(dtype) * 1e12)
            return peaks if min(peaks) > 0 else None
    return None
