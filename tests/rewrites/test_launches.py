"""Operators whose kernels Inductor launches itself: the graph that it lowers, traced for a GPU without one."""

import pytest
import torch
from torch._functorch.aot_autograd import aot_function
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.two_tensor import TwoTensor

from backend_kwargs.rewrites.cross_entropy import cross_entropy, cross_entropy_backward
from backend_kwargs.rewrites.decode_attention import decode_attention
from backend_kwargs.rewrites.gather_sum import gather_sum
from backend_kwargs.rewrites.scatter_reduce import rows_in_order, segment_reduce

pytest.importorskip("triton")


class NoGpuError(Exception):
    """Ends a compile once the graph is there: no GPU is there to run it."""


def launches(fn, *args):
    """Return each launch of a kernel in the graph, as its arguments and grid, and the other functions that it calls."""
    # Triton has no driver here to ask what the kernel writes, so all its inputs count as written.
    graphs = []

    def collect(gm, _):
        graphs.append(gm.graph)
        raise NoGpuError

    with pytest.raises(NoGpuError):
        aot_function(lambda *args: fn(*map(torch.clone, args)), fw_compiler=collect)(*args)
    calls = [node for node in graphs[0].nodes if node.op == "call_function"]
    launch = torch.ops.higher_order.triton_kernel_wrapper_functional
    found = [{**node.kwargs["kwargs"], "grid": node.kwargs["grid"]} for node in calls if node.target is launch]
    return found, [node.target for node in calls if node.target is not launch]


def ours(targets):
    return [each for each in targets if str(each).startswith("backend_kwargs")]


@pytest.mark.parametrize(("columns", "block"), [(33, 64), (70000, 4096)], ids=str)
def test_loss(columns, block):
    """The graph has the kernel of the rows' losses in place of the operator, and their mean by ATen."""
    with FakeTensorMode():
        logits, target = torch.empty(5, columns, device="cuda"), torch.empty(5, device="cuda", dtype=torch.int64)
        (launch,), others = launches(lambda *args: cross_entropy(*args, -100)[0], logits, target)
    assert (launch["columns"], launch["stride"], launch["BLOCK"]) == (columns, columns, block)
    assert torch.ops.aten.div.Tensor in others
    assert not ours(others)


def test_gradient():
    """The graph has the gradient's kernel in place of the operator, and the factor by ATen."""
    with FakeTensorMode():
        grad, logits = torch.empty((), device="cuda"), torch.empty(5, 9000, device="cuda")
        rows = [torch.empty(5, device="cuda", dtype=dtype) for dtype in (torch.int64, torch.float32, torch.float32)]
        fn = lambda *args: cross_entropy_backward(*args, -100)  # noqa: E731
        (launch,), others = launches(fn, grad, logits, *rows, grad)
    assert (launch["columns"], launch["parts"], launch["BLOCK"]) == (9000, 5, 2048)
    assert launch["grid"] == [(5 * 5, 1, 1)]  # in one dimension: CUDA's others end at 65535
    assert torch.ops.aten.div.Tensor in others
    assert not ours(others)


@pytest.mark.parametrize("weighted", [False, True], ids=["sum", "weighted sum"])
def test_gather_sum(weighted):
    """The graph has the kernel of gathered rows in place of the operator, with the strides of its inputs."""
    with FakeTensorMode():
        table, indices = torch.empty(50, 100, device="cuda"), torch.empty(6, 5, device="cuda", dtype=torch.int32).t()
        args = (table, indices, *([torch.empty(5, 6, device="cuda")] if weighted else ()))
        fn = lambda *args: gather_sum(*args[:2], args[2] if weighted else None, 3, False)  # noqa: E731
        (launch,), others = launches(fn, *args)
    assert [launch[name] for name in ("sums", "length", "rows", "width", "padding")] == [5, 6, 50, 100, 3]
    assert [launch[name] for name in ("index_0", "index_1")] == [1, 5]
    assert [launch[name] for name in ("weight_0", "weight_1")] == ([6, 1] if weighted else [0, 0])
    assert (launch["WEIGHTED"], launch["PADDED"], launch["MEAN"]) == (weighted, True, False)
    assert not ours(others)


def test_scatter_reduce():
    """The graph has the kernels that order the indices and reduce the rows in place of both operators."""
    with FakeTensorMode():
        index = torch.empty(60, device="cuda", dtype=torch.int64)
        rows = torch.empty(20, 300, device="cuda"), torch.empty(60, 300, device="cuda")
        fn = lambda i, *rows: segment_reduce(*rows, *rows_in_order(i, 20), "amin", False)  # noqa: E731
        (counts, places, reduces), others = launches(fn, index, *rows)
    assert [each[name] for each in (counts, places) for name in ("length", "segments")] == [60, 20] * 2
    assert [reduces[name] for name in ("SIGN", "MEAN", "INCLUDED", "ROWS", "WIDTH")] == [-1, False, False, 4, 256]
    assert reduces["grid"] == [(40, 1, 1)]
    assert not ours(others)


@pytest.mark.parametrize("batch", [1, 40], ids=["splits", "one split"])
def test_decode_attention(batch):
    """The graph has the kernels of attention for the operator, with the cache's strides; one split needs no second."""
    with FakeTensorMode():
        q = torch.empty(batch, 8, 1, 64, device="cuda")
        k, v = (torch.empty(batch, 2000, 2, 64, device="cuda").transpose(1, 2) for _ in range(2))
        (launch, *joins), others = launches(lambda q, k, v: decode_attention(q, k, v, None, 0.2, False), q, k, v)
    assert [launch[f"k_{dim}"] for dim in range(3)] == [launch[f"v_{dim}"] for dim in range(3)] == [256_000, 64, 128]
    assert (launch["SPLITS"], launch["heads"], launch["rows"], launch["keys"]) == (4 if batch == 1 else 1, 2, 4, 2000)
    assert (launch["MASKED"], launch["SCALE"]) == (False, 0.2)
    assert [join["SPLITS"] for join in joins] == [4] * (batch == 1)
    assert not ours(others)


def test_subclass():
    """A tensor of a subclass launches the kernel for each tensor inside."""
    with FakeTensorMode():
        one, other = (torch.empty(5, 9000, device="cuda") for _ in range(2))
        target = torch.empty(5, device="cuda", dtype=torch.int64)
        both = TwoTensor(one, other), TwoTensor(target, target)
        found, others = launches(lambda *args: cross_entropy(*args, -100)[0], *both)
    assert [launch["columns"] for launch in found] == [9000, 9000]
    assert not ours(others)


@pytest.mark.parametrize("columns", [1000, 9001], ids=str)
def test_sizes_that_change(columns):
    """Rows and classes may be symbols: the graphs then hold for any number of either."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
    rows, columns = mode.from_tensor(torch.empty(7, columns)).shape
    with mode:
        logits, grad = torch.empty(rows, columns, device="cuda"), torch.empty((), device="cuda")
        target, per_row = torch.empty(rows, device="cuda", dtype=torch.int64), torch.empty(rows, device="cuda")
        (loss,), _ = launches(lambda *args: cross_entropy(*args, -100)[0], logits, target)
        fn = lambda *args: cross_entropy_backward(*args, -100)  # noqa: E731
        (gradient,), _ = launches(fn, grad, logits, target, per_row, per_row, grad)
    assert (loss["BLOCK"], gradient["BLOCK"]) == (4096, 2048)
    assert all(isinstance(each["columns"], torch.fx.Node) for each in (loss, gradient))
    assert not mode.shape_env.guards
