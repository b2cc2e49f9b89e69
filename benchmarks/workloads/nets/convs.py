"""Convolutional networks: ResNet, and one level of a diffusion model's U-Net."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, relu, scaled_dot_product_attention, silu

# A residual branch of unit gain would double the variance in each of sixteen blocks.
BRANCH_GAIN = 0.25


class Bottleneck(nn.Module):
    """Convolutions of size one, three and one with a shortcut; the middle one has the stride."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.branch = nn.Sequential(
            *conv(channels, width, 1), nn.ReLU(), *conv(width, width, 3, stride), nn.ReLU(), *conv(width, out, 1)
        )
        self.shortcut = (
            nn.Sequential(*conv(channels, out, 1, stride)) if stride > 1 or channels != out else nn.Identity()
        )
        nn.init.constant_(self.branch[-1].weight, BRANCH_GAIN)

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.branch(x) + self.shortcut(x))


def conv(channels: int, out: int, kernel: int, stride: int = 1) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    """Return a convolution that preserves the variance through a ReLU, and its norm."""
    made = nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=False)
    nn.init.kaiming_normal_(made.weight, nonlinearity="relu")
    return made, nn.BatchNorm2d(out)


class ResNet(nn.Module):
    """Images in, logits of classes out; (3, 4, 6, 3) blocks from width 64 are ResNet-50."""

    def __init__(self, blocks: Sequence[int] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(*conv(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        channels, body = width, []
        for stage, count in enumerate(blocks):
            for block in range(count):
                body.append(Bottleneck(channels, width << stage, 2 if stage and not block else 1))
                channels = 4 * (width << stage)
        self.body, self.head = nn.Sequential(*body), nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(self.stem(images)).mean((2, 3)))


class Residual(nn.Module):
    """Two normalized convolutions, with the time step added between them, and a shortcut."""

    def __init__(self, channels: int, out: int, time: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList((nn.GroupNorm(8, channels), nn.GroupNorm(8, out)))
        self.convs = nn.ModuleList((nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)))
        self.time = nn.Linear(time, out)
        self.shortcut = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.convs[0](silu(self.norms[0](x))) + self.time(silu(time))[:, :, None, None]
        return self.shortcut(x) + self.convs[1](silu(self.norms[1](h)))


class Attention(nn.Module):
    """Attention between all pixels of an image."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(8, channels)
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, high, wide = x.shape
        places = self.norm(x).permute(0, 2, 3, 1).reshape(batch, high * wide, channels)
        q, k, v = self.qkv(places).view(batch, high * wide, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind()
        y = self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, high * wide, channels))
        return x + y.view(batch, high, wide, channels).permute(0, 3, 1, 2)


class UNetLevel(nn.Module):
    """Downsampling, attention, and upsampling with a skip connection."""

    def __init__(self, channels: int, heads: int, time: int) -> None:
        super().__init__()
        self.before = Residual(channels, channels, time)
        self.down = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.across, self.attention = Residual(2 * channels, 2 * channels, time), Attention(2 * channels, heads)
        self.up = nn.Conv2d(2 * channels, channels, 3, padding=1)
        self.after = Residual(2 * channels, channels, time)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        kept = self.before(x, time)
        low = self.attention(self.across(self.down(kept), time))
        risen = self.up(interpolate(low, scale_factor=2.0, mode="nearest"))
        return self.after(torch.cat((kept, risen), dim=1), time)
