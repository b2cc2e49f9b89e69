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
from backend_kwargs.backends.inductor import cudagraph_outputs
from backend_kwargs.torch_internals.tensors import keep_device_busy
from backend_kwargs.trial import interleave, median_interval, ratio_interval
from tests.gpu.effects import mlp, on_gpu, traced

CALLS = 5
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool)


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
    "dtypes": lambda x: [part.to(dtype) for dtype in DTYPES for part in (x + 1, x * 2)],
    "strides": lambda x: [x.t() + 1, (x * 2).t(), (x + 3).expand(3, *x.shape), (x + 4)[1:], (x + 5)[:, ::2]],
    "two-hundred": lambda x: [x + at for at in range(200)],
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
@pytest.mark.parametrize("every", [pytest.param(1, id="always"), pytest.param(4, id="now and then")])
def test_two_forwards_before_one_backward(depth, every):
    """What the first call saved for its backward pass survives a second call, also after steps of one call each."""
    layers = (part for _ in range(depth) for part in (nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU()))
    eager = nn.Sequential(*layers).cuda()
    model, (a, b) = copy.deepcopy(eager), (on_gpu(64, 256, dtype=torch.float32) for _ in range(2))
    call = independent(model)
    for step in range(4 * CALLS):
        for net, run in ((model, call), (eager, eager)):
            net.zero_grad()
            loss = run(a).square().mean()
            (loss if step % every < every - 1 else loss + 2 * run(b).mean()).backward()
        assert_close([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()], atol=1e-4, rtol=1e-3)


def shared_gradients(call: Any, x: torch.Tensor, weights: list[torch.Tensor]) -> Any:
    return torch.autograd.grad(call(x, *weights).square().sum(), weights)


def packed(x, *weights):
    return x @ torch.cat(weights, 1)


def test_gradients_that_share_memory():
    """Gradients that are parts of one product keep their values, and share the memory of the copy."""
    weights = [torch.randn(16, 16, device="cuda", requires_grad=True) for _ in range(3)]
    call, xs = independent(packed), inputs()
    kept = [shared_gradients(call, x, weights) for x in xs]
    assert_close(kept, [shared_gradients(packed, x, weights) for x in xs], atol=1e-3, rtol=1e-3)
    assert all(len({grad.untyped_storage().data_ptr() for grad in each}) == 1 for each in kept)


@torch.no_grad()
def test_a_call_in_another_mode():
    """Results are right, and inference tensors only where eager's are, when calls alternate between two modes."""
    call, kept, expected = independent(FUNCTIONS["tuple"]), [], []
    for at, x in enumerate(inputs() + inputs()):
        with torch.inference_mode(at % 2 == 1):
            for results, fn in ((kept, call), (expected, FUNCTIONS["tuple"])):
                results.append(fn(x))
    assert_close(kept, expected)
    assert [[y.is_inference() for y in ys] for ys in kept] == [[y.is_inference() for y in ys] for ys in expected]


@torch.no_grad()
def test_dynamic_sizes():
    """Each size has its graph; results whose sizes differ keep their values and sizes."""

    def fn(x, n: int):
        return x + 1, x * 2, (x + 3)[:n]

    call = torch.compile(fn, dynamic=True, backend=make_backend("tmpl-inductor:cudagraphs", clone_outputs=True))
    given = [(on_gpu(rows, 16, dtype=torch.float32), n) for _ in range(CALLS) for rows in (8, 12) for n in (3, 5)]
    assert_close([call(*each) for each in given], [fn(*each) for each in given])


@torch.no_grad()
def test_a_part_on_the_cpu(evidence):
    """Results of both graphs of a function with a part on the CPU keep their values."""
    call, xs = independent(a_part_on_the_cpu), inputs() + inputs()
    assert_close([call(x) for x in xs], [a_part_on_the_cpu(x) for x in xs], atol=1e-4, rtol=1e-4)
    evidence("clone_outputs=True", "a part on the CPU", launches=launches(lambda: call(xs[0])))


@torch.no_grad()
def test_a_dropped_result_that_another_stream_reads():
    """`record_stream` keeps a copy until it has been read."""
    fn = FUNCTIONS["tensor"]
    call, (x, *others) = independent(fn), inputs()
    for other in others:
        call(other)
    result, side = call(x), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        keep_device_busy(200_000_000)
        read = result * 1
    result.record_stream(side)
    del result
    call(others[0])
    torch.cuda.synchronize()
    assert torch.equal(read, fn(x))


@torch.no_grad()
def test_record_stream_does_not_keep_a_graphs_own_memory():
    """Without copies the next call writes where a dropped result was, whichever stream still reads it."""
    call, (x, *others) = graphed(FUNCTIONS["tensor"], clone_outputs=False), inputs()
    for other in others:
        call(other)
    result = call(x)
    result.record_stream(torch.cuda.Stream())
    address = result.data_ptr()
    del result
    assert call(others[0]).data_ptr() == address


@pytest.mark.parametrize("clone", [True, False], ids=["copied", "own-memory"])
def test_a_dropped_result_that_a_backward_pass_reads(clone):
    """A copy stays while autograd has saved it; the trees take their own tensor for dead then."""
    fn, weight = FUNCTIONS["tensor"], torch.ones(8, 16, device="cuda", requires_grad=True)
    call, (x, *others) = graphed(fn, clone_outputs=clone), inputs()
    with torch.no_grad():
        for other in others:
            call(other)
        result = call(x)
    from backend_kwargs.torch_internals.cudagraphs import trees_of_thread  # which needs CUDA

    loss = (weight * result).sum()
    del result
    manager = trees_of_thread()[0].tree_manager
    assert manager.current_node.all_outputs_are_dead()
    with torch.no_grad():
        call(others[0])
    loss.backward()
    assert torch.equal(weight.grad, fn(x)) is clone


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


def a_part_on_the_cpu(x):
    y = x + 1
    return y, x * 2, (y.sum().cpu() * 2).cuda() + x


@torch.no_grad()
@pytest.mark.parametrize(
    "fn",
    [FUNCTIONS["tensor"], FUNCTIONS["two-hundred"], one_and_its_views, a_part_on_the_cpu],
    ids=["one", "two-hundred", "shared-memory", "two-graphs"],
)
def test_a_replay_looks_nothing_up(fn, monkeypatch):
    """Which results are copied, and how, is known for each graph after its first replay."""
    call, (x, *others), seen = independent(fn), inputs(), []
    for other in others:
        call(other)
    looked_up = cudagraph_outputs._PooledCopies._looked_up

    def noted(self, results):
        seen.append(results)
        return looked_up(self, results)

    monkeypatch.setattr(cudagraph_outputs._PooledCopies, "_looked_up", noted)
    assert_close(call(x), fn(x), atol=1e-4, rtol=1e-4)
    assert seen == []


def test_memory_for_a_copy():
    """It has the sizes, strides and dtype that are asked for, on any device."""
    from backend_kwargs.torch_internals.cudagraphs import empty_each  # which needs CUDA

    device = torch.device("cuda", torch.cuda.device_count() - 1)
    (made,) = empty_each(device, [((2, 3), (1, 2), torch.bfloat16)])
    assert (made.shape, made.stride(), made.dtype, made.device) == ((2, 3), (1, 2), torch.bfloat16, device)


@torch.no_grad()
def test_many_results_are_copied_by_one_launch():
    """Two hundred results are copied by one call, and none of them is allocated by one of its own."""
    call, (x, *others) = independent(FUNCTIONS["two-hundred"]), inputs()
    for other in others:
        call(other)
    with traced() as events:
        kept = call(x)
    names = [event.name for event in events]
    assert [names.count(f"aten::{name}") for name in ("_foreach_copy_", "clone", "empty_like")] == [1 + 1, 0, 0]
    assert_close(kept, FUNCTIONS["two-hundred"](x))


@torch.no_grad()
@pytest.mark.parametrize(("size", "copies"), [(256, 1), (512, 2)], ids=["128-KiB", "512-KiB"])
def test_cost(size, copies, evidence):
    """Small outputs are copied in one launch, a few others in one each; the cost is recorded, but not judged."""
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
