"""Whole models give eager's results in each dtype; operators that TVM lacks run in eager or raise, by `fallback`."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.testing import assert_close

from backend_kwargs import BackendKwargsWarning
from backend_kwargs.backends.tvm.settings import import_tvm
from tests.backends.tvm.tvm_models import MODELS, Block, mlp

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-7, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("make", "shape"), MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_model_is_eagers(compiled, make, shape, dtype):
    net, x = make().eval().to(dtype), torch.randn(shape).to(dtype)
    call = compiled(net)
    tolerance = TOLERANCE[dtype]
    assert_close(call(x), net(x), rtol=tolerance, atol=tolerance)
    assert call.graphs
    assert set(call.graphs) == {"inference"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_autocast(compiled, dtype):
    net, x = mlp(), torch.randn(3, 8)
    with torch.autocast("cpu", dtype):
        result, wanted = compiled(net)(x), net(x)
    assert_close(result, wanted, rtol=2e-2, atol=2e-2)


@torch.no_grad()
@pytest.mark.parametrize("swapped", [pytest.param(False, id="heads first"), pytest.param(True, id="positions first")])
def test_attention_lies_like_its_query(compiled, swapped):
    """A view of attention's result that works in eager works here, whatever the query's layout."""

    def attend(q, k, mask):
        result = nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=mask)
        return (result.transpose(1, 2) if swapped else result).view(2, -1)

    q = torch.randn(2, 8, 4, 16).transpose(1, 2) if swapped else torch.randn(2, 4, 8, 16)
    k, mask = torch.randn(2, 4, 32, 16), (torch.arange(32) < 20).view(1, 32)
    assert_close(compiled(attend)(q, k, mask), attend(q, k, mask), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_updated_parameters_are_seen(compiled):
    net, x = mlp(), torch.randn(3, 8)
    call = compiled(net)
    call(x)
    net[0].weight.mul_(3)
    assert_close(call(x), net(x), rtol=1e-4, atol=1e-5)
    assert len(call.summaries) == 1


@pytest.mark.parametrize("freeze", [False, True], ids=["inputs", "frozen"])
@torch.no_grad()
def test_buffers_are_written(compiled, freeze):
    """Running statistics change as in eager, with frozen parameters or without."""
    eager = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train()
    net = copy.deepcopy(eager)
    call = compiled(net, freeze=freeze)
    for _ in range(3):
        x = torch.randn(5, 4)
        assert_close(call(x), eager(x), rtol=1e-4, atol=1e-5)
    assert_close(dict(net.named_buffers()), dict(eager.named_buffers()), rtol=1e-4, atol=1e-5)


# ---- freeze


@torch.no_grad()
def test_frozen_parameters_are_constants(compiled):
    """Later updates of frozen parameters compile again; those that no version counts have no effect, as documented."""
    net, x = mlp(), torch.randn(3, 8)
    call, before = compiled(net, freeze=True), net(x)
    assert_close(call(x), before, rtol=1e-4, atol=1e-5)
    net[0].weight.data.mul_(3)
    assert_close(call(x), before, rtol=1e-4, atol=1e-5)
    net[0].weight.mul_(3)
    assert_close(call(x), net(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_frozen_modules_are_told_apart(compiled):
    """Another module called through the same function uses its own parameters."""
    first, second, x = mlp(), mlp(), torch.randn(3, 8)
    call = compiled(lambda net, x: net(x), freeze=True)
    assert_close(call(first, x), first(x), rtol=1e-4, atol=1e-5)
    assert_close(call(second, x), second(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_frozen_parameter_comes_out_as_itself(compiled):
    """A returned parameter is the parameter itself, not a constant."""
    net, x = nn.Linear(4, 4), torch.randn(2, 4)
    call = compiled(lambda x: (net(x), net.weight.t() + 0), freeze=True)
    wanted = net(x), net.weight.t() + 0
    call(x)[1].zero_()
    assert_close(call(x), wanted)


def test_freeze_is_inert_under_grad(compiled):
    net, x = mlp(), torch.randn(3, 8)
    call = compiled(net, freeze=True)
    with pytest.warns(BackendKwargsWarning) as warned:
        call(x)
    assert [str(each.message) for each in warned] == [
        "Option 'freeze' is inert while gradients are recorded: call the model under torch.no_grad()."
    ]


# ---- fallback


def with_noise(x):
    """Return random numbers with a part for TVM on either side."""
    return (torch.rand_like(x.sin()) * 0 + x.cos()).exp()


@torch.no_grad()
def test_partition_leaves_the_operator_to_eager(compiled):
    call, x = compiled(with_noise), torch.randn(4)
    assert_close(call(x), with_noise(x))
    assert list(call.fallbacks) == ["rand_like"]
    assert call.operators


@torch.no_grad()
def test_what_is_only_created_is_eagers(compiled):
    """A graph without inputs runs in eager."""
    call = compiled(lambda: torch.full((3, 4), 2.0))
    assert_close(call(), torch.full((3, 4), 2.0))
    assert (len(call.summaries), call.operators) == (1, 0)


@torch.no_grad()
@pytest.mark.parametrize(
    ("fn", "operators"),
    [
        pytest.param(lambda x, at: torch.zeros(4, 3).index_add(0, at, x.exp() + 1), 2, id="eager alone"),
        pytest.param(lambda x, at: (y := torch.full((2, 3), 2.0)).index_add(0, at, x * y), 2, id="eager and TVM"),
    ],
)
def test_a_constant_that_eager_reads_is_eagers(compiled, fn, operators):
    """TVM makes a constant only for its own operators, beside eager's if both read it."""
    call, args = compiled(fn), (torch.randn(2, 3), torch.tensor([0, 1]))
    assert_close(call(*args), fn(*args))
    assert call.operators == operators


@torch.no_grad()
def test_graph_leaves_the_graph_to_eager(compiled):
    call, x = compiled(with_noise, fallback="graph"), torch.randn(4)
    assert_close(call(x), with_noise(x))
    assert list(call.fallbacks) == ["rand_like"]
    assert call.operators == 0


@torch.no_grad()
def test_a_graph_left_to_eager_has_no_parts(compiled, monkeypatch):
    """If its second part cannot be built, the first one is not reported: it does not run."""
    import_tvm()
    from backend_kwargs.backends.tvm import part_compiler

    build, built = part_compiler.build, []

    def builds_once(*args):
        built.append(args)
        if len(built) > 1:
            raise RuntimeError("no luck")
        return build(*args)

    monkeypatch.setattr(part_compiler, "build", builds_once)
    call, x = compiled(lambda x: torch.mm(x.sin(), x).cos(), fallback="graph", aten_ops=("mm",)), torch.randn(4, 4)
    with pytest.warns(BackendKwargsWarning, match="TVM failed to compile a part of a graph"):
        assert_close(call(x), torch.mm(x.sin(), x).cos())
    assert (len(built), call.operators, call.fallbacks) == (2, 0, {"cos": "RuntimeError: no luck"})


@torch.no_grad()
def test_error_raises(compiled):
    with pytest.raises(BackendCompilerFailed, match=r"TVM cannot have 'rand_like': .*fallback='partition'"):
        compiled(with_noise, fallback="error")(torch.randn(4))


@pytest.mark.parametrize("fallback", ["partition", "graph", "error"])
@torch.no_grad()
def test_aten_ops_are_no_failure(compiled, fallback):
    """Operators that the user leaves to ATen are allowed at each level of `fallback`."""
    net, x = mlp(), torch.randn(3, 8)
    call = compiled(net, fallback=fallback, aten_ops=("addmm", "mm"))
    assert_close(call(x), net(x), rtol=1e-4, atol=1e-5)
    assert call.operators
    assert not {"addmm", "mm"} & set(call.fallbacks)


@torch.no_grad()
def test_failing_build_runs_in_eager(compiled, monkeypatch):
    """A part that cannot be built runs in eager, with a warning and the reason."""
    import_tvm()
    from backend_kwargs.backends.tvm import part_compiler

    def build(*_):
        raise RuntimeError("no luck\nat all")

    monkeypatch.setattr(part_compiler, "build", build)
    call, x = compiled(lambda x: x.sin() + 1), torch.randn(4)
    with pytest.warns(BackendKwargsWarning) as warned:
        assert_close(call(x), x.sin() + 1)
    assert [str(each.message) for each in warned] == [
        "TVM failed to compile a part of a graph, which runs in eager: RuntimeError: no luck at all."
    ]
    assert call.fallbacks == {"sin, add": "RuntimeError: no luck at all"}
    torch._dynamo.reset()
    message = "TVM cannot have 'sin, add': RuntimeError: no luck at all."
    with pytest.raises(BackendCompilerFailed, match=message):
        compiled(lambda x: x.sin() + 1, fallback="error")(x)


@torch.no_grad()
def test_failing_call_runs_in_eager(compiled, monkeypatch):
    """If the virtual machine fails in a call, eager runs the part from then on, with one warning."""
    import_tvm()
    from backend_kwargs.backends.tvm import part_compiler

    inputs = []
    monkeypatch.setattr(part_compiler, "_ready", lambda value: inputs.append(value) or value)  # so that it refuses them
    call, x = compiled(lambda x: x.sin() + 1), torch.randn(8, 4).t()
    with pytest.warns(BackendKwargsWarning, match="TVM failed to run a part of a graph, which runs in eager from now"):
        call(x)
    assert_close(call(x), x.sin() + 1)
    (summary,) = call.summaries
    assert (len(inputs), summary.partitions, summary.failed) == (1, [], 1)
    assert summary.fallbacks["sin, add"].startswith("TVM failed to run it: ")


# ---- verify


@pytest.fixture
def wrong_sine(monkeypatch):
    """Make TVM compute a cosine instead of a sine."""
    import_tvm()
    from backend_kwargs.backends.tvm.lowering.graph import CONVERTERS

    monkeypatch.setitem(CONVERTERS, "sin", CONVERTERS["cos"])


def sine_of_noise(x):
    """Draw random numbers, and write into the argument."""
    return (x.mul_(2) + torch.rand_like(x)).sin()


@torch.no_grad()
def test_verify_runs_in_eager_what_is_wrong(compiled, wrong_sine):
    """A wrong part runs in eager from the first call on; one warning names the output."""
    call, x = compiled(lambda x: (x + 1, x.sin()), verify=True), torch.randn(64)
    with pytest.warns(BackendKwargsWarning) as warned:
        assert_close(call(x), (x + 1, x.sin()))
    (message,) = [str(each.message) for each in warned]
    assert message.startswith(
        "TVM's results differ from eager's, so the inference graph runs in eager: inference output[1]:"
    )
    assert_close(call(x), (x + 1, x.sin()))


@torch.no_grad()
def test_without_verify_nobody_looks(compiled, wrong_sine):
    x = torch.randn(64)
    assert_close(compiled(lambda x: x.sin())(x), x.cos())


def test_verify_looks_at_gradients(compiled, wrong_sine):
    """The backward graph is compared separately: the cosine's gradient contains the wrong sine."""
    call, x = compiled(lambda x: x.cos() * 2, verify=True), torch.randn(64, requires_grad=True)
    with pytest.warns(BackendKwargsWarning, match="the backward graph runs in eager: backward output"):
        call(x).sum().backward()
    assert_close(x.grad, -2 * x.detach().sin())


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
@torch.no_grad()
def test_verify_leaves_no_trace(compiled, request, wrong):
    """With `verify` a graph writes once and draws random numbers once."""
    context = contextlib.nullcontext()
    if wrong:
        request.getfixturevalue("wrong_sine")
        context = pytest.warns(BackendKwargsWarning)
    x = torch.randn(64)
    eager, written = x.clone(), x.clone()
    call = compiled(sine_of_noise, verify=True)
    torch.manual_seed(7)
    wanted = [sine_of_noise(eager) for _ in range(3)]
    torch.manual_seed(7)
    with context:
        result = [call(written) for _ in range(3)]
    assert_close(result, wanted)
    assert_close(written, eager)


@torch.no_grad()
def test_verify_passes_what_is_right(compiled, recwarn):
    net, x = Block().eval(), torch.randn(2, 5, 16)
    assert_close(compiled(net, verify=True)(x), net(x), rtol=1e-4, atol=1e-5)
    assert not [each for each in recwarn if each.category is BackendKwargsWarning]
