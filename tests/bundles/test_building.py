"""`build`: what it compiles and checks, and that it has no side effects."""

import gc
import re
import sys
import threading
import weakref

import pytest
import torch

import backend_kwargs as bk
from backend_kwargs.auto import race
from tests.bundles.small_module import scaled


class Counting:
    """A backend that runs graphs in eager, counts them, and keeps weak references to its results."""

    def __init__(self):
        self.made = []

    def __call__(self, gm, example_inputs):
        def run(*inputs):
            return gm.forward(*inputs)

        self.made.append(weakref.ref(run))
        return run


class Remembering(torch.nn.Module):
    """A module that keeps state between calls, such as a cache of keys and values."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("total", torch.zeros(8))
        self.seen = []

    def forward(self, x):
        self.seen.append(len(self.seen))
        self.total += x.sum(0)
        return self.linear(x) + self.total


class Summing(torch.nn.Module):
    """A module that adds to its buffer in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x):
        self.total.add_(x.sum(0))
        return x * 2


class Broken(torch.nn.Module):
    """A submodule whose call breaks the graph, in code that all modules of the class share."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        x = self.linear(x)
        torch._dynamo.graph_break()
        return x.relu()


def built(module, data, **fields):
    return bk.CompiledModule(bk.CompileConfig(**{"backend": "eager", **fields})).build(module, data)


def wrong(gm, example_inputs):
    return lambda *inputs: [out * 1.5 for out in gm.forward(*inputs)]


WRONG = re.compile(r"^The compiled module gives other results: .*")


def test_results_are_the_modules(module, x):
    """A compiled module gives the module's results, without gradients."""
    compiled = bk.CompiledModule().build(module, [x])
    result = compiled(x)
    torch.testing.assert_close(result, module(x))
    assert not result.requires_grad
    assert torch.is_grad_enabled()


class Residue(Broken):
    """Its second graph returns what rounding leaves, so a small error of the first graph becomes a large one."""

    def forward(self, x):
        x = self.linear(x)
        torch._dynamo.graph_break()
        return x - x.round(decimals=2)


@pytest.mark.filterwarnings("ignore:A graph is compiled without precision")
@pytest.mark.parametrize("backend", ["tmpl-inductor", "tmpl-inductor:auto"])
def test_a_precision_is_held_to_its_bound(backend, tmp_path, x):
    """With `precision`, errors of the module's results up to `max_error` are accepted, and larger ones raise."""
    options = {"precision": "bf16", "max_error": 0.02}
    if backend != "tmpl-inductor":
        options |= {"candidates": [], "store": str(tmp_path / "decisions")}
    config = bk.CompileConfig(backend=backend, options=options)
    module = Broken()
    compiled = bk.CompiledModule(config).build(module, [x])
    torch.testing.assert_close(compiled(x), module(x).detach(), atol=0.02, rtol=0.02)
    if backend == "tmpl-inductor":
        with pytest.raises(bk.BackendKwargsError) as raised:
            bk.CompiledModule(config).build(Residue(), [x])
        assert re.fullmatch(
            r"The compiled module gives other results: output\[0\]: error [\d.e+-]+, above max_error=0.02. "
            r"It is in training mode: call module.eval\(\). To build it anyway, set check_numbers='warn'.",
            str(raised.value),
        )


def test_a_precision_that_did_not_win_is_not_used(module, x, tmp_path, monkeypatch):
    """A graph for which auto chose default is made ready again without the precisions that it was permitted."""
    monkeypatch.setattr(race, "better", lambda challenger, champion, objective: challenger.candidate.name == "default")
    monkeypatch.setattr(race, "is_slower", lambda best, eager: False)
    options = {"precision": ("bf16", "fp16"), "max_error": 0.02, "candidates": [], "budget_s": 300.0}
    config = bk.CompileConfig(backend="tmpl-inductor:auto", options={**options, "store": str(tmp_path / "decisions")})
    compiled = bk.CompiledModule(config).build(module, [x])
    before = compiled(x)
    compiled.deactivate()
    compiled.activate()
    assert torch.equal(compiled(x), before)
    assert "graphs loaded in this process: 1, compiled: 0" in compiled.describe()


@pytest.mark.parametrize(
    "sample",
    [
        pytest.param(lambda x: x, id="a tensor"),
        pytest.param(lambda x: (x,), id="a tuple"),
        pytest.param(lambda x: [x], id="a list"),
        pytest.param(lambda x: {"x": x}, id="keywords"),
        pytest.param(lambda x: ((), {"x": x}), id="a pair"),
    ],
)
def test_a_sample_is_given_as_one_calls_the_module(sample, module, x):
    torch.testing.assert_close(built(module, [sample(x)])(x), module(x).detach())


class State:
    """A decoder's state: an object that torch's pytrees do not know."""

    def __init__(self, *seen):
        self.seen = list(seen)


class Decoding(torch.nn.Module):
    """A module that changes the state that it is called with, and returns it."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x, state):
        state.seen.append(self.linear(x))
        return sum(state.seen), state


def test_objects_of_samples_and_results_are_copied_and_compared(x):
    """A sample may contain an object that the module changes, such as a cache, and a result may contain it."""
    module, state = Decoding().eval(), State(x)
    compiled = bk.CompiledModule().build(module, [(x, state)])
    assert len(state.seen) == 1
    total, after = compiled(x, State(x))
    torch.testing.assert_close(total, (x + module.linear(x)).detach())
    torch.testing.assert_close(after.seen[1], module.linear(x).detach())


class Unlike(torch.nn.Module):
    """A module that leaves other numbers in an object where it is compiled."""

    def forward(self, x, state):
        state.seen[0].add_(1 if torch.compiler.is_compiling() else 2)
        return x + 1


def test_what_a_call_leaves_in_an_object_is_compared(x):
    """Results agree, and what the compiled module writes into a sample's object does not."""
    with pytest.raises(bk.BackendKwargsError, match=r"input\[0\]\[1\]: RMSE"):
        bk.CompiledModule().build(Unlike().eval(), [(x, State(x.clone()))])


def test_the_module_is_as_it_was():
    """Buffers and Python state do not change, since samples run only on copies."""
    module, x = Remembering(), torch.randn(4, 8)
    built(module, [x, x])
    assert (module.seen, module.total.tolist()) == ([], [0.0] * 8)


def test_samples_run_in_their_order_on_one_copy():
    """Samples run in order on one copy, compiled and in eager, so state agrees."""
    assert built(Remembering(), [torch.randn(4, 8) for _ in range(3)]).is_active


def test_samples_and_generators_are_as_they_were(module):
    x = torch.randn(4, 8)
    before, state = x.clone(), torch.get_rng_state()
    built(torch.nn.Sequential(module, torch.nn.ReLU(inplace=True)), [x])
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_first_call_compiles_nothing(module, x):
    """Code compiled on a copy is used for the module itself."""
    backend = Counting()
    compiled = built(module, [x], backend=backend)
    compiled(x)
    assert len(backend.made) == 1


def test_wrong_numbers_raise_and_change_nothing(module, x):
    made = bk.CompiledModule(bk.CompileConfig(backend=wrong))
    with pytest.raises(bk.BackendKwargsError, match=WRONG.pattern + r"To build it anyway, set check_numbers='warn'\.$"):
        made.build(module, [x])
    assert made.state.value == "init"


def forgetful(gm, example_inputs):
    """Run on copies, so that what a call writes is lost."""
    return lambda *args: gm(*(arg.clone() for arg in args))


def writing(gm, example_inputs):
    """Write to what eager only reads."""

    def run(*args):
        results = gm(*args)
        args[-1].data.add_(1)
        return results

    return run


@pytest.mark.parametrize(
    ("backend", "module", "place"),
    [
        pytest.param(forgetful, Summing(), r"state\['total'\]", id="buffer"),
        pytest.param(forgetful, torch.nn.ReLU(inplace=True), r"input\[0\]\[0\]", id="input"),
        pytest.param(writing, torch.nn.GELU(), r"input\[0\]\[0\]", id="input that eager reads"),
    ],
)
def test_what_a_call_changes_is_compared(backend, module, place, x):
    """The results are right, and the module or its caller would go on with other values."""
    with pytest.raises(bk.BackendKwargsError, match=f"The compiled module gives other results: {place}: "):
        built(module, [x], backend=backend)
    with pytest.warns(bk.BackendKwargsWarning, match=place):
        assert built(module, [x], backend=backend, check_numbers="warn").is_active


def test_wrong_numbers_may_be_a_warning(module, x):
    with pytest.warns(bk.BackendKwargsWarning, match=WRONG.pattern):
        assert built(module, [x], backend=wrong, check_numbers="warn").is_active


def test_numbers_may_be_left_unchecked(module, x):
    assert built(module, [x], backend=wrong, check_numbers="off").is_active


@pytest.mark.parametrize(
    ("module", "data", "device", "message"),
    [
        pytest.param(torch.relu, [1], None, "build's `module` must be a torch.nn.Module, got ", id="module"),
        pytest.param(
            scaled(), (), None, "build's `data` must be a list of at least one sample, got () (tuple).", id="data"
        ),
        pytest.param(
            scaled(),
            [3],
            None,
            "Inputs must be a tensor, a tuple of arguments, a dict of keywords, or (args, kwargs), got 3 (int).",
            id="sample",
        ),
        pytest.param(scaled(), [torch.zeros(4, 8)], "cuda0", "`device` must be a device such as ", id="device"),
        pytest.param(
            scaled(),
            [torch.zeros(4, 8)],
            "meta",
            "The module must be on meta, got one on cpu: call module.to('meta') first.",
            id="elsewhere",
        ),
    ],
)
def test_a_wrong_argument_is_an_error(module, data, device, message):
    with pytest.raises(bk.BackendKwargsError) as raised:
        bk.CompiledModule(bk.CompileConfig(backend="eager")).build(module, data, device)
    assert str(raised.value).startswith(message)


def test_autocast_gives_back_the_modules_dtype(module, x):
    """Under autocast the product is in bfloat16, and the output is cast back."""
    result = built(module, [x], autocast_enabled=True, autocast_dtype=torch.bfloat16)(x)
    assert result.dtype is torch.float32
    assert not torch.equal(result, module(x))
    torch.testing.assert_close(result, module(x).detach(), rtol=0.05, atol=0.05)


def test_output_dtype_is_what_outputs_are_cast_to(module, x):
    assert built(module, [x], output_dtype="float64")(x).dtype is torch.float64


def test_sizes_in_which_samples_differ_are_dynamic(module):
    """Two samples of different sizes give one graph, which serves a third size."""
    backend = Counting()
    compiled = built(module, [torch.randn(4, 8), torch.randn(6, 8)], backend=backend)
    compiled(torch.randn(9, 8))
    assert len(backend.made) == 1


def test_a_call_in_another_grad_mode_compiles_nothing(module, x):
    backend = Counting()
    compiled = built(module, [x], backend=backend)
    with torch.no_grad():
        compiled(x)
    assert len(backend.made) == 1


def test_an_error_of_the_module_leaves_gradients_on(module, x):
    compiled = built(module, [x])
    with pytest.raises(RuntimeError):
        compiled(x[:, :3])
    assert torch.is_grad_enabled()


def test_a_module_of_which_nothing_is_compiled_warns():
    """dynamo compiles no recurrent network: the user learns that it runs in eager."""
    with pytest.warns(bk.BackendKwargsWarning) as warned:
        compiled = bk.CompiledModule().build(torch.nn.LSTM(8, 8), [torch.randn(2, 3, 8)])
    assert [str(each.message) for each in warned if each.category is bk.BackendKwargsWarning] == [
        "No graph of the module was compiled, so it runs in eager: TORCH_LOGS=graph_breaks shows why."
    ]
    assert "note: no graph of the module was compiled, so it runs in eager" in compiled.describe()


def test_deactivate_frees_its_own_code_alone(x):
    """Freeing the code of one module does not recompile another one of the same class."""
    one, other = Counting(), Counting()
    first = built(scaled(0), [x], backend=one)
    second = built(scaled(1), [x], backend=other)
    expected = second(x)
    first.deactivate()
    gc.collect()
    assert [made() for made in one.made] == [None]
    assert torch.equal(second(x), expected)
    assert len(other.made) == 1


def test_deactivate_frees_code_on_shared_code_objects():
    """Code that dynamo attaches to a code object shared by all instances is freed too."""
    one, other, x = Counting(), Counting(), torch.randn(4, 8)
    first, second = (built(torch.nn.Sequential(Broken(), Broken()), [x], backend=backend) for backend in (one, other))
    before = len(other.made)
    expected = second(x)
    first.deactivate()
    gc.collect()
    assert [made() for made in one.made if made()] == []
    assert torch.equal(second(x), expected)
    assert len(other.made) == before


def test_deactivate_leaves_other_compiled_functions_alone(module, x):
    """`deactivate` does not reset torch._dynamo."""
    backend = Counting()
    plain = torch.compile(torch.cos, backend=backend)
    plain(x)
    built(module, [x]).deactivate()
    plain(x)
    assert len(backend.made) == 1


def test_activate_compiles_nothing_anew(module, x):
    """Compiled code is kept while the module is inactive."""
    compiled = bk.CompiledModule().build(module, [x])
    compiled.deactivate()
    compiled.activate()
    torch.testing.assert_close(compiled(x), module(x))
    assert "graphs loaded in this process: 1, compiled: 0" in compiled.describe()


def test_any_number_of_threads_may_call_at_once(module, x):
    compiled = built(module, [x])
    inputs = [x * scale for scale in range(8)]
    results = [None] * len(inputs)

    def run(at):
        for _ in range(50):
            results[at] = compiled(inputs[at])

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result, value in zip(results, inputs, strict=True):
        torch.testing.assert_close(result, module(value).detach())


def calls_of(function, x):
    """Return the numbers of Python and C functions that a call runs."""
    counted = []
    function(x)
    with torch.no_grad():
        sys.setprofile(lambda frame, event, arg: counted.append(event) if event in ("call", "c_call") else None)
        try:
            function(x)
        finally:
            sys.setprofile(None)
    return len(counted)


def test_a_call_costs_no_more_than_one_of_a_plain_compiled_module(module, x):
    """A call makes no more function calls than one of a plain compiled module."""
    plain = torch.compile(module, backend="eager")
    assert calls_of(built(module, [x]), x) <= calls_of(plain, x)


def test_describe_names_changed_fields_and_graphs(module, x):
    assert built(module, [x], fullgraph=True).describe().splitlines()[:2] == [
        "CompiledModule(backend='eager',fullgraph=True)",
        "state: active on cpu",
    ]


def test_key_has_the_class_before_it():
    config = bk.CompileConfig(fullgraph=True)
    assert bk.CompiledModule(config).key() == config.key().replace("CompileConfig_", "CompiledModule_")
