"""Arguments of calls by their names, as the matchers read them."""

import operator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from backend_kwargs.rewrites.matching import arguments_of, same_sizes

aten = torch.ops.aten


def call(target, *args, **kwargs):
    """Return the node of a call; names of one letter are tensors."""
    graph = torch.fx.Graph()

    def node(name):
        made = graph.placeholder(name)
        made.meta["example_value"] = torch.empty(2, 3)
        return made

    tensors = {}

    def value(argument):
        if isinstance(argument, str) and len(argument) == 1:
            return tensors.setdefault(argument, node(argument))
        return [*map(value, argument)] if isinstance(argument, list) else argument

    args, kwargs = tuple(map(value, args)), {name: value(each) for name, each in kwargs.items()}
    create = graph.call_method if isinstance(target, str) else graph.call_function
    return create(target, args, kwargs)


CASES = {
    "a keyword": (call(F.linear, weight="w", input="x"), {"input": "x", "weight": "w", "bias": None}),
    "the function of C": (call(torch._C._nn.linear, "x", "w"), {"input": "x", "weight": "w", "bias": None}),
    "a function of Python": (
        call(F.embedding, "i", "w", 3),
        {"input": "i", "weight": "w", "padding_idx": 3, "max_norm": None, "norm_type": 2.0,
         "scale_grad_by_freq": False, "sparse": False},
    ),
    "ATen": (
        call(aten.addmm.default, "b", "x", "w", beta=2),
        {"input": "b", "mat1": "x", "mat2": "w", "beta": 2, "alpha": 1},
    ),
    "the overload of a tensor": (call(torch.add, "x", "y", alpha=2), {"input": "x", "other": "y", "alpha": 2}),
    "the overload of a number": (call(torch.mul, "x", 2.0), {"input": "x", "other": 2.0}),
    "an operator of Python": (call(operator.matmul, "x", "y"), {"input": "x", "other": "y"}),
    "a method": (call("matmul", "x", other="y"), {"input": "x", "other": "y"}),
    "a method of Python": (call("unflatten", "x", -1, (3, 1)), {"input": "x", "dim": -1, "sizes": (3, 1)}),
    "sizes one by one": (call("view", "x", 3, 2), {"input": "x", "size": [3, 2]}),
    "sizes as a tuple": (call("view", "x", (3, 2)), {"input": "x", "size": (3, 2)}),
    "a dtype in place of sizes": (call("view", "x", torch.int32), {"input": "x", "dtype": torch.int32}),
    "a number in place of a list": (
        call(torch.conv2d, "x", "w", stride=2, padding="same"),
        {"input": "x", "weight": "w", "bias": None, "stride": [2, 2], "padding": "same", "dilation": [1, 1],
         "groups": 1},
    ),
    "one dimension": (call("sum", "x", -1), {"input": "x", "dim": [-1], "keepdim": False, "dtype": None}),
    "a list of tensors": (call(torch.cat, ["x", "y"], -1), {"tensors": ["x", "y"], "dim": -1}),
    "no out": (call(torch.bmm, "x", "y", out=None), {"input": "x", "mat2": "y"}),
    "out": (call(torch.bmm, "x", "y", out="z"), None),
    "no schema": (call(operator.getitem, "x", 0), None),
    "numbers alone": (call(operator.add, 1, 2), None),
    "NumPy's names": (
        call("sum", "x", axis=1, keepdims=True), {"input": "x", "dim": [1], "keepdim": True, "dtype": None},
    ),
    "a name that the schema lacks": (call("sum", "x", axes=1), None),
    "not a method of ATen": (call("tolist", "x"), None),
}  # fmt: skip


@pytest.mark.parametrize(("node", "expected"), CASES.values(), ids=CASES)
def test_arguments(node, expected):
    """Arguments are read by name, with the schema's defaults, or not at all."""
    given = arguments_of(node)
    assert (given and torch.fx.node.map_arg(given, lambda each: each.name)) == expected


def test_sizes_not_known_to_be_equal_differ():
    """Two symbols differ even if this call has the same number for both."""
    shapes = ShapeEnv()
    s, t = (shapes.create_unbacked_symint() for _ in range(2))
    assert same_sizes((s, 3), (s, 3))
    assert not same_sizes((s, 3), (t, 3))
    assert not same_sizes((s, 3), (s, 3, 1))
