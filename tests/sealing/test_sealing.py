"""Sealed functions: declared calls run compiled code; others run in eager, are counted and logged; none compiles."""

import copy
import dataclasses
import functools
import gc
import logging
import threading

import pytest
import torch
from torch import nn

import backend_kwargs as bk
from backend_kwargs.sealing.warming import MOST_REASONS, OTHERS, SealedError
from backend_kwargs.torch_internals import sealing
from backend_kwargs.torch_internals.sealing import compile_events

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

FAST = "aot_eager"  # dynamo and AOTAutograd work as with Inductor
DIMS = {"x": {0: "n"}}


def sin(x):
    return x.sin() + 1


def sealed_sin(sizes=(3, 4), **kwargs):
    return bk.seal(torch.compile(sin, backend=FAST), torch.ones(3), dims=DIMS, sizes={"n": sizes}, **kwargs)


def compiles(call):
    """Return how much torch compiled during a call."""
    before = compile_events()
    call()
    return compile_events() - before


def said(caplog):
    """Return what sealed functions logged."""
    return [record.getMessage() for record in caplog.records if record.name == "backend_kwargs.sealing"]


# ---- what is declared


def test_a_list_has_code_for_each_size(caplog):
    """Declared sizes run compiled code with eager's results, and nothing is compiled, size 1 included."""
    sealed = sealed_sin([1, 3, 5])
    xs = [torch.randn(size) for size in (5, 1, 3)]
    assert compiles(lambda: [torch.testing.assert_close(sealed(x), sin(x)) for x in xs]) == 0
    assert (sealed.counters, said(caplog)) == ({"compiled": 3, "padded": 0, "missed": 0}, [])


def test_a_range_has_code_for_any_size():
    """Two pieces of code serve a range: one for size 1, and one for all others."""
    seen = []

    def backend(gm, example_inputs):
        seen.append(gm)
        return gm.forward

    sealed = bk.seal(torch.compile(sin, backend=backend), torch.ones(3), dims=DIMS, sizes={"n": range(1, 200)})
    assert compiles(lambda: [sealed(torch.ones(size)) for size in range(1, 200)]) == 0
    assert (len(seen), sealed.counters["compiled"]) == (2, 199)
    assert sealed.notes == ["called and compared for 45 of 199 combinations of sizes"]


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_the_declaration_decides_what_is_dynamic(dynamic):
    """A list gets code for each size and a range for any, whatever torch.compile was told."""
    for sizes, graphs in (([2, 3, 5], 3), (range(2, 9), 1)):
        torch._dynamo.reset()
        seen = []
        compiled = torch.compile(sin, backend=lambda gm, _, seen=seen: seen.append(gm) or gm.forward, dynamic=dynamic)
        sealed = bk.seal(compiled, torch.ones(3), dims=DIMS, sizes={"n": sizes})
        assert compiles(lambda sealed=sealed, sizes=sizes: [sealed(torch.ones(size)) for size in sizes]) == 0
        assert (len(seen), sealed.counters["missed"]) == (graphs, 0)


def test_sizes_that_the_code_tells_apart():
    """A branch on a range's size gets a piece of code for each side."""

    def branches(x):
        return x.sin() if x.shape[0] < 10 else x.cos()

    compiled = torch.compile(branches, backend=bk.make_backend(FAST))
    sealed = bk.seal(compiled, torch.ones(3), dims=DIMS, sizes={"n": range(2, 20)})
    xs = [torch.randn(size) for size in range(2, 20)]
    assert compiles(lambda: [torch.testing.assert_close(sealed(x), branches(x)) for x in xs]) == 0
    assert sealed.counters["compiled"] == 18
    found = bk.report(compiled)
    assert (len(found.graphs), found.recompiles) == (2, ())  # compiled ahead of calls


def test_two_names_that_are_equal_now_and_then():
    """Sizes of two names may be equal or not, though dynamo takes equal ones for one size."""

    def outer(x, y):
        return x[:, None] * y

    dims = {"x": {0: "n"}, "y": {0: "m"}}
    sizes = {"n": range(2, 6), "m": range(2, 6)}
    inputs = torch.ones(4), torch.ones(4)
    sealed = bk.seal(torch.compile(outer, backend=FAST), inputs, dims=dims, sizes=sizes)
    calls = [(torch.ones(n), torch.ones(m)) for n in range(2, 6) for m in range(2, 6)]
    assert compiles(lambda: [sealed(*call) for call in calls]) == 0
    assert sealed.counters == {"compiled": 16, "padded": 0, "missed": 0}


def test_nested_inputs_and_keywords():
    """Tensors in dicts, lists, *args and **kwargs have names."""

    def nested(batch, *rest, scale=None, **others):
        return batch["x"][0] * scale + rest[0] + others["shift"]

    def inputs(n):
        x = torch.randn(n, 2)
        return ({"x": [x, 1]}, x), {"scale": x, "shift": torch.ones(2)}

    dims = {"batch.x.0": {0: "n"}, "rest.0": {0: "n"}, "scale": {-2: "n"}}
    sealed = bk.seal(torch.compile(nested, backend=FAST), inputs(3), dims=dims, sizes={"n": [3, 4]})
    for n in (3, 4):
        args, kwargs = inputs(n)
        torch.testing.assert_close(sealed(*args, **kwargs), nested(*args, **kwargs))
    assert sealed.counters == {"compiled": 2, "padded": 0, "missed": 0}


def any_arguments(method):
    """Decorate as libraries do: what is called takes any arguments."""

    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        return method(*args, **kwargs)

    return wrapper


class Decorated(nn.Linear):
    @any_arguments
    def forward(self, input, *, scale=1.0):  # noqa: A002 - as torch names it
        return super().forward(input) * scale


@pytest.mark.parametrize("kind", [nn.Linear, Decorated])
@torch.no_grad()
def test_keywords_stay_keywords(kind):
    """A module of torch's, and one whose forward takes any arguments, are called as in the example."""
    net, x = kind(4, 4), torch.randn(3, 4)
    sealed = bk.seal(
        torch.compile(net, backend=FAST), {"input": x}, dims={"input": {0: "n"}}, sizes={"n": [3, 5]}, on_miss="raise"
    )
    assert compiles(lambda: torch.testing.assert_close(sealed(input=x), net(x))) == 0
    assert sealed.counters == {"compiled": 1, "padded": 0, "missed": 0}


def test_results_in_an_object():
    """The backward pass of a tensor in a dataclass is compiled ahead too."""
    net = nn.Linear(4, 4)

    def scored(x):
        return Scored(net(x), "a label")

    sealed = bk.seal(torch.compile(scored, backend=FAST), torch.ones(3, 4))
    assert compiles(lambda: sealed(torch.ones(3, 4)).scores.sum().backward()) == 0
    assert net.bias.grad.tolist() == [3.0] * 4


@dataclasses.dataclass
class Scored:
    scores: torch.Tensor
    label: str


def test_several_graphs_of_a_function():
    """After a graph break code is found too, for exact sizes and for a range."""

    def breaks(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y.sum() + x

    for sizes in ([2, 5], range(1, 20)):
        sealed = bk.seal(torch.compile(breaks, backend=FAST), torch.ones(3), dims=DIMS, sizes={"n": sizes})
        assert compiles(lambda sealed=sealed, sizes=sizes: [sealed(torch.ones(size)) for size in sizes]) == 0
        assert sealed.counters["missed"] == 0


def test_a_branch_of_the_values_that_never_ran_runs_in_eager():
    """Code after a graph break that no warm-up reached is a miss, not a compile."""

    def by_value(x):
        if x.sum() > 100:
            return x.cos()
        return x.sin()

    sealed = bk.seal(torch.compile(by_value, backend=FAST), torch.ones(3))
    x = torch.full((3,), 99.0)
    assert compiles(lambda: torch.testing.assert_close(sealed(x), by_value(x))) == 0
    assert sealed.counters == {"compiled": 0, "padded": 0, "missed": 1}
    assert next(iter(sealed.misses)).startswith("no code was compiled for 'torch_dynamo_resume_in_by_value_at_")


# ---- what can be sealed


@pytest.mark.parametrize(
    "compiled",
    [
        pytest.param(functools.partial(torch.compile, backend=FAST), id="torch.compile(m)"),
        pytest.param(lambda net: net.compile(backend=FAST) or net, id="m.compile()"),
        pytest.param(lambda net: torch.compile(net.forward, backend=FAST), id="method"),
    ],
)
def test_modules(compiled):
    """What torch.compile returns for a module, a module after compile(), and a method of one."""
    net = nn.Linear(2, 2)
    with torch.no_grad():
        sealed = bk.seal(compiled(net), torch.ones(3, 2), dims={"input": {0: "n"}}, sizes={"n": [3, 4]})
        x = torch.ones(4, 2)
        assert compiles(lambda: (sealed(x), sealed(torch.ones(9, 2)))) == 0
        torch.testing.assert_close(sealed(x), nn.functional.linear(x, net.weight, net.bias))
    assert sealed.counters == {"compiled": 2, "padded": 0, "missed": 1}


def test_bundles_that_are_served(tmp_path):
    """A module of a bundle is sealed for its sample."""
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU()).eval()
    bk.CompiledModule().build(net, [torch.ones(3, 4)]).save(tmp_path / "bundle")
    torch._dynamo.reset()
    loaded = bk.CompiledModule.load(tmp_path / "bundle", net, trust=True)
    loaded.deploy()
    sealed = bk.seal(loaded)
    x = torch.randn(3, 4)
    assert compiles(lambda: torch.testing.assert_close(sealed(x), net(x).detach())) == 0
    assert compiles(lambda: torch.testing.assert_close(sealed(x[:2]), net(x[:2]).detach())) == 0
    assert sealed.counters == {"compiled": 1, "padded": 0, "missed": 1}
    raising = bk.seal(loaded, on_miss="raise")
    with pytest.raises(SealedError) as raised:
        raising(x[:2])
    assert str(raised.value).count("was called with what was not declared") == 1
    assert raising.counters["missed"] == 1


def test_a_bundle_with_dynamic_sizes():
    """A CompiledModule that was built here is sealed for the sizes that are declared, without gradients."""
    net = nn.Linear(4, 4)
    built = bk.CompiledModule(bk.CompileConfig(backend="tmpl-inductor")).build(
        net, [torch.ones(3, 4), torch.ones(5, 4)]
    )
    sealed = bk.seal(built, dims={"input": {0: "n"}}, sizes={"n": range(2, 9)})
    assert compiles(lambda: [sealed(torch.ones(n, 4)) for n in range(2, 12)]) == 0
    assert sealed.counters == {"compiled": 7, "padded": 0, "missed": 3}
    assert not sealed(torch.ones(20, 4)).requires_grad


# ---- training and modes


def test_a_training_step_compiles_nothing():
    """The backward pass is compiled ahead too; buffers and gradients are as before."""
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    twin = copy.deepcopy(net)
    sealed = bk.seal(torch.compile(net, backend=FAST), torch.randn(4, 4), dims={"input": {0: "n"}}, sizes={"n": [4, 6]})
    assert all(map(torch.equal, net.state_dict().values(), twin.state_dict().values()))
    assert all(parameter.grad is None for parameter in net.parameters())

    def step(call, x):
        call(x).square().mean().backward()

    for x in (torch.randn(4, 4), torch.randn(6, 4)):
        assert compiles(lambda x=x: step(sealed, x)) == 0
        step(twin, x)
    for one, other in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert sealed.counters["compiled"] == 2


def test_gradients_that_sum_to_zero_are_no_error():
    """A softmax is sealed in training: from a gradient of ones, its own would be rounding errors alone."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.Softmax(-1))
    bk.seal(torch.compile(net, backend="tmpl-inductor:default"), torch.randn(4, 16))


def test_a_frozen_weight_that_changed_is_a_miss_in_words():
    """The reason says what changed, without a line of this package."""
    net = nn.Linear(2, 2)
    with torch.no_grad():
        sealed = bk.seal(torch.compile(net, backend="tmpl-inductor:freezing"), torch.ones(3, 2))
        net.weight.mul_(2)
        torch.testing.assert_close(sealed(torch.ones(3, 2)), net(torch.ones(3, 2)))
    assert sealed.misses == {"one of 2 parameters changed": 1}


@pytest.mark.parametrize(
    ("mode", "guard"),
    [
        pytest.param(torch.no_grad, "grad_mode", id="no_grad"),
        pytest.param(torch.inference_mode, "grad_mode", id="inference_mode"),
        pytest.param(lambda: torch.autocast("cpu", torch.bfloat16), "autocast", id="autocast"),
    ],
)
def test_modes_are_those_of_the_seal(mode, guard):
    """What is sealed in a mode serves in it; a call in another is a miss that names the guard."""
    net = nn.Linear(2, 2)
    with mode():
        sealed = bk.seal(torch.compile(net, backend=FAST), torch.ones(3, 2))
        assert compiles(lambda: sealed(torch.ones(3, 2))) == 0
        assert sealed.counters == {"compiled": 1, "padded": 0, "missed": 0}
    assert compiles(lambda: sealed(torch.ones(3, 2))) == 0
    assert sealed.counters["missed"] == 1
    assert guard in next(iter(sealed.misses))


def test_inputs_are_of_the_kind_of_the_example():
    """Under inference_mode inputs made outside of it are declared by such an example."""
    x = torch.ones(3)
    with torch.inference_mode():
        for declared in ({}, {"dims": DIMS, "sizes": {"n": [3]}}):
            sealed = bk.seal(torch.compile(sin, backend=FAST), x, **declared)
            sealed(x)
            assert sealed.counters == {"compiled": 1, "padded": 0, "missed": 0}
        sealed(torch.ones(3))
        assert sealed.counters["missed"] == 1
        sealed = bk.seal(torch.compile(sin, backend=FAST), torch.ones(4), dims=DIMS, buckets={"n": [4]})
        sealed(torch.ones(3))
        assert sealed.counters["padded"] == 1


# ---- misses


def test_misses_run_in_eager_and_are_logged_once(caplog):
    """A size and a dtype that were not declared run in eager; each reason is logged once, with what failed."""
    sealed = sealed_sin()
    calls = [torch.ones(7), torch.ones(8), torch.ones(3, dtype=torch.float64), torch.ones(4, dtype=torch.float64)]
    with caplog.at_level(logging.WARNING):
        assert compiles(lambda: [torch.testing.assert_close(sealed(x), sin(x)) for x in calls]) == 0
    assert said(caplog) == [
        "Sealed 'sin' runs in eager: 'n' has a size that was not declared: 7.",
        "Sealed 'sin' runs in eager: tensor 'L['x']' dtype mismatch. expected Float, actual Double.",
    ]
    assert sealed.describe() == (
        "sealed sin: compiled 0, padded 0, missed 4\n"
        "n: [3, 4]\n"
        "missed 2: 'n' has a size that was not declared\n"
        "missed 2: tensor 'L['x']' dtype mismatch. expected Float, actual Double"
    )


def test_a_changed_attribute_is_a_miss():
    """A guard on the module's own state that fails is a miss, and the result is eager's."""

    class Scaled(nn.Module):
        scale = 2

        def forward(self, x):
            return x * self.scale

    net = Scaled()
    sealed = bk.seal(torch.compile(net, backend=FAST), torch.ones(3))
    net.scale = 5
    assert compiles(lambda: torch.testing.assert_close(sealed(torch.ones(3)), torch.full((3,), 5.0))) == 0
    assert sealed.counters["missed"] == 1


class Rectified(nn.Module):
    def forward(self, x):
        return x.relu()


# dynamo sees the call of a module of torch's before its hooks run, and of another one its forward, after them.
@pytest.mark.parametrize("model", [Rectified, nn.ReLU])
@pytest.mark.parametrize("passed_by", [False, True], ids=["found", "passed by"])
def test_forward_pre_hooks_run_once(model, passed_by, monkeypatch):
    """A call runs them as often as the module does, also where torch passes by the code that fits."""
    called, model, x = [], model(), torch.randn(3)
    model.register_forward_pre_hook(torch.compiler.disable(lambda *_: called.append(1)))
    sealed = bk.seal(torch.compile(model, backend=FAST), x)
    called.clear()
    if passed_by:  # as while other threads reorder dynamo's list of code
        monkeypatch.setattr(sealing, "_any_fits", lambda entries, frame: True)
        x = x.double()
    assert torch.equal(sealed(x), x.relu())
    assert called == [1]
    assert sealed.counters == {"compiled": not passed_by, "padded": 0, "missed": passed_by}


def test_a_buffer_may_get_other_memory():
    """An input that shares it runs in eager, as one that shared the memory from before the seal did."""

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(4))

        def forward(self, x):
            self.total.add_(1)
            return self.total * x

    net, memory = Counts(), torch.ones(4)
    sealed = bk.seal(torch.compile(net, backend=FAST), torch.ones(4))
    net.total.data = memory
    assert sealed(memory).tolist() == [4] * 4
    assert sealed.counters["missed"] == 1


def test_reasons_are_bounded(caplog):
    """After many reasons further ones are counted together, so that a log does not grow with each value."""
    sealed = sealed_sin([3])
    for size in range(MOST_REASONS + 5):
        sealed._count_miss(f"reason {size}")
    assert len(sealed.misses) == MOST_REASONS + 1
    assert (sealed.misses[OTHERS], len(said(caplog))) == (5, MOST_REASONS + 1)


def test_raising():
    """Under on_miss="raise" a size and a guard raise, whole and before anything ran; other calls serve on."""
    sealed = sealed_sin(on_miss="raise")
    with pytest.raises(SealedError) as size:
        sealed(torch.ones(7))
    with pytest.raises(SealedError) as guard:
        sealed(torch.ones(3, dtype=torch.float64))
    assert str(size.value) == (
        "Sealed 'sin' was called with what was not declared, 'n' has a size that was not declared: 7. Declare it in "
        "seal(), or pass on_miss='eager'."
    )
    assert "not declared, tensor 'L['x']' dtype mismatch. expected Float, actual Double. Declare" in str(guard.value)
    sealed(torch.ones(3))
    assert sealed.counters == {"compiled": 1, "padded": 0, "missed": 2}


def test_an_error_of_the_function_is_the_users():
    """What the function raises comes through as in eager, and dynamo's state of the thread is as before."""
    sealed = sealed_sin()
    with pytest.raises(TypeError, match=r"takes 1 positional argument but 2 were given"):
        sealed(torch.ones(3), torch.ones(3))
    assert compiles(lambda: torch.compile(lambda x: x + 2, backend=FAST)(torch.ones(3))) > 0


# ---- other functions, threads, stances


def test_other_functions_still_compile():
    """While sealed calls run in other threads, another function compiles, and so does the sealed one's original."""
    compiled = torch.compile(sin, backend=FAST)
    sealed = bk.seal(compiled, torch.ones(3), dims=DIMS, sizes={"n": [3, 4]})
    done, failed = threading.Event(), []

    def serve():
        while not done.is_set():
            xs = [torch.ones(size) for size in (3, 4, 5)]
            failed.extend(x for x in xs if not torch.equal(sealed(x), sin(x)))

    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    other = torch.compile(lambda x: x.cos() * 3, backend=FAST)
    try:
        assert compiles(lambda: other(torch.ones(3))) > 0
        assert compiles(lambda: compiled(torch.ones(50))) > 0
    finally:
        done.set()
        for thread in threads:
            thread.join()
    counters = sealed.counters
    assert failed == []
    assert counters["compiled"] == 2 * counters["missed"] > 0


def test_a_stance_of_the_process_compiles_nothing():
    """No stance of torch.compiler makes a sealed function compile, and it sets none."""
    sealed = sealed_sin()
    calls = [torch.ones(3), torch.ones(9), torch.ones(3, dtype=torch.float64)]
    for stance in ("default", "force_eager", "eager_on_recompile", "fail_on_recompile", "eager_then_compile"):
        with torch.compiler.set_stance(stance):
            assert compiles(lambda: [sealed(x) for x in calls]) == 0
    with torch.compiler.set_stance(force_backend="eager"):
        assert compiles(lambda: [sealed(x) for x in calls]) == 0


def test_within_another_compiled_function():
    """It is a graph break there, and serves its own code."""
    sealed = sealed_sin()
    outer = torch.compile(lambda x: sealed(x * 1) * 2, backend=FAST)
    torch.testing.assert_close(outer(torch.ones(3)), sin(torch.ones(3)) * 2)
    assert sealed.counters["compiled"] == 1


def test_another_backends_code_is_not_run():
    """Code that another torch.compile of the same function left does not serve a sealed one."""
    torch.compile(sin, backend=lambda gm, _: lambda *args: (torch.zeros(3),))(torch.ones(3))
    sealed = sealed_sin([3])
    torch.testing.assert_close(sealed(torch.ones(3)), sin(torch.ones(3)))


# ---- padding


class Attending(nn.Module):
    """A model that ignores what its mask leaves out."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 8)

    def forward(self, tokens, mask=None):
        x = self.embed(tokens)
        keys = None if mask is None else mask[:, None, :]
        return {"hidden": nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=keys)}


BUCKETS = {"sequence": [4, 8]}
TEXT = {name: {0: "batch", 1: "sequence"} for name in ("tokens", "mask")}


def text(batch, sequence):
    return torch.randint(0, 50, (batch, sequence)), torch.ones(batch, sequence, dtype=torch.bool)


def test_padded_results_are_the_unpadded_ones():
    """A masked model serves any size up to the largest bucket from the buckets' code."""
    net = Attending().eval()
    with torch.no_grad():
        sealed = bk.seal(
            torch.compile(net, backend=FAST),
            text(2, 4),
            dims=TEXT,
            sizes={"batch": [2]},
            buckets=BUCKETS,
            fill={"mask": 0},
        )
        for sequence in range(1, 9):
            call = text(2, sequence)
            assert compiles(lambda call=call: sealed(*call)) == 0
            torch.testing.assert_close(sealed(*call)["hidden"], net(*call)["hidden"])
            assert sealed(*call)["hidden"].is_contiguous()
    assert sealed.counters == {"compiled": 6, "padded": 18, "missed": 0}


REFUSED = {
    "leaks": (
        lambda x: x - x.mean(),
        (
            "'n' cannot be padded: 'leaks' at n=3 gives other results padded to n=4, output: error {}, above "
            "tol=0.001. Pass a mask of what is real and its `fill`, or declare `sizes` without buckets."
        ),
    ),
    "lists": (
        lambda x: [*x],
        "'n' cannot be padded: 'lists' at n=3 gives {}, the output has another structure. Pass {}",
    ),
    "doubles": (
        lambda x: torch.cat([x, x]),
        "'n' cannot be padded: a result of 'doubles' has size 6 at 3, and 8 at 4; declare `sizes` without buckets.",
    ),
    "writes": (lambda x: x.add_(1), "'n' cannot be padded: 'writes' writes to what would be padded."),
    "draws": (
        lambda x: x + torch.rand_like(x),
        (
            "'draws' draws random numbers, so that padding cannot be checked: declare `sizes` without buckets, or call "
            "eval()."
        ),
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_padding_changes_are_refused(kind):
    """A bucket is refused, with the reason, where padding changes results or cannot be undone."""
    function, message = REFUSED[kind]
    function.__name__ = kind
    with pytest.raises(bk.BackendKwargsError) as refused:
        bk.seal(
            torch.compile(function, backend=FAST), torch.arange(4.0), dims=DIMS, buckets={"n": [4]}, sizes={"n": [3]}
        )
    words = message.split("{}")
    assert str(refused.value).startswith(words[0])
    assert str(refused.value).endswith(words[-1])


# ---- what is refused


def test_wrong_results_are_refused():
    """Code that gives other results than eager is not sealed."""
    wrong = torch.compile(sin, backend=lambda gm, _: lambda *args: (torch.zeros(3),))
    with pytest.raises(bk.BackendKwargsError) as refused:
        bk.seal(wrong, torch.ones(3))
    assert str(refused.value) == (
        "'sin' is not sealed: compiled for the example it gives other results than eager, output: error 1, above "
        "tol=0.001. To seal it anyway, pass a larger `tol`, or check=False."
    )
    assert bk.seal(wrong, torch.ones(3), check=False)(torch.ones(3)).sum() == 0


def test_compiled_parts_are_refused():
    """A part that is compiled on its own would compile in eager, so that only on_miss="raise" takes it."""
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    net[0].compile(backend=FAST)
    compiled = torch.compile(net, backend=FAST)
    with pytest.raises(bk.BackendKwargsError) as refused:
        bk.seal(compiled, torch.ones(3, 2))
    assert str(refused.value) == (
        "'Sequential' calls compiled code of its own (0), which would compile where a call runs in eager: compile only "
        "the whole, or pass on_miss='raise'."
    )
    assert bk.seal(compiled, torch.ones(3, 2), on_miss="raise").counters["missed"] == 0


def test_a_function_that_never_keeps_code_is_refused():
    """A guard that each call fails again is named."""

    class Counting(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x + self.calls

    with pytest.raises(bk.BackendKwargsError, match=r"'Counting' (cannot be sealed|is not sealed)"):
        bk.seal(torch.compile(Counting(), backend=FAST), torch.ones(3))


def test_a_function_that_fails_is_named():
    """An error of the function during the warm-up is one line, with the sizes."""

    def at_most_three(x):
        if x.shape[0] > 3:
            raise ValueError("too long")
        return x + 1

    with pytest.raises(bk.BackendKwargsError) as refused:
        bk.seal(torch.compile(at_most_three, backend=FAST), torch.ones(3), dims=DIMS, sizes={"n": [3, 4]})
    assert str(refused.value) == "'at_most_three' fails for n=4, and is not sealed: ValueError: too long."


def test_it_is_neither_copied_nor_pickled():
    """Its code is this process's."""
    with pytest.raises(TypeError, match=r"^A sealed function cannot be copied or pickled: its code is this process's"):
        copy.deepcopy(sealed_sin())


def test_it_is_freed():
    """Nothing keeps a sealed function, though its counters are published."""
    import weakref

    ref = weakref.ref(sealed_sin())
    gc.collect()
    assert ref() is None


def test_random_numbers_are_as_before():
    """Sealing draws from none of the user's generators, and says that it could not compare."""

    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    sealed = bk.seal(torch.compile(nn.functional.dropout, backend=FAST), torch.ones(30))
    assert torch.equal(torch.rand(2), wanted)
    assert sealed.notes == ["it draws random numbers, so results were not compared with eager's"]
