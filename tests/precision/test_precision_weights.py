"""Weights converted to a lower precision: they follow their parameters, and the module stays as it is."""

import copy
import ctypes
import operator

import pytest
import torch
from torch import nn

import backend_kwargs as bk
from tests.precision.precision_nets import (
    BOUND,
    INT8,
    MARKS,
    code,
    error,
    exact_int8,
    in_precision,
    net,
    rows,
    torchao,
    used,
)

pytestmark = MARKS


@pytest.mark.parametrize("precision", ["bf16", *INT8])
def test_weights_follow_their_parameter(precision):
    """A parameter changed in place, replaced or given other memory takes effect, if possible without a compile."""
    model, x = net(), rows()
    compiled = in_precision(model, precision)
    with torch.no_grad():
        for change in (
            lambda: model[0].weight.mul_(-3),
            lambda: model.load_state_dict({name: value / 2 for name, value in model.state_dict().items()}),
            lambda: setattr(model[2].weight, "data", torch.randn(32, 96)),
            lambda: setattr(model[0], "weight", nn.Parameter(torch.randn(96, 64))),
        ):
            assert error(compiled(x), model, x) < BOUND
            change()
        assert error(compiled(x), model, x) < BOUND
    # A parameter in place of a quantised one compiles again, and nothing else does.
    assert bk.report(compiled).graphs[-1].compile_id == ("0/0" if precision == "bf16" else "0/1")


@pytest.mark.parametrize("precision", ["bf16", *INT8])
def test_weights_follow_a_fused_optimizer(precision):
    """A step of a fused optimizer, which changes no version, takes effect."""
    model, x = net(), rows()
    compiled = in_precision(model, precision)
    with torch.no_grad():
        compiled(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    model(x).square().sum().backward()
    optimizer.step()
    with torch.no_grad():
        assert error(compiled(x), model, x) < BOUND


@pytest.mark.parametrize("precision", INT8)
def test_frozen_quantised_weights_follow(precision):
    """With freezing a changed weight is compiled again, since it is a constant."""
    model, x, loose = net(), rows(), 0.5  # without VNNI, oneDNN's sums of int8 saturate in Inductor's frozen products
    compiled = in_precision(model, precision, loose, freezing=True)
    with torch.no_grad():
        compiled(x)
        model[0].weight.mul_(-3)
        assert error(compiled(x), model, x) < loose
    assert [graph.compile_id for graph in bk.report(compiled).graphs] == ["0/1"]  # the former code is freed


def by_view(weight):
    weight.data.view(-1)[:] += 1


DATA_WRITES = {
    "add": lambda weight: weight.data.add_(torch.randn(96, 64)),
    "operator": lambda weight: operator.iadd(weight.data, 0.5),
    "scale": lambda weight: weight.data.mul_(2),
    "copy": lambda weight: weight.data.copy_(torch.randn(96, 64)),
    "view": by_view,
    "replaced": lambda weight: setattr(weight, "data", torch.randn(96, 64)),
    "set": lambda weight: weight.data.set_(torch.randn(96, 64)),
    "set itself": lambda weight: weight.set_(torch.randn(96, 64)),
    "numpy": lambda weight: operator.iadd(weight.detach().numpy(), 1),
}


@pytest.mark.parametrize("precision", ["bf16", *INT8])
@torch.no_grad()
def test_writes_that_no_version_counts(precision):
    """A write through `.data` takes effect at the next call, as with plain code."""
    model, x, errors = net(), rows(), {}
    compiled = in_precision(model, precision)
    compiled(x)
    for name, write in [*DATA_WRITES.items()] * 2:
        write(model[0].weight)
        errors[name] = max(error(compiled(x), model, x), errors.get(name, 0.0))
    assert {name: each for name, each in errors.items() if not each < BOUND} == {}


def test_casts_keep_no_weight():
    """A cast weight is no tensor of the graph's own, so it takes no memory and cannot be stale."""
    model, x = net(), rows()
    compiled = in_precision(model, "bf16")
    with torch.no_grad():
        compiled(x)
    assert used(compiled).nbytes == 0
    assert "torch.bfloat16" in code(compiled)


@torchao
def test_a_write_between_the_samples_is_unseen():
    """A quantised weight is compared at some of its values: a `.data` write elsewhere waits for one that is counted."""
    layer, x = nn.Linear(512, 512), torch.randn(8, 512)
    compiled = in_precision(layer, "int8-weight")
    with torch.no_grad():
        before = compiled(x)
        layer.weight.data[1, 1:9] += 1
        assert torch.equal(compiled(x), before)
        layer.weight.mul_(1)
        assert error(compiled(x), layer, x) < BOUND


@pytest.mark.parametrize("precision", ["bf16", *INT8])
def test_the_module_stays_as_it_is(precision):
    """Parameters keep identity, type, values and hooks; the state dict has the same keys."""
    model, x = net(), rows()
    parameters, state = list(model.parameters()), {name: v.clone() for name, v in model.state_dict().items()}
    with torch.no_grad():
        in_precision(model, precision)(x)
    assert [*map(id, parameters)] == [*map(id, model.parameters())]
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert type(model[0]) is nn.Linear


@exact_int8
@torchao
def test_weights_are_made_once():
    """Graphs of one model share converted weights, and a report shows their size."""
    from backend_kwargs.precision import quantised as weights

    model = net()
    compiled = torch.compile(
        model, backend=bk.make_backend("tmpl-inductor", precision="int8-dynamic", max_error=BOUND), dynamic=False
    )
    with torch.no_grad():
        compiled(rows(4))
        (first,) = [each for key, each in weights._made.items() if key[0] == id(model[0].weight)]
        compiled(rows(5))
        (again,) = [each for key, each in weights._made.items() if key[0] == id(model[0].weight)]
    assert first is again
    sizes = [graph.precision.nbytes for graph in bk.report(compiled).graphs]
    assert len(sizes) == 2
    assert sizes[0] == sizes[1]
    assert 64 * 96 + 96 * 32 < sizes[0] < 2 * (64 * 96 + 96 * 32)


def test_another_thread_reads_one_state_of_a_weight(monkeypatch):
    """Whenever a weight changes, another thread finds the memory that it reads kept alive."""
    from backend_kwargs.precision import quantised as weights

    def set_and_look(weight, name, value):
        object.__setattr__(weight, name, value)
        start, words = weight.seen.storage.data_ptr(), weight.seen.words
        assert ctypes.addressof(ctypes.c_char.from_buffer(words.obj)) == start

    parameter = nn.Parameter(torch.randn(96, 64))
    weight = weights.weight_of(parameter, "bf16", torch.Tensor.bfloat16)
    monkeypatch.setattr(weights.Weight, "__setattr__", set_and_look)
    parameter.data = torch.randn(96, 64)
    weight.follow(parameter)
    assert torch.equal(weight.tensor, parameter.bfloat16())


@torchao
def test_two_modules_of_one_code_have_their_own_weights():
    """One compiled function called with two modules uses each one's weights."""
    first, second, x = net(), net(), rows()
    second[0].weight.data.mul_(-2)
    compiled = in_precision(lambda model, x: model(x), "int8-weight")
    with torch.no_grad():
        assert error(compiled(first, x), first, x) < BOUND
        assert error(compiled(second, x), second, x) < BOUND
        assert error(compiled(first, x), first, x) < BOUND


class Decaying(nn.Module):
    """Reads a weight and a cache before and after it writes them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("cache", torch.zeros(16, 64))

    def forward(self, x, at):
        before = self.linear(x)
        self.linear.weight.mul_(0.5)
        self.cache.index_copy_(0, at, before)
        return before + self.linear(x), torch.softmax(x @ self.cache.t(), -1) @ self.cache


@pytest.mark.parametrize("freezing", [False, True], ids=["unfrozen", "frozen"])
@torch.no_grad()
def test_a_weight_that_the_graph_writes_is_not_converted_once(freezing):
    """A weight or a cache that the graph writes is cast where it is used, so the error stays within the bound."""
    model = Decaying()
    eager, compiled = copy.deepcopy(model), in_precision(model, "bf16", freezing=freezing)
    for at in range(3):
        given = rows()[:1], torch.tensor([at])
        for got, wanted in zip(compiled(*given), eager(*given), strict=True):
            assert (got - wanted).norm() < BOUND * wanted.norm()
    (graph,) = bk.report(compiled).graphs
    assert (graph.precision.products, graph.precision.reason) == (4, "")
