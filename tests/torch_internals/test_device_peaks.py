"""The peaks of a GPU from what its driver tells."""

import pytest
import torch

from backend_kwargs.torch_internals.device_peaks import peaks_from, peaks_of

H200 = {"mem_clock_rate": 3201000, "mem_bus_width": 6144, "sm_clock_rate": 1830000, "multiprocessor_count": 132}


@pytest.mark.parametrize(
    ("dtype", "flops"),
    [
        pytest.param(torch.bfloat16, 989e12, id="halves"),
        pytest.param(torch.float32, 495e12, id="float32, in TF32"),
    ],
)
def test_an_h200_has_the_figures_of_its_data_sheet(dtype, flops):
    """4.9 TB/s, and what its tensor cores do at the clock that the data sheet assumes."""
    peaks = peaks_from(H200, (9, 0), dtype)
    assert peaks.bytes_per_s == pytest.approx(4.9e12, rel=0.01)
    assert peaks.flops_per_s == pytest.approx(flops, rel=0.01)


@pytest.mark.parametrize(
    ("told", "capability", "dtype"),
    [
        pytest.param(H200, (7, 5), torch.float16, id="capability"),
        pytest.param(H200, (9, 0), torch.float64, id="dtype"),
        pytest.param(H200 | {"mem_clock_rate": 0}, (9, 0), torch.float16, id="a clock of 0"),
    ],
)
def test_what_is_not_known_has_no_peaks(told, capability, dtype):
    """There is no limit to compare with then."""
    assert peaks_from(told, capability, dtype) is None


def test_a_cpu_has_no_peaks():
    """Its caches and clocks say too little."""
    assert peaks_of(torch.device("cpu"), torch.float32) is None
