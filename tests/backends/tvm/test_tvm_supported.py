"""The nodes that TVM may compile, and the reason for each other node."""

import operator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("tvm")

from torch.nn import functional

from backend_kwargs.backends.partitioned import why_not, why_unfit
from backend_kwargs.backends.tvm.lowering.graph import CONVERTERS, RESHAPED, SAME
from backend_kwargs.backends.tvm.part_compiler import DENIED, REASONS, TVM, decompositions
from backend_kwargs.backends.tvm.settings import BECOMES, TVMOptions
from backend_kwargs.graphs.parts import op_name
from tests.backends.tvm.lowered import node_of

NO_OPTIONS = TVMOptions(aten_ops=())
x = torch.randn(4, 4)


def reason(function, name, *args, settings=NO_OPTIONS, mode="fake"):
    return why_not(node_of(make_fx(function, tracing_mode=mode)(*args), name), TVM(settings))


@pytest.mark.parametrize(
    ("function", "name", "wanted"),
    [
        pytest.param(torch.relu, "relu.default", "", id="supported"),
        pytest.param(lambda x: x.max(1), "max.dim", "", id="several outputs"),
        pytest.param(torch.rand_like, "rand_like.default", "draws random numbers", id="random"),
        pytest.param(lambda x: x.relu_(), "relu_.default", "writes in place", id="in place"),
        pytest.param(
            torch.sort, "sort.default", "TVM's sort orders equal elements and nan differently", id="denied in the table"
        ),
        pytest.param(torch.special.i1, "special_i1.default", "no converter", id="no converter"),
        pytest.param(
            lambda x: x.to(torch.complex64), "_to_copy.default", "TVM is not used for torch.complex64", id="type"
        ),
        pytest.param(lambda x: x[:0] + 1, "add.Tensor", "an empty tensor", id="empty"),
        pytest.param(
            lambda x: x[x.int()], "index.Tensor", "eager raises if an index is out of bounds", id="index by tensors"
        ),
        pytest.param(
            lambda x: x.int() % x.int(), "remainder.Tensor", "an int divided by what may be zero", id="division"
        ),
        pytest.param(
            lambda x: x.int() ** x.int(),
            "pow.Tensor_Tensor",
            "an int to a power that is no small number",
            id="converter",
        ),
        pytest.param(torch.nonzero, "nonzero.default", "its size is known only at run time", id="unbacked"),
        pytest.param(lambda x: x.to("meta") + 1, "add.Tensor", "TVM has no device meta here", id="device"),
    ],
)
def test_reason(function, name, wanted):
    assert reason(function, name, x) == wanted


def test_operators_left_to_aten():
    assert reason(torch.mm, "mm.default", x, x, settings=TVMOptions(aten_ops=("mm",))) == "left to ATen by aten_ops"
    assert reason(torch.mm, "mm.default", x, x) == ""


@pytest.mark.parametrize(("device", "wanted"), [("cpu", ""), ("cuda", "left to ATen by aten_ops")])
@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        pytest.param(torch.mm, [(4, 4)] * 2, id="mm"),
        pytest.param(torch.addmm, [(4, 4)] * 3, id="addmm"),
        pytest.param(torch.bmm, [(2, 4, 4)] * 2, id="bmm"),
        pytest.param(torch.conv2d, [(1, 4, 8, 8), (4, 4, 3, 3)], id="convolution"),
    ],
)
def test_what_cudas_libraries_do_best_is_left_to_aten_there(function, shapes, device, wanted):
    """With aten_ops=None, CUDA leaves products to ATen; needs no GPU."""
    assert reason_on(device, function, *shapes, settings=TVMOptions()) == wanted
    assert reason_on(device, function, *shapes) == ""


TAKEN_APART = {
    "linear": (lambda x: functional.linear(x, x), lambda x: functional.linear(x, x, x[0])),
    "matmul": (lambda x: x @ x, lambda x: x.expand(2, 4, 4) @ x.expand(2, 4, 4)),
    "softmax": (lambda x: x.softmax(0),),
    "log_softmax": (lambda x: x.log_softmax(0),),
    "layer_norm": (lambda x: functional.layer_norm(x, (4,)),),
    "group_norm": (lambda x: functional.group_norm(x, 2),),
    "conv1d": (lambda x: functional.conv1d(x[None], x[:, :, None]),),
    "conv2d": (lambda x: functional.conv2d(x[None, None], x[None, None]),),
    "conv3d": (lambda x: functional.conv3d(x[None, None, None], x[None, None, None]),),
    "conv_transpose2d": (lambda x: functional.conv_transpose2d(x[None, None], x[None, None]),),
}


@pytest.mark.parametrize(("op", "becomes"), BECOMES.items(), ids=BECOMES)
def test_what_is_named_in_place_of_an_operator_comes_to_tvm(op, becomes):
    found = set()
    for function in TAKEN_APART[op]:
        gm = make_fx(function, decompositions(becomes), tracing_mode="fake")(x)
        found |= {op_name(node) for node in gm.graph.nodes if node.op == "call_function"}
    assert op not in found
    assert set(becomes) <= found


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_attention_on_cuda_is_left_to_aten(name):
    function = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention").default
    more = () if name == "flash" else (None, False)
    found = reason_on("cuda", lambda *qkv: function(*qkv, *more), *[(1, 4, 8, 8)] * 3, settings=TVMOptions())
    assert found == "left to ATen by aten_ops"


def reason_on(device, function, *shapes, settings=NO_OPTIONS):
    """Return the reason for the first operator of a function of tensors on a device that need not exist."""
    with FakeTensorMode():
        gm = make_fx(function)(*(torch.empty(shape, device=device) for shape in shapes))
    return why_not(next(node for node in gm.graph.nodes if node.op == "call_function"), TVM(settings))


def test_an_output_of_several_has_its_operators_reason():
    gm = make_fx(lambda x: torch.sort(x)[0])(x)
    (item,) = (node for node in gm.graph.nodes if node.target is operator.getitem and node.args[1] == 0)
    assert why_not(item, TVM(NO_OPTIONS)) == "TVM's sort orders equal elements and nan differently"


def test_a_symbol_that_is_no_size():
    """A node whose only size is a product of two symbols, for each of which its part has an input."""
    assert reason(lambda x: x.reshape(-1).relu(), "relu.default", torch.randn(4, 6), mode="symbolic") == ""


def test_equal_nodes_are_converted_once(monkeypatch):
    """A node is converted when it is asked for, and not again in its part; one of other sizes is another kernel."""
    converted, relu = [], CONVERTERS["relu"]
    monkeypatch.setitem(CONVERTERS, "relu", lambda node, x: converted.append(node) or relu(node, x))
    gm = make_fx(lambda x: x.relu().relu() + x.flip(0).relu()[:1].relu(), decompositions(), tracing_mode="fake")(x)
    compiler = TVM(NO_OPTIONS)
    assert {why_not(node, compiler) for node in gm.graph.nodes if node.op == "call_function"} == {""}
    compiler.compile(gm)
    assert len(converted) == 2


def test_nothing_is_both_denied_and_lowered():
    assert not set(DENIED) & (set(CONVERTERS) | RESHAPED | SAME)


@pytest.mark.parametrize("name", sorted({*CONVERTERS, *RESHAPED, *SAME, *DENIED}))
def test_each_entry_names_an_operator(name):
    op, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, op, None) or getattr(torch.ops.prims, op)
    assert not overload or overload in packet.overloads()


def may_be_left(op, table):
    """Whether an operator of tensors can be in a graph: neither `table` nor torch itself always decomposes it."""
    schema = op._schema
    if schema.is_mutable or not any("Tensor" in str(each.type) for each in (*schema.arguments, *schema.returns)):
        return False
    return op not in table and not op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def test_each_lowered_operator_may_be_in_a_graph():
    """No entry is for an operator that the decompositions always remove."""
    table, never = decompositions(), set()
    for name in {*CONVERTERS, *RESHAPED, *SAME}:
        op, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, op, None) or getattr(torch.ops.prims, op)
        names = [overload] if overload else packet.overloads()
        if not any(may_be_left(getattr(packet, each), table) for each in names):
            never.add(name)
    assert never == set()


@pytest.mark.parametrize(
    ("rows", "wanted"), [pytest.param(500, "", id="small"), pytest.param(501, "left to ATen by aten_ops", id="large")]
)
def test_large_products_on_a_cpu_are_left_to_aten(rows, wanted):
    """Beyond a million operations oneDNN is better; aten_ops=() keeps them."""
    shapes = [(rows, 10), (10, 100)]
    assert reason_on("cpu", torch.mm, *shapes, settings=TVMOptions()) == wanted
    assert reason_on("cpu", torch.mm, *shapes) == ""


@pytest.mark.parametrize(
    ("channels", "wanted"), [pytest.param(6, "", id="small"), pytest.param(7, "left to ATen by aten_ops", id="large")]
)
def test_large_convolutions_on_a_cpu_are_left_to_aten(channels, wanted):
    """Beyond a quarter of a million operations."""
    shapes = [(1, channels, 50, 50), (1, channels, 3, 3)]  # 6 channels: 248,832 operations
    assert reason_on("cpu", torch.conv2d, *shapes, settings=TVMOptions()) == wanted


def value_of(shape, dtype=torch.float32, device="cpu"):
    with FakeTensorMode():
        return torch.empty(shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        pytest.param([value_of(3), value_of((2, 3), torch.bfloat16), 3, 0, None, "x"], "", id="plain"),
        pytest.param([value_of(3, torch.complex64)], "TVM is not used for torch.complex64", id="dtype"),
        pytest.param(
            [value_of(3, torch.float8_e5m2), value_of(3, torch.complex64), value_of(3)],
            "TVM is not used for torch.complex64, torch.float8_e5m2",
            id="dtypes",
        ),
        pytest.param([value_of((2, 0))], "an empty tensor", id="empty"),
        pytest.param([value_of(()), value_of(1)], "", id="scalar"),
        pytest.param([torch.ones(2, 2).to_sparse()], "not a dense tensor", id="sparse"),
        pytest.param([value_of(3, device="meta")], "TVM has no device meta here", id="device"),
        pytest.param([value_of(3, device="cuda"), value_of(3)], "on several devices", id="two devices"),
        pytest.param([value_of(3, device="cuda:0"), value_of(3, device="cuda:0")], "", id="one device"),
    ],
)
def test_which_values_tvm_takes(values, why):
    """Dense tensors of one device, with elements, of a dtype that both know."""
    assert why_unfit(values, TVM(NO_OPTIONS)) == why


def test_which_names_are_denied():
    """An overload has the reason of its operator, unless it has one of its own."""
    assert len(DENIED) == sum(len(names.split()) for names in REASONS.values())
    assert reason(lambda x: x.view(torch.int32), "view.dtype", x) == "reads memory by strides"
    assert reason(lambda x: x.view(2, 8), "view.default", x) == ""


@pytest.mark.parametrize(
    ("aten_ops", "wanted"),
    [
        pytest.param((), "", id="none"),
        pytest.param(("relu",), "left to ATen by aten_ops", id="operator"),
        pytest.param(("relu.default",), "left to ATen by aten_ops", id="overload"),
        pytest.param(("mm",), "", id="another"),
    ],
)
def test_the_users_list_decides(aten_ops, wanted):
    """It names operators or overloads, in place of the table."""
    assert reason(torch.relu, "relu.default", x, settings=TVMOptions(aten_ops=aten_ops)) == wanted
