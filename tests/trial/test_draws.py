"""Eager's random numbers in a run in float64: the same ones, whatever the dtype, or none."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from backend_kwargs.trial import errors
from backend_kwargs.trial.roundings import Draws, DrawsError

X = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16().float()
torch.manual_seed(0)
RNN = nn.LSTM(64, 16, 2, dropout=0.5)


def rnn(x):
    return copy.deepcopy(RNN).to(x.dtype)(x)[0]


DRAWING = [
    pytest.param(lambda x: functional.dropout(x, 0.3).tanh(), id="dropout"),
    pytest.param(lambda x: torch.native_dropout(x, 0.3, True)[0].tanh(), id="dropout in one operator, as on a GPU"),
    pytest.param(lambda x: functional.dropout1d(x, 0.3), id="whole channels"),
    pytest.param(lambda x: functional.alpha_dropout(x, 0.3, training=True), id="alpha dropout"),
    pytest.param(lambda x: x * torch.rand_like(x) + torch.randn_like(x), id="like the input"),
    pytest.param(lambda x: x * torch.rand(32, 64).to(x.dtype), id="by size"),
    pytest.param(lambda x: x[torch.randperm(32)], id="an order"),
    pytest.param(lambda x: x.clone().uniform_() + x, id="in place"),
    pytest.param(functional.gumbel_softmax, id="exponential"),
    pytest.param(lambda x: x.gather(1, x.softmax(-1).multinomial(2)), id="chosen by probabilities"),
    pytest.param(lambda x: x * torch.bernoulli(x.sigmoid()), id="by probabilities"),
    pytest.param(
        lambda x: functional.scaled_dot_product_attention(*[x[None, None]] * 3, dropout_p=0.3), id="attention"
    ),
    pytest.param(rnn, id="between layers"),
]


def step(fn, dtype):
    """Return a call of `fn` and of its backward pass, from the same seed."""

    def run():
        torch.manual_seed(0)
        x = X.to(dtype, copy=True).requires_grad_()
        output = fn(x)
        return {"output": output.detach(), "gradient": torch.autograd.grad(output.sum(), x)}

    return run


def moved(fn, dtype, precise):
    """Return eager's largest error to the results in the dtype `precise` that draw the same."""
    run = step(fn, dtype)
    eager = run()
    reference = Draws(run, eager, random=True).given_to(step(fn, precise))()
    return max(each.largest for each in errors(eager, reference).values())


@pytest.mark.parametrize("fn", DRAWING)
def test_float64_has_eagers_draws(fn):
    """With other ones, eager would be as far from its reference as the numbers are large."""
    assert moved(fn, torch.float32, torch.float64) < 1e-4


@pytest.mark.parametrize("fn", DRAWING)
def test_so_do_other_precisions(fn):
    """The error of a lower one is its own, and its draws are still eager's."""
    assert moved(fn, torch.float32, torch.float32) == 0
    assert moved(fn, torch.bfloat16, torch.float64) < 0.3


@torch.library.custom_op("backend_kwargs_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


@torch.library.custom_op("backend_kwargs_tests::randn_like", mutates_args=())
def named_as_torchs(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn_like(x)


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        pytest.param(torch.normal, "aten.normal.Tensor_float computes with what it draws", id="a mean"),
        pytest.param(
            lambda x: functional.rrelu(x, training=True),
            "aten.rrelu_with_noise.default computes with what it draws",
            id="a slope",
        ),
        pytest.param(
            noisy, "backend_kwargs_tests.noisy.default computes with what it draws", id="a user's operator, which may"
        ),
        pytest.param(
            named_as_torchs,
            "backend_kwargs_tests.randn_like.default computes with what it draws",
            id="a user's operator, named as torch's",
        ),
    ],
)
def test_numbers_that_are_not_apart(fn, why):
    """An operator that computes in eager's precision with what it draws has no reference."""
    draws = Draws(lambda: fn(X), fn(X), random=True)
    with pytest.raises(DrawsError) as error:
        draws.given_to(lambda: None)()
    assert str(error.value) == why


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        pytest.param(lambda: functional.dropout(X).mul(torch.rand(2)[0]), "", id="the same"),
        pytest.param(
            lambda: torch.rand(2), "aten.rand.default draws where eager had aten.bernoulli_.float", id="another"
        ),
        pytest.param(lambda: functional.dropout(X), "nothing draws for aten.rand.default", id="fewer"),
        pytest.param(
            lambda: functional.dropout(X[1:]),
            "aten.bernoulli_.float draws where eager had aten.bernoulli_.float",
            id="of another size",
        ),
        pytest.param(
            lambda: (functional.dropout(X), torch.rand(2), torch.rand(2)),
            "aten.rand.default draws where eager had nothing",
            id="more",
        ),
    ],
)
def test_a_run_that_draws_otherwise_is_no_reference(fn, why):
    """Its numbers would be those of other places."""

    def eager():
        torch.manual_seed(0)
        return {"output": functional.dropout(X) * torch.rand(2)[0]}

    found = ""
    try:
        Draws(eager, eager(), random=True).given_to(fn)()
    except DrawsError as error:
        found = str(error)
    assert found == why


def test_the_run_that_is_noted_must_be_eagers():
    """If it gives other results, what it draws is not what eager has drawn."""
    draws = Draws(lambda: {"output": torch.rand(9)}, {"output": torch.rand(9)}, random=True)
    with pytest.raises(DrawsError) as error:
        draws.given_to(lambda: None)()
    assert str(error.value) == "torch chooses other operators in a run whose random numbers are noted"


def test_what_does_not_draw_runs_once():
    """Nothing is noted of it."""
    assert torch.equal(Draws(pytest.fail, {}, random=False).given_to(lambda: X + 0)(), X)
