"""What guards on parameters notice, and that nothing keeps parameters alive."""

import gc
import weakref
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch._guards import CompileContext, CompileId, compile_context
from torch._inductor.codecache import PyCodeCache
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing import assert_close

from backend_kwargs import BackendKwargsWarning, make_backend
from backend_kwargs.backends.inductor.frozen_code import _forget
from backend_kwargs.errors import warn_once
from backend_kwargs.graphs import freezing
from backend_kwargs.graphs.freezing import compile_frozen
from tests.graphs.frozen import graphs_compiled


def in_eager(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
    """Freeze the parameters and run the graph in eager, on copies of them, as a compiler's constants are."""

    def compile_gm(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        for name, held in [*gm.named_parameters()]:
            setattr(gm, name, nn.Parameter(held.detach().clone(), held.requires_grad))
        return gm.forward

    return compile_frozen(gm, example_inputs, compile_gm)


ENGINE = {"min_block_size": 1}
BACKENDS = {
    "freezing": ("tmpl-inductor:freezing", {}),
    "onnxruntime": ("onnxruntime", ENGINE),
    "openvino-native": ("openvino-native", ENGINE),
    "tvm": ("tmpl-tvm", {"freeze": True}),
    "precision": ("tmpl-inductor", {"precision": "bf16", "max_error": 0.5}),
    "precision and freezing": ("tmpl-inductor", {"precision": "bf16", "max_error": 0.5, "freezing": True}),
    "packed": ("tmpl-inductor", {"rewrites": ["packed"]}),
}
NEEDS = {"onnxruntime": "onnxruntime", "openvino-native": "openvino", "tvm": "tvm"}
each_backend = pytest.mark.parametrize(
    ("spec", "options"),
    [
        pytest.param(
            *given, id=name, marks=pytest.mark.skipif(not find_spec(NEEDS.get(name, "torch")), reason="absent")
        )
        for name, given in BACKENDS.items()
    ],
)

without_warnings = pytest.mark.filterwarnings("ignore::backend_kwargs.BackendKwargsWarning")  # of slow precisions


class Net(nn.Module):
    """Two layers that share their input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first(x) * self.second(x)).relu()


X = torch.ones(3, 8)
loose = {"rtol": 0.05, "atol": 0.05}


def test_code_that_is_dropped_while_all_is_looked_at():
    """A collection within a loop over all code may drop the code of freed modules."""
    with compile_context(CompileContext(CompileId(frame_id=0, frame_compile_id=0))):
        codes = [freezing._Code({}, ()) for _ in range(9)]
        codes[0].manager = lambda: codes.pop().drop("freed")
        for each in codes:
            freezing._codes[id(each)] = each
        assert freezing.why_not_constants({}) == ""


def test_a_module_that_is_forgotten_while_another_comes(monkeypatch):
    """Generated code that another thread adds while a module is forgotten stays in the list."""

    class Busy(list[ModuleType]):
        def __iter__(self) -> Any:
            yield from list.__getitem__(self, slice(None))
            came.append(ModuleType("late"))
            self.append(came[-1])

    came: list[ModuleType] = []
    gone = ModuleType("gone")
    modules = Busy([gone])
    monkeypatch.setattr(PyCodeCache, "modules", modules)
    _forget(weakref.ref(gone))
    _forget(weakref.ref(gone))  # as after torch has cleared the list
    assert len(modules) == len(came)


@each_backend
@without_warnings
@torch.no_grad()
def test_modules_that_are_dropped_are_freed(spec, options):
    """Neither guards nor code keep a parameter alive, nor its memory."""
    references = []
    for _ in range(2):  # the second one's code comes from the caches
        net = Net().eval()
        assert_close(torch.compile(net, backend=make_backend(spec, options))(X), net(X), **loose)
        weight = net.first.weight
        references.append((weakref.ref(weight), StorageWeakRef(weight.untyped_storage())))
        del net, weight
        gc.collect()
    assert [(alive(), storage.expired()) for alive, storage in references] == [(None, True)] * 2


@each_backend
@without_warnings
@torch.no_grad()
def test_a_swapped_weight_takes_effect(spec, options):
    """`swap_tensors` refuses tensors with weak references, so guards have none."""
    net = Net().eval()
    compiled = torch.compile(net, backend=make_backend(spec, options))
    assert_close(compiled(X), net(X), **loose)
    gc.collect()
    torch.utils.swap_tensors(net.first.weight, nn.Parameter(torch.randn(16, 8)))
    assert_close(compiled(X), net(X), **loose)


@torch.no_grad()
def test_code_for_modules_that_were_dropped_leaves_room():
    """dynamo compiles a function eight times; code of modules that are gone does not count."""
    for _ in range(12):
        net = Net()
        assert_close(torch.compile(net, backend=in_eager)(X), net(X))
    assert graphs_compiled() == 12


@torch.no_grad()
def test_each_layer_of_a_stack_has_its_own_code():
    """Modules of one class that are compiled one by one are frozen each, also beyond dynamo's limit."""
    nets = [Net() for _ in range(10)]
    for net in nets:
        net.compile(backend=in_eager)
    for net in [*nets, *nets]:
        assert_close(net(X), Net.forward(net, X))
    assert graphs_compiled() == 10


@torch.no_grad()
def test_modules_that_dynamo_counts_together_share_a_graph_at_last():
    """Where dynamo would compile no more, parameters stay inputs of one graph for all further modules."""
    nets = [Net() for _ in range(10)]
    compiled = torch.compile(lambda at, x: nets[at](x), backend=in_eager)

    def call_all() -> None:
        for at, net in [*enumerate(nets), *enumerate(nets)]:
            assert_close(compiled(at, X), net(X))

    warn_once.cache_clear()
    with pytest.warns(BackendKwargsWarning, match="^Parameters stay inputs of a graph, so nothing in it is frozen: 6 "):
        call_all()


def stepped(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(net.parameters(), 0.1).step()


def rewrapped(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.data.mul_(2))


CHANGES = {
    "add_": lambda net: net.first.weight.add_(1),
    "copy_": lambda net: net.second.bias.copy_(torch.randn(16)),
    "load_state_dict": lambda net: net.load_state_dict(Net().state_dict()),
    "an optimizer's step": stepped,
    "an average": lambda net: torch._foreach_lerp_([*net.parameters()], [*Net().parameters()], 0.5),
    "initialisation": lambda net: nn.init.normal_(net.first.weight),
    "through a view": lambda net: net.first.weight[0].mul_(3),
    "through detach()": lambda net: net.first.weight.detach().mul_(3),
    "another parameter": lambda net: setattr(net.first, "weight", nn.Parameter(torch.randn(16, 8))),
    "another parameter in the same memory": lambda net: rewrapped(net.first),
    "other data": lambda net: setattr(net.first.weight, "data", torch.randn(16, 8)),
    "another module": lambda net: setattr(net, "first", nn.Linear(8, 16)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@torch.no_grad()
def test_a_change_of_a_constant_takes_effect(change):
    """What counts a version, replaces a tensor or moves its memory compiles again, once."""
    net = Net()
    compiled = torch.compile(net, backend=in_eager)
    for _ in range(3):
        for _ in range(2):
            assert_close(compiled(X), net(X))
        change(net)
    assert_close(compiled(X), net(X))
    assert graphs_compiled() == 4


@torch.no_grad()
def test_after_several_changes_parameters_stay_inputs():
    """A module whose weights change between calls ends with one graph for all of their values."""
    net = Net()
    compiled = torch.compile(net, backend=in_eager)

    def change_and_call() -> None:
        for _ in range(12):
            assert_close(compiled(X), net(X))
            net.first.weight.add_(1)

    warn_once.cache_clear()
    with pytest.warns(BackendKwargsWarning) as warned:
        change_and_call()
    assert [str(each.message) for each in warned] == [
        "Parameters stay inputs of a graph, so nothing in it is frozen: they have changed 6 times."
    ]
    assert graphs_compiled() == 7


@torch.no_grad()
def test_former_values_are_freed():
    """The code of a module's former weights is dropped once its present ones are compiled."""
    net = Net()
    compiled = torch.compile(net, backend=in_eager)
    compiled(X)
    former = StorageWeakRef(net.first.weight.untyped_storage())
    net.first.weight = nn.Parameter(torch.randn(16, 8))
    compiled(X)
    gc.collect()
    assert former.expired()


@torch.inference_mode()
def test_inference_tensors_count_no_version():
    """A module that was made in inference mode is frozen without a look at versions."""
    net = Net()
    assert_close(torch.compile(net, backend=in_eager)(X), net(X))


class Norm(nn.Module):
    """A norm whose statistics a call in training mode moves, and a buffer with a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.register_buffer("scale", torch.ones(2, 16))
        self.register_buffer("row", self.scale[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x)) * self.row + self.scale.sum(0)


each_engine = pytest.mark.parametrize(
    ("spec", "options"),
    [each for each in each_backend.args[1] if each.id in ("freezing", "onnxruntime", "openvino-native", "tvm")],
)


@each_engine
@torch.no_grad()
def test_statistics_that_training_moved_take_effect(spec, options):
    """A call in training mode moves a norm's statistics, which are constants of the compiled graph."""
    net = Norm().eval()
    compiled = torch.compile(net, backend=make_backend(spec, options))
    assert_close(compiled(X), net(X), rtol=1e-4, atol=1e-4)
    net.train()(torch.randn(32, 8) * 3 + 1)
    net.eval()
    assert_close(compiled(X), net(X), rtol=1e-4, atol=1e-4)


TRANSFORMS = {
    "vmap": lambda net, x: torch.func.vmap(net)(x[:, None]),
    "grad": lambda net, x: torch.func.grad(lambda x: net(x).sum())(x),
    # Not of the norm, of which dynamo captures no jvp.
    "jvp": lambda net, x: torch.func.jvp(lambda x: net.layer(x) * net.row + net.scale.sum(0), (x,), (x,))[1],
    "jacrev": lambda net, x: torch.func.jacrev(net)(x),
    "written": lambda net, x: torch.func.vmap(lambda row: net.scale.add(0).mul_(2) + net(row))(x[:, None]),
}


@each_engine
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch._prims_common.check:FutureWarning")
@without_warnings
@torch.no_grad()
def test_transforms_of_torch_func_work(spec, options):
    """In a graph with transforms a buffer that has a view is no error."""
    net = Norm().eval()

    def transformed(x):
        return {name: transform(net, x) for name, transform in TRANSFORMS.items()}

    compiled = torch.compile(transformed, backend=make_backend(spec, options))
    assert_close(compiled(X), transformed(X), rtol=1e-4, atol=1e-4)
