"""No call of a compiled module records a gradient, whatever it compiles and in whichever state."""

import threading

import pytest
import torch

import backend_kwargs as bk
from tests.bundles.small_module import scaled


def with_dropout():
    return torch.nn.Sequential(scaled(), torch.nn.Dropout(0.5)).eval()


@pytest.fixture(scope="module", params=["eager", "aot_eager"])
def saved(request, tmp_path_factory):
    """A bundle with dynamic sizes, of graphs that dynamo runs in eager or that AOTAutograd traces with gradients."""
    path = tmp_path_factory.mktemp("saved") / "bundle"
    config = bk.CompileConfig(backend=request.param, dynamic=True)
    bk.CompiledModule(config).build(with_dropout(), [torch.randn(4, 8)]).save(path)
    return path


def in_another_thread(call, x):
    results = []
    thread = threading.Thread(target=lambda: results.append(call(x)))
    thread.start()
    thread.join()
    return results[0]


CALLS = {
    "a sample's size": lambda module, call, x: call(x),
    "batch 1": lambda module, call, x: call(x[:1]),
    "another size": lambda module, call, x: call(torch.cat([x, x])),
    "in training mode": lambda module, call, x: (module.train(), call(x))[1],
    "another thread": lambda module, call, x: in_another_thread(call, x),
    "inputs that require gradients": lambda module, call, x: call(x.clone().requires_grad_()),
}


@pytest.mark.parametrize("made_ready", ["activate", "deploy"])
@pytest.mark.parametrize("later", CALLS)
def test_a_later_call_records_no_gradient(saved, x, later, made_ready):
    """After warm-up no call records a gradient, also one that compiles again, and the caller's mode is kept."""
    module = with_dropout()
    loaded = bk.CompiledModule.load(saved, module)
    getattr(loaded, made_ready)()
    for _ in range(2):
        loaded(x)
    assert not CALLS[later](module, loaded, x).requires_grad
    assert torch.is_grad_enabled()


def test_an_error_in_a_deployed_module_leaves_gradients_on(loaded, x):
    """The caller's mode is put back when inputs are refused."""
    loaded.deploy()
    with pytest.raises(bk.BackendKwargsError):
        loaded(x[:, :4])
    assert torch.is_grad_enabled()
