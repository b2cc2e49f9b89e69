"""The calls of a model that Inductor leaves to libraries, by kind."""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.studies import library_calls
from benchmarks.studies.library_calls import Call, calls_of, measure_kinds, table


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
    assert [(each.kind, each.count) for each in found] == [
        ("convolution float32 3 in groups", 2),
        ("addmm float32 unaligned", 1),
    ]
    assert all(each.limit_s == 0.0 < each.seconds for each in found)


def test_the_kinds_that_are_most_above_the_limit_come_first():
    """Each with its models and calls, and the call that has most of it."""
    small = Call("mm bfloat16", "(8, 8)", 1e-6, 10, 2e-6)
    large = Call("mm bfloat16", "(64, 64)", 1e-6, 1, 3e-5)
    other = Call("sort bfloat16", "(9,)", 0.0, 1, 3e-3)
    lines = table({"one": [small, other], "two": [large]}).splitlines()
    assert [line.split()[:6] for line in lines[-2:]] == [
        ["sort", "bfloat16", "1", "1", "3.00", "3.00"],
        ["mm", "bfloat16", "2", "11", "0.05", "0.04"],
    ]
    assert lines[-1].endswith("1x 30 µs, 30.0x its limit: (64, 64)")


def test_a_step_has_the_calls_of_its_backward_pass():
    """Those of a loss, of the gradients of the parameters, and of what leads to them."""
    net = Net().eval()
    found = calls_of(lambda x: net(x).sum(), (torch.randn(2, 8, 16),), torch.device("cpu"), training=True)
    counts = Counter[str]()
    for each in found:
        counts[each.kind] += each.count
    assert counts == {
        "convolution float32 3 in groups": 2,
        "addmm float32 unaligned": 1,
        "mm float32 unaligned": 2,
        "convolution_backward float32 3 in groups": 2,
    }


def test_an_interrupt_keeps_what_was_measured(monkeypatch):
    """A model that fails is left out, and the table has those before the one that was interrupted."""

    @dataclass
    class Row:
        training = False
        error: BaseException | None = None

        def build(self, *given):
            if self.error:
                raise self.error
            return Net().eval(), (torch.randn(2, 8, 16),)

    rows = {"wrong": Row(ValueError("no")), "one": Row(), "two": Row(KeyboardInterrupt()), "three": Row()}
    monkeypatch.setattr(library_calls, "MODELS", rows)
    said = []
    found = measure_kinds([*rows], "cpu", said.append)
    assert [line.partition(":")[0] for line in said] == ["wrong", "one", "two"]
    assert said[0] == "wrong: ValueError: no"
    assert said[2] == "two: interrupted"
    assert [line.split()[:1] for line in found.splitlines()[1:]].count(["convolution"]) == 1
