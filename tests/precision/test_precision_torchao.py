"""torchao's linear layers: its kernels, inference only, inference mode, threads."""

import threading

import pytest
import torch

from backend_kwargs import BackendKwargsWarning
from tests.precision.precision_nets import (
    BOUND,
    INT8,
    MARKS,
    code,
    error,
    exact_int8,
    in_precision,
    net,
    refusals,
    rows,
    torchao,
    used,
)

pytestmark = MARKS


@exact_int8
@torchao
def test_torchaos_kernels_are_in_the_code():
    """Linear layers multiply integers."""
    compiled = in_precision(net(), "int8-dynamic")
    with torch.no_grad():
        compiled(rows())
    assert code(compiled).count("_int_mm") >= 2
    assert used(compiled).products == 2


@torchao
def test_int8_weights_are_read_as_int8():
    """In the generated code weights are int8, and only the bias is float32."""
    compiled = in_precision(net(), "int8-weight")
    with torch.no_grad():
        compiled(rows())
    assert "torch.int8" in code(compiled)


@torchao
def test_int8_does_not_train():
    """With gradients the precision is refused with the reason, and the graph is compiled unchanged."""
    with pytest.warns(BackendKwargsWarning) as warned:
        in_precision(net(), "int8-dynamic")(rows()).sum().backward()
    assert str(warned[0].message) == (
        "A graph is compiled without precision 'int8-dynamic': it is for inference: call the model under "
        "torch.no_grad()."
    )


ONE_ROW = "the weight of its linear layer multiplies one row, or may, for which torch's int8 product on a CPU is wrong"
ONE_ROWS = {
    "row": (1, 64),
    "token": (1, 1, 64),
    "vector": (64,),
    "several dimensions": (1, 1, 1, 64),
}


@torchao
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", ONE_ROWS.values(), ids=ONE_ROWS)
def test_one_row_is_not_multiplied_in_int8(shape, dtype):
    """With VNNI, torch's int8 product of a view of one row is memory that nobody wrote, so no CPU computes it."""
    model, x = torch.nn.Linear(64, 32).to(dtype), torch.randn(shape).to(dtype)
    compiled = in_precision(model, "int8-dynamic")
    with torch.no_grad(), pytest.warns(BackendKwargsWarning) as warned:
        torch.testing.assert_close(compiled(x), model(x))
    assert refusals(warned) == [f"A graph is compiled without precision 'int8-dynamic': {ONE_ROW}."]


@torchao
@pytest.mark.parametrize("sizes", [(64, 1), (1, 64)], ids=["one output", "one input"])
def test_weights_of_one_row_or_column_stay(sizes):
    """A weight with a size of 1 has such strides too."""
    compiled = in_precision(torch.nn.Linear(*sizes), "int8-dynamic")
    with torch.no_grad(), pytest.warns(BackendKwargsWarning, match=r"and torch's int8 product on a CPU is wrong for"):
        compiled(torch.randn(8, sizes[0]))


@torchao
def test_a_number_of_rows_that_may_become_one():
    """Where a size is unknown until it runs, or may be 1, the layer keeps its precision and others are quantised."""
    model = net()

    def by_data(x, chosen):
        return model(x[chosen])

    compiled = in_precision(by_data, "int8-dynamic")
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        with pytest.warns(BackendKwargsWarning, match="multiplies one row, or may"):
            compiled(rows(), torch.arange(8) > 2)
        for count in (1, 5):
            chosen = torch.arange(8) < count
            assert error(compiled(rows(), chosen), model, rows()[:count]) < 1e-6


@exact_int8
@torchao
def test_the_layer_of_one_row_alone_keeps_its_precision():
    """Only the layer that multiplies one row is left out."""

    class Pooled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = net(), torch.nn.Linear(32, 8)

        def forward(self, x):
            return self.head(self.body(x).mean(0))

    model = Pooled().eval()
    compiled = in_precision(model, "int8-dynamic")
    with torch.no_grad():
        assert error(compiled(rows()), model, rows()) < BOUND
    assert used(compiled).products == 2


@torchao
def test_inference_tensors_are_refused():
    """Parameters created in inference mode are refused, since they have no version counter."""
    with torch.inference_mode():
        model = net()
        with pytest.warns(BackendKwargsWarning) as warned:
            in_precision(model, "int8-dynamic")(rows())
    assert str(warned[0].message) == (
        "A graph is compiled without precision 'int8-dynamic': a weight is an inference tensor, which has no version "
        "counter."
    )


@pytest.mark.parametrize("precision", ["bf16", *INT8])
def test_inference_mode(precision):
    """A model created outside inference mode and called in it uses the precision, and its weights are followed."""
    model, x = net(), rows()
    compiled = in_precision(model, precision)
    with torch.inference_mode():
        assert error(compiled(x), model, x) < BOUND
    with torch.no_grad():
        model[0].weight.mul_(-2)
    with torch.inference_mode():
        assert error(compiled(x), model, x) < BOUND
    assert used(compiled).reason == ""


@exact_int8
@torchao
def test_two_threads():
    """Two threads that call one graph use the current weight after it changes between calls."""
    model, x = net(), rows()
    compiled = in_precision(model, "int8-dynamic")
    errors = []

    def call() -> None:
        with torch.no_grad():
            errors.extend(error(compiled(x), model, x) for _ in range(20))

    with torch.no_grad():
        compiled(x)
        model[0].weight.mul_(-2)
    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 40
    assert max(errors) < BOUND


linear = torch.nn.functional.linear
DOUBLE, LINEAR, BILINEAR = torch.nn.Linear(64, 4).double(), torch.nn.Linear(64, 4), torch.nn.Bilinear(1, 1, 64)
SQUARE = torch.ones(64, 64)
NONE = {
    "no layer": (torch.relu, "it has no linear layer"),
    "float64": (lambda x: DOUBLE(x.double()), "the weight of its linear layer is of torch.float64"),
    "computed": (
        lambda x: linear(x, LINEAR.weight * 2),
        "the weight of its linear layer is not a parameter, or the graph writes it",
    ),
    "several": (
        lambda x: linear(linear(x, SQUARE), SQUARE),
        "the weight of the first of its 2 linear layers is not a parameter, or the graph writes it",
    ),
    "a vector": (lambda x: linear(x, BILINEAR.bias), "the weight of its linear layer has 1 dimensions, not 2"),
}


@torchao
@pytest.mark.parametrize(("model", "why"), NONE.values(), ids=NONE)
def test_why_no_layer_is_quantised(model, why):
    """The warning says what about the graph, or about its first linear layer, rules the precision out."""
    with torch.no_grad(), pytest.warns(BackendKwargsWarning) as warned:
        in_precision(model, "int8-dynamic")(rows())
    assert str(warned[0].message) == f"A graph is compiled without precision 'int8-dynamic': {why}."
