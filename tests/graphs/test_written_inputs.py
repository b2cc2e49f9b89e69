"""Which inputs of dynamo's graph its calls may write, by names, signatures and schemas."""

import operator

import pytest
import torch
from torch.nn import functional

from backend_kwargs.graphs.writes import may_be_written, written_memory


@torch.library.custom_op("backend_kwargs_tests::second_doubled", mutates_args=("y",))
def second_doubled(x: torch.Tensor, y: torch.Tensor) -> None:
    y.mul_(2)


second_doubled.register_fake(lambda x, y: None)


@torch.compiler.allow_in_graph
def unknown(x, y):
    return x + y


def item(x, y):
    x[0] = y[1]


def statistics(training, of=functional.batch_norm):
    return lambda x, y: of(x, y[0], y[1].abs(), training=training)


BOTH, NEITHER = ["x", "y"], []
WRITTEN = {
    "method": (lambda x, y: x.add_(y), ["x"]),
    "view": (lambda x, y: x[0].view(2, 4).T.mul_(y.sum()), ["x"]),
    "item": (item, ["x"]),
    "augmented": (lambda x, y: operator.imul(y, x), ["y"]),
    "augmented bits": (lambda x, y: operator.iand(x.int(), y.int()), NEITHER),
    "dunder": (lambda x, y: x.__iadd__(y), ["x"]),
    "out": (lambda x, y: torch.mul(x, 2, out=y), ["y"]),
    "two of out": (lambda x, y: torch.frexp(x, out=(y, torch.empty(8, 8, dtype=torch.int32))), ["y"]),
    "inplace": (lambda x, y: functional.silu(y + 1, True) + functional.silu(x, inplace=True), ["x"]),
    "list": (lambda x, y: torch._foreach_add_([x[0], x[1]], [y[0], y[1]]), ["x"]),
    "copied list": (lambda x, y: torch._foreach_copy_([y], [x]), ["y"]),
    "statistics": (statistics(True), ["y"]),
    "statistics that are only read": (statistics(False), NEITHER),
    "operator": (second_doubled, ["y"]),
    "operator by keyword": (lambda x, y: torch.ops.backend_kwargs_tests.second_doubled(y=x, x=y), ["x"]),
    "operator of ATen": (torch.ops.aten.add_.Tensor, ["x"]),
    "operator of ATen with out": (lambda x, y: torch.ops.aten.mul.out(x, y, out=y), ["y"]),
    "norm of ATen": (
        lambda x, y: torch.ops.aten.native_batch_norm(x, None, None, y[0], y[1], True, 0.1, 1e-5),
        ["y"],
    ),
    "max_norm": (lambda x, y: functional.embedding(x.argmax(-1), y, max_norm=1.0), ["y"]),
    "max_norm by position": (lambda x, y: functional.embedding(x.argmax(-1), y, None, 1.0), ["y"]),
    "embedding": (lambda x, y: functional.embedding(x.argmax(-1), y), NEITHER),
    "data": (lambda x, y: x.data.add_(y.data), ["x"]),
    "unknown function": (unknown, BOTH),
    "body": (lambda x, y: torch.cond(x.sum() > 0, torch.add, torch.sub, (x, y)), BOTH),
    "logic": (lambda x, y: (x > 0) & (y > 0) | ~(x > 1), NEITHER),
    "sort": (lambda x, y: x.sort()[0] + torch.sort(y)[0] + torch.topk(x, 8)[0], NEITHER),
    "modules": (lambda x, y: torch.linalg.inv(x) + torch.fft.fft(y).real + torch.special.erf(x), NEITHER),
    "operators of ATen": (lambda x, y: torch.ops.aten.mul(x, 2) + torch.ops.aten.mm.default(x, y), NEITHER),
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("fn", "names"), WRITTEN.values(), ids=WRITTEN)
@torch.no_grad()
def test_which_inputs_a_call_may_write(fn, names):
    """An input counts as written if a call may write into its memory, and not if one only reads it."""
    seen = []

    def backend(gm, _):
        written = written_memory(gm.graph)
        inputs = gm.graph.find_nodes(op="placeholder")
        seen.extend(each.name.strip("l_") for each in inputs if may_be_written(each, written))
        return gm

    x, y = torch.eye(8) + 1, torch.eye(8)
    torch.compile(lambda x, y: (fn(x, y), x + y), backend=backend)(x, y)
    assert sorted(seen) == names
