"""The Triton kernels in Triton's interpreter on a CPU, in a separate process: the variable is read at import."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

LOSSES = """
import torch
import torch.nn.functional as F
from backend_kwargs.compilers.inductor.rewrites.kernels import gradient_of_rows, loss_of_rows

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
"""
ATTENTION = """
import torch
import torch.nn.functional as F
from backend_kwargs.compilers.inductor.rewrites.kernels import attention_over_few_keys

for batch, heads, rows, keys, width, of_v in ((2, 3, 49, 49, 32, 32), (1, 2, 5, 7, 16, 8), (2, 2, 70, 130, 40, 24)):
    q = torch.randn(batch, rows, heads, width).transpose(1, 2)
    k, v = torch.randn(batch, heads, keys, width), torch.randn(batch, heads, keys, of_v)
    masked = torch.randn(batch, 1, 1, keys)
    masked[..., 1] = -float("inf")
    for bias in (None, torch.randn(heads, rows, keys), masked, torch.randn(rows, keys)):
        got = attention_over_few_keys(q, k, v, bias, 0.3)
        whole = None if bias is None else bias.expand(batch, heads, rows, keys)
        want = F.scaled_dot_product_attention(q, k, v, attn_mask=whole, scale=0.3).transpose(1, 2)
        assert got.is_contiguous()
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
"""


@pytest.mark.parametrize("code", [LOSSES, ATTENTION], ids=["losses", "attention"])
def test_kernel(code):
    """Each kernel gives ATen's results, for sizes that do not fill a tile."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
