"""`nn.MultiheadAttention` without copies: which inputs are the same, masks, layouts, and what must stay."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from backend_kwargs.rewrites.multihead_attention import attend_without_copies
from tests.rewrites.on_a_cpu import compiled_by

LENGTH, KEYS, BATCH, WIDTH, HEADS = 7, 9, 2, 32, 4
CAUSAL = nn.Transformer.generate_square_subsequent_mask(LENGTH)
OF_HEADS = torch.linspace(-1, 1, BATCH * HEADS * LENGTH**2).view(BATCH * HEADS, LENGTH, LENGTH)
PADDING = torch.arange(LENGTH).expand(BATCH, -1) > torch.tensor([[6], [4]])
ADDED_PADDING = torch.zeros(BATCH, LENGTH).masked_fill(PADDING, -float("inf"))

# Each of the module and of inputs of two lengths.
FORMS = {
    "self": lambda m, x, y, z: m(x, x, x, need_weights=False),
    "keys are values": lambda m, x, y, z: m(x, y, y, need_weights=False),
    "three inputs": lambda m, x, y, z: m(x, y, z, need_weights=False),
    "queries are keys": lambda m, x, y, z: m(y, y, z, need_weights=False),
    "causal": lambda m, x, y, z: m(x, x, x, need_weights=False, attn_mask=CAUSAL, is_causal=True),
    "mask": lambda m, x, y, z: m(x, x, x, need_weights=False, attn_mask=CAUSAL),
    "boolean mask": lambda m, x, y, z: m(x, x, x, need_weights=False, attn_mask=CAUSAL < 0),
    "mask of each head": lambda m, x, y, z: m(x, x, x, need_weights=False, attn_mask=OF_HEADS),
    "padding": lambda m, x, y, z: m(x, x, x, need_weights=False, key_padding_mask=PADDING),
    "padding that is added": lambda m, x, y, z: m(x, x, x, need_weights=False, key_padding_mask=ADDED_PADDING),
    "mask and padding": lambda m, x, y, z: m(
        x, x, x, need_weights=False, key_padding_mask=PADDING, attn_mask=CAUSAL < 0, is_causal=True
    ),
    "mask of each head and padding": lambda m, x, y, z: m(
        x, x, x, need_weights=False, key_padding_mask=ADDED_PADDING, attn_mask=OF_HEADS
    ),
}


def made(*, batch_first, dtype=torch.float32, **options):
    """Return a module and its inputs."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, dtype=dtype, **options)
    for each in module.parameters():
        nn.init.normal_(each, std=0.2)  # biases too
    sizes = ((BATCH, each, WIDTH) if batch_first else (each, BATCH, WIDTH) for each in (LENGTH, KEYS, KEYS))
    return module, *(torch.randn(each, dtype=dtype) for each in sizes)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batches first", "sequences first"])
@pytest.mark.parametrize("form", FORMS)
def test_each_form(form, batch_first, bias):
    """The result, its strides, and the gradients of all parameters are eager's."""
    module, *inputs = made(batch_first=batch_first, bias=bias)
    compiled, counts = compiled_by(attend_without_copies, FORMS[form])
    (got, weights), (want, _) = compiled(module, *inputs), FORMS[form](module, *inputs)
    assert_close(got, want)
    assert (got.stride(), weights) == (want.stride(), None)
    grads = (torch.autograd.grad(each.square().sum(), [*module.parameters()]) for each in (got, want))
    assert_close(*grads, atol=1e-4, rtol=1e-4)
    assert counts == [1]


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize(("norm_first", "dtype"), [(False, torch.bfloat16), (True, torch.float32)], ids=str)
def test_transformer_layers(norm_first, dtype):
    """An encoder and a decoder train as in eager, by Inductor's code."""
    torch.manual_seed(0)
    model = nn.Transformer(WIDTH, HEADS, 1, 1, 48, dropout=0.0, batch_first=True, norm_first=norm_first, dtype=dtype)
    source, target = torch.randn(BATCH, KEYS, WIDTH, dtype=dtype), torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype)
    compiled, counts = compiled_by(attend_without_copies, model, inductor=True)
    got, want = (fn(source, target, tgt_mask=CAUSAL.to(dtype), tgt_is_causal=True) for fn in (compiled, model))
    near = {} if dtype == torch.float32 else {"atol": 6e-2, "rtol": 6e-2}
    assert_close(got, want, **near)
    if dtype == torch.float32:
        grads = (torch.autograd.grad(each.square().sum(), [*model.parameters()]) for each in (got, want))
        assert_close(*grads, atol=1e-3, rtol=1e-3)
    assert sum(counts) == 3  # one of the encoder, two of the decoder


def test_nothing_is_copied():
    """The attention's inputs are views of the products, and batches stay first."""
    module, x, *_ = made(batch_first=True)
    graphs = []

    def backend(gm, inputs):
        from torch._dynamo.backends.common import aot_autograd

        change = attend_without_copies(gm, inputs)
        return aot_autograd(fw_compiler=lambda gm, _: graphs.append(gm.graph) or gm.forward)(change.gm, inputs)

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(FORMS["self"], backend=backend)(module.eval(), x, x, x)
    names = [str(node.target) for node in graphs[0].nodes if node.op == "call_function"]
    attention = next(at for at, name in enumerate(names) if "attention" in name)
    assert sum("addmm" in name or name.startswith("aten.mm") for name in names[:attention]) == 1
    assert not any("clone" in name or "copy" in name for name in names[:attention])


def test_dropout():
    """Attention's dropout is active in training only."""
    module, x, *_ = made(batch_first=True, dropout=0.5)
    compiled, counts = compiled_by(attend_without_copies, FORMS["self"])
    assert not torch.equal(compiled(module, x, x, x)[0], FORMS["self"](module.eval(), x, x, x)[0])
    assert_close(compiled(module, x, x, x)[0], FORMS["self"](module, x, x, x)[0])
    assert counts == [1, 1]


# What must stay: the module's options, and the call.
NEAR = {
    "weights": ({}, lambda m, x, y, z: m(x, x, x)),
    "bias of keys": ({"add_bias_kv": True}, FORMS["self"]),
    "a key of zeros": ({"add_zero_attn": True}, FORMS["self"]),
    "sizes of their own": ({"kdim": WIDTH, "vdim": 16}, lambda m, x, y, z: m(x, y, z[..., :16], need_weights=False)),
    "no sequences": ({}, lambda m, x, y, z: m(x[:0], x[:0], x[:0], need_weights=False)),
    "one sequence": ({}, lambda m, x, y, z: m(x[0], x[0], x[0], need_weights=False)),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_miss(name):
    """Calls with other options stay as they are."""
    options, fn = NEAR[name]
    module, *inputs = made(batch_first=True, **options)
    compiled, counts = compiled_by(attend_without_copies, fn)
    assert_close(compiled(module, *inputs)[0], fn(module, *inputs)[0])
    assert counts == [0]
