"""Rewrites of dynamo's graph beside in-place operations: those stay, and a pattern whose inputs change stays too."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import backend_kwargs
from backend_kwargs.harness.named_models import imported
from backend_kwargs.rewrites.table import find_rewrite, resolved
from tests.rewrites.on_a_cpu import compiled_by

W = torch.randn(8, 16)
TARGET = torch.tensor([1, 0, 3])
Q, K = nn.Linear(8, 8), nn.Linear(8, 8)


def product(x):
    return x.unsqueeze(-1) * W


def compiled(fn, rewrite):
    torch._dynamo.reset()
    return torch.compile(fn, backend=backend_kwargs.make_backend("tmpl-inductor", rewrites=(rewrite,)))


def rewritten(fn):
    return backend_kwargs.report(fn).graphs[0].rewritten


def check(fn, rewrite, *args):
    """Compare results and the arguments afterwards with eager's; return what was rewritten."""
    made, theirs, ours = compiled(fn, rewrite), [a.clone() for a in args], [a.clone() for a in args]
    torch.testing.assert_close(made(*ours), fn(*theirs), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    return rewritten(made)


def updates_cache(x, cache):
    cache.index_copy_(2, torch.arange(5), product(x).sum(-2))
    return cache.sum(-1)


def counts(x, cache):
    cache.add_(1)
    return product(x).sum(-2)


def loss_and_count(x, cache):
    cache.mul_(2)
    return F.cross_entropy(x[0, 0, :3], TARGET)


def packs_and_counts(x, cache):
    cache.add_(1)
    return Q(x) + K(x)


@pytest.mark.parametrize(
    ("fn", "rewrite"),
    [
        pytest.param(updates_cache, "contraction", id="a cache's update"),
        pytest.param(counts, "contraction", id="a counter"),
        pytest.param(loss_and_count, "cross_entropy", id="a loss and a counter"),
        pytest.param(packs_and_counts, "packed", id="packed layers and a counter"),
    ],
)
@torch.no_grad()
def test_in_place_operations_stay(fn, rewrite):
    """An in-place operation whose result is unused still changes its argument."""
    assert check(fn, rewrite, torch.randn(2, 3, 5, 8), torch.ones(2, 3, 5, 16)) == {rewrite: 1}


def of_method(x):
    x.add_(1)


def of_item(x):
    x[0] = 1.0


def of_view(x):
    x.flatten().mul_(2)


def of_list(x):
    torch._foreach_mul_([x], 2.0)


def of_numpy(x):
    array = x.numpy()
    array += 1


def of_dunder(x):
    x.__iadd__(1)


def of_statistics(x):
    F.batch_norm(torch.arange(480.0).view(2, 240), x.view(-1), torch.ones(240), training=True)


def of_embedding(x):
    F.embedding(torch.tensor([0, 1]), x.view(-1, 8), None, 0.01)


@torch.compiler.allow_in_graph
def second_is_written(one, other):
    other.add_(one.sum())


def of_unknown(x):
    second_is_written(W, x)


WRITES = {
    "method": of_method,
    "item": of_item,
    "view": of_view,
    "list": of_list,
    "dunder": of_dunder,
    "statistics": of_statistics,
    "embedding": of_embedding,
    "unknown function": of_unknown,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_input_changes_within_a_contraction(write, mode):
    """A product whose input changes before it is summed stays as it is."""

    def fn(x):
        x = x * 1.5
        made = product(x)
        write(x)
        return made.sum(-2)

    with mode():
        assert check(fn, "contraction", torch.randn(2, 3, 5, 8)) == {}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_input_changes_between_layers(write, mode):
    """Layers between which their input changes are not packed."""

    def fn(x):
        x = x * 1.5
        first = Q(x)
        write(x)
        return first, K(x)

    with mode():
        assert check(fn, "packed", torch.randn(2, 3, 5, 8)) == {}


@torch.no_grad()
def test_numpy_changes_the_input_within():
    """A product whose input changes through an array of NumPy stays as it is."""

    def fn(x):
        x = x * 1.5
        made = product(x)
        of_numpy(x)
        return made.sum(-2)

    assert check(fn, "contraction", torch.randn(2, 3, 5, 8)) == {}


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda: torch._foreach_mul_([K.weight], 1.5), id="foreach"),
        pytest.param(
            lambda: F.batch_norm(torch.arange(16.0).view(2, 8), K.bias, torch.ones(8), training=True), id="norm"
        ),
    ],
)
@torch.no_grad()
def test_weights_that_the_graph_writes_are_not_packed(write):
    """Layers whose weights or biases the graph itself changes are not packed, in whichever way it does."""

    def fn(x):
        first = Q(x)
        write()
        return first, K(x)

    x, kept = torch.randn(4, 8), {name: value.clone() for name, value in K.state_dict().items()}
    want = fn(x)
    K.load_state_dict(kept)
    made = compiled(fn, "packed")
    torch.testing.assert_close(made(x), want)
    K.load_state_dict(kept)
    assert rewritten(made) == {}


@torch.no_grad()
def test_layers_under_vmap_are_left_alone():
    """Under `torch.vmap` nothing is packed."""
    assert check(torch.vmap(lambda row: Q(row) + K(row)), "packed", torch.randn(4, 3, 8)) == {}


@torch.no_grad()
def test_write_before_a_pattern_of_dynamic_sizes():
    """Sizes that are computed from the features are no part of the pattern."""

    def fn(hidden, weight, target):
        hidden = hidden * 1.5
        hidden.add_(1)
        logits = F.linear(hidden, weight)
        batch, length, width = logits.shape
        return F.cross_entropy(logits.view(batch * length, width), target.view(-1))

    args = (torch.randn(2, 3, 8), torch.randn(6, 8), torch.randint(6, (2, 3)))
    torch._dynamo.mark_dynamic(args[0], 0)
    torch._dynamo.mark_dynamic(args[2], 0)
    made = compiled(fn, "linear_cross_entropy")
    torch.testing.assert_close(made(*args), fn(*args))
    assert rewritten(made) == {"linear_cross_entropy": 1}


@torch.no_grad()
def test_inplace_argument_by_position():
    """A function that writes into its input, as its arguments by position say, also keeps a pattern as it is."""

    def fn(x):
        x = x * 1.5
        first = Q(x)
        F.silu(x, True)
        return first, K(x)

    assert check(fn, "packed", torch.randn(2, 3, 5, 8)) == {}


def calls_aten_within(x, cache):
    made = product(x)
    doubled = torch.ops.aten.mul(x, 2)
    return made.sum(-2), doubled


def another_changes_within(x, cache):
    made = product(x)
    cache.add_(1)
    return made.sum(-2)


@pytest.mark.parametrize("fn", [calls_aten_within, another_changes_within])
@torch.no_grad()
def test_input_stays_within(fn):
    """Writes to another tensor, or a functional operator of ATen called by its name, keep no pattern as it is."""
    assert check(fn, "contraction", torch.randn(2, 3, 5, 8), torch.ones(3)) == {"contraction": 1}


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@torch.no_grad()
def test_input_changes_outside_of_the_pattern(before):
    """A product whose input changes before it, or after its sum, is computed by the rewrite."""

    def fn(x):
        x = x * 1.5
        if before:
            x.add_(1)
        summed = product(x).sum(-2)
        return summed if before else (summed, x.add_(1))

    assert check(fn, "contraction", torch.randn(2, 3, 5, 8)) == {"contraction": 1}


def features_change(x, weight):
    x = x * 1.5
    logits = F.linear(x, weight)
    x.add_(1)
    return F.cross_entropy(logits, TARGET) + x.sum()


def logits_change(x, weight):
    logits = F.linear(x, weight)
    return F.cross_entropy(logits, TARGET) + logits.add_(1).sum()


def result_changes(x, weight):
    return F.scaled_dot_product_attention(x, x, weight[:3]).mul_(2).sum()


@pytest.mark.parametrize(
    ("name", "fn"),
    [
        ("linear_cross_entropy", features_change),
        ("cross_entropy", logits_change),
        ("fused_attention", result_changes),
    ],
)
def test_what_is_saved_changes(name, fn):
    """A trained loss stays if its features change before it or its logits after it; attention if its result does."""
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(4, 8)
    made, counts = compiled_by(resolved(find_rewrite(name).traced), fn)
    torch.testing.assert_close(*(torch.autograd.grad(call(x, weight), x) for call in (made, fn)))
    assert counts == [0]


@torch.no_grad()
def test_decoding_with_a_static_cache():
    """A decoder of transformers that updates its cache in place computes the same logits and the same cache."""
    transformers = imported("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.MistralConfig(**sizes, num_key_value_heads=2, vocab_size=64)
    model = transformers.MistralForCausalLM(config).eval()

    def decoded(call):
        cache = transformers.StaticCache(config=config, max_cache_len=8)
        cache.early_initialization(2, 2, 8, torch.float32, torch.device("cpu"))
        found = []
        for at in range(3):
            position = torch.tensor([at])
            found.append(call(torch.full((2, 1), at + 1), past_key_values=cache, cache_position=position).logits)
        return found, [layer.keys for layer in cache.layers]

    made = compiled(model, "packed")
    torch.testing.assert_close(decoded(made), decoded(model), rtol=1e-4, atol=1e-4)
    assert rewritten(made) == {"packed": 4}
