"""`clone_outputs=True`: a later call does not change an earlier call's outputs, and nothing is copied unnecessarily."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

from backend_kwargs import make_backend
from backend_kwargs.measure import interleave, median_interval, ratio_interval
from tests.gpu.effects import mlp, on_gpu, traced

CALLS = 5


def graphed(fn: Any, **options: Any) -> Any:
    return torch.compile(fn, backend=make_backend("tmpl-inductor:cudagraphs", options))


def independent(fn: Any) -> Any:
    return graphed(fn, clone_outputs=True)


def one_and_its_views(x):
    y = x + 1
    return y, y[1:], y.view(-1), y.t()


def input_and_its_views(x):
    return x, x[1:], x.view(-1), x + 1


FUNCTIONS = {
    "tensor": lambda x: x * 2 + 1,
    "tuple": lambda x: (x + 1, x * 2),
    "list": lambda x: [x + 1, x * 2],
    "dict": lambda x: {"sum": x + 1, "product": x * 2},
    "nested": lambda x: {"first": (x + 1, [x * 2, None]), "second": {"third": x.sum()}},
    "none": lambda x: (None, x + 1, None),
    "views-of-an-output": one_and_its_views,
    "views-of-an-input": input_and_its_views,
    "same-twice": lambda x: (y := x + 1, y),
    "slice-of-what-is-not-returned": lambda x: (x + 1)[1:, 2:],
    "empty": lambda x: (x[:0] + 1, x + 1),
    "transposed": lambda x: (x + 1).t(),
    "number": lambda x: (x + 1, x.shape[0]),
}


def inputs() -> list[torch.Tensor]:
    return [on_gpu(8, 16, dtype=torch.float32) for _ in range(CALLS)]


def launches(call: Any) -> tuple[int, int]:
    """Return the number of graphs that one call launches, and of copies of outputs: one by one, or all at once."""
    with traced() as events:
        kept = call()
    del kept
    names = [event.name for event in events]
    return names.count("cudaGraphLaunch"), names.count("aten::clone") + names.count("aten::_foreach_copy_")


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("fn", FUNCTIONS.values(), ids=FUNCTIONS)
def test_outputs_of_all_calls_stay(fn, grad):
    """Each call's outputs keep their values and structure through warm-up, recording and replay."""
    xs = inputs()
    with torch.set_grad_enabled(grad):
        call = independent(fn)
        results = [call(x) for x in xs]
        assert_close(results, [fn(x) for x in xs])
        assert launches(lambda: call(xs[0]))[0] == 1


def test_without_it_outputs_are_overwritten(evidence):
    """Without the option torch raises during warm-up, and later silently returns the same memory."""
    (first, second, third, fourth, _), call = inputs(), graphed(FUNCTIONS["tensor"])
    warm = call(first)
    call(second)
    with pytest.raises(RuntimeError, match="overwritten by a subsequent run"):
        warm.sum()
    replayed = call(third)
    before = replayed.clone()
    call(fourth)
    assert not torch.equal(replayed, before)
    evidence("clone_outputs=False", "y1 = f(x1); f(x2)", seen="raised in warm-up, overwritten silently in replay")


def test_views_of_one_output_share_memory():
    """Outputs that share memory in eager share it here: a change of one shows in its views."""
    call = independent(one_and_its_views)
    for x in inputs():
        with torch.no_grad():
            y, *views = call(x)
            y.fill_(7)
        assert all((view == 7).all() for view in views)


def test_views_of_an_input_are_the_inputs_memory():
    """An input, or a view of one, is returned without a copy."""
    call = independent(input_and_its_views)
    for x in inputs():
        same, tail, flat, fresh = call(x)
        assert same is x
        assert tail.data_ptr() == x[1:].data_ptr()
        assert flat.data_ptr() == x.data_ptr()
        assert_close(fresh, x + 1)


class WithParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x @ self.weight, self.weight, x[1:]


@torch.no_grad()
def test_only_pooled_outputs_are_copied(evidence):
    """Of a product, a parameter and a view of the input only the product is copied; nothing of a skipped graph is."""
    net = WithParameter().cuda()
    call, (x, *others) = independent(net), inputs()
    for other in others:
        assert call(other)[1] is net.weight
    assert launches(lambda: call(x)) == (1, 2)  # torch's own copy of the input is the first

    def change(x):
        x.add_(1)
        return x * 2

    skipped = independent(change)
    for other in others:
        skipped(other)
    assert launches(lambda: skipped(x)) == (0, 0)
    evidence("clone_outputs=True", "product, parameter, view of the input", clones=1)


def test_without_cuda_graphs_nothing_is_copied():
    """With a template that records no graph, the option changes nothing."""
    call = torch.compile(lambda x: x + 1, backend=make_backend("tmpl-inductor:default", clone_outputs=True))
    (x, *_) = inputs()
    call(x)
    assert launches(lambda: call(x)) == (0, 0)


def test_one_functions_output_is_anothers_input():
    """The outputs of two chained compiled functions keep their values."""
    add, double = independent(lambda x: x + 1), independent(lambda x: (x * 2, x.view(-1)))
    xs = inputs()
    with torch.no_grad():
        results = [(y := add(x), double(y)) for x in xs]
    assert_close(results, [(x + 1, ((x + 1) * 2, (x + 1).view(-1))) for x in xs])


def test_several_graphs():
    """All outputs of a function with a graph break keep their values."""

    def broken(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y, y * 2

    call, xs = independent(broken), inputs()
    with torch.no_grad():
        assert_close([call(x) for x in xs], [(x + 1, (x + 1) * 2) for x in xs])


@pytest.mark.parametrize("mark", [False, True], ids=["plain", "mark_step_begin"])
def test_training(mark):
    """Optimizer steps give eager's losses, outputs and weights."""
    eager = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).cuda()
    model, xs = copy.deepcopy(eager), inputs()
    call = independent(model)
    assert_close(_train(call, model, xs, mark=mark), _train(eager, eager, xs, mark=False))
    assert_close(model.state_dict(), eager.state_dict())


def _train(call: Any, model: nn.Module, xs: list[torch.Tensor], *, mark: bool) -> list[torch.Tensor]:
    optimizer, outputs = torch.optim.SGD(model.parameters(), lr=0.1), []
    for x in xs:
        if mark:
            torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad()
        output = call(x)
        output.square().mean().backward()
        optimizer.step()
        outputs.append(output.detach())
    return outputs


@pytest.mark.parametrize("depth", [1, 3])
def test_two_forwards_before_one_backward(depth):
    """The buffers that the first call saved for its backward pass survive a second call."""
    eager = nn.Sequential(*(nn.Linear(16, 16) for _ in range(depth))).cuda()
    model, (a, b, *_) = copy.deepcopy(eager), inputs()
    call = independent(model)
    for _ in range(CALLS):
        for net, run in ((model, call), (eager, eager)):
            net.zero_grad()
            (run(a).square() + 2 * run(b)).sum().backward()
        assert_close([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()])


@torch.inference_mode()
def test_inference_mode():
    """Inference tensors and views of them are copied too."""
    xs, call = inputs(), independent(one_and_its_views)
    assert_close([call(x) for x in xs], [one_and_its_views(x) for x in xs])


@torch.no_grad()
def test_tensor_subclass():
    """A tensor subclass made of two tensors keeps its values too."""
    call, xs = independent(lambda x: x + 1), [TwoTensor(a, 2 * a) for a in inputs()]
    results = [call(x) for x in xs]
    assert_close([(y.a, y.b) for y in results], [(x.a + 1, x.b + 1) for x in xs])


@torch.no_grad()
def test_frozen():
    """With freezing an earlier output keeps its values too."""
    net = mlp()
    call = torch.compile(net, backend=make_backend("tmpl-inductor:cudagraphs+freezing", clone_outputs=True))
    xs = [on_gpu(64, 256) for _ in range(CALLS)]
    assert_close([call(x) for x in xs], [net(x) for x in xs], atol=2e-2, rtol=2e-2)


@torch.no_grad()
@pytest.mark.parametrize(("size", "copies"), [(256, 1), (4096, 2)], ids=["128-KiB", "32-MiB"])
def test_cost(size, copies, evidence):
    """Small outputs are copied in one launch, large ones in one each; the cost is recorded, but not judged."""
    x = on_gpu(size, size)

    def chain(x):
        return pytree.tree_map(torch.sin, [x, x.t()])

    calls = {"plain": graphed(chain), "cloned": independent(chain)}
    samples = interleave(
        {name: lambda call=call: call(x) and None for name, call in calls.items()}, rounds=20, device=x.device
    )
    ratio = ratio_interval(samples["cloned"], samples["plain"])
    times = {name: median_interval(each).median * 1e6 for name, each in samples.items()}
    evidence("clone_outputs=True", f"two outputs of {x.nbytes // 2**10} KiB", microseconds=times, ratio=ratio)
    assert [launches(lambda call=call: call(x)) for call in calls.values()] == [(1, 1), (1, 1 + copies)]
