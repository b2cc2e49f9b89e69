"""The inputs on which candidates are called, and what one call returns and changes."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from backend_kwargs.graphs.replay import ChangedInputError, Inputs, Task
from backend_kwargs.trial import cotangents, memory, served

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def captured(make, fn, *given, **options):
    """Return what `make` makes of the graph that dynamo captures, and of its inputs."""
    made = []

    def backend(gm, example_inputs):
        made.append(make(gm, example_inputs))
        return gm.forward

    torch.compile(fn, backend=backend, **options)(*given)
    return made[0]


def task(*values, written=(), training=False, **given):
    """Return the task of a graph with these inputs."""
    graph = torch.fx.Graph()
    for at in range(len(values)):
        graph.placeholder(f"x{at}")
    graph.output(())
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    return Task(gm, Inputs(values, frozenset(written)), training, **given)


# ---- which inputs a call may change


def test_inputs_in_one_storage_are_written_together():
    """Whoever shares the storage of what is written is copied with it; others are not."""
    memory = torch.arange(12.0)
    given = memory[:4], memory[2:6], memory[8:], torch.ones(4)
    of = captured(Inputs.of, lambda a, b, c, d: (a.add_(1), b.sum(), c.sum(), d.sum()), *given)
    shared = {at for at, value in enumerate(of.values) if value.data_ptr() != given[3].data_ptr()}
    assert of.written == shared
    assert len(shared) == 3
    assert of.aliased
    assert not Inputs(given[:1], frozenset({0})).aliased


@pytest.mark.parametrize(
    ("fn", "written"),
    [
        pytest.param(lambda x: x.add_(0), {0}, id="a write that changes nothing this time"),
        pytest.param(lambda x: x.mul_(2), {0}, id="a write"),
        pytest.param(lambda x: x + 1, set(), id="a read"),
    ],
)
@pytest.mark.parametrize("grad", [False, True], ids=["", "with a gradient"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo reads it
def test_what_the_graph_writes(fn, written, grad):
    """Whether or not values differ after one call, and also where an input requires a gradient."""
    x = torch.ones(3, requires_grad=grad) * 1
    assert captured(Inputs.of, fn, x).written == written


@pytest.fixture(scope="module")
def undeclared():
    """An operator that writes although its schema says that it only reads: values, or the size."""
    library = torch.library.Library("replay_tests", "FRAGMENT")
    library.define("writes(Tensor x, bool size) -> Tensor")
    library.impl("writes", lambda x, size: (x.resize_(6) if size else x.zero_()).new_ones(1), "CPU")
    yield torch.ops.replay_tests.writes.default
    library._destroy()


@pytest.mark.parametrize(
    ("size", "other", "written", "remade"),
    [
        pytest.param(False, slice(4, 8), {0, 1}, set(), id="beside what is written"),
        pytest.param(False, None, {0}, set(), id="values"),
        pytest.param(True, None, {0}, {0}, id="size"),
    ],
)
def test_what_an_operator_writes_without_saying_so(undeclared, size, other, written, remade):
    """It shows in the values or the layout after one call on copies, and counts for all that share the memory."""
    memory = torch.arange(1.0, 9.0)
    given = memory[:4], torch.ones(4) if other is None else memory[other]
    graph = torch.fx.Graph()
    first, second = (graph.placeholder(name) for name in "xy")
    for node in (first, second):
        node.meta["example_value"] = torch.empty(4)  # apart, as fakes of a backend's caller may be
    graph.output((graph.call_function(undeclared, (first, size)), second))
    of = Inputs.of(torch.fx.GraphModule(torch.nn.Module(), graph), given)
    found = {int(at): region for at, (region, _) in of.changes.tensors.items()}
    assert (of.written, {*found}, found[0] is None) == (written, remade or {0}, size)
    assert memory.tolist() == [*range(1, 9)]


def test_looking_for_writes_restores_the_modes():
    """A graph that leaves gradients disabled does not disable the caller's."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch._C._set_grad_enabled, (False,))
    graph.output(x)
    Inputs.of(torch.fx.GraphModule(torch.nn.Module(), graph), [torch.ones(3)])
    assert torch.is_grad_enabled()


def resized(x):
    x.resize_(6).fill_(7.0)


def test_an_input_that_a_call_resizes_comes_back():
    """Each call gets it as it was, in size and values; no region of it is compared."""
    graph = torch.fx.Graph()
    graph.output((graph.call_method("resize_", (graph.placeholder("x"), 6)),))
    x = torch.arange(4.0)
    of = Inputs.of(torch.fx.GraphModule(torch.nn.Module(), graph), [x])
    assert (of.written, of.changes.tensors, x.shape) == ({0}, {"0": (None, x)}, (4,))
    seen = []
    call = replace(task(x), inputs=of).caller(lambda given: seen.append(given.clone()) or resized(given))
    for _ in range(2):
        call()
    assert [each.tolist() for each in seen] == [x.tolist()] * 2


# ---- copies


def at_an_offset(base):
    """Return a tensor of its own that does not begin where its storage does."""
    return torch.empty(0).set_(base.untyped_storage(), 2, (4,), (1,))


COMPLEX = torch.complex(torch.arange(8.0), torch.arange(8.0, 16.0))
VIEWS = {
    "slice": (lambda base: base[2:6], torch.arange(8.0)),
    "transposed": (lambda base: base.view(2, 4).T, torch.arange(8.0)),
    "conjugate": (lambda base: base.conj()[1:], COMPLEX),
    "minus": (lambda base: base.conj().imag, COMPLEX),
    "real parts": (lambda base: torch.view_as_real(base)[2:], COMPLEX),
    "real parts of a transposed one": (torch.view_as_real, COMPLEX.view(4, 2).T.clone()),
    "real parts of a part": (lambda base: base[1:].real, COMPLEX),
}


@pytest.mark.parametrize(("view", "base"), VIEWS.values(), ids=VIEWS)
def test_views_of_one_tensor_are_views_of_one_copy(view, base):
    """What a candidate writes into one is in the other, as in the user's, which stay as they are."""
    given = base, view(base)
    whole, part = Inputs(given, frozenset({0, 1})).fresh()
    for copy, value in zip((whole, part), given, strict=True):
        assert torch.equal(copy, value)
        assert (copy.dtype, copy.stride(), copy.is_conj(), copy.is_neg()) == (
            value.dtype,
            value.stride(),
            value.is_conj(),
            value.is_neg(),
        )
    before = base.clone()
    whole.zero_()
    assert not part.any()
    assert torch.equal(base, before)


def test_a_tensor_that_begins_inside_its_storage():
    """Its copy has its values, and views of it are views of the copy."""
    root = at_an_offset(torch.arange(8.0))
    whole, part = Inputs((root, root[1:]), frozenset({0, 1})).fresh()
    assert (whole.tolist(), part.tolist()) == ([2, 3, 4, 5], [3, 4, 5])
    whole.zero_()
    assert part.tolist() == [0, 0, 0]


MEMORY = torch.arange(8.0)


@pytest.mark.parametrize(
    ("given", "apart"),
    [
        pytest.param((MEMORY[:4], MEMORY[4:]), True, id="one after the other"),
        pytest.param((MEMORY[4:], MEMORY[:4]), True, id="in another order"),
        pytest.param((MEMORY.view(torch.int8)[:8], MEMORY[2:4]), True, id="elements of other sizes"),
        pytest.param((MEMORY[:4], MEMORY[3:]), False, id="overlapping"),
        pytest.param(
            (COMPLEX[:2], torch.view_as_real(COMPLEX)[1]), False, id="overlapping, in elements of other sizes"
        ),
    ],
)
def test_parts_of_a_cache_are_copied_alone(given, apart):
    """Where no two share an element; else their whole memory is, so that they share it again."""
    copies = Inputs(given, frozenset({0, 1})).fresh()
    assert all(map(torch.equal, copies, given))
    assert (copies[0].untyped_storage().data_ptr() != copies[1].untyped_storage().data_ptr()) is apart


def test_what_is_copied():
    """The positions that are asked for, by default what is written; numbers and the rest are the caller's."""
    x, y = torch.ones(3), torch.ones(3)
    inputs = Inputs((x, y, 3), frozenset({1}))
    same = [[given.data_ptr() == copy.data_ptr() for given, copy in zip((x, y), made, strict=False)] for made in (
        inputs.fresh(), inputs.fresh({0}), inputs.fresh(())
    )]  # fmt: skip
    assert same == [[True, False], [False, True], [True, True]]
    assert inputs.fresh()[2] == 3
    assert inputs.bytes == 24.0
    assert Inputs((x[:1], x[1:], 3), frozenset()).bytes == 12.0


def test_sizes_that_vary_are_those_of_this_call():
    """A candidate is called with numbers in place of symbols."""
    x = torch.ones(5, 3)
    torch._dynamo.mark_dynamic(x, 0)
    fresh = captured(lambda gm, given: Inputs(given, frozenset()).fresh(), lambda x: x * x.shape[0], x)
    assert [each for each in fresh if not isinstance(each, torch.Tensor)] == [5]
    assert [type(each) for each in fresh if not isinstance(each, torch.Tensor)] == [int]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_no_gradient_reaches_the_users_tensors(mode):
    """Each input is a leaf of its own, which requires a gradient where the user's does and gradients are enabled."""
    weight, x = torch.nn.Parameter(torch.ones(3)), torch.ones(3)
    with mode():
        fresh = Inputs((weight, weight * 1, x), frozenset({1})).fresh()
        wanted = torch.is_grad_enabled()
    assert [each.requires_grad for each in fresh] == [wanted, wanted, False]
    assert all(each.is_leaf for each in fresh)
    if wanted:
        sum(each.sum() for each in fresh).backward()
    assert weight.grad is None


# ---- inputs that are only read


@pytest.mark.parametrize(
    ("most", "guarded"),
    [(1 << 20, {0, 1}), (50, {1}), (39, set())],
    ids=["all", "without parameters", "none"],
)
def test_what_is_read_is_copied_as_far_as_memory_allows(most, guarded, monkeypatch):
    """For a candidate's first call: all of it, or all but parameters, or nothing; never what is written."""
    monkeypatch.setattr(memory, "LARGEST_COPIES", most)
    given = torch.nn.Parameter(torch.ones(10)), torch.ones(10), torch.ones(1000)
    inputs = Inputs(given, frozenset({2}))
    assert inputs.guarded == guarded
    assert replace(inputs, guard=False).guarded == frozenset()


SQUARE = torch.ones(3, 3)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda x: x[1:].zero_(), id="values"),
        pytest.param(lambda x: x[0, 0].fill_(torch.nan), id="one value"),
        pytest.param(lambda x: x.t_(), id="strides"),
        pytest.param(lambda x: x.resize_(1, 3), id="size"),
    ],
)
def test_a_candidate_that_changes_what_eager_reads(change, at):
    """It is named, and the user's tensor stays as it is."""
    given = SQUARE.clone(), torch.arange(9.0).reshape(3, 3)
    before = [each.clone() for each in given]
    with pytest.raises(ChangedInputError) as raised:
        task(*given).observe(lambda *args: (change(args[at]), None)[1])
    assert str(raised.value) == f"it changes x{at}, an input that eager only reads"
    assert all(map(torch.equal, given, before))


# ---- one call


def test_what_one_call_returns_and_changes():
    """Outputs, gradients by input, and the written inputs, after the call begins as dynamo's does."""
    events = []

    x, unused, cache = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True), torch.zeros(4)
    given = task(x, unused, cache, written=[2], training=True, begin=lambda: events.append("begin"))
    seen = given.observe(lambda x, unused, cache: (x.sum() * 3, cache.add_(1), 5))
    assert events == ["begin"]
    assert [seen["output"][0].item(), seen["output"][2]] == [12.0, 5]
    assert (seen["gradient"][0].tolist(), seen["gradient"][1]) == ([3.0] * 4, None)
    assert [each.tolist() for each in seen["written"]] == [[1.0] * 4]
    assert (cache.tolist(), x.grad) == ([0.0] * 4, None)


def test_what_has_no_gradient_trains_nothing():
    """Where no output requires a gradient there is none to compute."""
    given = task(torch.ones(4, requires_grad=True), training=True)
    assert given.observe(lambda x: x.detach())["gradient"] == []


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_which_graphs_train(mode):
    """Those with an input that requires a gradient, where gradients are enabled."""
    with mode():
        trains = captured(Task.of, lambda x: x * 2, torch.ones(3, requires_grad=True)).training
        enabled = torch.is_grad_enabled()
    assert trains is enabled
    assert not captured(Task.of, lambda x: x * 3, torch.ones(3)).training


def test_a_graph_may_register_a_hook():
    """The call that finds what a graph writes has inputs that require gradients, without which a hook is an error."""

    def doubled(x):
        y = x * 2
        y.register_hook(lambda grad: grad * 3)
        return y.sin()

    given = captured(Task.of, doubled, torch.zeros(3, requires_grad=True))
    (gradient,) = given.observe(given.copy())["gradient"]
    torch.testing.assert_close(gradient, 6 * cotangents([torch.zeros(3)])[0])


def test_calls_draw_the_same_numbers():
    """Each observed call of a graph that draws begins with one seed."""

    def observed(gm, example_inputs):
        given = Task.of(gm, example_inputs)
        return [given.observe(gm.forward)["output"][0] for _ in range(2)]

    before = torch.get_rng_state()
    first, second = captured(observed, lambda x: torch.rand_like(x) + x, torch.ones(4))
    torch.set_rng_state(before)
    assert torch.equal(first, second)
    assert first.unique().numel() > 1


def test_modes_that_a_call_changes_are_restored():
    """Those of the caller are as before."""
    task(torch.ones(3)).observe(lambda x: torch.set_grad_enabled(False) and None)
    assert torch.is_grad_enabled()


def test_results_whose_memory_is_freed():
    """They are empty, as they can no longer be read; other results are copies."""
    kept = torch.ones(8)

    def fn(x):
        gone = x * 2
        gone.untyped_storage().resize_(0)
        return gone, kept

    gone, copy = task(torch.ones(4)).observe(fn)["output"]
    kept.zero_()
    assert (gone.numel(), copy.tolist()) == (0, [1.0] * 8)


class Counting(TorchDispatchMode):
    """A mode of the user's that notes the operators of a call."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_users_mode_counts_the_graphs_operators():
    """Neither copies of inputs nor the gradients to begin with are among them."""
    given = task(torch.ones(4, 4, requires_grad=True), torch.ones(4), written=[1], training=True)
    with Counting() as mode:
        given.observe(lambda x, y: x.sin())
    assert [name for name in mode.seen if name not in ("detach", "clone")] == ["sin", "cos", "mul"]


@pytest.mark.parametrize(
    ("largest", "dtype", "seen"),
    [
        pytest.param(64 << 20, torch.float32, [2, 2, 2], id="numbers"),
        pytest.param(11, torch.float32, [2, 4, 8], id="many numbers"),
        pytest.param(11, torch.int64, [2, 2, 2], id="many positions"),
    ],
)
def test_a_timed_call_starts_from_the_inputs(largest, dtype, seen, monkeypatch):
    """What the call before has written is put back; a large region of numbers, which are no positions, drifts."""
    monkeypatch.setattr(served, "LARGEST", largest)

    def called(gm, example_inputs):
        call = Task.of(gm, example_inputs).caller(lambda x: x.mul_(2).clone())
        return [call()["output"][0].item() for _ in range(3)]

    assert captured(called, lambda x: x.mul_(2), torch.ones(3, dtype=dtype)) == seen


def test_inputs_that_a_call_writes_stay_inputs():
    """Frozen code would write into the user's own buffer, whatever it is called on."""
    layer = torch.nn.BatchNorm1d(3)
    of = captured(Task.of, layer, torch.randn(4, 3))
    stays = [bool(node.meta.get("backend_kwargs_stays_input")) for node in of.gm.graph.find_nodes(op="placeholder")]
    assert [at for at, each in enumerate(stays) if each] == sorted(of.inputs.written)
    assert len(of.inputs.written) == 3  # the mean, the variance and the count


def test_gradients_to_begin_with():
    """They are random, of each output's size, and the same in each call."""
    x = torch.zeros(64, 8, requires_grad=True)
    call = task(x, training=True).caller(lambda x: x * 1)
    first, second = (call()["gradient"][0] for _ in range(2))
    assert torch.equal(first, second)
    assert first.unique().numel() > 100
    assert math.isclose(first.std().item(), 1.0, rel_tol=0.5)
