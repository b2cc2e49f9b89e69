"""The kernels of a call by time."""

import pytest
import torch

from backend_kwargs.trial import GENERATED, kernel_times, operator_times

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


def test_operators_that_are_wanted_are_told_by_what_they_read():
    """Calls on the same layouts are one row, in the backward pass too, whether something is added or not."""
    x, y = torch.ones(4, 8, requires_grad=True), torch.ones(8, 8)
    found = operator_times(
        lambda: torch.addmm(y[0], x @ y, y).relu().sum().backward(), CPU, lambda func: "mm" in func.name()
    )
    square = "(8, 8) (8, 1)"
    counts = {f"aten::mm of (4, 8) (8, 1), {square}": 2, "aten::mm of (4, 8) (8, 1), (8, 8) (1, 8)": 2}
    assert {name: count for name, (count, _) in found.items()} == counts
    assert all(seconds > 0 for _, seconds in found.values())


def test_the_stride_of_a_size_of_1_makes_no_other_layout():
    """A graph that is compiled gives such a dimension any stride, as it comes."""
    x, y = torch.ones(1, 8), torch.ones(8, 8)
    found = operator_times(lambda: (x @ y, x.as_strided((1, 8), (0, 1)) @ y), CPU, lambda func: True)
    assert found["aten::mm of (1, 8) (1,), (8, 8) (8, 1)"][0] == 2


def test_a_profiler_that_is_running_is_left_alone():
    """A second one would end it, and what it has seen would be lost."""
    with torch.profiler.profile() as running:
        with pytest.raises(RuntimeError, match="another profiler is running"):
            kernel_times(lambda: torch.ones(4), CPU)
        torch.ones(4)
    assert "aten::ones" in {event.name for event in running.events()}
