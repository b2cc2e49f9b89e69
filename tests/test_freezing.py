"""Frozen weights: part of the code, separate for each module, and never stale."""

import copy
import operator
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor

from backend_kwargs import BackendKwargsWarning, make_backend
from backend_kwargs.compilers import freezing
from backend_kwargs.compilers.freezing import UNCACHED, compile_frozen, reattach_parameters
from backend_kwargs.compilers.inductor.cudagraph_outputs import with_copies_of
from backend_kwargs.errors import warn_once

freezing_backend = make_backend("tmpl-inductor:freezing")


def compiled(fn: Any, **kwargs: Any) -> Any:
    return torch.compile(fn, backend=freezing_backend, **kwargs)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def graphs_compiled() -> int:
    return counters["stats"]["unique_graphs"]


def code_and_result(fn: Any, *args: Any) -> tuple[list[str], Any]:
    result, codes = run_and_get_code(compiled(fn), *args)
    return codes, result


def inputs_of(code: str) -> int:
    """Count the inputs that the generated code unpacks."""
    unpacking = re.search(r"^\s*((?:\w+, )*\w+),? = args$", code, re.MULTILINE)
    return unpacking.group(1).count(",") + 1 if unpacking else 0


def conv_net() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    net[1].running_mean.uniform_()
    net[1].running_var.uniform_(0.5, 2)
    return net


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()


@torch.no_grad()
def test_batch_norm_is_folded():
    """A convolution, its batch norm and its ReLU become one call with one input."""
    net, x = conv_net(), torch.randn(1, 3, 8, 8)
    (code,), result = code_and_result(net, x)
    assert_close(result, net(x))
    assert inputs_of(code) == 1
    assert len(re.findall(r"= torch.ops.mkldnn._convolution_pointwise.default\(.*'relu'", code)) == 1
    assert "rsqrt" not in code


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_parameters_are_constants(mode):
    """Without gradients the generated code has only the real input."""
    net, x = mlp(), torch.randn(2, 8)
    with mode():
        (code,), result = code_and_result(net, x)
        assert_close(result, net(x))
    assert inputs_of(code) == 1


@torch.no_grad()
def test_tied_parameters_are_constants():
    """Parameters that share memory and are only read are frozen like others."""
    net, x = mlp(), torch.randn(2, 8)
    net[2].weight = nn.Parameter(net[0].weight.detach())
    (code,), result = code_and_result(net, x)
    assert_close(result, net(x))
    assert inputs_of(code) == 1


def test_under_grad_gradients_flow():
    """With gradients enabled a warning says that nothing is frozen, and training works as in eager."""
    net, x = mlp(), torch.randn(2, 8)
    warn_once.cache_clear()
    with pytest.warns(BackendKwargsWarning) as warned:
        compiled(net)(x).sum().backward()
    assert [str(warning.message) for warning in warned] == [
        "Option 'freezing' is inert while gradients are recorded: call the model under torch.no_grad()."
    ]
    got = [p.grad for p in net.parameters()]
    net.zero_grad()
    net(x).sum().backward()
    assert_close(got, [p.grad for p in net.parameters()])


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


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, self.one, self.two, (x,))


@pytest.mark.parametrize(
    ("make_net", "x"),
    [
        pytest.param(Tied, torch.arange(4), id="tied-weights"),
        pytest.param(Shared, torch.ones(2, 8), id="shared-module"),
        pytest.param(Branches, torch.ones(2, 8), id="cond"),
    ],
)
@torch.no_grad()
def test_numbers(make_net, x):
    """Weights used in several places, or in a branch, give eager's results in one graph."""
    net = make_net()
    assert_close(compiled(net, fullgraph=True)(x), net(x))


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

    def forward(self, x):
        return self.layer(x), *self.outputs(self.scale)


@pytest.mark.parametrize("options", [{}, {"cpp_wrapper": True}], ids=["python", "cpp_wrapper"])
@pytest.mark.parametrize(
    "outputs",
    [
        pytest.param(lambda scale: (scale.exp(),), id="constant"),
        pytest.param(lambda scale: (scale.exp().view(-1)[3:],), id="view of a constant"),
        pytest.param(lambda scale: (scale.exp(), scale.exp().t()), id="two"),
        pytest.param(lambda scale: scale.exp().split(1), id="parts of a constant"),
    ],
)
@torch.no_grad()
def test_a_callers_edit_of_a_constant_changes_no_later_call(outputs, options):
    """A constant result is returned as a copy."""
    net, x = Folded(outputs).eval(), torch.randn(2, 8)
    serve = torch.compile(net, backend=make_backend("tmpl-inductor:freezing", options))
    expected = [out.clone() for out in net(x)]
    for _ in range(3):
        for out, wanted in zip(serve(x), expected, strict=True):
            assert_close(out, wanted)
            out.fill_(-1)
    assert_close(net(x), tuple(expected))  # the weights are as they were


def test_constants_that_share_memory_still_do():
    """A constant and a view of it share memory within a call's results, but not across calls."""
    constant, other = torch.ones(2, 4), torch.ones(2)
    call = with_copies_of(lambda: [constant, constant.view(-1)[3:], other, None], [constant])
    whole, part, same, none = call()
    whole.fill_(-1)
    assert part.eq(-1).all()
    assert (same is other, none) == (True, None)
    assert all(out.eq(1).all() for out in call()[:3])


@torch.no_grad()
def test_dynamic_shapes():
    """One graph serves several batch sizes."""
    net = mlp()
    call = compiled(net, dynamic=True)
    for batch in (2, 3, 5):
        x = torch.randn(batch, 8)
        assert_close(call(x), net(x))
    assert graphs_compiled() == 1


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        torch._dynamo.graph_break()
        return self.after(x)


@torch.no_grad()
def test_each_side_of_a_graph_break_is_frozen():
    """Both graphs have one input."""
    net, x = Broken(), torch.randn(2, 8)
    codes, result = code_and_result(net, x)
    assert_close(result, net(x))
    assert [inputs_of(code) for code in codes] == [1, 1]


@torch.no_grad()
def test_autocast():
    """Under autocast weights are cast once, at compile time."""
    net, x = mlp(), torch.randn(2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (code,), result = code_and_result(net, x)
        assert_close(result, net(x), atol=2e-2, rtol=2e-2)
    assert inputs_of(code) == 1


@torch.no_grad()
def test_parameter_subclass_stays_an_input():
    """A parameter of a tensor subclass remains an input; the other one is frozen."""
    net, x = nn.Linear(8, 8), torch.randn(2, 8)
    net.weight = nn.Parameter(TwoTensor(torch.ones(8, 8), torch.ones(8, 8)), requires_grad=False)
    left = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        _, kept = reattach_parameters(gm, example_inputs)
        left.extend(type(example_inputs[i]) for i in kept)
        return freezing_backend(gm, example_inputs)

    assert_close(torch.compile(net, backend=backend)(x).a, net(x).a)
    assert sorted(left, key=str) == [torch.Tensor, TwoTensor]


@torch.no_grad()
def test_modules_that_differ_in_a_scalar_do_not_share_cached_code():
    """A number of one module that is written into the code is never used for another module."""

    class Multiplied(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(factor))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    with fresh_cache():
        for factor in (2.0, 3.0):
            torch._dynamo.reset()
            assert_close(compiled(Multiplied(factor))(torch.ones(4)), torch.full((4,), factor))


@torch.no_grad()
def test_one_graph_serves_frozen_and_unfrozen():
    """dynamo's graph is not changed, so candidates compiled from it agree."""
    net, x = mlp(), torch.randn(2, 8)

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        frozen, plain = freezing_backend(gm, example_inputs), gm.forward
        return lambda *inputs: [a - b for a, b in zip(frozen(*inputs), plain(*inputs), strict=True)]

    assert_close(torch.compile(net, backend=backend)(x), torch.zeros(2, 8))


@torch.no_grad()
def test_fake_inputs_are_left_alone():
    """With fake inputs, as under DDPOptimizer, the graph is returned unchanged."""
    answers = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        fake_mode = torch._subclasses.FakeTensorMode()
        fakes = [fake_mode.from_tensor(x) for x in example_inputs]
        answers.append(reattach_parameters(gm, fakes) == (gm, list(range(5))))
        return gm.forward

    torch.compile(mlp(), backend=backend)(torch.randn(2, 8))
    assert answers == [True]


@torch.no_grad()
def test_outside_dynamo_the_graph_is_left_alone():
    """Outside dynamo nothing is frozen, since no guard can check a parameter's identity."""
    calls = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        calls.append((gm, example_inputs))
        return gm.forward

    torch.compile(mlp(), backend=backend)(torch.randn(2, 8))
    ((gm, example_inputs),) = calls
    assert reattach_parameters(gm, example_inputs) == (gm, list(range(5)))


@pytest.fixture
def guard_of(monkeypatch):
    """Return the check that a guard on parameters runs before each call, and its words."""
    monkeypatch.setattr(freezing, "get_verbose_code_parts", lambda words, guard: words)

    def made(parameters: list[torch.Tensor], **given: bool) -> tuple[Callable[..., bool], str]:
        added: list[Any] = []
        manager = SimpleNamespace(add_lambda_guard=lambda *args: added.append(args))
        builder = SimpleNamespace(get_guard_manager=lambda guard: manager)
        freezing._same_memory(parameters, **given)(builder, SimpleNamespace(user_stack="stack"))
        ((check, words, stack),) = added
        assert stack == "stack"
        return check, words

    return made


@pytest.mark.parametrize(
    ("change", "same", "same_version"),
    [
        pytest.param(lambda one, other: None, True, True, id="nothing"),
        pytest.param(lambda one, other: other.add_(1), True, False, id="in place"),
        pytest.param(lambda one, other: setattr(other, "data", torch.ones(3)), False, False, id="data"),
        pytest.param(lambda one, other: setattr(one, "data", torch.ones(3)), False, False, id="data of the first"),
    ],
)
@torch.no_grad()
def test_what_a_guard_on_memory_sees(guard_of, change, same, same_version):
    """Another memory always; a change in place only where versions are asked for."""
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))]
    (loose, words), (strict, _) = guard_of(parameters), guard_of(parameters, versions=True)
    change(*parameters)
    assert (loose(None), strict(None)) == (same, same_version)
    assert words == "the memory of 2 frozen parameters is the same"


def test_memory_that_is_guarded_is_kept(guard_of):
    """Else new memory could get the old address, and the guard would pass."""
    check, _ = guard_of([torch.zeros(3)])
    assert [type(each) for each in check.storages] == [torch.UntypedStorage]


@torch.no_grad()
def test_a_change_in_place_recompiles_where_versions_are_guarded():
    """A compiler that derives constants from parameters compiles again after an optimizer's step."""
    compiles = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        lifted = freezing.lifted_parameters(gm, example_inputs)
        first = gm.graph.find_nodes(op="placeholder")[min(lifted)]
        freezing.guard_versions(first._dynamo_source, [*lifted.values()])
        compiles.append(gm)
        return gm.forward

    net, x = Weights(), torch.ones(3)
    call = torch.compile(net, backend=backend)
    for _ in range(2):
        call(x, x)
    assert len(compiles) == 1
    net.weight.add_(1)
    assert_close(call(x, x), net(x, x))
    assert len(compiles) == 2


@torch.no_grad()
def test_no_cache_has_frozen_graphs():
    """Neither the cache on disk nor the remote one, since their keys lack the weights."""
    found = []

    def look(graph: torch.fx.Graph) -> None:
        found.append((config.fx_graph_cache, config.fx_graph_remote_cache))

    with config.patch(fx_graph_cache=True, fx_graph_remote_cache=True, post_grad_custom_post_pass=look):
        compiled(mlp())(torch.randn(2, 8))
    assert found == [(False, False)]


def test_a_name_that_is_free():
    """Underscores are added until no attribute has the name."""
    gm = torch.fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    gm.weight, gm.weight_ = 1, 2
    assert (freezing._unused_name(gm, "weight"), freezing._unused_name(gm, "other")) == ("weight__", "other")


def test_inputs_that_became_constants_are_dropped():
    """The callable takes all inputs of the graph and hands on those that are kept."""

    def compiled_gm(*inputs: Any) -> Any:
        return inputs

    call = freezing._taking_all_inputs(compiled_gm, [2, 0])
    assert call("a", "b", "c") == ("c", "a")
    assert call.__wrapped__ is compiled_gm


@pytest.mark.parametrize(
    ("value", "freezable"),
    [
        pytest.param(torch.zeros(2), True, id="buffer"),
        pytest.param(nn.Parameter(torch.zeros(2)), True, id="parameter"),
        pytest.param(torch.zeros(2, device="meta"), False, id="meta"),
        pytest.param(TwoTensor(torch.zeros(2), torch.zeros(2)), False, id="subclass"),
        pytest.param(3, False, id="number"),
    ],
)
def test_what_can_be_frozen(value, freezable):
    """A plain tensor or parameter with memory."""
    assert freezing._can_freeze(value) is freezable


class Weights(nn.Module):
    """A parameter, a buffer, and two inputs between which dynamo may place them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0))
        self.register_buffer("shift", torch.full((3,), 5.0))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.shift - y


@torch.no_grad()
def test_what_becomes_of_lifted_parameters():
    """Parameters stay parameters, buffers stay buffers, and the positions of all other inputs are returned."""
    seen: list[Any] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        lifted = freezing.lifted_parameters(gm, example_inputs)
        frozen_gm, kept = reattach_parameters(gm, example_inputs)
        others = [value for at, value in enumerate(example_inputs) if at not in lifted]
        seen.append((frozen_gm, kept, lifted, len(example_inputs), frozen_gm(*others)[0]))
        return gm.forward

    module, x, y = Weights(), torch.ones(3), torch.full((3,), 4.0)
    torch.compile(module, backend=backend)(x, y)
    ((frozen_gm, kept, lifted, count, result),) = seen
    assert sorted([*kept, *lifted]) == list(range(count))
    assert (len(kept), len(lifted)) == (2, 2)
    assert next(frozen_gm.parameters()) is module.weight
    assert next(frozen_gm.buffers()) is module.shift
    assert torch.equal(result, torch.full((3,), 3.0))
    attributes = frozen_gm.graph.find_nodes(op="get_attr")
    assert [node.op for node in frozen_gm.graph.nodes][:4] == ["placeholder"] * 2 + ["get_attr"] * 2
    assert all("example_value" in node.meta and "grapharg" not in node.meta for node in attributes)
    assert {node.target for node in attributes} <= {*frozen_gm._param_name_to_source}


@torch.no_grad()
def test_a_graph_without_parameters_is_compiled_as_it_is():
    """Nothing is copied or wrapped where nothing can be frozen."""
    seen: list[Any] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        returned = compile_frozen(gm, example_inputs, lambda *args: seen.append(args) or gm.forward)
        assert returned == gm.forward
        assert seen == [(gm, example_inputs)]
        return gm.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))
    assert len(seen) == 1


def shared_graph(*versions: int) -> torch.fx.GraphModule:
    """Return a graph of inputs of which dynamo has seen so many writes."""
    graph = torch.fx.Graph()
    for at, version in enumerate(versions):
        fake = torch.zeros(4)
        for _ in range(version):
            fake.add_(1)
        graph.placeholder(f"x{at}").meta["example_value"] = fake
    graph.output(())
    return torch.fx.GraphModule(nn.Module(), graph)


WHOLE, APART = torch.zeros(8), torch.zeros(4)


@pytest.mark.parametrize(
    ("versions", "inputs", "writes"),
    [
        pytest.param((0, 0), (WHOLE[:4], WHOLE[4:]), False, id="shared and read"),
        pytest.param((0, 1), (WHOLE[:4], WHOLE[4:]), True, id="shared and written"),
        pytest.param((1, 0), (WHOLE[:4], WHOLE[4:]), True, id="the first written"),
        pytest.param((1, 1), (WHOLE[:4], APART), False, id="written apart"),
        pytest.param((1, 0, 0), (APART, WHOLE[:4], WHOLE[4:]), False, id="another one written"),
        pytest.param((1, 1), (3, 4), False, id="numbers"),
    ],
)
def test_memory_that_is_shared_and_written(versions, inputs, writes):
    """Only inputs that share memory which the graph changes keep it from being frozen."""
    assert freezing._writes_shared_memory(shared_graph(*versions), inputs) is writes


def test_constants_that_a_graph_returns():
    """They are noted, also through views; what is computed from them is none."""
    graph = torch.fx.Graph()
    module = nn.Module()
    module.register_buffer("held", torch.ones(2, 2))
    module.register_buffer("other", torch.zeros(2, 2))
    held, other = graph.get_attr("held"), graph.get_attr("other")
    turned = graph.call_function(torch.ops.aten.t.default, (held,))
    added = graph.call_function(torch.ops.aten.add.Tensor, (other, 1))
    graph.output((turned, added, graph.call_function(operator.neg, (other,))))
    constants: list[torch.Tensor] = []
    inner = freezing.noting_constants(lambda gm, inputs, **given: (gm, inputs, given), constants)
    gm = torch.fx.GraphModule(module, graph)
    assert inner(gm, [1], is_inference=True) == (gm, [1], {"is_inference": True})
    assert [each is gm.held for each in constants] == [True]
