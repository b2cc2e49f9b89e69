"""Sums of gathered rows as one operator: bags of embeddings, experts' outputs, and similar graphs."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from backend_kwargs.auto.graph_stats import observed_stats
from backend_kwargs.harness.named_models import imported
from backend_kwargs.rewrites.gather_sum import fuse_gather_sum
from backend_kwargs.rewrites.table import BUILT_IN
from tests.rewrites.on_a_cpu import compiled_by

TABLE = torch.randn(50, 16)
INDICES = torch.randint(50, (6, 5))
WEIGHTS = torch.randn(6, 5)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}

# Tables in the host's memory match only there.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


def bags(mode, **options):
    return lambda t, i, w: F.embedding_bag(i, t, mode=mode, **options)


# Each of a table [rows, width], indices [sums, length] and weights [sums, length].
FORMS = {
    "bags": bags("sum"),
    "means of bags": bags("mean"),
    "padded bags": bags("sum", padding_idx=3),
    "means of padded bags": bags("mean", padding_idx=3),
    "padded from the end": lambda t, i, w: F.embedding_bag(i, t, mode="sum", padding_idx=3 - len(t)),
    "weighted bags": lambda t, i, w: F.embedding_bag(i, t, mode="sum", per_sample_weights=w),
    "weighted padded bags": lambda t, i, w: F.embedding_bag(i, t, mode="sum", per_sample_weights=w, padding_idx=3),
    "experts": lambda t, i, w: (t[i.flatten()].view(*i.shape, -1) * w.softmax(-1)[..., None]).sum(1),
    "weighted before": lambda t, i, w: (w.reshape(-1, 1) * t[i.reshape(-1)]).unflatten(0, i.shape).sum(dim=1),
    "without weights": lambda t, i, w: t[i.reshape(-1), :].view(i.shape[0], i.shape[1], t.shape[1]).sum((1,)),
    "indices in rows": lambda t, i, w: torch.sum(t[i], dim=-2),
    "tokens": lambda t, i, w: F.embedding(i, t).mean(1),
    "weighted tokens": lambda t, i, w: torch.mul(F.embedding(i, t), w.unsqueeze(2)).sum(1),
    "selected": lambda t, i, w: torch.index_select(t, 0, i.flatten()).reshape(*i.shape, -1).mean(dim=[1]),
    "selected by the method": lambda t, i, w: t.index_select(-2, i.flatten()).view(*i.shape, -1).sum(1),
    "kept dimension": lambda t, i, w: t[i].sum(1, keepdim=True),
    "by keywords": lambda t, i, w: torch.mean(input=F.embedding(input=i, weight=t), dim=1),
    "bags by keywords": lambda t, i, w: F.embedding_bag(weight=t, input=i, mode="mean", padding_idx=None),
    "batches": lambda t, i, w: t[torch.stack((i, i.flip(0)))].mean(2),
}


@pytest.mark.parametrize("inductor", [False, True], ids=["as it is", "Inductor"])
@pytest.mark.parametrize("form", FORMS)
def test_each_form(form, inductor):
    """Bags in each mode, and each spelling of gathered rows that are weighted and summed."""
    fn, counts = compiled_by(fuse_gather_sum, FORMS[form], inductor=inductor)
    args = TABLE, INDICES, WEIGHTS
    assert_close(fn(*args), FORMS[form](*args))
    assert counts == [1]


@settings(max_examples=60, deadline=None)
@given(
    form=st.sampled_from([*FORMS]),
    rows=st.integers(4, 30),
    width=st.integers(2, 40),
    sums=st.integers(1, 9),
    length=st.integers(1, 20),
    strided=st.booleans(),
    turned=st.booleans(),
    dtype=st.sampled_from([*TOLERANCE]),
    indices=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 99),
)
def test_against_float64(form, rows, width, sums, length, strided, turned, dtype, indices, seed):
    """In each dtype and layout the result is within rounding of float64, and has eager's dtype, shape and strides."""
    torch.manual_seed(seed)
    table = torch.randn(rows, width + 2)[:, :width].to(dtype) if strided else torch.randn(rows, width).to(dtype)
    at = torch.randint(rows, (length, sums) if turned else (sums, length), dtype=indices)
    at = at.t() if turned else at
    weights = torch.randn(sums, length).to(dtype)
    fn, counts = compiled_by(fuse_gather_sum, FORMS[form])
    found, plain = fn(table, at, weights), FORMS[form](table, at, weights)
    exact = FORMS[form](table.double(), at, weights.double())
    assert (found.dtype, found.shape) == (plain.dtype, plain.shape)
    assert all(a == b for a, b, size in zip(found.stride(), plain.stride(), plain.shape, strict=True) if size > 1)
    assert_close(found.double(), exact, atol=TOLERANCE[dtype] * length**0.5, rtol=TOLERANCE[dtype])
    assert counts == [1]


@pytest.mark.parametrize("form", ["experts", "weighted before", "without weights", "indices in rows"])
def test_negative_indices(form):
    """Negative indices count from the end, as in eager."""
    fn, counts = compiled_by(fuse_gather_sum, FORMS[form], inductor=True)
    args = TABLE, INDICES - 25, WEIGHTS
    assert_close(fn(*args), FORMS[form](*args))
    assert counts == [1]


def test_weights_of_another_dtype():
    """Half-precision rows times float32 weights are summed to float32."""
    fn, counts = compiled_by(fuse_gather_sum, FORMS["experts"])
    args = TABLE.bfloat16(), INDICES, WEIGHTS
    assert_close(fn(*args), FORMS["experts"](*args))
    assert counts == [1]


def test_a_half_is_rounded_once():
    """Products and partial sums that float16 could not hold are kept in float32."""
    table, weights = torch.full((4, 2), 600.0).half(), torch.tensor([[200.0, -200.0, 1.0]]).half()
    indices = torch.tensor([[0, 1, 2]])
    fn, _ = compiled_by(fuse_gather_sum, FORMS["weighted tokens"], inductor=True)
    assert_close(fn(table, indices, weights), torch.full((1, 2), 600.0).half())


def test_bags_of_padding():
    """A bag without other rows is 0, whatever the padding's row is, and so is its mean."""
    table = TABLE.clone()
    table[3] = float("nan")
    indices = torch.full((2, 4), 3)
    indices[0, 1] = 7
    for form in ("padded bags", "means of padded bags"):
        fn, counts = compiled_by(fuse_gather_sum, FORMS[form], inductor=True)
        assert_close(fn(table, indices, WEIGHTS), torch.stack((table[7], torch.zeros(16))))
        assert counts == [1]


def two_users(t, i, w):
    rows = t[i]
    return rows.sum(1), rows.amax(1)


def written_between(t, i, w):
    t = t * 2
    rows = t[i]
    t.zero_()
    return rows.sum(1) + t.sum()


def weights_written_between(t, i, w):
    w = w * 2
    rows = t[i] * w[..., None]
    w.zero_()
    return rows.sum(1)


def summed_into(t, i, w):
    made = torch.zeros(6, 16)
    torch.sum(t[i], 1, out=made)
    return made


def selected_into(t, i, w):
    made = torch.zeros(30, 16)
    torch.index_select(t, 0, i.flatten(), out=made).view(6, 5, 16).sum(1)
    return made


def squares_of_rows_written(t, i, w):
    t = t[:, :1] * 2
    rows = t[i]
    t.zero_()
    return (rows * rows).sum(1)


STAY = {
    "another sum": lambda t, i, w: t[i].sum(2),
    "of both": lambda t, i, w: t[i].sum((1, 2)),
    "of everything": lambda t, i, w: t[i].sum(),
    "the largest": lambda t, i, w: t[i].amax(1),
    "bags' largest": bags("max"),
    "bags with offsets": lambda t, i, w: F.embedding_bag(i.flatten(), t, torch.arange(0, 30, 5), mode="sum"),
    "without the last bag": bags("sum", include_last_offset=True),
    "bounded norms": lambda t, i, w: F.embedding_bag(i, t.clone(), mode="sum", max_norm=0.5),
    "bounded norms of tokens": lambda t, i, w: F.embedding(i, t.clone(), max_norm=0.5).sum(1),
    "another user": two_users,
    "a table that is written": written_between,
    "weights that are written": weights_written_between,
    "two weights": lambda t, i, w: (t[i] * w[..., None] * w[..., None]).sum(1),
    "a weight for each column": lambda t, i, w: (t[i] * t[:6, None]).sum(1),
    "one weight for all": lambda t, i, w: (t[i] * w[:1, :1, None]).sum(1),
    "a number": lambda t, i, w: (t[i] * 2).sum(1),
    "rows of matrices": lambda t, i, w: t.view(50, 4, 4)[i].sum(-2),
    "a column's rows": lambda t, i, w: t.view(10, 5, 16)[i.view(2, 3, 5) % 10, 0].sum(-2),
    "one column": lambda t, i, w: t[:, 0][i].sum(-2),
    "one column of rows": lambda t, i, w: t[i, 0].sum(-2),
    "some columns of rows": lambda t, i, w: t[i, :4].sum(1),
    "rows of a strided table's columns": lambda t, i, w: t[:, ::2][i].sum(1),
    "rows and a weight for each sum": lambda t, i, w: (t[i] * w[:, :1, None]).sum(1),
    "a sum of half of the rows": lambda t, i, w: t[i].view(6, 5, 2, 8).sum(1),
    "into a tensor": summed_into,
    "selected into a tensor": selected_into,
    "squares of rows": squares_of_rows_written,
    "as another dtype": lambda t, i, w: (t.half()[i].view(torch.bfloat16) * w[..., None]).sum(1),
    "a reshape by keywords": lambda t, i, w: torch.reshape(input=t[i], shape=(6, 5, 16)).sum(1),
    "everything": lambda t, i, w: t[()].view(-1, 5, 16).sum(1),
    "columns": lambda t, i, w: t.t().contiguous()[:, i].sum(1),
    "columns of the selected": lambda t, i, w: t.index_select(1, i[0] % 16).view(10, 5, 5).sum(1),
    "a mask": lambda t, i, w: t[t[:, 0] > 0].view(1, -1, 16).sum(1),
    "columns apart": lambda t, i, w: t.t().contiguous().t()[i].sum(1),
    "other rows": lambda t, i, w: t[i].view(6, 5, 4, 4).sum(-2),
    "one more row than fits": lambda t, i, w: t[i.repeat(1, 52)[:, :257]].sum(1),
    "a slice": lambda t, i, w: t[:30].view(6, 5, 16).sum(1),
    "a wide dtype": lambda t, i, w: t.double()[i].sum(1),
    "a sum in another dtype": lambda t, i, w: t[i].sum(1, dtype=torch.float64),
    "a wide weight": lambda t, i, w: (t[i] * w.double()[..., None]).sum(1),
    "numbers": lambda t, i, w: t.long()[i].sum(1),
    "no rows": lambda t, i, w: t[i[:0]].sum(1),
    "empty sums": lambda t, i, w: t[i[:, :0]].sum(1),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The .* operator")
@pytest.mark.parametrize("fn", STAY.values(), ids=STAY)
@torch.no_grad()
def test_others_stay(fn):
    """Similar graphs stay as they are."""
    compiled, counts = compiled_by(fuse_gather_sum, fn)
    args = TABLE, INDICES, WEIGHTS
    assert_close(compiled(*args), fn(*args), equal_nan=True)
    assert sum(counts) == 0


@pytest.mark.parametrize("trained", [0, 2], ids=["table", "weights"])
def test_gradients_stay(trained):
    """A sum whose table or weights need gradients stays, also under `enable_grad`; without gradients it does not."""
    args = [TABLE.clone(), INDICES, WEIGHTS.clone()]
    args[trained].requires_grad_()
    form = FORMS["weighted tokens"]
    fn, counts = compiled_by(fuse_gather_sum, form)
    (got,), (want,) = (torch.autograd.grad(f(*args).square().sum(), args[trained : trained + 1]) for f in (fn, form))
    assert_close(got, want)
    with torch.no_grad():
        assert_close(fn(*args), form(*args))
    assert counts == [0, 1]


def test_rows_gathered_without_gradients():
    """A sum of rows and weights that were computed under `no_grad` needs no gradients, although the table does."""

    def form(t, i, w):
        with torch.no_grad():
            rows, weights = t[i], w[..., None] * 1
        return (rows * weights).sum(1)

    table, weights = TABLE.clone().requires_grad_(), WEIGHTS.clone().requires_grad_()
    fn, counts = compiled_by(fuse_gather_sum, form, inductor=True)
    found = fn(table, INDICES, weights)
    assert_close(found, form(table, INDICES, weights))
    assert not found.requires_grad
    assert counts == [1]


def test_sizes_may_vary():
    """With symbolic rows and sums one graph serves other tables and batches."""
    fn, counts = compiled_by(fuse_gather_sum, FORMS["weighted tokens"], inductor=True)
    for rows, sums in ((50, 6), (40, 9), (7, 3)):
        table, indices, weights = torch.randn(rows, 16), torch.randint(rows, (sums, 5)), torch.randn(sums, 5)
        torch._dynamo.mark_dynamic(table, 0)
        torch._dynamo.mark_dynamic(indices, 0)
        torch._dynamo.mark_dynamic(weights, 0)
        assert_close(fn(table, indices, weights), FORMS["weighted tokens"](table, indices, weights))
    assert counts == [1]


def test_the_longest_sum():
    """256 rows still fit."""
    fn, counts = compiled_by(fuse_gather_sum, FORMS["indices in rows"])
    indices = INDICES.repeat(1, 52)[:, :256]
    assert_close(fn(TABLE, indices, WEIGHTS), FORMS["indices in rows"](TABLE, indices, WEIGHTS))
    assert counts == [1]


def test_padding_that_varies():
    """Where the padding's index is a symbol, bags stay."""
    form = lambda t, i, padding: F.embedding_bag(i, t, mode="sum", padding_idx=padding)  # noqa: E731
    fn, counts = compiled_by(fuse_gather_sum, form)
    for padding in (3, 4, 5):
        assert_close(fn(TABLE, INDICES, padding), form(TABLE, INDICES, padding))
    assert counts[0] == 1
    assert sum(counts) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast(dtype):
    """Autocast leaves these operators alone, so their sum has eager's dtype."""

    def form(t, i, w):
        with torch.autocast("cpu", torch.bfloat16):
            return (t[i] * w[..., None]).sum(1)

    args = TABLE.to(dtype), INDICES, WEIGHTS.to(dtype)
    fn, counts = compiled_by(fuse_gather_sum, form)
    assert_close(fn(*args), form(*args), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert counts == [1]


class Bags(nn.Module):
    """Two tables of embeddings, in modules as users write them."""

    def __init__(self):
        super().__init__()
        self.one = nn.EmbeddingBag(50, 16, mode="mean", padding_idx=0)
        self.other = nn.EmbeddingBag(30, 16, mode="sum")

    def forward(self, indices):
        return self.one(indices) + self.other(indices % 30)


def test_modules():
    """`nn.EmbeddingBag` is matched, in each mode."""
    model = Bags().eval()
    fn, counts = compiled_by(fuse_gather_sum, model, inductor=True)
    with torch.no_grad():
        assert_close(fn(INDICES), model(INDICES))
    assert counts == [2]


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_a_mixture_of_experts():
    """In transformers' Mixtral by grouped products, the outputs of each token's experts are gathered and summed."""
    transformers = imported("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, num_local_experts=4, num_experts_per_tok=2, experts_implementation="grouped_mm",
    )  # fmt: skip
    model = transformers.MixtralModel(config).bfloat16().eval()
    ids = torch.randint(64, (2, 6))
    fn, counts = compiled_by(fuse_gather_sum, model)
    with torch.no_grad():
        got = fn(ids, use_cache=False).last_hidden_state
        assert_close(got, model(ids, use_cache=False).last_hidden_state, atol=3e-2, rtol=3e-2)
    assert sum(counts) == 2


FITTING = {
    "bags": (True, FORMS["bags"]),
    "tokens": (True, FORMS["tokens"]),
    "experts": (True, FORMS["experts"]),
    "selected": (True, FORMS["selected"]),
    "no sum": (False, lambda t, i, w: t[i]),
    "no gathered rows": (False, lambda t, i, w: t.sum(0)),
}


@pytest.mark.parametrize(("fits", "fn"), FITTING.values(), ids=FITTING)
def test_a_race_looks_for_them(fits, fn):
    """A race on a GPU matches the graphs that gather rows and sum."""
    told = {"bytes_read": 0.0, "training": False, "writes": False, "dynamic": False}
    with torch.no_grad():
        stats = observed_stats(lambda: fn(TABLE, INDICES, WEIGHTS), device="cuda", **told)
    assert BUILT_IN["gather_sum"].fitting(stats) is fits
