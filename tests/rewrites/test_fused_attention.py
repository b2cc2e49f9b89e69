"""Attention for which torch has no fused kernel is called with four dimensions, heads and batches expanded."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attention
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from backend_kwargs.rewrites.fused_attention import attend_in_four, attention_in_four
from tests.rewrites.lowering import agrees
from tests.rewrites.on_a_cpu import compiled_by

FLASH = "_scaled_dot_product_flash_attention_for_cpu"
# Sizes of q, k and v, and of the masks that are tried.
SIZES = {
    "blocks": (
        (2, 3, 4, 5, 8),
        (2, 3, 4, 7, 8),
        (2, 3, 4, 7, 8),
        [(5, 7), (4, 5, 7), (2, 1, 1, 1, 7), (2, 3, 1, 5, 7)],
    ),
    "six dimensions": (*[(2, 3, 2, 2, 5, 8)] * 3, [(2, 1, 2, 1, 5, 5)]),
    "three": ((6, 5, 8), (6, 7, 8), (6, 7, 8), [(6, 5, 7), (1, 1, 7)]),
    "two": ((5, 8), (7, 8), (7, 8), [(5, 7)]),
    "one head of keys": ((2, 6, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8), [(5, 7), (2, 1, 5, 7), (2, 6, 5, 7)]),
    "one batch of keys": ((2, 3, 5, 8), (1, 3, 7, 8), (3, 7, 8), [(2, 1, 1, 7)]),
    "queries of fewer": ((3, 5, 8), (2, 3, 7, 8), (2, 1, 7, 8), [(2, 3, 5, 7)]),
    "all at once": ((2, 3, 1, 5, 8), (2, 1, 4, 7, 8), (1, 4, 7, 8), [(2, 3, 4, 5, 7)]),
    "a mask of three": (*[(2, 3, 5, 8)] * 3, [(3, 5, 5)]),
}
CASES = [(name, mask) for name, (*_, masks) in SIZES.items() for mask in ([] if "mask" in name else [None]) + masks]


def operands(name, dtype=torch.float32, **options):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype, **options) for shape in SIZES[name][:3]]


def mask_of(sizes, kind):
    """Return a mask that hides all keys from its first query, and some from the others."""
    if sizes is None:
        return None
    shown = torch.rand(sizes, generator=torch.Generator().manual_seed(1)) > 0.4
    shown[..., -1] = True
    shown.view(-1, *sizes[-2:])[0, 0] = False
    return shown if kind == "boolean" else torch.randn(sizes).masked_fill(~shown, -torch.inf)


@pytest.mark.parametrize("kind", ["boolean", "added"])
@pytest.mark.parametrize(("name", "sizes"), CASES, ids=str)
def test_it_computes_the_same(name, sizes, kind):
    """Results, their strides and gradients are eager's, also of a query that sees no key."""
    trained = kind == "boolean"
    args, mask = operands(name, requires_grad=trained), mask_of(sizes, kind)
    fn, counts = compiled_by(attend_in_four, attention)
    got, want = fn(*args, mask), attention(*args, mask)
    assert_close(got, want)
    assert got.stride() == want.stride()
    grad = torch.randn_like(want)
    if trained:
        assert_close(*(torch.autograd.grad(each, args, grad) for each in (got, want)), rtol=1e-4, atol=1e-5)
    assert counts == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["blocks", "one head of keys"])
def test_against_float64(name, dtype):
    """In each dtype the compiled result is within rounding of float64, with a scale and causal too."""
    args = operands(name, dtype)

    def fn(q, k, v):
        return attention(q, k, v, scale=0.3), attention(q, k, v, is_causal=True)

    compiled, counts = compiled_by(attend_in_four, fn, inductor=True)
    agrees(compiled(*args), fn, args)
    assert counts == [2]


def kernels_of(fn, args):
    """Return the names of what runs."""
    with torch.profiler.profile() as profile:
        fn(*args)
    return {event.key.removeprefix("aten::") for event in profile.key_averages()}


@pytest.mark.parametrize("name", [name for name in SIZES if name != "a mask of three"])
def test_it_has_a_fused_kernel(name):
    """What computes by products in eager runs as flash attention."""
    args = operands(name)
    assert FLASH not in kernels_of(attention, args)
    assert FLASH in kernels_of(lambda *args: attention_in_four(*args, None, False, None), args)


def test_blocks_are_not_copied():
    """The parts of one product, blocks behind the heads, become four dimensions as views."""
    q, k, v = torch.randn(2, 4, 5, 3, 6, 8).permute(3, 0, 4, 1, 2, 5).unbind(0)
    ran = kernels_of(lambda *args: attention_in_four(*args, None, False, None), (q, k, v))
    assert not {"cat", "expand_copy"} & ran
    with torch.profiler.profile(record_shapes=True) as profile:
        attention_in_four(q, k, v, None, False, None)
    copied = [event.input_shapes for event in profile.events() if event.name == "aten::clone"]
    assert copied == [[[2, 6, 4, 5, 8], []]]  # the result


class Masks(TorchDispatchMode):
    """Collects the masks of calls of flash attention."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if FLASH in str(func):
            self.seen = kwargs["attn_mask"]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["boolean", "added"])
def test_kernels_see_no_hidden_row(kind):
    """No kernel is asked about a query that sees no key, of which some make nan."""
    mask = mask_of((2, 1, 5, 7), kind)
    with torch.no_grad(), Masks() as masks:
        attention_in_four(*operands("one head of keys"), mask, False, None)
    assert (mask == -torch.inf).all(-1).any() or not mask.any(-1).all()
    assert (masks.seen > -torch.inf).any(-1).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("at", range(3))
def test_not_finite(at, value):
    """Nan or an infinity in q, k or v comes out as in eager, also where the query sees no key."""
    args, mask = operands("one head of keys"), mask_of((5, 7), "boolean")
    args[at][0, 0, 0, 0] = value
    fn, counts = compiled_by(attend_in_four, attention)
    assert_close(fn(*args, mask), attention(*args, mask), equal_nan=True)
    assert counts == [1]


def four(**given):
    return [torch.randn(2, 3, 5, 8, **given) for _ in range(3)]


OTHERS = {
    "equal heads and batches": (attention, four()),
    "a mask of two dimensions": (lambda q, k, v: attention(q, k, v, torch.ones(5, 5)), four()),
    "dropout": (lambda q, k, v: attention(q[0], k[0], v[0], dropout_p=1e-9), four()),
    "grouped heads": (lambda q, k, v: attention(q, k[:, :1], v[:, :1], enable_gqa=True), four()),
    "float64": (lambda q, k, v: attention(q[0], k[0], v[0]), four(dtype=torch.float64)),
    "a negative scale": (lambda q, k, v: attention(q[0], k[0], v[0], scale=-1.0), four()),
    "no rows": (lambda q, k, v: attention(q[0, :, :0], k[0], v[0]), four()),
    "a float32 mask for half precision": (
        lambda q, k, v: attention(q[0], k[0], v[0], torch.ones(5, 5)), four(dtype=torch.bfloat16),
    ),
    "a low mask in training": (
        lambda q, k, v: torch.autograd.grad(attention(q[0], k[0], v[0], torch.full((5, 5), -1e9)).sum(), (q, k, v)),
        four(requires_grad=True),
    ),
    "a mask that is trained": (
        lambda q, k, v: attention(q[0], k[0], v[0], v[:, :, :, :5][0] * 1.0), four(requires_grad=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name):
    """What has a fused kernel already, or would get none, stays as it is."""
    fn, args = OTHERS[name]
    compiled, counts = compiled_by(attend_in_four, fn)
    assert_close(compiled(*args), fn(*args))
    assert counts == [0]


def test_sizes_may_vary():
    """One graph serves other batches and lengths."""
    fn, counts = compiled_by(attend_in_four, attention, dynamic=True)
    for batch, length in ((2, 5), (4, 9)):
        q, k, v = torch.randn(3, batch, 3, 6, length, 8)
        mask = torch.ones(batch, 1, 1, length, length, dtype=torch.bool).tril()
        assert_close(fn(q, k, v, mask), attention(q, k, v, mask))
        assert_close(
            fn(q[:, 0], k[:, 0, :1], v[:, 0, :1], mask[:, 0]), attention(q[:, 0], k[:, 0, :1], v[:, 0, :1], mask[:, 0])
        )
    assert counts == [1, 1]


def test_more_batches_than_a_launch_has():
    """Kernels take 65535 batches or heads: with more, torch's own choice remains."""
    args = [torch.randn(70000, 1, 2) for _ in range(3)]
    ran = kernels_of(lambda *args: attention_in_four(*args, None, False, None), args)
    assert FLASH not in ran
