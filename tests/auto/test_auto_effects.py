"""What must run once runs once: side effects, draws from other generators, and memory that a race need not copy."""

import random

import pytest
import torch
from torch._library.effects import EffectType
from torch.nn import functional

from backend_kwargs import trial
from backend_kwargs.graphs.writes import has_side_effects
from tests.auto.graphs import backend_of, chain, logged, rows_of

ran = []


def counted(name):
    """Define a user's operator that counts its runs."""

    @torch.library.custom_op(f"backend_kwargs_tests::{name}", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        ran.append(name)
        return x.clone()

    op.register_fake(torch.empty_like)
    return op


pure, ordered = counted("pure"), counted("ordered")
ordered.register_effect(EffectType.ORDERED)


@torch.library.custom_op("backend_kwargs_tests::drawn", mutates_args=())
def drawn(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([random.random() for _ in range(x.numel())]).view_as(x)


drawn.register_fake(torch.empty_like)


@pytest.fixture(autouse=True)
def _none_ran():
    ran.clear()


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(lambda x: torch.relu(ordered(x * 2)).sum(-1), id="in the graph"),
        pytest.param(lambda x: torch.relu(torch.ops.backend_kwargs_tests.ordered(x) + 1), id="by its packet"),
    ],
)
@torch.no_grad()
def test_an_ordered_operator_runs_once_a_call(fn, races, log):
    """An operator with a registered effect is not raced, and runs once per call."""
    x = torch.randn(8, 64)
    compiled = torch.compile(fn, backend=backend_of())
    for calls in (1, 2, 3):
        assert torch.allclose(compiled(x), fn(x), atol=1e-5)
        assert len(ran) == 2 * calls  # one is eager's
    assert races.count == 0
    assert logged(log) == "auto: default for a graph not raced: it has side effects, which a race would repeat (0.0 s)"


@pytest.mark.parametrize(("op", "effects"), [(ordered, True), (pure, False)], ids=["ordered", "pure"])
@torch.no_grad()
def test_effects_in_a_nested_body_are_seen(op, effects):
    """Effects in the body of a higher-order operator also prevent a race."""
    seen = []

    def backend(gm, example_inputs):
        seen.append(has_side_effects(gm))
        return gm

    def branching(x):
        return torch.cond(x.sum() > 0, lambda x: op(x) + 1, lambda x: x - 1, (x,))

    torch.compile(branching, backend=backend)(torch.ones(8, 64))
    assert seen == [effects]


@torch.no_grad()
def test_a_print_is_printed_once_a_call(races, capfd):
    """A compiled function prints once per call."""

    def shown(x):
        torch._higher_order_ops.print("seen {}", 7)
        return torch.relu(x + 1)

    x = torch.randn(8, 64)
    compiled = torch.compile(shown, backend=backend_of())
    for calls in (1, 2):
        assert torch.allclose(compiled(x), torch.relu(x + 1))
        assert capfd.readouterr().out.count("seen 7") == 1, calls
    assert races.count == 0


def test_a_users_operator_is_raced_unless_told_otherwise(races, log):
    """An operator without an effect runs many times in a race; with race_custom_ops=False it runs once per call."""
    x = torch.randn(8, 64)
    torch.compile(lambda x: pure(x) + 1, backend=backend_of())(x)
    assert races.count == 1
    torch._dynamo.reset()
    ran.clear()
    torch.compile(lambda x: pure(x) + 2, backend=backend_of(race_custom_ops=False))(x)
    assert (races.count, ran) == (1, ["pure"])
    why = "it has operators that are not torch's, and race_custom_ops is False"
    assert logged(log) == f"auto: default for a graph not raced: {why} (0.0 s)"


def test_torchs_operators_are_raced_whatever_is_told(races):
    """A graph of only torch's own operators is raced even with race_custom_ops=False."""
    torch.compile(chain, backend=backend_of(race_custom_ops=False))(torch.randn(8, 64))
    assert races.count == 1


def test_what_differs_between_two_runs_of_eager_takes_default(auto, log, store):
    """If two runs of eager differ with equal seeds, nothing can be checked, and default is used."""
    auto(lambda x: drawn(x) + 1)(torch.ones(8, 64))
    line = logged(log)
    assert line.startswith("auto: default for a graph not raced: two runs in eager differ: output")
    assert not store.exists()


# Inductor in torch 2.13 rounds the positions otherwise than eager: its numbers are wrong.
@pytest.mark.filterwarnings("ignore:A graph runs in eager, because no candidate compiled and passed")
def test_what_differs_under_a_mode_is_raced(auto, log):
    """Eager's results are those of a plain call: under a mode that counts operators, torch may take another path."""

    def fn(x):
        return functional.interpolate(x, scale_factor=1.3, mode="nearest") + 0

    x = torch.randn(1, 1, 2, 7)
    with torch.no_grad():
        assert torch.equal(auto(fn)(x), fn(x))
    assert "not raced" not in logged(log)


def test_rounding_errors_alone_pass(auto, store):
    """A sum that is zero has no correct digit, neither in eager nor in default."""
    with torch.no_grad():
        auto(lambda x: functional.layer_norm(x, (64,)).sum())(torch.randn(32, 64))
    assert rows_of(store)["default"].status == "pass"


def test_pythons_and_numpys_generators_are_as_before(auto, store):
    """The states of Python's and NumPy's generators are restored after candidates, whatever is decided."""
    numpy = pytest.importorskip("numpy")

    @torch.library.custom_op("backend_kwargs_tests::draws_both", mutates_args=())
    def draws_both(x: torch.Tensor) -> torch.Tensor:
        random.random()
        numpy.random.rand()
        return x.clone()

    draws_both.register_fake(torch.empty_like)
    x = torch.ones(8, 64)

    def after(backend):
        random.seed(3)
        numpy.random.seed(3)
        torch.manual_seed(3)
        torch.compile(lambda x: draws_both(x) + 1, backend=backend)(x)
        return random.random(), numpy.random.rand(), torch.rand(1).item()

    alone = after("inductor")
    torch._dynamo.reset()
    assert after(backend_of()) == alone
    assert rows_of(store)["default"].status == "pass"


CACHE = 64 << 20  # numbers: 256 MiB


@torch.no_grad()
def test_a_view_of_a_large_cache_is_copied_alone(auto):
    """A race copies only the memory that a graph reaches, not the whole cache of which its input is a small view."""
    cache, new = torch.full((CACHE,), 1.0), torch.ones(1024)

    def step(view, new):
        view.add_(new)
        return view.sum()

    auto(chain)(new)  # modules loaded for a first race are not part of the peak
    compiled = auto(step)
    peak = trial.peak_memory(lambda: compiled(cache[4096:5120], new), torch.device("cpu"))
    assert peak < cache.nbytes
    assert cache[4096:5120].eq(2).all()
    assert cache[:4096].eq(1).all()
    assert cache[5120:].eq(1).all()


@pytest.mark.parametrize(
    "views",
    [
        pytest.param(lambda cache: (cache[0], cache[3]), id="disjoint"),
        pytest.param(lambda cache: (cache[:, 2:4], cache[:, 10:12]), id="between each other's rows"),
        pytest.param(lambda cache: (cache[0:2], cache[1:3]), id="overlapping"),
        pytest.param(lambda cache: (cache, cache[2]), id="the whole and a part"),
    ],
)
@torch.no_grad()
def test_two_views_of_one_cache(auto, default_wins, store, views):
    """Two views of one cache are written once, as in eager, and the rest of the cache is unchanged."""

    def step(one, other):
        one.add_(1)
        other.mul_(2)
        return one.sum() + other.sum()

    caches = [torch.arange(64.0).reshape(4, 16) for _ in range(2)]
    seen, wanted = auto(step)(*views(caches[0])), step(*views(caches[1]))
    assert torch.allclose(seen, wanted)
    assert torch.equal(*caches)
    assert rows_of(store)["default"].won


@torch.no_grad()
def test_what_the_code_of_a_graph_warns_of_is_shown_once(recwarn, default_wins):
    """A race calls copies of the graph, whose code has a name of its own for Python."""
    compiled = torch.compile(lambda x, y: functional.mse_loss(x.sin(), y), backend=backend_of())
    compiled(torch.randn(4, 8), torch.randn(4, 1))
    texts = [each for each in recwarn if each.filename.startswith("<eval_with_key>") and "target size" in str(each)]
    assert len(texts) == 1
