"""Eager at other roundings: what moves, what stays, and which results pass the check because of it."""

import itertools

import pytest
import torch
from torch.nn import functional

from backend_kwargs.trial import Errors, Roundings, check
from backend_kwargs.trial import roundings as drawing
from backend_kwargs.trial.roundings import MOST, OtherRounding

X = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))


def moved(fn, *args):
    """Return how far the results of `fn` move in each run."""
    with torch.no_grad():
        return [each["output"] for each in Roundings(lambda: {"output": fn(*args)}, {"output": fn(*args)})]


def two_products(x):
    return x @ x.T - x @ x.T


ZERO = [
    pytest.param(lambda x: functional.layer_norm(x, (64,)).sum(), id="sum of a layer norm"),
    pytest.param(lambda x: x.softmax(-1).sum(-1) - 1, id="softmax"),
    pytest.param(lambda x: (x - x.mean()).sum(), id="sum of what is centred"),
    pytest.param(lambda x: x.sum() - x.flip(0).sum(), id="two orders"),
    pytest.param(lambda x: torch.cat([x, -x.flip(0)]).sum(), id="pairs"),
    pytest.param(two_products, id="difference of equals"),
    pytest.param(lambda x: x.var() - (x - x.mean()).square().sum() / (x.numel() - 1), id="two variances"),
]


@pytest.mark.parametrize("fn", ZERO)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_result_that_is_zero_may_have_other_rounding_errors(fn, dtype):
    """Twice eager's typical error passes, whatever eager's own one is by chance; a thousand times it does not."""
    x = X.to(dtype)
    eager, reference = fn(x), fn(x.double())
    roundings = Roundings(lambda: {"output": fn(x)}, {"output": eager})
    typical = sum(each["output"].rms for each in roundings) / MOST
    assert typical > 0
    assert check((reference + 2 * typical).to(dtype), eager, reference, roundings=roundings).passed
    assert not check((reference + 1000 * typical).to(dtype), eager, reference, roundings=roundings).passed


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(lambda x: x.floor(), id="rounded to integers"),
        pytest.param(lambda x: (x == x.amax(-1, keepdim=True)).float(), id="equal to the largest"),
        pytest.param(lambda x: x.relu().sort(-1).values[:, :3].abs().clamp(0, 1), id="chosen"),
        pytest.param(lambda x: x.long().float().sum(-1), id="integers summed"),
        pytest.param(lambda x: functional.interpolate(x[None, None], scale_factor=1.3, mode="nearest"), id="copied"),
    ],
)
def test_exact_results_stay(fn):
    """What has no rounding error is not moved, or comparisons of equal numbers would turn out otherwise."""
    assert {each.largest for each in moved(fn, X * 10)} == {0.0}


@pytest.mark.parametrize("fn", [lambda x: x.sum(-1), lambda x: x.cumsum(-1), torch.sum], ids=["rows", "running", "all"])
def test_sums_of_integers_stay(fn):
    """They have no rounding error."""
    whole = (X * 10).long()
    with OtherRounding(0):
        found = fn(whole)
    assert torch.equal(found, fn(whole))


def test_the_inputs_stay():
    """Operators that write where their schema does not say so write once."""
    x, mean, var = X.clone(), torch.zeros(64), torch.ones(64)
    once = mean.clone()
    functional.batch_norm(x, once, var.clone(), training=True)
    with OtherRounding(0), torch.no_grad():
        functional.batch_norm(x, mean, var, training=True)
    assert torch.equal(x, X)
    assert torch.allclose(mean, once, rtol=1e-5)


def test_gradients_move():
    """The runs cover the backward pass."""
    weight = torch.randn(64, 8, requires_grad=True)

    def gradient():
        return {"gradient": torch.autograd.grad((X @ weight).square().sum(), weight)}

    assert all(0 < each["gradient[0]"].rms < 1e-2 for each in Roundings(gradient, gradient()))


def test_random_numbers_are_drawn_as_in_eager():
    """A random operator is not run twice, so that the masks are eager's."""

    def dropped():
        torch.manual_seed(0)
        return {"output": functional.dropout(X, 0.5).exp()}

    assert all(each["output"].rms < 1e-4 for each in Roundings(dropped, dropped()))


@pytest.mark.parametrize(
    "draw",
    [torch.rand_like, torch.randn_like, lambda x: x.softmax(-1).multinomial(2)],
    ids=["rand_like", "randn_like", "multinomial"],
)
def test_a_random_operator_draws_once(draw):
    """Also one that writes nowhere, so that the next one draws what it does in eager."""
    torch.manual_seed(0)
    eager = draw(X), draw(X)
    torch.manual_seed(0)
    with OtherRounding(0):
        drawn = draw(X), draw(X)
    assert all(map(torch.equal, drawn, eager))


def test_runs_are_made_when_they_are_read():
    """No run for a result that passes, one for each error that is read, and none twice."""
    runs = []

    def run():
        runs.append(1)
        return {"output": two_products(X)}

    eager = two_products(X)
    roundings = Roundings(run, {"output": eager})
    assert check(eager, eager, eager.double(), roundings=roundings).passed
    assert runs == []
    for _ in range(2):
        assert len(list(itertools.islice(roundings, 3))) == 3
        assert len(runs) == 4  # the first one shows that torch computes the same under a mode


def counted(runs, fn):
    def run():
        runs.append(1)
        return {"output": fn()}

    return Roundings(run, {"output": fn()})


def test_a_wrong_result_takes_two_runs():
    """An error that stays 10 times what is allowed is no rounding error, and later leaves are not looked at."""
    runs, eager = [], (X @ X.T, X.sum())
    roundings = counted(runs, lambda: (X @ X.T, X.sum()))
    verdict = check(
        (2 * eager[0], 2 * eager[1]), eager, (X.double() @ X.T.double(), X.double().sum()), roundings=roundings
    )
    assert verdict.reason.startswith("output[0]: RMSE")
    assert len(runs) == 3  # the first one changes nothing


def test_no_run_is_made_once_a_result_passes():
    """A result that eager's own error explains takes no run."""
    x, runs = X.half(), []
    eager, reference = (x @ x.T).square(), (x.double() @ x.double().T).square()
    result = eager + 2 * (reference - eager).half()  # off by as much as eager, beyond the tolerance in some elements
    assert check(result, eager, reference, tol=1e-6, roundings=counted(runs, lambda: eager)).passed
    assert runs == []


def test_runs_that_do_not_move_a_leaf_do_not_end_the_search():
    """In bfloat16 many draws give eager's number again."""
    zero = torch.zeros(())
    still, moved = {"output": Errors(0.0, 0.0)}, {"output": Errors(1.0, 1.0)}
    assert check(zero + 1, zero, zero.double(), roundings=[still] * 5 + [moved]).passed


def test_runs_end_after_some_seconds(monkeypatch):
    """One run that rounds otherwise is always made, since a slow model's results are judged by the same rule."""
    monkeypatch.setattr(drawing, "LONGEST", 0.0)
    assert len(moved(two_products, X)) == 1


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError], ids=lambda error: error.__name__)
def test_a_run_that_fails_ends_them(error):
    def run():
        raise error

    assert list(Roundings(run, {"output": X})) == []


def test_no_run_is_made_without_time():
    assert list(Roundings(lambda: pytest.fail("it ran"), {"output": X}, affordable=lambda: False)) == []


def test_what_differs_under_a_mode_shows_nothing():
    """Where torch takes another path under a mode, a difference is no rounding error."""
    assert list(Roundings(lambda: {"output": X + 1}, {"output": X})) == []


def residuals(x, shuffle, scale=1 - 2.0**-20):
    for _ in range(12):
        x = x + (x @ shuffle) * scale
    return x.abs().float().sum()


@pytest.mark.parametrize(("times", "passes"), [(1, True), (4, False)], ids=["as it is", "four times as far"])
@torch.no_grad()
def test_what_compiled_code_does_not_round_explains_errors_of_one_direction(times, passes):
    """Sums that are often half-way between two numbers are all rounded down, where eager's are as often rounded up."""
    x, shuffle = X.bfloat16(), torch.eye(64).roll(1, 0).bfloat16()
    eager, reference = residuals(x, shuffle), residuals(x.double(), shuffle.double())
    off = torch.compile(residuals)(x, shuffle) - eager
    assert off.abs() > 10 * (eager - reference).abs()
    roundings = Roundings(lambda: {"output": residuals(x, shuffle)}, {"output": eager})
    assert check(eager + times * off, eager, reference, roundings=roundings).passed == passes


@torch.library.custom_op("tests_roundings::add_ten_", mutates_args=("x",))
def add_ten_(x: torch.Tensor) -> None:
    x.add_(10)


def written_by_an_operator(x):
    y = x + 1
    add_ten_(y)
    return y * 3


NOT_FUSED = [
    pytest.param(written_by_an_operator, lambda right: right / 2, id="written by an operator that is not torch's"),
    pytest.param(lambda x: x.float() * 3 - (x.float() * 3).bfloat16().float(), torch.zeros_like, id="cast"),
    pytest.param(lambda x: (x + 1).view(torch.int16).view(torch.float16).float(), torch.zeros_like, id="bits"),
    pytest.param(lambda x: (x * 3).abs().unique().float().mean(), lambda right: 2 * right, id="other sizes"),
]


@pytest.mark.parametrize(("fn", "wrong"), NOT_FUSED)
@torch.no_grad()
def test_what_is_not_fused_explains_no_error(fn, wrong):
    """What another operator writes, a cast and the bits of a number are rounded, and a run that fails is left out."""
    x = X.bfloat16()
    eager = fn(x)
    roundings = Roundings(lambda: {"output": fn(x)}, {"output": eager})
    assert not check(wrong(eager), eager, eager.double(), roundings=roundings).passed
    assert (len([*roundings]), roundings.lacking) == (MOST, "")


@pytest.mark.parametrize(("units", "passes"), [(2, True), (4, False)], ids=["two units off", "four units off"])
def test_a_number_may_be_off_by_what_rounding_and_its_own_dtype_do(units, passes):
    """A loss of a training step in bfloat16: other roundings move it by a unit, and eager's is beside the reference."""
    unit = torch.tensor(64.0)  # the last place of bfloat16 from 8192 to 16384
    eager, reference = torch.tensor(10048.0).bfloat16(), torch.tensor(10057.0).double()
    moved = [{"output": Errors(64.0, 64.0)}] * 16
    found = check(eager - units * unit.bfloat16(), eager, reference, training=True, roundings=moved)
    assert found.passed == passes, found.reason


def test_without_a_reference_only_what_roundings_move_is_explained():
    """Eager's own error is not known there, which excuses nothing."""
    eager = torch.linspace(1, 2, 64)
    assert check(1.3 * eager, eager, roundings=[{"output": Errors(1e-6, 1e-6)}] * 3).status == "fail_accuracy"
    assert check(1.3 * eager, eager, roundings=[{"output": Errors(0.3, 0.3)}] * 3).passed
