"""Frozen weights are separate for each module and never stale, and what may change stays an input."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.compile_fx import compile_fx
from torch.testing import assert_close

from backend_kwargs import make_backend
from backend_kwargs.backends.inductor.cudagraph_outputs import with_copies_of
from backend_kwargs.graphs.freezing import UNCACHED, compile_frozen
from tests.graphs.frozen import compiled, conv_net, graphs_compiled, mlp


@torch.no_grad()
def test_modules_that_share_code_keep_their_weights():
    """Two modules of equal shapes through one function are two graphs, each with its own results."""
    one, two, x = mlp(), mlp(), torch.randn(2, 8)
    call = compiled(lambda net, x: net(x))
    for net in (one, two, one):
        assert_close(call(net, x), net(x))
    assert graphs_compiled() == 2


@torch.no_grad()
def test_replaced_parameter_recompiles():
    """A replaced parameter takes effect at the next call."""
    net, x = mlp(), torch.randn(2, 8)
    call = compiled(net)
    call(x)
    net[0].weight = nn.Parameter(torch.randn(8, 8))
    assert_close(call(x), net(x))
    assert graphs_compiled() == 2


@torch.no_grad()
def test_replaced_data_recompiles():
    """`p.data = new` takes effect at the next call, even if the old memory could be reused."""
    net, x = mlp(), torch.randn(2, 8)
    call = compiled(net)
    call(x)
    for at, parameter in enumerate((net[0].weight, net[0].bias, net[0].weight)):
        parameter.data = torch.randn_like(parameter)
        assert_close(call(x), net(x))
        assert graphs_compiled() == at + 2
    call(x)
    assert graphs_compiled() == 4


@torch.no_grad()
def test_unchanged_module_compiles_once():
    """Further calls of the same module with other inputs compile nothing."""
    net = mlp()
    call = compiled(net)
    for _ in range(3):
        x = torch.randn(2, 8)
        assert_close(call(x), net(x))
    assert graphs_compiled() == 1


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = torch.ones(8)

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale + given


def static_input() -> torch.Tensor:
    given = torch.ones(8)
    torch._dynamo.mark_static_address(given, guard=False)
    return given


@pytest.mark.parametrize(
    ("make_given", "changed"),
    [
        pytest.param(static_input, lambda net, given: given, id="marked-static"),
        pytest.param(lambda: nn.Parameter(torch.ones(8)), lambda net, given: given, id="parameter-as-argument"),
        pytest.param(lambda: torch.ones(8), lambda net, given: net.scale, id="tensor-attribute"),
    ],
)
@torch.no_grad()
def test_what_is_no_module_parameter_stays_an_input(make_given, changed):
    """In-place changes of inputs and plain tensor attributes take effect, static or not."""
    net, given, x = Scaled(), make_given(), torch.randn(2, 8)
    call = compiled(net)
    assert_close(call(x, given), net(x, given))
    changed(net, given).mul_(3)
    assert_close(call(x, given), net(x, given))
    assert graphs_compiled() == 1


@torch.no_grad()
def test_running_statistics_are_updated():
    """Batch norm in training mode updates its buffers at each call, as in eager."""
    net = conv_net().train()
    eager, x = copy.deepcopy(net), torch.randn(4, 3, 8, 8)
    call = compiled(net)
    for _ in range(3):
        assert_close(call(x), eager(x))
    assert_close(net.state_dict(), eager.state_dict())
    assert graphs_compiled() == 1


class Cache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("cache", torch.zeros(4, 8))

    def forward(self, position: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        self.cache.index_copy_(0, position, self.linear(x))
        return self.cache.cumsum(0)


def steps(cache: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [cache(torch.tensor([i]), torch.randn(1, 8)) for i in range(4)]


@torch.no_grad()
def test_mutated_buffer_stays_an_input():
    """A cache in a buffer is written and read at each call."""
    net = Cache()
    eager = copy.deepcopy(net)
    assert_close(steps(compiled(net)), steps(eager))
    assert_close(net.cache, eager.cache)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 forgets on a CPU, before it traces, what is static")
@torch.no_grad()
def test_mutated_buffer_stays_static():
    """A buffer that the graph writes is static for Inductor, so CUDA graphs do not copy it."""
    seen = []

    def inner_compile(gm: torch.fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        seen.append((len(example_inputs), kwargs["static_input_idxs"]))
        return torch._inductor.compile_fx.compile_fx_inner(gm, example_inputs, **kwargs)

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        return compile_frozen(
            gm,
            example_inputs,
            lambda *args: compile_fx(*args, inner_compile=inner_compile, config_patches={"freezing": True, **UNCACHED}),
        )

    torch.compile(Cache(), backend=backend)(torch.tensor([0]), torch.randn(1, 8))
    assert seen == [(3, [0])]


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + y + self.total


class Writing(Reading):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return super().forward(x, y)


def overlapping_inputs(net: Reading) -> tuple[torch.Tensor, torch.Tensor]:
    memory = torch.ones(6, 4)
    return memory[:4], memory[2:]


def view_of_a_buffer(net: Reading) -> tuple[torch.Tensor, torch.Tensor]:
    return net.total.view(-1).view(4, 4), torch.ones(4, 4)


@pytest.mark.parametrize("make_inputs", [overlapping_inputs, view_of_a_buffer])
@pytest.mark.parametrize("make_net", [Reading, Writing])
@torch.no_grad()
def test_inputs_that_share_memory(make_net, make_inputs):
    """Inputs that overlap each other or a buffer give eager's results, whether written to or not."""
    net = make_net()
    eager = copy.deepcopy(net)
    assert_close(compiled(net)(*make_inputs(net)), eager(*make_inputs(eager)))
    assert_close(net.total, eager.total)


class Returning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x @ self.weight, self.weight, self.weight.t()


@torch.no_grad()
def test_returned_parameter_is_the_parameter():
    """A returned parameter, or a view of one, shares its memory, as in eager."""
    net, x = Returning(), torch.randn(2, 4)
    product, weight, view = compiled(net)(x)
    assert weight is net.weight
    assert view.data_ptr() == net.weight.data_ptr()
    assert_close((product, view), (x @ net.weight, net.weight.t()))


class Folded(nn.Module):
    """A model that returns values computed only from parameters, which freezing folds into constants."""

    def __init__(self, outputs):
        super().__init__()
        self.layer, self.scale, self.outputs = nn.Linear(8, 8), nn.Parameter(torch.ones(2, 4)), outputs
        self.log_scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("steps", torch.arange(3))

    def forward(self, x):
        return self.layer(x), *self.outputs(self, x)


OUTPUTS = {
    "constant": lambda net, x: (net.scale.exp(), net.scale.exp().view(-1)[3:]),
    "two": lambda net, x: (net.scale.exp(), net.scale.exp().t()),
    "parts of a constant": lambda net, x: net.scale.exp().split(1),
    "one twice": lambda net, x: (one := net.scale.exp(), one, one.t()),
    "of no dimension": lambda net, x: (net.log_scale.exp(), net.log_scale.exp(), net.log_scale.clone()),
    "views of no dimension": lambda net, x: (net.log_scale.exp()[None], net.log_scale.exp().expand(2, 3)),
    "of other types": lambda net, x: (net.steps.sum(), net.steps > 1, net.log_scale.double(), net.steps.argmax()),
    "of an input's size": lambda net, x: (net.log_scale.exp().expand_as(x), net.scale.exp()[: x.shape[0]].clone()),
    "of an input's size alone": lambda net, x: (torch.ones_like(x[0, 0]), x.new_full((), 2.0), torch.zeros_like(x)),
    "literals": lambda net, x: (torch.tensor(2.0), torch.full((), 3), torch.tensor([1.0, 2.0])),
    "no-ops": lambda net, x: (net.scale * 1, net.scale + 0, net.log_scale + 0, net.scale.clone()),
    "parameters": lambda net, x: (net.scale, net.scale.t(), net.log_scale, net.scale[1:], net.scale.float()),
}


def memory_of(outputs: Any) -> list[int]:
    return [out.untyped_storage().data_ptr() for out in outputs]


EVERYWHERE = ("of no dimension", "views of no dimension", "one twice", "of an input's size", "parameters")


@pytest.mark.parametrize(
    ("names", "options", "dynamic"),
    [
        pytest.param(tuple(OUTPUTS), {}, None, id="in Python"),
        pytest.param(EVERYWHERE, {"cpp_wrapper": True}, None, id="in C++"),
        pytest.param(EVERYWHERE, {}, True, id="of dynamic sizes"),
    ],
)
@torch.no_grad()
def test_no_result_shares_its_memory_with_a_constant(names, options, dynamic):
    """A constant result is a copy at each call; results that are parameters, or views of them, stay so."""

    def outputs(net, x):
        return [out for name in names for out in OUTPUTS[name](net, x)]

    net, x = Folded(outputs).eval(), torch.randn(2, 8)
    serve = torch.compile(net, backend=make_backend("tmpl-inductor:freezing", options), dynamic=dynamic)
    eager = net(x)
    expected, wanted = tuple(out.clone() for out in eager), memory_of(eager)
    own = {*memory_of(net.parameters()), *memory_of(net.buffers())}
    results, before = [], set()
    for _ in range(3):
        results.append(serve(x))
        assert_close(results[-1], expected)
        places = memory_of(results[-1])
        assert [place in own for place in places] == [place in own for place in wanted]
        assert all(wanted[i] == wanted[places.index(place)] for i, place in enumerate(places))
        new = {*places} - own
        assert new.isdisjoint(before)
        before |= new
        for out, place in zip(results[-1], places, strict=True):
            if place in new and out._is_view() is False and out.dtype != torch.bool:
                out.fill_(-1)


def test_a_result_lives_as_long_as_the_graph_of_its_copy():
    """Beyond its own backward pass, as CUDA graphs need it, and no longer: no cycle of references holds it."""
    constant, originals = torch.ones(3, requires_grad=True), []

    def results():
        outputs = [constant * 2, constant.view(3)]
        originals.append(weakref.ref(outputs[1]))
        return outputs

    _, copied = with_copies_of(results, [constant])()
    copied.sum().backward()
    assert originals[0]() is not None
    del copied
    assert originals[0]() is None


def test_constants_that_share_memory_still_do():
    """A constant and a view of it share memory within a call's results, but not across calls."""
    constant, other = torch.ones(2, 4), torch.ones(2)
    call = with_copies_of(lambda: [constant, constant.view(-1)[3:], other, None], [constant])
    whole, part, same, none = call()
    whole.fill_(-1)
    assert part.eq(-1).all()
    assert (same is other, none) == (True, None)
    assert all(out.eq(1).all() for out in call()[:3])
