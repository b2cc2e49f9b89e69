"""Gradients equal eager's: forward and backward graphs in TVM, saved tensors, and optimizer steps."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

from tests.backends.tvm.tvm_models import MODELS

CLOSE = {"rtol": 1e-3, "atol": 1e-4}


def loss_and_gradients(call, net, x):
    """Return a loss that gives each output its own weight, and the gradients of all parameters and of the input."""
    net.zero_grad()
    x = x.clone().requires_grad_(x.is_floating_point())
    out = call(x)
    loss = (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in net.parameters()], x.grad


@pytest.mark.parametrize(("make", "shape"), MODELS.values(), ids=MODELS)
def test_gradients_are_eagers(compiled, make, shape):
    net, x = make().train(), torch.randn(shape)
    eager = copy.deepcopy(net)
    call = compiled(net)
    for _ in range(2):
        assert_close(loss_and_gradients(call, net, x), loss_and_gradients(eager, eager, x), **CLOSE)
    assert {"forward", "backward"} <= set(call.graphs)
    assert_close(dict(net.named_buffers()), dict(eager.named_buffers()), **CLOSE)


def test_steps_of_an_optimizer(compiled):
    """The optimizer's changes of parameters take effect at the next call, without another compile."""
    net = MODELS["mlp"][0]()
    eager = copy.deepcopy(net)
    call = compiled(net)
    steps = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (net, eager)]
    for _ in range(5):
        x = torch.randn(3, 8)
        for run, each, step in zip((call, eager), (net, eager), steps, strict=True):
            loss_and_gradients(run, each, x)
            step.step()
    assert_close(dict(net.named_parameters()), dict(eager.named_parameters()), **CLOSE)
    assert len(call.summaries) == 1


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True)], ids=str)
def test_some_inputs_require_grad(compiled, wanted):
    def fn(x, y):
        return x.sin() * y.cos(), x + 1, (x * 2).detach()

    call = compiled(fn)
    grads = []
    for run in (call, fn):
        inputs = [torch.linspace(-1, 1, 8).requires_grad_(each) for each in wanted]
        outputs = run(*inputs)
        outputs[0].sum().backward()
        grads.append(([out.requires_grad for out in outputs], [x.grad for x in inputs]))
    assert_close(grads[0], grads[1])
    assert call.operators


def test_attention_with_gradients(compiled):
    """ATen's fused attention keeps its logsumexp for the backward pass."""
    q, k, v = (torch.randn(2, 2, 6, 8, requires_grad=True) for _ in range(3))

    def fn(q, k, v):
        return functional.scaled_dot_product_attention(q.sin(), k, v, is_causal=True).exp()

    weight = torch.randn(2, 2, 6, 8)
    gradients = [torch.autograd.grad((run(q, k, v) * weight).sum(), (q, k, v)) for run in (compiled(fn), fn)]
    assert_close(gradients[0], gradients[1], **CLOSE)


def test_dropout_draws_eagers_numbers(compiled):
    net, x = (
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.3)),
        torch.randn(4, 8),
    )
    eager = copy.deepcopy(net)
    results = []
    for run, each in ((compiled(net), net), (eager, eager)):
        torch.manual_seed(3)
        results.append([loss_and_gradients(run, each, x) for _ in range(2)])
    assert_close(results[0], results[1], **CLOSE)


def test_dynamic_shapes_with_gradients_compile_once(compiled):
    net = MODELS["mlp"][0]()
    eager = copy.deepcopy(net)
    call = compiled(net, dynamic=True)
    for rows in (3, 5, 8):
        x = torch.randn(rows, 8)
        assert_close(loss_and_gradients(call, net, x), loss_and_gradients(eager, eager, x), **CLOSE)
    assert len(call.summaries) == 1


def test_activation_checkpointing(compiled):
    from torch.utils.checkpoint import checkpoint

    dropout = torch.nn.Dropout(0.5)
    net, x = torch.nn.Sequential(MODELS["mlp"][0](), dropout, torch.nn.Tanh(), dropout), torch.randn(3, 8)
    eager = copy.deepcopy(net)
    call = compiled(lambda x: checkpoint(net, x, use_reentrant=False))
    torch.manual_seed(0)
    wanted = loss_and_gradients(eager, eager, x)
    torch.manual_seed(0)
    assert_close(loss_and_gradients(call, net, x), wanted, **CLOSE)


def test_autocast_with_gradients(compiled):
    net, x = MODELS["mlp"][0](), torch.randn(3, 8)
    eager = copy.deepcopy(net)
    with torch.autocast("cpu", torch.bfloat16):
        result, wanted = (loss_and_gradients(run, each, x) for run, each in ((compiled(net), net), (eager, eager)))
    assert_close(result, wanted, rtol=3e-2, atol=3e-2)
