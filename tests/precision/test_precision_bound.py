"""The bound of a lower precision: what exceeds it, and graphs without a reference."""

import copy

import pytest
import torch
from torch.nn import functional

import backend_kwargs as bk
from backend_kwargs import BackendKwargsWarning
from backend_kwargs.facts import Compiled, PrecisionUse
from backend_kwargs.options.machine import installed_version
from backend_kwargs.options.precisions import UnfitPrecisionError
from backend_kwargs.precision import lowered
from backend_kwargs.precision.lowered import Truth, serving
from tests.precision.precision_nets import BOUND, MARKS, error, in_precision, net, refusals, rows, used

pytestmark = MARKS


def test_beyond_the_bound_is_not_used():
    """If the error exceeds the bound, the graph is compiled as captured, with a warning and a line in the report."""
    model, x = net(), rows()
    compiled = in_precision(model, "bf16", max_error=1e-5)
    with torch.no_grad(), pytest.warns(BackendKwargsWarning) as warned:
        assert error(compiled(x), model, x) < 1e-6
    (text,) = refusals(warned)
    assert text.startswith("A graph is compiled without precision 'bf16': output[0]: error 0.00")
    assert text.endswith(", above max_error=1e-05.")
    assert str(used(compiled)).startswith("precision bf16 is not used: output[0]: error 0.00")


def test_strict_raises_beyond_the_bound():
    """With strict=True an error beyond the bound raises."""
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="Precision 'bf16' is refused"):
        in_precision(net(), "bf16", max_error=1e-5, strict=True)(rows())


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        pytest.param(
            lambda x: functional.dropout(x @ x.T, 0.5, training=True),
            "its error cannot be measured: it draws random numbers",
            id="random",
        ),
        pytest.param(
            lambda x: (x @ x.T).to(torch.float32).view(torch.int32),
            "its error cannot be measured: TypeError: it reads the bits of numbers, which differ in float64",
            id="bits",
        ),
    ],
)
def test_no_reference(model, reason):
    """If there is no float64 reference, the precision is refused with the reason."""
    with torch.no_grad(), pytest.warns(BackendKwargsWarning) as warned:
        in_precision(model, "bf16")(rows())
    assert refusals(warned) == [f"A graph is compiled without precision 'bf16': {reason}."]


def test_results_that_are_all_zero_measure_nothing():
    """A last layer that starts with zeros hides the errors of the layers before it, unless gradients show them."""
    model, x = net(), rows()
    (*_, last) = [each for each in model.modules() if isinstance(each, torch.nn.Linear)]
    torch.nn.init.zeros_(last.weight)
    torch.nn.init.zeros_(last.bias)
    compiled = in_precision(model, "bf16", max_error=0.05)
    with torch.no_grad(), pytest.warns(BackendKwargsWarning) as warned:
        compiled(x)
    assert refusals(warned) == [
        "A graph is compiled without precision 'bf16': its error cannot be measured: all results are 0."
    ]
    compiled(x).sum().backward()
    assert "precision bf16: " in str(bk.report(compiled).graphs[-1].precision)


def serve(compiled, *inputs, max_error=BOUND):
    """Return what `serving` makes of a graph of one product, compiled as `compiled`, and what it notes."""
    used = PrecisionUse("bf16", None, max_error)
    graph = torch.fx.symbolic_trace(lambda x, w: (x @ w,))
    return serving(graph, inputs, used, lambda written: Compiled(compiled)).call, used


def test_what_is_measured_is_what_serves():
    """The error is that of the compiled callable, which is the one that is returned."""

    def compiled(x, w):
        return (x @ w * 1.03,)

    with torch.no_grad():
        served, used = serve(compiled, rows(), torch.randn(64, 16))
        assert served is compiled
        assert used.error == pytest.approx(0.03, rel=1e-3)
        with pytest.raises(UnfitPrecisionError, match=r"^output\[0\]: error 0.03, above max_error=0.02$"):
            serve(compiled, rows(), torch.randn(64, 16), max_error=0.02)


def test_results_that_differ_from_call_to_call():
    """Results within the bound that vary from call to call point at memory that nobody wrote."""
    factors = iter([1.01, 0.99])
    with torch.no_grad(), pytest.raises(UnfitPrecisionError, match="its results differ from call to call"):
        serve(lambda x, w: (x @ w * next(factors),), rows(), torch.randn(64, 16))


def test_memory_that_nobody_wrote():
    """Memory that was freed before a call holds nan, and not an earlier call's results."""

    def compiled(x, w):
        x @ w
        return (torch.empty(8, 16),)

    with torch.no_grad(), pytest.raises(UnfitPrecisionError):
        serve(compiled, rows(), torch.randn(64, 16))


def test_a_cap_on_memory(monkeypatch):
    """A graph whose values in float64 take too much memory has no measured error, so the precision is not used."""
    monkeypatch.setattr(lowered, "LARGEST", 1 << 10)
    model, x = net(), rows()
    compiled = in_precision(model, "bf16")
    with torch.no_grad(), pytest.warns(BackendKwargsWarning) as warned:
        assert error(compiled(x), model, x) < 1e-6
    why = "its error cannot be measured: MemoryError: its values in float64 exceed 0 GiB"
    assert refusals(warned) == [f"A graph is compiled without precision 'bf16': {why}."]
    assert used(compiled).reason == why


@pytest.mark.parametrize("training", [False, True], ids=["", "training"])
def test_new_sizes_are_measured(training, monkeypatch):
    """A dynamic graph is measured at its first sizes and once more in each bucket of sizes, and compiles once."""
    measured = []
    error_of = Truth.error_of
    monkeypatch.setattr(Truth, "error_of", lambda *args: measured.append(args) or error_of(*args))
    model = net().train(training)
    compiled = torch.compile(
        model, backend=bk.make_backend("tmpl-inductor", precision="bf16", max_error=BOUND), dynamic=True
    )
    found = []
    with torch.set_grad_enabled(training):
        for count in (4, 5, 7, 8, 15, 6, 20, 4):
            compiled(rows(count))
            found.append(len(measured))
    assert found == [1, 1, 1, 2, 2, 2, 3, 3]
    assert len(bk.report(compiled).graphs) == 1


def cancelling(count):
    """Return rows of large numbers, which `spread` subtracts from each other."""
    return rows(count) + 1000


def spread(x):
    y = x @ torch.ones(64, 16)
    return y - y.mean()


@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "training"])
def test_new_sizes_beyond_the_bound(requires_grad):
    """New sizes whose error exceeds the bound run without the precision, and a warning and the report say so."""
    compiled = torch.compile(
        spread, backend=bk.make_backend("tmpl-inductor", precision="bf16", max_error=BOUND), dynamic=True
    )
    results = [compiled(rows(4).requires_grad_(requires_grad))]
    x = cancelling(16).requires_grad_(requires_grad)
    with pytest.warns(BackendKwargsWarning) as warned:
        results += [compiled(x), compiled(x)]
    results.append(compiled(rows(5).requires_grad_(requires_grad)))
    for result, given in zip(results, (rows(4), x, x, rows(5)), strict=True):
        assert (result - spread(given.double().float())).norm() < BOUND * result.norm()
    (text,) = refusals(warned)
    assert text.startswith("A graph runs in eager for sizes 16 to 31, without precision 'bf16': output[0]: error ")
    assert "; not used for sizes 16 to 31, in eager: output[0]: error " in str(used(compiled))
    assert used(compiled).error < BOUND


@torch.no_grad()
def test_new_sizes_that_cannot_be_measured_are_measured_again():
    """A call of nan in new sizes runs without the precision; the next call in their bucket is measured, and has it."""
    model = net()
    compiled = torch.compile(
        model, backend=bk.make_backend("tmpl-inductor", precision="bf16", max_error=BOUND), dynamic=True
    )
    compiled(rows(4))
    why = "its error cannot be measured: no result is finite"
    with pytest.warns(BackendKwargsWarning, match=f"in eager for sizes 16 to 31, .*: {why}"):
        assert compiled(rows(16) * torch.nan).isnan().all()
    assert used(compiled).refused == {"sizes 16 to 31": why}
    assert 0 < error(compiled(rows(17)), model, rows(17)) < BOUND
    assert used(compiled).refused == {}


@pytest.mark.parametrize("freezing", [False, True], ids=["", "freezing"])
def test_the_measure_leaves_no_trace(freezing):
    """Random states, inputs and buffers that the graph writes are as after one call, also where sizes are new."""

    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(64, 16)
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("total", torch.zeros(16))

        def forward(self, x, into):
            self.calls.add_(1)
            self.total += self.layer(x).sum(0)
            return into.add_(self.layer(x))

    model = Counting()
    eager = copy.deepcopy(model)
    backend = bk.make_backend("tmpl-inductor", precision="bf16", max_error=BOUND, freezing=freezing)
    compiled = torch.compile(model, backend=backend, dynamic=True)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with torch.no_grad():
        for count in (4, 5, 20):
            one, other = torch.zeros(count, 16), torch.zeros(count, 16)
            compiled(rows(count), one)
            eager(rows(count), other)
            assert (one - other).norm() < 0.02 * other.norm()
            assert (model.total - eager.total).norm() < 0.02 * eager.total.norm()
            assert model.calls == eager.calls
    assert torch.equal(torch.get_rng_state(), state)
    assert used(compiled).reason == ""


def test_gradients_and_hooks_are_left_alone():
    """A measurement adds nothing to `.grad`, and calls no hook of the user's."""
    model, calls = net().train(), []
    model[0].weight.register_hook(calls.append)
    compiled = in_precision(model, "bf16")
    result = compiled(rows())
    assert [parameter.grad for parameter in model.parameters()] == [None] * 4
    assert calls == []
    result.square().sum().backward()
    assert len(calls) == 1


def test_the_reference_widens_what_the_model_narrows():
    """The reference of a model that rounds to bfloat16 between its layers does not round."""
    from backend_kwargs.precision.lowered import InFloat64

    graph = torch.fx.symbolic_trace(lambda x: (x.to(torch.bfloat16).float() * 3).half())
    x = torch.randn(100)
    assert torch.equal(InFloat64(graph).run(x), x.double() * 3)


def test_configuration_is_left_alone():
    """Neither Inductor's configuration nor torch's precision settings change."""
    from torch._inductor import config

    before = config.get_config_copy(), torch.get_float32_matmul_precision()
    for name in ("bf16", *(["int8-weight"] if installed_version("torchao") else [])):
        with torch.no_grad():
            in_precision(net(), name)(rows())
    assert (config.get_config_copy(), torch.get_float32_matmul_precision()) == before
