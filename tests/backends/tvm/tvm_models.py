"""Four small models, each typical of one kind of work."""

from torch import nn


class Block(nn.Module):
    """A transformer block, its attention written out."""

    def __init__(self, width=16):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out((q @ k.transpose(1, 2) / 4).softmax(-1) @ v)
        return x + self.mlp(x)


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 4), nn.Softmax(-1))


def cnn():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 5)
    )
    net[1].running_mean.uniform_()
    net[1].running_var.uniform_(0.5, 2)
    return net


class Pointwise(nn.Module):
    """A chain of pointwise operators and a reduction."""

    def forward(self, x):
        return (x.sigmoid() * x.tanh() + x.exp().log1p()).clamp(-2, 2).div(1.5) - x.erf().mean(-1, keepdim=True)


MODELS = {
    "mlp": (mlp, (3, 8)),
    "cnn": (cnn, (2, 3, 8, 8)),
    "block": (Block, (2, 5, 16)),
    "pointwise": (Pointwise, (4, 9)),
}
