"""A Llama-shaped decoder: grouped queries, rotary positions, RMSNorm, SwiGLU, and a static cache of keys and values."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder; `cache` is the batch and length of its static cache, None without one."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    length: int
    cache: tuple[int, int] | None = None

    @property
    def head(self) -> int:
        """Channels of one head."""
        return self.hidden // self.heads


class Attention(nn.Module):
    """Causal attention over its input, or of one token over the cache."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.split = (shape.heads, shape.kv_heads, shape.kv_heads)
        self.qkv = nn.Linear(shape.hidden, sum(self.split) * shape.head, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        if shape.cache:
            batch, length = shape.cache
            for name in ("keys", "values"):
                self.register_buffer(name, torch.randn(batch, shape.kv_heads, length, shape.head))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, pos: Tensor | None) -> Tensor:
        batch, tokens, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, -1, self.shape.head).transpose(1, 2).split(self.split, dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = self.causal(q, k, v) if pos is None else self.cached(q, k, v, pos)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, hidden))

    def causal(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend within the given tokens, from position 0, and fill the cache."""
        if self.shape.cache:
            self.keys[:, :, : k.shape[2]] = k
            self.values[:, :, : v.shape[2]] = v
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def cached(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """Write one token into the cache at `pos` and attend to all up to it."""
        self.keys.index_copy_(2, pos, k)
        self.values.index_copy_(2, pos, v)
        seen = torch.arange(self.keys.shape[2], device=pos.device) <= pos
        # The query heads of one key head become the rows of one query: fused kernels support a mask or enable_gqa, not
        # both, and repeating the cache would read it several times.
        rows = q.reshape(q.shape[0], self.shape.kv_heads, -1, self.shape.head)
        return scaled_dot_product_attention(rows, self.keys, self.values, attn_mask=seen.view(1, 1, 1, -1)).view_as(q)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the channels of `x` by the angles of their positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Layer(nn.Module):
    """Attention and a SwiGLU network, each on the normalised residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(shape.hidden, eps=1e-5) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, pos: Tensor | None) -> Tensor:
        x = x + self.attention(self.norms[0](x), cos, sin, pos)
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(silu(gate) * up)


class Decoder(nn.Module):
    """The layers alone: hidden states in, hidden states out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        frequency = 500_000.0 ** -(torch.arange(0, shape.head, 2) / shape.head)
        angle = torch.outer(torch.arange(shape.length), frequency).repeat(1, 2)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, x: Tensor, pos: Tensor | None = None) -> Tensor:
        at = slice(x.shape[1]) if pos is None else pos
        for layer in self.layers:
            x = layer(x, self.cos[at], self.sin[at], pos)
        return x


class Llama(nn.Module):
    """Tokens in, logits of every position out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.decoder = Decoder(shape)
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.decoder(self.embed(tokens))))


class Prefill(Llama):
    """Fills the cache; the next token's logits out."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.decoder(self.embed(tokens))[:, -1]))


class Decode(Llama):
    """One token's embedding and its position in, the next token's logits out.

    The cache belongs to the module, so that CUDA graphs know its address. The position is an argument: the same call
    writes the same row again, so that a call's result depends on no other call. The embedding is an argument since a
    single integer has no other values to be checked with.
    """

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        return self.head(self.norm(self.decoder(x, pos)[:, -1]))


class Loss(Llama):
    """Tokens in, the mean loss of predicting each token from those before it out."""

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens[:, :-1])
        return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
