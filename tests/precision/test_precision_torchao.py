"""torchao's linear layers: its kernels, inference only, inference mode, threads."""

import threading

import pytest
import torch
from precision_nets import BOUND, INT8, MARKS, code, error, in_precision, net, rows, torchao, used

from backend_kwargs import BackendKwargsWarning

pytestmark = MARKS


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
    assert used(compiled).nbytes > 0


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
