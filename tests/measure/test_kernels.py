"""The kernels of a call by time."""

import pytest
import torch

from backend_kwargs.measure import GENERATED, kernel_times

CPU = torch.device("cpu")


def test_operators_of_a_call_are_counted_and_sorted():
    """Each operator has its calls in one call, the longest first; a negligible one is left out."""
    x = torch.ones(400, 400)
    found = kernel_times(lambda: (x @ x) @ x, CPU)
    assert (found[0].name, found[0].calls) == ("aten::mm", 2)
    assert [each.seconds for each in found] == sorted((each.seconds for each in found), reverse=True)


@pytest.mark.usefixtures("fresh_dynamo")
def test_generated_code_is_told_from_operators():
    """On a CPU Inductor's kernels are one row, beside the library's operators."""
    linear = torch.nn.Linear(64, 64).eval()
    compiled = torch.compile(lambda x: torch.nn.functional.gelu(linear(x)), backend="inductor")
    with torch.no_grad():
        compiled(torch.ones(64, 64))
        names = [each.name for each in kernel_times(lambda: compiled(torch.ones(64, 64)), CPU)]
    assert {GENERATED, "aten::addmm"} <= {*names}
