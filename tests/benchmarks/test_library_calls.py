"""The calls of a model that Inductor leaves to libraries, by kind."""

import torch
from torch import nn

from benchmarks.studies.library_calls import Call, calls_of, table


class Net(nn.Module):
    """Two equal convolutions in groups, ReLU, and a product."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(8, 8, 3, groups=2, padding=1) for _ in range(2))
        self.linear = nn.Linear(16, 4)

    def forward(self, x):
        for conv in self.convs:
            x = torch.relu(conv(x))
        return self.linear(x)


def test_calls_with_equal_inputs_are_one_row():
    """Operators that are fused are in none; a CPU's limit is not known, so that all of its time is above it."""
    found = calls_of(Net().eval(), (torch.randn(2, 8, 16),), torch.device("cpu"))
    assert [(each.kind, each.count) for each in found] == [("convolution float32 in groups", 2), ("addmm float32", 1)]
    assert all(each.limit_s == 0.0 < each.seconds for each in found)


def test_the_kinds_that_are_most_above_the_limit_come_first():
    """Each with its models and calls, and the call that has most of it."""
    small = Call("mm bfloat16", print, "(8, 8)", 1e-6, 10, 2e-6)
    large = Call("mm bfloat16", print, "(64, 64)", 1e-6, 1, 3e-5)
    other = Call("sort bfloat16", print, "(9,)", 0.0, 1, 3e-3)
    lines = table({"one": [small, other], "two": [large]}).splitlines()
    assert [line.split()[:6] for line in lines[-2:]] == [
        ["sort", "bfloat16", "1", "1", "3.00", "3.00"],
        ["mm", "bfloat16", "2", "11", "0.05", "0.04"],
    ]
    assert lines[-1].endswith("1x 30 µs, 30.0x its limit: (64, 64)")
