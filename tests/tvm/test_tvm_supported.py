"""Which nodes TVM may have, and the reason for each other one."""

import operator

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("tvm")

from lowered import node_of

from backend_kwargs.compilers.tvm import supported
from backend_kwargs.compilers.tvm.lowering.table import CONVERTERS, RESHAPED, SAME
from backend_kwargs.compilers.tvm.settings import Settings
from backend_kwargs.compilers.tvm.supported import DENIED, why_not

NO_OPTIONS = Settings(aten_ops=())
x = torch.randn(4, 4)


def reason(function, name, *args, settings=NO_OPTIONS, mode="fake"):
    return why_not(node_of(make_fx(function, tracing_mode=mode)(*args), name), settings)


@pytest.mark.parametrize(
    ("function", "name", "wanted"),
    [
        pytest.param(torch.relu, "relu.default", "", id="supported"),
        pytest.param(lambda x: x.max(1), "max.dim", "", id="several outputs"),
        pytest.param(torch.rand_like, "rand_like.default", "draws random numbers", id="random"),
        pytest.param(lambda x: x.relu_(), "relu_.default", "writes in place", id="in place"),
        pytest.param(
            torch.sort, "sort.default", "equals and nan have another order in TVM's sort", id="denied in the table"
        ),
        pytest.param(torch.special.i1, "special_i1.default", "no converter", id="no converter"),
        pytest.param(lambda x: x.to(torch.complex64), "_to_copy.default", "TVM gets no torch.complex64", id="type"),
        pytest.param(lambda x: x[:0] + 1, "add.Tensor", "an empty tensor", id="empty"),
        pytest.param(lambda x: x[x.int()], "index.Tensor", "", id="index by tensors"),
        pytest.param(
            lambda x: x.int() ** x.int(),
            "pow.Tensor_Tensor",
            "an int to a power that is no small number",
            id="converter",
        ),
        pytest.param(torch.nonzero, "nonzero.default", "its size is known only when it runs", id="unbacked"),
        pytest.param(lambda x: x.to("meta") + 1, "add.Tensor", "TVM has no device meta here", id="device"),
    ],
)
def test_reason(function, name, wanted):
    assert reason(function, name, x) == wanted


def test_operators_left_to_aten():
    assert reason(torch.mm, "mm.default", x, x, settings=Settings(aten_ops=("mm",))) == "left to ATen by aten_ops"
    assert reason(torch.mm, "mm.default", x, x) == ""


def test_an_output_of_several_has_its_operators_reason():
    gm = make_fx(lambda x: torch.sort(x)[0])(x)
    (item,) = (node for node in gm.graph.nodes if node.target is operator.getitem and node.args[1] == 0)
    assert why_not(item, NO_OPTIONS) == "equals and nan have another order in TVM's sort"


def test_a_size_is_no_tensor():
    gm = make_fx(lambda x: x.new_zeros(x.shape[0]), tracing_mode="symbolic")(x)
    assert why_not(node_of(gm, "sym_size.int"), NO_OPTIONS) == "no tensor comes out"


def test_equal_nodes_are_tried_once(monkeypatch):
    tried = []
    monkeypatch.setattr(supported, "_trials", {})
    monkeypatch.setattr(supported, "_trial", lambda node: tried.append(node.name) or "")
    for rows in (3, 3, 4):
        reason(torch.relu, "relu.default", torch.randn(rows, 2))
    assert len(tried) == 2


def test_nothing_is_both_denied_and_lowered():
    assert not set(DENIED) & (set(CONVERTERS) | RESHAPED | SAME)


@pytest.mark.parametrize("name", sorted({*CONVERTERS, *RESHAPED, *SAME, *DENIED}))
def test_each_entry_names_an_operator(name):
    op, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, op, None) or getattr(torch.ops.prims, op)
    assert not overload or overload in packet.overloads()
