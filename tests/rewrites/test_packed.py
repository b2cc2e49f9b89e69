"""Linear layers that share an input as one product: changes of weights, refusals, and cost."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.utils import counters
from torch.overrides import TorchFunctionMode

import backend_kwargs
from backend_kwargs.rewrites.packed import Pack, pack
from tests.rewrites.lowering import agrees
from tests.rewrites.on_a_cpu import compiled_by

SETTINGS = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


class Heads(nn.Module):
    """Three linear layers with one input."""

    def __init__(self, bias=True, dtype=torch.float32):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, n, bias=bias, dtype=dtype) for n in (8, 4, 2))

    def forward(self, x):
        return self.q(x).view(-1, 8), self.k(x) + 1, self.v(x)


def packing(fn):
    torch._dynamo.reset()
    return torch.compile(fn, backend=backend_kwargs.make_backend("tmpl-inductor", rewrites=("packed",)))


def same(compiled, fn, x):
    with torch.no_grad():
        got, want = compiled(x), fn(x)
    torch.testing.assert_close(got, want)
    assert [each.stride() for each in got] == [each.stride() for each in want]


def count(compiled):
    (graph,) = backend_kwargs.report(compiled).graphs
    return graph.rewritten.get("packed", 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["bare", "bias"])
def test_computes_the_same(bias, dtype):
    """One product gives the results of three, with their strides."""
    model, x = Heads(bias, dtype), torch.randn(2, 3, 8, dtype=dtype)
    compiled = packing(model)
    same(compiled, model, x)
    assert count(compiled) == 1


class Layers(nn.Module):
    """Groups of linear layers, each group with one input."""

    def __init__(self, width, outs, groups, bias, dtype):
        super().__init__()
        made = ([nn.Linear(width, out, bias, dtype=dtype) for out in outs] for _ in range(groups))
        self.groups = nn.ModuleList(map(nn.ModuleList, made))

    def forward(self, x):
        inputs = [x * (at + 1) for at in range(len(self.groups))]
        return [layer(each) for each, layers in zip(inputs, self.groups, strict=True) for layer in layers]


LAYOUTS = {
    "dense": lambda *sizes: torch.randn(sizes),
    "cut": lambda *sizes: torch.randn(*sizes[:-1], 2 * sizes[-1])[..., : sizes[-1]],
    "transposed": lambda *sizes: torch.randn(sizes[::-1]).permute(*reversed(range(len(sizes)))),
    "expanded": lambda *sizes: torch.randn(sizes[-1:]).expand(sizes),
}


@SETTINGS
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    sizes=st.lists(st.integers(1, 4), max_size=3),
    width=st.integers(1, 17),
    outs=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    groups=st.integers(1, 2),
    bias=st.booleans(),
    tied=st.booleans(),
    layout=st.sampled_from(sorted(LAYOUTS)),
    scale=st.sampled_from([0.1, 1.0, 100.0]),
    seed=st.integers(0, 9),
)
def test_against_float64(dtype, sizes, width, outs, groups, bias, tied, layout, scale, seed):
    """Whatever the layers, the sizes and the input's strides, each group is one product, with float64's results."""
    torch.manual_seed(seed)
    model = Layers(width, outs, groups, bias, dtype)
    if tied:
        model.groups[0][1] = model.groups[0][0]
    x = (LAYOUTS[layout](*sizes, width) * scale).to(dtype)
    with torch.no_grad():
        compiled, counts = compiled_by(pack, model)
        agrees(compiled(x), model, (x,))
    assert counts == [groups]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e-40], ids=str)
@pytest.mark.parametrize("place", ["input", "weight", "bias"])
def test_values_at_the_edges(place, value):
    """Nan, infinities and a denormal reach the results that they reach in eager, and no others."""
    torch.manual_seed(0)
    model, x = Heads(), torch.randn(5, 8)
    with torch.no_grad():
        {"input": x[1], "weight": model.k.weight[1], "bias": model.k.bias}[place][2] = value
        compiled, counts = compiled_by(pack, model)
        torch.testing.assert_close(compiled(x), model(x), equal_nan=True)
    assert counts == [1]


def test_changes_of_weights_show():
    """Weights that are written in place, replaced, or given other memory are packed again."""
    model, x = Heads(), torch.randn(5, 8)
    compiled = packing(model)
    same(compiled, model, x)
    with torch.no_grad():
        model.k.weight.add_(1)
        model.v.bias.zero_()
    same(compiled, model, x)
    model.q.weight = nn.Parameter(torch.randn(8, 8))
    same(compiled, model, x)
    model.q.weight.data = torch.randn(8, 8)
    same(compiled, model, x)
    torch.optim.SGD(model.parameters(), lr=1.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    same(compiled, model, x)
    model.load_state_dict(Heads().state_dict())
    same(compiled, model, x)


def test_writes_through_data_are_unseen():
    """Writes through `.data` do not change the version, so they show only after the next change that does."""
    model, x = Heads(), torch.randn(5, 8)
    compiled = packing(model)
    same(compiled, model, x)
    with torch.no_grad():
        before = compiled(x)[1]
        model.k.weight.data.add_(1)
        assert torch.equal(compiled(x)[1], before)
        model.k.weight.add_(0)
    same(compiled, model, x)


@pytest.mark.parametrize("compiles", [False, True], ids=["plain", "compiled step"])
@pytest.mark.parametrize("fused", [False, True], ids=["for each", "fused"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_steps_of_optimizers_show(kind, fused, compiles):
    """A step of an optimizer takes effect, also of a fused one, which changes no version."""
    model, x = Heads(), torch.randn(5, 8)
    compiled = packing(model)
    same(compiled, model, x)
    optimizer = kind(model.parameters(), lr=0.5, fused=fused)
    step = torch.compile(optimizer.step) if compiles else optimizer.step
    for _ in range(2):
        sum(each.square().sum() for each in model(x)).backward()
        step()
        same(compiled, model, x)


def test_steps_of_other_models_pack_nothing():
    """A fused step packs the weights that it changed, and no others."""
    model, other, x = Heads(), nn.Linear(8, 8), torch.randn(5, 8)
    packs = [Pack([at], [each.weight]) for at, each in enumerate((model.q, other))]
    optimizer = torch.optim.SGD(other.parameters(), lr=0.5, fused=True)
    other(x).sum().backward()
    optimizer.step()
    assert [each.stale for each in packs] == [False, True]
    packs[1].refresh([model.q.weight, other.weight])
    assert not packs[1].stale
    assert torch.equal(packs[1].buffer, other.weight)


def test_memory_that_is_replaced_is_kept_until_it_is_noticed():
    """New memory cannot have the address of the memory that was packed, so that a replaced `.data` shows."""
    model, x = Heads(), torch.randn(5, 8)
    compiled = packing(model)
    for _ in range(20):
        same(compiled, model, x)
        for _ in range(2):
            model.q.weight.data = torch.randn(8, 8)


def test_gradients_that_begin_within_the_graph():
    """A graph that starts to record gradients, although its caller records none, packs nothing and has them."""
    model, x = Heads(), torch.randn(5, 8)

    def fn(x):
        with torch.enable_grad():
            q, k, _ = model(x)
            (grad,) = torch.autograd.grad(q.square().sum() + k.sum(), model.q.weight)
        return grad

    compiled, counts = compiled_by(pack, fn, inductor=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), fn(x))
    assert sum(counts) == 0


def test_results_of_one_row_have_memory_of_their_own():
    """Results of a product with one row do not keep each other's memory."""
    model, x = Heads(), torch.randn(1, 8)
    compiled = packing(model)
    same(compiled, model, x)
    with torch.no_grad():
        q, _, v = compiled(x)
    assert q.untyped_storage().data_ptr() != v.untyped_storage().data_ptr()


def test_many_modules_of_one_code(fresh_dynamo):
    """Of many modules that share code the first few are packed; one graph serves all others, and none runs in eager."""
    layers, x = nn.ModuleList(Heads() for _ in range(12)), torch.randn(5, 8)
    backend = backend_kwargs.make_backend("tmpl-inductor", rewrites=("packed",))
    for layer in layers:
        layer.compile(backend=backend)
    said = "Rewrite 'packed' packs the weights of up to 4 modules that share code; others stay apart."
    counters.clear()
    with torch.no_grad(), pytest.warns(backend_kwargs.BackendKwargsWarning, match=re.escape(said)):
        results = [layer(x) for layer in layers]
    with torch.no_grad():
        torch.testing.assert_close(results, [layer.forward(x) for layer in layers])
    assert counters["stats"]["unique_graphs"] == 5


def test_two_modules_of_one_code():
    """Two modules that share compiled code each get their own results."""
    one, other, x = Heads(), Heads(), torch.randn(5, 8)
    fn = lambda model, x: model(x)  # noqa: E731
    compiled = packing(fn)
    with torch.no_grad():
        for model in (one, other, one, other):
            torch.testing.assert_close(compiled(model, x), model(x))


def test_two_modules_of_one_code_in_two_threads():
    """Threads that call two modules of one code do not pack into each other's buffer."""
    x, models = torch.randn(256, 8), [Heads(), Heads()]
    torch._dynamo.reset()
    for model in models:
        model.compile(backend=backend_kwargs.make_backend("tmpl-inductor", rewrites=("packed",)))
    with torch.no_grad():
        wants = [model(x) for model in models]
    for want, model in zip(wants, models, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(want, model.forward(x))

    def wrong(at):
        with torch.no_grad():
            return sum(not torch.equal(models[at](x)[0], wants[at][0]) for _ in range(2000))

    with ThreadPoolExecutor() as pool:
        assert [*pool.map(wrong, range(2))] == [0, 0]


class ChangedWhilePacked(TorchFunctionMode):
    """Changes a tensor right after a concatenation, as another thread may."""

    def __init__(self, tensor):
        super().__init__()
        self.tensor = tensor

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.cat:
            with torch.no_grad():
                self.tensor.fill_(2)
        return result


def test_a_change_while_packing_is_packed_at_the_next_call():
    """A weight that another thread changes while it is packed is packed again."""
    tensors = [nn.Parameter(torch.zeros(2, 3)) for _ in range(2)]
    pack = Pack((0, 1), tensors)
    with torch.no_grad():
        tensors[0].fill_(1)
    with ChangedWhilePacked(tensors[1]):
        pack.refresh(tensors)
    pack.refresh(tensors)
    assert torch.equal(pack.buffer, torch.tensor([[1.0] * 3] * 2 + [[2.0] * 3] * 2))


def test_packs_stay_where_they_are():
    """Packing again writes into the same buffer, as CUDA graphs need."""
    tensors = [nn.Parameter(torch.randn(2, 3)) for _ in range(2)]
    pack = Pack((0, 1), tensors)
    address = pack.buffer.data_ptr()
    with torch.no_grad():
        tensors[0].add_(1)
    pack.refresh(tensors)
    assert pack.buffer.data_ptr() == address
    assert torch.equal(pack.buffer, torch.cat([each.detach() for each in tensors]))


def mixed(layer, x):
    with torch.autocast("cpu", torch.bfloat16):
        return layer(x)


LAYERS, PLAIN = Heads(), (torch.randn(4, 8), torch.randn(2, 8))
ONE, ROWS = nn.Parameter(torch.ones(1)), [nn.Parameter(torch.randn(8)) for _ in range(2)]
WIDE = nn.Linear(8, 4, dtype=torch.float64)
NEAR = {
    "one layer": lambda x: [LAYERS.q(x)],
    "other inputs": lambda x: [LAYERS.q(x), LAYERS.k(x + 1)],
    "with bias and without": lambda x: [LAYERS.q(x), F.linear(x, LAYERS.k.weight)],
    "a weight that is computed": lambda x: [LAYERS.q(x), F.linear(x, LAYERS.k.weight * 2, LAYERS.k.bias)],
    "a weight that is no parameter": lambda x: [F.linear(x, x), F.linear(x, x + 1)],
    "weights that are no parameters": lambda x: [F.linear(x, PLAIN[0]), F.linear(x, PLAIN[1])],
    "a bias of one number": lambda x: [LAYERS.q(x), F.linear(x, LAYERS.k.weight, ONE)],
    "a weight of one row": lambda x: [F.linear(x, ROWS[0]), F.linear(x, ROWS[1])],
    "inputs of two dtypes": lambda x: [LAYERS.q(x), F.linear(x.double(), WIDE.weight, WIDE.bias)],
    "one under autocast": lambda x: [mixed(LAYERS.q, x), LAYERS.k(x)],
    "the other under autocast": lambda x: [LAYERS.q(x), mixed(LAYERS.k, x)],
    "a weight that the graph changes": lambda x: [LAYERS.q(x), F.linear(x, LAYERS.v.weight.mul_(1), LAYERS.v.bias)],
}


@pytest.mark.parametrize("fn", NEAR.values(), ids=NEAR)
def test_near_miss(fn):
    """Layers that must not be packed are not packed."""
    compiled, x = packing(fn), torch.randn(5, 8)
    same(compiled, fn, x)
    assert count(compiled) == 0


def test_not_while_gradients_are_recorded():
    """In training nothing is packed, and gradients equal eager's."""
    model, x = Heads(), torch.randn(5, 8)
    compiled = packing(model)
    sum(each.sum() for each in compiled(x)).backward()
    got = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    sum(each.sum() for each in model(x)).backward()
    torch.testing.assert_close(got, [parameter.grad for parameter in model.parameters()])
    assert count(compiled) == 0


def test_inference_tensors_are_refused():
    """Inference tensors, which have no version counter, are not packed."""
    with torch.inference_mode():
        model = Heads()
        compiled, x = packing(model), torch.randn(5, 8)
        torch.testing.assert_close(compiled(x), model(x))
    assert count(compiled) == 0


def test_calls_with_and_without_an_argument_for_the_bias():
    """A layer that passes None for its bias is packed with a call that leaves it out."""
    model = Heads(bias=False)
    fn = lambda x: [model.q(x), F.linear(x, model.k.weight), F.linear(x, model.v.weight, bias=None)]  # noqa: E731
    compiled = packing(fn)
    same(compiled, fn, torch.randn(5, 8))
    assert count(compiled) == 1


def test_without_rows():
    """An input without rows gives results without rows."""
    model, x = Heads(), torch.randn(0, 8)
    with torch.no_grad():
        torch.testing.assert_close(packing(model)(x), model(x), check_stride=False)


def test_the_report_has_its_costs():
    """The report says how much memory the packed weights take, and how long each call checks them."""
    model = nn.ModuleList([nn.Linear(256, 256) for _ in range(2)])
    compiled = packing(lambda x: [each(x) for each in model])
    with torch.no_grad():
        compiled(torch.randn(3, 256))
    line = next(each for each in str(backend_kwargs.report(compiled)).splitlines() if "rewritten" in each)
    costs = r"0\.50 MiB of packed weights, [\d.]+ µs of checks per call"  # 2 x 256 x (256 + 1) numbers of 4 bytes
    assert re.fullmatch(rf"  rewritten: packed once \({costs}\)", line)


def test_dynamic_sizes():
    """The number of rows may vary."""
    model = Heads()
    compiled = packing(model)
    for rows in (3, 5, 7):
        same(compiled, model, torch.randn(rows, 8))
