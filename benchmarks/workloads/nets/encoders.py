"""Bidirectional transformers: BERT, with its norms after each residual, and ViT, with its norms before."""

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention


class Layer(nn.Module):
    """Attention of all to all and a GELU network."""

    def __init__(self, hidden: int, heads: int, eps: float, *, norm_first: bool) -> None:
        super().__init__()
        self.heads, self.norm_first = heads, norm_first
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden, eps=eps) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for norm, step in zip(self.norms, (self.attend, self.feed), strict=True):
            x = x + step(norm(x)) if self.norm_first else norm(x + step(x))
        return x

    def attend(self, x: Tensor) -> Tensor:
        """Attend with every head."""
        batch, tokens, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind()
        return self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, hidden))

    def feed(self, x: Tensor) -> Tensor:
        """Apply the two linear layers."""
        return self.down(gelu(self.up(x)))


class Bert(nn.Module):
    """Tokens in, hidden states out; nothing is padded."""

    def __init__(self, layers: int, hidden: int, heads: int, vocab: int, length: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocab, hidden), nn.Embedding(length, hidden)
        self.kind = nn.Parameter(torch.randn(hidden))
        self.norm = nn.LayerNorm(hidden, eps=1e-12)
        self.layers = nn.Sequential(*(Layer(hidden, heads, 1e-12, norm_first=False) for _ in range(layers)))

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.positions.weight[: tokens.shape[1]]
        return self.layers(self.norm(self.words(tokens) + places + self.kind))


class ViT(nn.Module):
    """Images in, logits of classes out."""

    def __init__(self, layers: int, hidden: int, heads: int, image: int, patch: int = 16, classes: int = 1000) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, patch, stride=patch)
        self.summary = nn.Parameter(torch.randn(1, 1, hidden) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, hidden) * 0.02)
        self.layers = nn.Sequential(*(Layer(hidden, heads, 1e-6, norm_first=True) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(hidden, eps=1e-6), nn.Linear(hidden, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.summary.expand(len(x), -1, -1), x), dim=1) + self.positions
        return self.head(self.norm(self.layers(x)[:, 0]))
