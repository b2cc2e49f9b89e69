"""Sorts of indices below 256 as sorts of bytes: their forms, and what stays."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from backend_kwargs.rewrites.byte_sort import sort_bytes
from backend_kwargs.rewrites.traced import places_in_traced
from tests.rewrites.on_a_cpu import compiled_by

SCORES = torch.randn(64, 60, generator=torch.Generator().manual_seed(0))
FORMS = {
    "experts": lambda x: torch.sort(torch.topk(x, 4, dim=-1)[1].reshape(-1)),
    "argsort": lambda x: x.softmax(-1).topk(4)[1].view(-1).argsort(stable=True),
    "by names": lambda x: torch.argsort(input=x.topk(k=4).indices.flatten(), descending=True, stable=True),
    "values alone": lambda x: x.topk(4)[1].view(-1).sort().values,
    "of the best": lambda x: torch.argsort(x.argmax(-1), stable=True),
    "of the worst, kept": lambda x: torch.sort(torch.argmin(x, 1, keepdim=True), dim=0, stable=True),
    "columns": lambda x: torch.sort(x.topk(3, sorted=False)[1].t().contiguous(), stable=True),
    "rows": lambda x: torch.sort(x.topk(3)[1], stable=True, dim=0),
    "beside the scores": lambda x: (x.topk(4)[0], x.topk(4)[1].view(-1).sort(stable=True)),
    "along another dimension": lambda x: torch.topk(x, 5, 0)[1].t().sort(dim=-1, stable=True),
}


def masked(x):
    experts = x.topk(4)[1]
    experts.masked_fill_(x[:, :4] > 0, 999)
    return experts.view(-1).sort()


def masked_view(x):
    experts = x.topk(4)[1].view(-1)
    experts[3] = 999
    return experts.sort()


OTHERS = {
    "written before": masked,
    "written through a view": masked_view,
    "scores": lambda x: x.topk(4)[0].sort(),
    "more than a byte has": lambda x: x.repeat(1, 5).topk(3)[1].view(-1).sort(),
    "a sum": lambda x: (x.topk(3)[1] + 250).view(-1).sort(),
    "bits of floats": lambda x: x.topk(3)[1].view(torch.float64).sort(),
    "of all": lambda x: x.argmax().sort(),
    "another sort's": lambda x: x.sort()[1].view(-1).sort(),
}


def same(found, wanted):
    """Return whether results are equal, with their dtypes and strides."""
    pairs = zip(pytree.tree_leaves(tuple(found)), pytree.tree_leaves(tuple(wanted)), strict=True)
    return all(torch.equal(a, b) and (a.dtype, a.stride()) == (b.dtype, b.stride()) for a, b in pairs)


@pytest.mark.parametrize("form", [*FORMS, *OTHERS])
def test_each_form(form):
    """Each spelling gives eager's values and indices; what may exceed a byte or was written to stays as it is."""
    eager = (FORMS | OTHERS)[form]
    fn, counts = compiled_by(sort_bytes, eager)
    assert same(fn(SCORES), eager(SCORES))
    assert counts == [form in FORMS]


@settings(max_examples=30, deadline=None)
@given(
    form=st.sampled_from(sorted({*FORMS} - {"beside the scores"})),
    tokens=st.integers(5, 300),
    experts=st.sampled_from([5, 8, 60, 255, 256]),
    broken=st.sampled_from([None, torch.nan, torch.inf]),
    seed=st.integers(0, 99),
)
def test_drawn_scores(form, tokens, experts, broken, seed):
    """So it is for other numbers of tokens and experts, ties, and scores that are not finite."""
    scores = torch.randint(9, (tokens, experts), generator=torch.Generator().manual_seed(seed)).float()
    if broken is not None:
        scores[::3, ::2] = broken
    fn, counts = compiled_by(sort_bytes, FORMS[form])
    assert same(fn(scores), FORMS[form](scores))
    assert counts == [int((tokens if form == "along another dimension" else experts) <= 256)]


def test_tokens_that_vary():
    """The number of tokens may vary where that of the experts does not; Inductor sorts bytes then."""
    scores = SCORES.clone()
    torch._dynamo.mark_dynamic(scores, 0)
    fn, counts = compiled_by(sort_bytes, FORMS["argsort"], inductor=True)
    assert same([fn(scores), fn(SCORES[:7])], [FORMS["argsort"](SCORES), FORMS["argsort"](SCORES[:7])])
    assert counts == [1]


def test_a_place_has_what_gives_the_indices():
    """A place begins with what gives the indices, which tells how large they are, and returns tensors alone."""
    found = []

    def backend(gm, inputs):
        found.extend(places_in_traced(gm, inputs, "byte_sort"))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(FORMS["experts"], backend=backend)(SCORES)
    (place,) = found
    assert place.what == "topk, reshape, sort of float32 64x60"
    assert {each.split(" ")[1] for each in place.results} == {"torch.int64"}
