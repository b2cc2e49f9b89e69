"""Networks that read only a part of their weights per call: a mixture of experts, and embedding tables."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, silu


class MoE(nn.Module):
    """Each token through its `top` SwiGLU experts; shapes are static, whatever the router chooses."""

    def __init__(self, hidden: int, inner: int, experts: int, top: int) -> None:
        super().__init__()
        self.top, self.experts = top, experts
        self.router = nn.Linear(hidden, experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(experts, hidden, 2 * inner) * hidden**-0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, hidden) * inner**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).topk(self.top, dim=-1)
        order = chosen.flatten().argsort(stable=True)  # rows of one expert are adjacent
        ends = (chosen.flatten()[:, None] == torch.arange(self.experts, device=x.device)).sum(0).cumsum(0)
        ends = ends.to(torch.int32)
        gate, up = grouped_mm(x[order // self.top], self.gate_up, offs=ends).chunk(2, dim=-1)
        out = grouped_mm(silu(gate) * up, self.down, offs=ends)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        return (out[back].view(len(x), self.top, -1) * weights.softmax(-1)[..., None]).sum(1)


class Dlrm(nn.Module):
    """Dense features and bags of indices in, one logit per row out; all features interact by dot products."""

    def __init__(
        self, tables: int, rows: int, width: int, dense: int, bottom: Sequence[int], top: Sequence[int]
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = layers(dense, (*bottom, width))
        pairs = torch.tril_indices(tables + 1, tables + 1, offset=-1)
        self.register_buffer("pairs", pairs[0] * (tables + 1) + pairs[1])
        self.top = nn.Sequential(layers(width + pairs.shape[1], top), nn.Linear(top[-1], 1))

    def forward(self, dense: Tensor, bags: Tensor) -> Tensor:
        x = self.bottom(dense)
        features = torch.stack((x, *(table(bag) for table, bag in zip(self.tables, bags, strict=True))), dim=1)
        dots = torch.bmm(features, features.transpose(1, 2)).flatten(1)
        return self.top(torch.cat((x, dots[:, self.pairs]), dim=1))


def layers(width: int, outs: Sequence[int]) -> nn.Sequential:
    """Return linear layers with ReLU after each."""
    widths = zip((width, *outs), outs, strict=False)
    return nn.Sequential(*(module for ends in widths for module in (nn.Linear(*ends), nn.ReLU())))
