"""Graphs of torch.func's transforms are raced like others, and a call that fails inside one leaves no trace."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, functionalize, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils import _pytree as pytree

from backend_kwargs.graphs.writes import has_memory, written_memory
from backend_kwargs.torch_internals.tensors import modes_restored
from tests.auto.graphs import rows_of

# torch scripts its decompositions for forward mode, and lowers some gradients, by functions that it deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch._prims_common.check:FutureWarning"),
]

torch.manual_seed(0)
LAYER = nn.Linear(6, 6)
X = torch.randn(4, 6)


def energy(v):
    return (v.softmax(0) * v).sum()


def noise(v):
    return nn.functional.dropout(v.sin() + v, 0.5)


def loss(params, v):
    return functional_call(LAYER, params, (v,)).tanh().sum()


class ViewedBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("rows", torch.randn(3, 6))
        self.register_buffer("row", self.rows[1])

    def forward(self, x):
        return vmap(lambda v: (self.layer(v) * self.rows[0] + self.row).tanh())(x)


class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4, 6))

    def forward(self, x):
        def step(v, seen):
            return (seen.add_(v) * v).softmax(0)

        return vmap(step)(x, self.seen)


TRANSFORMS = {
    "vmap": vmap(lambda v: v.softmax(0) * v),
    "nested vmap": vmap(vmap(lambda v: v.sin() * v.cos() + 1)),
    "chunks": vmap(lambda v: v.softmax(0) * v, chunk_size=2),
    "grad": grad(lambda x: (x.sin() * x).exp().sum()),
    "vjp": lambda x: vjp(lambda v: v.sin() * v.exp(), x)[1](x)[0],
    "jvp": lambda x: jvp(lambda v: v.sin() * v.exp(), (x,), (x,)),
    "jacrev": vmap(jacrev(lambda v: v.softmax(0) * v)),
    "jacfwd": lambda x: jacfwd(lambda v: v.softmax(0) * v)(x[0]),
    "hessian": lambda x: hessian(energy)(x[0]),
    "gradients of samples": lambda x: vmap(grad(loss), (None, 0))(dict(LAYER.named_parameters()), x),
    "a view of a buffer": ViewedBuffer(),
    "a written buffer": Sums(),
}


@pytest.mark.parametrize(
    ("name", "training"),
    [
        *(pytest.param(name, False, id=name) for name in TRANSFORMS),
        *(
            pytest.param(name, True, id=f"{name} in training")
            for name in ("vmap", "grad", "jvp", "jacrev", "gradients of samples", "a view of a buffer")
        ),
    ],
)
def test_transforms_are_raced(auto, store, name, training):
    """Default passes the check against eager, whose results it returns."""
    fn, x = TRANSFORMS[name], X.clone().requires_grad_(training)
    with torch.set_grad_enabled(training):
        if isinstance(fn, Sums):
            fn.seen.zero_()
        result = auto(fn)(x)
        if isinstance(fn, Sums):
            torch.testing.assert_close(fn.seen, X)
            fn.seen.zero_()
        torch.testing.assert_close(result, fn(x))
    assert rows_of(store)["default"].status == "pass"


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_random_transforms_are_raced(auto, store, randomness):
    """Draws of a transform are those of Inductor, as in other graphs."""
    drawn = auto(vmap(noise, randomness=randomness))(X)
    kept = drawn != 0
    assert torch.equal(kept, kept[0].expand(4, 6)) is (randomness == "same")
    torch.testing.assert_close(drawn[kept], (2 * (X.sin() + X))[kept])
    assert rows_of(store)["default"].status == "pass"


def test_a_training_step_through_hessian_runs(auto, store):
    """In training a graph of hessian is checked under the grad mode in which it was captured."""
    x = X[0].clone().requires_grad_()
    torch.testing.assert_close(auto(hessian(energy))(x), hessian(energy)(x))
    assert rows_of(store)["eager"].status == "pass"


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")  # torch's, of linearize
def test_linearize_is_raced(auto, store):
    """The forward pass of linearize and its linear function give eager's results."""

    def fn(x):
        output, linear = linearize(lambda v: v.sin() * v.exp(), x)
        return output, linear(x)

    with torch.no_grad():
        torch.testing.assert_close(auto(fn)(X), fn(X))


def captured(fn, *args):
    """Return the graph that dynamo captures."""
    graphs = []

    def note(gm, example_inputs):
        graphs.append(written_memory(gm.graph))
        inputs = gm.graph.find_nodes(op="placeholder")
        graphs.append({node.meta["example_value"].untyped_storage()._cdata for node in inputs})
        return gm.forward

    torch.compile(fn, backend=note, fullgraph=True)(*args)
    return graphs


@pytest.mark.parametrize("name", ["vmap", "nested vmap", "grad", "jvp", "jacrev", "hessian", "a view of a buffer"])
def test_a_transform_writes_into_none_of_its_inputs(name):
    """Wrapping a tensor for a transform is not a write into it."""
    written, inputs = captured(TRANSFORMS[name], X)
    assert not written & inputs


def test_a_write_below_a_transform_is_seen():
    """A buffer that a function under vmap adds to is written."""
    written, inputs = captured(Sums(), X)
    assert len(written & inputs) == 1


def test_inputs_of_an_outer_transform_are_no_plain_tensors():
    """A graph that is compiled inside a transform is not raced."""
    seen = []
    for transform in (vmap, functionalize):
        transform(lambda v: seen.append(has_memory(v)) or v)(X)
    assert seen == [False, False]


def modes():
    functorch, autograd = torch._C._functorch, torch._C._autograd
    return {
        "depth": functorch.get_dynamic_layer_stack_depth(),
        "in place": functorch.get_inplace_requires_grad_allowed(),
        "grad": torch.is_grad_enabled(),
        "forward grad": torch._C._is_fwd_grad_enabled(),
        "hooks": autograd._saved_tensors_hooks_get_disabled_error_message(),
    }


@pytest.mark.parametrize("name", ["vmap", "grad", "jvp", "jacrev", "hessian", "a view of a buffer"])
def test_a_call_that_raises_leaves_no_mode(name):
    """Wherever a call of the graph raises, the modes are those of before, and a transform can start again."""

    def stopping(gm, example_inputs):
        calls = [node for node in gm.graph.nodes if node.op.startswith("call")]
        for at in range(len(calls)):
            ran = iter(range(at))

            class Stopped(torch.fx.Interpreter):
                def run_node(self, node, ran=ran):
                    if node.op.startswith("call"):
                        next(ran)
                    return super().run_node(node)

            with pytest.raises(StopIteration), modes_restored():
                Stopped(gm).run(*example_inputs)
            assert modes() == before
        return gm.forward

    before = modes()
    result = torch.compile(TRANSFORMS[name], backend=stopping, fullgraph=True)(X)
    for one, other in zip(*map(pytree.tree_leaves, (result, TRANSFORMS[name](X))), strict=True):
        torch.testing.assert_close(one, other)
