"""The keys of kept graphs, and graphs that are not kept since their key does not say all."""

import pytest
import torch

import backend_kwargs as bk
from backend_kwargs.bundles.disk import contents
from backend_kwargs.bundles.disk.place import GraphPart
from backend_kwargs.bundles.graphs import inlined, key_of


@pytest.fixture(scope="module")
def library():
    """Operators of which the first two have a body that is traced."""
    made = torch.library.Library("backend_kwargs_test_keys", "DEF")
    for name, key in (("composite", "CompositeImplicitAutograd"), ("autograd", "Autograd"), ("opaque", "CPU")):
        made.define(f"{name}(Tensor x) -> Tensor")
        made.impl(name, torch.sin, key)
    made.impl("opaque", torch.empty_like, "Meta")
    yield torch.ops.backend_kwargs_test_keys
    made._destroy()


def graph_of(*functions):
    """Return a graph that calls each of the functions."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    for function in functions:
        x = graph.call_function(function, (x,))
    graph.output(x)
    return torch.fx.GraphModule({}, graph)


class Applies(torch.nn.Module):
    """`function` applied to the input."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def user_function(x):
    return x * 2


@pytest.mark.parametrize("name", ["composite", "autograd"])
def test_an_operator_whose_body_is_traced_is_inlined(library, name):
    assert inlined(graph_of(torch.sin, getattr(library, name))) == f"backend_kwargs_test_keys.{name}"
    assert inlined(graph_of(getattr(library, name).default)) == f"backend_kwargs_test_keys.{name}.default"


def test_an_operator_that_is_called_is_not_inlined(library):
    functions = library.opaque, torch.sin, torch.nn.functional.relu, torch.ops.aten.cos, torch.ops.aten.cos.default
    assert inlined(graph_of(*functions)) is None


def test_an_operator_with_a_decomposition_is_inlined():
    with torch.library._scoped_library("backend_kwargs_test_decomposed", "DEF"):

        @torch.library.triton_op("backend_kwargs_test_decomposed::f", mutates_args=())
        def decomposed(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @torch.library.custom_op("backend_kwargs_test_decomposed::g", mutates_args=())
        def custom(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        operators = torch.ops.backend_kwargs_test_decomposed
        assert inlined(graph_of(operators.f.default)) == "backend_kwargs_test_decomposed.f.default"
        assert inlined(graph_of(operators.g.default)) is None


def test_a_function_in_the_graph_is_inlined():
    assert inlined(graph_of(user_function)) == "user_function"


def test_a_function_in_a_subgraph_is_inlined():
    outer = graph_of(torch.sin)
    outer.add_submodule("body", graph_of(user_function))
    assert inlined(outer) == "user_function"


def test_an_operator_that_changed_is_not_loaded(tmp_path):
    """A later release of a library has another body: the graph was not kept, and the note says why."""
    name = "backend_kwargs_test_changed"
    library = torch.library.Library(name, "DEF")
    library.define("f(Tensor x) -> Tensor")
    x = torch.ones(4)
    with torch.library._scoped_library(name, "IMPL") as first:
        first.impl("f", lambda x: x * 2, "CompositeImplicitAutograd")
        built = bk.CompiledModule().build(Applies(getattr(torch.ops, name).f), [x])
        assert f"a graph's code is not in the bundle: its code may contain that of {name}.f" in built.describe()
        built.save(tmp_path / "bundle")
    with torch.library._scoped_library(name, "IMPL") as later:
        later.impl("f", lambda x: x * 3, "CompositeImplicitAutograd")
        torch._dynamo.reset()
        loaded = bk.CompiledModule.load(tmp_path / "bundle", Applies(getattr(torch.ops, name).f), trust=True)
        loaded.deploy()
        torch.testing.assert_close(loaded(x), 3 * x)
    library._destroy()


@pytest.mark.parametrize(
    ("change", "undo"),
    [
        pytest.param(
            lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32), id="dtype"
        ),
        pytest.param(lambda: torch.set_default_device("meta"), lambda: torch.set_default_device(None), id="device"),
    ],
)
def test_a_default_is_part_of_the_key(change, undo):
    gm, inputs = graph_of(torch.sin), [torch.ones(4)]
    before = key_of(gm, inputs)
    change()
    try:
        assert key_of(gm, inputs) != before
    finally:
        undo()
    assert key_of(gm, inputs) == before


def test_a_constant_of_a_subgraph_is_part_of_the_key():
    def outer(constant):
        body = torch.fx.Graph()
        held = body.get_attr("held")
        body.output(body.call_function(torch.mul, (body.placeholder("x"), held)))
        inner = torch.fx.GraphModule({"held": torch.tensor(constant)}, body)
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        graph.output(graph.call_function(torch.sin, (x,), {"out": graph.get_attr("body")}))
        return torch.fx.GraphModule({"body": inner}, graph)

    inputs = [torch.ones(4)]
    assert key_of(outer(2.0), inputs) == key_of(outer(2.0), inputs) != key_of(outer(3.0), inputs)


@pytest.mark.parametrize(("version", "known"), [(1, True), (2, False)])
def test_a_decision_on_places_of_another_version(version, known):
    """A bundle's decision is left if it names places as another version of a rewrite has them: no graph has these."""
    options = {"rewrites": [f"convolution@{version}:{'0' * 16}"]}
    kept = contents._graph(GraphPart(key="0" * 64, winner="convolution", options=options), None).decision
    assert kept == ({"winner": "convolution", "options": options} if known else None)
