"""Options that have no effect: what the machine lacks, else what the other options are."""

import pytest

from backend_kwargs.options.machine import Machine, limits_of_options

GPU = Machine(gpu="a GPU", capability=(9, 0), sms=132, triton=True, triton_tma=True)
TMA = "triton.enable_persistent_tma_matmul"
DEFAULTS = {"max_autotune": False, "max_autotune_gemm": False, "max_autotune_gemm_backends": "ATEN,TRITON,CPP"}


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        pytest.param({}, "it is read only under max_autotune or max_autotune_gemm", id="not tuned"),
        pytest.param({"max_autotune": True}, None, id="the default names it"),
        pytest.param({"max_autotune_gemm": True, "max_autotune_gemm_backends": "aten, triton"}, None, id="named"),
        pytest.param(
            {"max_autotune": True, "max_autotune_gemm_backends": "ATEN,CPP"},
            "max_autotune_gemm_backends does not name TRITON",
            id="not named",
        ),
    ],
)
def test_an_option_of_a_generator_that_is_not_asked(others, reason):
    """An option of Triton's products has no effect where they are not tuned, or Triton is not among those tuned."""
    found = limits_of_options({TMA: True, **others}, DEFAULTS.get, GPU).get(TMA)
    assert (found.reason if found else None) == reason


def test_what_the_machine_lacks_comes_first():
    """Its remedy is named, whatever the other options are."""
    found = limits_of_options({TMA: True}, DEFAULTS.get, Machine(gpu="a GPU", capability=(9, 0), sms=132))[TMA]
    assert found.remedy
    assert found.reason != "it is read only under max_autotune or max_autotune_gemm"
