"""The Triton kernels in Triton's interpreter on a CPU, in a separate process: the variable is read at import.

Of the combinations of layouts and options, each size has every fifth, and another one first.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

LOSSES = """
import torch
import torch.nn.functional as F
from backend_kwargs.rewrites.kernels.cross_entropy import gradient_of_rows, loss_of_rows

for rows, columns in ((5, 33), (3, 9000)):
    wide = torch.randn(rows, columns + 3) * 5
    logits, target = wide[:, :columns], torch.randint(columns, (rows,))
    target[1] = -100
    logits[2] += 90  # far from 0, where a logsumexp in one part loses digits
    losses, tops, logs = loss_of_rows(logits, target, -100)
    exact = logits.double().requires_grad_()
    want = F.cross_entropy(exact, target, reduction="none")
    want.sum().backward()
    torch.testing.assert_close(losses.double(), want.detach(), rtol=1e-5, atol=1e-5)
    got = gradient_of_rows(torch.tensor(1.0), logits, target, tops, logs, -100)
    torch.testing.assert_close(got.double(), exact.grad, rtol=1e-5, atol=1e-6)
    strided = torch.stack((target, target - 1), 1)[:, 0]
    torch.testing.assert_close(loss_of_rows(logits, strided, -100), (losses, tops, logs))
    torch.testing.assert_close(gradient_of_rows(torch.tensor(1.0), logits, strided, tops, logs, -100), got)
    same = target[:1].expand(rows)
    torch.testing.assert_close(loss_of_rows(logits, same, -100)[0], loss_of_rows(logits, same.clone(), -100)[0])
    edges = logits.clone()
    edges[0, :-1] = edges[1, 3] = edges[1, 5:] = -torch.inf
    target[:2] = torch.tensor([columns - 1, 4])
    for at, value in ((1, -torch.inf), (2, torch.inf), (2, torch.nan)):
        edges[at, 7] = value
        losses, *_ = loss_of_rows(edges, target, -100)
        want = F.cross_entropy(edges, target, reduction="none")
        torch.testing.assert_close(losses, want, rtol=1e-5, atol=1e-5, equal_nan=True)
    edges[0] = -torch.inf
    assert loss_of_rows(edges, target, -100)[0][0].isnan()
    for unknown in (-1, columns, columns + 1):
        target[0] = unknown
        losses, *_ = loss_of_rows(logits, target, -100)
        assert losses[0].isnan() and not losses[1:].isnan().any()
"""
ATTENTION = """
import torch
import torch.nn.functional as F
from backend_kwargs.rewrites.kernels.attention import attention_over_few_keys

for batch, heads, rows, keys, width, of_v in ((2, 3, 49, 49, 32, 32), (1, 2, 5, 7, 16, 8), (2, 2, 70, 130, 40, 24)):
    q = torch.randn(batch, rows, heads, width).transpose(1, 2)
    k, v = torch.randn(batch, heads, keys, width), torch.randn(batch, heads, keys, of_v)
    masked = torch.randn(batch, 1, 1, keys)
    masked[..., 1] = -float("inf")
    repeats, hidden = torch.randn(batch, heads, rows, keys), torch.randn(rows, keys)
    hidden[1] = -float("inf")  # a query that sees no key
    q, k, v = (torch.cat((each, -each)) for each in (q, k, v))
    if rows == 5:
        k = k.transpose(2, 3).contiguous().transpose(2, 3)  # its last dimension is not dense
    for bias in (None, torch.randn(heads, rows, keys), torch.cat((masked, masked)), hidden, repeats):
        got = attention_over_few_keys(q, k, v, bias, 0.3)
        whole = bias
        if bias is not None:
            whole = torch.cat((bias, bias)) if bias is repeats else bias.expand(2 * batch, heads, rows, keys)
        want = F.scaled_dot_product_attention(q, k, v, attn_mask=whole, scale=0.3).transpose(1, 2)
        assert got.is_contiguous()
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
"""
GRADIENTS_OF_ATTENTION = """
import torch
from backend_kwargs.rewrites.kernels.attention import gradients_over_few_keys
from backend_kwargs.rewrites.window_attention import _gradients, _summed

for batch, heads, rows, keys, width, of_v in ((6, 3, 49, 49, 32, 32), (4, 2, 5, 7, 16, 8), (2, 1, 17, 3, 9, 20)):
    q = torch.randn(batch, rows, heads, width).transpose(1, 2)
    k, v = torch.randn(batch, heads, keys, width), torch.randn(batch, heads, keys, of_v)
    grad = torch.randn(batch, heads, rows, of_v).transpose(1, 2)
    if rows == 5:
        k = k.transpose(2, 3).contiguous().transpose(2, 3)
    hidden = torch.randn(rows, keys)
    hidden[1], hidden[:, 2] = -float("inf"), -float("inf")  # a query that sees no key, a key that no query sees
    shapes = (heads, rows, keys), (2, heads, rows, keys), (batch, 1, 1, keys), (1, heads, 1, 1)
    for bias in (*map(torch.randn, shapes), torch.randn(heads, keys, rows).mT, hidden):
        for of_bias in (False, True):
            *got, sums = gradients_over_few_keys(grad, q, k, v, bias, 0.3, of_bias=of_bias)
            *want, of = _gradients(grad, q, k, v, bias, 0.3, of_bias)
            for one, other in zip(got, want, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
                assert one.is_contiguous()
            torch.testing.assert_close(_summed(sums, bias) if of_bias else sums, of, rtol=1e-4, atol=1e-4)
"""
LAYER_NORM = """
import torch
from backend_kwargs.rewrites.layer_norm_backward import _gradients, _layer_norm
from backend_kwargs.rewrites.kernels.layer_norm import gradients_of_layer_norm

for shape in ((5, 33), (2, 3, 64), (9, 700), (3, 5000)):
    x, grad = torch.randn(shape) + 2, torch.randn(shape[::-1]).permute(*reversed(range(len(shape))))
    weight, bias = torch.randn(shape[-1], 2).unbind(1)
    _, mean, rstd = _layer_norm(x, weight, bias, 1e-5)
    got, want = (fn(grad, x, mean, rstd, weight) for fn in (gradients_of_layer_norm, _gradients))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert got[0].is_contiguous()
"""
GATHER_SUM = """
import itertools
import torch
from backend_kwargs.rewrites.gather_sum import _gather_sum, _gather_sum_cuda

sizes = (7, 20, 3, 5), (50, 128, 9, 1), (9, 1100, 2, 11), (6, 1, 300, 8)
for at, (rows, width, sums, length) in enumerate(sizes):
    wide = torch.randn(rows, width + 3)
    every = itertools.product(
        (torch.randn(rows, width), wide[:, 1:-2], wide[:, :-3].half()),
        (torch.randint(-rows, rows, (sums, length)), torch.randint(rows, (length, sums), dtype=torch.int32).t()),
        (None, torch.randn(sums, length), torch.randn(length, sums).t().bfloat16()),
        ((None, False), (3, False), (3, True), (None, True)),
    )
    for *tensors, options in [*every][at::5]:
        got, want = _gather_sum_cuda(*tensors, *options), _gather_sum(*tensors, *options)
        torch.testing.assert_close(got, want)
indices = torch.tensor([[0, 1], [3, 4], [-4, -1], [-5, 0], [4, 4]])
padded = torch.tensor([[0.0, 1], [1, 1], [1, 1], [1, 1], [1, float("inf")]])
table = torch.randn(4, 8)
assert _gather_sum_cuda(table, indices, None, None, False).isnan().all(1).tolist() == [False, True, False, True, True]
got = _gather_sum_cuda(table, indices, padded, 4, True)
torch.testing.assert_close(got[[0, 1, 2]], torch.stack((table[1] / 2, table[3], (table[0] + table[3]) / 2)))
assert got[3].isnan().all() and got[4].eq(0).all()
"""
SEGMENTS = """
import itertools
import torch
from backend_kwargs.rewrites.scatter_reduce import _in_order, _in_order_cuda, _reduce, _reduce_cuda

sizes = (7, 3, 300), (300, 2, 70), (5, 20, 4), (40, 9, 6)
for at, (length, segments, width) in enumerate(sizes):
    wide, index = torch.randn(length, width + 3), torch.randint(segments, (2 * length,), dtype=torch.int32)[::2]
    own = torch.randn(segments, width)
    order = _in_order_cuda(index, segments)
    want = _in_order(index, segments)
    assert order[1].equal(want[1]) and index[order[0]].equal(index[want[0]])
    wide[1, 0], wide[2, 1], wide[3, 1] = torch.nan, torch.inf, -torch.inf
    every = itertools.product((wide[:, :width], wide[:, 3:].half()), ("sum", "mean", "amax", "amin"), (False, True))
    for src, *options in [*every][at % 3::3]:
        args = own.to(src.dtype), src, *order, *options
        torch.testing.assert_close(_reduce_cuda(*args), _reduce(*args), equal_nan=True)
    for unknown in (-1, segments):
        index[0] = unknown
        assert _reduce_cuda(own, wide[:, :width], *_in_order_cuda(index, segments), "amax", True).isnan().all()
"""
DECODE_ATTENTION = """
import itertools
import torch
import torch.nn.functional as F
from backend_kwargs.rewrites.kernels.decode import attention_in_splits

sizes = (2, 4, 2, 1, 70, 20, 20), (1, 2, 2, 3, 130, 16, 9), (2, 8, 1, 2, 150, 32, 33), (1, 2, 1, 1, 300, 200, 256)
for at, (batch, heads, shared, queries, keys, width, width_of_v) in enumerate(sizes):
    q, k = torch.randn(batch, queries, heads, width).transpose(1, 2), torch.randn(batch, keys, shared, width)
    k, v = k.transpose(1, 2), torch.randn(batch, shared, keys, width_of_v)
    few = torch.rand(batch, 1, queries, keys) > 0.4
    few[0, 0, 0, :] = torch.arange(keys) < 50  # whole tiles that nobody sees
    masks = (
        None, torch.rand(1, keys) > 0.5, few, torch.rand(batch, heads, 1, keys) > 0.3,
        torch.randn(1, heads, queries, keys), torch.randn(1, 1, 1, keys), torch.zeros(1, 1, 1, keys, dtype=torch.bool),
        few[:, :, :1].float().log(), torch.randn(queries, keys).half(),
    )
    for mask, splits, last in [*itertools.product(masks, (1, 2, 3), (False, True))][at::5]:
        out = torch.full((batch, queries, heads, width_of_v), float("nan")).transpose(1, 2)
        out = out if last else out.contiguous()
        got = attention_in_splits(q, k, v, mask, 0.3, out, splits=splits)
        added = mask.float() if mask is not None and mask.dtype == torch.float16 else mask
        want = F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=0.3, enable_gqa=True)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert got.data_ptr() == out.data_ptr()
k[0, 0, 3], v[0, 0, 4] = float("nan"), float("inf")
hidden = torch.ones(keys, dtype=torch.bool).index_fill(0, torch.tensor([3, 4]), False)
for splits in (1, 3):
    bad, good = (attention_in_splits(q, k, v, mask, 0.3, out, splits=splits).clone() for mask in (None, hidden))
    assert bad.isnan().all() and good.isfinite().all()  # what the mask hides is not read
"""
GROUPED_CONVOLUTION = """
import torch
from backend_kwargs.rewrites.grouped_convolution import _grouped_cuda
from backend_kwargs.rewrites.convolution import convolution

LAST = torch.channels_last
for ins, outs, groups, kernel, stride, padding, dilation in (
    (6, 6, 3, (3, 3), (1, 1), (1, 1), (1, 1)), (8, 4, 2, (3, 3), (2, 1), (0, 2), (1, 2)),
    (40, 20, 2, (1, 3), (1, 2), (0, 1), (1, 1)), (5, 5, 5, (3, 3), (2, 2), (1, 1), (1, 1)),
    (70, 70, 70, (7, 5), (1, 1), (3, 4), (1, 2)), (4, 8, 4, (2, 2), (1, 1), (0, 0), (1, 1)),
    (140, 10, 2, (3, 2), (1, 1), (1, 1), (2, 1)), (20, 300, 2, (1, 1), (2, 1), (0, 0), (1, 1)),
):
    x = torch.randn(2, ins, 9, 7).contiguous(memory_format=LAST)
    for layout in (torch.contiguous_format, LAST):
        w = torch.randn(outs, ins // groups, *kernel).contiguous(memory_format=layout)
        for bias in (None, torch.randn(outs)):
            args = x, w, bias, stride, padding, dilation, groups
            got, want = _grouped_cuda(*args), convolution(*args)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
            assert got.is_contiguous(memory_format=LAST)
            assert _grouped_cuda(x.contiguous(), *args[1:]).equal(got)  # as Inductor may lay them out
"""
DEPTHWISE_NORM = """
import torch
from backend_kwargs.rewrites.grouped_convolution import ACTIVATIONS, _depthwise_cuda, with_norm

LAST = torch.channels_last
names = [*ACTIVATIONS] * 2
for channels, each, kernel, stride, padding, dilation in (
    (70, 1, (7, 3), (1, 1), (3, 4), (1, 3)), (5, 1, (3, 3), (2, 2), (1, 1), (1, 1)),
    (6, 2, (3, 2), (2, 1), (0, 1), (1, 1)), (3, 3, (5, 5), (1, 3), (2, 2), (2, 1)),
    (66, 1, (1, 1), (1, 1), (0, 0), (1, 1)), (4, 1, (3, 3), (5, 1), (6, 1), (2, 1)),
):
    x = torch.randn(2, channels, 9, 7).contiguous(memory_format=LAST)
    x[0, 0, 1, 1], x[1, 1, 3, 2], x[1, 0, 0, 0] = torch.nan, torch.inf, -torch.inf
    w = torch.randn(channels * each, 1, *kernel)
    scale, shift = torch.rand(channels * each * 2)[::2], torch.randn(channels * each)
    for norm in ((None, None), (scale, None), (None, shift), (scale, shift)):
        args = x, w, *norm, stride, padding, dilation, names.pop()
        names[:0] = [args[-1]]
        want = with_norm(*args)
        for got in (_depthwise_cuda(x.contiguous(), *args[1:]), _depthwise_cuda(*args)):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, equal_nan=True)
        assert got.is_contiguous(memory_format=LAST)
"""
STEM_CONVOLUTION = """
import torch
from backend_kwargs.rewrites.stem_convolution import _stem, _stem_cuda

LAST = torch.channels_last
names = ["relu", "silu", ""] * 2
for ins, outs, kernel, stride, padding, dilation in (
    (3, 20, (7, 5), (2, 1), (3, 0), (1, 2)), (1, 5, (3, 3), (1, 1), (1, 1), (1, 1)),
    (4, 70, (2, 2), (2, 2), (0, 0), (1, 1)), (2, 3, (1, 1), (1, 3), (0, 2), (1, 1)),
):
    for layout in (torch.contiguous_format, LAST):
        x = torch.randn(2, ins, 9, 11).contiguous(memory_format=layout)
        x[0, 0, 1, 1], x[1, 0, 3, 2] = torch.nan, torch.inf
        w = torch.randn(outs, ins, *kernel).contiguous(memory_format=layout)
        scale, shift = torch.rand(outs * 2)[::2], torch.randn(outs)
        for norm in ((None, None), (scale, None), (None, shift), (scale, shift)):
            args = x, w, *norm, stride, padding, dilation, names.pop()
            names[:0] = [args[-1]]
            got, want = _stem_cuda(*args), _stem(*args)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, equal_nan=True)
            assert got.stride() == want.stride()
"""
CODES = {
    "losses": LOSSES,
    "attention": ATTENTION,
    "gradients of attention": GRADIENTS_OF_ATTENTION,
    "layer norm": LAYER_NORM,
    "sums of gathered rows": GATHER_SUM,
    "rows of segments": SEGMENTS,
    "attention of a few queries": DECODE_ATTENTION,
    "grouped convolution": GROUPED_CONVOLUTION,
    "depthwise convolution with a norm": DEPTHWISE_NORM,
    "convolution of few channels": STEM_CONVOLUTION,
}


# One process for all: triton reads the variable when it is imported, and an import of torch takes longer than a test.
RUN = """
import json, sys, traceback
failed = {}
for name, code in json.load(sys.stdin).items():
    try:
        exec(code, {})
    except Exception:
        failed[name] = traceback.format_exc()
print(json.dumps(failed))
"""


def test_kernels():
    """Each kernel gives ATen's results, for sizes that do not fill a tile."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", RUN]
    ran = subprocess.run(command, env=env, input=json.dumps(CODES), capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == {}
