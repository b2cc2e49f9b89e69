"""A race calls a step many times: each time from the state that the user's call had, on copies, and never past it."""

import copy
import operator

import pytest
import torch

from backend_kwargs.graphs.replay import Inputs, Task
from backend_kwargs.graphs.writes import rounds_positions
from backend_kwargs.rewrites import Rewrite, register_rewrite
from backend_kwargs.rewrites import table as rewrites
from backend_kwargs.rewrites.traced import Change
from tests.auto.graphs import rows_of

ROWS = 4


def counted(keys, filled, new):
    """Write the row at a counter, as a static cache of transformers does."""
    at = torch.arange(1) + filled
    filled.add_(1)
    keys.index_copy_(0, at, new)
    return (keys @ new[0]).softmax(0)


def ring(keys, head, new):
    """Write the row at the head, which goes round."""
    keys[head] = new
    head.copy_((head + 1) % ROWS)
    return keys.sum(1) * 2 + 1


def popped(keys, left, new):
    """Take rows from the end of a stack."""
    left.sub_(1)
    row = keys[left]
    keys[left] = new
    return row.relu() * 2 + 1


def by_mask(keys, used, new):
    """Write the first row that a mask leaves free."""
    at = used.logical_not().nonzero_static(size=1, fill_value=ROWS)[:, 0]
    used[at] = True
    keys[at] = new
    return keys.sum(1) * 2 + 1


def strided(keys, both, new):
    """Read a counter that is a column of other memory."""
    filled = both[:, 1]
    keys.index_copy_(0, filled, new)
    filled.add_(1)
    return (keys @ new[0]).softmax(0)


def freed(keys, used, new):
    """Free the memory of what has been read."""
    rows = keys * new
    keys.untyped_storage().resize_(0)
    return rows.relu() + used


STEPS = {
    "a counter one step before the end": (counted, lambda: torch.tensor([ROWS - 1])),
    "a narrow counter": (counted, lambda: torch.tensor([ROWS - 1], dtype=torch.int32)),
    "a ring buffer": (ring, lambda: torch.tensor([ROWS - 1])),
    "a stack with one row": (popped, lambda: torch.tensor([1])),
    "a mask with one free row": (by_mask, lambda: torch.tensor([True] * (ROWS - 1) + [False])),
    "a counter inside other memory": (strided, lambda: torch.tensor([[7, ROWS - 1]])),
    "memory that is freed": (freed, lambda: torch.ones(1)),
}


def state(make):
    torch.manual_seed(0)
    return torch.randn(ROWS, 64), make(), torch.randn(1, 64)


@pytest.mark.parametrize(("step", "make"), STEPS.values(), ids=STEPS.keys())
@torch.no_grad()
def test_every_call_of_a_race_starts_from_the_users_state(step, make, auto, store):
    """The race calls it hundreds of times, all candidates run, and afterwards one step has been made: as in eager."""
    given, expected = state(make), state(make)
    wanted = step(*expected)
    result = auto(step)(*given)
    assert {name: row.status for name, row in rows_of(store).items()} == {"eager": "pass", "default": "pass"}
    torch.testing.assert_close((result, *given[1:]), (wanted, *expected[1:]))
    assert given[0].untyped_storage().nbytes() == expected[0].untyped_storage().nbytes()
    if given[0].untyped_storage().nbytes():
        torch.testing.assert_close(given[0], expected[0])


@torch.no_grad()
def test_a_loop_to_the_end_of_the_cache_is_as_eagers(auto):
    """Results that are kept in a list are eager's at each step, up to the last free row."""
    given, expected = ([torch.zeros(ROWS, 64), torch.tensor([0])] for _ in range(2))
    compiled, news = auto(counted), [torch.randn(1, 64) for _ in range(ROWS)]
    kept = [compiled(*given, new) for new in news]
    torch.testing.assert_close(kept, [counted(*expected, new) for new in news])
    torch.testing.assert_close(given, expected)


class Counting(torch.nn.Module):
    """A layer with a norm's counter, and one of its own in the loss."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8)
        self.layer = torch.nn.Linear(8, 8)
        self.register_buffer("warm", torch.linspace(0, 1, 3))
        self.register_buffer("step", torch.tensor([1]))

    def forward(self, x):
        self.step += 1
        return self.layer(self.norm(x)).square().mean() + self.warm.index_select(0, self.step)[0]


def test_training_steps_with_counters_are_raced(auto, store):
    """The counter of a training step ends at the last element of its table; gradients and counters are eager's."""
    torch.manual_seed(0)
    model, twin, x = Counting(), Counting(), torch.randn(16, 8)
    twin.load_state_dict(model.state_dict())
    loss, wanted = auto(model)(x), twin(x)
    loss.backward()
    wanted.backward()
    assert {row.status for row in rows_of(store).values()} == {"pass"}
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


def test_candidates_share_one_copy_of_a_cache():
    """However many candidates are timed, a cache is copied once for all of them."""
    seen = []

    def backend(gm, example_inputs):
        task = Task.of(gm, example_inputs)
        calls = [task.caller(lambda keys, *_: seen.append(keys.data_ptr())) for _ in range(3)]
        for call in calls:
            call()
        return gm.forward

    with torch.no_grad():
        torch.compile(counted, backend=backend)(*state(lambda: torch.tensor([0])))
    assert len(seen) == 3
    assert len(set(seen)) == 1


def test_only_the_rows_that_a_step_writes_are_put_back():
    """Before each call the row that was written comes back, not the whole cache."""
    found = []

    def backend(gm, example_inputs):
        inputs = Inputs.of(gm, example_inputs)
        found.extend(region.values(before).shape for region, before in inputs.changes.tensors.values())
        return gm.forward

    with torch.no_grad():
        torch.compile(counted, backend=backend)(*state(lambda: torch.tensor([2])))
    assert sorted(map(tuple, found)) == [(1,), (1, 64)]


# ---- inputs that are only read


def in_place(gm, example_inputs):
    """Add in place."""
    changed = copy.deepcopy(gm)
    for node in changed.graph.find_nodes(op="call_function", target=torch.add):
        node.target = torch.Tensor.add_
    changed.recompile()
    return Change(changed, example_inputs, count=1)


@pytest.fixture
def own_rewrites():
    """Forget the rewrites of a test."""
    before = dict(rewrites._registered)
    yield
    rewrites._registered.clear()
    rewrites._registered.update(before)


@pytest.mark.usefixtures("own_rewrites")
@pytest.mark.parametrize("parameter", [False, True], ids=["an input", "a parameter"])
@torch.no_grad()
def test_a_candidate_that_writes_what_eager_reads_fails(parameter, auto, store):
    """Such a candidate fails the accuracy check, and what it wrote is a copy: the user's tensor stays as it is."""
    register_rewrite("in_place", Rewrite("adds in place", traced=in_place))
    x = torch.randn(64, 64)
    x = torch.nn.Parameter(x) if parameter else x
    before = x.detach().clone()
    result = auto(lambda x: torch.add(x, 1) * 1.0, candidates=["in_place"], race="always")(x)
    row = rows_of(store)["in_place"]
    assert (row.status, row.reason) == ("fail_accuracy", "it changes l_x_, an input that eager only reads")
    assert torch.equal(x, before)
    torch.testing.assert_close(result, before + 1)


def test_long_chains_of_positions_are_read_once():
    """Each node is looked at once, however often its value is used, and however many there are."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.zeros(4, dtype=torch.int64)
    last = x
    for _ in range(3000):
        last = graph.call_function(operator.xor, (last, graph.call_function(operator.rshift, (last, 1))))
        for node in (last, last.args[1]):
            node.meta["example_value"] = x.meta["example_value"]
    graph.output(graph.call_function(operator.getitem, (x, last)))
    assert not rounds_positions(torch.fx.GraphModule(torch.nn.Module(), graph))


# ---- positions that another rounding moves

TABLE, X = torch.randn(10, 4), torch.rand(5)


@pytest.mark.parametrize(
    ("fn", "rounds"),
    [
        pytest.param(lambda t, x: t[(x * 9).long()], True, id="cast"),
        pytest.param(lambda t, x: torch.nn.functional.embedding((x * 9).round().to(torch.int64), t), True, id="round"),
        pytest.param(lambda t, x: t.clone().index_copy_(0, (x * 9).long(), torch.ones(5, 4)), True, id="written"),
        pytest.param(lambda t, x: t[(x * 9).long().add(1).sub(1)], True, id="computed further"),
        pytest.param(lambda t, x: t[(x * 9).max().long()[None]], True, id="the largest number"),
        pytest.param(lambda t, x: t[(x * 9).long().max()[None]], True, id="the largest position"),
        pytest.param(lambda t, x: t[torch.max(x * 9, x).long()], True, id="the larger number"),
        pytest.param(lambda t, x: t[(x * 9).clamp(min=0).long()], True, id="clamped from below"),
        pytest.param(lambda t, x: torch.ops.aten.index.Tensor(t, [(x * 9).long()]), True, id="aten"),
        pytest.param(lambda t, x: torch.nn.functional.cross_entropy(t[:5], (x * 3).long()), True, id="targets"),
        pytest.param(
            lambda t, x: t[torch.min((x * 9).long(), torch.full_like(x, 9).long().clamp(max=9))], False, id="min"
        ),
        pytest.param(lambda t, x: t[(x * 9).long().clamp(0, 9)], False, id="clamped positions"),
        pytest.param(lambda t, x: t[(x * 9).clamp(0, 9).round().long()], False, id="clamped numbers"),
        pytest.param(lambda t, x: t[(x * 9).long() % 10], False, id="remainder"),
        pytest.param(lambda t, x: t[t.topk(2, 0).indices[:, 0]], False, id="topk"),
        pytest.param(lambda t, x: t[torch.bucketize(x, t[0])], False, id="bucketize"),
        pytest.param(lambda t, x: t[torch.arange(3) + 1] * x[0].long(), False, id="no position"),
        pytest.param(lambda t, x: t.gather(0, torch.arange(4)[None].expand_as(t[:1] * x[0])), False, id="a shape"),
        pytest.param(lambda t, x: t[(x * 9).long().view_as(x)], True, id="a shape of rounded positions"),
        pytest.param(lambda t, x: t[x.new_zeros(3, dtype=torch.int64)], False, id="new zeros"),
        pytest.param(lambda t, x: t[(torch.arange(5)[:, None] * 1.0 - torch.arange(5) + 4).long()], False, id="whole"),
        pytest.param(lambda t, x: t[(torch.arange(3) * 1.5).to(torch.int64)], False, id="halves"),
        pytest.param(lambda t, x: t[operator.iadd(torch.arange(3) * 2.0, 1.0).long()], False, id="changed in place"),
        pytest.param(
            lambda t, x: t[[a := torch.arange(3) * 2.0, b := a.view(-1), operator.iadd(b, 1.0), a.long()][-1]],
            True,
            id="seen after a change in place",
        ),
        pytest.param(
            lambda t, x: t[[a := torch.arange(5) * 2.0, a.add_(x), a.long()][-1]], True, id="numbers added in place"
        ),
        pytest.param(
            lambda t, x: t[[a := torch.arange(5) * 2.0, torch.neg(x, out=a), a.long()][-1]], True, id="numbers written"
        ),
        pytest.param(
            lambda t, x: t[
                [a := torch.arange(1, 2) * 1.0, b := a * 1.5 - 0.50001, (operator.iadd(a, 1.0) + b).long()][-1]
            ],
            True,
            id="read before a change in place",
        ),
        pytest.param(lambda t, x: t[(torch.arange(10) * 0.999999).long()], True, id="constants near the next one"),
        pytest.param(lambda t, x: t[(torch.arange(5) * 1.0 + x).long()], True, id="constants and numbers"),
        pytest.param(lambda t, x: t[(torch.rand(5) * 9).long()], True, id="drawn"),
        pytest.param(lambda t, x: t[(x * 9).type_as(torch.arange(5))], True, id="a dtype"),
        pytest.param(lambda t, x: t[x > 0.5] if x.numel() > 9 else t[1:3], False, id="slice"),
    ],
)
def test_positions_rounded_from_numbers_are_seen(fn, rounds):
    """Unless it is bounded, an integer made of a number may be one past the end under another rounding."""
    seen = []

    def backend(gm, example_inputs):
        seen.append(rounds_positions(gm))
        return gm.forward

    torch.compile(fn, backend=backend)(TABLE, X)
    assert seen == [rounds]
