"""A race leaves torch, weights, gradients, generators and the user's objects unchanged."""

import copy
import gc
import os

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._guards import TracingContext
from torch.nn import functional

import backend_kwargs
from backend_kwargs.auto import race
from backend_kwargs.auto.sandbox import LIBDEVICE
from tests.auto.graphs import backend_of, chain, rows_of


class Averaged(nn.Module):
    """A call moves weights towards others through .data, whose changes no version counts."""

    def __init__(self, move):
        super().__init__()
        self.kept, self.trained = nn.Parameter(torch.ones(64)), nn.Parameter(torch.full((64,), 2.0))
        self.move = move

    def forward(self, x):
        self.move(self.kept, self.trained)
        return (x * self.kept).sin()


@pytest.mark.parametrize(
    "move",
    [
        pytest.param(lambda to, by: to.data.mul_(0.5).add_(by.data, alpha=0.5), id="tensor"),
        pytest.param(lambda to, by: to.data[8:].mul_(0.5), id="view"),
        pytest.param(lambda to, by: to[8:].data.mul_(0.5), id="data of a view"),
        pytest.param(lambda to, by: torch._foreach_lerp_([to.data], [by.data], 0.5), id="list"),
    ],
)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_weights_changed_through_data_are_changed_once(auto, move, grad):
    """A race leaves weights unchanged, even if dynamo's fakes count no write."""
    model, expected, x = Averaged(move), Averaged(move), torch.randn(8, 64)
    with torch.set_grad_enabled(grad):
        assert torch.allclose(auto(model)(x), expected(x))
    assert torch.equal(model.kept, expected.kept)


@pytest.mark.parametrize(
    "move",
    [
        pytest.param(lambda to, by: torch._foreach_mul_([to], 1.5), id="list"),
        pytest.param(
            lambda to, by: functional.batch_norm(by.view(4, 16), to[:16], to[16:32], training=True), id="norm"
        ),
        pytest.param(lambda to, by: functional.embedding(torch.arange(2), to.view(4, 16), max_norm=0.5), id="max_norm"),
    ],
)
@torch.no_grad()
def test_parameters_changed_without_a_version_are_changed_once(auto, store, move):
    """A race leaves parameters unchanged that a list of tensors, a norm or an embedding writes."""
    model, expected, x = Averaged(move), Averaged(move), torch.randn(8, 64)
    assert torch.allclose(auto(model)(x), expected(x), atol=1e-6)
    assert torch.allclose(model.kept, expected.kept)
    assert rows_of(store)["default"].status == "pass"


def test_the_users_frozen_objects_stay_frozen(auto):
    """A race freezes existing objects so that it collects only its own garbage, unless the user has frozen some."""
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        auto(chain)(torch.randn(8, 64))
        assert 0 < gc.get_freeze_count() <= before
    finally:
        gc.unfreeze()
    before = gc.get_freeze_count()
    torch._dynamo.reset()
    auto(chain, race="always")(torch.randn(8, 64))
    assert gc.get_freeze_count() == before


def test_a_race_leaves_what_torch_knows_of_sizes(monkeypatch, default_wins):
    """A race leaves guards and replacements of the shape environment, and the tracing context, unchanged."""
    seen, run = [], race.race

    def known():
        context = TracingContext.get()
        env = context.fake_mode.shape_env
        sizes = [str(each) for each in (env.guards, env.replacements, env.axioms, env.divisible)]
        return [
            *sizes,
            context.fw_metadata,
            context.params_flat,
            context.output_strides,
            len(context.guards_context.dynamo_guards),
        ]

    def spy(request, tick):
        seen.append(known())
        outcome = run(request, tick)
        seen.append(known())
        return outcome

    monkeypatch.setattr(race, "race", spy)
    torch.compile(lambda x: torch.relu(x.view(-1, 2) + 1).sum(-1), backend=backend_of(), dynamic=True)(
        torch.randn(8, 64)
    )
    assert seen[0] == seen[1]


def test_training_gives_the_right_gradients(auto):
    """Forward and backward are decided together, and gradients equal eager's."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)), torch.randn(8, 16)
    auto(model)(x).square().mean().backward()
    seen = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(x).square().mean().backward()
    for got, wanted in zip(seen, model.parameters(), strict=True):
        assert torch.allclose(got, wanted.grad, atol=1e-5)


def test_racing_touches_no_gradient(auto):
    """A race leaves `.grad` empty and calls no user hook."""
    model, x = nn.Linear(16, 4), torch.randn(8, 16)
    called = []
    model.weight.register_hook(lambda grad: called.append(1))
    auto(model)(x)
    assert model.weight.grad is None
    assert called == []


def test_racing_packs_nothing_by_a_users_hooks(auto):
    """A race does not call the user's saved-tensor hooks; the call itself does."""
    model, x = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)), torch.randn(8, 16)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: packed.append(1) or saved, lambda saved: saved):
        model(x)
        alone = len(packed)
        auto(model)(x)
    assert alone <= len(packed) <= 2 * alone


def test_buffers_change_once(auto):
    """After the first call, batch norm's statistics are those of one call."""
    x = torch.randn(32, 4, 3, 3)
    raced, plain = (nn.BatchNorm2d(4) for _ in range(2))
    auto(raced)(x)
    plain(x)
    for got, wanted in zip(raced.buffers(), plain.buffers(), strict=True):
        assert torch.allclose(got, wanted)


def test_a_cache_that_is_written_is_right_the_first_time(auto):
    """After the first call, a key-value cache updated in place contains one step, through every alias."""

    def step(cache, new, at):
        cache[at] = new
        return cache.sum() + new.sum()

    cache, new = torch.zeros(4, 8), torch.randn(8)
    with torch.no_grad():
        seen = auto(step)(cache, new, 2)
    assert torch.allclose(seen, 2 * new.sum(), atol=1e-5)
    assert torch.equal(cache[2], new)
    assert not cache[[0, 1, 3]].any()


class Counting(nn.Module):
    """Writes a buffer in place, and batch norm's statistics, whose writes dynamo's fakes do not count."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.register_buffer("total", torch.zeros(16))

    def forward(self, x):
        y = self.norm(self.linear(x))
        self.total.add_(y.mean(0)).add_(1)
        return y + self.total


@pytest.mark.filterwarnings("ignore:.*cannot act fully here")
@pytest.mark.parametrize(
    "candidates", [["no_size_asserts"], ["onnxruntime"], ["freezing"]], ids=["permitted", "compiler", "template"]
)
@torch.no_grad()
def test_buffers_change_once_if_parameters_are_frozen(auto, store, default_wins, candidates):
    """A race of frozen code changes no buffer, and frozen code passes the check: later calls equal eager's."""
    raced, x = Counting(), torch.randn(8, 16)
    plain = copy.deepcopy(raced)
    compiled = auto(raced, candidates, **({} if candidates == ["freezing"] else {"freezing": True}))
    for _ in range(3):
        torch.testing.assert_close(compiled(x), plain(x))
    torch.testing.assert_close(raced.state_dict(), plain.state_dict())
    assert not [row.reason for row in rows_of(store).values() if row.status == "fail_accuracy"]


def test_a_candidates_libdevice_goes_with_it(auto, monkeypatch):
    """A candidate's libdevice is removed before the next one is compiled, even if it fails."""
    monkeypatch.delenv(LIBDEVICE, raising=False)

    def linked(graph):
        monkeypatch.setenv(LIBDEVICE, "planted.bc")
        raise RuntimeError("planted")

    backend_kwargs.register_template("linked", {"post_grad_custom_post_pass": linked, "fx_graph_cache": False})
    auto(chain, ["linked"])(torch.randn(8, 64))
    assert LIBDEVICE not in os.environ


def test_donated_buffers_are_the_calls_own(auto):
    """A backward graph that overwrites buffers saved by the forward graph is raced on separate calls."""
    model, x = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)), torch.randn(4, 16)
    model(x).sum().backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with functorch_config.patch(donated_buffer=True):
        auto(model)(x).sum().backward()
    assert all(torch.allclose(p.grad, grad, atol=1e-5) for p, grad in zip(model.parameters(), wanted, strict=True))


def test_random_state_is_untouched(auto):
    """With a seed, dropout gives the same mask and generator state with and without a race."""
    model, x = nn.Dropout(0.5), torch.ones(64, 64)
    torch.manual_seed(0)
    raced = auto(model)(x), torch.rand(3)
    torch._dynamo.reset()
    torch.manual_seed(0)
    again = auto(model)(x), torch.rand(3)
    assert all(torch.equal(a, b) for a, b in zip(raced, again, strict=True))


def test_weights_stay_static_inputs(auto, monkeypatch):
    """Candidates and the winner get default's static inputs; otherwise CUDA graphs would copy weights."""
    from backend_kwargs.torch_internals import compile_fx as module

    seen, inner = [], module.compile_fx_inner

    def spy(gm, example_inputs, **kwargs):
        seen.append(tuple(kwargs.get("static_input_idxs", ())))
        return inner(gm, example_inputs, **kwargs)

    monkeypatch.setattr(module, "compile_fx_inner", spy)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(8, 16)
    with torch.no_grad():
        torch.compile(model, backend=backend_kwargs.make_backend("tmpl-inductor", fx_graph_cache=False))(x)
        alone = seen.pop()
        torch._dynamo.reset()
        auto(model, fx_graph_cache=False)(x)
    assert alone
    assert set(seen) == {alone}
