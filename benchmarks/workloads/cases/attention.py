"""Cases of attention: a causal prefill with grouped heads, and one token over a long cache."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.workloads.case import Case, Problem
from benchmarks.workloads.cases.gemm import START, contraction
from benchmarks.workloads.kernels import kernel

HEADS = (32, 8, 128)  # query heads, key and value heads, and their width, as in Llama 3 8B
SMOKE_HEADS = (4, 2, 32)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return causal attention; each key head serves several query heads."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return the attention of one new token over the cache."""
    return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def folded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return `decode` with the heads that share keys as rows of one query, so that the cache is read once."""
    batch, heads, _, width = q.shape
    rows = q.view(batch, k.shape[1], heads // k.shape[1], width)
    return functional.scaled_dot_product_attention(rows, k, v).view(batch, heads, 1, width)


def by_backend(attention: Callable[..., Any], backend: SDPBackend) -> Callable[..., Any]:
    """Return attention with a given backend of SDPA."""

    def call(*args: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return attention(*args)

    return call


def libraries(device: torch.device, **attentions: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Return each attention with the two libraries that a GPU has."""
    if device.type != "cuda":
        return {}
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    return {
        f"{name}_{library}": by_backend(attention, backend)
        for name, attention in attentions.items()
        for library, backend in backends.items()
    }


def prefill_case(device: torch.device, dtype: torch.dtype, scale: str) -> Problem:
    """Build the prefill of four sequences."""
    batch, length = (4, 4096) if scale == "full" else (1, 40)
    heads, shared, width = HEADS if scale == "full" else SMOKE_HEADS
    q = torch.randn(batch, heads, length, width, device=device, dtype=dtype)
    k, v = torch.randn(2, batch, shared, length, width, device=device, dtype=dtype)
    flops = 4 * batch * heads * length**2 * width / 2  # two products, of which causality needs half
    return Problem(
        causal,
        (q, k, v),
        contraction(flops, read=(q, k, v), written=q.numel(), dtype=dtype),
        {"triton_attention": kernel("attention.attention", device), **libraries(device, sdpa=causal)},
    )


def decode_case(device: torch.device, dtype: torch.dtype, scale: str) -> Problem:
    """Build one step of decoding for 32 sequences."""
    batch, length = (32, 8192) if scale == "full" else (2, 72)
    heads, shared, width = HEADS if scale == "full" else SMOKE_HEADS
    q = torch.randn(batch, heads, 1, width, device=device, dtype=dtype)
    k, v = torch.randn(2, batch, shared, length, width, device=device, dtype=dtype)
    return Problem(
        decode,
        (q, k, v),
        contraction(4 * batch * heads * length * width, read=(q, k, v), written=q.numel(), dtype=dtype),
        {
            "triton_decode": kernel("attention.decode", device),
            "sdpa_folded": folded,
            **libraries(device, sdpa=decode),
        },
    )


CASES: tuple[Case, ...] = (
    Case("sdpa_causal", "attention", prefill_case, suites=START | {"smoke"}, headline=True),
    Case("sdpa_decode", "attention", decode_case, suites=START | {"dev"}),
)
