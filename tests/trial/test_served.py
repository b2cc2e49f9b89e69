"""Calls from the state that the user's call had: what a call changes is found, and put back before the next one."""

import copy
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_kwargs import trial
from backend_kwargs.trial import Changes, RestoringCall, State, interleave
from backend_kwargs.trial.served import LARGEST, ChangedSlice, copied, layout_of, memory_of, same_bits

CPU = torch.device("cpu")


def called(tree):
    return tree[0](*tree[1:])


def restored(region, before, after):
    """Return `after` with the region put back to `before`."""
    state = State()
    state.add(after, before, region)
    state.restore()
    return after


# ---- regions


@given(
    shape=st.lists(st.integers(1, 5), min_size=0, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]),
    share=st.floats(0, 1),
    seed=st.integers(0, 1 << 16),
)
@settings(max_examples=200, deadline=None)
def test_putting_a_region_back_undoes_every_change(shape, dtype, share, seed):
    """Whatever elements change, their region covers them: putting it back gives the tensor from before, bit by bit."""
    torch.manual_seed(seed)
    before = torch.randn(shape).mul(3).to(dtype)
    after = torch.where(torch.rand(shape) < share, torch.randn(shape).mul(3).to(dtype), before)
    region = ChangedSlice.of(before, after)
    assert (region is None) == same_bits(before, after)
    if region:
        assert same_bits(restored(region, before, after), before)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda base: base.t(), id="transposed"),
        pytest.param(lambda base: base[1:, ::2], id="a part"),
        pytest.param(lambda base: base.as_strided((3, 4), (1, 2)), id="elements twice"),
        pytest.param(lambda base: base[0].expand(3, 6), id="expanded"),
        pytest.param(lambda base: torch.view_as_complex(base.view(6, 3, 2)).conj(), id="conjugate"),
        pytest.param(lambda base: torch.view_as_complex(base.view(6, 3, 2)).conj().imag, id="negative"),
    ],
)
def test_regions_of_views(view):
    """A view has its region in its own memory, also where elements share it or are conjugated lazily."""
    seen = view(torch.arange(36.0).view(6, 6))
    changed = copied(seen)
    assert same_bits(changed, seen)
    assert changed.stride() == seen.stride()
    memory_of(changed)[:1] += 1
    assert same_bits(restored(ChangedSlice.of(seen, changed), seen, changed), seen)


def test_rows_of_a_large_cache_are_put_back_alone():
    """Of a cache only the rows that were written are put back, however far apart they lie."""
    before = torch.zeros(2, 3, 1000, 8)
    after = before.clone()
    after[:, :, [3, 970]] = 1
    region = ChangedSlice.of(before, after)
    assert region.values(before).shape == (2, 3, 2, 8)
    after[:, :, 500] = 2
    assert restored(region, before, after)[:, :, 500].eq(2).all()


def test_nan_is_not_a_change():
    """Equal bits are equal, also those of nan; zeros of other signs are not."""
    numbers = torch.tensor([float("nan"), 0.0])
    assert ChangedSlice.of(numbers, numbers.clone()) is None
    assert ChangedSlice.of(numbers, torch.tensor([float("nan"), -0.0])).ranges == (slice(1, 2),)


@pytest.mark.parametrize(
    ("dtype", "drifts"), [(torch.float32, True), (torch.int32, False)], ids=["numbers", "positions"]
)
def test_only_large_regions_of_numbers_drift(dtype, drifts):
    """Large floating-point state is not copied at each call; integers always are, since they may be positions."""
    before = torch.zeros(LARGEST // 4 + 1, dtype=dtype)
    assert ChangedSlice.of(before, before + 1).drifts(before) is drifts


# ---- what a call changes in modules and objects


class Stateful(torch.nn.Module):
    """A module that changes one part of each kind of itself."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("rows", torch.zeros(4, 2))
        self.register_buffer("new", torch.zeros(2))
        self.plain = torch.zeros(1)
        self.calls = 0
        self.seen = []
        self.named = {"last": None}
        self.generator = torch.Generator().manual_seed(7)
        self.tied = self.rows

    def forward(self, x):
        self.rows[self.count] = x
        self.count += 1
        self.new = self.new + x
        self.plain.data = self.plain + 1
        self.calls += 1
        self.seen.append(x)
        self.named["last"] = x
        return x + torch.rand(2, generator=self.generator) + self.calls


def test_each_call_of_a_module_starts_from_its_state():
    """Buffers, attributes, lists, dicts and generators of a module are put back before each call."""
    module, x = Stateful(), torch.ones(2)
    state = Changes.of(called, (module, x)).on((module, x), timed=True)
    call = RestoringCall(lambda: module(x), state)
    first = call()
    for _ in range(9):  # four rows
        assert torch.equal(call(), first)
    assert (module.count.item(), module.calls, len(module.seen)) == (1, 1, 1)
    assert torch.equal(module.plain, torch.ones(1))


def test_finding_changes_changes_nothing():
    """The module and its inputs stay as they are: a copy is called."""
    module = Stateful()
    before = copy.deepcopy(module.state_dict())
    Changes.of(called, (module, torch.ones(2)))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert (module.calls, module.seen, module.named) == (0, [], {"last": None})


def test_changes_of_a_bound_method():
    """The state of a bound method is that of its object."""
    module, x = Stateful(), torch.ones(2)
    state = Changes.of(called, (module.forward, x)).on((module.forward, x))
    for _ in range(9):
        RestoringCall(lambda: module.forward(x), state)()
    assert module.count == 1


def test_memory_that_a_call_frees_comes_back():
    """A call that frees what it has read, or resizes it, finds it again at the next call."""

    def free(x):
        y = x * 2
        x.untyped_storage().resize_(0)
        return y

    x = torch.ones(3)
    call = RestoringCall(lambda: free(x), Changes.of(called, (free, x)).on((free, x)))
    for _ in range(3):
        assert torch.equal(call(), torch.full((3,), 2.0))


def test_what_a_call_adds_to_an_object_stays():
    """An attribute that the first call makes stays, such as a table that it computes once."""

    class Lazy(torch.nn.Module):
        def forward(self, x):
            if not hasattr(self, "table"):
                self.table = torch.arange(3.0)
            return x + self.table

    module, x = Lazy(), torch.ones(3)
    call = RestoringCall(lambda: module(x), Changes.of(called, (module, x)).on((module, x)))
    call()
    table = module.table
    call()
    assert module.table is table


class Holder:
    """A decoder that is no module."""

    def __init__(self):
        self.rows, self.at = torch.zeros(2), torch.tensor(0)

    def __call__(self, x):
        self.rows[self.at] = x.sum()
        self.at += 1
        return self.rows.clone()


def closure():
    holder = Holder()

    def call(x):
        return holder(x)

    return call


HOLDER = Holder()


def through_a_global(x):
    return HOLDER(x)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(Holder, id="object"),
        pytest.param(closure, id="closure"),
        pytest.param(lambda: through_a_global, id="global"),
        pytest.param(lambda: functools.partial(Holder()), id="partial"),
        pytest.param(lambda: Holder().__call__, id="bound method"),
    ],
)
def test_state_of_what_is_no_module(make):
    """The state of objects that are called, also through functions that hold them, is put back."""
    call, x = make(), torch.ones(2)
    state = Changes.of(called, (call, x)).on((call, x))
    for _ in range(5):  # two rows
        assert torch.equal(RestoringCall(lambda: call(x), state)(), torch.tensor([2.0, 0.0]))


def grown(past, x):
    past["k"] = torch.cat((past["k"], x)) if "k" in past else x
    return past["k"]


def test_a_dict_that_calls_fill_is_emptied():
    """Keys that calls add and change are state."""
    past, x = {}, torch.ones(1)
    call = RestoringCall(lambda: grown(past, x), Changes.of(called, (grown, past, x)).on((grown, past, x)))
    assert [len(call()) for _ in range(3)] == [1, 1, 1]


def test_a_generator_and_a_list_that_grow_as_arguments():
    """An argument that only some trees have is no error."""
    generator, seen = torch.Generator().manual_seed(3), []

    def draw(generator, seen):
        seen.append(torch.rand(2, generator=generator))
        return seen[-1]

    changes = Changes.of(called, (draw, generator, seen))
    assert not changes.on((draw, ()))
    call = RestoringCall(lambda: draw(generator, seen), changes.on((draw, generator, seen)))
    assert torch.equal(call(), call())
    assert len(seen) == 1


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_scattered_rows_of_types_that_torch_does_not_index(dtype):
    """Rows far apart are put back for every type."""
    before = torch.zeros(9, 2).to(dtype)
    after = torch.zeros(9, 2)
    after[[1, 7]] = 1
    after = after.to(dtype)
    assert same_bits(restored(ChangedSlice.of(before, after), before, after), before)


def test_keys_may_be_any_objects():
    """State behind keys that look alike, or differently in each copy, is found."""
    one, other = torch.zeros(1), torch.zeros(1)
    held = {torch.ones(1): one, torch.ones(1): other, object(): torch.zeros(1)}
    call = RestoringCall(
        lambda: [each.add_(1) for each in held.values()],
        Changes.of(lambda tree: [each.add_(1) for each in tree.values()], held).on(held),
    )
    for _ in range(3):
        call()
    assert [each.item() for each in held.values()] == [1.0, 1.0, 1.0]


def test_what_cannot_be_copied_is_said():
    """A model whose copy fails raises CopyError with the reason."""
    module = torch.nn.Linear(2, 2)
    module.product = module.weight * 2  # not a leaf
    with pytest.raises(trial.CopyError, match="Only Tensors created explicitly by the user"):
        Changes.of(called, (module, torch.ones(2)))


def test_a_call_without_state_has_none():
    """A call that changes nothing is timed as it is."""
    module, x = torch.nn.Linear(2, 2), torch.ones(2)
    state = Changes.of(called, (module, x)).on((module, x))
    assert not state
    assert trial.restoring(RestoringCall(lambda: module(x), state)) is None


# ---- timing


def test_every_timed_call_starts_from_the_state():
    """However often a call is repeated in a sample, it never goes past the end of its state."""
    count = torch.zeros(1, dtype=torch.int64)
    seen = set()

    def step():
        seen.add(count.item())
        count.add_(1)

    state = State()
    state.add(count, torch.zeros(1, dtype=torch.int64))
    samples = interleave({"step": RestoringCall(step, state)}, rounds=3, device=CPU)
    assert seen == {0}
    assert len(samples["step"]) == 3


def test_putting_back_is_called_as_often_as_the_call(monkeypatch):
    """The time of putting the state back is measured for as many calls as a sample has, and subtracted."""
    now = [0.0]

    def lasting(seconds):
        now[0] += seconds

    monkeypatch.setattr(trial.timing.time, "perf_counter", lambda: now[0])
    state = State()
    state.add_action(lambda: lasting(0.5))
    samples = interleave({"step": RestoringCall(lambda: lasting(0.25), state)}, rounds=4, device=CPU, warmup=0)
    assert samples["step"] == pytest.approx([0.25] * 4)


def test_layouts_of_tensors_that_are_not_plain():
    """Sparse tensors and subclasses have no layout to put back."""
    assert layout_of(torch.eye(2).to_sparse()) == ()
    assert same_bits(torch.eye(2).to_sparse(), torch.eye(2).to_sparse())
