"""The bound of a lower precision: what exceeds it, and graphs without a reference."""

import pytest
import torch
from precision_nets import MARKS, error, in_precision, net, rows, used
from torch.nn import functional

import backend_kwargs as bk
from backend_kwargs import BackendKwargsWarning
from backend_kwargs.requirements import installed_version

pytestmark = MARKS


def test_beyond_the_bound_is_not_used():
    """If the error exceeds the bound, the graph is compiled as captured, with a warning and a line in the report."""
    model, x = net(), rows()
    compiled = in_precision(model, "bf16", max_error=1e-5)
    with torch.no_grad(), pytest.warns(BackendKwargsWarning) as warned:
        assert error(compiled(x), model, x) < 1e-6
    assert str(warned[0].message).startswith("A graph is compiled without precision 'bf16': output[0]: error 0.00")
    assert str(warned[0].message).endswith(", above max_error=1e-05.")
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
    assert str(warned[0].message) == f"A graph is compiled without precision 'bf16': {reason}."


def test_results_that_are_all_zero_measure_nothing():
    """A last layer that starts with zeros hides the errors of the layers before it, unless gradients show them."""
    model, x = net(), rows()
    (*_, last) = [each for each in model.modules() if isinstance(each, torch.nn.Linear)]
    torch.nn.init.zeros_(last.weight)
    torch.nn.init.zeros_(last.bias)
    compiled = in_precision(model, "bf16", max_error=0.05)
    with torch.no_grad(), pytest.warns(BackendKwargsWarning) as warned:
        compiled(x)
    assert str(warned[0].message) == (
        "A graph is compiled without precision 'bf16': its error cannot be measured: all results are 0."
    )
    compiled(x).sum().backward()
    assert "precision bf16: " in str(bk.report(compiled).graphs[-1].precision)


def test_the_measure_leaves_no_trace():
    """Random states, inputs that the graph writes and gradients are as after one call."""
    buffer, x, w = torch.zeros(8, 16), rows(), torch.randn(64, 16)

    def counting(x, w, buffer):
        return buffer.add_(x @ w)

    compiled = in_precision(counting, "bf16")
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with torch.no_grad():
        compiled(x, w, buffer)
    assert torch.equal(torch.get_rng_state(), state)
    assert (buffer - x @ w).norm() < 0.02 * buffer.norm()


def test_the_reference_widens_what_the_model_narrows():
    """The reference of a model that rounds to bfloat16 between its layers does not round."""
    from backend_kwargs.compilers.precision.reference import InFloat64

    graph = torch.fx.symbolic_trace(lambda x: (x.to(torch.bfloat16).float() * 3).half())
    x = torch.randn(100)
    assert torch.equal(InFloat64(graph).run(x), x.double() * 3)


def test_configuration_is_left_alone():
    """Neither Inductor's configuration nor torch's precision settings change."""
    from torch._inductor import config

    before = config.get_config_copy(), torch.get_float32_matmul_precision()
    for name in ("bf16", *(["int8-dynamic"] if installed_version("torchao") else [])):
        with torch.no_grad():
            in_precision(net(), name)(rows())
    assert (config.get_config_copy(), torch.get_float32_matmul_precision()) == before
