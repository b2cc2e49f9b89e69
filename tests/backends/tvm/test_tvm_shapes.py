"""Sizes as TVM expressions, and the origin of the symbols' values."""

import pytest
import sympy
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod

pytest.importorskip("tvm")

from tvm import sym, tirx

from backend_kwargs.backends.partitioned import Unsupported
from backend_kwargs.backends.tvm.lowering.node import ShapeSource, to_tvm, unread
from backend_kwargs.graphs.parts import symbols_of

a, b = sympy.Symbol("a", integer=True, positive=True), sympy.Symbol("b", integer=True, positive=True)


@pytest.mark.parametrize(
    "size",
    [a, a + 3, 2 * a * b, a**2 + 1, FloorDiv(a, 2), Mod(a + b, 3), Max(a, b, 4), Min(a, 5), FloorDiv(a - 1, 2) + 1],
    ids=str,
)
def test_an_expression_has_the_same_value(size):
    values = {a: 7, b: 5}
    given = to_tvm(size, {symbol: tirx.const(value, "int64") for symbol, value in values.items()})
    assert int(sym.Analyzer().simplify(given)) == int(size.subs(values))


def test_a_number_stays_one():
    assert to_tvm(3, {}) == to_tvm(sympy.Integer(3), {}) == 3


def test_an_unknown_expression_is_refused():
    with pytest.raises(Unsupported) as e:
        to_tvm(sympy.sqrt(a), {a: tirx.Var("a", "int64")})
    assert e.value.reason == "TVM cannot represent the size sqrt(a)"


def placeholders(function, *args):
    gm = make_fx(function, tracing_mode="symbolic")(*args)
    nodes = gm.graph.find_nodes(op="placeholder")
    return [node.name for node in nodes], [node.meta["val"] for node in nodes]


def test_a_tensors_own_size_is_read_off_it():
    names, values = placeholders(lambda x: x.relu(), torch.randn(6, 4))
    assert unread(names, values, symbols_of(values)) == []


def test_a_size_that_no_tensor_has_is_an_int_input():
    names, values = placeholders(lambda x, n: x + n, torch.randn(6, 4), 9)
    (source,) = unread(names, values, symbols_of(values[1:]))
    assert source.placeholder == names[1]
    assert source.read({names[0]: torch.randn(6, 4), names[1]: 12}) == 12


def test_a_size_is_solved_for_its_symbol():
    x = torch.randn(8, 3)
    source = ShapeSource(a, "x", 0, (a - 2) / 3)
    assert source.read({"x": x}) == 2


def test_twice_a_size_tells_it():
    """A symbol's value is found if the graph's only tensor has a multiple of it."""
    gm = make_fx(lambda x: torch.cat([x, x]).relu(), tracing_mode="symbolic")(torch.randn(6, 4))
    doubled = next(node.meta["val"] for node in gm.graph.nodes if "cat" in node.name)
    rows = symbols_of([doubled.shape[0]])
    (source,) = unread(["doubled"], [doubled], rows)
    assert source.read({"doubled": torch.randn(10, 4)}) == 5


def test_a_symbol_that_no_input_tells_is_refused():
    with pytest.raises(Unsupported) as e:
        unread(["x"], [torch.randn(3)], [a])
    assert e.value.reason == "no input determines the value of a"
