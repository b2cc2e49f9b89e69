"""A selective scan as Mamba-2 computes it: within chunks by matrix products, from chunk to chunk by one more."""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, softplus


def segments(decay: Tensor) -> Tensor:
    """Return exp of the sum of `decay` from after j to i, at [..., i, j], and 0 above the diagonal."""
    total = decay.cumsum(-1)
    above = torch.ones(decay.shape[-1], decay.shape[-1], dtype=torch.bool, device=decay.device).triu(1)
    return (total[..., :, None] - total[..., None, :]).masked_fill(above, float("-inf")).exp()


class Scan(nn.Module):
    """`y_t = C_t · h_t + D x_t` with `h_t = exp(A dt_t) h_(t-1) + dt_t B_t x_t`, each head with a state of its own.

    Source: the minimal listing of the Mamba-2 paper (arXiv 2405.21060), section 6. x is (batch, length, heads,
    channels), dt (batch, length, heads), B and C (batch, length, state), shared by the heads.
    """

    def __init__(self, heads: int, chunk: int) -> None:
        super().__init__()
        self.chunk = chunk
        self.rate = nn.Parameter(torch.rand(heads) * 2)
        self.skip = nn.Parameter(torch.ones(heads))

    def forward(self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
        # Sums of logarithms in float32, since bfloat16 would be off by a tenth after a chunk.
        step = softplus(dt.to(torch.promote_types(dt.dtype, torch.float32)) - 2)
        decay = (-self.rate.exp() * step).transpose(1, 2).unflatten(2, (-1, self.chunk))  # batch, head, chunk, place
        u, b, c = (value.unflatten(1, (-1, self.chunk)) for value in (x * step[..., None].to(x), b, c))
        total = decay.cumsum(-1)
        scores = torch.einsum("bzln,bzsn->bzls", c, b)
        within = torch.einsum("bzls,bhzls,bzshp->bzlhp", scores, segments(decay).to(x), u)
        states = torch.einsum("bzsn,bhzs,bzshp->bzhpn", b, (total[..., -1:] - total).exp().to(x), u)
        passed = segments(pad(total[..., -1], (1, 0)))[..., :-1, 1:].to(x)
        carried = torch.einsum("bhzy,byhpn->bzhpn", passed, states)
        between = torch.einsum("bzln,bzhpn,bhzl->bzlhp", c, carried, total.exp().to(x))
        return (within + between).flatten(1, 2) + x * self.skip[:, None]
