"""Frozen graphs on a GPU: constant results, memory that is freed, and swapped weights, with CUDA graphs and without."""

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing import assert_close

from backend_kwargs import make_backend

ways = pytest.mark.parametrize(
    "options",
    [{}, {"triton.cudagraphs": True, "clone_outputs": True}, {"cpp_wrapper": True}],
    ids=["kernels", "CUDA graphs", "cpp_wrapper"],
)


class Net(nn.Module):
    """A layer, and results that are constants of a frozen graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 16)
        self.log_scale, self.scale = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.ones(2, 16))

    def forward(self, x):
        scale = self.log_scale.exp()
        return self.linear(x) * scale, scale, scale[None], self.scale.exp(), self.scale.exp().t()


@ways
@torch.no_grad()
def test_a_callers_edit_of_a_constant_changes_no_later_call(options):
    """A constant result is a copy at each call, of any shape."""
    net, x = Net().eval().cuda(), torch.randn(4, 8, device="cuda")
    serve = torch.compile(net, backend=make_backend("tmpl-inductor:freezing", options))
    expected = net(x)
    for _ in range(5):
        results = serve(x)
        assert_close(results, expected)
        for result in results:
            result.fill_(-1)


@ways
@torch.no_grad()
def test_modules_that_are_dropped_are_freed(options):
    """Neither guards, code nor CUDA graphs keep a parameter's memory."""
    x, memory = torch.randn(4, 8, device="cuda"), []
    for _ in range(3):
        net = Net().eval().cuda()
        serve = torch.compile(net, backend=make_backend("tmpl-inductor:freezing", options))
        for _ in range(3):
            serve(x)
        memory.append(StorageWeakRef(net.linear.weight.untyped_storage()))
        del net, serve
        gc.collect()
    assert [each.expired() for each in memory] == [True] * 3


@ways
@torch.no_grad()
def test_a_swapped_weight_takes_effect(options):
    """A weight that `swap_tensors` replaced, or that changed in place, is in the next call's result."""
    net, x = Net().eval().cuda(), torch.randn(4, 8, device="cuda")
    serve = torch.compile(net, backend=make_backend("tmpl-inductor:freezing", options))
    serve(x)
    gc.collect()
    torch.utils.swap_tensors(net.linear.weight, nn.Parameter(torch.randn(16, 8, device="cuda")))
    assert_close(serve(x), net(x))
    net.linear.weight.mul_(2)
    assert_close(serve(x), net(x))
